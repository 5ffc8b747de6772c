"""Parts of rows become whole rows, where the number of the column chooses what counts.

`x[:4] += 1` is `torch.cat((x[:4] + 1, x[4:]))`, and that is `torch.where(column < 4, x + 1, x)`.
Placing (`space.py`) cuts a row where joined parts end, into blocks of one size, and each of these
is code of its own. It computes nothing twice, so it is left to do so where the blocks are few.
Where they are too many, each part is computed of whole rows instead: it is *lifted*. Beside its own
columns a lifted part may be anything, because the choice takes nothing from there. So a row that is
lifted to another column, as both parts of `torch.roll` are, may reach beyond its ends (`Op.SHIFT`).

A part that is reduced beside whole rows, as in `x - x[4:2000].mean()`, is lifted too, where a row
would be cut into too many blocks. The reduction takes what changes nothing in all other columns.

A scan is lifted, too, where nothing else places a graph: what counts before its columns, beyond an
end of the row, is reduced.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import accumulate
from math import gcd, inf

import torch

from ...errors import Location
from ...frontend.dtypes import FLOAT8, STORAGE
from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import SCANS, Op, Value, Varies
from ..patterns import NOT_ELEMENTWISE
from .lifted_scans import NEUTRAL, LiftedScans, Span, depending_on_scans, neutral
from .rewrite import TooLong, rewrite

MOST_CHOSEN = 256  # parts of a row; each takes a comparison and a selection of each element
FEW_PIECES = 8  # Rows that are cut into so many are as fast as whole ones (docs/traps.md).


def choose_by_column(graph: Graph, scans: bool = False, nodes: float = inf) -> Graph:
    """The graph without joins that cut rows into too many pieces, where parts can be lifted.

    scans: whether scans are lifted, too, and parts of what is computed of them; without any it is
        the graph itself.
    nodes: how many may be added for what is lifted. Raises TooLong where there are more: parts that
        are joined of parts, again and again, are lifted for each of the columns that are read.
    """
    of_scans = depending_on_scans(graph) if scans else frozenset()
    if not of_scans and (scans or not any([_is_cut(graph, node) for node in graph])):
        return graph
    rule = _Rule(graph, of_scans)
    rule.read = rule.read_by_others(nodes)
    found = rewrite(graph, rule)
    return rewrite(found) if rule.has_found else graph  # without the parts that nobody reads now


def reduce_by_column(graph: Graph) -> Graph:
    """The graph whose reductions of parts of rows take whole rows, where the parts can be lifted.

    It reads more than a part, so it is for rows that would be cut into many pieces.
    """
    rule = _Reducing(graph)
    found = rewrite(graph, rule)
    return rewrite(found) if rule.has_found else graph  # without the parts that nobody reads now


def _is_cut(graph: Graph, node: Node) -> bool:
    """Whether placing would cut a row that is joined here into too many pieces."""
    if node.op is not Op.CAT or len(node.value.inner) > 1 or len(node.inputs) > MOST_CHOSEN:
        return False
    return node.value.inner[0] // gcd(*_ends(graph, node)) > FEW_PIECES


def _is_like(found: Value, value: Value) -> bool:
    """Whether a value may take the place of another one, but for what it varies with.

    Integers of 8 bits are stored as what they are, whether or not that is declared.
    """
    stored = value.stored if value.dtype in STORAGE else found.stored
    return replace(found, varies=value.varies, stored=stored) == value


def _ends(graph: Graph, node: Node, start: int = 0) -> Iterator[int]:
    """Where the parts of a row end that are joined here, and those that are parts of these."""
    for i in node.inputs:
        part = graph[i]
        if part.op is Op.CAT:
            yield from _ends(graph, part, start)
        start += part.value.inner[0]
        yield start


def _is_read_across(graph: Graph, node: Node) -> bool:
    """Whether something reads more of a joined row than one part of it."""
    ends = [*accumulate(graph[i].value.inner[0] for i in node.inputs)]
    for reader in (graph[id] for id in graph.readers[node.id]):
        if reader.id == node.id or reader.op is not Op.SLICE:
            return True
        _, start, step, size = reader.arg
        if any([start < end <= start + (size - 1) * step for end in ends]):
            return True
    return False


class _Rule:
    """The rule of the rewriting.

    ids: those of the new graph, of the nodes that have been read.
    read: the nodes that are still read once all is lifted that can be.
    of_scans: the rows that are computed of scans, if these are lifted.
    """

    def __init__(self, graph: Graph, of_scans: frozenset[int] = frozenset()):
        self.graph, self.of_scans, self.has_found = graph, of_scans, False
        self.ids: dict[int, int] = {}
        self.read: frozenset[int] = frozenset()

    def __call__(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        self.ids.update(zip(node.inputs, inputs, strict=True))
        if node.id not in self.read or not self._may_be_lifted(node):
            return None
        found = self._lifted(node, new, self.ids)
        self.has_found |= found is not None
        return found

    def _may_be_lifted(self, node: Node) -> bool:
        """Whether it is a part of a row, or a joined row, that is to be lifted if it can be."""
        if node.op is Op.SLICE:
            return node.id in self.of_scans
        return _is_cut(self.graph, node) and _is_read_across(self.graph, node)

    def _lifted(
        self, node: Node, new: Builder, ids: dict[int, int], most: float = inf
    ) -> int | None:
        (n,) = node.value.inner
        lifting = _Lifting(self.graph, new, ids, n, scans=bool(self.of_scans), most=most)
        found = lifting.part(node) if node.op is Op.SLICE else lifting.chosen(node, 0, (0, n))
        return found if found is not None and _is_like(new[found].value, node.value) else None

    def read_by_others(self, nodes: float) -> frozenset[int]:
        """The nodes that are read when all that can be lifted is, found from the results back.

        What is lifted reaches through what it is computed of. So where rows are joined of parts of
        joined rows, again and again, only the last ones are to be lifted, and not all of them.

        nodes: how many may be added for that; TooLong is raised where there are more.
        """
        new, found = Builder.after(self.graph, self.graph.name), {o.id for o in self.graph.outputs}
        for node in reversed(self.graph.nodes):
            if node.id not in found:
                continue
            ids, most = _Noted(), len(self.graph) + nodes
            is_lifted = self._may_be_lifted(node)
            is_lifted = is_lifted and self._lifted(node, new, ids, most) is not None
            found.update(ids if is_lifted else node.inputs)
        return frozenset(found)


class _Noted(dict[int, int]):
    """The ids of a graph as they are. Its keys are those that were asked for."""

    def __missing__(self, id: int) -> int:
        self[id] = id
        return id


class _Reducing(_Rule):
    """The rule of `reduce_by_column`.

    liftings: by the length of a row, so that what several reductions read is lifted once.
    lifted: of each row of memory, the columns that it was lifted to, and how long the rows are that
        have these columns.
    """

    def __init__(self, graph: Graph):
        super().__init__(graph)
        self.liftings: dict[int, _Lifting] = {}
        shifts = [node for node in graph if node.op is Op.SHIFT]
        self.lifted: dict[int, list[tuple[int, int]]] = {}
        for node in shifts:
            start, n = node.arg
            self.lifted.setdefault(node.inputs[0], []).append((-start, n))

    def __call__(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        self.ids.update(zip(node.inputs, inputs, strict=True))
        if node.op not in NEUTRAL:
            return None
        part = self.graph[node.inputs[0]]
        taken = self._taken(part)
        if taken is None:
            return None
        start, n = taken
        lifting = self.liftings.setdefault(n, _Lifting(self.graph, new, self.ids, n))
        end = start + part.value.inner[0]
        found = lifting.reduced(node, start, end)
        if found is None or not _is_like(new[found].value, node.value):
            return None
        self.has_found = True
        return found

    def _taken(self, part: Node) -> tuple[int, int] | None:
        """Where in a longer row a part begins, and how long the row is; None if it is no part.

        A row that was lifted to a longer one, in which all of it lies, counts as a part of that.
        """
        size, start = part.value.inner[-1:], 0
        opaque = NOT_ELEMENTWISE - {Op.SLICE}
        while len(part.value.inner) == 1 and part.op not in opaque:
            operands = [self.graph[i] for i in part.inputs]
            if part.op is Op.SLICE:
                _, first, step, _ = part.arg
                start += first
                if step != 1:
                    return None
            else:
                operands = [each for each in operands if each.value.inner == part.value.inner]
            if not operands:
                break
            part = next((each for each in operands if each.op is Op.SLICE), operands[0])
        is_part = len(part.value.inner) == 1 and part.value.inner != size
        if is_part:
            return start, *part.value.inner
        for column, n in self.lifted.get(part.id, ()):
            if column >= 0 and column + part.value.inner[-1] <= n:
                return column, n
        return None


class _Lifting(LiftedScans):
    """Lifts the parts of one row of n elements.

    A node is lifted to a column if its first element is in that column of the result, the second
    one in the next, and so on. The span has the columns of it that are read. A result is None where
    a node cannot be lifted there; one element for all columns will do as well as a row.

    most: how many nodes `new` may have; TooLong is raised where there are more.
    """

    def __init__(
        self, graph: Graph, new: Builder, ids: dict[int, int], n: int, scans: bool = False,
        most: float = inf,
    ):  # fmt: skip
        self.graph, self.new, self.ids, self.n, self.scans = graph, new, ids, n, scans
        self.most = most
        self.known: dict[tuple[int, int, Span], int | None] = {}
        self.loc: Location | None = None  # of what is made of the parts

    def chosen(self, node: Node, column: int, span: Span) -> int | None:
        """What is joined, as a choice among the parts that the span has columns of."""
        dtype = node.value.dtype
        if dtype in FLOAT8:  # torch.where takes none of these
            return None
        self.loc = node.loc
        parts: list[tuple[int, int]] = []  # where each one ends, and its node
        end = column
        for i in node.inputs:
            start, end = end, end + self.graph[i].value.inner[0]
            if end <= span[0] or span[1] <= start:
                continue
            part = self._lifted(i, start, (max(start, span[0]), min(end, span[1])))
            if part is None:
                return None
            if dtype in STORAGE:  # integers of 8 bits are chosen among as wider ones
                part = self.new.add(Op.CAST, (part,), torch.int32, node.loc)
            if parts and parts[-1][1] == part:
                parts.pop()
            parts.append((end, part))
        _, found = parts.pop()
        for end, part in reversed(parts):
            is_part = self.new.add(Op.LT, (self._index(), self._number(end)), loc=node.loc)
            found = self.new.add(Op.WHERE, (is_part, part, found), loc=node.loc)
        return self.new.add(Op.CAST, (found,), dtype, node.loc) if dtype in STORAGE else found

    def part(self, node: Node) -> int | None:
        """A part of a row, as a row."""
        self.loc = node.loc
        _, start, _, _ = node.arg
        return self._lifted(node.inputs[0], -start, (0, self.n))

    def reduced(self, node: Node, start: int, end: int) -> int | None:
        """A reduction of what is lifted to the columns from `start` to `end`."""
        self.loc, dtype = node.loc, self.graph[node.inputs[0]].value.dtype
        lifted = self._lifted(node.inputs[0], start, (start, end))
        if lifted is None or dtype in STORAGE or not self.new[lifted].value.spread:
            return None
        if node.op is Op.MEAN:
            return self._mean(node, lifted, start, end)
        part = self._there(lifted, start, end, neutral(node.op, dtype), dtype, node)
        rest = [self.ids[i] for i in node.inputs[1:]]
        return self.new.add(node.op, (part, *rest), node.arg, node.loc)

    def _there(
        self, lifted: int, start: int, end: int, beside: object, dtype: torch.dtype, node: Node
    ) -> int:
        """A row in the columns from `start` to `end`, and a number in all others."""
        for op, column in ((Op.GE, start), (Op.LT, end)):
            if 0 < column < self.n:
                is_there = self.new.add(op, (self._index(), self._number(column)), loc=node.loc)
                number = self._number(beside, dtype)
                lifted = self.new.add(Op.WHERE, (is_there, lifted, number), loc=node.loc)
        return lifted

    def _mean(self, node: Node, lifted: int, start: int, end: int) -> int:
        """The mean of a part, from that of the row with zeros beside it.

        What rounding has lost is added, so that of equal elements it is exactly that element. Of
        infinities nothing is lost.
        """
        new, loc, dtype = self.new, node.loc, node.value.dtype
        share = self._number(self.n / (end - start), dtype)

        def mean(row: int) -> int:
            part = self._there(row, start, end, 0.0, dtype, node)
            of_row = new.add(Op.MEAN, (part,), node.arg, loc)
            return new.add(Op.MUL, (of_row, share), loc=loc)

        rough = mean(lifted)
        lost = mean(new.add(Op.SUB, (lifted, rough), loc=loc))
        nothing = new.add(Op.SUB, (rough, rough), loc=loc)
        is_finite = new.add(Op.EQ, (nothing, self._number(0.0, dtype)), loc=loc)
        exact = new.add(Op.ADD, (rough, lost), loc=loc)
        return new.add(Op.WHERE, (is_finite, exact, rough), loc=loc)

    def _lifted(self, id: int, column: int, span: Span) -> int | None:
        key = id, column, span
        if key not in self.known:
            if len(self.new) > self.most:
                raise TooLong
            node = self.graph[id]
            found = self._lifted_node(node, column, span)
            # One element, whatever it is computed of, is repeated in all columns.
            is_one = found is None and node.value.inner == (1,)
            self.known[key] = self.ids[id] if is_one else found
        return self.known[key]

    def _lifted_node(self, node: Node, column: int, span: Span) -> int | None:
        op, new, inner = node.op, self.new, node.value.inner
        if len(inner) != 1:
            return None
        if inner == (self.n,) and column == 0:
            found = self.chosen(node, column, span) if _is_cut(self.graph, node) else None
            return self.ids[node.id] if found is None else found
        if op is Op.INPUT and self.graph.multiple is None:
            return new.add(Op.SHIFT, (self.ids[node.id],), (-column, self.n), self.loc)
        if op is Op.CONST:
            return new.add_const(node.arg, replace(node.value, inner=(1,), spread=False), node.loc)
        if op is Op.INDEX:
            index = self._index(node.value.dtype)
            first = self._number(column, node.value.dtype)
            return new.add(Op.SUB, (index, first), loc=node.loc) if column else index
        if op is Op.SLICE:
            _, start, step, _ = node.arg
            return self._lifted(node.inputs[0], column - start, span) if step == 1 else None
        if op is Op.EXPAND:
            return self._expanded(node, column, span)
        if op is Op.CAT:
            return self.chosen(node, column, span)
        if op in SCANS and self.scans:
            return self._scan(node, column, span)
        return None if op in NOT_ELEMENTWISE else self._computed(node, column, span)

    def _expanded(self, node: Node, column: int, span: Span) -> int | None:
        (operand,) = node.inputs
        shape = self.graph[operand].value.inner
        if shape == node.value.inner:
            return self._lifted(operand, column, span)
        return self.new.add(Op.RESHAPE, (self.ids[operand],), (1,), node.loc)

    def _computed(self, node: Node, column: int, span: Span) -> int | None:
        """An elementwise operation; an operand in another shape is one element for all columns."""
        operands = []
        for i in node.inputs:
            is_part = self.graph[i].value.inner == node.value.inner
            operands.append(self._lifted(i, column, span) if is_part else self.ids[i])
        return None if None in operands else self.new.add(node.op, operands, node.arg, node.loc)

    def _index(self, dtype: torch.dtype = torch.int64) -> int:
        return self.new.add_index(self.n, dtype)

    def _number(self, number: object, dtype: torch.dtype = torch.int64) -> int:
        return self.new.add_const(number, Value((), Varies.SCALAR, dtype))

"""Places a traced graph on one row: values of any shape become rows of n elements, or numbers.

A traced value may have several axes, and parts of a row may be taken and joined. In a placed graph
there is one axis of n columns and no movement: every value is a row of n elements, or one number of
the row. A value becomes one or more pieces, each of them a node: the halves of a row are two, and a
stack of four rows is four. A leaf and an output have a `View`, which says where in the tensor the
elements of the piece lie.

The pass works by demand, from the outputs. What is wanted of a node is one `Index` for each of its
axes: a number, plus the columns times a step. A movement changes the index and wants its operand at
that. Where an index reaches over an end of a joined part, and where an axis is not the columns, the
axis is *written out*: cut into blocks, each of which is wanted by itself. A request to do so is
remembered, and the pass begins anew, as far as it has to (`anew.py`). It ends, because axes only
become shorter.

Two axes may be the columns together: then the row is in groups of neighbours, and the inner axis
counts those of a group. A value of each group is a row too, whose columns are equal in each group.
Groups are of a power of two of elements, so that neighbouring lanes of a warp have each of them.
Where that cannot be, the pass begins anew without groups, and the outer axis is written out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise
from math import gcd, inf, prod
from typing import NoReturn

from ...errors import UnsupportedError
from ...frontend.graph import Graph, Node, Output, Role
from ...frontend.ops import COLLECTIVES, COMPARISONS, MOVEMENTS, REDUCTIONS, SCANS, Op
from .along import Along
from .anew import Anew
from .apart import Apart
from .axes import (
    Axis,
    Groups,
    Index,
    Refine,
    Ungrouped,
    Wanted,
    axes_of,
    moved_along,
    reshaped,
    row_chosen,
)
from .choosing import BEYOND, Choosing, Widened
from .collectives import MOST_PIECES, Collectives
from .placed import Placed, built
from .rewrite import TooLong

LEAST_COLUMNS = 8  # A piece of fewer elements takes more than one access for 16 bytes.
APART = (  # what helps where an axis would be cut into too many pieces
    "pass and return the parts by themselves (x[:, :n] and x[:, n:] are views, of out= too), and "
    "groups as rows (x.unflatten(-1, (groups, -1))); of every k-th element write a mask, "
    "torch.where(torch.arange(n) % k == 0, x, 0.0), and pad a result that is shorter than the row, "
    "F.pad(x.diff(), (0, 1))"
)
PADDED = (  # what helps where these would be all pairs of elements
    "pass rows that are padded to a power of two of elements, at most 128, or 64 where a gradient "
    "is asked for, and mask the pairs that are none"
)


def has_pairs(graph: Graph, elements: int) -> bool:
    """Whether something is computed of all pairs of so many elements."""
    return any([node.value.inner[-2:] == (elements, elements) for node in graph])


def place(
    graph: Graph, in_groups: bool = True, most: int = MOST_PIECES, by_use: bool = False,
    apart: bool = False, chosen: bool = False, nodes: int | None = None,
) -> Graph:  # fmt: skip
    """The placed graph of a traced one; itself if it is placed.

    in_groups: whether the columns may be groups of neighbours.
    most: into how many pieces an axis may be cut.
    by_use: a reduction of one of several axes goes along the columns only where its result is
        wanted as numbers. Where it is wanted as a row, what is reduced is written out.
    apart: results are cut where parts of them end, and a few elements that an axis has more than
        there are columns are reduced one by one.
    chosen: joined rows are not cut, but their parts chosen by the column.
    nodes: how many the placed graph may have.

    Raises UnsupportedError, with the user's line, where rows are cut into too many pieces, and
    TooLong where there are too many nodes.
    """
    if _is_placed(graph):
        return graph
    if in_groups:  # what is refused in groups too is told by the pass without them
        with suppress(Ungrouped, UnsupportedError):
            return _Placing(graph, in_groups, most, by_use, apart, chosen, nodes).result()
    return _Placing(graph, False, most, by_use, apart, chosen, nodes).result()


def place_whole(graph: Graph, in_groups: bool) -> tuple[Graph, bool]:
    """What `place` gives where the longest axis is whole, and whether that changes nothing."""
    is_same = True
    for groups in (True, False) if in_groups else (False,):
        placing = _Placing(graph, groups, MOST_PIECES, False, False, whole=True)
        try:
            found = placing.result()
        except (Ungrouped, UnsupportedError):
            if not groups:
                raise
            is_same = not placing.is_longer
        else:
            return found, is_same and not placing.is_longer
    raise AssertionError("rows without groups are placed or refused")


def _is_placed(graph: Graph) -> bool:
    """Whether there are only rows of n elements and numbers, one row at least, and no movement."""
    rows = [i for i in graph.inputs if i.role is Role.ROW]
    if not rows and not any(o.is_row and o.over is None for o in graph.outputs):
        return False
    tables = {i.id for i in graph.inputs if i.role is Role.TABLE}
    for node in graph:
        v = node.value
        if node.id in tables:
            continue
        if v.inner != (graph.n,) if v.spread else v.inner not in ((), (1,)):
            return False
        if node.op in COLLECTIVES and node.arg is not None:
            return False
        of_row = any(graph[i].value.spread for i in node.inputs)
        if node.op in (Op.TAKE, Op.GATHER):
            return False
        if node.op is Op.LOOKUP and node.inputs[0] not in tables:
            return False
        if node.op in MOVEMENTS and (node.op is not Op.RESHAPE or of_row):
            return False
    return True


class _Placing(Collectives, Apart, Choosing, Along, Anew):
    """One pass over a graph.

    whole: the longest axis is not cut into pieces as long as a shorter one, which is written out.
    is_longer: whether the columns are more for that than they would be.
    """

    def __init__(
        self, graph: Graph, in_groups: bool, most: int, by_use: bool, apart: bool,
        chosen: bool = False, nodes: int | None = None, whole: bool = False,
    ):  # fmt: skip
        self.graph, self.in_groups, self.most, self.by_use = graph, in_groups, most, by_use
        self.apart, self.chosen, self.whole, self.widened = apart, chosen, whole, {}
        self.most_nodes, self.is_longer = inf if nodes is None else nodes, False
        self.groups: Groups | None = None
        # For each axis its factors, the outer ones first: how many elements, and whether they are
        # columns. The others are written out.
        self.factors: dict[tuple, list[tuple[int, bool]]] = {}
        # For each reduction where the parts end that are reduced by themselves, and for each output
        # of one axis those that are stored by themselves.
        self.ends: dict[int, list[int]] = {}
        self.stored: dict[int, list[int]] = {}

    def result(self) -> Graph:
        while True:
            self._begin()
            try:
                pieces = [self._pieces_of(k, out) for k, out in enumerate(self.graph.outputs)]
                self._cut_scans_alike()
                n = self._columns()
            except Widened:
                continue
            except Refine as request:
                with suppress(Widened):
                    self._refine(request)
                continue
            return built(self.graph, self.nodes, pieces, n, self.groups)

    # What is wanted

    def _pieces_of(self, k: int, output: Output) -> list[tuple[int, Wanted]]:
        return self._cutting(("out", k), lambda: list(self._pieces(k, output)))

    def _pieces(self, k: int, output: Output) -> Iterator[tuple[int, Wanted]]:
        """The pieces of an output: the node of each, and where in the output it lies."""
        if k in self.stored:
            for part, (start, end) in enumerate(pairwise([0, *self.stored[k], *output.inner])):
                for index, axes in self._blocks(("out", k, part), end - start):
                    self._note(tuple(axes))
                    wanted = (Index(start).plus(index),)
                    yield self._want(output.id, wanted), wanted
            return
        each = []
        for d, size in enumerate(output.inner):
            columns = self.widened.get(("out", k, d), size)
            each.append(list(self._blocks(("out", k, d), columns)))
        for blocks in itertools.product(*each):
            wanted = tuple(index for index, _ in blocks)
            self._note(tuple(axis for _, axes in blocks for axis in axes))
            yield self._want(output.id, wanted), wanted

    def _blocks(self, key: tuple, size: int) -> Iterator[tuple[Index, list[Axis]]]:
        """Each block of an axis that is written out, and the axes of columns in it."""
        factors = self.factors.setdefault(key, [(size, size > 1)])
        steps = [prod(size for size, _ in factors[k + 1 :]) for k in range(len(factors))]
        columns, written = [], []
        for k, (size, is_column) in enumerate(factors):
            if is_column:
                columns.append((Axis(key, k, size), steps[k]))
            else:
                written.append([block * steps[k] for block in range(size)])
        for starts in itertools.product(*written):
            yield Index(sum(starts), tuple(sorted(columns))), [axis for axis, _ in columns]

    def _note(self, axes: tuple[Axis, ...]) -> None:
        if axes:
            self.stacks[axes] = None

    def _want(self, id: int, wanted: Wanted) -> int:
        """The place in `nodes` of what is wanted of a node of the traced graph."""
        key = id, wanted
        if key not in self.known:
            self.known[key] = self._lowered(self.graph[id], wanted)
        return self.known[key]

    def _lowered(self, node: Node, wanted: Wanted) -> int:
        op, arg, inputs = node.op, node.arg, node.inputs
        if self.chosen and (op is Op.INPUT or op in SCANS):
            self._refuse_beyond(node, wanted)
        if self.chosen and op is Op.INPUT:
            wanted = self._only_there(node, wanted)
        if op is Op.INPUT and (chosen := row_chosen(wanted)) is not None:
            table = self._add(Placed(op, (), arg, axes_of(wanted), node, wanted))
            _, axis, _ = chosen
            found = table, self._want(axis.key[1], ())
            return self._add(Placed(Op.LOOKUP, found, None, axes_of(wanted), self.lookups[axis]))
        if op in (Op.INPUT, Op.INDEX) or (op is Op.CONST and node.value.spread):
            return self._add(Placed(op, (), arg, axes_of(wanted), node, wanted))
        if op is Op.CONST:
            return self._add(Placed(op, (), arg, (), node))
        if op in REDUCTIONS:
            return self._reduced(node, wanted)
        if op in SCANS:
            return self._scanned(node, wanted)
        if op is Op.KTHVALUE:
            return self._of_rank(node, wanted)
        if op is Op.TAKE:
            leaf = self.graph[inputs[0]]
            row = self._add(Placed(Op.INPUT, (), leaf.arg, (), leaf))
            return self._add(Placed(op, (row, self._want(inputs[1], ())), arg, (), node))
        if op is Op.GATHER:
            leaf, of_index = self.graph[inputs[0]], self.graph[inputs[1]]
            row = self._add(Placed(Op.INPUT, (), leaf.arg, (), leaf))
            index = self._want(inputs[1], wanted)
            if self.nodes[index].axes:
                return self._computed(op, (row, index), arg, node)
            ends = (Op.MAXIMUM, 0), (Op.MINIMUM, leaf.value.inner[-1] - 1)
            for end, number in ends:  # one element, whose index has to be in the row
                limit = self._add(Placed(Op.CONST, (), number, (), of_index))
                index = self._computed(end, (index, limit), None, of_index)
            return self._add(Placed(Op.TAKE, (row, index), None, (), node))
        if op is Op.LOOKUP:
            axis = Axis(("index", inputs[1], 0), 0, self.graph[inputs[0]].value.inner[0])
            self.lookups.setdefault(axis, node)
            return self._want(inputs[0], (Index(0, ((axis, 1),)), *wanted))
        if op not in MOVEMENTS or op is Op.EXPAND:
            found = tuple(self._want(i, self._broadcast(i, wanted)) for i in inputs)
            return found[0] if op is Op.EXPAND else self._computed(op, found, arg, node)
        if op is Op.SLICE:
            axis, start, step, _ = arg
            return self._want(inputs[0], moved_along(wanted, axis, wanted[axis].times(step), start))
        if op is Op.SHIFT:
            return self._want(inputs[0], moved_along(wanted, -1, wanted[-1], arg[0]))
        if op is Op.PERMUTE:
            order = sorted(range(-len(arg), 0), key=lambda axis: arg[axis])
            return self._want(inputs[0], tuple(wanted[axis] for axis in order))
        if op is Op.CAT:
            return self._joined(node, wanted)
        old = self.graph[inputs[0]].value.inner
        return self._want(inputs[0], reshaped(wanted, node, old))

    def _broadcast(self, id: int, wanted: Wanted) -> Wanted:
        """What is wanted of an operand: an axis of size 1 has one element."""
        shape = self.graph[id].value.inner
        behind = wanted[len(wanted) - len(shape) :]
        return tuple(Index(0) if n == 1 else i for n, i in zip(shape, behind, strict=True))

    def _joined(self, node: Node, wanted: Wanted) -> int:
        """The operand whose part holds all that is wanted."""
        index, axis = wanted[node.arg], node.arg
        sizes = [self.graph[i].value.inner[axis] for i in node.inputs]
        ends = [*itertools.accumulate(sizes)]
        for i, size, end in zip(node.inputs, sizes, ends, strict=True):
            if end - size <= index.start and index.last < end:
                return self._want(i, moved_along(wanted, axis, index, size - end))
        if self.chosen and (found := self._chosen_part(node, wanted, ends)) is not None:
            return found
        if index.start < 0 or index.last >= ends[-1]:  # of columns beyond the elements of an axis
            raise UnsupportedError(BEYOND, node.loc)
        # It reaches over an end: the longest of its axes is cut there.
        longest, step = max(index.steps, key=lambda each: each[1] * (each[0].size - 1))
        rest = index.last - index.start - step * (longest.size - 1)  # what the other axes add
        edges = {e for end in ends[:-1] for e in (end - index.start, end - index.start - rest)}
        places = sorted(p for p in {-(-edge // step) for edge in edges} if 0 < p < longest.size)
        size, ends = gcd(longest.size, *places), () if rest else tuple(places)
        raise Refine(longest, size, ends=ends, asking=node)

    def _computed(self, op: Op, inputs: tuple[int, ...], arg: object, node: Node) -> int:
        axes = {axis for i in inputs for axis in self.nodes[i].axes}
        return self._add(Placed(op, tuple(inputs), arg, tuple(sorted(axes)), node))

    def _add(self, placed: Placed) -> int:
        key = placed.op, placed.inputs, repr(placed.arg), placed.axes, placed.view, placed.inside
        if placed.op is Op.CONST:
            key = (*key, placed.of.value.dtype, placed.of.value.stored)
        if key not in self.known:
            if len(self.nodes) >= self.most_nodes:
                raise TooLong
            self.known[key] = len(self.nodes)
            self.nodes.append(placed)
        return self.known[key]

    # The columns

    def _columns(self) -> int:
        """How many columns there are, if all axes agree. Raises Refine if they do not."""
        stacks = sorted(self.stacks)
        if self.in_groups and any([len(stack) > 1 for stack in stacks]):
            self.groups = self._in_groups(stacks)
            return self.groups.count * self.groups.size
        for stack in stacks:
            if len(stack) > 1:
                # The outer axis is written out, because neighbours are columns then, unless it is
                # longer than the inner one.
                outer, inner = stack[0].size, stack[-1].size
                fits = outer <= min(self.most, inner) and inner >= LEAST_COLUMNS
                shortest = min(stack, key=lambda axis: (axis.size, axis))
                self._write_out(self._of_no_row(stack) or (stack[0] if fits else shortest), stack)
        axes = [axis for (axis,) in stacks]
        if self.graph.multiple is not None:  # the columns are the row of any length, read or not
            for axis in axes:
                if axis.size != self.graph.n:
                    raise Refine(axis, 1)
            return self.graph.n
        if len({axis.size for axis in axes}) <= 1:
            return max([axis.size for axis in axes], default=1)
        if self.chosen:
            self._widen(axes, max([axis.size for axis in axes]))
        if self.apart and (request := self._few_more(axes)) is not None:
            raise request
        # Columns are axes along which neighbours lie near each other in memory, and others that are
        # too long to be written out.
        along = self._along_memory() or {*axes}
        sizes = {axis.size for axis in axes if axis in along or axis.size > self.most}
        sizes = sizes or {axis.size for axis in axes}  # those along memory are written out
        longest = max(sizes)
        n = most = gcd(*(size for size in sizes if size > self.most or size == longest))
        for size in sorted(sizes, reverse=True):
            if n % size == 0 and n // size <= self.most and size >= LEAST_COLUMNS:
                n = size
        if self.whole:
            self.is_longer, n = self.is_longer or n != most, most
        for axis in axes:
            if axis.size != n:
                raise Refine(axis, 1) if axis.size % n else self._shorter(axis, n)
        raise AssertionError(f"axes of {sizes} columns agree")

    def _in_groups(self, stacks: list[tuple[Axis, ...]]) -> Groups:
        """The groups of the columns. Raises Ungrouped where there can be none, or Refine."""
        for stack in stacks:
            if len(stack) > 2:
                self._write_out(self._of_no_row(stack) or stack[0], stack)
        pairs = [stack for stack in stacks if len(stack) == 2]
        sizes = sorted({last.size for _, last in pairs}, reverse=True)

        def most_pieces(size: int) -> int:
            """Longer axes would be cut into groups of this size, and shorter ones written out."""
            return max([each // size if each >= size else each for each in sizes])

        size = min(sizes, key=most_pieces)
        for _, last in pairs:
            if last.size < size:
                raise Refine(last, 1)
            if last.size % size == 0 and last.size > size:
                raise self._shorter(last, size)
        outer, inner = (frozenset(axes) for axes in zip(*pairs, strict=True))
        counts = {axis.size for axis in outer}
        if len(counts) > 1 or any([axis.size != size for axis in inner]) or outer & inner:
            raise Ungrouped
        if size & (size - 1) or inner & self._across_memory() or not inner & self._along_memory():
            raise Ungrouped
        (count,) = counts
        n = count * size
        lone = {stack[0] for stack in stacks if len(stack) == 1 and stack[0].size == count != n}
        groups = Groups(size, count, outer | (lone - inner), inner)
        for axis in (axis for stack in stacks for axis in stack):
            if axis not in groups.outer | inner and axis.size != n:
                if self.chosen:
                    self._widen([axis], n)
                if axis.size % n:
                    raise Ungrouped
                raise self._shorter(axis, n)
        return groups

    def _write_out(self, cut: Axis, stack: tuple[Axis, ...]) -> NoReturn:
        """Raise Refine for one of several axes that would be columns together."""
        raise Refine(cut, 1, columns=prod([axis.size for axis in stack if axis != cut]))

    def _refuse_many(self, node: Node, elements: int, size: int, columns: int = 1) -> None:
        """Raise UnsupportedError where an axis would be cut into too many pieces.

        columns: how many elements a piece has along other axes.
        """
        pieces, each = elements // size, size * columns
        if pieces <= self.most:
            return
        ends, remedy = "", PADDED if has_pairs(self.graph, elements) else APART
        if (compared := self._compared(elements)) is not None:
            each_of, edges = compared
            remedy = (f"each of {each_of} is compared with each of {edges}; take {self.most} of "
                      f"these at a time and join what comes of each, as torch.bucketize(x, "
                      f"edges[:{self.most}]) + torch.bucketize(x, edges[{self.most}:]) for "
                      "torch.bucketize(x, edges)")  # fmt: skip
        if (rolled := self._rolled(node)) is not None:
            ends = " whose ends change places, as in torch.roll,"
            remedy = f"pass {rolled} as an argument"
        raise UnsupportedError(
            f"an axis of {elements} elements{ends} would be cut into {pieces} pieces of {each} "
            f"element{'s' * (each > 1)}, at most {self.most} are written out: {remedy}",
            node.loc,
        )

    def _compared(self, elements: int) -> tuple[int, int] | None:
        """The sizes of two axes, of which one has so many elements, that are compared in pairs."""
        for node in self.graph:
            shapes = sorted([each.value.inner[-2:] for each in self.graph.operands(node)], key=len)
            if node.op not in COMPARISONS or list(map(len, shapes)) != [1, 2]:
                continue
            (edges,), (each_of, one) = shapes
            if one == 1 and elements in (each_of, edges) and 1 not in (each_of, edges):
                return (each_of, edges) if each_of != edges else None
        return None

    def _rolled(self, node: Node) -> str | None:
        """How torch writes the join of the two parts of an axis, the last one first; else None."""
        parts = self.graph.operands(node) if node.op is Op.CAT else ()
        if len(parts) != 2 or {each.op for each in parts} != {Op.SLICE}:
            return None
        (axis, start, step, size), (other, begin, stride, first) = (each.arg for each in parts)
        is_whole = begin == 0 and start == first and axis == other == node.arg
        if parts[0].inputs != parts[1].inputs or not is_whole or (step, stride) != (1, 1):
            return None
        return f"x.roll({size if size < first else -first}, {axis})"

    def _refine(self, request: Refine) -> None:
        axis, size = request.axis, request.size
        what, k, _ = axis.key
        if axis.is_index:
            lookup = self.lookups[axis]
            raise UnsupportedError(
                f"an index of {axis.size} parts that lie across the rows of a table: "
                f"{self._passed_flat(lookup)}look up a row first, and take parts of it",
                lookup.loc,
            )
        if self.chosen and request.whole:  # groups of a row that ends inside of the last one
            self._widen([axis], -(-axis.size // request.whole) * request.whole)
        factors = self.factors[axis.key]
        before = [*factors]
        is_whole = what == "reduced" and factors == [(axis.size, True)]
        if is_whole and request.ends and axis.size // size > self.most:
            self._reduce_apart(axis, request.ends)
            return
        is_row = what == "out" and len(self.graph.outputs[k].inner) == 1
        is_row = is_row and factors == [(axis.size, True)]
        if self.apart and is_row and request.ends and self._store_apart(axis, request.ends):
            return
        node = self.graph[self.graph.outputs[k].id if what == "out" else k]
        if not request.is_split:
            self._refuse_many(request.asking or node, axis.size, size, request.columns)
        cut = [(axis.size // size, request.is_split), (size, True)]
        cut = cut[::-1] if request.lies_between else cut
        factors[axis.place : axis.place + 1] = cut
        factors[:] = [each for each in factors if each[0] > 1] or [(1, False)]
        if factors == before:  # The pass would begin anew for ever.
            raise UnsupportedError(BEYOND, node.loc)

    def _passed_flat(self, lookup: Node) -> str:
        """How a table is passed whose axes a function has joined or cut; empty if it did more."""
        table = given = self.graph[lookup.inputs[0]]
        while given.op is Op.RESHAPE:
            given = self.graph[given.inputs[0]]
        if given.op is not Op.INPUT:
            return ""
        shape, rest = given.value.inner, table.value.inner[1:]
        joined = len(shape) - len(rest) - 1
        view = f"flatten(0, {joined})" if shape[joined + 1 :] == rest else f"view{(-1, *rest)}"
        return f"pass {given.arg}.{view} to the call for {given.arg}, and index that, or "

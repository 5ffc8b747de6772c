"""Cuts the reductions over the columns of a product into two kernels.

A thread block has some columns of a product only. So the kernel of the product reduces each group
of `GROUP` columns, and a row kernel combines what the groups give: for a sum their sums, for the
sum of exponentials below a maximum each group's sum below its own maximum. Which columns a group
has depends on nothing, so a row's bits do not depend on where its tile lies.

Rows that depend on such a reduction, and reductions that depend on another one in any other way,
need the whole product before them. For these nothing is cut (None).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf

import torch
from torch.utils import _pytree as pytree

from ...frontend.graph import Builder, Graph, Node, Output, Role
from ...frontend.ops import REDUCTIONS, Op, Value, Varies
from ..passes.rewrite import rewrite
from ..passes.simplify import merge_common_subexpressions
from ..patterns import ancestors, strip
from ..reductions import OF_OP

GROUP = 128  # columns of a product that are reduced together
COMBINED = {Op.SUM: Op.SUM, Op.MEAN: Op.SUM, Op.MAX: Op.MAX, Op.MIN: Op.MIN, Op.PROD: Op.PROD}


@dataclass(frozen=True)
class Cut:
    """The graph of a product's kernel, whose reductions are of groups, and the row kernel's.

    of_groups: a placed graph. Its rows have as many elements as all groups together, and the
        results that are reduced have one for each group.
    of_row: a traced graph, of rows of one element for each group.
    """

    of_groups: Graph
    of_row: Graph


def cut_reductions(placed: Graph) -> Cut | None:
    """The two kernels of a placed graph with reductions; None where it takes the whole product."""
    try:
        return _Cutting(placed).result()
    except _NeedsWholeRows:
        return None


class _NeedsWholeRows(Exception):
    pass


class _Cutting:
    def __init__(self, placed: Graph):
        self.placed = placed
        self.reductions = [node for node in placed if node.op in REDUCTIONS]
        self.below = {  # of each reduction the reductions that its operand depends on
            node.id: self._reductions_below(node.inputs) for node in self.reductions
        }
        self.rows = [o for o in placed.outputs if o.is_row]
        self.numbers = [o for o in placed.outputs if not o.is_row]
        for output in self.rows:
            if self._reductions_below((output.id,)):
                raise _NeedsWholeRows
        if {o.name for o in self.rows} & {o.name for o in self.numbers}:
            raise _NeedsWholeRows  # a result of pieces of both kinds
        self.count = -(-placed.n // GROUP)

    def _reductions_below(self, ids: tuple[int, ...]) -> set[int]:
        found = ancestors(self.placed, [self.placed[id] for id in ids])
        return {id for id in found if self.placed[id].op in REDUCTIONS}

    def result(self) -> Cut:
        """Both graphs."""
        return Cut(merge_common_subexpressions(self._of_groups()), self._of_row())

    def _kind(self, node: Node) -> Node | None:
        """The maximum that a sum of exponentials is below; None of a reduction of its own."""
        if node.op not in COMBINED or node.value.dtype is not torch.float32:
            raise _NeedsWholeRows
        if not self.below[node.id]:
            return None
        exponential = self.placed[node.inputs[0]]
        if node.op is not Op.SUM or exponential.op is not Op.EXP:
            raise _NeedsWholeRows
        difference = self.placed[exponential.inputs[0]]
        if difference.op is not Op.SUB or len(self.below[node.id]) != 1:
            raise _NeedsWholeRows
        x, reference = self.placed.operands(difference)
        (peak,) = (self.placed[id] for id in self.below[node.id])
        is_below = peak.op is Op.MAX and strip(self.placed, self.placed[peak.inputs[0]]).id == x.id
        if not is_below or reference.value.spread or self._reductions_below((x.id,)):
            raise _NeedsWholeRows
        return peak

    # The kernel of the product

    def _of_groups(self) -> Graph:
        placed, whole = self.placed, self.count * GROUP
        new = Builder(placed.name, whole)
        ids: dict[int, int] = {}
        sources = {i.id: i for i in placed.inputs}

        def made(id: int) -> int:
            """A node of the old graph in the new one; rows are as long as all groups."""
            if id not in ids:
                node = placed[id]
                inputs = [made(i) for i in node.inputs]
                value = replace(node.value, inner=(whole,)) if node.value.spread else node.value
                if node.op is Op.INPUT:
                    i = sources[id]
                    ids[id] = new.add_input(i.name, i.role, i.dtype, value, i.view, i.formula)
                elif node.op is Op.CONST:
                    ids[id] = new.add_const(node.arg, value, node.loc)
                elif node.op is Op.INDEX:
                    ids[id] = new.add_index(whole, node.value.dtype, node.loc)
                else:
                    ids[id] = new.add(node.op, inputs, node.arg, node.loc)
            return ids[id]

        outputs = [replace(o, id=made(o.id), inner=(whole,)) for o in self.rows]
        for node in self.reductions:
            peak, (operand,) = self._kind(node), node.inputs
            if peak is None:
                group = self._group(new, COMBINED[node.op], made(operand))
            else:
                x = made(placed[placed[operand].inputs[0]].inputs[0])
                below = _finite(new, self._group(new, Op.MAX, x))
                terms = new.add(Op.EXP, (new.add(Op.SUB, (x, below)),))
                group = self._group(new, Op.SUM, terms)
            outputs.append(Output(_partial(node), group, torch.float32, (self.count,), True))
        structure = pytree.tree_structure((0,) * len(outputs))
        return new.finish(outputs, structure)

    def _group(self, new: Builder, op: Op, id: int) -> int:
        """The reduction of each group. Columns behind the row's end do not count."""
        if not new[id].value.spread:
            raise _NeedsWholeRows  # the sum of a number that all columns share
        if self.placed.n % GROUP:
            index = new.add_index(new.n, torch.int32)
            end = new.add_const(self.placed.n, Value((), Varies.SCALAR, torch.int32))
            neutral = Value((), Varies.SCALAR, torch.float32)
            nothing = new.add_const(OF_OP[op].identity, neutral)
            id = new.add(Op.WHERE, (new.add(Op.LT, (index, end)), id, nothing))
        return new.add(Op.GROUPED, (id,), (op, GROUP))

    # The row kernel

    def _of_row(self) -> Graph:
        placed, new, ids = self.placed, Builder(self.placed.name, self.count), {}
        sources = {i.id: i for i in placed.inputs}
        partials = {
            node.id: new.add_input(
                _partial(node), Role.ROW, torch.float32,
                Value((self.count,), Varies.ROW, torch.float32, spread=True))
            for node in self.reductions
        }  # fmt: skip

        def made(id: int) -> int:
            """A number of the row, from what the groups give."""
            if id in ids:
                return ids[id]
            node = placed[id]
            if node.op in REDUCTIONS:
                ids[id] = combined(node)
            elif node.op is Op.INPUT:
                given = sources[id]
                if given.view is not None:  # one element of a row
                    raise _NeedsWholeRows
                kinds = given.name, given.role, given.dtype, node.value
                ids[id] = new.add_input(*kinds, formula=given.formula)
            elif node.op is Op.CONST:
                ids[id] = new.add_const(node.arg, node.value, node.loc)
            elif node.value.spread:
                raise _NeedsWholeRows
            else:
                ids[id] = new.add(node.op, [made(i) for i in node.inputs], node.arg, node.loc)
            return ids[id]

        def combined(node: Node) -> int:
            peak, partial = self._kind(node), partials[node.id]
            if peak is not None:
                difference = placed[placed[node.inputs[0]].inputs[0]]
                # A group of which all are -inf keeps that: its sum is 0, or NaN where the row's
                # maximum is -inf and nothing has made it finite.
                below = _finite(new, partials[peak.id], keeps_low=True)
                moved = new.add(Op.SUB, (below, made(difference.inputs[1])))
                partial = new.add(Op.MUL, (partial, new.add(Op.EXP, (moved,))))
            total = new.add(COMBINED[node.op], (partial,), loc=node.loc)
            if node.op is Op.MEAN:
                count = new.add_const(float(placed.n), Value((), Varies.SCALAR, torch.float32))
                total = new.add(Op.DIV, (total, count))
            inner = node.value.inner
            return new.add(Op.RESHAPE, (total,), inner) if inner else total

        def whole(pieces: list[Output]) -> Output:
            """A result, of the numbers that are its pieces: a traced graph knows no pieces."""
            first, ids = pieces[0], [made(o.id) for o in pieces]
            if first.view is None:
                return replace(first, id=ids[0])
            parts = [new.add(Op.RESHAPE, (id,), (1,)) for id in ids]
            joined = new.add(Op.CAT, parts, -1) if len(parts) > 1 else parts[0]
            shape = first.view.shape
            joined = new.add(Op.RESHAPE, (joined,), shape)
            return replace(first, id=joined, inner=shape, view=None)

        pieces: dict[str, list[Output]] = {}
        for output in self.numbers:
            pieces.setdefault(output.name, []).append(output)
        outputs = [whole(sorted(each, key=_place)) for each in pieces.values()]
        structure = pytree.tree_structure((0,) * len(outputs))
        return rewrite(new.finish(outputs, structure))


def _place(piece: Output) -> tuple[int, ...]:
    """Where a number lies in its result."""
    return () if piece.view is None else piece.view.start


def _partial(node: Node) -> str:
    """The name of what the groups give for a reduction."""
    return f"{node.op.value}_of_groups_{node.id}"


def _finite(new: Builder, peak: int, keeps_low: bool = False) -> int:
    """A maximum; 0 where it is infinite, or only where it is +inf."""
    number = Value((), Varies.SCALAR, torch.float32)
    size = peak if keeps_low else new.add(Op.ABS, (peak,))
    is_infinite = new.add(Op.EQ, (size, new.add_const(inf, number)))
    return new.add(Op.WHERE, (is_infinite, new.add_const(0.0, number), peak))

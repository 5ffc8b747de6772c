"""Joined rows as choices by the column, as a part of placing a graph (`space.py`).

A row that is joined of parts may be computed without cutting it where the parts end: each part is
computed of the whole row, and the number of the column chooses. Beside its own columns a part is
anything, so what is wanted of it may lie beyond its ends. A row of memory is loaded with any number
there, and as one number where one element of it is left. Unlike `by_column.py`, which rewrites rows
before they are placed, this knows of each part which elements of several axes are wanted. So it
serves windows of neighbours, which are stacks of parts, and stacks that are moved along any axis.

A reduction of a shorter row is taken of the whole row then, with what changes nothing behind. A
shorter result is computed of the whole row, and stored up to its end. So the groups of a row that
is padded to whole groups are the columns, and a result that is cut back to the row is one piece.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ...errors import UnsupportedError
from ...frontend.dtypes import STORAGE
from ...frontend.graph import Graph, Node
from ...frontend.ops import COLLECTIVES, Op
from ..patterns import ancestors
from .axes import Axis, Index, Refine, Wanted, axes_of, moved_along, row_chosen
from .by_column import MOST_CHOSEN
from .lifted_scans import NEUTRAL, neutral
from .placed import Placed

BEYOND = "elements beyond an end are wanted"  # the message where they cannot be loaded
ROUNDED = 2.0**-20  # of a mean of equal float32 numbers: 8 units in the last place
WIDENED = NEUTRAL.keys() - {Op.KTHVALUE}  # reductions that may take a whole row


class Widened(Refine):
    """An axis has more columns than elements, as `Choosing.widened` has it."""


class Choosing:
    """The methods of a placing for these rows.

    widened: of an axis that is reduced or stored, by its key, how many columns it has.
    """

    widened: dict[tuple, int]

    def _chosen_part(self, node: Node, wanted: Wanted, ends: list[int]) -> int | None:
        """What is wanted of a joined row, as a choice; None where it cannot be one.

        ends: where the parts end.
        """
        index, axis = wanted[node.arg], node.arg
        if not _may_be_chosen(node):
            return None
        parts: list[tuple[int, int]] = []  # where each one ends, and its place in `nodes`
        start, last = 0, ends[-1]
        for i, end in zip(node.inputs, ends, strict=True):
            begins, reaches = start == 0 or index.last >= start, end == last or index.start < end
            if begins and reaches:
                part = self._want(i, moved_along(wanted, axis, index, -start))
                if parts and parts[-1][1] == part:
                    parts.pop()
                parts.append((end, part))
            start = end
        _, found = parts.pop()
        for end, part in reversed(parts):
            is_part = self._computed(Op.LT, (self._position(index, node), self._end(end, node)),
                                     None, node)  # fmt: skip
            found = self._computed(Op.WHERE, (is_part, part, found), None, node)
        return found

    def _widen(self, axes: list[Axis], n: int) -> None:
        """Raise Widened where axes of fewer elements can be so many columns."""
        least = min((n + 1) // 2, self.most + 1)  # Fewer elements can be written out.
        short = [axis for axis in axes if least <= axis.size < n and self._may_be_wider(axis)]
        for axis in short:
            of_column = prod([size for size, _ in self.factors.pop(axis.key)[1:]])
            self.widened[axis.key] = n * of_column
        if short:
            raise Widened(short[0], n)

    def _may_be_wider(self, axis: Axis) -> bool:
        """Whether a reduction or a result knows where its axis ends among more columns.

        An axis may be cut, as that of points whose numbers are written out. Then its outermost part
        may be wider, but not for a second time. Sums over rows end where a row of one axis does,
        and not where the points of a stack do.
        """
        what, k, _ = axis.key
        is_whole = self.factors[axis.key] == [(axis.size, True)]
        if not is_whole and (axis.place > 0 or axis.key in self.widened):
            return False
        if what == "reduced":
            return self.graph[k].op in WIDENED and self._can_be_chosen(k)
        if what != "out":
            return False
        output = self.graph.outputs[k]
        is_row = is_whole and len(output.inner) == 1
        return (is_row or output.over is None) and self._can_be_chosen(output.id)

    def _can_be_chosen(self, id: int) -> bool:
        """Whether all joined rows that a value is computed of may be choices by the column."""
        behind = [self.graph[each] for each in ancestors(self.graph, [self.graph[id]])]
        return all([_may_be_chosen(node) for node in behind if node.op is Op.CAT])

    def _only(self, part: int, index: Index, size: int, beside: int, node: Node) -> int:
        """What a reduction takes of a whole row, of which so many elements count.

        index: which elements of the row. beside: what it takes in place of the others.
        """
        ends = self._position(index, node), self._end(size, node)
        counts = self._computed(Op.LT, ends, None, node)
        return self._computed(Op.WHERE, (counts, part, beside), None, node)

    def _beside(self, node: Node) -> int:
        """What a reduction takes in columns that do not count: what leaves its result as it is.
        """
        operand = self.graph[node.inputs[0]]
        of = replace(node, value=replace(node.value, dtype=operand.value.dtype))
        return self._add(Placed(Op.CONST, (), neutral(node.op, operand.value.dtype), (), of))

    def _mean_of_fewer(self, mean: int, more: float, node: Node, wanted: Wanted) -> int:
        """The mean of the elements that count, of a mean over all columns, which has 0 beside them.

        more: how many columns there are for each that counts. wanted: the first of those.

        Where all elements are equal, their mean is exactly that element: the result is the first
        one if it differs from that by no more than a sum is rounded (`ROUNDED`). This is left out
        where an element is found in no column alone, and of squares, which are not subtracted.
        """

        def computed(op: Op, *inputs: int) -> int:
            return self._computed(op, inputs, None, node)

        times, bound = (self._add(Placed(Op.CONST, (), x, (), node)) for x in (more, ROUNDED))
        found, operand = computed(Op.MUL, mean, times), self.graph[node.inputs[0]]
        if _is_square(operand) or not _has_columns_alone(self.graph, operand):
            return found
        first = self._want(operand.id, wanted)
        apart = computed(Op.ABS, computed(Op.SUB, found, first))
        is_near = computed(Op.LE, apart, computed(Op.MUL, computed(Op.ABS, first), bound))
        return computed(Op.WHERE, is_near, first, found)

    def _position(self, index: Index, node: Node) -> int:
        """The number of each element that is wanted of an axis."""
        return self._add(Placed(Op.INDEX, (), None, axes_of((index,)), node, (index,)))

    def _end(self, end: int, node: Node) -> int:
        of = replace(node, value=replace(node.value, dtype=torch.int64))
        return self._add(Placed(Op.CONST, (), end, (), of))

    def _only_there(self, node: Node, wanted: Wanted) -> Wanted:
        """What is wanted of a row, as one element where no other one that is wanted is there.

        That is found where what is wanted of an axis of the row goes along one axis.
        """
        for index, size in zip(wanted, node.value.inner, strict=True):
            is_beyond = index.start < 0 or index.last >= size
            if not is_beyond or len(index.steps) != 1:
                continue
            ((axis, step),) = index.steps
            first, last = max(0, -(index.start // step)), (size - 1 - index.start) // step
            if first == min(last, axis.size - 1):
                return tuple(each.at(axis, first) for each in wanted)
        return wanted

    def _refuse_beyond(self, node: Node, wanted: Wanted) -> None:
        """Raise UnsupportedError where elements are wanted that are not there, and cannot be.

        A row is loaded with any number in their place, but a row of a table is not.
        """
        pairs = zip(wanted, node.value.inner, strict=True)
        is_there = all([index.start >= 0 and index.last < size for index, size in pairs])
        is_row = node.op is Op.INPUT and row_chosen(wanted) is None
        if not is_there and not is_row:
            raise UnsupportedError(BEYOND, node.loc)


def _may_be_chosen(node: Node) -> bool:
    """Whether the part of a joined row may be chosen by the column."""
    return len(node.inputs) <= MOST_CHOSEN and node.value.dtype not in STORAGE


def _is_square(node: Node) -> bool:
    return node.op is Op.MUL and node.inputs[0] == node.inputs[1]


def _has_columns_alone(graph: Graph, node: Node) -> bool:
    """Whether an element of a row is computed of elements of that column, and of numbers."""
    behind = [graph[id] for id in ancestors(graph, [node])]
    return all([prod(each.value.inner) == 1 for each in behind if each.op in COLLECTIVES])

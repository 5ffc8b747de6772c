"""Joined rows as choices by the column, as a part of placing a graph (`space.py`).

A row that is joined of parts may be computed without cutting it where the parts end: each part is
computed of the whole row, and the number of the column chooses. Beside its own columns a part is
anything, so what is wanted of it may lie beyond its ends. Unlike `by_column.py`, which rewrites
rows before they are placed, this knows of each part which elements of several axes are wanted. So
it serves windows of neighbours, which are stacks of parts.

A reduction of a shorter row is taken of the whole row then, with what changes nothing behind.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...errors import UnsupportedError
from ...frontend.dtypes import STORAGE
from ...frontend.graph import Node
from ...frontend.ops import Op
from .axes import Axis, Index, Refine, Wanted, axes_of, moved_along, row_chosen
from .by_column import MOST_CHOSEN
from .lifted_scans import NEUTRAL, neutral
from .placed import Placed

WIDENED = NEUTRAL.keys() - {Op.MEAN, Op.KTHVALUE}  # reductions that may take a whole row


class Widened(Refine):
    """A reduction goes along more elements than there are, as `Choosing.widened` has it."""


class Choosing:
    """The methods of a placing for these rows.

    widened: of an axis that is reduced, by its key, how many elements the columns have.
    """

    widened: dict[tuple, int]

    def _chosen_part(self, node: Node, wanted: Wanted, ends: list[int]) -> int | None:
        """What is wanted of a joined row, as a choice; None where it cannot be one.

        ends: where the parts end.
        """
        index, axis = wanted[node.arg], node.arg
        if len(ends) > MOST_CHOSEN or node.value.dtype in STORAGE:
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

    def _widen(self, axes: list[Axis]) -> None:
        """Raise Widened where reductions of shorter rows can be taken of the longest one."""
        n = max([axis.size for axis in axes])
        short = [axis for axis in axes if axis.key[0] == "reduced" and n <= 2 * axis.size < 2 * n]
        short = [axis for axis in short if self.factors[axis.key] == [(axis.size, True)]
                 and self.graph[axis.key[1]].op in WIDENED]  # fmt: skip
        for axis in short:
            self.widened[axis.key] = n
            del self.factors[axis.key]
        if short:
            raise Widened(short[0], n)

    def _only(self, part: int, axis: Axis, size: int, node: Node) -> int:
        """What a reduction takes of a whole row, of which so many elements count."""
        dtype = self.graph[node.inputs[0]].value.dtype
        of = replace(node, value=replace(node.value, dtype=dtype))
        nothing = self._add(Placed(Op.CONST, (), neutral(node.op, dtype), (), of))
        ends = self._position(Index(0, ((axis, 1),)), node), self._end(size, node)
        counts = self._computed(Op.LT, ends, None, node)
        return self._computed(Op.WHERE, (counts, part, nothing), None, node)

    def _position(self, index: Index, node: Node) -> int:
        """The number of each element that is wanted of an axis."""
        return self._add(Placed(Op.INDEX, (), None, axes_of((index,)), node, (index,)))

    def _end(self, end: int, node: Node) -> int:
        of = replace(node, value=replace(node.value, dtype=torch.int64))
        return self._add(Placed(Op.CONST, (), end, (), of))

    def _refuse_beyond(self, node: Node, wanted: Wanted) -> None:
        """Raise UnsupportedError where elements are wanted that are not there, and cannot be.

        A row of one axis is loaded with any number in their place.
        """
        pairs = zip(wanted, node.value.inner, strict=True)
        is_there = all([index.start >= 0 and index.last < size for index, size in pairs])
        is_row = node.op is Op.INPUT and len(wanted) == 1 and row_chosen(wanted) is None
        if not is_there and not is_row:
            raise UnsupportedError("elements beyond an end are wanted", node.loc)

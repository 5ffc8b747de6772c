"""What is stored or reduced apart from the columns, as a part of placing a graph (`space.py`).

A row that is joined of parts, such as a number before a row, may be stored part by part. An axis
that has a few elements more than there are columns is reduced as the columns, and as those elements
one by one.
"""

from __future__ import annotations

from itertools import pairwise

from ...frontend.ops import Op
from .axes import Axis, Refine

MOST_STORED = 16  # parts of an output: each has stores of its own
MOST_REDUCED = 16  # elements that are reduced one by one


class Apart:
    """The methods of a placing for these parts."""

    def _few_more(self, axes: list[Axis]) -> Refine | None:
        """The request to reduce or store those elements of an axis apart that it has more than the
        columns.

        Those that are reduced are before and behind the columns that are read for others. Elements
        of a rank are not found so: each of the few would be spread over the columns.
        """
        n = min([axis.size for axis in axes if axis.size > self.most], default=0)
        for axis in axes:
            is_whole = axis.key[0] == "reduced" and self.factors[axis.key] == [(axis.size, True)]
            is_whole = is_whole and self.graph[axis.key[1]].op is not Op.KTHVALUE
            if is_whole and n < axis.size <= n + MOST_REDUCED:
                start = self._start_beside(axis, n)
                ends = (place for place in (start, start + n) if 0 < place < axis.size)
                return Refine(axis, 1, ends=tuple(ends))
        for axis in axes:
            is_row = axis.key[0] == "out" and len(self.graph.outputs[axis.key[1]].inner) == 1
            if is_row and 0 < n < axis.size <= n + MOST_REDUCED:
                return Refine(axis, 1, ends=(n,))
        return None

    def _start_beside(self, axis: Axis, n: int) -> int:
        """The place of an axis from where on others read n elements of what it is the axis of."""
        leaves = [(k.of.id, k.view[-1]) for k in self.nodes if k.op is Op.INPUT and k.view]
        own = {id: index.start for id, index in leaves if (axis, 1) in index.steps}
        for id, index in leaves:
            if id in own and any([other.size == n and step == 1 for other, step in index.steps]):
                start = index.start - own[id]
                if 0 <= start <= axis.size - n:
                    return start
        return 0

    def _store_apart(self, axis: Axis, places: tuple[int, ...]) -> bool:
        """Store the parts of an output by themselves that end at these places of an axis.

        Returns whether they are few enough, and those alike that are too long to be written out.
        """
        _, k, _ = axis.key
        ends = _with_places(self.stored.get(k, []), axis, places)
        sizes = [end - begin for begin, end in pairwise([0, *ends, *self.graph.outputs[k].inner])]
        long = [size for size in sizes if size > self.most]
        if len(sizes) > MOST_STORED or any([size % min(long) for size in long]):
            return False
        self.stored[k] = ends
        self._forget_parts(axis)
        return True

    def _reduce_apart(self, axis: Axis, places: tuple[int, ...]) -> None:
        """Reduce the parts of an axis by themselves that end at these places of it."""
        _, id, _ = axis.key
        self.ends[id] = _with_places(self.ends.get(id, []), axis, places)
        self._forget_parts(axis)

    def _forget_parts(self, axis: Axis) -> None:
        """Cut the parts anew of what has an axis: they have other numbers now."""
        for known in (self.factors, self.widened):
            for key in [key for key in known if key[:2] == axis.key[:2]]:
                del known[key]


def _with_places(ends: list[int], axis: Axis, places: tuple[int, ...]) -> list[int]:
    """Where parts end, with more places of the part that has this axis."""
    start = [0, *ends][axis.key[2]]
    return sorted({*ends, *(start + place for place in places)})

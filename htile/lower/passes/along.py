"""Along which axes the memory of inputs lies, as a part of placing a graph (`space.py`)."""

from __future__ import annotations

from ...frontend.graph import Graph
from ...frontend.ops import Op, Varies
from .axes import Axis, Refine, Wanted, axes_of
from .placed import Placed

NEAR = 4  # elements of memory between neighbouring columns, at most


class Along:
    """The methods of a placing that look at what is wanted of the inputs."""

    graph: Graph
    nodes: list[Placed]
    most: int

    def _of_no_row(self, stack: tuple[Axis, ...]) -> Axis | None:
        """Of three axes and more one that is reduced, along which no row lies, if it is short.

        So are the boundaries that elements of groups are compared with. Where these are the
        columns, the elements themselves are written out.
        """
        if len(stack) < 3:
            return None
        leaves = [k for k in self.nodes if k.op is Op.INPUT and k.of.value.varies is Varies.ROW]
        of_rows = {axis for leaf in leaves for axis in axes_of(leaf.view)}
        fitting = [a for a in stack if a.key[0] == "reduced" and a.size <= self.most]
        return next((axis for axis in fitting if axis not in of_rows), None)

    def _shorter(self, axis: Axis, size: int) -> Refine:
        """The request to cut an axis into blocks of `size`.

        The order in which a reduction takes its elements is free. So its blocks lie between each
        other where the pieces of other axes of this length do: then they are the same pieces.
        """
        leaves = [each.view[-1].steps for each in self.nodes if each.op is Op.INPUT and each.view]
        others = [dict(leaf) for leaf in leaves if leaf and axis not in dict(leaf)]
        steps = {min(leaf.values()) for leaf in others}
        is_between = axis.key[0] == "reduced" and steps == {axis.size // size}
        return Refine(axis, size, lies_between=is_between)

    def _along_memory(self) -> set[Axis]:
        """The axes that some input varies over along the last axis of its tensor."""
        return {a for leaf in self._leaves() for a, step in leaf[-1].steps if step <= NEAR}

    def _across_memory(self) -> set[Axis]:
        """The axes that some input varies over otherwise."""
        far = {axis for leaf in self._leaves() for index in leaf[:-1] for axis, _ in index.steps}
        return far | {a for leaf in self._leaves() for a, step in leaf[-1].steps if step > NEAR}

    def _leaves(self) -> list[Wanted]:
        """What is wanted of each input, and of the numbers of columns."""
        return [each.view for each in self.nodes if each.op in (Op.INPUT, Op.INDEX) and each.view]

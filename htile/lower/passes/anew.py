"""Begins a part of placing anew (`space.py`), where an axis has to be cut that only this part has.

A request to cut an axis makes what was found before it worthless where that has the axis, and
nowhere else. An axis that a reduction goes along is wanted of the operand of this reduction only.
So what was found before the reduction was first wanted is kept: it would be found again, node by
node. Sixty-four reductions that are cut one after another so take one pass, and not sixty-four.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from .axes import Axis, Refine
from .placed import Placed

Found = TypeVar("Found")


class Anew:
    """What a placing has found, and the methods that go back in it.

    begun: what has axes, as the first two parts of `Axis.key`, and was wanted in this pass.
    stacks: which axes are columns together. scans: each scan, and an axis of columns that it is
    wanted along, or None for single elements. All of these only grow, in the order of the pass.
    """

    def _begin(self) -> None:
        """Forget all that was found."""
        self.nodes: list[Placed] = []
        self.known: dict[object, int] = {}
        self.begun: dict[tuple, None] = {}
        self.stacks: dict[tuple[Axis, ...], None] = {}
        self.scans: dict[tuple[int, Axis | None], None] = {}
        self.lookups: dict[Axis, object] = {}

    def _cutting(self, owner: tuple[str, int], find: Callable[[], Found]) -> Found:
        """What `find` gives; where it asks to cut an axis of the owner, it is called again.

        That goes for the first call in a pass. Later ones find what has the axis already.
        """
        if owner in self.begun:
            return find()
        self.begun[owner] = None
        grown = self.known, self.begun, self.stacks, self.scans, self.lookups
        count, sizes = len(self.nodes), [len(each) for each in grown]
        while True:
            try:
                return find()
            except Refine as request:
                if request.axis.key[:2] != owner:
                    raise
                self._refine(request)
            del self.nodes[count:]
            for each, size in zip(grown, sizes, strict=True):
                while len(each) > size:
                    each.popitem()  # a dict gives the youngest

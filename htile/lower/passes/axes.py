"""Axes, and which elements of them are wanted: what `space.py` reckons with.

Of a value is wanted one `Index` for each of its axes: a number, plus the columns times a step. A
movement of elements changes these indices.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

from ...frontend.graph import Node


class Axis(NamedTuple):
    """A block of an axis whose elements are columns.

    key: what has the axis: "out" or "reduced", the node's or output's number, and which axis it is.
        "index" is that of the rows of a table, of which each row wants the one at an index.
    place: which factor of the axis it is. size: how many elements it has.
    """

    key: tuple[str, int, int]
    place: int
    size: int

    @property
    def is_index(self) -> bool:
        """Whether each row wants one of its elements, the one at an index."""
        return self.key[0] == "index"


class Index(NamedTuple):
    """Which elements of an axis are wanted: start + the sum of each axis times its step."""

    start: int
    steps: tuple[tuple[Axis, int], ...] = ()

    def plus(self, other: Index) -> Index:
        steps = dict(self.steps)
        for axis, step in other.steps:
            steps[axis] = steps.get(axis, 0) + step
        return Index(self.start + other.start, tuple(sorted(steps.items())))

    def times(self, factor: int) -> Index:
        return Index(self.start * factor, tuple((a, step * factor) for a, step in self.steps))

    def at(self, axis: Axis, place: int) -> Index:
        """The same at one place of an axis, of which it does not depend then."""
        step = dict(self.steps).get(axis, 0)
        return Index(self.start + step * place, tuple(s for s in self.steps if s[0] != axis))

    @property
    def without_rows(self) -> Index:
        """The same, where it does not say which row of a table is wanted."""
        return Index(self.start, tuple((a, step) for a, step in self.steps if not a.is_index))

    @property
    def last(self) -> int:
        """The largest element that is wanted."""
        return self.start + sum([step * (axis.size - 1) for axis, step in self.steps])


Wanted = tuple[Index, ...]  # of a node, one for each axis


class Refine(Exception):
    """An axis has to be cut into blocks of `size`.

    is_split: the number of the block stays an axis of columns; else the blocks are written out.
    columns: how many elements a piece has along other axes.
    lies_between: the elements of a block lie between those of the others, and do not follow each
        other.
    ends: the places of the axis where joined parts end, if it may be cut there instead.
    asking: the movement that cannot be without the cut, if it is one.
    whole: a number of elements of which an axis has to have a multiple, if that would do as well.
    """

    def __init__(
        self,
        axis: Axis,
        size: int,
        is_split: bool = False,
        columns: int = 1,
        lies_between: bool = False,
        ends: tuple[int, ...] = (),
        asking: Node | None = None,
        whole: int | None = None,
    ):
        self.axis, self.size, self.is_split, self.columns = axis, size, is_split, columns
        self.lies_between, self.ends, self.asking = lies_between, ends, asking
        self.whole = whole


class Ungrouped(Exception):
    """The columns cannot be groups of neighbours."""


@dataclass(frozen=True)
class Groups:
    """What the columns are where they are groups.

    size: how many elements a group has. count: how many groups there are.
    outer: the axes that count the groups. inner: those that count the elements of a group. All
        other axes count the columns.
    """

    size: int
    count: int
    outer: frozenset[Axis]
    inner: frozenset[Axis]

    def steps(self, index: Index) -> tuple[int, int]:
        """How far an index goes from one element to the next one, and from one group to the next.

        Of an axis that counts the columns, a group has `size` steps.
        """
        near = sum([step for axis, step in index.steps if axis not in self.outer])
        far = sum([step * (1 if axis in self.outer else self.size)
                   for axis, step in index.steps if axis not in self.inner])  # fmt: skip
        return near, far


def axes_of(wanted: Wanted) -> tuple[Axis, ...]:
    found = {axis for index in wanted for axis, _ in index.steps}
    return tuple(sorted(axis for axis in found if not axis.is_index))


def row_chosen(wanted: Wanted) -> tuple[int, Axis, int] | None:
    """Of a table: which of its axes has the rows, the axis of their index, and its step."""
    steps = ((k, axis, step) for k, index in enumerate(wanted) for axis, step in index.steps)
    found = [each for each in steps if each[1].is_index]
    assert len(found) <= 1, f"a row of a table has two indices: {wanted}"
    return found[0] if found else None


def starts_of(wanted: Wanted) -> tuple[int, ...]:
    return tuple(index.start for index in wanted)


def moved_along(wanted: Wanted, axis: int, index: Index, start: int) -> Wanted:
    """The same with `index + start` for an axis, which counts from the last."""
    place = len(wanted) + axis
    return (*wanted[:place], index.plus(Index(start)), *wanted[place + 1 :])


def reshaped(wanted: Wanted, node: Node, old: tuple[int, ...]) -> Wanted:
    """What is wanted of a value of shape `old`, of which a node is another shape."""
    new, flat = node.value.inner, Index(0)
    if [size for size in new if size > 1] == [size for size in old if size > 1]:  # only ones differ
        longer = iter([index for size, index in zip(new, wanted, strict=True) if size > 1])
        return tuple([next(longer) if size > 1 else Index(0) for size in old])
    for k, index in enumerate(wanted):
        flat = flat.plus(index.times(prod(new[k + 1 :])))
    outer = next((k for k, size in enumerate(old) if size > 1), 0)  # before it are ones
    found: list[Index] = []
    for size in reversed(old[outer + 1 :]):
        flat, rest = _divided(flat, size, node)
        found.insert(0, rest)
    return (*[Index(0)] * outer, flat, *found) if old else ()


def _divided(index: Index, size: int, node: Node) -> tuple[Index, Index]:
    """Quotient and remainder by the size of an axis. Raises Refine for what does not divide."""
    if size == 1:
        return index, Index(0)
    above, below = [], []
    for axis, step in index.steps:
        if step % size == 0:
            above.append((axis, step // size))
        elif step * (axis.size - 1) < size:
            below.append((axis, step))
        elif size % step == 0 and axis.size % (size // step) == 0:
            raise Refine(axis, size // step, is_split=True, asking=node)
        else:
            whole = size // step if size % step == 0 else None
            raise Refine(axis, 1, asking=node, whole=whole)
    rest = Index(index.start % size, tuple(below))
    if rest.last >= size:  # it carries into the quotient
        largest, _ = max(below, key=lambda each: each[1] * each[0].size)
        raise Refine(largest, 1, asking=node)
    return Index(index.start // size, tuple(above)), rest

"""Sums of values that are 0 in most places: gradients of parts of an axis, put together again.

The gradient of `x[:k]` is 0 behind k, and that of `x[k:]` before it. Their sum is the two gradients
side by side, which nothing adds.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .ops import Op

if TYPE_CHECKING:
    from .algebra import Algebra


def padded(algebra: Algebra, a: int, axis: int, before: int, behind: int) -> int:
    """A value with zeros along an axis, so many before it and behind it."""
    inner = list(algebra.inner(a))
    parts = []
    for size in (before, None, behind):
        if size is None:
            parts.append(a)
        elif size:
            inner[axis] = size
            parts.append(algebra.filled(0.0, tuple(inner), algebra[a].value.spread))
    return algebra.node(Op.CAT, *parts, arg=axis) if len(parts) > 1 else a


def sliced(algebra: Algebra, a: int, axis: int, start: int, size: int, step: int = 1) -> int:
    """So many elements of an axis; of a value that lacks the axis, the value."""
    inner = algebra.inner(a)
    if len(inner) < -axis or inner[axis] == 1 or (start, size, step) == (0, inner[axis], 1):
        return a
    return algebra.node(Op.SLICE, a, arg=(axis, start, step, size))


def placed(algebra: Algebra, a: int, axis: int, start: int, step: int, size: int) -> int:
    """The elements of an axis at `start`, `start + step`, ... of one of `size`, and 0 elsewhere.

    a: a value that has the axis.
    """
    count = algebra.inner(a)[axis]
    if step == 1:
        return padded(algebra, a, axis, start, size - start - count)
    # The axis as a table of lines of `step` elements: one column of it has the elements.
    lines, column = -(-size // step), start % step
    inner = list(algebra.inner(a))
    place = len(inner) + axis
    table = algebra.reshape(a, (*inner[: place + 1], 1, *inner[place + 1 :]))
    table = padded(algebra, table, axis, column, step - 1 - column)
    first = start // step
    table = padded(algebra, table, axis - 1, first, lines - first - count)
    inner[place] = lines * step
    return sliced(algebra, algebra.reshape(table, tuple(inner)), axis, 0, size)


def joined_parts(algebra: Algebra, a: int, b: int) -> int | None:
    """a + b, if both are parts between zeros that do not overlap; None if they are not.

    Both must be of the derivative. Values in a shape of their own are joined before it.
    """
    x, y = algebra[a], algebra[b]
    if not algebra.is_derived(min(a, b)) or x.op is not y.op or x.value.inner != y.value.inner:
        return None
    if x.op is Op.RESHAPE or (x.op is Op.SLICE and x.arg == y.arg):
        (first,), (second,) = x.inputs, y.inputs
        if algebra.inner(first) != algebra.inner(second):
            return None
        found = joined_parts(algebra, first, second)
        return None if found is None else algebra.node(x.op, found, arg=x.arg)
    if x.op is not Op.CAT or x.arg != y.arg:
        return None
    axis = x.arg
    parts = [_parts(algebra, node.inputs, axis) for node in (x, y)]
    ends = sorted({end for each in parts for _, end, _ in each})
    found, start = [], 0
    for end in ends:
        pieces = [_piece(algebra, each, start, end) for each in parts]
        if None in pieces:  # a part that is no zero would be cut
            return None
        left = [id for id in pieces if algebra.constant(id) != 0]
        if len(left) == 2:
            inner = joined_parts(algebra, *left)
            if inner is None:
                inner = algebra.node(Op.ADD, *left)
            found.append(inner)
        else:
            inner = list(x.value.inner)
            inner[axis] = end - start
            found += left or [algebra.filled(0.0, tuple(inner), x.value.spread)]
        start = end
    return algebra.node(Op.CAT, *found, arg=axis)


def _parts(algebra: Algebra, inputs: tuple[int, ...], axis: int) -> list[tuple[int, int, int]]:
    """(start, end, id) of each operand of a CAT."""
    found, start = [], 0
    for id in inputs:
        end = start + algebra.inner(id)[axis]
        found.append((start, end, id))
        start = end
    return found


def _piece(
    algebra: Algebra, parts: list[tuple[int, int, int]], start: int, end: int
) -> int | None:
    """The part that begins and ends there, or a zero that is there; None for a piece of a part."""
    first, last, id = next(part for part in parts if part[0] <= start < part[1])
    return id if (first, last) == (start, end) or algebra.constant(id) == 0 else None

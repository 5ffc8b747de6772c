"""What joins parts of an axis, and moves elements along it: cat, stack, repeat, pad, diff, roll.

Each is a movement: an element of the result is an element of an operand, or a constant.
"""

from __future__ import annotations

from math import prod

import torch

from ..errors import DtypeError, ShapeError, TraceError, UnsupportedError, an
from .functions import implements
from .nothing import Nothing
from .ops import Op
from .parts import MOST_PARTS, _few, chunk, part
from .promotion import BOOL, filled, floating, together
from .shapes import (
    _listed,
    axis_of,
    broadcast_to,
    cut_axis,
    known_axis,
    reshaped,
    unsqueeze,
)
from .tensor import Length, Ragged, Tensor, copy, fail, is_real, node


@implements("cat", "concat", "concatenate", method=False)
def cat(tensors, dim=0):
    """The tensors one after the other along an axis."""
    given = _tensors(_with_elements(tuple(tensors), dim), "cat")
    axis = axis_of(given[0], dim)
    shapes = [tuple(t._sizes) for t in given]
    others = {(*s[:axis], *s[axis:][1:]) for s in shapes}
    if len(others) > 1 or len({len(s) for s in shapes}) > 1 or not shapes[0]:
        fail(ShapeError, f"torch.cat of shapes {', '.join(map(str, shapes))} along {dim}")
    return node(Op.CAT, *given, arg=axis) if len(given) > 1 else copy(given[0])


def _with_elements(tensors: tuple, dim: int) -> tuple:
    """The operands of a join that have elements; torch wants the others to fit unless (0,)."""
    rest = tuple([t for t in tensors if not _is_nothing(t)])
    kinds = {t.dtype for t in rest if isinstance(t, Tensor)}
    for each in tensors if kinds else ():
        if not _is_nothing(each):
            continue
        shapes = tuple(each.shape), tuple(rest[0]._sizes)
        axis = axis_of(rest[0], dim)
        others = [(*s[:axis], *s[axis:][1:]) for s in shapes]
        if shapes[0] != (0,) and (others[0] != others[1] or len(shapes[0]) != len(shapes[1])):
            fail(ShapeError, f"torch.cat of shapes {shapes[0]}, {shapes[1]} along {dim}")
        if each.dtype not in kinds:
            fail(DtypeError, "torch.cat of a part without elements in another dtype: leave it out, "
                 "and convert the rest")  # fmt: skip
    return rest or tensors


@implements("stack", method=False)
def stack(tensors, dim=0):
    """The tensors beside each other along a new axis."""
    given = _tensors(tensors, "stack")
    if len({tuple(t._sizes) for t in given}) > 1:
        fail(ShapeError, f"torch.stack of shapes {', '.join(str(tuple(t._sizes)) for t in given)}")
    return cat([unsqueeze(t, dim) for t in given], dim)


def _is_nothing(value: object) -> bool:
    """Whether it is a part without elements, or a tensor of none, such as torch.zeros(0)."""
    return isinstance(value, Nothing) or (is_real(value) and not value.numel())


def _tensors(tensors: object, what: str) -> tuple[Tensor, ...]:
    """The operands of a join, in the dtype that they have together."""
    tensors = tuple(tensors)
    for each in tensors:
        if isinstance(each, Ragged):
            each._refuse(f"torch.{what} of x[mask] is not supported")
        if not isinstance(each, Tensor):
            kind = "a real tensor" if isinstance(each, torch.Tensor) else an(type(each).__name__)
            fail(TraceError, f"torch.{what} of {kind}: pass it as an argument")
    _few(len(tensors))
    dtypes = {t._value.dtype for t in tensors}
    return tensors if len(dtypes) == 1 else together(*tensors)


@implements("hstack", method=False)
def hstack(tensors):
    """torch.cat along the first axis of rows, and along the second of matrices."""
    given = [x[None] if isinstance(x, Tensor) and not x.ndim else x for x in tensors]
    return cat(given, 1 if isinstance(given[0], Tensor) and given[0].ndim > 1 else 0)


@implements("vstack", "row_stack", method=False)
def vstack(tensors):
    """torch.cat along the first axis, of rows as matrices of one row."""
    given = [x.reshape(1, -1) if isinstance(x, Tensor) and x.ndim < 2 else x for x in tensors]
    return cat(given, 0)


@implements("column_stack", method=False)
def column_stack(tensors):
    """torch.cat along the second axis, of rows as matrices of one column."""
    given = [x.reshape(-1, 1) if isinstance(x, Tensor) and x.ndim < 2 else x for x in tensors]
    return cat(given, 1)


@implements("block_diag", method=False)
def block_diag(*tensors):
    """The matrix that has the tensors along its diagonal, a row as a matrix of one row."""
    given = [x.reshape(1, -1) if x.ndim < 2 else x for x in _tensors(tensors, "block_diag")]
    if any([x.ndim > 2 for x in given]):
        shapes = ", ".join([str(tuple(x._sizes)) for x in given])
        fail(ShapeError, f"block_diag of values of shapes {shapes}: it takes matrices")
    width = sum([x._sizes[1] for x in given])
    rows, before = [], 0
    for x in given:
        height, size = x._sizes
        zeros = [filled(x, 0, inner=(height, n)) for n in (before, width - before - size) if n]
        rows.append(cat([*zeros[: before > 0], x, *zeros[before > 0 :]], 1))
        before += size
    return cat(rows, 0)


def _repeated(x: Tensor, counts: tuple[int, ...], what: str) -> Tensor:
    """`x` as often along each axis; new axes come first."""
    if not all(type(count) is int and count > 0 for count in counts) or len(counts) < x.ndim:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)}: expected a number of "
             "copies, of 1 and more, for each axis")  # fmt: skip
    sizes = (1,) * (len(counts) - x.ndim) + tuple(x._sizes)
    apart = [each for size in sizes for each in (1, size)]
    wide = [each for pair in zip(counts, sizes, strict=True) for each in pair]
    whole = tuple(count * size for count, size in zip(counts, sizes, strict=True))
    return copy(reshaped(broadcast_to(reshaped(x, tuple(apart)), tuple(wide)), whole))


@implements("repeat")
def repeat(input, *repeats):
    """input so many times along each axis."""
    counts = _listed(repeats)
    counts = tuple(counts) if isinstance(counts, (tuple, list)) else (counts,)
    return _repeated(input, counts, f"repeat{repeats}")


@implements("tile")
def tile(input, *repeats):
    """input so many times along each of the last axes."""
    counts = _listed(repeats)
    counts = tuple(counts) if isinstance(counts, (tuple, list)) else (counts,)
    return _repeated(input, (1,) * (input.ndim - len(counts)) + counts, f"tile{repeats}")


@implements("repeat_interleave")
def repeat_interleave(input, repeats, dim=None, *, output_size=None):
    """Each element of an axis so many times, one after the other."""
    if type(repeats) is not int or repeats < 1:
        given = an(type(repeats).__name__) if type(repeats) is not int else repeats
        given = "the length of a row" if isinstance(repeats, Length) else given
        fail(UnsupportedError, f"repeat_interleave by {given}: it takes one number, of 1 and more, "
             "for all elements")  # fmt: skip
    x = reshaped(input, (input._sizes.numel(),)) if dim is None else input
    axis = cut_axis(x, -1 if dim is None else dim, "repeat_interleave")
    end, sizes = axis + x.ndim + 1, list(x._sizes)
    wide = broadcast_to(unsqueeze(x, end), (*sizes[:end], repeats, *sizes[end:]))
    sizes[end - 1] *= repeats
    return copy(reshaped(wide, tuple(sizes)))


def _filled(x: Tensor, value: object, size: tuple[int, ...]) -> Tensor:
    """Elements of one value, a number or one of the row."""
    if isinstance(value, Tensor):
        if x._value.dtype is not torch.float32:
            fail(DtypeError, "F.pad of integers and masks by a symbolic value: write torch.cat")
        return filled(x, 0, inner=size) + value
    return filled(x, value, inner=size)


@implements("pad", method=False)
def pad(input, pad, mode="constant", value=None):
    """input with so many elements more at the ends of its last axes; fewer below 0.

    mode: "constant" for elements of one value. "reflect", "replicate" and "circular" take at most
    64 elements of the last axis.
    """
    if mode != "constant":
        return _padded_by_own(input, tuple(pad), mode)
    if any(isinstance(k, Tensor) for k in pad):
        fail(UnsupportedError, "F.pad by a computed number, such as the length of a row of any "
             "length (dynamic_n=True): the result has no fixed length. Pad the argument, or leave "
             "dynamic_n out")  # fmt: skip
    if len(pad) % 2 or len(pad) > 2 * input.ndim or not all(type(k) is int for k in pad):
        fail(ShapeError, f"F.pad by {tuple(pad)} of a value of shape {tuple(input._sizes)}: "
             "expected two integers for each axis, those of the last axis first")  # fmt: skip
    x, fill = input, 0 if value is None else value
    for k, (before, behind) in enumerate(zip(pad[::2], pad[1::2], strict=True)):
        axis = -1 - k
        start, end = max(-before, 0), x._sizes[axis] - max(-behind, 0)
        count = end - start + max(before, 0) + max(behind, 0)
        if end < start or not count:
            fail(ShapeError, f"F.pad by {tuple(pad)} leaves no elements of an axis of "
                 f"{x._sizes[axis]}")  # fmt: skip
        if start == end:
            x = _filled(x, fill, (*x._sizes[:axis], count, *x._sizes[axis:][1:]))
            continue
        x = part(x, axis, start, end - start)
        sizes = [(*x._sizes[:axis], n, *x._sizes[axis:][1:]) for n in (before, behind)]
        first, last = [[_filled(x, fill, size)] if n > 0 else []
                       for n, size in zip((before, behind), sizes, strict=True)]  # fmt: skip
        x = cat([*first, x, *last], axis)
    return copy(x) if x is input else x


def _padded_by_own(x: Tensor, pad: tuple, mode: str) -> Tensor:
    """The elements of the last axis, with others of its own at both ends."""
    if mode not in ("reflect", "replicate", "circular"):
        fail(UnsupportedError, f"F.pad(mode={mode!r}): it is 'constant', 'reflect', 'replicate' or "
             "'circular'")  # fmt: skip
    n = x._sizes[-1] if x.ndim else 0
    most = min({"reflect": n - 1, "replicate": MOST_PARTS, "circular": n}[mode], MOST_PARTS)
    if len(pad) != 2 or not all(type(k) is int and 0 <= k <= most for k in pad):
        fail(UnsupportedError, f"F.pad by {pad}, mode={mode!r}, of a value of shape "
             f"{tuple(x._sizes)}: it takes (before, behind) of the last axis, each from 0 to {most}"
             )  # fmt: skip
    before, behind = pad
    if mode == "reflect":
        ends = range(before, 0, -1), range(n - 2, n - 2 - behind, -1)
    elif mode == "replicate":
        ends = [0] * before, [n - 1] * behind
    else:
        ends = range(n - before, n), range(behind)
    first, last = ([part(x, -1, k, 1) for k in places] for places in ends)
    return cat([*first, x, *last], -1)


@implements("diff")
def diff(input, n=1, dim=-1, prepend=None, append=None):
    """The differences of neighbours along an axis; n times, each time of one element less."""
    axis = cut_axis(input, dim, "diff")
    ends = [[each] if each is not None else [] for each in (prepend, append)]
    x = cat([*ends[0], input, *ends[1]], axis)
    if not 0 <= n < x._sizes[axis]:
        fail(ShapeError, f"diff {n} times of an axis of {x._sizes[axis]} elements")
    for _ in range(n):
        size = x._sizes[axis] - 1
        first, second = part(x, axis, 0, size), part(x, axis, 1, size)
        x = first ^ second if x._value.dtype is BOOL else second - first
    return x


@implements("roll")
def roll(input, shifts, dims=None):
    """The elements of an axis moved on; those beyond its end come first.
    Of scans, rows of tables and matrices of 8 bits the axis is cut into pieces of gcd(shifts, size)
    elements, at most 64 of them."""
    several = [list(x) if isinstance(x, (tuple, list)) else [x] for x in (shifts, dims)]
    if isinstance(shifts, (tuple, list)) or isinstance(dims, (tuple, list)):
        return _rolled(input, *several)
    if not isinstance(shifts, int):
        fail(TraceError, f"torch.roll by {shifts!r}: expected a Python number")
    if dims is None and input.ndim > 1:  # the elements of all axes, one behind the other
        row = reshaped(input, (prod(input._sizes),))
        return reshaped(roll(row, shifts), tuple(input._sizes))
    axis = cut_axis(input, -1 if dims is None else dims, "roll")
    if shifts == 0:
        return copy(input)
    size = input._sizes[known_axis(input, axis, "roll")]
    first = -shifts % size
    if not first:
        return copy(input)
    return cat([part(input, axis, first, size - first), part(input, axis, 0, first)], axis)


def _rolled(x: Tensor, shifts: list, dims: list) -> Tensor:
    """`roll` along several axes, or one that is named as a tuple."""
    if len(shifts) != len(dims) or not shifts:
        fail(ShapeError, f"torch.roll by {shifts} along {dims}: expected a shift for each axis")
    for shift, dim in zip(shifts, dims, strict=True):
        x = roll(x, shift, dim)
    return x


@implements("glu", check=floating)
def glu(input, dim=-1):
    """The first half of an axis times the sigmoid of the second."""
    size = input._sizes[cut_axis(input, dim, "glu")]
    if size % 2:
        fail(ShapeError, f"glu of an axis of {size} elements: it takes two halves of one length")
    first, second = chunk(input, 2, dim)
    return first * torch.sigmoid(second)

"""Parts of an axis and what joins them, with torch's names: indexing, chunk, split, cat, stack.

Each is a movement: an element of the result is an element of an operand. In torch the parts are
views, so a part and what it was taken from are noted as aliases.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import NoReturn

import torch

from ..errors import DtypeError, ShapeError, TraceError, UnsupportedError, an
from . import hints
from .functions import implements
from .ops import Op, Value
from .promotion import BOOL, filled, floating, together
from .shapes import (
    _listed,
    axis_of,
    broadcast_to,
    cut_axis,
    known_axis,
    reshaped,
    squeeze,
    unsqueeze,
)
from .tensor import (
    Deferred,
    Length,
    Tensor,
    alias,
    copy,
    fail,
    is_real,
    location,
    node,
    refuse_iteration,
    viewed,
)

MOST_PARTS = 64  # of one axis: each part has its own place in the text of a kernel


class Nothing(Deferred):
    """A part without elements: torch.cat leaves it out, and any other use of it raises."""

    @staticmethod
    def __new__(cls, of: Tensor, axis: int) -> Tensor:
        v = _emptied(of, axis)
        return torch.Tensor._make_wrapper_subclass(cls, v.inner, dtype=v.dtype, device="meta")

    def __init__(self, of: Tensor, axis: int):
        """axis: of `of`, counted from the last, -1."""
        self._value, self._told, self._loc = _emptied(of, axis), tuple(of._sizes), location()
        self.dtype = of.dtype
        super().__init__(of, self._refused)

    _value = dtype = None  # those of an instance

    def _refused(self) -> NoReturn:
        what = f"a part without elements, of a value of shape {self._told}"
        fail(ShapeError, hints.NOTHING.format(what), self._loc)


def _emptied(x: Tensor, axis: int) -> Value:
    """What `x` is without the elements of an axis."""
    end = len(x._sizes) + axis
    return replace(x._value, inner=(*x._value.inner[:end], 0, *x._value.inner[end + 1 :]))


def part(x: Tensor, axis: int, start: int, size: int, step: int = 1) -> Tensor:
    """`size` elements of an axis, which counts from the last, -1."""
    if (start, size, step) == (0, x._sizes[axis], 1):
        return alias(x, x)
    if size < 1:
        return Nothing(x, axis)
    return alias(x, node(Op.SLICE, x, arg=(axis, start, step, size)))


def element(x: Tensor, axis: int, place: int) -> Tensor:
    """One element of an axis, without the axis."""
    size, shape = x._sizes[axis], tuple(x._sizes)
    if not -size <= place < size:
        fail(ShapeError, f"index {place} of an axis of {size} elements, of shape {shape}")
    if shape == (1,):
        return squeeze(x, -1)
    found = part(x, axis, place % size, 1)
    end = axis + len(shape) + 1
    return reshaped(found, (*shape[: end - 1], *shape[end:]))


def getitem(x: Tensor, index: object) -> Tensor:
    """Numbers, slices, None and ... as torch has them."""
    parts = index if isinstance(index, tuple) else (index,)
    for each in parts:
        if isinstance(each, Tensor):
            fail(UnsupportedError, _masked(each))
        if each is not None and each is not Ellipsis and type(each) not in (int, slice):
            fail(UnsupportedError, f"indexing with {each!r}: write numbers and slices"
                 f"{_as_list(each)}")  # fmt: skip
    taken = sum(each is not None and each is not Ellipsis for each in parts)
    if taken > x.ndim:
        fail(ShapeError, too_many(taken, x))
    if sum(each is Ellipsis for each in parts) == 0:
        parts = (*parts, Ellipsis)
    at = next(k for k, each in enumerate(parts) if each is Ellipsis)
    parts = (*parts[:at], *(slice(None),) * (x.ndim - taken), *parts[at + 1 :])
    result, axis = viewed(x), -sum(each is not None for each in parts)
    for place, each in enumerate(parts):
        behind = sum(other is not None for other in parts[place + 1 :])
        if each is None:
            result = unsqueeze(result, -1 - behind)
        elif isinstance(each, slice):
            result = _sliced(result, axis, each)
            axis += 1
        else:
            result = element(result, axis, each)
            axis += 1
    if result is not x and None not in parts:
        result._part_of = x, index
    return result


def _as_list(index: object) -> str:
    """What to write besides, in place of a sequence or of a list that is none of numbers."""
    if not isinstance(index, list | tuple | range) or not 0 < len(index) <= MOST_PARTS:
        return ""
    kinds = {type(each) for each in index}
    if kinds == {bool} and any(index):
        places = [k for k, is_in in enumerate(index) if is_in]
        return f", or the list of the places of True, {places}"
    return f", or the list {list(index)}" if kinds == {int} else ", or a list of numbers, x[[0, 2]]"


def too_many(taken: int, x: Tensor) -> str:
    """The message for more indices than a value has axes."""
    told = f"{taken} {'index' if taken == 1 else 'indices'} of a value of shape {tuple(x._sizes)}"
    if not x.ndim:
        return f"{told}: it is one number of the row; x[None] and x[..., None] give it an axis"
    return f"{told}: it has no leading dimensions inside the function, write x[:n] for x[:, :n]"


def check_slice(each: object) -> None:
    """Raise an error for a slice whose bounds are not integers that are known."""
    if not isinstance(each, slice):
        return
    bounds = (each.start, each.stop, each.step)
    odd = [b for b in bounds if b is not None and not hasattr(type(b), "__index__")]
    if odd:
        fail(TraceError, f"a slice from, to or by {odd[0]!r}: write integers, as in x[1:3]")
    if any(isinstance(bound, Tensor) for bound in bounds):
        tests = [f"torch.arange(x.shape[-1]) {sign} {name}"
                 for sign, name, bound in ((">=", "i", each.start), ("<", "j", each.stop))
                 if isinstance(bound, Tensor)]  # fmt: skip
        mask = f"({tests[0]}) & ({tests[1]})" if len(tests) > 1 else "".join(tests) or "a mask"
        ends = [name if isinstance(bound, Tensor) else "" if bound is None else str(bound)
                for name, bound in (("i", each.start), ("j", each.stop))]  # fmt: skip
        fail(UnsupportedError, f"x[{':'.join(ends)}], a slice with computed bounds, has no fixed "
             f"length: write torch.where({mask}, x, 0), or for x[{':'.join(ends)}] = y "
             f"torch.where({mask}, y, x)")  # fmt: skip


def _sliced(x: Tensor, axis: int, each: slice) -> Tensor:
    check_slice(each)
    if each.step is not None and each.step < 1:
        fail(ShapeError, f"the step {each.step} of a slice: torch takes steps of 1 and more")
    places = range(*each.indices(x._sizes[axis]))
    if places == range(x._sizes[axis]):
        return x
    return part(x, axis, places.start, len(places), places.step)


def _masked(index: Tensor) -> str:
    if index._value.dtype is torch.bool:
        return ("x[mask] has no fixed length: write torch.where(mask, x, other), as in "
                "torch.where(mask, x, 0).sum() for x[mask].sum(), and "
                "x = torch.where(mask, x * 2, x) for x[mask] *= 2")  # fmt: skip
    return (
        "an index that is a tensor stands alone: write m[0][y] for m[0, y], and of places that are "
        "numbers a list, m[[0, 2]]"
    )


# Parts


@implements("narrow")
def narrow(input, dim, start, length):
    """`length` elements of an axis from `start` on."""
    axis = known_axis(input, dim, "narrow")
    size = input._sizes[axis]
    start = start + size if start < 0 else start
    if not 0 <= start <= start + length <= size:
        fail(ShapeError, f"narrow({dim}, {start}, {length}) of an axis of {size} elements")
    return part(input, axis, start, length)


@implements("split", "split_with_sizes")
def split(tensor, split_size_or_sections, dim=0):
    """Parts of an axis: of so many elements each, the last one of the rest; or of these sizes."""
    axis = known_axis(tensor, dim, "split")
    size, sizes = tensor._sizes[axis], split_size_or_sections
    if isinstance(sizes, int):
        if sizes < 1:
            fail(ShapeError, f"split into parts of {sizes} elements")
        sizes = [min(sizes, size - start) for start in range(0, size, sizes)]
    if sum(sizes) != size:
        fail(ShapeError, f"split of {size} elements into parts of {list(sizes)}")
    starts = [sum(sizes[:k]) for k in range(_few(len(sizes)))]
    return tuple(part(tensor, axis, *each) for each in zip(starts, sizes, strict=True))


@implements("chunk")
def chunk(input, chunks, dim=0):
    """An axis in at most so many equal parts; the last one may be shorter."""
    if chunks < 1:
        fail(ShapeError, f"chunk into {chunks} parts")
    return split(input, -(-input._sizes[known_axis(input, dim, "chunk")] // chunks), dim)


@implements("tensor_split")
def tensor_split(input, indices_or_sections, dim=0):
    """An axis in so many parts, the first ones longer by one; or cut at these places."""
    axis = known_axis(input, dim, "tensor_split")
    size, cuts = input._sizes[axis], indices_or_sections
    if isinstance(cuts, int):
        if cuts < 1:
            fail(ShapeError, f"tensor_split into {cuts} parts")
        each, more = divmod(size, cuts)
        cuts = [k * each + min(k, more) for k in range(1, _few(cuts))]
    edges = [0, *cuts, size]
    _few(len(edges))
    places = [slice(*ends).indices(size) for ends in pairwise(edges)]
    return tuple(part(input, axis, start, end - start) for start, end, _ in places)


@implements("unbind")
def unbind(input, dim=0):
    """The elements of an axis, each without the axis."""
    axis = known_axis(input, dim, "unbind")
    return tuple(element(input, axis, k) for k in range(_few(input._sizes[axis])))


@implements("select")
def select(input, dim, index):
    """One element of an axis, without the axis."""
    return element(input, cut_axis(input, dim, "select"), index)


def _few(parts: int) -> int:
    if parts > MOST_PARTS:
        fail(UnsupportedError, f"{parts} parts of one axis: at most {MOST_PARTS} are written out")
    return parts


def _iterated(x: Tensor):
    if x.ndim == 1 and x._value.spread:
        if isinstance(x.shape[0], Length) or x._sizes[0] > MOST_PARTS:
            refuse_iteration()
    return iter(unbind(x, 0))


def _length(x: Tensor) -> int:
    cut_axis(x, 0, "len")
    if isinstance(x.shape[0], Length):
        fail(TraceError, "len(x) differs from call to call (dynamic_n=True): write x.shape[-1]")
    return x.shape[0]


Tensor.__iter__, Tensor.__len__ = _iterated, _length


# What joins parts


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
    Of matrices, scans and rows of tables the axis is cut into pieces of gcd(shifts, size) elements,
    at most 64 of them."""
    if not isinstance(shifts, int) or (dims is None and input.ndim != 1):
        fail(UnsupportedError, "torch.roll takes one shift and one axis here: x.roll(1, -1)")
    axis = cut_axis(input, -1 if dims is None else dims, "roll")
    if shifts == 0:
        return copy(input)
    size = input._sizes[known_axis(input, axis, "roll")]
    first = -shifts % size
    if not first:
        return copy(input)
    return cat([part(input, axis, first, size - first), part(input, axis, 0, first)], axis)


@implements("glu", check=floating)
def glu(input, dim=-1):
    """The first half of an axis times the sigmoid of the second."""
    size = input._sizes[cut_axis(input, dim, "glu")]
    if size % 2:
        fail(ShapeError, f"glu of an axis of {size} elements: it takes two halves of one length")
    first, second = chunk(input, 2, dim)
    return first * torch.sigmoid(second)

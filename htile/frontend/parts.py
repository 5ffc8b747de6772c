"""Parts of an axis, with torch's names: indexing, chunk, split, narrow.

Each is a movement: an element of the result is an element of an operand. In torch the parts are
views, so a part and what it was taken from are noted as aliases.
"""

from __future__ import annotations

from itertools import pairwise

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from . import hints
from .functions import implements
from .nothing import nothing_of
from .ops import Op
from .selected import selected
from .shapes import (
    cut_axis,
    known_axis,
    reshaped,
    squeeze,
    unsqueeze,
)
from .tensor import (
    Length,
    Ragged,
    Tensor,
    alias,
    fail,
    node,
    refuse_iteration,
    viewed,
)

MOST_PARTS = 64  # of one axis: each part has its own place in the text of a kernel
_COMPUTED = (
    "an index that is a tensor stands alone: write m[0][y] for m[0, y], and of places that are "
    "numbers a list, m[[0, 2]]"
)


def part(x: Tensor, axis: int, start: int, size: int, step: int = 1) -> Tensor:
    """`size` elements of an axis, which counts from the last, -1."""
    if (start, size, step) == (0, x._sizes[axis], 1):
        return alias(x, x)
    if size < 1:
        return nothing_of(x, axis)
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
    if len(parts) == 1 and is_mask(parts[0]):
        return selected(x, parts[0])
    for each in parts:
        if isinstance(each, Ragged):
            each._refuse("x[y[mask]] is not supported")
        if isinstance(each, Tensor):
            fail(UnsupportedError, f"a mask beside other indices: {hints.OTHER_MASK}"
                 if is_mask(each) else _COMPUTED)  # fmt: skip
        if each is not None and each is not Ellipsis and type(each) not in (int, slice):
            fail(UnsupportedError, f"indexing with {each!r}: write numbers and slices"
                 f"{_as_list(each)}")  # fmt: skip
    taken = sum(each is not None and each is not Ellipsis for each in parts)
    if taken > x.ndim:
        fail(ShapeError, too_many(taken, x))
    parts = with_one_ellipsis(x, parts)
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


def with_one_ellipsis(x: Tensor, parts: tuple) -> tuple:
    """The parts of an index without those `...` that stand for no axes.

    In torch each `...` skips as many axes as no part names. So one behind another finds none that
    are left, and torch refuses what follows it unless all axes are named.
    """
    ellipses = [k for k, each in enumerate(parts) if each is Ellipsis]
    if len(ellipses) < 2:
        return parts
    taken = sum(each is not None and each is not Ellipsis for each in parts)
    if taken < x.ndim and any(each is not Ellipsis for each in parts[ellipses[1] :]):
        fail(ShapeError, f"several `...` in the index of a value of shape {tuple(x._sizes)}: the "
             "first stands for all axes that are not named, so leave the others out")  # fmt: skip
    kept = (each for k, each in enumerate(parts) if each is not Ellipsis or k == ellipses[0])
    return tuple(kept)


def is_mask(index: object) -> bool:
    """Whether an index is a mask."""
    return isinstance(index, Tensor) and index._value.dtype is torch.bool


def _as_list(index: object) -> str:
    """What to write besides, in place of a sequence or of a list that is none of numbers."""
    if not isinstance(index, list | tuple | range) or not 0 < len(index) <= MOST_PARTS:
        return ""
    kinds = {type(each) for each in index}
    if any(issubclass(kind, Tensor) for kind in kinds):
        return ", and for an index that is computed torch.stack((x[i], x[j]))"
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
        fail(UnsupportedError, f"{parts} parts of one axis: at most {MOST_PARTS} are written out; "
             "a recurrence over more of them may be a cumulative sum or product")  # fmt: skip
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

"""The first elements of an axis with their indices: argmax, x.max(dim), and those of topk and sort.

An element and its index are one integer, a key, so one reduction finds both. Its order makes NaN
the largest element, and of equal elements the one of the smaller index comes first. Torch promises
that of argmax too, and leaves open which of equal elements topk gives.

An element of 64 bits leaves no bits for its index. So it is found first, and then its index.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..errors import DtypeError, UnsupportedError
from .dtypes import STORAGE
from .factories import index
from .functions import formulas, maximum, minimum, where
from .joins import cat
from .ops import MOVEMENTS, Op, not_computed
from .promotion import BOOL, FLOAT, INT64, cast, convert, scalar
from .reductions import amax, amin, reduced
from .shapes import axis_of, has_any_length, reshaped, unsqueeze
from .tensor import Deferred, Tensor, copy, fail, node

MOST_RANKS = 64  # elements of topk and sort; each takes a reduction
INT32 = torch.int32
_LOWEST, _HIGHEST = torch.iinfo(INT64).min, torch.iinfo(INT64).max


class Ranked(NamedTuple):
    """What `x.max(dim)`, `x.min(dim)`, `x.topk(k)` and `x.sort()` return."""

    values: Tensor
    indices: Tensor


def refuse_unranked(x: Tensor, what: str) -> None:
    """Raise DtypeError if elements of this dtype have no keys."""
    dtype = x._value.dtype
    if dtype in STORAGE:
        fail(DtypeError, not_computed(dtype))
    if dtype not in (FLOAT, INT32, INT64):
        name = str(x.dtype).removeprefix("torch.")
        fail(DtypeError, f"{what} of {name}: it takes floats and integers, write x.int()")


def _narrowed(x: Tensor, what: str) -> Tensor:
    """`x` as it is ranked: int64 that is known to fit 32 bits, as indices do, as int32."""
    refuse_unranked(x, what)
    return convert(x, INT32) if x._value.dtype is INT64 and _fits_32_bits(x) else x


def _fits_32_bits(x: Tensor) -> bool:
    """Whether int64 elements are indices, numbers of columns, or narrower integers converted."""
    builder, seen, todo = x._builder, set(), [x._id]
    while todo:
        each = builder[todo.pop()]
        if each.id in seen or each.op in (Op.KEY_INDEX, Op.INDEX) or each.value.dtype is not INT64:
            continue
        seen.add(each.id)
        if each.op not in MOVEMENTS and each.op not in (Op.CAST, Op.CONVERT):
            return False
        if any(builder[i].value.dtype is FLOAT for i in each.inputs):
            return False
        todo += each.inputs
    return True


def _places(x: Tensor, axis: int) -> Tensor:
    """The index of each element along an axis."""
    size = x._sizes[axis] if x.ndim else 1
    if size == 1 and not (x._value.spread and axis == -1):
        return scalar(x, 0, INT64)
    return reshaped(index(x._builder, size), (size, *(1,) * (-1 - axis)))


def _keys(x: Tensor, axis: int, smaller: bool, counts_back: bool = False) -> Tensor:
    """The key of each element, with its index along an axis, which may be counted back."""
    places = _places(x, axis)
    places = (x._sizes[axis] - 1) - places if counts_back else places
    return node(Op.KEY, x, places, arg=smaller)


def places_in(order: Tensor, axis: int) -> Tensor | None:
    """Where each element is in an order, if `order` has the indices of all elements in it.

    Its keys are known, so they are counted. None of other indices, which have to be sorted.
    """
    builder, size = order._builder, order._sizes[axis] if order.ndim else 1
    indices = builder[order._id]
    while indices.op in (Op.CAST, Op.CONVERT) and indices.value.dtype in (INT32, INT64):
        indices = builder[indices.inputs[0]]  # they are so few that every integer dtype has them
    if indices.op is not Op.KEY_INDEX:
        return None
    found = builder[indices.inputs[0]]
    if found.op is not Op.CAT or found.arg != axis or len(found.inputs) != size:
        return None
    first = builder[found.inputs[0]]
    if first.op is Op.RESHAPE:  # the axis that a reduction keeps
        first = builder[first.inputs[0]]
    keys = Tensor(builder, first.inputs[0])
    if builder[keys._id].op is not Op.KEY or keys._sizes != order._sizes:
        return None
    each, others = unsqueeze(keys, axis), unsqueeze(keys, axis - 1)
    is_before = others > each if first.op is Op.MAX else others < each
    return reduced(Op.SUM, convert(is_before, INT64), axis)


def _first_wide(
    x: Tensor, axis: int, is_largest: bool, is_left: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The first of elements of int64, and the mask of those that are equal to it.

    is_left: the mask of those that count; by default all do.
    """
    op, last = (Op.MAX, _LOWEST) if is_largest else (Op.MIN, _HIGHEST)
    value = reduced(op, x if is_left is None else where(is_left, x, last), axis, keepdim=True)
    return value, x == value if is_left is None else (x == value) & is_left


def _place(x: Tensor, axis: int, is_it: Tensor, keepdim: bool = True) -> Tensor:
    """The first index along an axis where a mask holds."""
    size = x._sizes[axis] if x.ndim else 1
    return reduced(Op.MIN, where(is_it, _places(x, axis), size), axis, keepdim)


def _wide_ranks(x: Tensor, k: int, axis: int, is_largest: bool, counts_back: bool) -> Ranked:
    """The first k elements of int64 along an axis, in order."""
    values, indices, is_left = [], [], None
    for _ in range(k):
        value, is_it = _first_wide(x, axis, is_largest, is_left)
        if counts_back:
            place = reduced(Op.MAX, where(is_it, _places(x, axis), -1), axis, keepdim=True)
            is_next = _places(x, axis) < place
        else:
            place = _place(x, axis, is_it)
            is_next = _places(x, axis) > place
        is_behind = x < value if is_largest else x > value
        is_left = is_behind | ((x == value) & is_next)
        values.append(value)
        indices.append(place)
    return Ranked(*(cat(each, axis) if k > 1 else each[0] for each in (values, indices)))


def first_index(x: Tensor, dim: object, keepdim: bool, is_largest: bool, what: str) -> Tensor:
    """The index of the first of the largest or smallest elements, or of the first NaN."""
    if dim is None and x.ndim > 1:
        found = first_index(reshaped(x, (x._sizes.numel(),)), -1, False, is_largest, what)
        return reshaped(found, (1,) * x.ndim) if keepdim else found
    axis = axis_of(x, -1 if dim is None else dim)
    x = _narrowed(x, what)
    if x._value.dtype is INT64:
        _, is_it = _first_wide(x, axis, is_largest)
        return _place(x, axis, is_it, keepdim)
    smaller = not is_largest
    if smaller and x._value.dtype is FLOAT:  # of keys NaN is the largest
        x, smaller = -x, False
    keys = _keys(x, axis, smaller)
    found = reduced(Op.MIN if smaller else Op.MAX, keys, axis, keepdim)
    return node(Op.KEY_INDEX, found, arg=smaller)


def _arg(is_largest: bool, what: str) -> Callable:
    return lambda input, dim=None, keepdim=False: first_index(input, dim, keepdim, is_largest, what)


def _extreme_or_pairwise(name: str, is_largest: bool) -> Callable:
    whole, pairwise = (amax, maximum) if is_largest else (amin, minimum)

    def function(input, dim=None, keepdim=False, *, other=None):
        if other is not None or isinstance(dim, (Tensor, float)):
            return pairwise(input, dim if other is None else other)
        if dim is None:
            return whole(input, dim, keepdim)
        axis = axis_of(input, dim)
        if input._value.dtype is FLOAT:
            op = Op.MAX if is_largest else Op.MIN
            values = reduced(op, input, axis, keepdim, is_first=True)
        else:
            values = whole(input, axis, keepdim)
        what = f"x.{name}(dim).indices"
        given = copy(input)  # which keeps its value if input is changed in place
        given = convert(given, INT32) if given._value.dtype is BOOL else given
        indices = Deferred(values, lambda: first_index(given, dim, keepdim, is_largest, what))
        return Ranked(values, indices)

    return function


def first_ranks(
    x: Tensor, k: int, axis: int, is_largest: bool, what: str, counts_back: bool = False
) -> Ranked:
    """The first k elements along an axis, in order, MOST_RANKS at most.

    counts_back: whether the one of the larger index comes first of equal elements.
    """
    of_any_length = has_any_length(x, axis)
    if of_any_length and what == "sort":
        fail(UnsupportedError, "sort of a row of any length (dynamic_n=True): write x.topk(k) for "
             "the first k, or leave dynamic_n out")  # fmt: skip
    if of_any_length:
        x._builder.least = max(x._builder.least, k)
    given, x = x._value, _narrowed(x, what)
    if x._value.dtype is INT64:
        return _wide_ranks(x, k, axis, is_largest, counts_back)
    keys = _keys(x, axis, not is_largest, counts_back)
    op, last = (Op.MAX, _LOWEST) if is_largest else (Op.MIN, _HIGHEST)
    found = [reduced(op, keys, axis, keepdim=True)]
    while len(found) < k:
        is_left = keys < found[-1] if is_largest else keys > found[-1]  # no two keys are equal
        found.append(reduced(op, where(is_left, keys, last), axis, keepdim=True))
    both = cat(found, axis) if k > 1 else found[0]
    values = convert(node(Op.KEY_VALUE, both, arg=x._value.dtype), given.dtype)
    values = values if given.stored is None else cast(values, given.stored)
    places = node(Op.KEY_INDEX, both, arg=not is_largest)
    return Ranked(values, (x._sizes[axis] - 1) - places if counts_back else places)


formulas({
    "argmax": ("The index of the largest element, the first of equal ones; NaN is the largest.",
        _arg(True, "argmax")),
    "argmin": ("The index of the smallest element, the first of equal ones, or of the first NaN.",
        _arg(False, "argmin")),
    "max": ("amax; with dim, (.values, .indices); with other, maximum.",
        _extreme_or_pairwise("max", True)),
    "min": ("amin; with dim, (.values, .indices); with other, minimum.",
        _extreme_or_pairwise("min", False)),
})  # fmt: skip

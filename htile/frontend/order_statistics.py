"""Elements of long rows by their rank: kthvalue, median, quantile, and parts of long sorts.

Those parts are of `x.sort()` and of `x.topk(k)` with more than 64 elements: single ones, some of
the first, and of a sort some of the last. No row is sorted for them. `Op.KTHVALUE` finds one
element of any rank by itself, and up to 64 at an end are found together. So what a sort of a long
row gives waits until the function takes a part of it.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from ..errors import DtypeError, ShapeError, TraceError, UnsupportedError
from .composites import INF, NAN, chosen, lerp, where
from .factories import index
from .functions import formulas, implements
from .joins import stack
from .ops import Op, Value
from .parts import part
from .promotion import FLOAT, INT64, cast, convert, scalar
from .ranks import (
    INT32,
    MOST_RANKS,
    Ranked,
    first_index,
    first_ranks,
    places_in,
    refuse_unranked,
)
from .reductions import reduced
from .shapes import axis_of, has_any_length, reshaped, unsqueeze
from .slopes import Slope
from .tensor import Deferred, Length, Tensor, copy, fail, node

# The first elements of an axis take less time together, if they are no more than so many, than one
# by its rank does. Of more, single ones are found by their ranks. Those of an axis of LONG elements
# are found together up to MOST_RANKS, in loops over the row if registers do not hold it.
MOST_OF_SHORT, LONG = 32, 1024
Rank = int | Tensor  # how many elements come before, from 0 on


def _most_together(size: int) -> int:
    """How many first elements of an axis are rather found together."""
    return MOST_RANKS if size >= LONG else MOST_OF_SHORT


def at_rank(x: Tensor, axis: int, rank: Rank, what: str) -> Tensor:
    """The element of a rank in ascending order along an axis, which is dropped.

    NaN is the largest. A rank beyond the axis, which only a tensor may be, gives NaN, and 0 of
    integers.
    """
    refuse_unranked(x, what)
    found = _at_rank(x, axis, rank, what)
    return found if x._value.stored is None else cast(found, x._value.stored)


def _at_rank(x: Tensor, axis: int, rank: Rank, what: str) -> Tensor:
    size, dtype = x._sizes[axis] if x.ndim else 1, x._value.dtype
    of_any_length = has_any_length(x, axis)
    is_short = size <= MOST_RANKS and not of_any_length
    if not isinstance(rank, Tensor):
        # A rank is counted from the end only where all calls have the same end.
        near = rank if of_any_length else min(rank, size - 1 - rank)
        if near < _most_together(size) or is_short:
            is_low = near == rank
            found = first_ranks(x, near + 1, axis, not is_low, what).values
            return _last(found, axis if x.ndim else -1, near + 1)
        return _found(x, axis, scalar(x, rank, INT32), what)
    of_groups = rank._sizes.numel() > 1
    if of_groups and not is_short:
        fail(UnsupportedError, f"{what} along an axis of {size} elements whose rank each group has "
             f"of its own: at most {MOST_RANKS} elements; pass the groups as rows, "
             "x.unflatten(-1, (groups, -1))")  # fmt: skip
    rank = convert(rank if of_groups else reshaped(rank, ()), INT32)
    if is_short:
        found = _one_of_few(x, axis, rank, what)
    else:
        found = _found(x, axis, rank, what)
    if dtype is FLOAT and not is_short:  # it is NaN beyond the row
        return found
    is_there = (rank >= 0) & (rank < x.shape[axis])
    return where(is_there, found, NAN if dtype is FLOAT else 0)


def _found(x: Tensor, axis: int, rank: Tensor, what: str) -> Tensor:
    if x._value.dtype is INT64:
        fail(DtypeError, f"{what} of int64 at a rank that is far from both ends: such ranks are "
             "found in floats and int32, write x.int() where all numbers fit 32 bits")  # fmt: skip
    return node(Op.KTHVALUE, x, rank, arg=axis if x.ndim > 1 else None)


def _last(found: Tensor, axis: int, count: int) -> Tensor:
    """The last of so many elements of an axis, without the axis."""
    return reduced(Op.MAX, part(found, axis, count - 1, 1), axis) if found.ndim else found


def _one_of_few(x: Tensor, axis: int, rank: Tensor, what: str) -> Tensor:
    """The same of a short axis, all of which is sorted."""
    size = x._sizes[axis]
    ordered = first_ranks(x, size, axis, False, what).values
    places = reshaped(index(x._builder, size), (size, *(1,) * (-1 - axis)))
    is_it = places == (unsqueeze(rank, axis) if rank.ndim else rank)
    if x._value.dtype is not FLOAT:
        return reduced(Op.SUM, where(is_it, ordered, 0), axis)
    return reduced(Op.MAX, where(is_it, ordered, -INF), axis)


class Sorted(Deferred):
    """The first elements of an axis in order, which wait until the function takes some of them."""

    _field = "values"  # what is taken of `Ranked`

    @staticmethod
    def __new__(cls, of: Tensor, axis: int, count: int, *others: object) -> Tensor:
        inner = list(of._sizes)
        inner[axis] = count
        dtype = of.dtype if cls._field == "values" else INT64
        return torch.Tensor._make_wrapper_subclass(cls, inner, dtype=dtype, device="meta")

    def __init__(
        self, of: Tensor, axis: int, count: int, is_descending: bool, what: str, known: dict
    ):
        """known: what is found already, of the elements or of their indices."""
        self._of, self._axis, self._count, self._known = of, axis, count, known
        self._is_descending, self._what = is_descending, what
        super().__init__(of, self._all)

    def _all(self) -> Tensor:
        if self._count > MOST_RANKS:
            _refuse(self._what, self._count, self._is_whole)
        return self._first(self._count)

    @property
    def _is_whole(self) -> bool:
        """Whether these are all elements of the axis, of which the last are found too."""
        return self._count == self._of._sizes[self._axis]

    def _first(self, count: int) -> Tensor:
        """The first of them."""
        return self._ranks(count, self._is_descending, False)

    def _last(self, count: int) -> Tensor:
        """The last elements of an axis that is sorted whole."""
        return torch.flip(self._ranks(count, not self._is_descending, True), (self._axis,))

    def _ranks(self, count: int, is_largest: bool, counts_back: bool) -> Tensor:
        """What `first_ranks` finds, once for the elements and for their indices."""
        key = count, is_largest, counts_back, torch.is_grad_enabled()
        if key not in self._known:
            self._known[key] = first_ranks(
                self._of, count, self._axis, is_largest, self._what, counts_back
            )
        return copy(getattr(self._known[key], self._field))

    @property
    def _value(self) -> Value:
        inner = list(self._of._value.inner)
        inner[self._axis] = self._count
        return replace(self._of._value, inner=tuple(inner))

    @property
    def dtype(self) -> torch.dtype:
        """That of the elements."""
        return self._of.dtype

    def _copied(self) -> Tensor:
        if self._made is not None:
            return Tensor(self._builder, self._id)
        of = copy(self._of)  # which has no gradient in `torch.no_grad()`, other than what is known
        return type(self)(of, self._axis, self._count, self._is_descending, self._what, {})

    def _later(self, op: Op, operands: tuple[Tensor, ...], arg: object) -> Tensor | None:
        """What an operation takes of the elements; None where it takes more than a few."""
        if self._made is not None:
            return None
        over = -1 if arg is None else arg
        if op is Op.SLICE and arg[0] == self._axis:
            return self._part(*arg[1:])
        if op is Op.TAKE:
            return self._at(operands[1])
        if op in (Op.MAX, Op.MIN) and over == self._axis:
            return self._extreme(op)
        return None

    def _extreme(self, op: Op) -> Tensor:
        """The largest, or the smallest one, which is NaN if any is. NaN is the largest of all."""
        ends = self._at(0), self._at(self._count - 1)
        largest, smallest = ends if self._is_descending else ends[::-1]
        if op is Op.MAX:
            return largest
        return smallest if self._of._value.dtype is not FLOAT else where(
            torch.isnan(largest), NAN, smallest
        )  # fmt: skip

    def _part(self, start: int, step: int, size: int) -> Tensor | None:
        if size == 1:
            return unsqueeze(self._at(start), self._axis)
        return self._near_an_end(start, step, size)

    def _near_an_end(self, start: int, step: int, size: int) -> Tensor | None:
        """A part that is found with the first elements, or with the last; None of another."""
        behind = start + step * (size - 1) + 1
        if behind <= MOST_RANKS:
            return part(self._first(behind), self._axis, start, size, step)
        left = self._count - start
        if left <= MOST_RANKS and self._is_whole:
            return part(self._last(left), self._axis, 0, size, step)
        return None

    def _at(self, place: Rank) -> Tensor:
        size = self._of.shape[self._axis]
        return at_rank(
            self._of, self._axis, size - 1 - place if self._is_descending else place, self._what
        )


class SortedIndices(Sorted):
    """The indices of `Sorted`, of which some of the first or of the last can be taken."""

    _field = "indices"

    @property
    def _value(self) -> Value:
        return replace(super()._value, dtype=INT64, stored=None)

    @property
    def dtype(self) -> torch.dtype:
        """That of indices."""
        return INT64

    def _later(self, op: Op, operands: tuple[Tensor, ...], arg: object) -> Tensor | None:
        if self._made is None and op is Op.SLICE and arg[0] == self._axis:
            return self._near_an_end(*arg[1:])
        return None


def _refuse(what: str, count: int, is_whole: bool) -> None:
    ends = "first or last" if is_whole else "first"
    fail(UnsupportedError, f"{what} of {count} elements: at most {MOST_RANKS} are found at once. "
         f"The {ends} few can be taken, as {what}(...).indices[:k], and one of any rank, as "
         "values[k - 1]. What lies above it is torch.where(x >= values[k - 1], x, 0). A "
         "threshold by sums, as that of top-p, is found by bisection: see "
         "examples/gallery/top_p.py")  # fmt: skip


def _later(x: Tensor, count: int, axis: int, is_descending: bool, what: str) -> Ranked:
    """So many elements of a long axis in order, of which parts can be taken (`Sorted`)."""
    refuse_unranked(x, what)
    given = copy(x), axis, count, is_descending, what, {}
    return Ranked(Sorted(*given), SortedIndices(*given))


def _axis_with(x: Tensor, dim: int, k: object, what: str) -> int:
    """An axis that has k elements or more; of any length, calls with fewer are refused."""
    axis, size = axis_of(x, dim), x._sizes[dim] if x.ndim else 1
    if isinstance(k, Length):
        int(k)  # it raises, and says why
    if type(k) is not int or not 1 <= k <= size:
        told = "the length of the row" if has_any_length(x, axis) else size
        fail(ShapeError, f"{what}(k={k!r}) of {size} elements: k is a number from 1 to {told}")
    if has_any_length(x, axis):
        x._builder.least = max(x._builder.least, k)
    return axis


@implements("topk")
def topk(input, k, dim=-1, largest=True, sorted=True):
    """The k largest or smallest elements in order and their indices.
    Of more than 64, some of the first 64 can be taken, and single values, as
    x.topk(500).values[-1]."""
    axis = _axis_with(input, dim, k, "topk")
    if k > _most_together(input._sizes[axis] if input.ndim else 1):
        return _later(input, k, axis, largest, "topk")
    return first_ranks(input, k, axis, largest, "topk")


@implements("sort")
def sort(input, dim=-1, descending=False, *, stable=True):
    """The elements of an axis in order, and their indices; equal ones keep theirs.
    Of more than 64, some of the first or last 64 can be taken, and single values of any rank."""
    axis = axis_of(input, dim)
    size = input._sizes[axis] if input.ndim else 1
    if size > MOST_RANKS and not has_any_length(input, axis):
        return _later(input, size, axis, descending, "sort")
    return first_ranks(input, size, axis, descending, "sort")


@implements("msort")
def msort(input):
    """The elements along the first axis in order."""
    return sort(input, 0).values


@implements("argsort")
def argsort(input, dim=-1, descending=False, *, stable=True):
    """The indices of `sort`: of more than 64, some of the first or last 64.
    `x.argsort().argsort()` of at most 64 counts the elements before each."""
    axis = axis_of(input, dim)
    places = None if has_any_length(input, axis) else places_in(input, axis)
    if places is not None:
        return torch.flip(places, (axis,)) if descending else places
    return sort(input, dim, descending).indices


def _with_index(x: Tensor, axis: int, found: Tensor, keepdim: bool, what: str) -> Ranked:
    """An element and its index, which is that of the first of equal ones."""
    kept = unsqueeze(found, axis) if x.ndim else found
    given, value = copy(x), copy(kept)

    def place() -> Tensor:
        is_it = given == value
        if given._value.dtype is FLOAT:
            is_it = is_it | (torch.isnan(given) & torch.isnan(value))
        return first_index(convert(is_it, FLOAT), axis, keepdim, True, what)

    return Ranked(kept if keepdim else found, Deferred(kept if keepdim else found, place))


@implements("kthvalue")
def kthvalue(input, k, dim=-1, keepdim=False):
    """The k-th smallest element and its index, the first of equal ones; NaN is the largest."""
    axis = _axis_with(input, dim, k, "kthvalue")
    found = at_rank(input, axis, k - 1, "kthvalue")
    return _with_index(input, axis, found, keepdim, "kthvalue")


def _median(skips_nan: bool, what: str):
    def function(input, dim=None, keepdim=False):
        refuse_unranked(input, what)
        if dim is None:
            x = reshaped(input, (input._sizes.numel(),)) if input.ndim > 1 else input
            return _middle(x, -1, skips_nan, what) if x.ndim else copy(x)
        axis = axis_of(input, dim)
        found = _middle(input, axis, skips_nan, what) if input.ndim else copy(input)
        return _with_index(input, axis, found, keepdim, what)

    return function


def _middle(x: Tensor, axis: int, skips_nan: bool, what: str) -> Tensor:
    """The lower one of two elements in the middle."""
    if x._value.dtype is not FLOAT:
        return at_rank(x, axis, (x.shape[axis] - 1) // 2, what)
    if skips_nan:
        return at_rank(x, axis, (_present(x, axis) - 1) // 2, what)
    found = at_rank(x, axis, (x.shape[axis] - 1) // 2, what)
    return _nan_of_nan(x, axis, found)


def _present(x: Tensor, axis: int) -> Tensor:
    """How many elements are not NaN."""
    return reduced(Op.SUM, convert(x == x, INT32), axis)


def _nan_of_nan(x: Tensor, axis: int, found: Tensor) -> Tensor:
    """A result that is NaN where any element is."""
    result = where(reduced(Op.ANY, torch.isnan(x), axis), NAN, found)
    return result if x._value.stored is None else cast(result, x._value.stored)


WAYS = "linear", "lower", "higher", "midpoint", "nearest"


def _quantile(skips_nan: bool, what: str):
    def function(input, q, dim=None, keepdim=False, *, interpolation="linear"):
        if input.dtype is not FLOAT:
            name = str(input.dtype).removeprefix("torch.")
            fail(DtypeError, f"{what} of {name}: it takes float32, write x.float()")
        x = input
        if interpolation not in WAYS:
            fail(TraceError, f"interpolation={interpolation!r}: expected one of {', '.join(WAYS)}")
        if not isinstance(q, (Tensor, int, float)) or isinstance(q, bool):
            fail(TraceError, f"q={q!r}: expected a number from 0 to 1, or a tensor of such")
        if not isinstance(q, Tensor) and not 0 <= q <= 1:
            fail(TraceError, f"q={q!r}: expected a number from 0 to 1")
        if isinstance(q, Tensor) and q.ndim > 1:
            fail(ShapeError, f"q of shape {tuple(q._sizes)}: expected a number or a vector")
        axis, shape = -1, (1,) * x.ndim
        if dim is not None:
            axis = axis_of(x, dim)
            shape = (*x._sizes[:axis], 1, *x._sizes[axis:][1:])
        elif x.ndim > 1:
            x = reshaped(x, (x._sizes.numel(),))

        def of(share: float | Tensor) -> Tensor:
            found = _of_share(x, axis, share, interpolation, skips_nan, what)
            return reshaped(found, shape) if keepdim and shape else found

        if isinstance(q, Tensor) and q.ndim:
            return stack([of(part(q, -1, k, 1)[0]) for k in range(q._sizes[0])])
        return of(q)

    return function


def _of_share(
    x: Tensor, axis: int, share: float | Tensor, way: str, skips_nan: bool, what: str
) -> Tensor:
    """The quantile of one share of the elements; the position is the share of the last index."""
    is_linear = way in ("linear", "midpoint")
    if not x.ndim:
        return _interpolated(x) if is_linear else copy(x)
    last = _present(x, axis) - 1 if skips_nan else x.shape[axis] - 1
    place = share * (convert(last, FLOAT) if isinstance(last, Tensor) else last)
    rounded = _below(place)
    if way == "higher":
        rounded = -_below(-place)
    elif way == "nearest":
        rounded = torch.round(place) if isinstance(place, Tensor) else round(place)
    found = at_rank(x, axis, rounded, what)
    weight = 0.5 if way == "midpoint" else place - rounded
    is_one = place == rounded
    if is_linear and is_one is not True:
        between = lerp(found, _next(x, axis, found, rounded), weight)
        is_known = is_one is False
        found = between if is_known else where(is_one, _interpolated(found), between)
    elif is_linear:
        found = _interpolated(found)
    return found if skips_nan else _nan_of_nan(x, axis, found)


def _interpolated(x: Tensor) -> Tensor:
    """What lies between a number and itself, as torch has it: nothing of an infinite one."""
    return chosen(abs(x) == INF, NAN, x, Slope.LAST)


def _below(place: float | Tensor) -> Rank:
    """The largest integer that is not above a number."""
    return torch.floor(place) if isinstance(place, Tensor) else math.floor(place)


def _next(x: Tensor, axis: int, found: Tensor, rank: Rank) -> Tensor:
    """The element behind the one of a rank: an equal one, or the least that is larger."""
    each = unsqueeze(found, axis)
    count = reduced(Op.SUM, convert(x <= each, INT32), axis)
    larger = reduced(Op.MIN, where(x > each, x, INF), axis, is_first=True)
    return where(count > rank + 1, found, larger)


formulas({
    "median": ("The middle element, the lower one of two; with dim, (.values, .indices).",
        _median(False, "median")),
    "nanmedian": ("`median` of the elements that are not NaN.", _median(True, "nanmedian")),
    "quantile": ("The element at a share q of the row, between two if need be.\n"
        "A number of a tensor q that is not from 0 to 1 gives NaN.",
        _quantile(False, "quantile")),
    "nanquantile": ("`quantile` of the elements that are not NaN.",
        _quantile(True, "nanquantile")),
})  # fmt: skip

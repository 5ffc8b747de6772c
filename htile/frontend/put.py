"""Elements that are put at a few indices of an axis: `x.scatter(dim, index, y)` and its relatives.

Each index is compared with the number of every element, so nothing is written outside of a row. An
index of an element that does not exist changes nothing, where torch raises. Of equal indices the
last one counts, in the order of the indices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from ..errors import DtypeError, ShapeError, TraceError, UnsupportedError
from .dtypes import STORAGE
from .factories import index as places_of
from .functions import implements, masked_fill, maximum, minimum, where
from .ops import broadcast_shapes
from .parts import MOST_PARTS, part
from .promotion import BOOL, FLOAT, INT64, filled, floating, into, operand, refuse
from .reductions import amax, amin, prod, sum
from .shapes import axis_of, broadcast_to, reshaped
from .tensor import Tensor, fail

Combine = Callable[[Tensor, object], Tensor]
FEW = 8  # of a row of indices, which are put one by one; more are looked for in the whole row
COMBINE = {
    "sum": operator.add, "add": operator.add, "prod": operator.mul, "multiply": operator.mul,
    "amax": maximum, "amin": minimum,
}  # fmt: skip
OF_MANY = {operator.add: sum, operator.mul: prod, maximum: amax, minimum: amin}
"""From what combines two elements to what combines all of an axis."""


def _put(
    x: Tensor, axis: int, index: Tensor, source: object, what: str, combine: Combine | None = None
) -> Tensor:
    """`x` with elements of the source, or what they combine to with its own.

    index: integers, as many along the axis as are put, and along other axes 1 or as many as `x`.
    source: a number, or a value whose axes are those of `index`, or broadcast to them.
    """
    _check(x, axis, index, source, what, combine)
    if not isinstance(source, Tensor) and x._value.dtype is not FLOAT:
        source = (bool if x._value.dtype is BOOL else int)(source)  # as torch converts it first
    is_row = combine is not None and x.ndim == 1 and index._value.spread
    if index._sizes[axis] > (FEW if is_row else MOST_PARTS):
        return _of_many(x, index, source, combine)
    size = x._sizes[axis] if x.ndim else 1
    places = reshaped(places_of(x._builder, size), (size, *(1,) * (-1 - axis)))
    for k in range(index._sizes[axis]):
        is_it = broadcast_to(places == part(index, axis, k, 1), x.shape)
        each = part(source, axis, k, 1) if isinstance(source, Tensor) and source.ndim else source
        new = each if combine is None else combine(x, each)
        if isinstance(new, Tensor) and new.ndim:
            x = where(is_it, into(broadcast_to(new, x.shape), x._value), x)
        else:
            x = masked_fill(x, is_it, new)
    return x


def _of_many(x: Tensor, index: Tensor, source: object, combine: Combine) -> Tensor:
    """A few elements, each combined with all elements of a row that have its index."""
    places = reshaped(places_of(x._builder, x._sizes[0]), (x._sizes[0], 1))
    dtype = (source if isinstance(source, Tensor) else x)._value.dtype
    own = where(places == index, source, neutral(combine, dtype))
    return combine(x, into(OF_MANY[combine](own, -1), x._value))


def neutral(combine: Combine, dtype: torch.dtype) -> bool | int | float:
    """What changes no number of a dtype that it is combined with."""
    if combine in (operator.add, operator.mul):
        return int(combine is operator.mul)
    lowest, highest = -torch.inf, torch.inf
    if dtype is BOOL:
        lowest, highest = False, True
    elif dtype is not FLOAT:
        lowest, highest = torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return lowest if combine is maximum else highest


def _check(
    x: Tensor, axis: int, index: Tensor, source: object, what: str, combine: Combine | None
) -> None:
    """Raise what is wrong with the index or the source."""
    if combine is not None and x._value.dtype in STORAGE:
        refuse(what, x, "convert it first, x.int() or x.float()")
    if index._value.dtype not in (torch.int32, INT64):
        fail(DtypeError, f"{what} by an index of {index._value.dtype}: write index.long()")
    is_of_few = combine is not None and x.ndim == 1 and x._sizes[0] <= MOST_PARTS
    if index._sizes[axis] > MOST_PARTS and not is_of_few:
        fail(UnsupportedError, f"{what} by {index._sizes[axis]} indices: at most {MOST_PARTS} "
             f"elements are put; more can only be combined with a row of at most {MOST_PARTS}, as "
             "by scatter_add and scatter_reduce")  # fmt: skip
    if not isinstance(source, Tensor):
        return
    shape = tuple(index._sizes)
    if source.ndim and broadcast_shapes(tuple(source._sizes), shape) != shape:
        fail(ShapeError, f"{what} of values of shape {tuple(source._sizes)} at indices of shape "
             f"{shape}: give one value for each index")  # fmt: skip
    if not torch.can_cast(source._value.dtype, x._value.dtype):
        fail(DtypeError, f"{what} cannot put {source._value.dtype} into {x._value.dtype}: convert "
             "the values, or x before")  # fmt: skip


def _refuse_others(x: Tensor, index: object, what: str) -> None:
    """Raise what is wrong with an index that is no tensor, or with a number that has no axes."""
    if not isinstance(index, Tensor):
        fail(TraceError, f"{what} by {index!r}: an index is a tensor, torch.tensor([...])")
    if not x.ndim:
        fail(ShapeError, f"{what} into a value of shape (): write torch.where")


def _scattered(
    x: Tensor, dim: int, index: Tensor, source: object, what: str, combine: Combine | None = None
) -> Tensor:
    """What `_put` gives, of an index and a source with the axes of `x`, as scatter takes them."""
    _refuse_others(x, index, what)
    axis, sizes = axis_of(x, dim), tuple(index._sizes)
    if not sizes:
        fail(ShapeError, f"{what} by an index of shape (): write index[None]")
    others = [n for k, n in enumerate(sizes) if k != axis + len(sizes)]
    if index.ndim != x.ndim or others != [n for k, n in enumerate(x._sizes) if k != axis + x.ndim]:
        fail(ShapeError, f"{what} by an index of shape {sizes} into x of shape {tuple(x._sizes)}: "
             "its sizes along all other axes must be those of x")  # fmt: skip
    if isinstance(source, Tensor) and source.ndim == index.ndim:
        for k, n in enumerate(sizes):
            if n < source._sizes[k]:
                source = part(source, k - len(sizes), 0, n)
    return _put(x, axis, index, source, what, combine)


@implements("scatter")
def scatter(input, dim, index, src=None, *, value=None, reduce=None):
    """input with the elements of src, or one value, at a few indices along an axis.

    index: integers, at most 64 along the axis, and as many as input has along every other one.
    reduce: None, "add" or "multiply".
    """
    source = value if src is None else src
    if source is None or reduce not in (None, "add", "multiply"):
        fail(UnsupportedError, f"scatter(reduce={reduce!r}) of {source!r}: it takes src or value, "
             "and reduce is None, 'add' or 'multiply'")  # fmt: skip
    return _scattered(input, dim, index, source, "scatter", COMBINE.get(reduce))


@implements("scatter_add")
def scatter_add(input, dim, index, src):
    """input with the elements of src added at a few indices along an axis."""
    return _scattered(input, dim, index, src, "scatter_add", operator.add)


@implements("scatter_reduce")
def scatter_reduce(input, dim, index, src, reduce, *, include_self=True):
    """input combined with the elements of src at a few indices: sum, prod, mean, amax or amin.

    include_self: whether an element that others are combined with is one of them.
    """
    what, is_mean = "scatter_reduce", reduce == "mean"
    if not is_mean and reduce not in ("sum", "prod", "amax", "amin"):
        fail(UnsupportedError, f"scatter_reduce({reduce!r}): it is sum, prod, mean, amax or amin")
    combine = operator.add if is_mean else COMBINE[reduce]
    x = floating(input, "scatter_reduce('mean')") if is_mean else input
    if not is_mean and include_self:
        return _scattered(x, dim, index, src, what, combine)
    count = _scattered(filled(x, 0, torch.int32), dim, index, 1, what, operator.add)
    own = x if include_self else where(count > 0, neutral(combine, x._value.dtype), x)
    found = _scattered(own, dim, index, src, what, combine)
    return where(count > 0, found / (count + include_self), x) if is_mean else found


def _along(
    x: Tensor, dim: int, index: Tensor, source: object, what: str, combine: Combine | None = None
) -> Tensor:
    """What `_put` gives, of a vector of indices, each of which names a whole part of `x`."""
    _refuse_others(x, index, what)
    axis = axis_of(x, dim)
    if index.ndim > 1:
        fail(ShapeError, f"{what} by an index of shape {tuple(index._sizes)}: it takes a vector")
    count = index._sizes[0] if index.ndim else 1
    shape = [count if k - x.ndim == axis else 1 for k in range(x.ndim)]
    whole = [count if k - x.ndim == axis else n for k, n in enumerate(x._sizes)]
    if isinstance(source, Tensor) and source.ndim and list(source._sizes) != whole:
        fail(ShapeError, f"{what} of values of shape {tuple(source._sizes)}: {count} indices of x "
             f"of shape {tuple(x._sizes)} take those of shape {tuple(whole)}")  # fmt: skip
    places = broadcast_to(reshaped(index, tuple(shape)), tuple(whole))
    return _put(x, axis, places, source, what, combine)


@implements("index_fill")
def index_fill(input, dim, index, value):
    """input with one value in its parts at a few indices of an axis; negative ones count back."""
    if isinstance(operand(value), Tensor) and value.ndim:
        fail(ShapeError, f"index_fill takes one value, got one of shape {tuple(value._sizes)}")
    _refuse_others(input, index, "index_fill")
    n = input.shape[axis_of(input, dim)]  # of a row of any length, what the call has
    return _along(input, dim, where(index < 0, index + n, index), value, "index_fill")


@implements("index_copy")
def index_copy(input, dim, index, source):
    """input with the parts of source at a few indices of an axis."""
    return _along(input, dim, index, source, "index_copy")


@implements("index_add")
def index_add(input, dim, index, source, *, alpha=1):
    """input with alpha times the parts of source added at a few indices of an axis."""
    if isinstance(alpha, float) and not input.is_floating_point():
        fail(DtypeError, f"index_add(alpha={alpha}) into {input._value.dtype}: write an integer")
    source = source if alpha == 1 else source * alpha
    return _along(input, dim, index, source, "index_add", operator.add)

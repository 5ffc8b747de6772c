"""Reductions over the axes of a row. One over a single element is that element."""

from __future__ import annotations

from collections.abc import Callable
from math import prod as prod_of
from typing import NamedTuple

from ..errors import ShapeError
from .functions import formulas
from .ops import Op
from .promotion import BOOL, FLOAT, INT64, cast, convert, not_zero
from .shapes import axes_of
from .slopes import FirstAlong
from .tensor import Tensor, copy, fail, node


def reduced(
    op: Op, x: Tensor, dim: object = None, keepdim: bool = False, is_first: bool = False
) -> Tensor:
    """A reduction over an axis, several, or all. An axis of one value per row is dropped.

    is_first: of an extreme of floats, whether the first of equal elements has its slope.
    """
    axes, shape = axes_of(x, dim), tuple(x._sizes)
    kept = tuple(1 if k - len(shape) in axes else size for k, size in enumerate(shape))
    left = kept if keepdim else tuple(s for k, s in enumerate(shape) if k - len(shape) not in axes)
    result, done = x, 0
    if len(axes) > 1 and axes == tuple(range(-len(axes), 0)) and x._value.spread:
        # The last axes are reduced as one, so that it does not matter how they cut the row.
        together = *shape[: -len(axes)], prod_of(shape[-len(axes) :])
        result, axes, shape = node(Op.RESHAPE, x, arg=together), (-1,), together
    for axis in axes if shape else ():  # those before it are gone, and it counts from the last
        if shape[axis] != 1 or (x._value.spread and axis == -1):
            arg = axis if result.ndim > 1 else None
            result = node(op, result, arg=FirstAlong(axis) if is_first else arg)
            done += 1
        else:
            result = _without(result, axis)
    if not done and left == shape:
        return copy(x)
    return result if tuple(result._sizes) == left else node(Op.RESHAPE, result, arg=left)


def _without(x: Tensor, axis: int) -> Tensor:
    """A value without an axis of size 1."""
    inner = list(x._sizes)
    del inner[axis]
    return node(Op.RESHAPE, x, arg=tuple(inner))


def _summed(op: Op, of_masks: Op) -> Callable:
    def function(input, dim=None, keepdim=False, *, dtype=None):
        x = input if dtype is None else cast(input, dtype)
        if dtype is BOOL:
            return reduced(of_masks, x, dim, keepdim)
        if x._value.dtype is BOOL or (dtype is None and x._value.dtype is not FLOAT):
            x = convert(x, INT64)
        total = reduced(op, x, dim, keepdim)
        return total if dtype is None else cast(total, dtype)

    return function


def _extreme(op: Op, of_masks: Op) -> Callable:
    def function(input, dim=None, keepdim=False):
        return reduced(of_masks if input._value.dtype is BOOL else op, input, dim, keepdim)

    return function


def named(dim: object) -> object:
    """`dim`, of a function that does not take () for all axes, as others do."""
    if dim == () and isinstance(dim, tuple):
        fail(ShapeError, "dim=() names no axis: name one, or leave dim out for all of them")
    return dim


class Extremes(NamedTuple):
    """What `x.aminmax()` returns."""

    min: Tensor
    max: Tensor


def _aminmax(input, *, dim=None, keepdim=False):
    return Extremes(amin(input, dim, keepdim), amax(input, dim, keepdim))


def _quantified(op: Op) -> Callable:
    return lambda input, dim=None, keepdim=False: reduced(op, not_zero(input), named(dim), keepdim)


sum, prod = _summed(Op.SUM, Op.ANY), _summed(Op.PROD, Op.ALL)
amax, amin = _extreme(Op.MAX, Op.ANY), _extreme(Op.MIN, Op.ALL)
formulas({
    "sum": ("The sum of the row; int64 of integers and masks.", sum),
    "prod": ("The product of the row; int64 of integers and masks.", prod),
    "amax": ("The largest element; NaN if any is.", amax),
    "amin": ("The smallest element; NaN if any is.", amin),
    "aminmax": ("(.min, .max): amin and amax.", _aminmax),
    "any": ("Whether any element is nonzero.", _quantified(Op.ANY)),
    "all": ("Whether all elements are nonzero.", _quantified(Op.ALL)),
})  # fmt: skip

"""Reductions over the row. One over a value per row, which has one element, is that element."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .functions import formulas, maximum, minimum
from .ops import Op
from .promotion import BOOL, FLOAT, INT64, cast, convert, not_zero
from .shapes import check_dim
from .tensor import NoIndices, Tensor, copy, node


def reduced(op: Op, x: Tensor, dim: object = None, keepdim: bool = False) -> Tensor:
    """A reduction over the row; of a value per row (one element), that element."""
    check_dim(x, dim)
    v = x._value
    if not v.spread:
        return copy(x) if keepdim or not v.inner else node(Op.RESHAPE, x, arg=())
    result = node(op, x)
    return node(Op.RESHAPE, result, arg=(1,)) if keepdim else result


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


def _quantified(op: Op) -> Callable:
    return lambda input, dim=None, keepdim=False: reduced(op, not_zero(input), dim, keepdim)


class Extreme(NamedTuple):
    """What `x.max(dim=-1)` and `x.min(dim=-1)` return."""

    values: Tensor
    indices: object


def _extreme_or_pairwise(name: str, whole: Callable, pairwise: Callable) -> Callable:
    def function(input, dim=None, keepdim=False, *, other=None):
        if other is not None or isinstance(dim, (Tensor, float)):
            return pairwise(input, dim if other is None else other)
        values = whole(input, dim, keepdim)
        if dim is None:
            return values
        return Extreme(values, NoIndices(values._builder, values._id, name))

    return function


sum, prod = _summed(Op.SUM, Op.ANY), _summed(Op.PROD, Op.ALL)
amax, amin = _extreme(Op.MAX, Op.ANY), _extreme(Op.MIN, Op.ALL)
formulas({
    "sum": ("The sum of the row; int64 of integers and masks.", sum),
    "prod": ("The product of the row; int64 of integers and masks.", prod),
    "amax": ("The largest element; NaN if any is.", amax),
    "amin": ("The smallest element; NaN if any is.", amin),
    "max": ("amax; with dim, (.values, no indices); with other, maximum.",
        _extreme_or_pairwise("max", amax, maximum)),
    "min": ("amin; with dim, (.values, no indices); with other, minimum.",
        _extreme_or_pairwise("min", amin, minimum)),
    "any": ("Whether any element is nonzero.", _quantified(Op.ANY)),
    "all": ("Whether all elements are nonzero.", _quantified(Op.ALL)),
})  # fmt: skip

"""Reductions over the row. One over a value per row, which has one element, is that element."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from ..errors import ShapeError
from .functions import implements, maximum, minimum
from .ops import Op
from .promotion import BOOL, FLOAT, INT64, cast, convert, not_zero
from .shapes import check_dim
from .tensor import NoIndices, Tensor, fail, node


def reduced(op: Op, x: Tensor, dim: object = None, keepdim: bool = False) -> Tensor:
    """A reduction over the row; of a value per row (one element), that element."""
    check_dim(x, dim)
    v = x._value
    if not v.spread:
        return x if keepdim or not v.inner else node(Op.RESHAPE, x, arg=())
    if v.inner == (0,) and op in (Op.MAX, Op.MIN):
        fail(ShapeError, f"{op.value} of a row with no elements")
    result = node(op, x)
    return node(Op.RESHAPE, result, arg=(1,)) if keepdim else result


def _summed(op: Op) -> Callable:
    def function(input, dim=None, keepdim=False, *, dtype=None):
        x = input if dtype is None else cast(input, dtype)
        if x._value.dtype is BOOL or (dtype is None and x._value.dtype is not FLOAT):
            x = convert(x, INT64)
        return reduced(op, x, dim, keepdim)

    return function


sum = implements("sum")(_summed(Op.SUM))
prod = implements("prod")(_summed(Op.PROD))


def _extreme(op: Op, of_masks: Op) -> Callable:
    def function(input, dim=None, keepdim=False):
        return reduced(of_masks if input._value.dtype is BOOL else op, input, dim, keepdim)

    return function


amax = implements("amax")(_extreme(Op.MAX, Op.ANY))
amin = implements("amin")(_extreme(Op.MIN, Op.ALL))


class Extreme(NamedTuple):
    """What `x.max(dim=-1)` and `x.min(dim=-1)` return."""

    values: Tensor
    indices: object


def _extreme_or_pairwise(name: str, whole: Callable, pairwise: Callable) -> Callable:
    def function(input, dim=None, keepdim=False, *, other=None):
        if other is not None or isinstance(dim, (Tensor, float)):
            return pairwise(input, dim if other is None else other)
        values = whole(input, dim, keepdim)
        return values if dim is None else Extreme(values, NoIndices(name))

    return function


implements("max")(_extreme_or_pairwise("max", amax, maximum))
implements("min")(_extreme_or_pairwise("min", amin, minimum))


def _quantified(op: Op) -> Callable:
    return lambda input, dim=None, keepdim=False: reduced(op, not_zero(input), dim, keepdim)


implements("any")(_quantified(Op.ANY))
implements("all")(_quantified(Op.ALL))

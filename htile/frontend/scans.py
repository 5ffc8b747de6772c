"""Scans along an axis: cumulative sums, products, maxima and minima, and logcumsumexp.

A scan along a single element is that element.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from ..errors import DtypeError
from .factories import index
from .functions import formulas, implements, where
from .joins import cat
from .ops import Op
from .promotion import BOOL, FLOAT, INT64, cast, convert
from .ranks import INT32, Ranked
from .shapes import axis_of, reshaped
from .tensor import Deferred, Tensor, copy, fail, node

# What leaves all elements of a scan behind it as they are.
NOTHING = {Op.CUMPROD: 1.0, Op.LOGCUMSUMEXP: -math.inf}


def _scanned(op: Op, x: Tensor, axis: int) -> Tensor:
    if not x.ndim or x._sizes[axis] == 1:
        return copy(x)
    is_joined = op in NOTHING and x._later is None  # what waits for its elements is not
    found = _behind_a_start(op, x, axis) if is_joined else None
    return node(op, x, arg=axis if x.ndim > 1 else None) if found is None else found


def _behind_a_start(op: Op, x: Tensor, axis: int) -> Tensor | None:
    """The scan of what is joined to a start: the start, and a scan of the rest, which has whole
    rows of the rest's length. None where x is not joined so, or the rest's scan may overflow.

    The start is constant elements that change nothing, or one element of a logarithm.
    """
    joined = x._builder[x._id]
    if joined.op is not Op.CAT or joined.arg != axis:
        return None
    start, *rest = (Tensor(x._builder, id) for id in joined.inputs)
    first = x._builder[start._id]
    if first.op is Op.CONST and first.arg == NOTHING[op]:
        return cat([start, _scanned(op, cat(rest, axis), axis)], axis)
    if op is not Op.LOGCUMSUMEXP or start._sizes[axis] > 1:
        return None
    return cat([start, torch.logaddexp(start, _scanned(op, cat(rest, axis), axis))], axis)


def _cumulative(op: Op) -> Callable:
    def function(input, dim, *, dtype=None):
        axis = axis_of(input, dim)
        if dtype is BOOL:
            fail(DtypeError, f"{op.value} in torch.bool: (x != 0) is a mask, and its {op.value} "
                 "counts in int64")  # fmt: skip
        x = input if dtype is None else cast(input, dtype)
        if x._value.dtype is BOOL:  # a row has fewer than 2^31 elements
            return convert(_scanned(op, convert(x, torch.int32), axis), INT64)
        if dtype is None and x._value.dtype is not FLOAT:
            x = convert(x, INT64)
        found = _scanned(op, x, axis)
        return found if dtype is None else cast(found, dtype)

    return function


def _running(op: Op) -> Callable:
    def function(input, dim):
        axis = axis_of(input, dim)
        is_mask = input._value.dtype is BOOL
        x = convert(input, INT32) if is_mask else copy(input)
        values = _scanned(op, x, axis)
        places = Deferred(x, lambda: _places(x, values, axis))
        return Ranked(values != 0 if is_mask else values, places)

    return function


def _places(x: Tensor, values: Tensor, axis: int) -> Tensor:
    """The index of each running maximum or minimum: the last element so far that equals it."""
    size = x._sizes[axis] if x.ndim else 1
    if size == 1:
        return convert(x, INT64) * 0
    is_it = x == values
    if x._value.dtype is FLOAT:
        is_it = is_it | torch.isnan(x)
    place = reshaped(convert(index(x._builder, size), INT32), (size, *(1,) * (-1 - axis)))
    return convert(_scanned(Op.CUMMAX, where(is_it, place, 0), axis), INT64)


@implements("logcumsumexp")
def logcumsumexp(input, dim):
    """log(exp(x).cumsum(dim)), from the largest element so far."""
    return _scanned(Op.LOGCUMSUMEXP, convert(input, FLOAT), axis_of(input, dim))


formulas({
    "cumsum": ("The sum of each element and all before it; int64 of integers and masks.",
        _cumulative(Op.CUMSUM)),
    "cumprod": ("The product of each element and all before it; int64 of integers and masks.",
        _cumulative(Op.CUMPROD)),
    "cummax": ("(.values, .indices) of the largest of each element and all before it: the last one "
        "of equal ones, and NaN from the first NaN on.", _running(Op.CUMMAX)),
    "cummin": ("(.values, .indices) of the smallest of each element and all before it.",
        _running(Op.CUMMIN)),
})  # fmt: skip

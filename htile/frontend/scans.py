"""Scans: cumulative sums and products along an axis. One along a single element is that element."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import DtypeError
from .functions import formulas
from .ops import Op
from .promotion import BOOL, FLOAT, INT64, cast, convert
from .shapes import axis_of
from .tensor import Tensor, copy, fail, node


def _scanned(op: Op, x: Tensor, axis: int) -> Tensor:
    if not x.ndim or x._sizes[axis] == 1:
        return copy(x)
    return node(op, x, arg=axis if x.ndim > 1 else None)


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


formulas({
    "cumsum": ("The sum of each element and all before it; int64 of integers and masks.",
        _cumulative(Op.CUMSUM)),
    "cumprod": ("The product of each element and all before it; int64 of integers and masks.",
        _cumulative(Op.CUMPROD)),
})  # fmt: skip

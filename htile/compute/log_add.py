"""LOGADD, by which `logcumsumexp` combines elements: log(exp(a) + exp(b))."""

from __future__ import annotations

from enum import Enum

import cutlass.cute as cute
from cutlass import Float32

from htile.compute.logarithms import log1p_bounded
from htile.compute.powers import exp_bounded


class Logarithmic(Enum):
    """How a scan combines elements, beside ADD, MUL, MAX and MIN of `cute.ReductionOp`."""

    LOGADD = "log_add"


LOGADD = Logarithmic.LOGADD


def log_add(a: Float32, b: Float32) -> Float32:
    """log(exp(a) + exp(b)), from the larger one, in 15 instructions. It is NaN if either is.

    The difference of two equal infinities is NaN, of which the minimum with 0 is 0.
    """
    high, low = cute.arch.fmax(a, b, nan=True), cute.arch.fmin(a, b)
    return high + log1p_bounded(exp_bounded(cute.arch.fmin(low - high, Float32(0.0))))

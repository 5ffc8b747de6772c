"""Roots, exponentials and powers.

Counts of instructions are of SASS, for one element, on sm_90a.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Boolean, Numeric
from cutlass._mlir.dialects import llvm

from htile.compute.division import TINY, div, rcp
from htile.compute.operands import Operand, Vector, bits_of, elementwise, float_of, like
from htile.compute.products import polynomial

LOG2_E = math.log2(math.e)
# -18 is where e ** x - 1 has become -1, MOST the largest power of two that is a float32.
LEAST, MOST = -18.0, 127
# A number up to 2 ** 22 in magnitude that is added to EXPONENT_ROUNDER is rounded to a whole one.
# The low bits of the sum have it with 127 more, as an exponent is stored.
EXPONENT_ROUNDER = 1.5 * 2.0**23 + 127
LN2_HIGH = float.fromhex("0x1.62e430p-1")  # the nearest float32 to log(2)
LN2_LOW = math.log(2.0) - LN2_HIGH
# The polynomial p of degree 5 for which f + p(f) f^2 is nearest to e ** f - 1, in relation to it
# for |f| <= log(2) / 2, and to e ** f from there to log(2), by Lawson's algorithm: it is off by
# 2 ** -28 at most.
EXPM1 = (0.499999991, 0.166666914, 0.0416670463, 0.00832790137, 0.00138861471, 0.000226491954)


@elementwise
def sqrt(x):
    """The square root to 1 ulp, of subnormal x too: `sqrt.approx`, 4 instructions.

    Its documentation says that the relative error is at most 2 ** -23. On an H200 the largest
    error of all numbers is 0.94 ulp (docs/accuracy.md).
    """
    is_tiny = x < TINY
    root = cute.math.sqrt(cute.where(is_tiny, x * 2.0**64, x), fastmath=True)
    return cute.where(is_tiny, root * 2.0**-32, root)


@elementwise
def rsqrt(x):
    """1 / sqrt(x) to 2 ulp, of subnormal x too: `rsqrt.approx`, 4 instructions."""
    return cute.math.rsqrt(x)


@elementwise
def exp(x):
    """e ** x to 2 ulp over the whole range, subnormal results included: 8 instructions."""
    return cute.math.exp(x)


@elementwise
def exp_bounded(x):
    """e ** x in 2 instructions, for x <= 0 as in `x - max`.

    The relative error grows as 2 ** -24 * |x|, while the result shrinks as e ** -|x|. Results below
    2 ** -126 become 0.
    """
    return cute.math.exp2(x * LOG2_E, fastmath=True)


@elementwise
def exp2(x, fastmath=False):
    """2 ** x to 2 ulp, subnormal results included.

    With `fastmath` it takes 1 instruction, and subnormal results become 0.
    """
    return cute.math.exp2(x, fastmath=fastmath)


@elementwise
def expm1(x):
    """e ** x - 1 to 2 ulp, without cancellation near 0: 17 instructions.

    It is 2 ** n * (e ** f - 1) + (2 ** n - 1), where n is the nearest whole number to x / log(2),
    but not beyond 127, and f the rest. So f may be up to log(2), or where the result is infinite,
    larger.
    """
    bounded = like(x, llvm.intr_maximum(x, cute.full_like(x, LEAST)))
    low_bits = cute.math.fma(bounded, *(cute.full_like(x, k) for k in (LOG2_E, EXPONENT_ROUNDER)))
    low_bits = like(x, llvm.intr_minnum(low_bits, cute.full_like(x, EXPONENT_ROUNDER + MOST)))
    n = low_bits - EXPONENT_ROUNDER
    f = cute.math.fma(n, cute.full_like(x, -LN2_HIGH), bounded)
    f = cute.math.fma(n, cute.full_like(x, -LN2_LOW), f)
    power = float_of(bits_of(low_bits) * (1 << 23))
    result = cute.math.fma(polynomial(f, EXPM1), f * f, f)
    result = cute.math.fma(result, power, power - 1.0)
    return cute.math.copysign(result, x)  # f is 0.0 for -0.0


@elementwise
def sigmoid(x, fastmath=False):
    """1 / (1 + e ** -x). `fastmath` takes `exp_bounded`: 4 instructions for 10."""
    return rcp(1.0 + (exp_bounded(-x) if fastmath else exp(-x)))


@elementwise
def exp_quotient(x, total):
    """e ** x / total in 2 instructions, for x <= 0, 1 <= total <= 2 ** 30 and 16-bit results.

    The relative error is below 2 ** -16. It has two parts: 2 ** -22 * log2(total) of the logarithm,
    and 2 ** -24 * |x|. Results below 2 ** -126 become 0. A row of infinities or NaN, whose total is
    0, infinite or NaN, gets what the division would give.
    """
    scaled = cute.math.fma(x, cute.full_like(x, LOG2_E), -cute.math.log2(total, fastmath=True))
    return cute.math.exp2(scaled, fastmath=True)


def pow(a: Operand, b: Operand) -> Vector | Numeric:
    """a ** b as torch on CUDA, which computes some constant exponents by other means."""
    if isinstance(b, int | float) and not isinstance(a, int | float):
        match float(b):
            case 0.5:
                return sqrt(a)
            case -0.5:
                return rsqrt(a)
            case 1.0:
                return a
            case 2.0:
                return a * a
            case 3.0:
                return a * a * a
            case -1.0:
                return div(1.0, a)
            case -2.0:
                return div(1.0, a * a)
    return _pow(a, b)


def pow_scalar(a: Operand, exponent: Numeric) -> Vector | Numeric:
    """a ** exponent for an exponent that is known at the launch: whole ones up to 4 are products.

    All threads have the same exponent, so that they take the same branch: of 5 instructions, or of
    those of `pow`.
    """
    return elementwise(_pow_scalar)(a, exponent=exponent)


@cute.jit
def _pow_scalar(x: Vector, exponent: Numeric):
    result = x
    if is_short(exponent):
        result = short_power(x, exponent)
    else:
        result = pow(x, exponent)
    return result


def is_short(exponent: Numeric) -> Boolean:
    """Whether the exponent is 1, 2, 3 or 4, so that the power is one of a few products."""
    one, two, three, four = (exponent == number for number in (1.0, 2.0, 3.0, 4.0))
    return one | two | three | four


def short_power(x: Vector, exponent: Numeric) -> Vector:
    """x ** exponent to 2 ulp, for an exponent that `is_short`."""
    exponent, one = cute.full_like(x, exponent), cute.full_like(x, 1.0)
    low = x * cute.where(exponent == 1.0, one, x)
    return low * cute.where(exponent < 3.0, one, cute.where(exponent == 3.0, x, low))


@elementwise
def _pow(a, b):
    """a ** b of the device library, in about 80 instructions."""
    return cute.math.pow(a, b)

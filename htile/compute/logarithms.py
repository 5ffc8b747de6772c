"""Logarithms.

Counts of instructions are of SASS, for one element, on sm_90a.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass._mlir.dialects import llvm

from htile.compute.division import TINY, rcp
from htile.compute.operands import (
    ROUNDER,
    Vector,
    bits_of,
    elementwise,
    float_of,
    like,
    nearest_float,
)
from htile.compute.products import polynomial

LN2 = math.log(2.0)
LOG2_E = math.log2(math.e)
LOG10_2 = math.log10(2.0)
# The float32 below it: it and what it lacks have one sign, as their products with infinity then do.
LOG10_2_BELOW = float.fromhex("0x1.344134p-2")
LOG10_E = math.log10(math.e)
FOUR = 129 << 23  # the bits of 4.0
UP = 32  # the exponent of the power of two that makes all subnormal numbers normal
# With s = f / (2 + f), log(1 + f) is 2 s + s z p(z), where z is s * s. Of the polynomials p of
# degree 2, the one with these coefficients is nearest for 1 + f from 2 ** -0.5 to 2 ** 0.5, by
# Lawson's algorithm. The relative error is below 2 ** -30.
ATANH = (0.66666776, 0.3997752, 0.29872511)
# The polynomial p of degree 7 for which x + p(x) x^2 is nearest to log(1 + x) on [0, 1], by Remez's
# algorithm: it is off by 2 ** -24.8 of the value at most.
LOG1P = [float.fromhex(number) for number in (
    "-0x1.ffff14p-2", "0x1.5535dap-2", "-0x1.fd1322p-3", "0x1.884456p-3",
    "-0x1.19ad96p-3", "0x1.446c16p-4", "-0x1.ec9958p-6", "0x1.5f9714p-8",
)]  # fmt: skip

# 2 artanh(q / 2) / log(2) is q / log(2) + q z p(z), where z is q * q. Of the polynomials p of
# degree 3, the one with these coefficients is nearest for 1 + f from 2 ** -0.5 to 2 ** 0.5, where q
# is 2 f / (2 + f), by Lawson's algorithm. Rounded to float32, its relative error is 2 ** -32.
ARTANH2 = (0.120224588, 0.0180338416, 0.00321640796, 0.00066472945)
LOG2_E_HIGH = nearest_float(LOG2_E)
LOG2_E_LOW = LOG2_E - LOG2_E_HIGH


@elementwise
def log(x, fastmath=False):
    """The natural logarithm to 2 ulp: 18 instructions.

    With `fastmath` the absolute error stays small near 1, where the result is small itself; the
    relative error does not.
    """
    return cute.math.log(x, fastmath=True) if fastmath else _log(*_parts(x))


@elementwise
def log_bounded(x):
    """As `log` of x >= 2 ** -126, infinity and NaN, in 15 instructions."""
    return _log(*_parts_of_normal(x))


@elementwise
def log2(x, fastmath=False):
    """The logarithm to base 2, to 2 ulp: 19 instructions. `fastmath` is as for `log`."""
    if fastmath:
        return cute.math.log2(x, fastmath=True)
    return _log2(*_parts(x))


@elementwise
def log2_bounded(x):
    """As `log2` of x >= 2 ** -126, infinity and NaN, in 16 instructions."""
    return _log2(*_parts_of_normal(x))


def _log2(less: Vector, f: Vector) -> Vector:
    """The logarithm to base 2 of `_parts`."""
    f, s, rest = _series(f, factor=LOG2_E)
    return cute.math.fma(f, cute.full_like(f, LOG2_E), cute.math.fma(s, rest, -less))


@elementwise
def log10(x, fastmath=False):
    """The logarithm to base 10, to 2 ulp: 21 instructions. `fastmath` is as for `log`."""
    if fastmath:  # cute.math.log10 takes 5 instructions with its own fastmath
        return log2(x, fastmath=True) * LOG10_2
    return _log10(*_parts(x))


@elementwise
def log10_bounded(x):
    """As `log10` of x >= 2 ** -126, infinity and NaN, in 18 instructions."""
    return _log10(*_parts_of_normal(x))


def _log10(less: Vector, f: Vector) -> Vector:
    """The logarithm to base 10 of `_parts`."""
    f, s, rest = _series(f, factor=LOG10_E)
    rest = cute.math.fma(s, rest, less * (LOG10_2_BELOW - LOG10_2))
    rest = cute.math.fma(less, cute.full_like(f, -LOG10_2_BELOW), rest)
    return cute.math.fma(f, cute.full_like(f, LOG10_E), rest)


@elementwise
def log1p(x):
    """log(1 + x) to 2 ulp, without cancellation near 0: 18 instructions.

    Where 1 + x is near a power of two p, (1 + x) / p - 1 is x / p - (1 - 1 / p). The difference in
    parentheses is exact but where p is so large that nothing depends on its last digits. All is
    computed four times as large, because 1 / p may be subnormal and 4 / p is not.
    """
    rounded = _rounded_log2(1.0 + x)
    scale = float_of(_at_exponent(rounded) + FOUR)
    f = cute.math.fma(x, scale, -(4.0 - scale))
    return _log(rounded - ROUNDER, f, times=4) * 0.25


@elementwise
def log1p_bounded(x):
    """log(1 + x) to 2 ulp for 0 <= x <= 1, in 9 instructions."""
    return cute.math.fma(polynomial(x, LOG1P), x * x, x)


def log2_of_two(x: Vector) -> tuple[Vector, Vector]:
    """The logarithm to base 2, to 2 ** -29 of itself: its float32, and what that lacks.

    Where the logarithm is infinite or NaN, so is the first. The second may be anything then.
    """
    less, f = _parts(x)
    f = like(f, llvm.intr_minnum(f, cute.full_like(f, 1.0)))
    inverse = rcp(cute.math.fma(f, cute.full_like(f, 0.5), cute.full_like(f, 1.0)))
    q = f * inverse
    error = cute.math.fma(q * -0.5, f, f - q) * inverse  # what q lacks
    z = q * q
    scale = cute.full_like(f, LOG2_E_HIGH)
    slope = cute.math.fma(z, cute.full_like(f, LOG2_E_HIGH / 4), scale)  # of the logarithm in q
    high = cute.math.fma(q, scale, -less)
    low = cute.math.fma(q, scale, -less - high)
    low = cute.math.fma(error, slope, low)
    low = cute.math.fma(q, cute.full_like(f, LOG2_E_LOW), low)
    low = cute.math.fma(polynomial(z, ARTANH2) * z, q, low)
    low = like(low, llvm.intr_minnum(low, cute.full_like(f, 1.0)))  # NaN where `high` is infinite
    total = high + low
    return total, low - (total - high)


def _parts(x: Vector) -> tuple[Vector, Vector]:
    """-n and f, for which x is 2 ** n * (1 + f) and 1 + f from 2 ** -0.5 to 2 ** 0.5, about.

    n is infinite or NaN as the logarithm is; f may be anything then.
    """
    is_tiny = x < TINY
    x = cute.where(is_tiny, x * 2.0**UP, x)
    rounded = _rounded_log2(x)
    rounders = (cute.full_like(x, number) for number in (ROUNDER - UP, ROUNDER))
    less = rounded - cute.where(is_tiny, *rounders)
    near_one = float_of(bits_of(x) + _at_exponent(rounded))  # x over its power of two
    return less, near_one - 1.0


def _parts_of_normal(x: Vector) -> tuple[Vector, Vector]:
    """`_parts` of numbers that are not tiny."""
    rounded = _rounded_log2(x)
    return rounded - ROUNDER, float_of(bits_of(x) + _at_exponent(rounded)) - 1.0


def _rounded_log2(x: Vector) -> Vector:
    """ROUNDER - n, where n is the logarithm to base 2, rounded to a whole number.

    The approximate logarithm is as good as any here, and it gives what becomes of 0, infinity, NaN
    and negative numbers: n is infinite or NaN, and so is the sum that it is a term of. The other
    terms have to be finite there.
    """
    return ROUNDER - cute.math.log2(x, fastmath=True)


def _at_exponent(rounded: Vector) -> Vector:
    """-n at the place of an exponent, of `_rounded_log2`."""
    return bits_of(rounded) * (1 << 23)


def _log(less: Vector, f: Vector, times: int = 1) -> Vector:
    """log(1 + f) - less * log(2), for 1 + f from 2 ** -0.5 to 2 ** 0.5, about.

    times: a power of two that f is given multiplied by, and the result too.

    Signs are such that of f = -0.0 and no `less` comes -0.0.
    """
    f, s, rest = _series(f, times=times)
    rest = cute.math.fma(s, rest, f)
    return cute.math.fma(less, cute.full_like(f, -LN2 * times), rest)


def _series(f: Vector, factor: float = 1.0, times: int = 1) -> tuple[Vector, Vector, Vector]:
    """f, s and r, for which factor * log(1 + f) is factor * f + s r, with the factor in float32.

    1 + f is from 2 ** -0.5 to 2 ** 0.5, about.

    times: a power of two that f is given multiplied by, and the logarithm too.

    2 s, the first term of the series in s = f / (2 + f), is f - s f. So f itself is a term, and
    the error of the quotient is that of a small part of the result. s r also has the product of f
    with what the factor lacks in float32, because f is s (2 + f). Where the exponent is infinite or
    NaN, f may be infinite too: a number takes its place.
    """
    f = like(f, llvm.intr_minnum(f, cute.full_like(f, 1.0 * times)))
    s = f * rcp(f + 2.0 * times)
    z = s * s
    less = -f
    if lack := factor - nearest_float(factor):
        less = cute.math.fma(f, *(cute.full_like(f, k) for k in (lack - factor, 2 * times * lack)))
    return f, s, cute.math.fma(polynomial(z, [times * factor * k for k in ATANH]), z, less)

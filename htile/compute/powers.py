"""Roots, exponentials and powers.

Counts of instructions are of SASS, for one element, on sm_90a.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Boolean, Numeric
from cutlass._mlir.dialects import llvm

from htile.compute.division import TINY, div, rcp
from htile.compute.logarithms import LOG2_E, log2_of_two
from htile.compute.operands import (
    ROUNDER,
    SIGN,
    Operand,
    Vector,
    bits_of,
    elementwise,
    float_of,
    like,
    nearest_float,
)
from htile.compute.products import polynomial

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
# The polynomial p of degree 5 for which 1 + p(r) r is nearest to 2 ** r, in relation to it, for
# |r| <= 1/2, by Lawson's algorithm: rounded to float32 it is off by 2 ** -25.9 at most.
EXP2 = (0.693147182, 0.240226477, 0.0555033199, 0.00961843971, 0.00133991323, 0.000153531539)
HALFWAY = 64  # the exponent of the fixed power of two that `_exp2_of_two` multiplies by, up or down
FARTHEST = 152.0  # 2 ** x is infinite or 0 for x beyond it in magnitude, and for x + 1 and x - 1
EVEN = 2.0**24  # larger float32 numbers are even
FARTHEST_EXPONENT = 2.0**100  # of a power of any base but 1 and -1 that is neither 0 nor infinite
MOST_PRODUCTS = 7  # the largest whole exponent that is a number and whose power is a product


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
    """a ** b as C's pow, subnormal results included, but for some exponents that are numbers.

    Those are roots and quotients, as torch on CUDA has them, and whole numbers from 1 to
    MOST_PRODUCTS, whose powers are products: to 4.5 ulp. Another exponent that all elements share
    takes 56 instructions, and one of each element 72, or 26 if the base is a positive number. The
    error is up to 1.5 ulp, and 2.5 if the exponent is beyond 100 in magnitude.
    """
    if isinstance(a, int | float) and not isinstance(b, int | float):
        base = nearest_float(a)
        if 0.0 < base < math.inf and base != 1.0:
            return elementwise(_power_of_number)(b, base=base)
    elif isinstance(b, int | float) and not isinstance(a, int | float):
        match nearest_float(b):
            case 0.5:
                return sqrt(a)
            case -0.5:
                return rsqrt(a)
            case -1.0:
                return div(1.0, a)
            case -2.0:
                return div(1.0, a * a)
            case number if number in range(1, MOST_PRODUCTS + 1):
                return _product(a, int(number))
            case number if number != 0.0 and math.isfinite(number):
                return elementwise(_pow_by_number)(a, exponent=number)
    return _pow(a, b)


def _product(a: Operand, count: int) -> Vector | Numeric:
    """a as a factor so many times."""
    if count == 1:
        return a
    root = _product(a, count // 2)
    return root * root * a if count % 2 else root * root


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
    """The power of |a|, and what depends on the sign of a: that of an odd power, NaN for a root.

    Numbers from EVEN on are even. From the nearest even number an even one is 0 away, an odd one 1.
    """
    bounded = like(b, llvm.intr_minnum(cute.math.absf(b), cute.full_like(b, EVEN)))
    rounder = cute.full_like(b, EVEN / 2)
    half = cute.math.fma(bounded, cute.full_like(b, 0.5), rounder) - rounder
    rest = cute.math.absf(cute.math.fma(half, cute.full_like(b, -2.0), bounded))
    is_root = cute.math.fma(rest, -rest, rest) != 0.0
    size = cute.where(is_root, base_of_root(a), cute.math.absf(a))
    # 1 ** b and a ** 0 are 1 even if the other one is NaN. So is (-1) ** b if b is infinite.
    one, most = cute.full_like(b, 1.0), cute.full_like(b, FARTHEST_EXPONENT)
    exponent = cute.where(a == 1.0, one, b)
    exponent = like(b, llvm.intr_minimum(like(b, llvm.intr_maximum(exponent, -most)), most))
    result = cute.where(b == 0.0, one, _power(size, exponent))
    sign = cute.where(rest == 1.0, cute.full_like(bits_of(a), SIGN), cute.full_like(bits_of(a), 0))
    return float_of(bits_of(result) | bits_of(a) & sign)


def _power_of_number(x: Vector, base: float) -> Vector:
    """base ** x for a finite base that is positive and not 1."""
    log = math.log2(base)
    high = nearest_float(log)
    return _exp2_of_product(x, cute.full_like(x, high), cute.full_like(x, log - high))


def _pow_by_number(x: Vector, exponent: float) -> Vector:
    return signed_power(x, exponent, _power)


def signed_power(
    x: Vector, exponent: float, power: Callable[[Vector, Vector], Vector]
) -> Vector:
    """x ** exponent for a finite exponent that is not 0, by the `power` of a base without sign."""
    parity = exponent % 2
    size = cute.math.absf(x) if parity in (0, 1) else base_of_root(x)
    result = power(size, cute.full_like(x, exponent))
    return float_of(bits_of(result) | bits_of(x) & SIGN) if parity == 1 else result


def base_of_root(x: Vector) -> Vector:
    """x, and inf for -inf, whose power is that of inf. Of other negative numbers it is NaN."""
    return cute.where(x == -math.inf, cute.full_like(x, math.inf), x)


def _power(size: Vector, exponent: Vector) -> Vector:
    """2 ** (exponent * log2(size)), and NaN for a negative size."""
    return _exp2_of_product(exponent, *log2_of_two(size))


def _exp2_of_product(x: Vector, high: Vector, low: Vector) -> Vector:
    """2 ** (x * (high + low)), where `high` is not 0 if x is infinite.

    The product is the sum of two numbers, because it may be 128, and its absolute error is the
    relative error of the power.
    """
    product = high * x
    rest = cute.math.fma(low, x, cute.math.fma(high, x, -product))
    is_small = product < 0.0
    end = cute.where(is_small, *(cute.full_like(x, number) for number in (0.0, math.inf)))
    is_end = cute.math.absf(product) > FARTHEST
    return cute.where(is_end, end, _exp2_of_two(product, rest, is_small))


def _exp2_of_two(high: Vector, low: Vector, is_small: Vector) -> Vector:
    """2 ** (high + low), up to FARTHEST and for a small low part.

    2 ** r, where r is what the nearest whole number lacks, is multiplied by two powers of two, so
    that the result may be subnormal. One of them is a fixed one, up or down.
    """
    rounder = cute.full_like(high, ROUNDER)
    shifted = high + rounder
    r = high - (shifted - rounder) + low
    bits, up, down = bits_of(shifted) * (1 << 23), 2.0**HALFWAY, 2.0**-HALFWAY
    biases = (cute.full_like(bits, 127 + each << 23) for each in (HALFWAY, -HALFWAY))
    scale = float_of(bits + cute.where(is_small, *biases))
    rest = cute.where(is_small, cute.full_like(high, down), cute.full_like(high, up))
    return polynomial(r, (1.0, *EXP2)) * scale * rest

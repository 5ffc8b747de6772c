"""Elementwise functions for results that are only seen in 16 bits.

Their relative error is at most 2 ** -14, an eighth of the distance between numbers of float16.
Infinite and zero operands, NaN and signs give what the exact functions give. Counts of
instructions are of SASS, for one element, on sm_90a.

An approximate exponential or logarithm has an absolute error of about 2 ** -22 near 1. So where a
function's value is near 0, the beginning of its power series takes over.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Numeric

from htile.compute.division import EXPONENT, HUGE, TINY, rcp
from htile.compute.logarithms import LN2, LOG2_E
from htile.compute.operands import (
    Operand,
    Vector,
    bits_of,
    elementwise,
    float_of,
    lift,
    select,
)
from htile.compute.powers import (
    base_of_root,
    exp2,
    is_short,
    pow,
    short_power,
    sigmoid,
    signed_power,
)
from htile.compute.products import fma, polynomial

# A power series takes over where its variable is smaller than this in magnitude. The variable is
# the operand, or for log, log2 and log10 the operand minus 1. The second number is for tanh.
SERIES_BELOW, TANH_SERIES_BELOW = 2.0**-7, 2.0**-4
# The largest exponent of a short power, in magnitude. A number that is larger is refused as the
# kernel is made (`htile.lower.patterns`), and a scalar as it runs.
MOST_EXPONENT = 64.0
# exp(x * x / 2) times the share of a normal distribution below -x, for x >= 0, is nearest to the
# polynomial with these coefficients of t = 1 / (1 + SHIFT * x), from t to t ** 6. The relative
# error is at most 2 ** -19.3 * (1 + x * x / 8), by Lawson's algorithm.
SHIFT = 0.3
SHARE = (0.12022666, 0.11205292, 0.15108397, -0.030003265, 0.22765387, -0.08101408)


@elementwise
def _choose(x, limit, near, far):
    """`near` where x is smaller than the limit in magnitude, `far` elsewhere."""
    return cute.where(cute.math.absf(x) < limit, near, far)


def div_near(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b to 4 ulp of float32: 7 instructions, 2 for a divisor of the row, 1 for a number."""
    if isinstance(b, int | float) and 2.0**-100 <= abs(b) <= 2.0**100:
        return a * (1 / b)
    (b,), any_vector = lift(b)
    exponent = bits_of(b) & EXPONENT
    largest = cute.full_like(exponent, HUGE - (1 << 23))
    exponent = cute.where(exponent < largest, exponent, largest)
    # The divisor is brought to [1/2, 1), or as near as 2 ** 126 and 2 ** -126 bring it.
    scale = float_of(HUGE - exponent)
    reciprocal = rcp(b * scale)
    if not any_vector:
        reciprocal, scale = reciprocal[0], scale[0]
    return a * scale * reciprocal


@elementwise
def exp_near(x):
    """e ** x, subnormal results included."""
    return cute.math.exp2(x * LOG2_E)


@elementwise
def expm1_near(x):
    """e ** x - 1."""
    return _choose(x, SERIES_BELOW, x * fma(x, 0.5, 1.0), exp2(x * LOG2_E, fastmath=True) - 1.0)


@elementwise
def _log_near(x, scale):
    """The logarithm to base 2 times a scale."""
    is_tiny = x < TINY
    far = cute.math.log2(cute.where(is_tiny, x * 2.0**32, x), fastmath=True)
    far = cute.where(is_tiny, far - 32.0, far)
    less = x - 1.0
    return _choose(less, SERIES_BELOW, less * fma(less, -0.5 * LOG2_E, LOG2_E), far) * scale


def log_near(x: Operand) -> Vector | Numeric:
    """The natural logarithm."""
    return _log_near(x, LN2)


def log2_near(x: Operand) -> Vector | Numeric:
    """The logarithm to base 2."""
    return _log_near(x, 1.0)


def log10_near(x: Operand) -> Vector | Numeric:
    """The logarithm to base 10."""
    return _log_near(x, math.log10(2.0))


@elementwise
def log1p_near(x):
    """log(1 + x)."""
    far = cute.math.log2(1.0 + x, fastmath=True) * LN2
    return _choose(x, SERIES_BELOW, x * fma(x, -0.5, 1.0), far)


def pow_near(x: Operand, exponent: float | Numeric) -> Vector | Numeric:
    """x ** exponent. A number is from -64 to 64, and not 0; a scalar is known at the launch."""
    power = _pow_by_scalar if isinstance(exponent, Numeric) else _pow_by_number
    return elementwise(power)(x, exponent=exponent)


def _pow_by_number(x: Vector, exponent: float) -> Vector:
    return signed_power(x, exponent, _power)


@cute.jit
def _pow_by_scalar(x: Vector, exponent: Numeric):
    """All threads take the same branch, because they have the same exponent."""
    result = x
    if is_short(exponent):
        result = short_power(x, exponent)
    elif (exponent != 0.0) & (exponent >= -MOST_EXPONENT) & (exponent <= MOST_EXPONENT):
        whole = Int32(exponent)
        is_whole, sign = Float32(whole) == exponent, whole << 31  # the sign of -1 to that power
        size = cute.where(cute.full_like(x, is_whole, Boolean), cute.math.absf(x), base_of_root(x))
        kept = bits_of(x) & select(is_whole, sign, 0)
        result = float_of(bits_of(_power(size, exponent)) | kept)
    else:
        result = pow(x, exponent)
    return result


def _power(size: Vector, exponent: Vector | Numeric) -> Vector:
    """size ** exponent, by the special function units."""
    is_tiny = size < TINY
    log = cute.math.log2(cute.where(is_tiny, size * 2.0**32, size), fastmath=True)
    return cute.math.exp2(cute.where(is_tiny, log - 32.0, log) * exponent)


def sigmoid_near(x: Operand) -> Vector | Numeric:
    """1 / (1 + e ** -x); results below 2 ** -126 become 0."""
    return sigmoid(x, fastmath=True)


@elementwise
def tanh_near(x):
    """The hyperbolic tangent: 1 - 2 / (1 + e ** 2x)."""
    near = x * fma(x * x, -1 / 3, 1.0)
    far = fma(rcp(1.0 + exp2(x * (2 * LOG2_E), fastmath=True)), -2.0, 1.0)
    return _choose(x, TANH_SERIES_BELOW, near, far)


@elementwise
def gelu_near(x):
    """x times the share of a normal distribution below x."""
    size = cute.math.absf(x)
    t = rcp(fma(size, SHIFT, 1.0))
    share = polynomial(t, SHARE) * t * exp2(x * (-0.5 * LOG2_E) * x, fastmath=True)
    return x * cute.where(x < 0.0, share, 1.0 - share)

"""The exponents of floats, read from their bits and written there: no result is off by one.

Counts of instructions are of SASS, for one element, on sm_90a.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric

from htile.compute.bits import lshift, rshift
from htile.compute.operands import Operand, Vector, elementwise, lift

MAGNITUDE = 0x7FFFFFFF  # the bits of a float32 that are not its sign
NORMAL = 0x00800000  # the bits of the smallest normal number, 2 ** -126
INFINITE = 0x7F800000  # the bits of infinity; those of a NaN are more
MANTISSA = 0x007FFFFF
BIAS = 127  # what is added to an exponent to be stored
UP, FAR = 24, 64  # exponents of factors that make all subnormal numbers normal
MOST = 400  # beyond it, a power of two takes every number to 0 or infinity


@elementwise
def exponent(x):
    """torch.frexp(x).exponent as Int32: x is m * 2 ** e with 0.5 <= |m| < 1.

    Of 0, of infinities and of NaN it is 0, as in torch.
    """
    magnitude, normal, scaled = _normal(x)
    found = rshift(normal & MAGNITUDE, 23) - (BIAS - 1) - scaled
    is_number = (magnitude > 0) & (magnitude < INFINITE)
    return cute.where(is_number, found, cute.full_like(found, 0)).reshape(x.shape)


@elementwise
def floor_log2(x):
    """The floor of log2(x), exact: where log2(x) is rounded up to a whole number too."""
    return _whole_log2(x, is_ceil=False)


@elementwise
def ceil_log2(x):
    """The ceiling of log2(x), exact: where log2(x) is rounded down to a whole number too."""
    return _whole_log2(x, is_ceil=True)


def ldexp(x: Operand, e: Operand) -> Vector | Numeric:
    """x * 2 ** e, of a Float32 and an Int32, rounded once: about 20 instructions.

    The mantissa gets the exponent of the result, nearer to 0 by `FAR`. A product takes it there.
    """
    (x,), is_vector = lift(x)
    (e,), are_vectors = lift(e)
    shape = x.shape if is_vector else e.shape
    if not is_vector:
        x = cute.full(shape, x[0], Float32)
    if not are_vectors:
        e = cute.full(shape, e[0], Int32)
    magnitude, normal, scaled = _normal(x)
    e = _clamped(e.reshape(scaled.shape), MOST)
    wanted = rshift(normal & MAGNITUDE, 23) - BIAS - scaled + e
    is_small = wanted < 0
    near = _clamped(wanted, FAR + BIAS - 1)
    near = near + cute.where(is_small, cute.full_like(near, FAR), cute.full_like(near, -FAR))
    kept = normal & (MANTISSA - MAGNITUDE - 1)  # the sign and the mantissa
    made = (kept | lshift(near + BIAS, 23)).bitcast(Float32)
    factors = (cute.full_like(made, 2.0**-FAR), cute.full_like(made, 2.0**FAR))
    made = made * cute.where(is_small, *factors)
    is_number = (magnitude > 0) & (magnitude < INFINITE)
    result = cute.where(is_number, made, x.reshape(made.shape)).reshape(shape)
    return result if is_vector or are_vectors else result[0]


def nearest_power(x: Vector) -> Vector:
    """The exponents of the powers of two that are nearest to magnitudes, as float8_e8m0fnu stores
    them: with 127 added, in Int32.

    Halfway it is the larger power, but of the middle of 0 and 2 ** -126 the smaller, 2 ** -127.
    Whatever is below is 2 ** -127 too. Infinities, NaN, and numbers from 1.5 * 2 ** 127 on are NaN.
    """
    bits = _bits(x) & MAGNITUDE
    infinite, half = cute.full_like(bits, INFINITE), cute.full_like(bits, NORMAL // 2)
    bits = cute.where(bits > infinite, infinite, bits)  # its exponent is the one of NaN
    return rshift(cute.where(bits == half, half, bits + half), 23)


def power_of(stored: Vector) -> Vector:
    """The numbers, in Float32, of the exponents that float8_e8m0fnu stores: 0 to 255, in Int32."""
    bits = lshift(stored, 23)
    least, nan = cute.full_like(bits, NORMAL // 2), cute.full_like(bits, MAGNITUDE)
    bits = cute.where(bits > least, bits, least)
    return cute.where(stored == 255, nan, bits).bitcast(Float32)


def _bits(x: Vector) -> Vector:
    """The bits of floats, without the shape."""
    return x.reshape((cute.size(x.shape),)).bitcast(Int32)


def _normal(x: Vector) -> tuple[Vector, Vector, Vector]:
    """The bits of the magnitudes, those of numbers that are normal, and the exponent of the power
    of two that these were multiplied by. Other than for numbers and 0 they mean nothing."""
    bits = _bits(x)
    magnitude = bits & MAGNITUDE
    is_small = magnitude < NORMAL
    larger = _bits(x * 2.0**UP)
    scaled = cute.where(is_small, cute.full_like(bits, UP), cute.full_like(bits, 0))
    return magnitude, cute.where(is_small, larger, bits), scaled


def _whole_log2(x: Vector, is_ceil: bool) -> Vector:
    magnitude, normal, scaled = _normal(x)
    whole = rshift(normal, 23) - BIAS - scaled
    if is_ceil:
        more = cute.full_like(whole, 1), cute.full_like(whole, 0)
        whole = whole + cute.where((normal & MANTISSA) != 0, *more)
    flat, whole = x.reshape(whole.shape), whole.to(Float32)
    if is_ceil:  # between 0.5 and 1 it is -0.0
        whole = cute.where(flat < 1.0, -cute.math.absf(whole), whole)
    lowest, nan = (cute.full_like(flat, number) for number in (-math.inf, math.nan))
    other = cute.where(flat > 0, flat, cute.where(flat == 0, lowest, nan))
    is_number = (flat > 0) & (magnitude < INFINITE)
    return cute.where(is_number, whole, other).reshape(x.shape)


def _clamped(x: Vector, most: int) -> Vector:
    """x, but not beyond -most and most."""
    low, high = cute.full_like(x, -most), cute.full_like(x, most)
    return cute.where(x < low, low, cute.where(x > high, high, x))

"""The sine and the cosine.

Counts of instructions are of SASS, for one element, on sm_90a.

The nearest multiple of pi is subtracted from the angle. The rest lies between -pi / 2 and pi / 2,
where a polynomial is near the sine. An odd multiple changes the sign. For a cosine it is the
nearest odd multiple of pi / 2.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import cutlass.cute as cute

from htile.compute.operands import ROUNDER, SIGN, Vector, bits_of, elementwise, float_of
from htile.compute.products import polynomial
from htile.compute.rare import extreme, unless_rare

# The multiple of pi of a larger angle is not known exactly. The device library reduces such angles
# in another way, in about 80 instructions.
LARGEST = 105615.0
# The lowest bit of a sum with ROUNDER says whether the whole number is odd, and of a sum with
# ODD_ROUNDER whether it is even.
ODD_ROUNDER = ROUNDER + 1
# Three float32 whose sum is pi to 2 ** -70. Each is what is left of pi, rounded down: so that what
# is subtracted from -0.0 is 0.0, and -0.0 remains.
PI = [float.fromhex(number) for number in ("0x1.921fb4p+1", "0x1.4442d0p-23", "0x1.846988p-47")]
# The polynomial p of degree 3 for which r + p(r * r) r^3 is nearest to sin(r), in relation to it,
# for |r| <= 1.002 * pi / 2, by Lawson's algorithm: it is off by 2 ** -27.3 at most. In float32 the
# sum is never larger than 1.
SINE = (-0.166666594, 0.00833306297, -0.000198093463, 2.60518195e-06)


@elementwise
def sin(x, fastmath=False):
    """The sine to 2 ulp: 17 instructions, and a loop of more for angles beyond 105615."""
    return cute.math.sin(x, fastmath=True) if fastmath else _of_all(x, sin_bounded, cute.math.sin)


@elementwise
def cos(x, fastmath=False):
    """The cosine to 2 ulp: 17 instructions, and a loop of more for angles beyond 105615."""
    return cute.math.cos(x, fastmath=True) if fastmath else _of_all(x, cos_bounded, cute.math.cos)


def _of_all(x: Vector, usual: Callable, exact: Callable) -> Vector:
    """The function of all elements: `exact` of those that are large or infinite, else `usual`."""

    def each(number: Vector) -> Vector:
        is_large = cute.math.absf(number) > LARGEST
        return cute.where(is_large, exact(number), usual(number))

    # fmax takes the other one of a NaN.
    any_large = extreme(cute.math.absf(x), cute.arch.fmax) > LARGEST
    return unless_rare(any_large, usual, each, x)


@elementwise
def sin_bounded(x):
    """As `sin` of angles up to 105615 in magnitude, infinity and NaN, in 16 instructions."""
    sum_of_rounder = cute.math.fma(x, *(cute.full_like(x, k) for k in (1 / math.pi, ROUNDER)))
    rest = _rest(x, sum_of_rounder - ROUNDER)
    sign = (bits_of(rest) ^ (bits_of(sum_of_rounder) * SIGN)) & SIGN  # right for rest = -0.0 too
    size = cute.math.absf(_sine(rest))
    return float_of(bits_of(size) | sign)


@elementwise
def cos_bounded(x):
    """As `cos` of angles up to 105615 in magnitude, infinity and NaN, in 16 instructions."""
    below = cute.math.fma(x, *(cute.full_like(x, k) for k in (1 / math.pi, -0.5)))
    sum_of_rounder = below + ODD_ROUNDER
    rest = _rest(x, (sum_of_rounder - ODD_ROUNDER) + 0.5)
    return float_of(bits_of(_sine(rest)) ^ (bits_of(sum_of_rounder) * SIGN))


def _rest(x: Vector, times: Vector) -> Vector:
    """x less so many times pi."""
    for part in PI:
        x = cute.math.fma(times, cute.full_like(x, -part), x)
    return x


def _sine(r: Vector) -> Vector:
    """The sine of angles from -pi / 2 to pi / 2."""
    square = r * r
    return cute.math.fma(polynomial(square, SINE), r * square, r)

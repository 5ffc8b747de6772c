"""Division, whole-number division and remainder, and 1 / x."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import cutlass.cute as cute
from cutlass import Boolean, Float32, Numeric
from cutlass._mlir.dialects import llvm

from htile.compute.operands import (
    ROUNDER,
    Operand,
    Vector,
    bits_of,
    elementwise,
    float_of,
    lift,
    like,
    nearest_float,
)
from htile.compute.rare import extreme, unless_rare

TINY = 2.0**-126  # approximate functions take a smaller number for 0
EXPONENT = 0x7F800000  # the bits of a float32 that hold its exponent
# Those of 1/2, 1, 2 ** 90 and 2 ** 126.
_HALF, _ONE, _LARGE, HUGE = 126 << 23, 127 << 23, 217 << 23, 253 << 23
# What an approximate reciprocal, which is off by an ulp, is multiplied by to be below the true one.
BELOW = 1 - 2.0**-21
MOST_WHOLE = 2.0**20  # a quotient up to here, which is off by 2 ulp, is rounded by less than 3/4


@elementwise
def rcp(x):
    """1 / x to 1 ulp. It is 0 for |x| > 2 ** 126, and infinite for subnormal x."""
    return cute.math.rcp(x, approx=True, ftz=True)


def div(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b to 0.500001 ulp: exact where the quotient is a float32, IEEE's but for 1 in 2 ** 20.

    A result below 2 ** -101 (4e-31) in magnitude is the nearest number or one beside it, because
    what is added to it loses digits to underflow. Below 2 ** -124 it is within 2 ulp. There is none
    of the slow path of `div.rn`, a call that costs live registers and a stack frame. It takes 10
    instructions, and 3 for a divisor that the row shares.
    """
    is_shared = isinstance(a, Vector) and not isinstance(b, Vector)
    return div_shared(a, b) if is_shared else _div(a, b)


@elementwise
def _div(a, b):
    """a / b, by a reciprocal and one correction.

    The correction is that of P. Markstein, IA-64 and Elementary Functions, 2000. A power of two
    brings a divisor below 4 to (1/2, 1], and another one is made a quarter. So the dividend
    overflows only where the quotient does, and is no smaller than half of it. The correction is
    left out where the error is not smaller than the dividend: where an infinity, a NaN or 0 has
    made it infinite, NaN or 0. It is left out as well where the first quotient overflows, so that
    one within 2 ulp of the largest float32 may become infinite.
    """
    size = like(b, llvm.intr_minnum(cute.math.absf(b), cute.full_like(b, 4.0)))
    # Of 2 ** k its exponent is that of 2 ** -k, of what is between two powers that of the larger's.
    scale = float_of((2 * _ONE - bits_of(size)) & EXPONENT)
    a, b = a * scale, b * scale
    rough = rcp(b)
    quotient = a * rough
    error = cute.math.fma(-b, quotient, a)
    is_error = cute.math.absf(error) < cute.math.absf(a)
    return cute.where(is_error, cute.math.fma(error, rough, quotient), quotient)


def div_shared(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b as `div`, of a divisor that many dividends share: 3 instructions for each of them.

    The reciprocal is the sum of two numbers, which the compiler computes once for equal divisors.
    """
    (b,), any_vector = lift(b)
    scale = _scale(b)
    b = b * scale
    rough = rcp(b)
    head = rough * BELOW
    error = cute.math.fma(-b, head, cute.full_like(b, 1.0))
    # A divisor of 0 or infinity has an error of NaN. With 1 instead, both parts are infinite or 0.
    error = like(error, llvm.intr_minnum(error, cute.full_like(b, 1.0)))
    tail = error * rough
    if not any_vector:
        head, tail, scale = head[0], tail[0], scale[0]
    return _product(a * scale, head, tail)


def _scale(b: Vector) -> Vector:
    """The power of two that a shared divisor and its dividends are multiplied by.

    A divisor below 1/2 is brought to [1/2, 1), or as near as 2 ** 126 brings it. Its dividend is
    then no smaller than half of the quotient, however small it was, and overflows only where the
    quotient does. A divisor of 2 ** 90 or more, of whose reciprocal the second part might be
    subnormal, is made smaller. Both operands of others stay as they are.
    """
    exponent = bits_of(b) & EXPONENT
    at_most_half = cute.where(exponent < _HALF, exponent, cute.full_like(exponent, _HALF))
    scale = float_of(_HALF + _ONE - at_most_half)
    return cute.where(exponent < _LARGE, scale, cute.full_like(b, 2.0**-64))


def reciprocal(count: Float32) -> Float32:
    """1 / count as IEEE rounds it, of one number of elements or chunks.

    The compiler folds rcp.approx of a number that it knows, in unrolled code, and rounds it so; the
    instruction does not. One correction makes both the same (P. Markstein, IA-64 and Elementary
    Functions, 2000). A mantissa of ones needs an rcp.approx that rounds its reciprocal to nearest.
    """
    near = cute.arch.rcp_approx(count)
    return cute.math.fma(cute.math.fma(-count, near, Float32(1.0)), near, near)


def div_bounded(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b in 2 instructions, to 2 ulp, for 2 ** -126 <= |b| <= 2 ** 126."""
    return a * rcp(b)  # of b before it is broadcast: a scalar takes one reciprocal


def div_number(a: Operand, number: float) -> Vector | Numeric:
    """a / number as `div`, for 2 ** -100 <= |number| <= 2 ** 100.

    It takes 2 instructions, and 1 for a power of two.
    """
    number = nearest_float(number)
    exact = 1 / Fraction(number)
    mantissa, exponent = math.frexp(float(exact))
    if mantissa in (0.5, -0.5):  # a power of two
        return a * float(exact)
    # Both parts have 24 bits, and the head is nearer to 0 than the reciprocal.
    unit = Fraction(2) ** (exponent - 22)
    head = math.trunc(exact / unit) * unit
    return _product(a, float(head), float(exact - head))


@elementwise
def _product(a, head, tail):
    """a * (head + tail), rounded once but for 2 ** -22 of an ulp: a product of two parts.

    They have one sign, and neither is 0 where the other is not. So infinite, zero and NaN operands
    give what their product with the sum gives, with its sign.
    """
    return cute.math.fma(a, head, a * tail)


def floordiv(a: Operand, b: Operand) -> Vector | Numeric:
    """The quotient rounded down, as torch.floor_divide: 1.0 // 0.1 is 9. It is exact up to 2 ** 20.

    An integer divided by 0 gives any value. Floats take about 25 instructions, and 9 by a constant;
    many more if a thread has a quotient beyond 2 ** 20. Integers take 36, and 9 by a constant.
    """
    return _divided(a, b, _usual_floordiv, _exact_floordiv, 0)


def mod(a: Operand, b: Operand) -> Vector | Numeric:
    """The remainder with the divisor's sign, as torch.remainder.

    An integer modulo 0 gives any value. (The DSL's `%` has the sign of a.) Floats take about 19
    instructions, and 11 by a constant; many more if a thread has a quotient beyond 2 ** 20.
    Integers take 34, and 9 by a constant.
    """
    return _divided(a, b, _usual_mod, _exact_mod, 1)


def _divided(
    a: Operand, b: Operand, usual: Callable, exact: Callable, which: int
) -> Vector | Numeric:
    """The function `usual` of floats, or `exact` if a thread has a rare element.

    which: of integers, which of the results of `_integer_floordiv` it is.
    """
    (x, y), any_vector = lift(a, b)
    if not x.dtype.is_float:
        result = _integer_floordiv(x, y)[which]
    elif isinstance(b, Vector):
        result = unless_rare(_any_is_rare(x, b), usual, exact, x, b)
    else:  # the loop over rare elements keeps the dividends alone
        both = (lambda x, function=each: function(*lift(x, b)[0]) for each in (usual, exact))
        result = unless_rare(_any_is_rare(x, b), *both, x)
    return result if any_vector else result[0]


def _usual_floordiv(a: Vector, b: Vector) -> Vector:
    """The quotient of floats, rounded down, where it is not large."""
    quotient, whole, rest = _nearest_multiple(a, b)
    whole = cute.where(_has_other_sign(rest, b), whole - 1.0, whole)
    return cute.math.copysign(whole, quotient)  # of a = -0.0 it is 0.0 otherwise


def _usual_mod(a: Vector, b: Vector) -> Vector:
    """The remainder of floats where the quotient is not large."""
    _, _, rest = _nearest_multiple(a, b)
    zero = cute.math.copysign(cute.full_like(a, 0.0), a)
    return cute.where(rest == 0.0, zero, _of_sign(rest, b))


def _nearest_multiple(a: Vector, b: Vector) -> tuple[Vector, Vector, Vector]:
    """a / b to an ulp, about that as a whole number q, and a - q b, which is exact.

    The quotient is up to MOST_WHOLE in magnitude. So q is off by less than 3/4, and the rest is
    less than 3/4 of b. It is a multiple of the last digit of b or of a, whichever is smaller, so it
    is a float32.
    """
    quotient = a * rcp(b)
    whole = (quotient + ROUNDER) - ROUNDER
    return quotient, whole, cute.math.fma(-whole, b, a)


def _any_is_rare(a: Vector, b: Operand) -> Boolean:
    """Whether a thread has a large quotient, or a divisor without a reciprocal.

    No extreme sees a NaN, whose rest is NaN in either way. A divisor that all elements share says
    which dividends are large, so that no quotient has to be kept.
    """
    if isinstance(b, Vector):
        size = cute.math.absf(b)
        least, most = extreme(size, cute.arch.fmin), extreme(size, cute.arch.fmax)
        is_large = extreme(cute.math.absf(a * rcp(b)), cute.arch.fmax) > MOST_WHOLE
    else:
        (_, divisor), _ = lift(a, b)
        least = most = cute.math.absf(divisor)[0]
        is_large = extreme(cute.math.absf(a), cute.arch.fmax) > most * MOST_WHOLE
    return is_large | (least < TINY) | (most > 2.0**100)  # MOST_WHOLE times others is finite


def _has_other_sign(rest: Vector, b: Vector) -> Vector:
    """Whether the rest of a division is not 0, and has not the sign of the divisor."""
    return (rest != 0.0) & ((b < 0.0) != (rest < 0.0))


def _of_sign(rest: Vector, b: Vector) -> Vector:
    """The rest of a division with the divisor's sign."""
    return cute.where(_has_other_sign(rest, b), rest + b, rest)


def _exact_floordiv(a: Vector, b: Vector) -> Vector:
    """The quotient of floats, rounded down, by the device library's remainder, as torch has it."""
    quotient = a / b
    rest = cute.math.rem(a, b)
    whole = (a - rest) / b
    whole = cute.where(_has_other_sign(rest, b), whole - 1.0, whole)
    below = cute.math.floor(whole)
    below = cute.where(whole - below > 0.5, below + 1.0, below)  # (a - rest) / b was rounded
    zero = cute.math.copysign(cute.full_like(a, 0.0), quotient)
    result = cute.where(whole != 0.0, below, zero)
    return cute.where(b == 0.0, quotient, result)


def _exact_mod(a: Vector, b: Vector) -> Vector:
    """The remainder of floats by the device library's."""
    return _of_sign(cute.math.rem(a, b), b)


def _integer_floordiv(a: Vector, b: Vector) -> tuple[Vector, Vector]:
    """The quotient rounded down, and the remainder, of integers.

    Neither 0 nor -1 is divided by. LLVM may conclude from a division that its divisor is not 0, and
    drop a test for 0 that the user wrote around it. INT_MIN / -1 is undefined there too.
    """
    one = cute.full_like(b, 1)
    divisor = cute.where((b == 0) | (b == -1), one, b)
    quotient = a // divisor
    return cute.where(b == -1, -a, quotient), a - quotient * divisor

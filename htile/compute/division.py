"""Division, whole-number division and remainder, and 1 / x."""

from __future__ import annotations

import math
import struct

import cutlass.cute as cute
from cutlass import Float32, Numeric

from htile.compute.operands import Operand, Vector, elementwise, lift


@elementwise
def rcp(x):
    """1 / x to 1 ulp. It is 0 for |x| > 2 ** 126, and infinite for subnormal x."""
    return cute.math.rcp(x, approx=True, ftz=True)


def div(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b, correctly rounded where a and the result are normal, else within an ulp.

    Without the slow path of `div.rn`, a call that costs live registers and a stack frame: 6
    instructions an element for a divisor that the row shares, 19 otherwise. Very large and small
    divisors are scaled, the dividend with them, so that no reciprocal is denormal.
    """
    (b,), any_vector = lift(b)
    magnitude = cute.math.absf(b)
    scale = cute.where(magnitude > 2.0**125, cute.full_like(b, 2.0**-64), cute.full_like(b, 1.0))
    scale = cute.where(magnitude < 2.0**-64, cute.full_like(b, 2.0**64), scale)
    b = b * scale
    rough = rcp(b)
    error = cute.math.fma(-b, rough, cute.full_like(b, 1.0))
    reciprocal = cute.math.fma(rough, error, rough)
    reciprocal = cute.where(error == error, reciprocal, rough)  # 0, infinity, NaN
    if not any_vector:
        b, reciprocal, scale = b[0], reciprocal[0], scale[0]
    return _corrected(a * scale, b, reciprocal)


def reciprocal(count: Float32) -> Float32:
    """1 / count as IEEE rounds it, of one number of elements or chunks.

    The compiler folds rcp.approx of a number that it knows, in unrolled code, and rounds it so; the
    instruction does not. One correction makes both the same, for all but a mantissa of ones (P.
    Markstein, IA-64 and Elementary Functions, 2000).
    """
    near = cute.arch.rcp_approx(count)
    return cute.math.fma(cute.math.fma(-count, near, Float32(1.0)), near, near)


def div_bounded(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b in 2 instructions, to 2 ulp, for 2 ** -126 <= |b| <= 2 ** 126."""
    return a * rcp(b)  # of b before it is broadcast: a scalar takes one reciprocal


def div_number(a: Operand, number: float) -> Vector | Numeric:
    """a / number as `div`, in 5 instructions, for 2 ** -100 <= |number| <= 2 ** 100."""
    (number,) = struct.unpack("f", struct.pack("f", number))
    (reciprocal,) = struct.unpack("f", struct.pack("f", 1 / number))
    if math.frexp(number)[0] in (0.5, -0.5):  # a power of two
        return a * reciprocal
    return _corrected(a, number, reciprocal)


@elementwise
def _corrected(a, b, reciprocal):
    """a / b from the rounded reciprocal of b.

    The quotient is off by an ulp at most; its exact remainder corrects it (Markstein, IBM J. Res.
    Dev. 34-1, 1990). An infinite one has no remainder (NaN), and a zero keeps its sign.
    """
    quotient = a * reciprocal
    remainder = cute.math.fma(-b, quotient, a)
    corrected = cute.math.fma(remainder, reciprocal, quotient)
    return cute.where(cute.math.absf(corrected) > 0.0, corrected, quotient)


@elementwise
def floordiv(a, b):
    """The quotient rounded down, as torch.floor_divide: exact, so 1.0 // 0.1 is 9.

    An integer divided by 0 gives any value. Floats take about 98 instructions, with branches.
    Integers take 36, and 9 by a constant.
    """
    if not a.dtype.is_float:
        return _integer_floordiv(a, b)[0]
    quotient = a / b
    mod = cute.math.rem(a, b)
    whole = (a - mod) / b
    whole = cute.where((mod != 0.0) & ((b < 0.0) != (mod < 0.0)), whole - 1.0, whole)
    below = cute.math.floor(whole)
    below = cute.where(whole - below > 0.5, below + 1.0, below)  # (a - mod) / b was rounded
    zero = cute.math.copysign(cute.full_like(a, 0.0), quotient)
    result = cute.where(whole != 0.0, below, zero)
    return cute.where(b == 0.0, quotient, result)


@elementwise
def mod(a, b):
    """The remainder with the divisor's sign, as torch.remainder.

    An integer modulo 0 gives any value. (The DSL's `%` has the sign of a.) Floats take about 67
    instructions, with branches. Integers take 34, and 9 by a constant.
    """
    if not a.dtype.is_float:
        return _integer_floordiv(a, b)[1]
    rest = cute.math.rem(a, b)
    return cute.where((rest != 0.0) & ((b < 0.0) != (rest < 0.0)), rest + b, rest)


def _integer_floordiv(a: Vector, b: Vector) -> tuple[Vector, Vector]:
    """The quotient rounded down, and the remainder, of integers.

    Neither 0 nor -1 is divided by. LLVM may conclude from a division that its divisor is not 0, and
    drop a test for 0 that the user wrote around it. INT_MIN / -1 is undefined there too.
    """
    one = cute.full_like(b, 1)
    divisor = cute.where((b == 0) | (b == -1), one, b)
    quotient = a // divisor
    return cute.where(b == -1, -a, quotient), a - quotient * divisor

"""Division, whole-number division and remainder, and 1 / x."""

from __future__ import annotations

import math
import struct

import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric
from cutlass._mlir.dialects import llvm

from htile.compute.operands import Operand, Vector, elementwise, lift, like

EXPONENT = 0x7F800000  # the bits of a float32 that hold its exponent
_HALF, _ONE, HUGE = 126 << 23, 127 << 23, 253 << 23  # those of 1/2, 1 and 2 ** 126


@elementwise
def rcp(x):
    """1 / x to 1 ulp. It is 0 for |x| > 2 ** 126, and infinite for subnormal x."""
    return cute.math.rcp(x, approx=True, ftz=True)


def div(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b, correctly rounded where the result is at least 2 ** -101 (4e-31) in magnitude.

    A smaller result is the nearest number or one beside it: the remainder that corrects a quotient
    has a magnitude of 2 ** -24 of the dividend, so there it loses digits to underflow. To scale
    small dividends would cost every element three instructions.

    There is none of the slow path of `div.rn`, a call that costs live registers and a stack frame.
    It takes 6 instructions for a divisor that the row shares, 16 otherwise.
    """
    (b,), any_vector = lift(b)
    scale = _scale(b)
    b = b * scale
    rough = rcp(b)
    error = cute.math.fma(-b, rough, cute.full_like(b, 1.0))
    # A divisor of 0 or infinity has an error of NaN. With 1 instead, its reciprocal stays as it is.
    error = like(error, llvm.intr_minnum(error, cute.full_like(b, 1.0)))
    reciprocal = cute.math.fma(rough, error, rough)
    if not any_vector:
        b, reciprocal, scale = b[0], reciprocal[0], scale[0]
    return _corrected(a * scale, b, reciprocal)


def _scale(b: Vector) -> Vector:
    """The power of two that a divisor and its dividend are multiplied by.

    A divisor below 1/2 is brought to [1/2, 1), or as near as 2 ** 126 brings it. Its dividend is
    then no smaller than half of the quotient, however small it was, and overflows only where the
    quotient does. A divisor of 2 ** 126 or more, whose reciprocal would be subnormal, is made
    smaller. Both operands of others stay as they are.
    """
    exponent = (b.bitcast(Int32) & EXPONENT).reshape(b.shape)
    at_most_half = cute.where(exponent < _HALF, exponent, cute.full_like(exponent, _HALF))
    scale = (_HALF + _ONE - at_most_half).bitcast(Float32).reshape(b.shape)
    return cute.where(exponent < HUGE, scale, cute.full_like(b, 2.0**-64))


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

    It takes 5 instructions, 6 for a number below 1/2, and 1 for a power of two.
    """
    (number,) = struct.unpack("f", struct.pack("f", number))
    mantissa, exponent = math.frexp(number)
    if mantissa in (0.5, -0.5):  # a power of two
        return a * (1 / number)
    if exponent < 0:  # as `_scale` does it
        a, number = a * 2.0**-exponent, mantissa
    (reciprocal,) = struct.unpack("f", struct.pack("f", 1 / number))
    return _corrected(a, number, reciprocal)


@elementwise
def _corrected(a, b, reciprocal):
    """a / b from the rounded reciprocal of b.

    The quotient is off by an ulp at most, and its remainder corrects it (P. Markstein, Computation
    of elementary functions on the IBM RISC System/6000 processor, 1990). An infinite quotient has a
    remainder of NaN, and a zero would lose its sign: both stay as they are.
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

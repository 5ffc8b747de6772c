"""Roots, exponentials, logarithms and powers.

Counts of instructions are of SASS, for one element, on sm_90a.
"""

from __future__ import annotations

import math

import cutlass.cute as cute
from cutlass import Numeric

from htile.compute.division import div, rcp
from htile.compute.operands import Operand, Vector, elementwise
from htile.compute.products import polynomial

LOG2_E = math.log2(math.e)
# The polynomial p of degree 7 for which x + p(x) x^2 is nearest to log(1 + x) on [0, 1], by Remez's
# algorithm: it is off by 2 ** -24.8 of the value at most.
LOG1P = [float.fromhex(number) for number in (
    "-0x1.ffff14p-2", "0x1.5535dap-2", "-0x1.fd1322p-3", "0x1.884456p-3",
    "-0x1.19ad96p-3", "0x1.446c16p-4", "-0x1.ec9958p-6", "0x1.5f9714p-8",
)]  # fmt: skip


@elementwise
def sqrt(x):
    """The square root, correctly rounded."""
    return cute.math.sqrt(x)


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
    """e ** x - 1, without cancellation near 0."""
    return cute.math.expm1(x)


@elementwise
def log(x, fastmath=False):
    """The natural logarithm.

    With `fastmath` the absolute error stays small near 1, where the result is small itself; the
    relative error does not.
    """
    return cute.math.log(x, fastmath=fastmath)


@elementwise
def log2(x, fastmath=False):
    """The logarithm to base 2. `fastmath` is as for `log`."""
    return cute.math.log2(x, fastmath=fastmath)


@elementwise
def log10(x, fastmath=False):
    """The logarithm to base 10. `fastmath` is as for `log`."""
    # cute.math.log10 takes 5 instructions with its own fastmath.
    return log2(x, fastmath=True) * math.log10(2) if fastmath else cute.math.log10(x)


@elementwise
def log1p(x):
    """log(1 + x), without cancellation near 0."""
    return cute.math.log1p(x)


@elementwise
def log1p_bounded(x):
    """log(1 + x) to 2 ulp for 0 <= x <= 1, in 9 instructions."""
    return cute.math.fma(polynomial(x, LOG1P), x * x, x)


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


@elementwise
def _pow(a, b):
    """a ** b of the device library, in about 80 instructions."""
    return cute.math.pow(a, b)

"""Special functions: the complement of erf and what is made of it, the gamma function, Bessel's.

Each is a polynomial, or a quotient of two, times what the function behaves like. The coefficients
are the nearest ones in relation to the function, found by Lawson's algorithm from values of 30
digits; a comment beside them has their largest relative error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import exp, log, log1p, rsqrt

from .composites import INF, NAN, magnitude, with_slope
from .functions import clamp, formulas, implements, where
from .known import Known
from .ops import Op
from .promotion import real, together
from .tensor import Tensor, node


def polynomial(x: Tensor, coefficients: Sequence[float]) -> Tensor:
    """The coefficients are those of the highest power first."""
    value = x * coefficients[0] + coefficients[1]
    for each in coefficients[2:]:
        value = value * x + each
    return value


def ordinary_quotient(a: Tensor | float, b: Tensor) -> Tensor:
    """a / b, of a divisor from 2^-126 to 2^126 in magnitude, to 2 ulp; 0 of a larger one."""
    return node(Op.DIV, *together(a, b, floating=True), arg=Known.ORDINARY)


# The error function's complement

# (x + 1) exp(x^2) erfc(x) for x >= 0, by q = (x - 3) / (x + 3), to 2.1e-9. M. Shepherd and J.
# Laframboise (Mathematics of Computation 36, 1981) approximate the function by such a variable.
ERFCX = (
    3.43420078e-05, -2.31783412e-05, -0.000342279481, 0.000647821095, 0.00160395676, -0.00975138713,
    0.0219620076, -0.0238038179, -0.0102359216, 0.099020751, -0.230927314, 0.716004605,
)  # fmt: skip
# -(x + 1)^2 times the derivative of exp(x^2) erfc(x), by the same q, to 5.1e-10
ERFCX_SLOPE = (
    -2.22940977e-05, -2.83310496e-05, 0.000229528934, 0.000168682966, -0.00156215065,
    0.000415734004, 0.00832815712, -0.0175602397, -0.00020347086, 0.0658201416,
    -0.138971187, 0.109019998, 0.108529632, -0.439930778, 0.86995616,
)  # fmt: skip
# By x^2, erf(x) / x - 1 for |x| <= 0.85 and (ndtr(x) - 1/2) / x - 1/2 for |x| <= 1, to 6.1e-9 and
# 7.2e-10 of erf(x) / x and of (ndtr(x) - 1/2) / x
ERF = (-0.000631512966, 0.00505109529, -0.0268025484, 0.112827174, -0.376125718, 0.12837916)
NDTR = (-7.65420905e-06, 0.000113486378, -0.00118632995, 0.00997332342, -0.0664903599, -0.10105772)
ERF_ENDS, NDTR_ENDS = 0.85, 1.0
ERFC_ENDS = 16.0  # where exp(-x^2 / 2) has become 0, in float32
SQUARED_STEPS = 128  # per unit: the square of such a number below 16 is a float32
EXPM1 = (1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0)  # the series of (exp(x) - 1) / x, for |x| <= 1/8
FAR_BELOW = -1e4  # where the derivative of log_ndtr(x) is -x - 1 / x


def _exp_of_square(x: Tensor, factor: float) -> Tensor:
    """exp(factor x^2), of |x| below 16 with the error of exp alone."""
    bounded = clamp(x, -ERFC_ENDS, ERFC_ENDS)
    near = torch.round(bounded * SQUARED_STEPS) * (1 / SQUARED_STEPS)
    rest = (bounded - near) * (bounded + near) * factor
    value = exp(near * near * factor) * (1 + rest * polynomial(rest, EXPM1))
    for _ in range(2):  # twice, so that the second derivative is no difference of infinities
        value = with_slope(value, x, 2 * factor * bounded * value)
    return value


def _erfcx(x: Tensor) -> Tensor:
    """exp(x^2) erfc(x), of x >= 0."""
    q = 1 - 6 / (x + 3)
    slope = -polynomial(q, ERFCX_SLOPE) / (x + 1) / (x + 1)
    return with_slope(polynomial(q, ERFCX) / (x + 1), x, slope)


def _tail(x: Tensor, bell: Tensor, factor: float) -> Tensor:
    """`factor` erfc(x), of x >= 0 and exp(-x^2). It has no slope of its own."""
    q = 1 - 6 * ordinary_quotient(1, x + 3)
    value = polynomial(q, [factor * each for each in ERFCX])
    return ordinary_quotient(value, x + 1) * bell


@implements("erfc", check=real)
def erfc(input):
    """1 - erf(x), with all its digits where that is near 0."""
    bell, size = _exp_of_square(input, -1.0), magnitude(input)
    beyond = _tail(size, bell, 1.0)
    near = 0.5 - input - input * polynomial(input * input, ERF) + 0.5
    value = where(size < ERF_ENDS, near, where(input < 0, 2 - beyond, beyond))
    return with_slope(value, input, -2 / math.sqrt(math.pi) * bell)


@implements("erfcx", check=real)
def erfcx(input):
    """exp(x ** 2) * erfc(x)."""
    value = _erfcx(magnitude(input))
    return where(input < 0, 2 * _exp_of_square(input, 1.0) - value, value)


@implements("ndtr", check=real)
def ndtr(input):
    """The normal distribution function, with all its digits where that is near 0."""
    bell, size = _exp_of_square(input, -0.5), magnitude(input)
    beyond = _tail(size * math.sqrt(0.5), bell, 0.5)
    near = 0.5 + 0.5 * input + input * polynomial(input * input, NDTR)
    value = where(size < NDTR_ENDS, near, where(input < 0, beyond, 1 - beyond))
    return with_slope(value, input, bell / math.sqrt(2 * math.pi))


@implements("log_ndtr", check=real)
def log_ndtr(input):
    """log(ndtr(x)), also where ndtr(x) is 0 or 1 in float32."""
    scaled = _erfcx(magnitude(input) * math.sqrt(0.5))
    bell = _exp_of_square(input, -0.5)
    beyond = 0.5 * scaled * bell  # the distribution function of -|x|
    value = where(input < 0, log(0.5 * scaled) - 0.5 * input * input, log1p(-beyond))
    below = where(input < FAR_BELOW, -input - 1 / input, math.sqrt(2 / math.pi) / scaled)
    above = bell / math.sqrt(2 * math.pi) / (1 - beyond)
    return with_slope(value, input, where(input < 0, below, above))


# What is inverse to the error function and to the normal distribution function

# erfinv(x) / x by w = -log(1 - x^2), for w < 4, to 1.5e-8
ERFINV = (
    6.84962842e-08, -8.79703578e-07, -2.41100764e-07, 5.39696703e-05, -0.000139650219,
    -0.00232557626, 0.0115455864, 0.232014224, 0.886226892,
)  # fmt: skip
# erfinv(|x|) / sqrt(w) by 1 / sqrt(w) - 1 / 4, for w from 4 to 104, to 1.3e-8
ERFINV_FAR = (
    -245.654221, 108.133575, 7.91766024, -0.699521244, -3.75332928, 0.851066828, -0.869504511,
    0.553878367, 0.0802127197, -0.198196545, 0.959945917,
)  # fmt: skip
ERFINV_IS_FAR = 4.0


def _erfinv(x: Tensor, beyond: Tensor) -> Tensor:
    """erfinv(x), where `beyond` is 1 - x^2 with all its digits."""
    w = -log(beyond)
    root = torch.sqrt(w)
    far = polynomial(1 / root - 0.25, ERFINV_FAR) * root
    near = polynomial(w, ERFINV) * x
    return where(w < ERFINV_IS_FAR, near, where(x < 0, -far, far))


def _with_slopes(value: Tensor, x: Tensor, tail: Tensor, u: Tensor, factors: tuple) -> Tensor:
    """An inverse of x whose slope is the first factor times exp(u^2), of u = |value| or a part.

    tail: erfc(u), so that the exponential is erfcx(u) / tail: erfcx is as good where u is rounded.
    """
    slope = where(tail == 0, INF, _erfcx(u) / tail) * factors[0]
    return with_slope(value, x, with_slope(slope, x, factors[1] * value * slope * slope))


@implements("erfinv", check=real)
def erfinv(input):
    """What erf gives x of: infinite at 1 and -1, and NaN beyond them."""
    value = _erfinv(input, (1 - input) * (1 + input))
    tail, factors = 1 - abs(input), (0.5 * math.sqrt(math.pi), 2.0)
    return _with_slopes(value, input, tail, magnitude(value), factors)


@implements("ndtri", check=real)
def ndtri(input):
    """What ndtr gives x of: infinite at 0 and 1, and NaN beyond them."""
    less = where(input < 0.5, input, 1 - input)
    u = _erfinv(2 * input - 1, 4 * less * (1 - less))
    factors = (math.sqrt(2 * math.pi), 1.0)
    return _with_slopes(u * math.sqrt(2), input, 2 * less, magnitude(u), factors)


# The gamma function

# (c - log(gamma(x)) / (x - 1) / (x - 2)) / (x - 2) from 1/2 to 4, a quotient by x - 1, where c is
# 1 - Euler's constant, to 5.4e-9 of the logarithm
LGAMMA_ABOVE = (2.07921011e-06, 0.0010393493, 0.00876500468, 0.0194263422, 0.0123522101)
LGAMMA_BELOW = (0.00272510385, 0.0340610057, 0.1249318, 0.172831492, 0.0799851321)
LGAMMA_AT_2 = 0.42278433509846714
# x times what Stirling's formula lacks of log(gamma(x)) from 4 on, by x^-2, to 7.4e-11
STIRLING = (-0.000507253003, 0.0007904271, -0.00277773893, 0.0833333333)
# digamma(x) / (x - root) from 1/2 to 4, a quotient, to 2.9e-9
DIGAMMA_ABOVE = (2.19221604e-05, 0.00437171666, 0.0419165792, 0.0813306975, 0.0310506562)
DIGAMMA_BELOW = (0.00111609654, 0.0187107239, 0.0617193439, 0.0453668429, 1.65385866e-06)
DIGAMMA_ROOT = 1.4616321325302124, 1.2438149939e-08  # in two parts, the first a float32
# x^2 (log(x) - 1 / (2 x) - digamma(x)) from 4 on, by x^-2, to 6.2e-10
DIGAMMA_FAR = (-0.00340266007, 0.00394063002, -0.00833300292, 0.0833333327)
# sin(pi x) / (pi x) and cos(pi x) / (1 - 4 x^2) for |x| <= 1/2, by x^2, to 2.1e-11 and 9.8e-10
SINE = (-0.00223522404, 0.0261162053, -0.190747623, 0.811742171, -1.64493406, 1.0)
COSINE = (0.00603852403, -0.0571846354, 0.319497441, -0.934802012, 0.999999999)
FAR_FROM_1 = 4.0  # from where the asymptotic series are taken
ALL_WHOLE = 2.0**23  # from where every float32 is a whole number
# the coefficients of x^-11, x^-9, ..., x^-1 in the series of trigamma(x) - 1 / (2 x^2)
TRIGAMMA = (5 / 66, -1 / 30, 1 / 42, -1 / 30, 1 / 6, 1.0)


def _sine(x: Tensor) -> tuple[Tensor, Tensor]:
    """sin(pi r) / pi, and r: the distance of x from the nearest whole number."""
    rest = x - torch.round(x)
    return rest * polynomial(rest * rest, SINE), rest


@implements("lgamma", "gammaln", check=real)
def lgamma(input):
    """log(|gamma(x)|); infinite at 0, -1, -2 and so on."""
    a = abs(input)
    is_small = a < 0.5
    y, logarithm = where(is_small, a + 1, a), log(a)
    z = y - 1
    quotient = ordinary_quotient(polynomial(z, LGAMMA_ABOVE), polynomial(z, LGAMMA_BELOW))
    near = (LGAMMA_AT_2 - (y - 2) * quotient) * z * (y - 2) + 0.0  # at 1 it is not -0.0
    inverse = ordinary_quotient(1, a)
    far = polynomial(inverse * inverse, STIRLING) * inverse + 0.5 * math.log(2 * math.pi) - 0.5
    whole = where(a < FAR_FROM_1, near, (a - 0.5) * (logarithm - 1) + far)  # of y
    sine, _ = _sine(a)
    reflected = -log(where(is_small, 1.0, a) * abs(sine)) - whole
    value = where(input < 0, reflected, where(is_small, whole - logarithm, whole))
    return with_slope(where(input <= -ALL_WHOLE, INF, value), input, digamma(input))


@implements("digamma", "psi", check=real)
def digamma(input):
    """The derivative of lgamma; NaN at -1, -2 and so on."""
    a, is_negative = abs(input), input < 0
    is_small = a < 0.5
    y, inverse = where(is_small, a + 1, a), 1 / input
    near = ordinary_quotient(polynomial(y, DIGAMMA_ABOVE), polynomial(y, DIGAMMA_BELOW))
    near = (y - DIGAMMA_ROOT[0] - DIGAMMA_ROOT[1]) * near
    square = inverse * inverse
    far = log(a) - (0.5 * abs(inverse) + square * polynomial(square, DIGAMMA_FAR))
    whole = where(a < FAR_FROM_1, near, far)  # of y
    sine, rest = _sine(a)
    square = rest * rest
    cotangent = (1 - 4 * square) * polynomial(square, COSINE) / sine
    value = whole - where(is_small ^ is_negative, inverse, 0.0)
    value = value + where(is_negative, cotangent, 0.0)
    value = where(is_negative & (rest == 0), NAN, value)
    return with_slope(value, input, _trigamma(input))


def _trigamma(x: Tensor) -> Tensor:
    """The derivative of digamma, by the recurrence from x + 4 on; its own is that of its terms."""
    sine, _ = _sine(x)
    up = where(x < 0, 1 - x, x)
    terms = [1 / (up + k) for k in range(4)]
    s = 1 / (up + 4)
    value = polynomial(s * s, TRIGAMMA) * s + 0.5 * s * s
    for term in terms[::-1]:
        value = value + term * term
    return where(x < 0, 1 / (sine * sine) - value, value)


# Bessel functions

# I0(x) and I1(x) / x for |x| < 8, by x^2, to 2.8e-10 and 6e-11
I0 = (
    1.35663806e-19, 1.99133827e-17, 1.00695642e-14, 2.37213868e-12, 4.7179986e-10, 6.78023524e-08,
    6.78183067e-06, 0.000434026962, 0.0156250022, 0.249999998, 1.0,
)  # fmt: skip
I1 = (
    5.96730519e-21, 1.05283976e-18, 5.52532572e-16, 1.48711755e-13, 3.36822547e-11, 5.65061859e-09,
    6.78177039e-07, 5.4253419e-05, 0.00260416683, 0.0624999998, 0.5,
)  # fmt: skip
# exp(-x) sqrt(x) I0(x), and of I1(x), from 8 on, by 1 / x, to 1.2e-9 and 1.4e-9
I0_FAR = (
    1.82772314, -0.305648455, 0.0851287143, 0.027250708, 0.0280948233, 0.049867419, 0.398942281
)  # fmt: skip
I1_FAR = (
    -2.07614214, 0.337642656, -0.103407061, -0.0386589992, -0.0468018396, -0.149602931, 0.39894228
)  # fmt: skip
BESSEL_FAR = 8.0


def _growing(x: Tensor) -> tuple[Tensor, Tensor]:
    """I0(x) and I1(x), of x from 8 on; exp(x) may be infinite where they are not.

    Their derivatives are formed before that exponential is, as it would be infinity less infinity.
    """
    t, half = 1 / x, exp(0.5 * x)
    even, odd = polynomial(t, I0_FAR), polynomial(t, I1_FAR)

    def value(shape: Tensor) -> Tensor:
        return shape * rsqrt(x) * half * half

    third = value((1 + 2 * t * t) * odd - t * even)  # the second derivative of I1
    second = value(even - t * odd)  # the derivative of I1, and the second one of I0
    first = with_slope(value(odd), x, with_slope(second, x, third))
    return with_slope(value(even), x, with_slope(value(odd), x, second)), first


def _bessel(order: int, is_scaled: bool) -> Callable:
    """A modified Bessel function, of which `is_scaled` takes exp(-|x|)."""

    def function(input):
        a = magnitude(input)
        below = polynomial(input * input, I1 if order else I0)
        below = below * a if order else below
        if is_scaled:
            below = below * exp(-abs(input))
            above = polynomial(1 / a, I1_FAR if order else I0_FAR) * rsqrt(a)
        else:
            above = _growing(a)[order]
        value = where(a < BESSEL_FAR, below, above)
        return where(input < 0, -value, value) if order else value

    return function


formulas({
    "i0": ("The modified Bessel function of order 0.", _bessel(0, False)),
    "i0e": ("exp(-|x|) * i0(x).", _bessel(0, True)),
    "i1": ("The modified Bessel function of order 1.", _bessel(1, False)),
    "i1e": ("exp(-|x|) * i1(x).", _bessel(1, True)),
}, real)  # fmt: skip

"""Elementwise composites: torch's special functions and activations, made of the primitive ones.

Each follows torch's own definition, in a form that keeps its digits in float32: terms that cancel
are rewritten, and an intermediate result overflows only where the result does. torch's own
functions stand for the entries of the table here, as they do in the functions of a user.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import (
    cos,
    erf,
    exp,
    expm1,
    log,
    log1p,
    remainder,
    rsqrt,
    sigmoid,
    sign,
    sin,
    sqrt,
    tanh,
    trunc,
)

from ..errors import TraceError, UnsupportedError
from .functions import (
    arithmetic,
    bounded,
    chosen,
    clamp,
    formulas,
    implements,
    minimum,
    where,
)
from .ops import INFER, Op, Value, Varies
from .promotion import (
    BOOL,
    FLOAT,
    INT64,
    alike,
    convert,
    floating,
    into,
    numeric,
    real,
    refuse,
    result_dtype,
    together,
)
from .slopes import Slope
from .tensor import Tensor, constant, copy, fail, node

INF, NAN, LN2 = math.inf, math.nan, math.log(2.0)
FAR = 1000  # a power of two so far that every float32 times it is 0 or infinite
LARGE = 1e9  # where x * x + 1 is x * x and half of exp(x) is cosh(x)
ALWAYS = Value((), Varies.SCALAR, BOOL)  # of a mask that is one constant


def odd(x: Tensor, value: Tensor) -> Tensor:
    """An odd function of `x`, whose value at its magnitude is given; at zero it is `x`."""
    return where(x == 0, x, where(x < 0, -value, value))


def magnitude(x: Tensor) -> Tensor:
    """|x| as a part of a function that is smooth at 0: its slope there is 1, not torch's 0."""
    return node(Op.ABS, x, arg=Slope.RIGHT)


def is_negative(x: Tensor) -> Tensor:
    """Whether the sign is set, that of -0.0 too; a NaN counts as positive."""
    if x._value.dtype is not FLOAT:
        return convert(x, torch.int32) < 0
    return (node(Op.BITS, x) < 0) & (x == x)


formulas({
    "isnan": ("Whether x is NaN.", lambda input: input != input),
    "isinf": ("Whether x is infinite.", lambda input: abs(real(input)) == INF),
    "isfinite": ("Whether x is neither infinite nor NaN.", lambda input: abs(real(input)) < INF),
    "isposinf": ("Whether x is infinity.", lambda input: real(input) == INF),
    "isneginf": ("Whether x is minus infinity.", lambda input: real(input) == -INF),
    "signbit": ("Whether the sign is set, that of -0.0 too; not of a NaN.", is_negative),
})  # fmt: skip


# functions of reals


def with_slope(value: Tensor, x: Tensor, slope: Tensor) -> Tensor:
    """`value`, a function of `x`, with this derivative, which no kernel of a forward pass computes.

    That of the value itself would be the slope of an approximation, in terms that may cancel.
    """
    line = node(Op.MUL, x, slope, arg=Slope.GIVEN)
    return chosen(constant(x, True, ALWAYS), value, line, Slope.LAST)


def _sinh(x: Tensor) -> Tensor:
    a = abs(x)
    half, less = exp(a * 0.5), expm1(a)
    return odd(x, where(a < 40, 0.5 * (less + less / (less + 1)), 0.5 * half * half))


def _cosh(x: Tensor) -> Tensor:
    a = abs(x)
    half, whole = exp(a * 0.5), exp(a)
    return where(a < 40, 0.5 * whole + 0.5 / whole, 0.5 * half * half)


formulas({
    "sinh": ("The hyperbolic sine.", lambda input:
        with_slope(_sinh(input), input, with_slope(_cosh(input), input, _sinh(input)))),
    "cosh": ("The hyperbolic cosine.", lambda input:
        with_slope(_cosh(input), input, with_slope(_sinh(input), input, _cosh(input)))),
}, real)  # fmt: skip


@implements("asinh", "arcsinh", check=real)
def asinh(input):
    """The inverse of sinh."""
    a = abs(input)
    small = log1p(a + a * a / (1 + sqrt(a * a + 1)))
    value = odd(input, where(a < LARGE, small, log(a) + LN2))
    return with_slope(value, input, where(a < LARGE, rsqrt(input * input + 1), 1 / a))


@implements("acosh", "arccosh", check=real)
def acosh(input):
    """The inverse of cosh; NaN below 1."""
    more = input - 1
    small = log1p(more + sqrt(more * (more + 2)))
    is_large = input > LARGE
    value = where(input < 1, NAN, where(is_large, log(input) + LN2, small))
    slope = where(abs(input) < 1, NAN, rsqrt(abs(more) * abs(more + 2)))  # of -1 as torch has it
    return with_slope(value, input, where(is_large, 1 / input, slope))


@implements("atan", "arctan", check=real)
def atan(input):
    """The arctangent (the approximation of the Cephes library, atanf.c)."""
    a = abs(input)
    is_large, is_small = a > 2.414213562373095, a <= 0.4142135623730950
    top = where(is_large, -1.0, where(is_small, a, a - 1))
    t = top / where(is_large, a, where(is_small, 1.0, a + 1))
    z = t * t
    p = ((8.05374449538e-2 * z - 1.38776856032e-1) * z + 1.99777106478e-1) * z - 3.33329491539e-1
    base = where(is_large, math.pi / 2, where(is_small, 0.0, math.pi / 4))
    return with_slope(odd(input, base + (p * z * t + t)), input, 1 / (1 + input * input))


def _slope_of_asin(x: Tensor) -> Tensor:
    """1 / sqrt(1 - x * x), with a slope that has all digits near 0, too."""
    slope = rsqrt((1 - x) * (1 + x))
    return with_slope(slope, x, x * slope * slope * slope)


def _slope_of_atanh(x: Tensor) -> Tensor:
    """1 / (1 - x * x), likewise."""
    slope = 1 / ((1 - x) * (1 + x))
    return with_slope(slope, x, 2 * x * slope * slope)


formulas({
    "tan": ("The tangent.", lambda input: sin(input) / cos(input)),
    "atanh arctanh": ("The inverse of tanh; NaN beyond 1.", lambda input:
        with_slope(odd(input, 0.5 * log1p(2 * abs(input) / (1 - abs(input)))), input,
                   _slope_of_atanh(input))),
    "asin arcsin": ("The arcsine; NaN beyond 1.", lambda input:
        with_slope(2 * atan(input / (1 + sqrt((1 - input) * (1 + input)))), input,
                   _slope_of_asin(input))),
    "acos arccos": ("The arccosine; NaN beyond 1.", lambda input:
        with_slope(2 * atan(sqrt((1 - input) / (1 + input))), input,
                   -_slope_of_asin(input))),
    "sinc": ("sin(pi x) / (pi x), and 1 at 0.", lambda input:
        where(input == 0, 1.0, sin(math.pi * input) / (math.pi * input))),
    "deg2rad": ("Degrees as radians.", lambda input: input * (math.pi / 180)),
    "rad2deg": ("Radians as degrees.", lambda input: input * (180 / math.pi)),
    "entr": ("-x log(x); 0 at 0 and -inf below.", lambda input: where(
        input < 0, -INF, where(input == 0, 0.0, -input * log(input)))),
}, real)  # fmt: skip


@implements("logit", check=real)
def logit(input, eps=None):
    """log(x / (1 - x)), of x clamped to [eps, 1 - eps] if eps is given."""
    is_whole = eps is None or (not isinstance(eps, Tensor) and eps < 0)
    low = 0.0 if is_whole else eps
    x = input if is_whole else clamp(input, low, 1 - low)
    # The quotient has a finite slope where there is no logarithm, and none at 0 and 1. The slope is
    # that of a difference, which no kernel of a forward pass computes.
    is_beyond, apart = (input < low) | (input > 1 - low), log(input) - log(1 - input)
    beyond, slope = (NAN, Slope.NAN) if is_whole else (0.0, None)
    apart = chosen(is_beyond, beyond, apart, slope)
    return chosen(constant(x, True, ALWAYS), log(x / (1 - x)), apart, Slope.LAST)


def _xlogy(logarithm: Callable) -> Callable:
    def function(input, other):
        x, y = together(input, other, floating=True)
        value = chosen(x == 0, 0.0, node(Op.MUL, x, logarithm(y), arg=Slope.ZERO), Slope.LAST)
        return chosen(y != y, NAN, value, Slope.NAN)

    return function


def _logaddexp(power: Callable, unit: float) -> Callable:
    def function(input, other):
        a, b = together(floating(input, "logaddexp"), floating(other, "logaddexp"))
        smaller = log1p(power(-magnitude(a - b)))
        smaller = smaller if power is exp else smaller / LN2
        larger = node(Op.MAXIMUM, a, b, arg=Slope.FIRST)
        return chosen(a == b, a + unit, larger + smaller, Slope.LAST)

    return function


def _fmax(op: Op) -> Callable:
    def function(input, other):
        a, b = together(input, other)
        if a._value.dtype is not FLOAT:
            return arithmetic(op, a, b)
        return where(a != a, b, where(b != b, a, node(op, a, b, arg=Slope.FIRST)))

    return function


@implements("copysign")
def copysign(input, other):
    """The magnitude of input with the sign of other; a NaN counts as positive."""
    if not isinstance(other, Tensor):
        other = math.copysign(1.0, other)
    input, other = together(input, other, floating=True)
    result = where(is_negative(other), -abs(input), abs(input))
    return into(result, INFER[Op.ADD]((input._value, other._value), None))


@implements("atan2", "arctan2")
def atan2(input, other):
    """The angle of the point (other, input), from -pi to pi."""
    y, x = together(input, other, floating=True)
    a, b = (node(Op.ABS, each, arg=Slope.SIGNED) for each in (y, x))
    longer = node(Op.MAXIMUM, a, b, arg=Slope.OTHER)
    shorter = node(Op.MINIMUM, a, b, arg=Slope.LEFT)
    ratio = where(longer == 0, 0.0, where(shorter == INF, 1.0, shorter / longer))
    angle = atan(ratio)
    angle = where(a > b, math.pi / 2 - angle, angle)
    angle = where(is_negative(x), math.pi - angle, angle)
    return where(is_negative(y), -angle, angle)


class Split(NamedTuple):
    """What `torch.frexp` returns."""

    mantissa: Tensor
    exponent: Tensor


@implements("frexp", check=floating)
def frexp(input):
    """The mantissa, from 0.5 to 1, and the exponent, such that input is mantissa * 2 ** exponent.

    Both are exact; of 0, infinities and NaN the exponent is 0."""
    exponent = node(Op.EXPONENT, input)
    return Split(node(Op.LDEXP, input, -exponent), exponent)


@implements("ldexp")
def ldexp(input, other):
    """input * 2 ** other, of an integer other, rounded once."""
    if not isinstance(other, Tensor):
        fail(TraceError, "ldexp takes the exponents as a tensor: for a number write x * 2.0**e")
    if other._value.dtype in (FLOAT, BOOL):
        refuse("ldexp by exponents", other, "write x * torch.exp2(e)")
    if other._value.dtype is INT64:  # beyond these numbers all results are 0 or infinite
        other = clamp(other, -FAR, FAR)
    return node(Op.LDEXP, real(input), convert(other, torch.int32))


@implements("hypot")
def hypot(input, other):
    """sqrt(input ** 2 + other ** 2)."""
    a, b = (magnitude(floating(x, "hypot")) for x in (input, other))
    top = arithmetic(Op.MAXIMUM, a, b, Slope.LEFT)
    ratio = arithmetic(Op.MINIMUM, a, b, Slope.OTHER) / top
    length = top * sqrt(1 + ratio * ratio)
    return where((a == INF) | (b == INF), INF, chosen(top == 0, 0.0, length, Slope.LAST))


@implements("fmod")
def fmod(input, other):
    """The remainder of input / other, with the sign of input."""
    a, b = together(input, other)
    if numeric(a, "fmod")._value.dtype is FLOAT:
        rest = remainder(abs(a), abs(b))
        return where((rest == 0) & (a == 0), a, where(a < 0, -rest, rest))
    rest = remainder(a, b)
    return where((rest != 0) & ((a < 0) != (b < 0)), rest - b, rest)


@implements("nan_to_num")
def nan_to_num(input, nan=None, posinf=None, neginf=None):
    """NaN as `nan` (0), infinities as the largest and the lowest number of the dtype."""
    if input._value.dtype is not FLOAT:
        return copy(input)
    info = torch.finfo(input.dtype)
    high, low = info.max if posinf is None else posinf, info.min if neginf is None else neginf
    x = where(input != input, 0.0 if nan is None else nan, input)
    return where(x == INF, high, where(x == -INF, low, x))


@implements("isclose")
def isclose(input, other, rtol=1e-5, atol=1e-8, equal_nan=False):
    """Whether |input - other| <= atol + rtol |other|."""
    alike("isclose", input, other)
    close = input == other
    if equal_nan:
        close = close | ((input != input) & (other != other))
    a, b = real(input), real(other)
    distance = abs(a - b)
    return close | ((distance <= atol + rtol * abs(b)) & (distance < INF))


@implements("heaviside")
def heaviside(input, values):
    """0 below zero, 1 above, values at zero."""
    alike("heaviside", input, values)
    dtype = input._value.dtype
    above = convert(input > 0, dtype if dtype in (FLOAT, INT64) else torch.int32)
    return into(where(input == 0, values, above), input._value)


@implements("lerp", check=floating)
def lerp(input, end, weight):
    """input + weight * (end - input)."""
    alike("lerp", input, end, weight)
    difference = end - input
    near, far = input + weight * difference, end - difference * (1 - weight)
    is_near = abs(weight) < 0.5
    return where(is_near, near, far) if isinstance(weight, Tensor) else near if is_near else far


@implements("addcmul")
def addcmul(input, tensor1, tensor2, *, value=1):
    """input + value * tensor1 * tensor2."""
    input, tensor1, tensor2 = together(input, tensor1, tensor2)
    return torch.add(numeric(input, "addcmul"), tensor1 * tensor2, alpha=value)


@implements("addcdiv")
def addcdiv(input, tensor1, tensor2, *, value=1):
    """input + value * tensor1 / tensor2."""
    if not result_dtype(tensor1, tensor2).is_floating_point:
        refuse("addcdiv", tensor1, "write input + value * (tensor1 / tensor2)")
    input, tensor1, tensor2 = together(input, tensor1, tensor2)
    return torch.add(input, tensor1 / tensor2, alpha=value)


formulas({
    "xlogy": ("input * log(other); 0 where input is 0.", _xlogy(log)),
    "xlog1py": ("input * log1p(other); 0 where input is 0.", _xlogy(log1p)),
    "logaddexp": ("log(exp(input) + exp(other)).", _logaddexp(exp, LN2)),
    "logaddexp2": ("log2(2 ** input + 2 ** other).", _logaddexp(torch.exp2, 1.0)),
    "fmax": ("The larger; of a NaN and a number the number.", _fmax(Op.MAXIMUM)),
    "fmin": ("The smaller; of a NaN and a number the number.", _fmax(Op.MINIMUM)),
    "float_power": ("input ** exponent of reals, in float32.", lambda input, exponent:
        operator.pow(*together(input, exponent, floating=True))),
})  # fmt: skip


# activations


@implements("hardtanh", check=numeric)
def hardtanh(input, min_val=-1.0, max_val=1.0):
    """x, but not below min_val nor above max_val."""
    if input._value.dtype is not FLOAT:
        min_val, max_val = int(min_val), int(max_val)
    return bounded(input, min_val, max_val, Slope.OTHER)


@implements("gelu", check=floating)
def gelu(input, *, approximate="none"):
    """x times the normal distribution function of x; approximate is "none" or "tanh"."""
    if approximate == "none":
        return 0.5 * input * (1.0 + erf(input * math.sqrt(0.5)))
    if approximate != "tanh":
        fail(TraceError, f"gelu(approximate={approximate!r}): expected 'none' or 'tanh'")
    slope = 2 * math.sqrt(2.0 / math.pi)  # (1 + tanh(z)) / 2 is sigmoid(2 z)
    return input * sigmoid(input * (slope + slope * 0.044715 * (input * input)))


@implements("prelu", check=floating)
def prelu(input, weight):
    """x above 0, weight * x below, for a weight of one element, or of one for each channel.

    Channels are the second axis, as in F.prelu(x[None], weight)[0] with one for each column.
    """
    alike("prelu", input, weight)
    if weight._sizes.numel() == 1:
        return where(input > 0, input, torch.squeeze(weight.reshape(1), -1) * input)
    if input.ndim < 2 or tuple(weight._sizes) != (input._sizes[1],):
        fail(UnsupportedError, f"prelu with a weight of shape {tuple(weight._sizes)}: torch has "
             "one for each channel, and a row has none; write torch.where(x > 0, x, weight * x)")
    return where(input > 0, input, weight.reshape(-1, *(1,) * (input.ndim - 2)) * input)


@implements("softplus", check=floating)
def softplus(input, beta=1.0, threshold=20.0):
    """log(1 + exp(beta x)) / beta; x where beta x is above the threshold."""
    is_plain = not isinstance(beta, Tensor) and beta == 1
    scaled = input if is_plain else input * beta
    larger = arithmetic(Op.MAXIMUM, scaled, 0.0, Slope.FIRST)
    smooth = larger + log1p(exp(-magnitude(scaled)))
    smooth = smooth if is_plain else smooth / beta
    if is_plain and not isinstance(threshold, Tensor) and threshold >= 20:  # x in float32
        return smooth
    return where(scaled > threshold, input, smooth)


def _mish(x: Tensor) -> Tensor:
    """x tanh(log(1 + e)) with e = exp(x): the tangent is n / (n + 2), where n is e (e + 2)."""
    e = exp(minimum(x, 20.0))  # from there on the quotient is 1 in float32
    n = e * (e + 2)
    return x * (n / (n + 2))


def _elu(x: Tensor, alpha: float, scale: float = 1.0, inside: float = 1.0) -> Tensor:
    is_plain = not isinstance(inside, Tensor) and inside == 1
    below = expm1(x if is_plain else x / inside)
    return where(x > 0, x if scale == 1 else scale * x, alpha * below)


_SELU = 1.0507009873554805, 1.6732632423543772  # scale and alpha of Klambauer et al., 2017
formulas({
    "relu": ("The larger of x and 0.", lambda input:
        arithmetic(Op.MAXIMUM, input, 0, Slope.OTHER)),
    "relu6": ("x, but not below 0 nor above 6.", lambda input: hardtanh(input, 0, 6)),
    "threshold": ("x where it is above the threshold, value elsewhere.", lambda input, threshold,
        value: where(input <= threshold, value, input)),
}, numeric)  # fmt: skip
formulas({
    "silu": ("x * sigmoid(x).", lambda input: input * sigmoid(input)),
    "logsigmoid": ("log(sigmoid(x)).", lambda input:
        arithmetic(Op.MINIMUM, input, 0.0, Slope.OTHER) - log1p(exp(-magnitude(input)))),
    "elu": ("x above 0, alpha * (exp(x) - 1) below.", lambda input, alpha=1.0: _elu(input, alpha)),
    "celu": ("x above 0, alpha * (exp(x / alpha) - 1) below.", lambda input, alpha=1.0:
        _elu(input, alpha, 1.0, alpha)),
    "selu": ("The self-normalizing elu.", lambda input: _elu(input, _SELU[0] * _SELU[1], _SELU[0])),
    "leaky_relu": ("x above 0, negative_slope * x below.", lambda input, negative_slope=0.01:
        where(input > 0, input, input * negative_slope)),
    "mish": ("x * tanh(softplus(x)).", _mish),
    "softsign": ("x / (1 + |x|).", lambda input: input / (1 + abs(input))),
    "hardsigmoid": ("x / 6 + 1/2 within [0, 1].", lambda input:
        bounded(input + 3.0, 0.0, 6.0, Slope.OTHER) / 6.0),
    "hardswish": ("x * hardsigmoid(x).", lambda input:
        input * bounded(input + 3.0, 0.0, 6.0, Slope.OTHER) / 6.0),
    "hardshrink": ("x, but 0 within [-lambd, lambd].", lambda input, lambd=0.5:
        where(abs(input) <= lambd, 0.0, input)),
    "softshrink": ("x moved by lambd towards 0.", lambda input, lambd=0.5:
        where(abs(input) <= lambd, 0.0, input - lambd * sign(input))),
    "tanhshrink": ("x - tanh(x).", lambda input: input - tanh(input)),
    "frac": ("x - trunc(x).", lambda input: input - trunc(input)),
}, floating)  # fmt: skip

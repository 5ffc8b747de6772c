"""Composites: torch's activations, statistics and norms, decomposed into the primitives.

Each follows torch's own definition. A variance is two passes, the mean first; softmax and its
kin subtract the row's maximum.
"""

from __future__ import annotations

import math

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .functions import add, clamp, div, implements, maximum, minimum, mul, sub, where
from .ops import Op
from .promotion import FLOAT, cast, convert, floating, not_zero, numeric
from .reductions import amax, amin, reduced, sum
from .shapes import check_dim
from .tensor import Tensor, fail, node

INF, NAN = math.inf, math.nan


# predicates


@implements("isnan")
def isnan(input):
    return input != input


@implements("isinf")
def isinf(input):
    return abs(convert(input, FLOAT)) == INF


@implements("isfinite")
def isfinite(input):
    return abs(convert(input, FLOAT)) < INF


@implements("count_nonzero")
def count_nonzero(input, dim=None):
    return sum(not_zero(input), dim)


# activations


@implements("relu")
def relu(input):
    return maximum(numeric(input, "relu"), 0)


@implements("relu6")
def relu6(input):
    return hardtanh(input, 0, 6)


@implements("hardtanh")
def hardtanh(input, min_val=-1.0, max_val=1.0):
    return clamp(numeric(input, "hardtanh"), min_val, max_val)


@implements("silu")
def silu(input):
    return floating(input, "silu") * node(Op.SIGMOID, input)


@implements("gelu")
def gelu(input, *, approximate="none"):
    x = floating(input, "gelu")
    if approximate == "none":
        return 0.5 * x * (1.0 + node(Op.ERF, x * math.sqrt(0.5)))
    if approximate != "tanh":
        fail(TraceError, f"gelu(approximate={approximate!r}): expected 'none' or 'tanh'")
    inside = math.sqrt(2.0 / math.pi) * (x + 0.044715 * (x * x * x))
    return 0.5 * x * (1.0 + node(Op.TANH, inside))


@implements("softplus")
def softplus(input, beta=1.0, threshold=20.0):
    x = floating(input, "softplus")
    scaled = x if beta == 1 else x * beta
    smooth = node(Op.LOG1P, node(Op.EXP, scaled))
    return where(scaled > threshold, x, smooth if beta == 1 else smooth / beta)


@implements("logsigmoid")
def logsigmoid(input):
    x = floating(input, "logsigmoid")
    return minimum(x, 0.0) - node(Op.LOG1P, node(Op.EXP, -abs(x)))


@implements("elu")
def elu(input, alpha=1.0):
    x = floating(input, "elu")
    return where(x > 0, x, alpha * node(Op.EXPM1, x))


@implements("leaky_relu")
def leaky_relu(input, negative_slope=0.01):
    x = floating(input, "leaky_relu")
    return where(x > 0, x, x * negative_slope)


@implements("mish")
def mish(input):
    return floating(input, "mish") * node(Op.TANH, softplus(input))


@implements("softsign")
def softsign(input):
    return input / (1 + abs(floating(input, "softsign")))


@implements("hardsigmoid")
def hardsigmoid(input):
    return clamp(floating(input, "hardsigmoid") + 3.0, 0.0, 6.0) / 6.0


@implements("hardswish")
def hardswish(input):
    return floating(input, "hardswish") * clamp(input + 3.0, 0.0, 6.0) / 6.0


@implements("addcmul")
def addcmul(input, tensor1, tensor2, *, value=1):
    return add(input, mul(tensor1, tensor2), alpha=value)


@implements("addcdiv")
def addcdiv(input, tensor1, tensor2, *, value=1):
    return add(input, div(tensor1, tensor2), alpha=value)


@implements("lerp")
def lerp(input, end, weight):
    floating(input, "lerp")
    difference = sub(end, input)
    near, far = input + weight * difference, end - difference * (1 - weight)
    if isinstance(weight, Tensor):
        return where(abs(weight) < 0.5, near, far)
    return near if abs(weight) < 0.5 else far


# statistics


@implements("mean")
def mean(input, dim=None, keepdim=False, *, dtype=None):
    x = floating(input if dtype is None else cast(input, dtype), "the mean")
    total = reduced(Op.SUM, x, dim, keepdim)
    return total / float(x.numel()) if x._value.spread else total


@implements("var_mean")
def var_mean(input, dim=None, unbiased=True, keepdim=False, *, correction=None):
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    x = floating(input, "the variance")
    correction = int(unbiased) if correction is None else correction
    average = mean(x, dim, keepdim)
    deviation = x - average
    squares = reduced(Op.SUM, deviation * deviation, dim, keepdim)
    return squares / max(0.0, float(x.numel() - correction)), average


@implements("std_mean")
def std_mean(*args, **kwargs):
    variance, average = var_mean(*args, **kwargs)
    return node(Op.SQRT, variance), average


@implements("var")
def var(*args, **kwargs):
    return var_mean(*args, **kwargs)[0]


@implements("std")
def std(*args, **kwargs):
    return std_mean(*args, **kwargs)[0]


@implements("norm")
def norm(input, p="fro", dim=None, keepdim=False, dtype=None):
    x = floating(input if dtype is None else cast(input, dtype), "the norm")
    p = 2.0 if p in ("fro", None) else p
    if isinstance(p, (str, Tensor)):
        fail(UnsupportedError, f"the norm of order {p!r} is not supported; give a number")
    if p == 2:
        return node(Op.SQRT, reduced(Op.SUM, x * x, dim, keepdim))
    if p == 0:
        return reduced(Op.SUM, convert(not_zero(x), FLOAT), dim, keepdim)
    if abs(p) == INF:
        return (amax if p > 0 else amin)(abs(x), dim, keepdim)
    power = abs(x) if p == 1 else abs(x) ** p
    return reduced(Op.SUM, power, dim, keepdim) ** (1.0 / p)


@implements("linalg.norm", "linalg.vector_norm")
def vector_norm(x, ord=None, dim=None, keepdim=False, *, dtype=None):
    return norm(x, ord, dim, keepdim, dtype)


@implements("logsumexp")
def logsumexp(input, dim=None, keepdim=False):
    x = convert(input, FLOAT)
    m = _finite(amax(x, dim, keepdim))
    return node(Op.LOG, reduced(Op.SUM, node(Op.EXP, x - m), dim, keepdim)) + m


def _finite(m: Tensor) -> Tensor:
    """A maximum to subtract: 0 for an infinite one, of which the difference would be NaN."""
    return where(abs(m) == INF, 0.0, m)


# softmax and norms


@implements("softmax")
def softmax(input, dim=None, dtype=None):
    x = floating(input if dtype is None else cast(input, dtype), "softmax")
    e = node(Op.EXP, x - amax(x, dim))
    return e / reduced(Op.SUM, e)


@implements("log_softmax")
def log_softmax(input, dim=None, dtype=None):
    x = floating(input if dtype is None else cast(input, dtype), "log_softmax")
    m = amax(x, dim)
    shifted = x - _finite(m)  # as logsumexp has it, so that a function with both exponentiates once
    total = node(Op.LOG, reduced(Op.SUM, node(Op.EXP, shifted)))
    return shifted - where(abs(m) == INF, NAN, total)


def _whole_row(x: Tensor, normalized_shape: object, what: str) -> Tensor:
    row = (x._builder.n,)
    given = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    if given != row or x._value.inner != row:
        fail(
            ShapeError,
            f"{what} with normalized_shape {given} of a value of shape {tuple(x.shape)}: "
            f"a row has shape {row}, write x.shape[-1:]",
        )
    return floating(x, what)


def _affine(y: Tensor, weight: object, bias: object) -> Tensor:
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@implements("layer_norm")
def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    x = _whole_row(input, normalized_shape, "layer_norm")
    centered = x - mean(x)
    variance = mean(centered * centered)
    return _affine(centered * node(Op.RSQRT, variance + eps), weight, bias)


@implements("rms_norm")
def rms_norm(input, normalized_shape, weight=None, eps=None):
    x = _whole_row(input, normalized_shape, "rms_norm")
    eps = torch.finfo(x._value.stored or torch.float32).eps if eps is None else eps
    return _affine(x * node(Op.RSQRT, mean(x * x) + eps), weight, None)


@implements("normalize")
def normalize(input, p=2.0, dim=1, eps=1e-12):
    check_dim(input, dim)
    return input / maximum(norm(input, p), eps)

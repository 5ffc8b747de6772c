"""Composites of reductions: statistics, softmax and its kin, norms and losses.

A variance is two passes, the mean first; softmax and its kin subtract the row's maximum. A loss
reduces over the row, as torch does for one row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from math import prod

import torch
from torch import exp, log, log1p, rsqrt

from ..errors import DtypeError, ShapeError, TraceError, UnsupportedError
from .composites import INF, NAN, clamp, formulas, implements, magnitude, where
from .functions import POWERS, chosen, maximum
from .libraries import dropped_weight
from .ops import Op, broadcast_shapes
from .promotion import FLOAT, cast, convert, floating, not_zero, together
from .reductions import amax, amin, named, reduced, sum
from .shapes import axes_of, axis_of, fixed, squeeze
from .slopes import Slope
from .tensor import FUNCTIONS, Tensor, fail, node


def _given(x: Tensor, dtype: torch.dtype | None, what: str) -> Tensor:
    """`x` in the dtype that the call asks for, which must be floating."""
    return floating(x if dtype is None else cast(x, dtype), what)


@implements("mean")
def mean(input, dim=None, keepdim=False, *, dtype=None):
    """The mean of the row, of floating values."""
    x = _given(input, dtype, "the mean")
    average = reduced(Op.MEAN, x, dim, keepdim)
    return average if dtype is None else cast(average, dtype)


@implements("var_mean")
def var_mean(input, dim=None, unbiased=True, keepdim=False, *, correction=None):
    """(variance, mean) of the row; the variance divides by N - correction (1)."""
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    x = floating(input, "the variance")
    correction = int(unbiased) if correction is None else correction
    average, keep = mean(x, dim, keepdim or x.ndim > 1), keepdim or x.ndim < 2
    deviation = x - average
    squares = reduced(Op.SUM, deviation * deviation, dim, keepdim)
    axes = axes_of(x, dim) if x.ndim else ()
    count = x.shape[-1] if axes == (-1,) else prod(x._sizes[axis] for axis in axes)
    freedom = count - correction
    average = average if keep else mean(x, dim)
    if isinstance(freedom, Tensor):
        return squares / maximum(convert(freedom, FLOAT), 0.0), average
    return squares / max(0.0, float(freedom)), average


@implements("cov", check=floating)
def cov(input, *, correction=1, fweights=None, aweights=None):
    """The covariances of a few rows of a matrix, or the variance of a row."""
    if fweights is not None or aweights is not None:
        fail(UnsupportedError, "torch.cov with weights: write d = x - (w * x).sum() / w.sum(), and "
             "(w * d * d).sum() / w.sum()")  # fmt: skip
    if not 0 < input.ndim < 3:
        fail(ShapeError, f"cov of a value of shape {tuple(input._sizes)}: it takes a row or a "
             "matrix")  # fmt: skip
    if input.ndim == 1:
        return var_mean(input, correction=correction)[0]
    deviation = input - mean(input, -1, keepdim=True)
    return deviation @ deviation.mT / max(0.0, float(input._sizes[-1] - correction))


@implements("corrcoef", check=floating)
def corrcoef(input):
    """The correlations of a few rows of a matrix."""
    covariances = cov(input)
    if not covariances.ndim:
        return covariances / covariances
    scale = torch.sqrt(torch.diagonal(covariances))
    return clamp(covariances / scale[:, None] / scale, -1.0, 1.0)


@implements("norm")
def norm(input, p="fro", dim=None, keepdim=False, dtype=None):
    """The norm of order p of the row: a number, or "fro" for 2."""
    if dtype not in (None, FLOAT):
        fail(DtypeError, f"the norm in {dtype}: leave dtype out, and convert the result")
    x = _given(input, dtype, "the norm")
    p = 2.0 if p in ("fro", None) else p
    if isinstance(p, (str, Tensor)):
        kind = "a symbolic value" if isinstance(p, Tensor) else repr(p)
        fail(UnsupportedError, f"the norm of order {kind} is not supported; give a Python number, "
             "as a static argument is one (htile.Static)")
    if p == 2:
        return root(reduced(Op.SUM, x * x, dim, keepdim))
    if p == 0:
        return reduced(Op.SUM, convert(not_zero(x), FLOAT), dim, keepdim)
    if abs(p) == INF:
        return (amax if p > 0 else amin)(abs(x), dim, keepdim)
    power = abs(x) if p == 1 else abs(x) ** p if p > 1 else _steep(abs(x), p)
    total, inverse = reduced(Op.SUM, power, dim, keepdim), 1.0 / p
    if inverse in POWERS and p > 0:
        return total**inverse
    return node(Op.POW, *together(total, inverse), arg=Slope.ZERO)


def root(x: Tensor) -> Tensor:
    """The square root, whose slope at 0 is 0, as torch has it in a norm and in a deviation."""
    return node(Op.SQRT, x, arg=Slope.ZERO)


def _steep(x: Tensor, p: float) -> Tensor:
    """x ** p for p < 1, whose slope at 0 is 0, as torch has it in a norm."""
    return root(x) if p == 0.5 else node(Op.POW, *together(x, p), arg=Slope.ZERO)


def _finite(m: Tensor) -> Tensor:
    """A maximum to subtract: 0 for an infinite one, of which the difference would be NaN."""
    return where(abs(m) == INF, 0.0, m)


@implements("logsumexp")
def logsumexp(input, dim=None, keepdim=False):
    """log(exp(x).sum())."""
    x = convert(input, FLOAT)
    dim = named(dim)
    m = _finite(amax(x, dim, keepdim or x.ndim > 1))
    total = log(reduced(Op.SUM, exp(x - m), dim, keepdim))
    return total + (m if m.ndim == total.ndim else reduced(Op.MAX, m, dim))


@implements("softmax")
def softmax(input, dim=None, dtype=None):
    """exp(x) / exp(x).sum()."""
    x = _given(input, dtype, "softmax")
    over = _along(x, dim, "softmax")
    e = exp(x - amax(x, *over))
    return e / reduced(Op.SUM, e, *over)


@implements("log_softmax")
def log_softmax(input, dim=None, dtype=None):
    """log(softmax(x))."""
    x = _given(input, dtype, "log_softmax")
    over = _along(x, dim, "log_softmax")
    m = amax(x, *over)
    shifted = x - _finite(m)  # as logsumexp has it, so that a function with both exponentiates once
    total = log(reduced(Op.SUM, exp(shifted), *over))
    return shifted - chosen(abs(m) == INF, NAN, total, Slope.NAN)


# norms


def _whole_row(x: Tensor, normalized_shape: object, what: str) -> Tensor:
    row = tuple(x._sizes[-1:])
    is_one = not isinstance(normalized_shape, (tuple, list))
    given = fixed((normalized_shape,) if is_one else tuple(normalized_shape), x)
    if given == row == (1,) and not x._value.spread:
        fail(ShapeError, f"{what} of one number of each row, which is its own mean; a row has "
             f"shape {(x._builder.n,)}")
    if not row or given != row:
        asked = f"{what} with normalized_shape {given} of a value of shape {tuple(x._sizes)}"
        fail(ShapeError, f"{asked}: a row has shape {(x._builder.n,)}, write x.shape[-1:]")
    return floating(x, what)


def _along(x: Tensor, dim: object, what: str) -> tuple[object, bool]:
    """`dim` and `keepdim` of a reduction whose result goes together with x again."""
    if x.ndim > 1 and type(dim) is not int:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)}: give one axis, dim=-1")
    return dim, x.ndim > 1


def _affine(y: Tensor, weight: object, bias: object, what: str) -> Tensor:
    _check_of_row(y, weight, what, "weight", "y * {}")
    _check_of_row(y, bias, what, "bias", "y + {}")
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _check_of_row(y: Tensor, given: object, what: str, name: str, instead: str) -> None:
    """Raise ShapeError for a weight or bias that is no vector for a row, or for each of a stack.

    A number of the row would be taken for each element, and a column would make a matrix.
    """
    if not isinstance(given, Tensor):
        return
    row, sizes, made = tuple(y._sizes[-1:]), tuple(given._sizes), given._builder[given._id]
    if sizes == row or (prod(sizes) > 1 and broadcast_shapes(sizes, y._sizes) == y._sizes):
        return
    told, remedy = f"{what} with a {name} of shape {sizes}: expected {row}, as the row has", ""
    name = made.arg if made.op is Op.INPUT else name
    if (prod(sizes),) == row:
        remedy = f"; write {name}.flatten()"
    elif prod(sizes) == 1:
        remedy = (f"; pass a vector that all rows share in one dimension, and write "
                  f"{instead.format(name)} for a number of the row")  # fmt: skip
    fail(ShapeError, told + remedy)


@implements("native_layer_norm")
def native_layer_norm(input, normalized_shape, weight, bias, eps):
    """(layer_norm, mean, 1 / standard deviation), the last two with a last axis of size 1."""
    x = _whole_row(input, normalized_shape, "layer_norm")
    average = mean(x, -1, keepdim=True)
    centered = x - average
    scale = rsqrt(mean(centered * centered, -1, keepdim=True) + eps)
    return _affine(centered * scale, weight, bias, "layer_norm"), average, scale


@implements("layer_norm")
def layer_norm(input, normalized_shape, weight=None, bias=None, eps=1e-5, cudnn_enable=True):
    """(x - mean) / sqrt(variance + eps) * weight + bias; normalized_shape is x.shape[-1:]."""
    x = _whole_row(input, normalized_shape, "layer_norm")
    centered = x - mean(x, *(over := _along(x, -1, "layer_norm")))
    variance = mean(centered * centered, *over)
    return _affine(centered * rsqrt(variance + eps), weight, bias, "layer_norm")


@implements("rms_norm")
def rms_norm(input, normalized_shape, weight=None, eps=None):
    """x / sqrt(mean of squares + eps) * weight; normalized_shape is x.shape[-1:]."""
    x = _whole_row(input, normalized_shape, "rms_norm")
    eps = torch.finfo(x._value.stored or FLOAT).eps if eps is None else eps
    y = x * rsqrt(mean(x * x, *_along(x, -1, "rms_norm")) + eps)
    return _affine(y, weight, None, "rms_norm")


@implements("normalize")
def normalize(input, p=2.0, dim=1, eps=1e-12):
    """x / max(norm, eps); give dim=-1."""
    return input / clamp(norm(input, p, dim, input.ndim > 1), eps)


def _norm_of_matrix(x, ord=None, dim=None, keepdim=False, *, dtype=None):
    axes = tuple(range(x.ndim)) if dim is None else dim
    axes = axes if isinstance(axes, (tuple, list)) else (axes,)
    if ord is None or len(axes) == 1 or (dim is None and x.ndim == 0):
        return norm(x, ord, dim, keepdim, dtype)
    if len(axes) != 2:
        fail(ShapeError, f"linalg.norm of order {ord!r} along {len(axes)} axes: expected 1 or 2")
    if ord == "fro":
        return norm(x, 2.0, axes, keepdim, dtype)
    if ord not in (1, -1, INF, -INF):
        fail(UnsupportedError, f"the norm of order {ord!r} of a matrix is not supported: it takes "
             "1, -1, inf, -inf and 'fro'; linalg.vector_norm is that of its elements")  # fmt: skip
    rows, columns = (axis_of(x, axis) for axis in axes)
    added, other = (rows, columns) if abs(ord) == 1 else (columns, rows)
    totals = norm(x, 1.0, added, True, dtype)
    found = (amax if ord > 0 else amin)(totals, other, True)
    return found if keepdim else squeeze(squeeze(found, min(rows, columns)), max(rows, columns))


@implements("linalg.matrix_norm", method=False)
def matrix_norm(A, ord="fro", dim=(-2, -1), keepdim=False, *, dtype=None):
    """The norm of a matrix: ord is 'fro', 1, -1, inf or -inf."""
    return _norm_of_matrix(A, ord, dim, keepdim, dtype=dtype)


formulas({
    "cosine_similarity": ("The cosine of the angle between two rows; give dim=-1.",
        lambda x1, x2, dim=1, eps=1e-8:
            sum(normalize(x1, 2.0, dim, eps) * normalize(x2, 2.0, dim, eps), dim)),
    "var": ("The variance of the row, over N - correction (1).", lambda *args, **kwargs:
        var_mean(*args, **kwargs)[0]),
    "std": ("The standard deviation of the row.", lambda *args, **kwargs:
        root(var_mean(*args, **kwargs)[0])),
    "std_mean": ("(standard deviation, mean) of the row.", lambda *args, **kwargs:
        (root((both := var_mean(*args, **kwargs))[0]), both[1])),
    "linalg.norm": ("torch.norm(x, ord); of two axes the norm of a matrix: ord is 1, -1, inf, -inf "
        "or 'fro'.", _norm_of_matrix),
    "linalg.vector_norm": ("torch.norm(x, ord).",
        lambda x, ord=None, dim=None, keepdim=False, *, dtype=None:
            norm(x, ord, dim, keepdim, dtype)),
    "pairwise_distance": ("norm(x1 - x2 + eps, p), along the last axis.",
        lambda x1, x2, p=2.0, eps=1e-6, keepdim=False: norm(x1 - x2 + eps, p, -1, keepdim)),
    "dist": ("norm(input - other, p).", lambda input, other, p=2.0: norm(input - other, p)),
    "softmin": ("softmax(-x).", lambda input, dim=None, dtype=None: softmax(-input, dim, dtype)),
    "count_nonzero": ("How many elements are not zero.", lambda input, dim=None:
        sum(not_zero(input), dim)),
    "nansum": ("The sum of the elements that are not NaN.",
        lambda input, dim=None, keepdim=False, *, dtype=None:
            sum(where(input != input, 0, input), dim, keepdim, dtype=dtype)),
    "nanmean": ("The mean of the elements that are not NaN.",
        lambda input, dim=None, keepdim=False, *, dtype=None:
            sum(where(input != input, 0.0, floating(input, "the mean")), dim, keepdim, dtype=dtype)
            / sum(input == input, dim, keepdim)),
})  # fmt: skip


# losses


def check_reduction(name: str, reduction: object, size_average: object, reduce: object) -> None:
    """Raise TraceError for what is no reduction of a loss, and for the two parameters before it."""
    if size_average is not None or reduce is not None:
        fail(TraceError, f"{name}(size_average=, reduce=) is old: write reduction='mean', "
             "'sum' or 'none'")  # fmt: skip
    if reduction not in ("none", "mean", "sum"):
        fail(TraceError, f"reduction={reduction!r}: expected 'none', 'mean' or 'sum'")


def _loss(name: str, doc: str, element: Callable, is_weighted_mean: bool = False) -> None:
    """Enter a loss: `element` gives its value at each element.

    is_weighted_mean: the mean divides by the sum of the weights, not by N.
    """

    def function(
        input, target, *, weight=None, size_average=None, reduce=None, reduction="mean", **more
    ):
        own = "batchmean" if name == "kl_div" else "mean"
        check_reduction(name, reduction if reduction != own else "mean", size_average, reduce)
        weight = dropped_weight() if name == "l1_loss" and weight is None else weight
        values = element(floating(input, name), target, **more)
        values = values if weight is None else values * weight
        if reduction == "none":
            return values
        if reduction == "sum":
            return sum(values)
        if reduction == "batchmean":
            return sum(values) / values.shape[0]
        is_plain = weight is None or not is_weighted_mean
        return mean(values) if is_plain else sum(values) / sum(weight)

    function.__doc__ = f"{doc} Reduced over the row: reduction is 'mean', 'sum' or 'none'."
    FUNCTIONS[getattr(torch.nn.functional, name)] = f"F.{name}", function


def _smooth_l1(x: Tensor, target: Tensor, beta: float = 1.0) -> Tensor:
    if not isinstance(beta, Tensor) and beta == 0:
        return abs(x - target)
    # A beta that may be 0 leaves no parabola, and the slope of the distance is 0 at 0.
    distance = abs(x - target) if isinstance(beta, Tensor) else magnitude(x - target)
    # A NaN belongs to the parabola, so that its gradient is NaN too.
    return where(distance >= beta, distance - 0.5 * beta, 0.5 * distance * distance / beta)


def _huber(x: Tensor, target: Tensor, delta: float = 1.0) -> Tensor:
    distance = magnitude(x - target)
    return where(distance > delta, delta * (distance - 0.5 * delta), 0.5 * distance * distance)


def _kl(x: Tensor, target: Tensor, log_target: bool = False) -> Tensor:
    return exp(target) * (target - x) if log_target else torch.xlogy(target, target) - target * x


def _poisson(
    x: Tensor, target: Tensor, log_input: bool = True, full: bool = False, eps: float = 1e-8
) -> Tensor:
    loss = exp(x) - target * x if log_input else x - target * log(x + eps)
    if not full:
        return loss
    stirling = target * log(target) - target + 0.5 * log(2 * math.pi * target)
    return loss + where(target <= 1, 0.0, stirling)


def _entropy(x: Tensor, target: Tensor) -> Tensor:
    """Binary cross entropy; a logarithm is never below -100, as in torch."""
    yes, no = maximum(log(x), -100.0), maximum(log1p(-x), -100.0)
    return (target - 1) * no - target * yes


def _entropy_of_logits(x: Tensor, target: Tensor, pos_weight: Tensor | None = None) -> Tensor:
    # No digits of the slope in x cancel, and both terms share a logarithm.
    yes = target if pos_weight is None else target * pos_weight
    functional = torch.nn.functional
    return (1 - target) * functional.softplus(x) - yes * functional.logsigmoid(x)


_loss("mse_loss", "(input - target) ** 2.", lambda x, t: (x - t) ** 2, is_weighted_mean=True)
_loss("l1_loss", "|input - target|.", lambda x, t: abs(x - t), is_weighted_mean=True)
_loss("smooth_l1_loss", "A parabola within beta, the distance beyond.", _smooth_l1)
_loss("huber_loss", "A parabola within delta, a line beyond.", _huber)
_loss("kl_div", "target * (log(target) - input), where input is a logarithm. 'batchmean' of a row "
      "divides by N, as torch does for one axis: for the mean of a batch write 'sum', and .mean() "
      "of the results.", _kl)  # fmt: skip
_loss("soft_margin_loss", "log(1 + exp(-target * input)).", lambda x, t:
      -torch.nn.functional.logsigmoid(t * x))  # fmt: skip
_loss("poisson_nll_loss", "exp(input) - target * input.", _poisson)
_loss("binary_cross_entropy", "The cross entropy of a probability.", _entropy)
_loss("binary_cross_entropy_with_logits", "That of sigmoid(input).", _entropy_of_logits)

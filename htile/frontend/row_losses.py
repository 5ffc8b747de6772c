"""Losses of pairs, margins, distances and variances: what `torch.nn.functional` has of them.

A row is the unbatched input of torch, of shape (N,). Where torch gives one number for each sample,
it is one number of the row here, of shape (), which every `reduction` leaves as it is.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable

import torch
from torch import log, sqrt

from ..errors import ShapeError, TraceError, an
from .composites import ALWAYS, NAN, clamp, where
from .factories import index
from .functions import chosen, minimum
from .indices import element
from .joins import stack
from .losses import class_of, is_batch, scores_of, weight_of
from .ops import Varies
from .promotion import FLOAT, floating
from .reductions import sum
from .shapes import unsqueeze
from .slopes import Slope
from .statistics import check_reduction, mean
from .tensor import FUNCTIONS, Tensor, constant, fail

_KEYWORDS = tuple(
    inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default)
    for name, default in (("size_average", None), ("reduce", None), ("reduction", "mean"))
)


def _loss(*numbers: str) -> Callable:
    """Enter a loss under its name; the function gives what `reduction` reduces.

    numbers: the parameters that are Python numbers. A margin may be a float argument, too.
    """

    def enter(function: Callable) -> Callable:
        name = function.__name__
        of_torch = getattr(torch.nn.functional, name)

        def loss(*args, size_average=None, reduce=None, reduction="mean", **kwargs):
            check_reduction(name, reduction, size_average, reduce)
            for key in numbers:
                given = kwargs.get(key, 0)
                if type(given) in (int, float) or (key == "margin" and _is_scalar(given)):
                    continue
                of = "a symbolic value" if isinstance(given, Tensor) else an(type(given).__name__)
                fail(TraceError, f"{name}({key}=...) of {of}: write a Python number, as a static "
                     "argument is one (htile.Static)")  # fmt: skip
            values = function(*args, **kwargs)
            if reduction == "none" or not values.ndim:
                return values
            return mean(values) if reduction == "mean" else sum(values)

        own, known = inspect.signature(function), inspect.signature(of_torch).parameters
        keywords = [p for p in _KEYWORDS if p.name in known]
        loss.__signature__ = own.replace(parameters=(*own.parameters.values(), *keywords))
        loss.__doc__, loss.__name__, loss.__module__ = function.__doc__, name, __name__
        FUNCTIONS[of_torch] = f"F.{name}", loss
        return function

    return enter


def _is_scalar(x: object) -> bool:
    """Whether it is a number that all rows share, as a float argument is."""
    is_number = isinstance(x, Tensor) and not x.ndim
    return is_number and x._value.varies is Varies.SCALAR and x._value.dtype is FLOAT


def _above_0(x: Tensor) -> Tensor:
    return clamp(x, min=0.0)


def _tensors(name: str, *given: object) -> None:
    """Check that these are tensors of as many axes."""
    if not all(isinstance(x, Tensor) for x in given):
        fail(TraceError, f"{name} of a number: it takes tensors, write torch.full_like(x, 1.0)")
    if len({x.ndim for x in given}) > 1:
        shapes = ", ".join(str(tuple(x._sizes)) for x in given)
        fail(ShapeError, f"{name} of tensors of shapes {shapes}: they have as many dimensions as "
             "each other")  # fmt: skip


@_loss("eps")
def gaussian_nll_loss(input, target, var, full=False, eps=1e-6):
    """(log(var) + (input - target) ** 2 / var) / 2, of a variance that is eps at least.
    A negative one gives NaN, where torch raises. It is a tensor or a float."""
    x = floating(input, "gaussian_nll_loss")
    if isinstance(var, Tensor):
        var = _variance(x, var)
        lowest = where(var < 0, NAN, clamp(var, min=eps))
        lowest = chosen(constant(x, True, ALWAYS), lowest, var, Slope.LAST)  # below eps too
        logarithm = log(lowest)
    elif type(var) is float and var >= 0:
        lowest = max(var, eps)
        logarithm = math.log(lowest) if lowest else -math.inf
    else:
        fail(TraceError, f"gaussian_nll_loss(var={var!r}): expected a tensor, or a float that is "
             "not negative")  # fmt: skip
    loss = 0.5 * (logarithm + (x - target) ** 2 / lowest)
    return loss + 0.5 * math.log(2 * math.pi) if full else loss


def _variance(x: Tensor, var: Tensor) -> Tensor:
    """The variance with the axes of `x`, with which it goes together."""
    own, sizes = tuple(var._sizes), tuple(x._sizes)
    if own != sizes and own == sizes[:-1]:
        return unsqueeze(var, -1)
    others = [k for k, n in zip(own, sizes, strict=False) if k != n]
    if len(own) != len(sizes) or others not in ([], [1]):
        fail(ShapeError, f"gaussian_nll_loss of a variance of shape {own} and an input of shape "
             f"{sizes}: a variance is there for each element, or one along one axis")  # fmt: skip
    return var


@_loss("margin")
def cosine_embedding_loss(input1, input2, target, margin=0.0):
    """1 - cos where the target of the row is 1, cos - margin or 0 where it is -1.
    cos is that of the angle between the rows; any other target gives 0."""
    _tensors("cosine_embedding_loss", input1, input2)
    x, y = (floating(each, "cosine_embedding_loss") for each in (input1, input2))
    if not isinstance(target, Tensor) or target.ndim + 1 != x.ndim or x.ndim > 2:
        fail(ShapeError, "cosine_embedding_loss takes rows of shape (N,) and a target of shape (), "
             "which is an htile.PerRow argument or t[..., 0]")  # fmt: skip
    lengths = sqrt(sum(x * x, -1) + 1e-12) * sqrt(sum(y * y, -1) + 1e-12)
    cosine = sum(x * y, -1) / lengths
    apart = where(target == -1, _above_0(cosine - margin), 0.0)
    return where(target == 1, 1 - cosine, 0.0) + apart


@_loss("margin")
def margin_ranking_loss(input1, input2, target, margin=0.0):
    """-target * (input1 - input2) + margin, or 0 where that is less."""
    _tensors("margin_ranking_loss", input1, input2, target)
    x = floating(input1, "margin_ranking_loss")
    return _above_0(-target * (x - input2) + margin)


@_loss("margin")
def hinge_embedding_loss(input, target, margin=1.0):
    """input where the target is 1, margin - input or 0 where it is -1.
    Where it is neither, the loss is the sum of both."""
    x = floating(input, "hinge_embedding_loss")
    return where(target != 1, _above_0(margin - x), 0.0) + where(target != -1, x, 0.0)


@_loss("margin", "p", "eps")
def triplet_margin_loss(anchor, positive, negative, margin=1.0, p=2.0, eps=1e-6, swap=False):
    """margin + |anchor - positive| - |anchor - negative|, or 0 where that is less.
    The norms are F.pairwise_distance; with swap the last one is |positive - negative| if less."""
    name = "triplet_margin_loss"
    _tensors(name, anchor, positive, negative)
    if not isinstance(margin, Tensor) and margin <= 0:
        fail(TraceError, f"{name}(margin={margin}): expected a number above 0")
    a, b, c = (floating(each, name) for each in (anchor, positive, negative))
    near, far = (torch.nn.functional.pairwise_distance(a, each, p, eps) for each in (b, c))
    if swap:
        far = minimum(far, torch.nn.functional.pairwise_distance(b, c, p, eps))
    return _above_0(margin + near - far)


@_loss("margin")
def multi_margin_loss(input, target, p=1, margin=1.0, weight=None):
    """The mean of (margin - input[target] + input) ** p without the target, 0 where that is less.
    p is 1 or 2. A target beyond the row gives NaN, where torch raises."""
    name = "multi_margin_loss"
    if p not in (1, 2):
        fail(TraceError, f"{name}(p={p!r}): expected 1 or 2")
    if is_batch(input, target) and target.ndim == 1:
        rows = zip(input.unbind(0), target.unbind(0), strict=True)
        return stack([_margin_of_classes(x, y, p, margin, weight, name) for x, y in rows])
    return _margin_of_classes(input, target, p, margin, weight, name)


def _margin_of_classes(
    input: object, target: object, p: int, margin: float, weight: object, name: str
) -> Tensor:
    x, y = scores_of(input, name), class_of(target, name)
    rest = margin - element(x, y) + x
    is_other = (index(x._builder, x._sizes[-1]) != y) & (rest > 0)
    loss = mean(where(is_other, rest if p == 1 else rest * rest, 0.0))
    if weight is not None:
        loss = loss * weight_of(x, weight, y, name)
    return where((y >= 0) & (y < x.shape[-1]), loss, NAN)


@_loss()
def multilabel_soft_margin_loss(input, target, weight=None):
    """The mean of weight times the cross entropy of sigmoid(input), along the last axis."""
    x = floating(input, "multilabel_soft_margin_loss")
    if not x.ndim:
        fail(ShapeError, "multilabel_soft_margin_loss of one number: it takes a row")
    logsigmoid = torch.nn.functional.logsigmoid
    loss = -(target * logsigmoid(x) + (1 - target) * logsigmoid(-x))
    return mean(loss if weight is None else loss * weight, -1)

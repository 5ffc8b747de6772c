"""Losses of a class: `F.nll_loss` and `F.cross_entropy`, of one row and its class or its shares.

A row is the unbatched input of torch, of shape (N,), and its class is a number of shape (). So the
mean is over one row: a weight divides out, and the mean of a row that is ignored is NaN. Of a few
rows of an argument that has more axes, such as the heads of a model, it is the loss of the batch.

The cross entropy is log(sum(exp(x - m))) - (x[y] - m) with the maximum m: the logarithms of the
other classes are never computed, and a loop brings all of it in one go.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import exp, log

from ..errors import DtypeError, ShapeError, TraceError
from .composites import INF, NAN, where
from .functions import chosen
from .indices import element, int64, per_row_index
from .joins import stack
from .ops import Op
from .promotion import FLOAT, floating
from .reductions import amax
from .slopes import Slope
from .statistics import _finite, check_reduction
from .tensor import FUNCTIONS, Tensor, fail, node

LARGE = 1e30  # Sums of so large scores may be infinite in float32.


def nll_loss(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None, reduction="mean"
):
    """-input[target], where input is a logarithm; reduction is 'mean', 'sum' or 'none'.
    A target that is `ignore_index` gives NaN for 'mean', the default, and 0 for 'none' and 'sum'.

    input: a floating row (N,). target: its class, int64 of shape (). weight: floating, (N,).
    The result has shape (). For 'mean' it is divided by the weight of the class, as torch's NLLLoss
    does it. Another target beyond the row gives NaN, where torch raises. Raises ShapeError and
    DtypeError for other arguments, and TraceError for `size_average` and `reduce`.
    """
    _check(reduction, size_average, reduce, ignore_index, "nll_loss")
    if is_batch(input, target):
        return _of_batch(nll_loss, input, target, weight, ignore_index, reduction)
    x, y = scores_of(input, "nll_loss"), class_of(target, "nll_loss")
    w = weight_of(x, weight, y, "nll_loss")
    return _of_class(-element(x, y), w, y, ignore_index, reduction)


def cross_entropy(
    input, target, weight=None, size_average=None, ignore_index=-100, reduce=None,
    reduction="mean", label_smoothing=0.0,
):  # fmt: skip
    """-log_softmax(input)[target]; the target may be a row of shares too.
    A target that is `ignore_index` gives NaN for reduction='mean', the default, and 0 for 'none'
    and 'sum'.

    With label_smoothing e it is (1 - e) * loss + e / N * -(weight * log_softmax(input)).sum(), as
    torch's CrossEntropyLoss has it. Of shares it is -(shares * weight * log_softmax(input)).sum(),
    where shares is (1 - e) * target + e / N. Shapes, dtypes, ignored classes and errors are those
    of `nll_loss`; a row of shares is floating, and takes no ignore_index.
    """
    _check(reduction, size_average, reduce, ignore_index, "cross_entropy")
    if not isinstance(label_smoothing, (float, int)) or not 0.0 <= label_smoothing <= 1.0:
        fail(TraceError, f"label_smoothing={label_smoothing!r}: expected a Python number from 0.0 "
             "to 1.0; a static argument is one (htile.Static)")  # fmt: skip
    if is_batch(input, target):
        more = {"label_smoothing": label_smoothing}
        return _of_batch(cross_entropy, input, target, weight, ignore_index, reduction, **more)
    x = scores_of(input, "cross_entropy")
    m = amax(x)
    near = _finite(m)  # as logsumexp has it, so that a function with both exponentiates once
    total = chosen(abs(m) == INF, NAN, log(_total(exp(x - near))), Slope.NAN)
    if isinstance(target, Tensor) and (target._value.spread or (target.ndim and _is_float(target))):
        if target._sizes != x._sizes:
            fail(ShapeError, f"cross_entropy of scores of shape {tuple(x._sizes)} with shares of "
                 f"shape {tuple(target._sizes)}: there is one for each class. A class of each row "
                 "is annotated htile.PerRow")  # fmt: skip
        return _of_shares(x, near, total, target, weight, ignore_index, label_smoothing)
    y = class_of(target, "cross_entropy")
    w = weight_of(x, weight, y, "cross_entropy")
    score = element(x, y)
    loss = _of_class(total - (score - near), w, y, ignore_index, reduction)
    if label_smoothing == 0:
        return loss
    # The sum of all scores is taken below that of the class, so that no digit is lost where all are
    # large. It is known before the loop over the row, and the maximum is not. A score that is far
    # from all others decides the loss, unless its class has no weight or differences overflow.
    is_near = abs(score) < LARGE if w is None else (abs(score) < LARGE) & (w != 0)
    own = where(is_near, score, 0.0).detach()
    n, every = x.shape[-1], total - (own - near)
    if w is None:
        even = every - _total(x - own) * (1 / n)
    else:
        even = (_total(weight) * every - _total(weight * (x - own))) * (1 / n)
        even = even / w if reduction == "mean" else even
    even = where(y == ignore_index, 0.0, even)
    return (1 - label_smoothing) * loss + label_smoothing * even


def _of_shares(x, near, total, target, weight, ignore_index, label_smoothing) -> Tensor:
    """-(target * log_softmax(x) * weight).sum(), which every reduction of one row is."""
    shares = scores_of(target, "cross_entropy with a row of shares")
    if ignore_index >= 0:
        fail(TraceError, f"cross_entropy(ignore_index={ignore_index}) with a row of shares: leave "
             "it out, there is no class to ignore")  # fmt: skip
    if label_smoothing:
        shares = shares * (1 - label_smoothing) + label_smoothing / x.shape[-1]
    if weight is not None:
        shares = shares * _weights(x, weight, "cross_entropy")
    # Below the maximum, so that no digit is lost where all scores are large.
    return _total(shares) * total - _total(shares * (x - near))


def is_batch(x: object, y: object) -> bool:
    """Whether rows and their targets are those of a batch: `x[None]` and `y[None]`, or a few."""
    if not isinstance(x, Tensor) or x.ndim != 2 or not isinstance(y, Tensor):
        return False
    return tuple(y._sizes) in (tuple(x._sizes[:1]), tuple(x._sizes))


def _of_batch(
    loss: Callable, x: Tensor, y: Tensor, weight: object, ignore_index: int, reduction: str,
    **more: object,
) -> Tensor:  # fmt: skip
    """The loss of a few rows, of which each is found by itself, as torch reduces it."""
    rows = [*zip(x.unbind(0), y.unbind(0), strict=True)]
    if len(rows) == 1 and reduction != "none":
        return loss(*rows[0], weight, None, ignore_index, None, reduction, **more)
    each = [loss(row, of, weight, None, ignore_index, None, "none", **more) for row, of in rows]
    if reduction == "none":
        return stack(each)
    total = _added(each)
    if reduction == "sum":
        return total
    if y.ndim == 2:  # shares, which are of no single class
        return total * (1 / len(rows))
    counts = [where(of == ignore_index, 0.0, 1.0 if weight is None else element(weight, of))
              for _, of in rows]  # fmt: skip
    return total / _added(counts)


def _added(terms: list[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total + term
    return total


def _is_float(x: Tensor) -> bool:
    return x._value.dtype is FLOAT


def _total(x: Tensor) -> Tensor:
    return node(Op.SUM, x)


def _of_class(
    loss: Tensor, weight: Tensor | None, y: Tensor, ignore_index: int, reduction: str
) -> Tensor:
    """A loss that is weighted and reduced as torch does it."""
    if weight is not None:
        loss = loss * weight
        loss = loss / weight if reduction == "mean" else loss
    return where(y == ignore_index, NAN if reduction == "mean" else 0.0, loss)


def _check(
    reduction: str, size_average: object, reduce: object, ignore_index: object, name: str
) -> None:
    check_reduction(name, reduction, size_average, reduce)
    if type(ignore_index) is not int:
        fail(TraceError, f"{name}(ignore_index={ignore_index!r}): expected a Python integer; for "
             "one of each row write torch.where(y == k, 0.0, loss)")  # fmt: skip


def scores_of(x: object, name: str) -> Tensor:
    """A row of floats, or a few of them that are computed."""
    if not isinstance(x, Tensor) or not x.ndim:
        fail(ShapeError, f"{name} of a value that is no row: a row has the scores of all classes")
    if x.ndim > 1:
        fail(ShapeError, f"{name} of a value of shape {tuple(x._sizes)}: it takes the scores of "
             "one row; call it for each, as in [loss(row) for row in x.unbind()], or pass a batch "
             "of a few rows with as many targets")  # fmt: skip
    return floating(x, name)


def class_of(y: object, name: str) -> Tensor:
    """The class of a row: int64, of shape ()."""
    if not isinstance(y, Tensor) or y.ndim or y._value.dtype is FLOAT:
        has_axis = isinstance(y, Tensor) and y.ndim > 0
        what = f"has shape {tuple(y._sizes)}" if has_axis else "is no integer"
        fail(ShapeError if has_axis else DtypeError, f"the target of {name} {what}: it is one "
             "int64 a row of shape (), an htile.PerRow argument or y[..., 0]")  # fmt: skip
    return int64(per_row_index(y, name), name)


def _weights(x: Tensor, weight: object, name: str) -> Tensor:
    if not isinstance(weight, Tensor) or weight._sizes != x._sizes:
        fail(ShapeError, f"{name}(weight=) is a weight for each class, a tensor of shape (N,)")
    return floating(weight, f"{name}(weight=)")


def weight_of(x: Tensor, weight: object, y: Tensor, name: str) -> Tensor | None:
    """The weight of a row's class."""
    return None if weight is None else element(_weights(x, weight, name), y)


for _function in (nll_loss, cross_entropy):
    FUNCTIONS[getattr(torch.nn.functional, _function.__name__)] = (
        f"F.{_function.__name__}", _function
    )  # fmt: skip

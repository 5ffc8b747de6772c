"""Modules whose forward is one kernel: those of torch by the same names, and four that it lacks.

The subclasses of torch's modules have its parameters, so a `state_dict` fits both. Where a kernel
cannot give what torch gives, they call torch's forward: `htile.nn.guards.fits` says when, and each
class names what else it leaves to torch. All of them compute in float32 and round once.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch
import torch.nn.functional as F

from ..errors import ShapeError
from ..frontend.annotations import Inner, PerRow, Scalar, Static
from ..run.rowwise import rowwise
from .guards import fits, lie_alike

EPS = torch.finfo(torch.float32).eps  # what torch's RMSNorm adds if it is given none

WRITTEN_OUT = 20  # channels of a group that a kernel has text for, which compiles in seconds
TOGETHER = 512  # bytes of a channel up to which a kernel needs no such text, if a power of two


@rowwise
def _rms_norm(x, weight, eps: float):
    return F.rms_norm(x, x.shape, weight, eps)


@rowwise
def _add_rms_norm(x, residual, weight, eps: float):
    total = x + residual
    return F.rms_norm(total, x.shape, weight, eps), total


@rowwise
def _layer_norm(x, weight, bias, eps: float):
    return F.layer_norm(x, x.shape, weight, bias, eps)


@rowwise
def _group_norm(x: Inner[2], weight: Inner[1], bias: Inner[1], eps: float):
    """Of one group of one sample: (channels, positions), and a weight and a bias a channel."""
    centered = x - x.mean()
    y = centered * torch.rsqrt((centered * centered).mean() + eps)
    y = y if weight is None else y * weight[:, None]
    return y if bias is None else y + bias[:, None]


@rowwise
def _softmax(x):
    return torch.softmax(x, -1)


@rowwise
def _log_softmax(x):
    return torch.log_softmax(x, -1)


@rowwise
def _cross_entropy(
    logits, target: PerRow, weight, ignore_index: Static, smoothing: Static, reduction: Static
):
    """The loss of a row; for a mean also the share that the row has in it."""
    loss = F.cross_entropy(
        logits, target, weight, ignore_index=ignore_index, reduction="none",
        label_smoothing=smoothing,
    )  # fmt: skip
    if reduction == "none":
        return loss.to(logits.dtype)
    if reduction == "sum":
        return loss
    share = 1.0 if weight is None else weight[target]
    return loss, torch.where(target == ignore_index, 0.0, share)


@rowwise
def _swiglu(gate, up):
    return F.silu(gate) * up


@rowwise
def _swiglu_of_halves(x):
    gate, up = x.chunk(2)
    return F.silu(gate) * up


@rowwise
def _geglu(gate, up, approximate: Static):
    return F.gelu(gate, approximate=approximate) * up


@rowwise
def _geglu_of_halves(x, approximate: Static):
    gate, up = x.chunk(2)
    return F.gelu(gate, approximate=approximate) * up


@rowwise
def _dyt(x, alpha: Scalar, weight, bias):
    y = torch.tanh(alpha * x)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _ends_in(x: torch.Tensor, shape: tuple[int, ...]) -> bool:
    return x.ndim >= len(shape) and x.shape[x.ndim - len(shape) :] == shape


def _over_last(
    function: Callable, x: torch.Tensor, shape: tuple[int, ...], *columns: torch.Tensor | None,
    eps: float,
) -> torch.Tensor:  # fmt: skip
    """A norm over the last dimensions, of this shape, which are one row together."""
    if len(shape) == 1 and x.ndim > 1:
        return function(x, *columns, eps)
    flat = (c if c is None else c.flatten() for c in columns)
    rows = x.reshape(*(x.shape[: x.ndim - len(shape)] or (1,)), prod(shape))
    return function(rows, *flat, eps).view(x.shape)


class RMSNorm(torch.nn.RMSNorm):
    """`x / sqrt(mean(x * x) + eps) * weight`, as `torch.nn.RMSNorm` (Zhang, Sennrich, 2019).

    x: (*lead, *normalized_shape), float32, bfloat16 or float16. weight: normalized_shape, of any of
    these dtypes. The result has the shape and the dtype of x.

    For other shapes and dtypes, such as float64, torch's own forward runs, with torch's errors.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The norm of each row."""
        weight, shape = self.weight, self.normalized_shape
        eps = EPS if self.eps is None else self.eps
        found = _rms_norm._taken(x, weight, eps) if len(shape) == 1 else None
        if found is not None and x.shape[-1:] == shape:
            return found
        if not fits(x, weight, inner=len(shape)) or not _ends_in(x, shape):
            return super().forward(x)
        return _over_last(_rms_norm, x, shape, weight, eps=eps)


class LayerNorm(torch.nn.LayerNorm):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, as `torch.nn.LayerNorm` (Ba, 2016).

    x: (*lead, *normalized_shape), float32, bfloat16 or float16. weight and bias: normalized_shape,
    of any of these dtypes. The result has the shape and the dtype of x.

    For other shapes and dtypes, such as float64, torch's own forward runs, with torch's errors.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm of each row."""
        weight, bias, shape = self.weight, self.bias, self.normalized_shape
        found = _layer_norm._taken(input, weight, bias, self.eps) if len(shape) == 1 else None
        if found is not None and input.shape[-1:] == shape:
            return found
        if not fits(input, weight, bias, inner=len(shape)) or not _ends_in(input, shape):
            return super().forward(input)
        return _over_last(_layer_norm, input, shape, weight, bias, eps=self.eps)


def _is_short(channels: int, positions: int, size: int) -> bool:
    """Whether a kernel that tells the channels of a group apart is no long text."""
    is_power = positions & (positions - 1) == 0
    return channels <= WRITTEN_OUT or (is_power and positions * size <= TOGETHER)


class GroupNorm(torch.nn.GroupNorm):
    """`(x - mean) / sqrt(variance + eps) * weight + bias`, as `torch.nn.GroupNorm` (Wu, He, 2018).

    input: (B, C, *positions), contiguous, float32, bfloat16 or float16. weight and bias: (C,), of
    any of these dtypes. The result has the shape and the dtype of input. A row of the kernel is a
    group of channels with all of their positions.

    For other dtypes, such as float64, and inputs that are not contiguous, as those in the memory
    format channels_last, torch's own forward runs. With a weight or a bias it also runs for groups
    of more than 20 channels, unless the number of positions is a power of two, up to 128 in float32
    and 256 in 16 bits: a kernel would have text for each of the channels.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The norm of each group of channels of each sample."""
        weight, bias, groups, channels = self.weight, self.bias, self.num_groups, self.num_channels
        fit = input.ndim > 1 and fits(input, weight, bias, inner=input.ndim - 1)
        is_usual = fit and input.shape[1] == channels and input.is_contiguous()
        batch, own, positions = len(input) if fit else 0, channels // groups, prod(input.shape[2:])
        if not is_usual or batch * own * positions < 2:  # torch refuses one value alone
            return super().forward(input)
        if weight is None and bias is None:
            rows = input.view(batch, groups, own * positions)
            return _layer_norm(rows, None, None, self.eps).view(input.shape)
        if not _is_short(own, positions, input.element_size()):
            return super().forward(input)
        of_channels = (c if c is None else c.view(groups, own) for c in (weight, bias))
        rows = input.view(batch, groups, own, positions)
        return _group_norm(rows, *of_channels, self.eps).view(input.shape)


def _is_last(dim: int | None, x: torch.Tensor) -> bool:
    return dim is not None and x.ndim > 0 and dim in (-1, x.ndim - 1)


class Softmax(torch.nn.Softmax):
    """`exp(x) / exp(x).sum(dim)`, as `torch.nn.Softmax`; a kernel where `dim` is the last one.

    x: (*lead, N), float32, bfloat16 or float16. The result has the shape and the dtype of x.

    For another dim or none, and for other dtypes, such as float64, torch's own forward runs.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The softmax of each row."""
        if not _is_last(self.dim, input):
            return super().forward(input)
        if (found := _softmax._taken(input)) is not None:
            return found
        return _softmax(input) if fits(input) else super().forward(input)


class LogSoftmax(torch.nn.LogSoftmax):
    """`log(softmax(x))`, as `torch.nn.LogSoftmax`; a kernel where `dim` is the last one.

    x: (*lead, N), float32, bfloat16 or float16. The result has the shape and the dtype of x.

    For another dim or none, and for other dtypes, such as float64, torch's own forward runs.
    """

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """The logarithm of the softmax of each row."""
        if not _is_last(self.dim, input):
            return super().forward(input)
        if (found := _log_softmax._taken(input)) is not None:
            return found
        return _log_softmax(input) if fits(input) else super().forward(input)


def _fits_classes(weight: torch.Tensor | None, x: torch.Tensor) -> bool:
    return weight is None or (weight.dtype is x.dtype and weight.shape == x.shape[-1:])


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`-log_softmax(input)[target]`, as `torch.nn.CrossEntropyLoss`, with all of its arguments.

    input: (M, C) or (C,), the scores of C classes, float32, bfloat16 or float16. target: (M,) or
    (), int64. weight: (C,), in the dtype of input. The result has the dtype of input and the shape
    (), or that of target with reduction="none". With a weight, a mean divides by the sum of the
    weights of the targets, as in torch. A target beyond the classes gives NaN, where torch raises.

    For probabilities as targets, scores (M, C, d1, ...) with dimensions behind the classes, and
    other dtypes torch's own forward runs. So flatten the scores of tokens to two dimensions.
    """

    def forward(self, input: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """The loss of all rows, or with reduction="none" that of each."""
        weight, reduction = self.weight, self.reduction
        fixed = self.ignore_index, self.label_smoothing, reduction
        found = _cross_entropy._taken(input, target, weight, *fixed)
        if found is not None:
            return self._reduced(found, input, target)
        is_usual = (
            fits(input, weight)
            and lie_alike(target, input)
            and target.dtype is torch.int64
            and target.device == input.device
            and input.ndim in (1, 2)
            and target.shape == input.shape[:-1]
            and _fits_classes(weight, input)
            and reduction in ("none", "sum", "mean")
        )
        if not is_usual:
            return super().forward(input, target)
        rows, classes = (input, target) if input.ndim > 1 else (input[None], target[None])
        return self._reduced(_cross_entropy(rows, classes, weight, *fixed), input, target)

    def _reduced(
        self, found: torch.Tensor | tuple, input: torch.Tensor, target: torch.Tensor
    ) -> torch.Tensor:
        """The loss as the module gives it, of what the kernel does."""
        if self.reduction == "none":
            return found.view(target.shape)
        if self.reduction == "sum":
            return found.sum().to(input.dtype)
        loss, share = found
        return (loss.sum() / share.sum()).to(input.dtype)


class AddRMSNorm(torch.nn.RMSNorm):
    """(norm, sum) of x + residual: the sum, and its RMSNorm, of which each block begins.

    x, residual: (*lead, *normalized_shape) of one shape and one dtype: float32, bfloat16 or
    float16. Both results have this shape and dtype. The norm is that of the sum before it is
    rounded. Parameters and their initialization are those of `torch.nn.RMSNorm`.

    Other shapes and dtypes are computed by torch: the norm is that of the rounded sum.
    """

    def forward(
        self, x: torch.Tensor, residual: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The norm of the sum, and the sum."""
        weight, shape = self.weight, self.normalized_shape
        eps = EPS if self.eps is None else self.eps
        found = _add_rms_norm._taken(x, residual, weight, eps) if len(shape) == 1 else None
        if found is not None and x.shape[-1:] == shape:
            return found
        is_one_kind = x.shape == residual.shape and x.dtype is residual.dtype
        fit = is_one_kind and fits(x, residual, weight, inner=len(shape))
        if not fit or not _ends_in(x, shape):
            total = x + residual
            return super().forward(total), total
        if len(shape) == 1 and x.ndim > 1:
            return _add_rms_norm(x, residual, weight, eps)
        rows = *(x.shape[: x.ndim - len(shape)] or (1,)), prod(shape)
        weight = None if weight is None else weight.flatten()
        y, total = _add_rms_norm(x.reshape(rows), residual.reshape(rows), weight, eps)
        return y.view(x.shape), total.view(x.shape)


def _is_pair(gate: torch.Tensor, up: torch.Tensor) -> bool:
    is_one_kind = gate.shape == up.shape and gate.dtype is up.dtype
    return is_one_kind and gate.ndim > 0 and fits(gate, up)


def _check_halves(x: torch.Tensor, name: str) -> None:
    if x.ndim == 0 or x.shape[-1] % 2:
        raise ShapeError(
            f"{name} of one tensor: expected halves, gate and up, in the last dimension, got shape "
            f"{tuple(x.shape)}; pass one of even size, or the two as tensors of their own"
        )


class SwiGLU(torch.nn.Module):
    """`silu(gate) * up` (Shazeer, "GLU Variants Improve Transformer", 2020), without the products.

    gate, up: (*lead, N) of one shape and one dtype: float32, bfloat16 or float16. The result has
    this shape and dtype. Of one tensor (*lead, 2 * N) the first half is the gate, as where the two
    projections are one matrix. The module has no parameters.

    Other shapes and dtypes are computed by torch. One tensor of odd length raises ShapeError.
    """

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """The gated values of each row."""
        found = _swiglu_of_halves._taken(gate) if up is None else _swiglu._taken(gate, up)
        if found is not None:
            return found
        if up is None:
            _check_halves(gate, "SwiGLU")
            if fits(gate):
                return _swiglu_of_halves(gate)
            gate, up = gate.chunk(2, -1)
        return _swiglu(gate, up) if _is_pair(gate, up) else F.silu(gate) * up


class GEGLU(torch.nn.Module):
    """`gelu(gate) * up` (Shazeer, "GLU Variants Improve Transformer", 2020), without the products.

    approximate: "none" or "tanh", as for `torch.nn.GELU`.

    gate, up: (*lead, N) of one shape and one dtype: float32, bfloat16 or float16. The result has
    this shape and dtype. Of one tensor (*lead, 2 * N) the first half is the gate; where the gate is
    the second one, as in diffusers, pass the two halves. The module has no parameters.

    Other shapes and dtypes are computed by torch. One tensor of odd length raises ShapeError.
    """

    def __init__(self, approximate: str = "none"):
        super().__init__()
        self.approximate = approximate

    def forward(self, gate: torch.Tensor, up: torch.Tensor | None = None) -> torch.Tensor:
        """The gated values of each row."""
        approximate = self.approximate
        if up is None:
            found = _geglu_of_halves._taken(gate, approximate)
        else:
            found = _geglu._taken(gate, up, approximate)
        if found is not None:
            return found
        if up is None:
            _check_halves(gate, "GEGLU")
            if fits(gate):
                return _geglu_of_halves(gate, approximate)
            gate, up = gate.chunk(2, -1)
        if _is_pair(gate, up):
            return _geglu(gate, up, approximate)
        return F.gelu(gate, approximate=approximate) * up

    def extra_repr(self) -> str:
        """What the representation of the module shows."""
        return f"approximate={self.approximate!r}"


class DyT(torch.nn.Module):
    """`weight * tanh(alpha * x) + bias` (Zhu et al., "Transformers without Normalization", 2025).

    normalized_shape: N, the length of a row. alpha: what the parameter `alpha`, of shape (1,),
    begins with; `weight` begins with ones and `bias` with zeros, both of shape (N,).
    elementwise_affine: whether there are a weight and a bias; `bias=False` leaves out the latter.

    x: (*lead, N), float32, bfloat16 or float16, and parameters of any of these dtypes. The result
    has the shape and the dtype of x.

    Other shapes and dtypes, such as float64, are computed by torch, with torch's errors. So rows of
    integers have a result in the dtype of the parameters.
    """

    def __init__(
        self, normalized_shape: int, alpha: float = 0.5, elementwise_affine: bool = True,
        bias: bool = True, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        super().__init__()
        made = {"device": device, "dtype": dtype}
        self.normalized_shape, self.start = normalized_shape, alpha
        self.alpha = torch.nn.Parameter(torch.empty(1, **made))
        self.register_parameter("weight", None)
        self.register_parameter("bias", None)
        if elementwise_affine:
            self.weight = torch.nn.Parameter(torch.empty(normalized_shape, **made))
        if elementwise_affine and bias:
            self.bias = torch.nn.Parameter(torch.empty(normalized_shape, **made))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Give the parameters the values that they begin with."""
        torch.nn.init.constant_(self.alpha, self.start)
        if self.weight is not None:
            torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The values of each row."""
        alpha, weight, bias = self.alpha, self.weight, self.bias
        found = _dyt._taken(x, alpha, weight, bias)
        if found is not None and x.shape[-1] == self.normalized_shape:
            return found
        if fits(x, alpha, weight, bias) and x.ndim > 0 and x.shape[-1] == self.normalized_shape:
            return _dyt(x if x.ndim > 1 else x[None], alpha, weight, bias).view(x.shape)
        y = torch.tanh(alpha * x)
        y = y if weight is None else y * weight
        y = y if bias is None else y + bias
        return y.to(x.dtype) if x.is_floating_point() else y

    def extra_repr(self) -> str:
        """What the representation of the module shows."""
        return f"{self.normalized_shape}, alpha={self.start}"

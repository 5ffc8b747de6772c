"""The kernels that are measured: the row-wise function, its arguments, the same in torch, bytes.

Those that are examples come from `examples/`; the others are here.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

import htile
from examples import load
from examples.rmsnorm import residual_arguments

STRICT, LENIENT = 1.0, 16.0  # largest error in bounds: ours; theirs, who round more often
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Kernel:
    """One kernel over rows (M, N).

    arguments: `(m, n, dtype, device)` to the tensors that `function` takes.
    eager: the same in torch over all rows, as a user of torch writes it; what torch.compile gets.
    roles: of each argument: "row" (M, N), "column" (N,) or "per-row" (M,).
    tolerance: the largest error that HTile's kernel may have, in the unit of `Sample.error`.
    jumps: whether a function such as `round` or a comparison makes much of a rounding error, so
        that some elements may be elsewhere.
    """

    name: str
    function: htile.Rowwise
    arguments: Callable[..., tuple[torch.Tensor, ...]]
    eager: Callable
    roles: tuple[str, ...]
    tolerance: float = STRICT
    jumps: bool = False

    def bytes(self, m: int, n: int, dtype: torch.dtype) -> int:
        """The fewest bytes that move: every argument read once, every result written once."""
        args = self.arguments(m, n, dtype, "meta")
        return sum(t.nbytes for t in args) + sum(t.nbytes for t in self.results(args))

    def results(self, args: tuple) -> list[torch.Tensor]:
        """Tensors as the results of a call are, on no device; nothing is computed."""
        m, outputs = len(args[0]), self.function.inspect(*args).traced.outputs
        return [torch.empty((m, *o.inner), dtype=o.dtype, device="meta") for o in outputs]

    def rows(self, args: tuple, index: torch.Tensor) -> tuple:
        """The same arguments, of these rows only."""
        pairs = zip(self.roles, args, strict=True)
        return tuple(t if role == "column" else t[index] for role, t in pairs)


@htile.rowwise
def softmax_backward(dy, y):
    return y * (dy - (dy * y).sum())


def softmax_backward_arguments(m, n, dtype, device):
    dy = torch.randn(m, n, device=device).to(dtype)
    return dy, torch.softmax(torch.randn(m, n, device=device), -1).to(dtype)


@htile.rowwise
def cross_entropy(logits, target_logit: htile.PerRow):
    lse = torch.logsumexp(logits, dim=-1)
    return lse - target_logit, lse


def labels(m, n, device):
    """The label of each row, (M,) int64."""
    return torch.arange(m, device=device) * 7919 % n


def cross_entropy_arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(3).to(dtype)
    return logits, logits.gather(1, labels(m, n, device)[:, None])[:, 0]


@htile.rowwise
def add_rmsnorm_max(x, weight, residual, eps: float = 1e-6):
    h = x + residual
    y = h * torch.rsqrt((h * h).mean() + eps) * weight
    return y, h, y.abs().max()


def wide_columns(arguments):
    """The same arguments with float32 columns, which are read again from L2 for every row."""

    def make(*options):
        row, *columns = arguments(*options)
        return row, *(c.float() for c in columns)

    return make


def _log_softmax(x):
    return F.log_softmax(x, -1), torch.logsumexp(x.float(), -1)


def _rmsnorm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def _rmsnorm_residual(x, weight, residual):
    h = x + residual
    return F.rms_norm(h, h.shape[-1:], weight, 1e-6), h


def _layernorm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def _layernorm_wide(x, weight, bias):
    return F.layer_norm(x.float(), x.shape[-1:], weight, bias, 1e-5).to(x.dtype)


def _cross_entropy(logits, target_logit):
    lse = torch.logsumexp(logits.float(), -1)
    return lse - target_logit, lse


def _softmax_backward(dy, y):
    return torch._softmax_backward_data(dy, y, -1, y.dtype)


def _add_rmsnorm_max(x, weight, residual):
    y, h = _rmsnorm_residual(x, weight, residual)
    return y, h, y.abs().amax(-1)


def _norm_softmax(x):
    return F.softmax(4.0 * F.layer_norm(x, x.shape[-1:], eps=1e-5), -1)


def _kernels() -> dict[str, Kernel]:
    rmsnorm, _ = load("rmsnorm")
    layernorm, norm_arguments = load("layernorm")
    row, two, column, per_row = ("row",), ("row", "row"), ("column",), ("per-row",)
    joined = row + column + row
    listed = [
        Kernel("softmax", *load("softmax"), lambda x: F.softmax(x, -1), row),
        Kernel("log_softmax", *load("log_softmax"), _log_softmax, row),
        Kernel("rmsnorm", *load("rmsnorm"), _rmsnorm, row + column),
        Kernel("rmsnorm_residual", rmsnorm, residual_arguments, _rmsnorm_residual, joined),
        Kernel("layernorm", layernorm, norm_arguments, _layernorm, row + 2 * column),
        Kernel(
            "cross_entropy",
            cross_entropy,
            cross_entropy_arguments,
            _cross_entropy,
            row + per_row,
        ),
        Kernel(
            "softmax_backward", softmax_backward, softmax_backward_arguments, _softmax_backward, two
        ),
        Kernel("swiglu", *load("swiglu"), lambda gate, up: F.silu(gate) * up, two),
        Kernel("add_rmsnorm_max", add_rmsnorm_max, residual_arguments, _add_rmsnorm_max, joined),
        Kernel("norm_softmax", *load("norm_softmax"), _norm_softmax, row),
        Kernel(
            "layernorm_fp32_columns",
            layernorm,
            wide_columns(norm_arguments),
            _layernorm_wide,
            row + 2 * column,
        ),
    ]
    return {kernel.name: kernel for kernel in listed}


KERNELS = _kernels()
DEFAULT = tuple(name for name in KERNELS if name != "layernorm_fp32_columns")

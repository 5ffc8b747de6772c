"""Other libraries' products with what is computed of them: from tensors to a call.

Signatures are those of quack-kernels 0.6.5, liger-kernel 0.8.0 and cut-cross-entropy 25.1.1. Each
function makes a call of some tensors. It raises ImportError where the library is not installed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

Call = Callable[[], torch.Tensor]


def quack_linear(tuned: bool) -> Callable[..., Call]:
    """x @ weight.T, with the default configuration or that which its tuner finds."""

    def make(x, weight):
        from quack.gemm_interface import gemm

        out = x.new_empty(len(x), len(weight))
        return lambda: gemm(x, weight.t(), out=out, tuned=tuned)

    return make


def quack_residual(x, weight, residual) -> Call:
    from quack.gemm_interface import gemm_add

    out = torch.empty_like(residual)
    return lambda: gemm_add(x, weight.t(), residual, out=out, tuned=False)


def quack_swiglu(x, gate, up) -> Call:
    """It takes one weight whose rows are those of both in turns, which is made before."""
    from quack.gemm_interface import gemm_act

    packed = torch.stack([gate, up], 1).flatten(0, 1)
    how = {"activation": "swiglu", "store_preact": False, "tuned": False}
    return lambda: gemm_act(x, packed.t(), **how)[1]


def quack_loss(h, head, label) -> Call:
    """It stores the logits of 4096 rows at a time."""
    from quack.linear_cross_entropy import chunked_linear_cross_entropy_fwd

    wanted = {"need_dx": False, "need_dw": False}
    return lambda: chunked_linear_cross_entropy_fwd(h, head, label, **wanted)[0]


def liger_loss(h, head, label) -> Call:
    """It stores the logits of some rows at a time, and waits for the GPU once a call."""
    from liger_kernel.ops.fused_linear_cross_entropy import fused_linear_cross_entropy_forward

    return lambda: fused_linear_cross_entropy_forward(h, head, label, reduction="none")[0]


def cut_loss(h, head, label) -> Call:
    """It stores no logits."""
    from cut_cross_entropy import linear_cross_entropy

    return lambda: linear_cross_entropy(h, head, label, reduction="none")


def compiled(function: Callable) -> Callable[..., Call]:
    """torch.compile of a function of whole tensors, with the choice of its kernels by timing."""

    def make(*args):
        fast = torch.compile(function, dynamic=False, mode="max-autotune-no-cudagraphs")
        fast(*args)
        return lambda: fast(*args)

    return make

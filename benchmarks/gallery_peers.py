"""Kernels of other libraries that compute what one of the gallery does, in the same dtypes.

Each takes the cell's tensors. A library that is not installed has none.
"""

from __future__ import annotations

from collections.abc import Callable


def quack(name: str, variant: dict) -> Callable | None:
    """quack's kernel for one of the gallery with these keyword arguments."""
    try:
        from quack.rmsnorm import rmsnorm_fwd
        from quack.topk import topk_fwd
    except ImportError:
        return None
    table = {
        "add_rmsnorm": lambda x, residual, w: rmsnorm_fwd(x, w, residual=residual, eps=1e-6)[:2],
        "topk_softmax": lambda x: topk_fwd(x, variant["k"], softmax=True),
    }
    is_power = variant.get("k", 1) & (variant.get("k", 1) - 1) == 0  # of two: others it has not
    return table.get(name) if is_power else None


def liger(name: str, variant: dict) -> Callable | None:
    """Liger's, without what a backward pass needs beside the results."""
    try:
        from liger_kernel import ops
        from liger_kernel.ops.dyt import liger_dyt_fwd
        from liger_kernel.ops.fused_add_rms_norm import fused_add_rms_norm_forward
        from liger_kernel.ops.rms_norm import rms_norm_forward
        from liger_kernel.ops.sparsemax import _sparsemax_forward
    except ImportError:
        return None
    casting, offset = variant.get("casting"), variant.get("offset", 0.0)
    table = {
        "add_rmsnorm": lambda x, r, w: fused_add_rms_norm_forward(x, r, w, 1e-6, 0.0, "llama"),
        "rmsnorm_casting": lambda x, w: rms_norm_forward(x, w, 1e-6, offset, casting, None),
        "polynorm": lambda x, w, b: ops.LigerPolyNormFunction.apply(x, w, b, 1e-6),
        "dyt": liger_dyt_fwd,
        "sparsemax": lambda x: _sparsemax_forward(x, -1),
    }
    return table.get(name)


PEERS = {"quack": quack, "Liger": liger}

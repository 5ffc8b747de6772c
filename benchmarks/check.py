"""Whether a contender computes what the kernel means: sampled rows against the float64 oracle."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from benchmarks.kernels import Kernel
from htile.testing import float32_errors, in_bounds, oracle

ROWS, ELEMENTS = 64, 1 << 23  # sampled at most
FEW = 16  # rows; of fewer, torch's largest float32 error is taken from other rows of the same kind
ELSEWHERE = 1e-3  # the share of the sampled elements that may be elsewhere where a function jumps


class Sample:
    """Rows of the arguments, first and last among them, and what the kernel means for them."""

    def __init__(self, kernel: Kernel, args: tuple):
        m, n = args[0].shape
        device, dtype = args[0].device, args[0].dtype
        count = min(m, max(4, min(ROWS, ELEMENTS // n)))
        self.jumps = kernel.jumps
        self.index = torch.linspace(0, m - 1, count, device=device, dtype=torch.float64).long()
        some = kernel.rows(args, self.index)
        self.exact = pytree.tree_leaves(oracle(kernel.function, *some))
        if count < FEW:
            some = kernel.arguments(FEW, n, dtype, device)
        self.float32 = float32_errors(kernel.function, *some)

    def error(self, result) -> float:
        """The largest error of `result` in units of `htile.testing.assert_close`'s bound.

        For a function that jumps, the share ELSEWHERE of the elements, those that err most, is
        left out.
        """
        leaves = pytree.tree_leaves(result)
        if len(leaves) != len(self.exact):
            raise RuntimeError(f"wrong: {len(leaves)} results, expected {len(self.exact)}")
        worst = 0.0
        for out, exact, error32 in zip(leaves, self.exact, self.float32, strict=True):
            out = out[self.index]
            if out.shape != exact.shape:
                raise RuntimeError(f"wrong: shape {tuple(out.shape)}, not {tuple(exact.shape)}")
            error = in_bounds(out, exact, error32).flatten()
            allowed = int(error.numel() * ELSEWHERE) if self.jumps else 0
            worst = max(worst, error.kthvalue(error.numel() - allowed).values.item())
        return worst

    def check(self, result, bound: float) -> float:
        """`error`, or a RuntimeError where it is beyond `bound`."""
        error = self.error(result)
        if error > bound:
            raise RuntimeError(f"wrong: error {error:.3g} of the bound")
        return error

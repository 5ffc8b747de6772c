"""The sum of a row and the residual stream, and its RMS norm: both results of one kernel.

`add_rmsnorm(x, residual, weight, out=(x, residual))` works in place. The sum is rounded to the
dtype of the residual stream first, so that the norm is that of what is stored.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 4096


@htile.rowwise
def add_rmsnorm(x, residual, weight, eps: float = 1e-6):
    total = (x + residual).to(residual.dtype)
    normed = total * torch.rsqrt((total * total).mean() + eps) * weight
    return normed.to(x.dtype), total


def arguments(m, n, dtype, device):
    x, residual = torch.randn(2, m, n, device=device).to(dtype)
    return x, residual, torch.rand(n, device=device).to(dtype)


def reference(x, residual, weight):
    total = (x.double() + residual.double()).to(residual.dtype).double()
    return F.rms_norm(total, total.shape[-1:], weight.double(), 1e-6), total

"""RMS norm with a scale and a shift of each batch entry, as diffusion transformers have it.

Scale and shift have one row for all the tokens of a batch entry, and are not copied for them.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 3072
BATCH = 2


@htile.rowwise
def modulated_norm(x, weight, scale, shift, eps: float = 1e-6):
    return F.rms_norm(x, x.shape[-1:], weight, eps) * (1 + scale) + shift


def arguments(m, n, dtype, device):
    x = torch.randn(BATCH, m // BATCH, n, device=device).to(dtype)
    scale, shift = torch.randn(2, BATCH, 1, n, device=device).to(dtype)
    return x, torch.rand(n, device=device).to(dtype), scale, shift


def reference(x, weight, scale, shift):
    x = x.double()
    y = x * weight.double() / torch.linalg.vector_norm(x, dim=-1, keepdim=True).square().div(
        x.shape[-1]
    ).add(1e-6).sqrt()
    return torch.addcmul(shift.double(), y, 1 + scale.double())

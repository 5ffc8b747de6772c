"""RMS norm with a gate, which multiplies the row before the norm or after it."""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 4096
VARIANTS = ({"norm_first": True}, {"norm_first": False})


@htile.rowwise
def gated_rmsnorm(x, z, weight, eps: float = 1e-5, norm_first: htile.Static = True):
    gate = F.silu(z)
    if norm_first:
        return F.rms_norm(x, x.shape[-1:], weight, eps) * gate
    return F.rms_norm(x * gate, x.shape[-1:], weight, eps)


def arguments(m, n, dtype, device):
    x, z = torch.randn(2, m, n, device=device).to(dtype)
    return x, z, torch.rand(n, device=device)


def reference(x, z, weight, norm_first=True):
    x, z, weight = x.double(), z.double(), weight.double()
    gate = z / (1 + torch.exp(-z))
    x = x if norm_first else x * gate
    y = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight
    return y * gate if norm_first else y

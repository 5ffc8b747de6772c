"""A gated RMS norm of each quarter of a row, as in Mamba 2, and the quarters' reciprocal roots."""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 4096
SMALL = 64, 132


@htile.rowwise
def grouped_rmsnorm(x, z, weight, eps: float = 1e-5, groups: htile.Static = 4):
    x = (x * F.silu(z)).view(groups, -1)
    r = torch.rsqrt((x * x).mean(-1) + eps)
    return (x * r[:, None]).flatten() * weight, r


def arguments(m, n, dtype, device):
    x, z = torch.randn(2, m, n, device=device).to(dtype)
    return x, z, torch.rand(n, device=device)


def reference(x, z, weight):
    gated = x.double() * F.silu(z.double())
    parts = gated.chunk(4, -1)
    roots = [(p.pow(2).sum(-1) / p.shape[-1] + 1e-5).rsqrt() for p in parts]
    y = torch.cat([p * r[..., None] for p, r in zip(parts, roots, strict=True)], -1)
    return y * weight.double(), torch.stack(roots, -1)

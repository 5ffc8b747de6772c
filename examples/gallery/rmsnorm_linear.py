"""RMS norm and the linear layer behind it; the weight of the norm is a part of that layer's."""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 4096, 4096


@htile.rowwise
def rmsnorm_linear(x, weight: htile.Matrix, eps: float = 1e-6):
    return F.linear(x * torch.rsqrt((x * x).mean() + eps), weight)


def arguments(m, n, k, dtype, device):
    weight = torch.randn(n, k, device=device).mul(k**-0.5).to(dtype)
    return torch.randn(m, k, device=device).mul(3).to(dtype), weight


def reference(x, weight):
    z = x.double()
    z = z / (z.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return z @ weight.double().mT

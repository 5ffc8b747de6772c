"""A linear layer, the residual that it is added to, and the mean square for the norm behind it."""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 4096, 14336


@htile.rowwise
def linear_residual(x, weight: htile.Matrix, residual):
    total = F.linear(x, weight) + residual
    return total, (total * total).mean()


def arguments(m, n, k, dtype, device):
    weight = torch.randn(n, k, device=device).mul(k**-0.5).to(dtype)
    x, residual = torch.randn(m, k, device=device), torch.randn(m, n, device=device)
    return x.to(dtype), weight, residual.to(dtype)


def reference(x, weight, residual):
    total = x.double() @ weight.double().mT + residual.double()
    return total, total.square().sum(-1) / total.shape[-1]

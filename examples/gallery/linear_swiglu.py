"""The first half of a gated MLP: silu of one product times another, with a weight each."""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 14336, 4096


@htile.rowwise
def linear_swiglu(x, gate: htile.Matrix, up: htile.Matrix):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def arguments(m, n, k, dtype, device):
    gate, up = torch.randn(2, n, k, device=device).mul(k**-0.5).to(dtype)
    return torch.randn(m, k, device=device).to(dtype), gate, up


def reference(x, gate, up):
    z = x.double() @ gate.double().mT
    return z / (1 + (-z).exp()) * (x.double() @ up.double().mT)

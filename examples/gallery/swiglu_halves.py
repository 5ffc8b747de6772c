"""SwiGLU of one row that holds the gate and then the other half, times a number of each row.

The number is what a router gives a token; 1 leaves the result as it is.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 14336


@htile.rowwise
def swiglu_halves(x, factor: htile.PerRow):
    gate, up = x.chunk(2)
    return F.silu(gate) * up * factor


def arguments(m, n, dtype, device):
    x = torch.randn(m, 2 * n, device=device).mul(2).to(dtype)
    return x, torch.rand(m, device=device)


def reference(x, factor):
    gate, up = x.double().tensor_split(2, -1)
    return gate / (1 + torch.exp(-gate)) * up * factor.double()[..., None]

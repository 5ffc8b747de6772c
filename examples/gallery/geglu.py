"""GEGLU of one row that holds the gate and then the other half, with either form of GELU."""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 14336
VARIANTS = ({"approximate": "none"}, {"approximate": "tanh"})


@htile.rowwise
def geglu(x, approximate: htile.Static = "none"):
    gate, up = x.chunk(2)
    return F.gelu(gate, approximate=approximate) * up


def arguments(m, n, dtype, device):
    return (torch.randn(m, 2 * n, device=device).mul(2).to(dtype),)


def reference(x, approximate="none"):
    gate, up = x.double().tensor_split(2, -1)
    if approximate == "none":
        return gate * torch.special.ndtr(gate) * up
    return gate * torch.sigmoid((8 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)) * up

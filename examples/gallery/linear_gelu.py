"""A linear layer with a bias, and GELU, as erf has it or by tanh."""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 14336, 4096
VARIANTS = ({"approximate": "none"}, {"approximate": "tanh"})


@htile.rowwise
def linear_gelu(x, weight: htile.Matrix, bias, approximate: htile.Static = "none"):
    return F.gelu(F.linear(x, weight, bias), approximate=approximate)


def arguments(m, n, k, dtype, device):
    weight = torch.randn(n, k, device=device).mul(k**-0.5).to(dtype)
    x, bias = torch.randn(m, k, device=device), torch.randn(n, device=device)
    return x.to(dtype), weight, bias.to(dtype)


def reference(x, weight, bias, approximate="none"):
    z = x.double() @ weight.double().mT + bias.double()
    if approximate == "tanh":
        return z / 2 * (1 + ((2 / torch.pi) ** 0.5 * (z + 0.044715 * z**3)).tanh())
    return z * (1 + (z / 2**0.5).erf()) / 2

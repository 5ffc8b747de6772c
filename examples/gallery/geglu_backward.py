"""The gradient of GEGLU with respect to both halves of its row, with either form of GELU."""

import math

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 14336
VARIANTS = ({"approximate": "none"}, {"approximate": "tanh"})


@htile.rowwise
def geglu_backward(x, dy, approximate: htile.Static = "none"):
    gate, up = x.chunk(2)
    if approximate == "none":
        share = 0.5 * (1 + torch.erf(gate * math.sqrt(0.5)))
        slope = share + gate * torch.exp(-0.5 * gate * gate) * math.sqrt(0.5 / math.pi)
    else:
        t = torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate * gate * gate))
        share = 0.5 * (1 + t)
        inner = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate * gate)
        slope = share + 0.5 * gate * (1 - t * t) * inner
    return torch.cat((dy * up * slope, dy * gate * share))


def arguments(m, n, dtype, device):
    x = torch.randn(m, 2 * n, device=device).mul(2).to(dtype)
    return x, torch.randn(m, n, device=device).to(dtype)


def reference(x, dy, approximate="none"):
    x = x.double().requires_grad_()
    gate, up = x.tensor_split(2, -1)
    y = F.gelu(gate, approximate=approximate) * up
    return torch.autograd.grad(y, x, dy.double())[0]

"""The SwiGLU of gpt-oss: gate and other factor alternate in the row, and both are clamped."""

import torch

import htile

SIZE = 8192, 2880


@htile.rowwise
def swiglu_pairs(x, limit: float = 7.0, alpha: float = 1.702):
    gate, up = x[0::2].clamp(max=limit), x[1::2].clamp(-limit, limit)
    return gate * torch.sigmoid(alpha * gate) * (up + 1)


def arguments(m, n, dtype, device):
    return (torch.randn(m, 2 * n, device=device).mul(4).to(dtype),)


def reference(x):
    gate, up = x.double().unflatten(-1, (-1, 2)).unbind(-1)
    gate, up = torch.minimum(gate, gate.new_tensor(7.0)), up.clip(-7, 7)
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))

"""The gradient of the SwiGLU of gpt-oss, whose gate and other factor alternate in the row."""

import torch

import htile

SIZE = 8192, 2880


@htile.rowwise
def swiglu_pairs_backward(x, dy, limit: float = 7.0, alpha: float = 1.702):
    gate, up = x.view(-1, 2).unbind(-1)
    g, u = gate.clamp(max=limit), up.clamp(-limit, limit)
    share = torch.sigmoid(alpha * g)
    dgate = dy * (u + 1) * share * (1 + alpha * g * (1 - share))
    dgate = torch.where(gate <= limit, dgate, 0.0)
    dup = torch.where(up.abs() <= limit, dy * g * share, 0.0)
    return torch.stack((dgate, dup), -1).flatten()


def arguments(m, n, dtype, device):
    x = torch.randn(m, 2 * n, device=device).mul(4).to(dtype)
    return x, torch.randn(m, n, device=device).to(dtype)


def reference(x, dy):
    x = x.double().requires_grad_()
    gate, up = x[..., 0::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)
    y = gate * torch.sigmoid(1.702 * gate) * (up + 1)
    return torch.autograd.grad(y, x, dy.double())[0]

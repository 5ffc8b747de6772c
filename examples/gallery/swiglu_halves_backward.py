"""The gradients of SwiGLU times a number of each row: of both halves, and of that number.

The gradient of the halves may be written over `x`.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 14336


@htile.rowwise
def swiglu_halves_backward(x, factor: htile.PerRow, dy):
    gate, up = x.chunk(2)
    share = torch.sigmoid(gate)
    silu = gate * share
    d = dy * factor
    dx = torch.cat((d * up * (share + silu * (1 - share)), d * silu))
    return dx, (dy * silu * up).sum()


def arguments(m, n, dtype, device):
    x = torch.randn(m, 2 * n, device=device).mul(2).to(dtype)
    return x, torch.rand(m, device=device), torch.randn(m, n, device=device).to(dtype)


def reference(x, factor, dy):
    x, factor = x.double().requires_grad_(), factor.double().requires_grad_()
    gate, up = x.tensor_split(2, -1)
    y = F.silu(gate) * up * factor[..., None]
    return torch.autograd.grad(y, (x, factor), dy.double())

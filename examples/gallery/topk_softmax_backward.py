"""The gradient of `topk_softmax`: each row's few numbers go back to where they came from."""

import torch

import htile

SIZE = 16384, 4096


@htile.rowwise
def topk_softmax_backward(x, shares: htile.Inner[1], indices: htile.Inner[1], dy: htile.Inner[1]):
    dv = shares * (dy - (shares * dy).sum())
    column = torch.arange(x.shape[-1])
    each = zip(indices.unbind(), dv.unbind(), strict=True)
    return sum(torch.where(column == i, d, 0.0) for i, d in each).to(x.dtype)


def arguments(m, n, dtype, device):
    x = torch.randn(m, n, device=device).to(dtype)
    values, indices = x.float().topk(8)
    return x, torch.softmax(values, -1), indices, torch.randn(m, 8, device=device)


def reference(x, shares, indices, dy):
    values = shares.double().log().requires_grad_()
    torch.softmax(values, -1).backward(dy.double())
    return torch.zeros_like(x, dtype=torch.float64).scatter(-1, indices, values.grad)

"""The gradient of softmax with a temperature, from its result `y` and the gradient of that."""

import torch

import htile

SIZE = 4096, 32000


@htile.rowwise
def softmax_backward(dy, y, temperature: htile.PerRow):
    return (dy - (dy * y).sum()) * y / temperature


def arguments(m, n, dtype, device):
    dy = torch.randn(m, n, device=device).to(dtype)
    y = torch.softmax(torch.randn(m, n, device=device), -1).to(dtype)
    return dy, y, torch.rand(m, device=device) + 0.5


def reference(dy, y, temperature):
    dx = torch.ops.aten._softmax_backward_data(dy.double(), y.double(), -1, torch.float64)
    return dx / temperature.double()[..., None]

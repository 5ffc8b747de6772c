"""Dynamic tanh, which stands in for a norm. Its factor is a number on the device."""

import torch

import htile

SIZE = 8192, 4096


@htile.rowwise
def dyt(x, alpha: htile.Scalar, weight, bias):
    return torch.tanh(alpha * x) * weight + bias


def arguments(m, n, dtype, device):
    weight, bias = torch.randn(2, n, device=device).to(dtype)
    alpha = torch.full((1,), 0.5, device=device)
    return torch.randn(m, n, device=device).mul(2).to(dtype), alpha, weight, bias


def reference(x, alpha, weight, bias):
    return torch.addcmul(bias.double(), torch.tanh(x.double() * alpha.double()), weight.double())

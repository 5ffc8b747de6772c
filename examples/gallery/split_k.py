"""Adds up the partial products of a matrix product that was split, and applies what follows it."""

import torch

import htile

SIZE = 8192, 4096
PARTS = 4


@htile.rowwise
def split_k(
    parts: htile.Inner[2], c, bias, shift: htile.PerRow, alpha: float = 0.5, beta: float = 2.0
):
    return (alpha * parts.sum(0) + beta * c + bias + shift).to(c.dtype)


def arguments(m, n, dtype, device):
    parts = torch.randn(m, PARTS, n, device=device)
    c, bias = torch.randn(m, n, device=device).to(dtype), torch.randn(n, device=device)
    return parts, c, bias, torch.randn(m, device=device)


def reference(parts, c, bias, shift):
    total = torch.einsum("...kn->...n", parts.double()) / 2 + 2 * c.double()
    return total + bias.double() + shift.double()[..., None]

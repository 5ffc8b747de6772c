"""Rotary embedding of each head, with halves or with neighbours as pairs.

Cosines and sines are one row for all the heads of a token, in float32. The gradient is the same
with the sines negated. `rotary(q, cos, sin, out=q)` works in place.
"""

import torch

import htile

SIZE = 65536, 128
SMALL = 64, 66
HEADS = 2
VARIANTS = ({"neighbours": False}, {"neighbours": True})


@htile.rowwise
def rotary(x, cos, sin, neighbours: htile.Static = False):
    a, b = (x[0::2], x[1::2]) if neighbours else x.chunk(2)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten() if neighbours else torch.cat(turned)


def arguments(m, n, dtype, device):
    angle = torch.rand(m // HEADS, 1, n // 2, device=device) * 6
    x = torch.randn(m // HEADS, HEADS, n, device=device).to(dtype)
    return x, torch.cos(angle), torch.sin(angle)


def reference(x, cos, sin, neighbours=False):
    size = (-1, 2) if neighbours else (2, -1)
    pairs = x.double().unflatten(-1, size)
    pairs = pairs if neighbours else pairs.transpose(-1, -2)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.complex(cos.double(), sin.double())
    pairs = torch.view_as_real(turned)
    return (pairs if neighbours else pairs.transpose(-1, -2)).flatten(-2)

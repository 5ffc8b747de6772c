"""Rotary embedding of each head at the position of its token, with halves or neighbours as pairs.

The table has the cosines and the sines of a position beside each other, in float32.
`rotary_positions(q, pos, table, out=q)` works in place.
"""

import torch

import htile

SIZE = 65536, 128
SMALL = 64, 66
HEADS = 2
POSITIONS = 50
VARIANTS = ({"neighbours": False}, {"neighbours": True})


@htile.rowwise
def rotary_positions(x, pos: htile.PerRow, table: htile.Shared, neighbours: htile.Static = False):
    cos, sin = table[pos].chunk(2)
    a, b = (x[0::2], x[1::2]) if neighbours else x.chunk(2)
    turned = a * cos - b * sin, b * cos + a * sin
    return torch.stack(turned, -1).flatten() if neighbours else torch.cat(turned)


def angles(n):
    """The angle of each pair of n elements, at each position."""
    frequency = 10000.0 ** (-torch.arange(n // 2) / (n // 2))
    return torch.arange(POSITIONS)[:, None] * frequency


def arguments(m, n, dtype, device):
    x = torch.randn(m // HEADS, HEADS, n, device=device).to(dtype)
    pos = torch.randint(POSITIONS, (m // HEADS, 1), device=device)
    table = torch.cat((angles(n).cos(), angles(n).sin()), -1)
    return x, pos, table.to(device)


def reference(x, pos, table, neighbours=False):
    size = (-1, 2) if neighbours else (2, -1)
    pairs = x.double().unflatten(-1, size)
    pairs = pairs if neighbours else pairs.transpose(-1, -2)
    turns = torch.polar(torch.ones(()).double(), angles(x.shape[-1]).double()).to(x.device)
    turned = torch.view_as_complex(pairs.contiguous()) * turns[pos]
    pairs = torch.view_as_real(turned)
    return (pairs if neighbours else pairs.transpose(-1, -2)).flatten(-2)

"""Rotary embedding of the last part of each head, and all of the head in float8, as MLA caches it.

One function serves queries and keys. `scale` is a number on the device, calibrated before.
"""

import torch

import htile

from .rotary_positions import HEADS, POSITIONS, angles

SIZE = 65536, 576
SMALL = 72, 90
PART = 9  # the turned part is one of so many


@htile.rowwise
def rotary_fp8(plain, turned, scale: htile.Scalar, pos: htile.PerRow, table: htile.Shared):
    cos, sin = table[pos].chunk(2)
    a, b = turned.chunk(2)
    whole = torch.cat((plain, a * cos - b * sin, b * cos + a * sin))
    return (whole * scale).to(torch.float8_e4m3fn)


def arguments(m, n, dtype, device):
    size = n // PART
    heads = torch.randn(m // HEADS, HEADS, n, device=device).mul(2).to(dtype)
    pos = torch.randint(POSITIONS, (m // HEADS, 1), device=device)
    table = torch.cat((angles(size).cos(), angles(size).sin()), -1).to(device)
    plain, turned = heads.split((n - size, size), -1)
    return plain, turned, torch.full((1,), 16.0, device=device), pos, table


def reference(plain, turned, scale, pos, table):
    turns = torch.polar(torch.ones(()).double(), angles(turned.shape[-1]).double())
    pairs = torch.view_as_complex(turned.double().unflatten(-1, (2, -1)).mT.contiguous())
    turned = torch.view_as_real(pairs * turns.to(pairs.device)[pos]).mT.flatten(-2)
    return (torch.cat((plain.double(), turned), -1) * scale.double()).clamp(-448, 448)

"""Rotary embedding of tokens of images: the pairs of a head turn by time, by height and by width.

`pos` has three positions of each token, and `ends` say where the pairs of time and those of height
end. The table has the cosines and the sines of a position beside each other.
"""

import torch

import htile

from .rotary_positions import HEADS, POSITIONS, SMALL, angles  # noqa: F401

SIZE = 65536, 128
VARIANTS = ({"ends": (16, 24)},)


@htile.rowwise
def rotary_three_positions(x, pos: htile.Inner[1], table: htile.Shared, ends: htile.Static):
    pair = torch.arange(x.shape[-1] // 2)
    rows = [table[p].chunk(2) for p in pos.unbind()]
    cos, sin = (
        torch.where(pair < ends[0], time, torch.where(pair < ends[1], height, width))
        for time, height, width in zip(*rows, strict=True)
    )
    a, b = x.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


def arguments(m, n, dtype, device):
    x = torch.randn(m // HEADS, HEADS, n, device=device).to(dtype)
    pos = torch.randint(POSITIONS, (m // HEADS, 1, 3), device=device)
    table = torch.cat((angles(n).cos(), angles(n).sin()), -1)
    return x, pos, table.to(device)


def reference(x, pos, table, ends):
    half = x.shape[-1] // 2
    turns = torch.polar(torch.ones(()).double(), angles(x.shape[-1]).double()).to(x.device)
    sizes = ends[0], ends[1] - ends[0], half - ends[1]
    own = [part[p] for part, p in zip(turns.split(sizes, -1), pos.unbind(-1), strict=True)]
    pairs = torch.view_as_complex(x.double().unflatten(-1, (2, -1)).mT.contiguous())
    return torch.view_as_real(pairs * torch.cat(own, -1)).mT.flatten(-2)

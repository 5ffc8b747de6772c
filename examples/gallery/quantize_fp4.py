"""Rows in nvfp4 with scales of two levels: float8_e4m3fn for 16 elements, and a number for the row.

The number of the row makes the largest scale of it the largest number of float8_e4m3fn.
"""

import torch

import htile

from .check import Nibbles, roundings
from .microscaling import packed

SIZE = 8192, 4096
SMALL = 64, 48


@htile.rowwise
def quantize_fp4(x):
    groups = x.float().view(-1, 16)
    largest = groups.abs().amax(-1)
    whole = 448 * 6 / largest.amax()
    scale = (largest / 6 * whole).to(torch.float8_e4m3fn)
    return packed((groups * (whole / scale.float())[:, None]).flatten()), scale, 1 / whole


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(3).to(dtype),)


def reference(x):
    groups = x.double().unflatten(-1, (-1, 16))
    largest = torch.linalg.vector_norm(groups, torch.inf, -1)
    unit = torch.linalg.vector_norm(largest, torch.inf, -1) / (448 * 6)
    scale = largest / 6 / unit[..., None]
    turned = (groups / (unit[..., None] * each)[..., None] for each in roundings(scale))
    return Nibbles(*(y.flatten(-2) for y in turned)), scale, unit

"""Removes from an output of attention what points along the value of the same position.

A value is shared by several heads, and is not copied for them.
"""

import torch

import htile

SIZE = 65536, 128
HEADS = 2


@htile.rowwise
def xsa(y, v, eps: float = 1e-6):
    direction = v / torch.linalg.vector_norm(v).clamp(min=eps)
    return y - (y * direction).sum() * direction


def arguments(m, n, dtype, device):
    y = torch.randn(m // HEADS, HEADS, n, device=device).to(dtype)
    return y, torch.randn(m // HEADS, 1, n, device=device).to(dtype)


def reference(y, v):
    y, v = y.double(), v.double()
    share = (y @ v.transpose(-1, -2)) / v.square().sum(-1, keepdim=True)
    return y - share * v

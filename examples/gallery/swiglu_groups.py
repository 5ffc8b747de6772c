"""Clamped SwiGLU of halves, then float8 in groups of 128, of those rows that an expert has.

The scales are powers of two. A row that is off is not read, and its results are 0.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 16384, 2048
SMALL = 256, 384


@htile.rowwise
def swiglu_groups(x, is_on: htile.PerRow, limit: float = 7.0):
    gate, up = x.chunk(2)
    y = F.silu(gate.clamp(max=limit)) * up.clamp(-limit, limit)
    groups = torch.where(is_on, y, 0).view(-1, 128)
    scale = torch.exp2(torch.ceil(torch.log2(groups.abs().amax(-1).clamp(min=1e-10) / 448)))
    return (groups / scale[:, None]).flatten().to(torch.float8_e4m3fn), scale


def arguments(m, n, dtype, device):
    x = torch.randn(m, 2 * n, device=device).mul(4).to(dtype)
    return x, torch.arange(m, device=device) % 3 > 0


def reference(x, is_on):
    gate, up = x.double().chunk(2, -1)
    gate, up = torch.minimum(gate, torch.tensor(7.0)), torch.clip(up, -7.0, 7.0)
    y = gate / (1 + (-gate).exp()) * up * is_on[..., None]
    groups = y.unflatten(-1, (-1, 128))
    largest = torch.linalg.vector_norm(groups, torch.inf, -1).clamp(min=1e-10)
    mantissa, exponent = torch.frexp(largest / 448)
    exponent = exponent - (mantissa == 0.5).int()
    q = torch.ldexp(groups, -exponent[..., None]).flatten(-2)
    return q, torch.ldexp(torch.ones_like(largest), exponent)

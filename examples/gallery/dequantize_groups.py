"""Weights of float8 with a scale for each block of 128 by 128 elements, back to floats.

`block` says for each row which row of scales is its own.
"""

import torch

import htile

SIZE = 8192, 4096
SMALL = 256, 384


@htile.rowwise
def dequantize_groups(q, block: htile.PerRow, scales: htile.Shared):
    groups = q.float().view(-1, 128) * scales[block][:, None]
    return groups.flatten().to(scales.dtype)


def arguments(m, n, dtype, device):
    q = torch.randn(m, n, device=device).to(torch.float8_e4m3fn)
    block = torch.arange(m, device=device) // 128
    scales = torch.rand(-(-m // 128), n // 128, device=device) + 0.5
    return q, block, scales.to(dtype)


def reference(q, block, scales):
    spread = torch.repeat_interleave(scales.double(), 128, -1)
    return q.double() * spread.index_select(0, block.flatten()).view(q.shape)

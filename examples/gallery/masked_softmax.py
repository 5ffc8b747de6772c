"""Softmax of scaled attention scores under a mask. A row that is hidden altogether becomes 0.

The mask is True where a score is hidden. It has no dimension of heads, and is not copied for
them.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 2048
HEADS = 2


@htile.rowwise
def masked_softmax(scores, mask, scale: float = 0.125):
    p = torch.softmax(torch.where(mask, -torch.inf, scores * scale), -1)
    return torch.where(mask.all(), 0.0, p)


def arguments(m, n, dtype, device):
    scores = torch.randn(HEADS, m // HEADS, n, device=device).mul(8).to(dtype)
    mask = torch.rand(m // HEADS, n, device=device) < 0.5
    mask[0] = True
    return scores, mask


def reference(scores, mask):
    z = (scores.double() * 0.125).masked_fill(mask, -torch.inf)
    return F.softmax(z, -1).nan_to_num(nan=0.0)

"""Sparsemax: the nearest point of the simplex. Bisection finds the threshold without a sorted row.

What is above the threshold after the last round has the exact one.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 4096


@htile.rowwise
def sparsemax(x, rounds: htile.Static = 20):
    high = x.amax()
    low = high - 1
    for _ in range(rounds):
        middle = 0.5 * (low + high)
        is_low = F.relu(x - middle).sum() >= 1
        low, high = torch.where(is_low, middle, low), torch.where(is_low, high, middle)
    is_kept = x > low
    threshold = (torch.where(is_kept, x, 0.0).sum() - 1) / is_kept.sum()
    return F.relu(x - threshold)


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).to(dtype),)


def reference(x):
    ranked = x.double().sort(-1, descending=True).values
    count = torch.arange(1, x.shape[-1] + 1, device=x.device)
    excess = ranked.cumsum(-1) - 1
    size = (ranked * count > excess).sum(-1, keepdim=True)
    return (x.double() - excess.gather(-1, size - 1) / size).clamp(min=0)

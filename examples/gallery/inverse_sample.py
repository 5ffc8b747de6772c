"""Draws a token of each row by the inverse of the distribution function: the first whose sum of
weights up to it is more than a share of all.

Bisection over the columns finds it, without a cumulative sum.
"""

import torch

import htile

SIZE = 1024, 32000


@htile.rowwise
def inverse_sample(weights, share: htile.PerRow):
    column, n = torch.arange(weights.shape[-1]), weights.shape[-1]
    target = share * weights.sum()
    first = torch.zeros_like(share).long()  # the token is none of the columns before
    step = 1 << (n - 1).bit_length()
    while step := step // 2:
        below = torch.where(column < first + step, weights, 0.0).sum()
        first = torch.where((below <= target) & (first + step < n), first + step, first)
    return first


def arguments(m, n, dtype, device):
    """Small whole weights and shares of 32nds, so that every sum is exact."""
    weights = torch.randint(0, 8, (m, n), device=device).to(dtype)
    return weights, (torch.arange(m, device=device) % 32 + 0.5) / 32


def reference(weights, share):
    up_to = weights.double().cumsum(-1)
    return torch.searchsorted(up_to, up_to[..., -1:] * share[..., None], right=True).squeeze(-1)

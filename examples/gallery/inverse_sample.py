"""Draws a token of each row by the inverse of the distribution function: the first whose sum of
weights up to it is more than a share of all."""

import torch

import htile

SIZE = 1024, 32000


@htile.rowwise
def inverse_sample(weights, share: htile.PerRow):
    up_to = weights.cumsum(-1)
    before = (up_to <= share * up_to[-1]).sum()
    return before.clamp(max=weights.shape[-1] - 1)


def arguments(m, n, dtype, device):
    """Small whole weights and shares of 32nds, so that every sum is exact."""
    weights = torch.randint(0, 8, (m, n), device=device).to(dtype)
    return weights, (torch.arange(m, device=device) % 32 + 0.5) / 32


def reference(weights, share):
    up_to = weights.double().cumsum(-1)
    return torch.searchsorted(up_to, up_to[..., -1:] * share[..., None], right=True).squeeze(-1)

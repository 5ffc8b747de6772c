"""The likeliest tokens alone, renormalized: the smallest set that adds up to top_p, or k of them.

Bisection finds the smallest probability that stays, without a sorted row.
"""

import torch

import htile

SIZE = 4096, 32000
VARIANTS = ({}, {"k": 10})


@htile.rowwise
def top_p(p, least: htile.PerRow, k: htile.Static = 0, rounds: htile.Static = 24):
    low, high = torch.zeros_like(least), p.amax()
    for _ in range(rounds):
        middle = 0.5 * (low + high)
        is_in = p >= middle
        is_enough = is_in.sum() >= k if k else torch.where(is_in, p, 0.0).sum() >= least
        low, high = torch.where(is_enough, middle, low), torch.where(is_enough, high, middle)
    kept = torch.where(p >= low, p, 0.0)
    return kept / kept.sum()


def arguments(m, n, dtype, device):
    p = torch.softmax(torch.randn(m, n, device=device).mul(3), -1)
    return p, torch.rand(m, device=device) * 0.4 + 0.5


def reference(p, least, k=0):
    ranked, order = p.double().sort(-1, descending=True)
    is_in = ranked.cumsum(-1) - ranked < least.double()[..., None]
    if k:
        is_in = torch.arange(p.shape[-1], device=p.device) < k
    kept = torch.where(is_in, ranked, 0.0)
    kept = torch.zeros_like(kept).scatter(-1, order, kept)
    return kept / kept.sum(-1, keepdim=True)

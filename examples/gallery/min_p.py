"""Hides tokens that are too unlikely before sampling: min-p, and p-less, without a parameter.

min-p keeps the tokens of at least p times the largest probability. p-less keeps those of at least
the expected probability of a token that is drawn.
"""

import torch

import htile

SIZE = 4096, 32000
VARIANTS = ({"kind": "min-p"}, {"kind": "p-less"})


@htile.rowwise
def min_p(logits, p: htile.PerRow, kind: htile.Static = "min-p"):
    if kind == "min-p":
        least = logits.amax() + torch.log(p)
    else:
        least = torch.logsumexp(2 * logits, -1) - torch.logsumexp(logits, -1)
    return torch.where(logits < least, -torch.inf, logits)


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(3).to(dtype)
    return logits, torch.rand(m, device=device) * 0.1 + 0.01


def reference(logits, p, kind="min-p"):
    shares = torch.softmax(logits.double(), -1)
    if kind == "min-p":
        least = shares.amax(-1, keepdim=True) * p.double()[..., None]
    else:
        least = shares.square().sum(-1, keepdim=True)
    return logits.double().masked_fill(shares < least, -torch.inf)

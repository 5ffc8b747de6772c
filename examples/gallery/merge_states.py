"""Merges the attention to two parts of a sequence, each with the logarithm of its sum.

The logarithms have the shape (heads, tokens); their transpose is a view. A part of no keys has an
infinite one, and counts for nothing.
"""

import torch

import htile

SIZE = 65536, 128
HEADS = 2


@htile.rowwise
def merge_states(first, lse_first: htile.PerRow, second, lse_second: htile.PerRow):
    largest = torch.maximum(lse_first, lse_second)
    largest = torch.where(largest == -torch.inf, 0.0, largest)
    a, b = torch.exp(lse_first - largest), torch.exp(lse_second - largest)
    total = a + b
    share = torch.where(total > 0, a / total, 0.0)
    return first * share + second * (1 - share), torch.log(total) + largest


def arguments(m, n, dtype, device):
    first, second = torch.randn(2, m // HEADS, HEADS, n, device=device).to(dtype)
    logs = torch.randn(2, HEADS, m // HEADS, device=device).mul(3)
    logs[0, 0] = -torch.inf
    return first, logs[0].T, second, logs[1].T


def reference(first, lse_first, second, lse_second):
    logs = torch.stack((lse_first, lse_second)).double()
    shares = torch.softmax(logs, 0)[..., None]
    both = torch.stack((first, second)).double()
    return (both * shares).sum(0), torch.logsumexp(logs, 0)

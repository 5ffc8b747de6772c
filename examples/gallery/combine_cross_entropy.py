"""Cross entropy from what several devices found in their shares of a vocabulary, and its gradient.

The largest logit, the sum of exponentials below it and the label's logit come as one row of a
number for each device. The gradient is that of this device's share.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000
DEVICES = 4


@htile.rowwise
def combine_cross_entropy(
    logits, label: htile.PerRow, start: htile.PerRow, largest: htile.Inner[1],
    total: htile.Inner[1], logit: htile.Inner[1],
):  # fmt: skip
    top = largest.amax()
    lse = top + torch.log((total * torch.exp(largest - top)).sum())
    p = torch.exp(logits - lse)
    is_label = torch.arange(logits.shape[-1]) == label - start
    return lse - logit.sum(), torch.where(is_label, p - 1, p)


def arguments(m, n, dtype, device):
    every = torch.randn(DEVICES, m, n, device=device).mul(2).to(dtype)
    label = torch.randint(DEVICES * n, (m,), device=device)
    largest = every.float().amax(-1)
    total = torch.exp(every.float() - largest[..., None]).sum(-1)
    column = (label - n * torch.arange(DEVICES, device=device)[:, None])[..., None]
    is_here = (column >= 0) & (column < n)
    logit = torch.where(is_here, every.float().gather(-1, column.clamp(0, n - 1)), 0.0)[..., 0]
    start = torch.full((m,), n, device=device)
    return every[1], label, start, *(t.T.contiguous() for t in (largest, total, logit))


def reference(logits, label, start, largest, total, logit):
    lse = torch.logsumexp(largest.double() + total.double().log(), -1)
    n = logits.shape[-1]
    hot = F.one_hot((label - start).clamp(-1, n) + 1, n + 2)[..., 1:-1]
    return lse - logit.double().sum(-1), (logits.double() - lse[..., None]).exp() - hot

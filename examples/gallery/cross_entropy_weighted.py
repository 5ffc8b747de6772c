"""Cross entropy with a weight for each class, and the logarithm that a backward pass needs.

A row whose label is -100 has the loss 0.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000


@htile.rowwise
def cross_entropy_weighted(logits, label: htile.PerRow, weight):
    loss = F.cross_entropy(logits, label, weight, reduction="none")
    return loss, torch.logsumexp(logits, -1)


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(4).to(dtype)
    label = torch.randint(n, (m,), device=device)
    label[::4] = -100
    return logits, label, torch.rand(n, device=device)


def reference(logits, label, weight):
    z, is_valid = logits.double(), label != -100
    lse = z.exp().sum(-1).log()
    label = label * is_valid
    loss = (lse - z.gather(-1, label[..., None])[..., 0]) * weight.double()[label]
    return loss * is_valid, lse

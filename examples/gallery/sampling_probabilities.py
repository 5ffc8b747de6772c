"""Probabilities to sample from: a temperature for each row, and only the k largest logits."""

import torch

import htile

SIZE = 1024, 32000


@htile.rowwise
def sampling_probabilities(logits, temperature: htile.PerRow, k: htile.Static = 20):
    least = logits.topk(k).values[-1]
    return torch.softmax(torch.where(logits < least, -torch.inf, logits / temperature), -1)


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(3).to(dtype)
    return logits, torch.rand(m, device=device) + 0.5


def reference(logits, temperature):
    order = torch.sort(logits.double(), dim=-1).values
    hidden = logits.double().masked_fill(logits < order[..., -20, None], -torch.inf)
    return torch.softmax(hidden / temperature.double()[..., None], -1)

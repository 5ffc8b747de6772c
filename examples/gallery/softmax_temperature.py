"""Softmax of logits over the vocabulary, with a temperature of each row's own."""

import torch
import torch.nn.functional as F

import htile

SIZE = 4096, 32000


@htile.rowwise
def softmax_temperature(logits, temperature: htile.PerRow):
    return torch.softmax(logits / temperature, -1)


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(5).to(dtype)
    return logits, torch.rand(m, device=device) + 0.5


def reference(logits, temperature):
    return F.softmax(logits.double() / temperature.double()[..., None], -1)

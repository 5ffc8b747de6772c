"""The output of an expert that all tokens share, times a gate that each token computes for it."""

import torch

import htile

SIZE = 8192, 4096


@htile.rowwise
def shared_expert_gate(hidden, weight, y):
    return torch.sigmoid((hidden * weight).sum()) * y


def arguments(m, n, dtype, device):
    hidden, y = torch.randn(2, m, n, device=device).to(dtype)
    return hidden, torch.randn(n, device=device).mul(n**-0.5).to(dtype), y


def reference(hidden, weight, y):
    logits = hidden.double() @ weight.double()
    return y.double() / (1 + torch.exp(-logits[..., None]))

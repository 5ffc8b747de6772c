"""Softmax of soft-capped logits with a temperature of each row's own, and the row's entropy."""

import torch

import htile
from examples.run import check


@htile.rowwise
def capped_softmax(logits, temperature: htile.PerRow, cap: float = 30.0):
    z = cap * torch.tanh(logits / cap) / temperature
    shifted = z - z.max()
    e = torch.exp(shifted)
    total = e.sum()
    entropy = torch.log(total) - (e * shifted).sum() / total
    return {"probabilities": e / total, "entropy": entropy}


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(10).to(dtype)
    return logits, torch.rand(m, device=device) + 0.5


def main():
    check(capped_softmax, arguments)


if __name__ == "__main__":
    main()

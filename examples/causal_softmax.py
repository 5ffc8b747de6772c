"""Softmax of the scores of each query, of which it sees those of keys up to its own position."""

import torch

import htile
from examples.run import check


@htile.rowwise
def causal_softmax(scores, q: htile.PerRow, scale: float = 0.125):
    is_seen = torch.arange(scores.shape[-1]) <= q
    return torch.softmax(torch.where(is_seen, scores * scale, -torch.inf), -1)


def arguments(m, n, dtype, device):
    scores = torch.randn(m, n, device=device).mul(20).to(dtype)
    return scores, torch.arange(m, device=device) * 37 % n


def main():
    check(causal_softmax, arguments)


if __name__ == "__main__":
    main()

"""Logarithm of the softmax of each row, and the row's logsumexp."""

import torch

import htile
from examples.run import check


@htile.rowwise
def log_softmax(x):
    lse = torch.logsumexp(x, dim=-1)
    return torch.log_softmax(x, dim=-1), lse


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(3).to(dtype),)


def main():
    check(log_softmax, arguments)


if __name__ == "__main__":
    main()

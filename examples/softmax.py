"""Softmax of each row."""

import torch

import htile
from examples.run import check


@htile.rowwise
def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(3).to(dtype),)


def main():
    check(softmax, arguments)


if __name__ == "__main__":
    main()

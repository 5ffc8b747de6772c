"""Softmax of a row that is normalized first: four dependent reductions in one kernel."""

import torch

import htile
from examples.run import check


@htile.rowwise
def norm_softmax(x, scale: float = 4.0, eps: float = 1e-5):
    centered = x - x.mean()
    factor = scale * torch.rsqrt((centered * centered).mean() + eps)  # one for the row
    return torch.softmax(centered * factor, dim=-1)


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(2).add(5).to(dtype),)


def main():
    check(norm_softmax, arguments)


if __name__ == "__main__":
    main()

"""Softmax of a row that is normalized first: four dependent reductions in one kernel."""

import torch

import htile
from examples.run import check


@htile.rowwise
def norm_softmax(x, scale: float = 4.0, eps: float = 1e-5):
    centered = x - x.mean()
    z = scale * centered * torch.rsqrt((centered * centered).mean() + eps)
    return torch.softmax(z, dim=-1)


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(2).add(5).to(dtype),)


def main():
    check(norm_softmax, arguments)


if __name__ == "__main__":
    main()

"""A norm that divides by the mean absolute value."""

import torch

import htile
from examples.run import check


@htile.rowwise
def absnorm(x, weight, eps: float = 1e-6):
    scale = x.abs().mean() + eps
    return x / scale * weight, scale


def arguments(m, n, dtype, device):
    return torch.randn(m, n, device=device).to(dtype), torch.rand(n, device=device).to(dtype)


def main():
    check(absnorm, arguments)


if __name__ == "__main__":
    main()

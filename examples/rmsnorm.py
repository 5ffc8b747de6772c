"""Root-mean-square norm with a weight; with a residual, which is added first and returned too."""

import torch

import htile
from examples.run import check


@htile.rowwise
def rmsnorm(x, weight, residual=None, eps: float = 1e-6):
    if residual is not None:  # decided while tracing
        x = x + residual
    y = x * torch.rsqrt((x * x).mean() + eps) * weight
    return y if residual is None else (y, x)


def arguments(m, n, dtype, device):
    return torch.randn(m, n, device=device).to(dtype), torch.rand(n, device=device).to(dtype)


def residual_arguments(m, n, dtype, device):
    return *arguments(m, n, dtype, device), torch.randn(m, n, device=device).to(dtype)


def main():
    check(rmsnorm, arguments)
    check(rmsnorm, residual_arguments)


if __name__ == "__main__":
    main()

"""Layer norm with weight and bias."""

import torch
import torch.nn.functional as F

import htile
from examples.run import check


@htile.rowwise
def layernorm(x, weight, bias, eps: float = 1e-5):
    return F.layer_norm(x, x.shape, weight, bias, eps)


def arguments(m, n, dtype, device):
    x = torch.randn(m, n, device=device).add(3).to(dtype)
    return x, torch.rand(n, device=device).to(dtype), torch.randn(n, device=device).to(dtype)


def main():
    check(layernorm, arguments)


if __name__ == "__main__":
    main()

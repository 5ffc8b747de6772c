"""Layer norm with float32 weight and bias, whatever the row's dtype."""

import torch
import torch.nn.functional as F

import htile
from examples.run import check


@htile.rowwise
def layernorm(x, weight, bias, eps: float = 1e-5):
    return F.layer_norm(x, x.shape, weight, bias, eps)


def arguments(m, n, dtype, device):
    x = torch.randn(m, n, device=device).add(3).to(dtype)
    return x, torch.rand(n, device=device), torch.randn(n, device=device)


def main():
    check(layernorm, arguments)


if __name__ == "__main__":
    main()

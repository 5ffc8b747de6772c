"""Backward passes with gradients of weights, and other functions that reduce over all rows."""

import torch

import htile
from tests.lower.cases import BF16, kernel_of, rows


def rmsnorm_backward(dy, x, weight, eps: float = 1e-6):
    rstd = torch.rsqrt((x * x).mean() + eps)
    scaled, dscaled = x * rstd, dy * weight
    dx = (dscaled - scaled * (dscaled * scaled).mean()) * rstd
    return dx, htile.sum_rows(dy * x * rstd)


def layernorm_backward(dy, x, weight, bias, eps: float = 1e-5):
    centred = x - x.mean()
    rstd = torch.rsqrt((centred * centred).mean() + eps)
    scaled, dscaled = centred * rstd, dy * weight
    dx = (dscaled - dscaled.mean() - scaled * (dscaled * scaled).mean()) * rstd
    return dx, htile.sum_rows(dy * scaled).to(weight.dtype), htile.sum_rows(dy).to(bias.dtype)


def totals(x):
    """Results over all rows alone: a row, a number of each row, a maximum, integers."""
    squares, positive = (x * x).sum(), x > 0
    return htile.sum_rows(x), htile.sum_rows(squares), htile.max_rows(x), htile.sum_rows(positive)


BACKWARD = {  # name -> (function, how many columns it takes)
    "rmsnorm_backward": (rmsnorm_backward, 1),
    "layernorm_backward": (layernorm_backward, 2),
}


def backward_kernel(name, n, dtype=BF16, arch="sm_90a"):
    """The inspected kernel of such a backward pass."""
    function, columns = BACKWARD[name]
    return kernel_of(function, *rows((2, n), (2, n), *[(n,)] * columns, dtype=dtype), arch=arch)

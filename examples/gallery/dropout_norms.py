"""Dropout, a scale for each row, the residual sum, and two layer norms of it (parallel blocks).

The mask is a function of the row's seed, so that a backward pass can compute it again. It is
returned here, with the sum in float32 and the statistics.
"""

import torch

import htile

from .noise import uniform

SIZE = 8192, 4096
VARIANTS = {}, {"p": 0.5}


@htile.rowwise
def dropout_norms(
    x, residual, weight, bias, weight1, bias1, scale: htile.PerRow, seed: htile.PerRow,
    p: float = 0.1, eps: float = 1e-5,
):  # fmt: skip
    keep = htile.uniform(htile.random_words(torch.arange(x.shape[-1]), seed)) > p
    total = torch.where(keep, x * (scale / (1 - p)), 0.0) + residual
    mean = total.mean()
    centered = total - mean
    rstd = torch.rsqrt((centered * centered).mean() + eps)
    normed = centered * rstd
    return normed * weight + bias, normed * weight1 + bias1, total.float(), keep, mean, rstd


def arguments(m, n, dtype, device):
    x, residual = torch.randn(2, m, n, device=device).to(dtype)
    columns = torch.randn(4, n, device=device).to(dtype)
    scale = torch.rand(m, device=device) + 0.5
    return x, residual, *columns, scale, torch.arange(m, device=device) * 0x9E3779B97F4A7C1


def reference(x, residual, weight, bias, weight1, bias1, scale, seed, p=0.1):
    keep = uniform(seed, x.shape[-1]) > p
    kept = x.double() * keep / (1 - p) * scale.double().unsqueeze(-1)
    total = kept + residual.double()
    found = [
        torch.native_layer_norm(total, x.shape[-1:], w.double(), b.double(), 1e-5)
        for w, b in ((weight, bias), (weight1, bias1))
    ]
    (y, mean, rstd), (y1, _, _) = found
    return y, y1, total, keep, mean.squeeze(-1), rstd.squeeze(-1)

"""GroupNorm and SiLU of an image: the row is a group of channels, each with its weight and bias.

The tensor has the shape (images, groups, channels, positions), of which the last two belong to a
row. Weight and bias have a row of channels for each group.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 2048, 1024
CHANNELS = 4
GROUPS = 2


@htile.rowwise
def group_norm(
    x: htile.Inner[2], weight: htile.Inner[1], bias: htile.Inner[1], eps: float = 1e-5
):
    centered = x - x.mean()
    rstd = torch.rsqrt((centered * centered).mean() + eps)
    return F.silu(centered * rstd * weight[:, None] + bias[:, None]), x.mean(), rstd


def arguments(m, n, dtype, device):
    x = torch.randn(m // GROUPS, GROUPS, CHANNELS, n, device=device).to(dtype)
    weight, bias = torch.randn(2, GROUPS, CHANNELS, device=device).to(dtype)
    return x, weight, bias


def reference(x, weight, bias):
    channels = x.double().flatten(1, 2)
    y = F.group_norm(channels, x.shape[1], weight.double().flatten(), bias.double().flatten())
    variance, mean = torch.var_mean(x.double(), (-2, -1), correction=0)
    return F.silu(y).view(x.shape), mean, (variance + 1e-5) ** -0.5

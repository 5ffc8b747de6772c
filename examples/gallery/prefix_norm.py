"""Layer norm and softmax of rows that have a length each: of what is behind it nothing is read."""

import torch

import htile

SIZE = 8192, 4096
VARIANTS = ({"kind": "norm"}, {"kind": "softmax"})


@htile.rowwise
def prefix_norm(x, length: htile.PerRow, kind: htile.Static = "norm", eps: float = 1e-5):
    inside = torch.arange(x.shape[-1]) < length
    if kind == "softmax":
        return torch.where(inside, torch.where(inside, x, -torch.inf).softmax(-1), 0)
    centered = torch.where(inside, x - torch.where(inside, x, 0).sum() / length, 0)
    return centered * torch.rsqrt((centered * centered).sum() / length + eps)


def arguments(m, n, dtype, device):
    lengths = torch.arange(m, device=device) * 37 % n + 1
    return torch.randn(m, n, device=device).add(0.5).to(dtype), lengths


def reference(x, length, kind="norm"):
    rows = x.double().flatten(0, -2)
    out = torch.zeros_like(rows)
    for row, new, n in zip(rows, out, length.flatten().tolist(), strict=True):
        part = row[:n]
        var, mean = torch.var_mean(part, correction=0)
        is_norm = kind == "norm"
        new[:n] = (part - mean) / (var + 1e-5).sqrt() if is_norm else torch.softmax(part, -1)
    return out.view(x.shape)

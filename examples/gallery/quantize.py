"""A row in 8 bits, and the scale that takes its largest magnitude to the end of their range."""

import torch

import htile

SIZE = 8192, 4096
VARIANTS = ({"stored": torch.float8_e4m3fn}, {"stored": torch.int8})


@htile.rowwise
def quantize(x, stored: htile.Static = torch.float8_e4m3fn):
    largest = 448.0 if stored is torch.float8_e4m3fn else 127.0
    scale = x.abs().amax().clamp(min=1e-10) / largest
    q = x / scale if stored is torch.float8_e4m3fn else torch.round(x / scale)
    return q.to(stored), scale


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(3).to(dtype),)


def reference(x, stored=torch.float8_e4m3fn):
    most = 448 if stored is torch.float8_e4m3fn else 127
    scale = torch.linalg.vector_norm(x.double(), torch.inf, -1) / most
    return x.double() / scale[..., None], scale

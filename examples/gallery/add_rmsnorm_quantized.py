"""Residual sum, RMS norm and quantization with a scale for each row, in one kernel.

The results are the quantized row, its scale, which a number on the device bounds, and the sum.
`stored` is float8_e4m3fn or int8.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 4096
VARIANTS = ({"stored": torch.float8_e4m3fn}, {"stored": torch.int8})


@htile.rowwise
def add_rmsnorm_quantized(
    x, residual, weight, bound: htile.Scalar, eps: float = 1e-6,
    stored: htile.Static = torch.float8_e4m3fn,
):  # fmt: skip
    total = (x + residual).to(x.dtype)
    y = F.rms_norm(total, total.shape[-1:], weight, eps)
    largest = 448.0 if stored is torch.float8_e4m3fn else 127.0
    scale = torch.minimum(y.abs().amax() / largest, bound)
    q = y / scale if stored is torch.float8_e4m3fn else torch.round(y / scale)
    return {"q": q.to(stored), "scale": scale, "residual": total}


def arguments(m, n, dtype, device):
    x, residual = torch.randn(2, m, n, device=device).to(dtype)
    weight = torch.rand(n, device=device).add(0.5).to(dtype)
    return x, residual, weight, torch.full((1,), 0.03, device=device)


def reference(x, residual, weight, bound, stored=torch.float8_e4m3fn):
    total = (x.double() + residual.double()).to(x.dtype).double()
    y = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    most = 448 if stored is torch.float8_e4m3fn else 127
    scale = torch.linalg.vector_norm(y, torch.inf, -1, keepdim=True) / most
    scale = torch.minimum(scale, bound.double())
    q = y / scale
    return {"q": q.clamp(-most - (most == 127), most), "scale": scale, "residual": total}

"""Residual sum and RMS norm, rounded to the 8-bit levels of the row but kept as floats (BitNet)."""

import torch
import torch.nn.functional as F

import htile

from .check import Levels

SIZE = 8192, 4096


@htile.rowwise
def bitlinear_norm(x, residual, weight, eps: float = 1e-6):
    total = x + residual
    y = F.rms_norm(total, total.shape[-1:], weight, eps)
    scale = 127.0 / y.abs().amax().clamp(min=1e-5)
    return torch.round(y * scale).clamp(-128, 127) / scale, total, scale


def arguments(m, n, dtype, device):
    x, residual = torch.randn(2, m, n, device=device).to(dtype)
    return x, residual, torch.rand(n, device=device).add(0.5).to(dtype)


def reference(x, residual, weight):
    total = x.double() + residual.double()
    y = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    scale = 127 / torch.linalg.vector_norm(y, torch.inf, -1, keepdim=True)
    return Levels(y * scale, 1 / scale), total, scale.squeeze(-1)

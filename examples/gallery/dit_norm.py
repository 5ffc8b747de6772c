"""The gated residual of a diffusion transformer, and its modulated layer norm.

Gate, scale and shift are parts of one row of 6 N elements, which a linear layer gives for each
batch entry: `chunk` takes views of it, and nothing is copied.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 3072
BATCH = 2


@htile.rowwise
def dit_norm(x, residual, modulation, bias, eps: float = 1e-6):
    gate, scale, shift, *_ = (modulation + bias).chunk(6)
    residual = residual + x * gate
    return F.layer_norm(residual, x.shape[-1:], eps=eps) * (1 + scale) + shift, residual


def arguments(m, n, dtype, device):
    x, residual = torch.randn(2, BATCH, m // BATCH, n, device=device).to(dtype)
    modulation = torch.randn(BATCH, 1, 6 * n, device=device).to(dtype)
    return x, residual, modulation, torch.randn(6 * n, device=device).to(dtype)


def reference(x, residual, modulation, bias):
    n = x.shape[-1]
    gate, scale, shift = (
        (modulation.double() + bias.double())[..., k * n : (k + 1) * n] for k in range(3)
    )
    total = torch.addcmul(residual.double(), x.double(), gate)
    centered = total - total.mean(-1, keepdim=True)
    y = centered / (centered.square().mean(-1, keepdim=True) + 1e-6).sqrt()
    return y + y * scale + shift, total

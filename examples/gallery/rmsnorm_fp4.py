"""RMS norm in nvfp4: 4 bits an element, two of them a byte, and a scale for each 16 elements.

The scales are float8_e4m3fn, times a number that was calibrated before for the whole tensor. A
swizzled layout of them is a view that is given as `out=`.
"""

import torch
import torch.nn.functional as F

import htile

from .check import Nibbles, roundings
from .microscaling import packed

SIZE = 8192, 4096
SMALL = 64, 48


@htile.rowwise
def rmsnorm_fp4(x, weight, whole: htile.Scalar, eps: float = 1e-6):
    groups = F.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).view(-1, 16)
    scale = (groups.abs().amax(-1) / 6 * whole).to(torch.float8_e4m3fn)
    return packed((groups * (whole / scale.float())[:, None]).flatten()), scale


def arguments(m, n, dtype, device):
    x = torch.randn(m, n, device=device).mul(3).to(dtype)
    weight = torch.rand(n, device=device).add(0.5).to(dtype)
    return x, weight, torch.full((1,), 64.0, device=device)


def reference(x, weight, whole):
    x = x.double()
    y = x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight.double()
    groups = y.unflatten(-1, (-1, 16))
    scale = torch.linalg.vector_norm(groups, torch.inf, -1) / 6 * whole.double()
    turned = (groups * (whole.double() / each)[..., None] for each in roundings(scale))
    return Nibbles(*(y.flatten(-2) for y in turned)), scale

"""Groups of 128 elements in float8, each with a scale of its own: a number, or a power of two.

The group is the row: `x.view(tokens, groups, 128)` copies nothing, and the scales have the shape
(tokens, groups). Powers of two come in float8_e8m0fnu, as in the microscaling formats.
"""

import torch

import htile

SIZE = 65536, 128
GROUPS = 2
VARIANTS = ({"as_exponent": False}, {"as_exponent": True})


@htile.rowwise
def quantize_groups(x, as_exponent: htile.Static = False):
    scale = x.abs().amax().clamp(min=1e-10) / 448
    stored = scale
    if as_exponent:
        scale = torch.exp2(torch.ceil(torch.log2(scale)))
        stored = scale.to(torch.float8_e8m0fnu)
    return (x / scale).to(torch.float8_e4m3fn), stored


def arguments(m, n, dtype, device):
    return (torch.randn(m // GROUPS, GROUPS * n, device=device).to(dtype).view(-1, GROUPS, n),)


def reference(x, as_exponent=False):
    scale = torch.linalg.vector_norm(x.double(), torch.inf, -1) / 448
    if not as_exponent:
        return x.double() / scale[..., None], scale
    mantissa, exponent = torch.frexp(scale)  # scale is mantissa * 2 ** exponent, from 0.5 to 1
    exponent = exponent - (mantissa == 0.5).int()
    power = torch.ldexp(torch.ones_like(scale), exponent)
    return torch.ldexp(x.double(), -exponent[..., None]), power

"""Rows of 32 elements in the microscaling formats, and what their scales are stored as.

mxfp8 has elements in float8_e4m3fn and mxfp4 has 4 bits each, two of them a byte; both have one
scale, a power of two, in float8_e8m0fnu (OCP Microscaling Formats Specification 1.0, section 6.3).
nvfp4 has a scale in float8_e4m3fn for each 16 elements. `x.view(tokens, -1, 32)`
copies nothing, and a swizzled layout of the scales is a view that is given as `out=`.
"""

import torch

import htile

from .check import Nibbles, roundings

SIZE = 262144, 32
SMALL = 32, 64
VARIANTS = ({"kind": "mxfp8"}, {"kind": "mxfp4"}, {"kind": "nvfp4"})


def packed(y):
    """The 4 bits of each element, the first of two in the lower half of a byte.

    The levels are 0, 0.5, 1, 1.5, 2, 3, 4 and 6; of two that are as near it is the even one.
    """
    size = y.abs()
    large = torch.where(size < 4, size.round() + 2, (size / 2).round() + 4)
    code = torch.where(size < 2, (size * 2).round(), large).clamp(max=7)
    code = torch.where(y < 0, code + 8, code)
    return (code[0::2] + 16 * code[1::2]).to(torch.uint8)


@htile.rowwise
def microscaling(x, kind: htile.Static = "mxfp8"):
    if kind == "nvfp4":
        groups = x.float().view(-1, 16)
        scale = (groups.abs().amax(-1) / 6).to(torch.float8_e4m3fn)
        return packed((groups / scale.float()[:, None]).flatten()), scale
    largest = x.float().abs().amax().clamp(min=2.0**-100)
    exponent = torch.floor(torch.log2(largest)) - (8 if kind == "mxfp8" else 2)
    y, scale = x.float() * torch.exp2(-exponent), torch.exp2(exponent).to(torch.float8_e8m0fnu)
    return (y.to(torch.float8_e4m3fn) if kind == "mxfp8" else packed(y)), scale


def arguments(m, n, dtype, device):
    return (torch.randn(m, n, device=device).mul(3).to(dtype),)


def reference(x, kind="mxfp8"):
    values = x.double()
    if kind == "nvfp4":
        groups = values.unflatten(-1, (-1, 16))
        scale = torch.linalg.vector_norm(groups, torch.inf, -1) / 6
        turned = (groups / each[..., None] for each in roundings(scale))
        return Nibbles(*(y.flatten(-2) for y in turned)), scale
    _, exponent = torch.frexp(torch.linalg.vector_norm(values, torch.inf, -1))
    exponent = exponent - 1 - (8 if kind == "mxfp8" else 2)
    y = torch.ldexp(values, -exponent[..., None])
    scale = torch.ldexp(torch.ones_like(values[..., 0]), exponent)
    return (y.clamp(-448, 448) if kind == "mxfp8" else Nibbles(y)), scale

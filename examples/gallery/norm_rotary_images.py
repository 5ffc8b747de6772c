"""RMS norm over all heads of a token of images, then rotary embedding by time, height and width.

`token` is the number of the token; its three positions and the angles are computed in the kernel.
There is one launch for the queries and one for the keys, each of which is a part of a packed
tensor, so that no value is touched.
"""

import math

import torch
import torch.nn.functional as F

import htile

SIZE = 8192, 5120
SMALL = 64, 128
HEAD = 32  # elements of a head
BASE = 10000.0  # of the angles
IMAGE = 6, 10  # tokens from top to bottom of an image, and from left to right


@htile.rowwise
def norm_rotary_images(x, weight, token: htile.PerRow, eps: float = 1e-6):
    height, width = IMAGE
    place = token // (height * width), token // width % height, token % width
    ends, pair = (HEAD // 4, HEAD * 3 // 8), torch.arange(HEAD // 2)
    first = torch.where(pair < ends[0], 0, torch.where(pair < ends[1], *ends))
    part = torch.where(pair < ends[0], ends[0], HEAD // 8)
    pos = torch.where(pair < ends[0], place[0], torch.where(pair < ends[1], place[1], place[2]))
    angle = pos.float() * torch.exp2((pair - first).float() / part.float() * -math.log2(BASE))
    y = F.rms_norm(x, x.shape[-1:], weight, eps).view(-1, HEAD)
    a, b, cos, sin = y[:, 0::2], y[:, 1::2], torch.cos(angle), torch.sin(angle)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten().to(x.dtype)


def arguments(m, n, dtype, device):
    packed = torch.randn(m, 3, n, device=device).mul(2).to(dtype)
    weight = torch.rand(n, device=device).add(0.5).to(dtype)
    return packed[:, 0], weight, torch.arange(m, device=device)


def reference(x, weight, token):
    height, width = IMAGE
    place = token // (height * width), token // width % height, token % width
    sizes = HEAD // 4, HEAD // 8, HEAD // 8
    angles = [
        pos[..., None] * BASE ** -(torch.arange(size, device=x.device).double() / size)
        for pos, size in zip(place, sizes, strict=True)
    ]
    turns = torch.polar(torch.ones((), device=x.device).double(), torch.cat(angles, -1))
    mean = torch.einsum("...d,...d->...", x.double(), x.double()) / x.shape[-1]
    y = torch.einsum("...d,d,...->...d", x.double(), weight.double(), (mean + 1e-6) ** -0.5)
    pairs = torch.view_as_complex(y.view(*x.shape[:-1], -1, HEAD // 2, 2))
    return torch.view_as_real(pairs * turns[..., None, :]).flatten(-3)

"""RMS norm and rotary embedding of queries and keys that lie packed beside the values, in place.

The head is the row. The queries and keys are the first heads of a token, and the weight has a row
for each of them. `x` is that part of the packed tensor, so that no value is touched:
`qk_norm_rotary(x, weight, pos, table, out=x)`.
"""

import torch
import torch.nn.functional as F

import htile

from .rotary_positions import POSITIONS, angles

SIZE = 65536, 128
SMALL = 64, 66
QUERIES, KEYS = 2, 1


@htile.rowwise
def qk_norm_rotary(x, weight, pos: htile.PerRow, table: htile.Shared, eps: float = 1e-6):
    a, b = (F.rms_norm(x, x.shape[-1:], eps=eps) * weight).chunk(2)
    cos, sin = table[pos].chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


def arguments(m, n, dtype, device):
    tokens = m // (QUERIES + KEYS)
    packed = torch.randn(tokens, QUERIES + 2 * KEYS, n, device=device).to(dtype)
    of_queries, of_keys = torch.rand(2, n, device=device).to(dtype)
    weight = torch.stack([of_queries] * QUERIES + [of_keys] * KEYS)
    pos = torch.randint(POSITIONS, (tokens, 1), device=device)
    table = torch.cat((angles(n).cos(), angles(n).sin()), -1)
    return packed[:, : QUERIES + KEYS], weight, pos, table.to(device)


def reference(x, weight, pos, table):
    mean = torch.einsum("...d,...d->...", x.double(), x.double()) / x.shape[-1]
    y = torch.einsum("thd,hd,th->thd", x.double(), weight.double(), (mean + 1e-6) ** -0.5)
    turns = torch.polar(torch.ones(()).double(), angles(x.shape[-1]).double()).to(x.device)
    pairs = torch.view_as_complex(y.unflatten(-1, (2, -1)).mT.contiguous())
    return torch.view_as_real(pairs * turns[pos]).mT.flatten(-2)

"""The output of an RWKV-7 head, corrected by its value and gated. The head is the row."""

import torch

import htile

SIZE = 65536, 64
HEADS = 2


@htile.rowwise
def rwkv_gate(o, r, k, v, bonus, gate):
    return (o + (r * k * bonus).sum() * v) * gate


def arguments(m, n, dtype, device):
    o, r, k, v, gate = torch.randn(5, m // HEADS, HEADS, n, device=device).to(dtype)
    return o, r, k, v, torch.randn(HEADS, n, device=device).to(dtype), gate


def reference(o, r, k, v, bonus, gate):
    o, r, k, v, bonus, gate = (t.double() for t in (o, r, k, v, bonus, gate))
    share = torch.einsum("thd,thd,hd->th", r, k, bonus)
    return o * gate + share[..., None] * v * gate

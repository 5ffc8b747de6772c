"""RMS norm of each head of the queries, of 128 elements. The weight is one row for each head.

The head is the row: the tensor has the shape (tokens, heads, size), and may be a part of packed
queries, keys and values. The weight has the shape (heads, size).
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 65536, 128
HEADS = 2


@htile.rowwise
def qk_norm(x, weight, eps: float = 1e-6):
    return F.rms_norm(x, x.shape[-1:], eps=eps) * weight


def arguments(m, n, dtype, device):
    packed = torch.randn(m // HEADS, HEADS + 2, n, device=device).to(dtype)
    return packed[:, :HEADS], torch.rand(HEADS, n, device=device).to(dtype)


def reference(x, weight):
    mean = torch.einsum("...d,...d->...", x.double(), x.double()) / x.shape[-1]
    return torch.einsum("thd,hd,th->thd", x.double(), weight.double(), (mean + 1e-6) ** -0.5)

"""A residual that attends to the outputs of earlier layers: a softmax over a stack of rows.

The layers' outputs are normalized to keys; their products with a query decide how much of each
goes into the result. The shares and the reciprocal roots are results too.
"""

import torch

import htile

SIZE = 8192, 2048
LAYERS = 6


@htile.rowwise
def attention_residual(v: htile.Inner[2], weight, query, eps: float = 1e-6):
    r = torch.rsqrt((v * v).mean(-1) + eps)
    share = torch.softmax((v * weight * query).sum(-1) * r, 0)
    return (share[:, None] * v).sum(0), share, r


def arguments(m, n, dtype, device):
    v = torch.randn(m, LAYERS, n, device=device).to(dtype)
    weight = torch.rand(n, device=device).to(dtype)
    return v, weight, torch.randn(n, device=device).mul(n**-0.5).to(dtype)


def reference(v, weight, query):
    v = v.double()
    roots = (v.square().sum(-1) / v.shape[-1] + 1e-6).sqrt()
    keys = v / roots[..., None] * weight.double()
    share = torch.softmax(keys @ query.double(), -1)
    return torch.einsum("...k,...kn->...n", share, v), share, 1 / roots

"""A token's experts, and its activations as float8 in groups of 128, in one kernel.

The rows are of two widths: a logit for each expert, and the activations.
"""

import torch

import htile

from .router import distinct

SIZE = 16384, 3072
SMALL = 768, 256
EXPERTS = 256


@htile.rowwise
def router_quantized(x, logits, k: htile.Static = 8):
    weights, experts = torch.sigmoid(logits.float()).topk(k)
    groups = x.float().view(-1, 128)
    scale = groups.abs().amax(-1).clamp(min=1e-10) / 448
    q = (groups / scale[:, None]).to(torch.float8_e4m3fn)
    return weights / weights.sum(), experts.int(), q.flatten(), scale


def arguments(m, n, dtype, device):
    return torch.randn(m, n, device=device).to(dtype), distinct(m, EXPERTS, device).to(dtype)


def reference(x, logits):
    scores = 1 / (1 + (-logits.double()).exp())
    weights, experts = torch.sort(scores, dim=-1, descending=True)
    weights, groups = weights[..., :8], x.double().unflatten(-1, (-1, 128))
    scale = groups.abs().amax(-1) / 448
    q = (groups / scale[..., None]).flatten(-2)
    return weights / weights.sum(-1, keepdim=True), experts[..., :8], q, scale

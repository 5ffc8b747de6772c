"""A router that chooses groups of experts first: by the sum of the two best scores in each.

The experts are then the best of the chosen groups, as in DeepSeek's models.
"""

import torch

import htile

from .router import distinct

SIZE = 16384, 256
SMALL = 64, 32


@htile.rowwise
def grouped_router(
    logits, bias, k: htile.Static = 8, groups: htile.Static = 8, scale: float = 2.5
):
    scores = torch.sigmoid(logits.float())
    biased = (scores + bias).view(groups, -1)
    best = biased.topk(2).values.sum(-1).topk(groups // 2).indices
    chosen = (torch.arange(groups)[:, None] == best).any(-1)
    experts = torch.where(chosen[:, None], biased, -torch.inf).flatten().topk(k).indices
    weights = scores.gather(-1, experts)
    return weights * (scale / weights.sum()), experts.int()


def arguments(m, n, dtype, device):
    return distinct(m, n, device).to(dtype), torch.randint(0, 4, (n,), device=device) / 16


def reference(logits, bias):
    scores = 1 / (1 + (-logits.double()).exp())
    biased = (scores + bias).unflatten(-1, (8, -1))
    order = torch.sort(biased, dim=-1, descending=True).values
    best = torch.sort(order[..., 0] + order[..., 1], dim=-1, descending=True).indices[..., :4]
    chosen = torch.zeros_like(biased[..., 0]).scatter(-1, best, 1.0)
    hidden = biased.masked_fill(chosen[..., None] == 0, -1.0).flatten(-2)
    experts = torch.sort(hidden, dim=-1, descending=True).indices[..., :8]
    weights = torch.take_along_dim(scores, experts, -1)
    return 2.5 * weights / weights.sum(-1, keepdim=True), experts

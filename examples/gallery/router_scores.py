"""A router's scores and the map of the chosen experts, from which the auxiliary loss is made."""

import torch

import htile

from .router import distinct

SIZE = 16384, 256
SMALL = 64, 33  # more experts than 256 have logits that bfloat16 does not tell apart
VARIANTS = ({"score": "softmax"}, {"score": "sigmoid"})


@htile.rowwise
def router_scores(logits, k: htile.Static = 8, score: htile.Static = "softmax"):
    if score == "softmax":
        scores = torch.softmax(logits, -1)
    else:
        scores = torch.sigmoid(logits)
        scores = scores / scores.sum()
    experts = scores.topk(k).indices
    chosen = (torch.arange(logits.shape[-1]) == experts[:, None]).any(0)
    return scores, chosen


def arguments(m, n, dtype, device):
    return (distinct(m, n, device).to(dtype),)


def reference(logits, score="softmax"):
    x = logits.double()
    scores = x.exp() if score == "softmax" else 1 / (1 + (-x).exp())
    scores = scores / scores.sum(-1, keepdim=True)
    least = torch.sort(x, dim=-1).values[..., -8, None]
    return scores, x >= least

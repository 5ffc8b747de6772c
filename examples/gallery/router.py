"""The gates of a mixture of experts: each token's k best experts and their weights.

A bias may steer which experts are chosen; their weights are the scores without it.
"""

import torch
import torch.nn.functional as F

import htile

SIZE = 16384, 256
SMALL = 64, 33  # more experts than 256 have logits that bfloat16 does not tell apart
VARIANTS = (
    {"score": "softmax"}, {"score": "sigmoid"}, {"score": "sqrtsoftplus"},
)  # fmt: skip


@htile.rowwise
def router(logits, bias, k: htile.Static = 8, score: htile.Static = "softmax"):
    if score == "softmax":
        scores = torch.softmax(logits.float(), -1)
    elif score == "sigmoid":
        scores = torch.sigmoid(logits.float())
    else:
        scores = F.softplus(logits.float()).sqrt()
    experts = (scores + bias).topk(k).indices
    weights = scores.gather(-1, experts)
    return weights / weights.sum(), experts.int()


def distinct(m, n, device):
    """Logits of which no two in a row are equal, also in bfloat16."""
    order = torch.rand(m, n, device=device).argsort(-1)
    return (order - n // 2) / 32


def arguments(m, n, dtype, device):
    # multiples of 1/16, so that no sum of a score and a bias is near another one
    return distinct(m, n, device).to(dtype), torch.randint(0, 4, (n,), device=device) / 16


def reference(logits, bias, k=8, score="softmax"):
    x = logits.double()
    scores = {
        "softmax": x.exp() / x.exp().sum(-1, keepdim=True),
        "sigmoid": 1 / (1 + (-x).exp()),
        "sqrtsoftplus": x.exp().log1p() ** 0.5,
    }[score]
    experts = torch.sort(scores + bias, dim=-1, descending=True).indices[..., :k]
    weights = torch.take_along_dim(scores, experts, -1)
    return weights / weights.sum(-1, keepdim=True), experts

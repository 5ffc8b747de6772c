"""The gates of a mixture of experts and the layer before: each token's k best ones."""

import torch
import torch.nn.functional as F

import htile

from .router import distinct

SIZE = 8192, 256, 4096
SMALL = (64, 128), (33, 40)


@htile.rowwise
def linear_router(x, weight: htile.Matrix, k: htile.Static = 8):
    scores = torch.softmax(F.linear(x, weight), -1)
    weights, experts = scores.topk(k)
    return weights / weights.sum(), experts.int()


def arguments(m, n, k, dtype, device):
    # An expert's row of the weight picks one element, so that no two logits of a token are equal.
    x = torch.randn(m, k, device=device)
    x[:, :n] = distinct(m, n, device)
    weight = torch.eye(n, k, device=device)[torch.randperm(n, device=device)]
    return x.to(dtype), weight.to(dtype)


def reference(x, weight, k=8):
    z = (x.double() @ weight.double().mT).exp()
    scores, experts = torch.sort(z / z.sum(-1, keepdim=True), dim=-1, descending=True)
    weights = scores[..., :k]
    return weights / weights.sum(-1, keepdim=True), experts[..., :k]

"""A router of which some layers take their experts from a table, by the token, and not by score."""

import torch
import torch.nn.functional as F

import htile

from .router import distinct

SIZE = 16384, 256
SMALL = 64, 33
CHOSEN = 6


@htile.rowwise
def hash_router(logits, token: htile.PerRow, table: htile.Shared, is_hashed: htile.PerRow):
    scores = F.softplus(logits.float()).sqrt()
    experts = torch.where(is_hashed, table[token], scores.topk(CHOSEN).indices)
    weights = scores.gather(-1, experts)
    return weights / weights.sum(), experts.int()


def arguments(m, n, dtype, device):
    token = torch.randint(0, 1000, (m,), device=device)
    table = torch.rand(1000, n, device=device).argsort(-1)[:, :CHOSEN].contiguous()
    return distinct(m, n, device).to(dtype), token, table, torch.arange(m, device=device) % 3 == 0


def reference(logits, token, table, is_hashed):
    scores = logits.double().exp().log1p() ** 0.5
    best = torch.sort(scores, dim=-1, descending=True).indices[..., :CHOSEN]
    hashed = torch.nn.functional.embedding(token, table.double()).long()
    experts = torch.where(is_hashed[..., None], hashed, best)
    weights = torch.take_along_dim(scores, experts, -1)
    return weights / weights.sum(-1, keepdim=True), experts

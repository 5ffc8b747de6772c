"""Checks drafted tokens against a larger model, and draws the one that follows those it keeps.

The first drafted token that is not kept is drawn anew, from what the larger model gives more
probability; if all are kept, one more is drawn. `target` and `draft` have a row of probabilities
for each place of each request. The noise is a function of the request's seed. The method is of
Leviathan, Kalman and Matias, Fast inference from transformers via speculative decoding, 2023.
"""

import torch

import htile

from .noise import uniform

SIZE = 1024, 32000
DRAFTED = 4  # tokens of a request


@htile.rowwise
def speculative_sample(
    request: htile.PerRow, shares: htile.Inner[1], of_target: htile.Inner[1],
    of_draft: htile.Inner[1], target: htile.Shared, draft: htile.Shared, seed: htile.PerRow,
):  # fmt: skip
    count = (shares * of_draft < of_target).cumprod(-1).sum()  # up to the first that is not kept
    p, q = target[request * (DRAFTED + 1) + count], draft[request * DRAFTED + count]
    rest = torch.where(count < DRAFTED, torch.where(q < p, p - q, 0.0), p)
    word = htile.random_words(torch.arange(target.shape[-1]), seed)
    return count, (rest / htile.exponential(word)).argmax()


def arguments(m, n, dtype, device):
    target = torch.randn(m, DRAFTED + 1, n, device=device).mul(2).softmax(-1)
    draft = torch.randn(m, DRAFTED, n, device=device).mul(2).softmax(-1)
    tokens = torch.randint(0, n, (m, DRAFTED, 1), device=device)
    of_target = target[:, :DRAFTED].gather(-1, tokens).squeeze(-1)
    of_draft = draft.gather(-1, tokens).squeeze(-1)
    request = torch.arange(m, device=device)
    shares, seed = torch.rand(m, DRAFTED, device=device), request * 0x9E3779B97F4A7C1
    whole = target.flatten(0, 1), torch.cat((draft.flatten(0, 1), draft[0, :1]))
    return request, shares, of_target, of_draft, *whole, seed


def reference(request, shares, of_target, of_draft, target, draft, seed):
    is_kept = shares.double() * of_draft.double() < of_target.double()
    count = is_kept.long().cumprod(-1).sum(-1)
    p = target.double()[request * (DRAFTED + 1) + count]
    q = draft.double()[request * DRAFTED + count] * (count < DRAFTED)[..., None]
    noise = -uniform(seed, target.shape[-1]).log()
    return count, ((p - q).clamp(min=0) / noise).max(-1).indices

"""Draws a token of each row: the largest of the logits over a temperature, plus Gumbel noise.

It also gives the token's log probability. The noise is a function of the row's seed.
"""

import torch

import htile

from .noise import uniform

SIZE = 1024, 32000


@htile.rowwise
def gumbel_sample(logits, temperature: htile.PerRow, seed: htile.PerRow):
    z = logits / temperature
    word = htile.random_words(torch.arange(logits.shape[-1]), seed)
    token = (z - torch.log(htile.exponential(word))).argmax()
    return token, z[token] - torch.logsumexp(z, -1)


def arguments(m, n, dtype, device):
    logits = torch.randn(m, n, device=device).mul(3).to(dtype)
    seed = torch.arange(m, device=device) * 0x9E3779B97F4A7C1
    return logits, torch.rand(m, device=device) + 0.5, seed


def reference(logits, temperature, seed):
    z = logits.double() / temperature.double()[..., None]
    noisy = z - (-uniform(seed, logits.shape[-1]).log()).log()
    token = noisy.max(-1, keepdim=True).indices
    return token.squeeze(-1), torch.log_softmax(z, -1).gather(-1, token).squeeze(-1)

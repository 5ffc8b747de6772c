"""Dropout whose mask is stored as bits, 32 elements to an int32.

A row here is a block of 128 elements of a row of a model, because a row has at most 64 groups. The
block's number is the upper half of the counter, so that each block has numbers of its own.
"""

import torch

import htile

from .noise import uniform

SIZE = 262144, 128
SMALL = 64, 96
VARIANTS = {}, {"p": 0.5}


@htile.rowwise
def dropout_bits(x, seed: htile.PerRow, block: htile.PerRow, p: float = 0.1):
    keep = htile.uniform(htile.random_words(torch.arange(x.shape[-1]), seed, block)) > p
    bits = keep.view(-1, 32).int() << torch.arange(32, dtype=torch.int32)
    return torch.where(keep, x / (1 - p), 0.0), bits.sum(-1).int()


def arguments(m, n, dtype, device):
    number = torch.arange(m, device=device)
    return torch.randn(m, n, device=device).to(dtype), number // 32 + 2**40, number % 32


def reference(x, seed, block, p=0.1):
    keep = uniform(seed, x.shape[-1], block) > p
    bits = torch.zeros(*x.shape[:-1], x.shape[-1] // 32, dtype=torch.int64, device=x.device)
    for k in range(32):
        bits += keep[..., k::32].long() * 2**k
    signed = torch.where(bits < 2**31, bits, bits - 2**32)
    return x.double() * keep / (1 - p), signed.to(torch.int32)

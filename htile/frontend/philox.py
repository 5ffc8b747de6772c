"""Philox4x32-10 and its words as numbers between 0 and 1, in torch's own integer arithmetic.

Philox is a function of a counter and a key (Salmon, Moraes, Dror and Shaw, Parallel random numbers:
as easy as 1, 2, 3, SC 2011), so any element of a stream is computed without those before it. The
kernels compute the same bits (htile.compute.random).
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57  # section 5.3 of the paper
WEYL = 0x9E3779B9, 0xBB67AE85  # what the words of the key grow by from round to round
MASK = 0xFFFFFFFF
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1


def words(
    counter: Tensor | int, key: Tensor | int, subsequence: Tensor | int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four words of a counter of 128 bits, each an unsigned number of 32 bits in int64.

    The operands are int64 or Python integers, one of them a tensor, and are broadcast. `counter` is
    the low half of the counter and `subsequence` the high one.
    """
    a, b = _halves(counter)
    c, d = _halves(subsequence)
    first, second = _halves(key)
    for _ in range(ROUNDS):
        high_a, low_a = _product(a, MULTIPLIERS[0])
        high_c, low_c = _product(c, MULTIPLIERS[1])
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
        first, second = first + WEYL[0] & MASK, second + WEYL[1] & MASK
    return a, b, c, d


def word_of(index: Tensor | int, key: Tensor | int, subsequence: Tensor | int) -> Tensor:
    """Word `index % 4` of counter `index // 4`; the operands are as those of `words`."""
    a, b, c, d = words(index >> 2, key, subsequence)
    which = torch.as_tensor(index & 3, device=a.device)
    return torch.where(which < 2, torch.where(which == 0, a, b), torch.where(which == 2, c, d))


def _halves(x: Tensor | int) -> tuple[Tensor | int, Tensor | int]:
    """The low and the high 32 bits, both unsigned; `>>` repeats the sign."""
    return x & MASK, x >> 32 & MASK


def _product(x: Tensor | int, number: int) -> tuple[Tensor | int, Tensor | int]:
    """The high and the low half of a product of 64 bits; int64 keeps them when it overflows."""
    low, high = _halves(x * number)
    return high, low


def uniform_of(word: Tensor) -> Tensor:
    """(w + 0.5) * 2 ** -32 in float32, of the low 32 bits w of each int64.

    w is rounded to float32 first, then the sum. What would be 1 is the largest number below it.
    """
    return ((word & MASK).to(torch.float32) + 0.5).mul(2.0**-32).clamp(max=BELOW_ONE)


def exponential_of(word: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """-log((w + 0.5) * 2 ** -32) of the low 32 bits w of each int64.

    Above 1/2 it is `log1p` of minus the distance from 1, which `uniform_of` has lost.
    """
    u, distance = uniform_of(word).to(dtype), uniform_of(~word).to(dtype)
    return torch.where(u < 0.5, -torch.log(u), -torch.log1p(-distance))

"""Token shift: a mixture of each token with the one before it in its sequence.

The tokens are the rows and, all of them, the table that `previous` chooses from. The table has the
last token of the call before as its first row. A sequence that begins here has -1.
"""

import torch

import htile

SIZE = 8192, 4096


@htile.rowwise
def token_shift(x, mix, previous: htile.PerRow, tokens: htile.Shared):
    before = torch.where(previous < 0, 0.0, tokens[previous])
    return x + mix * (before - x)


def arguments(m, n, dtype, device):
    tokens = torch.randn(m + 1, n, device=device).to(dtype)
    previous = torch.arange(m, device=device)
    previous[m // 2] = -1
    return tokens[1:], torch.rand(n, device=device).to(dtype), previous, tokens


def reference(x, mix, previous, tokens):
    padded = torch.nn.functional.pad(tokens.double(), (0, 0, 1, 0))  # -1 is the row of zeros
    before = torch.nn.functional.embedding(previous + 1, padded)
    return torch.lerp(x.double(), before, mix.double())

"""What a mixture of experts gives for a token: the weighted sum of its rows among all experts'.

The experts have worked on rows that were sorted by expert. `places` has the rows of each token.
"""

import torch

import htile

SIZE = 8192, 4096
CHOSEN = 8  # experts of a token


@htile.rowwise
def expert_rows(places: htile.Inner[1], weights: htile.Inner[1], rows: htile.Shared):
    return (weights[:, None] * rows[places]).sum(0).to(rows.dtype)


def arguments(m, n, dtype, device):
    rows = torch.randn(m * CHOSEN, n, device=device).to(dtype)
    places = torch.randperm(m * CHOSEN, device=device).view(m, CHOSEN)
    return places, torch.randn(m, CHOSEN, device=device).softmax(-1), rows


def reference(places, weights, rows):
    chosen = torch.nn.functional.embedding(places, rows.double())
    return torch.einsum("...k,...kn->...n", weights.double(), chosen)

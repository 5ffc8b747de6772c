"""The coefficients of hyper-connections from 24 numbers a row: two groups of 4 and a 4x4 matrix.

Rows and columns of the matrix are normalized in turn, until both add up to 1. The size of the
matrix is N here.
"""

import torch

import htile

SIZE = 65536, 4
SMALL = 4, 3


@htile.rowwise
def sinkhorn(x, scale, bias, streams: htile.Static = 4, rounds: htile.Static = 20):
    x = x * scale + bias
    read, write, mix = x.split((streams, streams, streams * streams))
    mix = torch.exp(mix.view(streams, streams))
    for _ in range(rounds):
        mix = mix / mix.sum(1, keepdim=True)
        mix = mix / mix.sum(0, keepdim=True)
    return torch.sigmoid(read), 2 * torch.sigmoid(write), mix


def arguments(m, n, dtype, device):
    scale, bias = torch.rand(2, n * n + 2 * n, device=device)
    return torch.randn(m, n * n + 2 * n, device=device), scale, bias, n


def reference(x, scale, bias, streams):
    x = torch.addcmul(bias.double(), x.double(), scale.double())
    log = x[..., 2 * streams :].unflatten(-1, (streams, streams))
    for _ in range(20):
        log = torch.log_softmax(torch.log_softmax(log, -1), -2)
    read, write = x[..., : 2 * streams].tensor_split(2, -1)
    return 1 / (1 + torch.exp(-read)), 2 / (1 + torch.exp(-write)), log.exp()

"""What goes from and to the four residual streams of manifold-constrained hyper-connections.

The first result is what the layer reads, a mixture of the streams. The second one is the streams
after the layer: a small matrix mixes them, and each gets its share of the layer's output.
"""

import torch

import htile

SIZE = 8192, 2048
STREAMS = 4


@htile.rowwise
def hyper_connections(
    streams: htile.Inner[2], output, read: htile.Inner[1], write: htile.Inner[1],
    mix: htile.Inner[2],
):  # fmt: skip
    mixed = (mix[:, :, None] * streams).sum(1) + write[:, None] * output
    return (read[:, None] * streams).sum(0), mixed


def arguments(m, n, dtype, device):
    streams = torch.randn(m, STREAMS, n, device=device).to(dtype)
    output = torch.randn(m, n, device=device).to(dtype)
    read, write = torch.rand(2, m, STREAMS, device=device)
    return streams, output, read, write, torch.rand(m, STREAMS, STREAMS, device=device)


def reference(streams, output, read, write, mix):
    streams = streams.double()
    mixed = mix.double() @ streams + write.double()[..., None] * output.double()[..., None, :]
    return (read.double()[..., None, :] @ streams)[..., 0, :], mixed

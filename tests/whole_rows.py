"""Functions whose products are reduced in the tiles that have all columns of a row, for tests."""

import torch
import torch.nn.functional as F

import htile
from tests import products
from tests.products import BF16


@htile.rowwise
def rms_after(x, W: htile.Matrix, weight):
    y = F.linear(x, W)
    return y * torch.rsqrt((y * y).mean() + 1e-6) * weight


@htile.rowwise
def norm_after(x, W: htile.Matrix, residual, weight, bias):
    y = F.linear(x, W) + residual
    return F.layer_norm(y, y.shape[-1:], weight, bias)


@htile.rowwise
def standardized(x, W: htile.Matrix):
    y = F.linear(x, W)
    return F.layer_norm(y, y.shape[-1:])


@htile.rowwise
def gated_norm(x, gate: htile.Matrix, up: htile.Matrix):
    h = F.silu(F.linear(x, gate)) * F.linear(x, up)
    return h / (h.abs().amax() + 1.0), h


@htile.rowwise
def softmax_until(x, W: htile.Matrix, length: htile.PerRow):
    z = F.linear(x, W)
    return torch.softmax(torch.where(torch.arange(z.shape[-1]) < length, z, -torch.inf), -1)


@htile.rowwise
def constant_norm(x, W: htile.Matrix, value: htile.PerRow):
    y = F.linear(x, W) * 0.0 + value
    return (y - y.mean()) * torch.rsqrt(y.var(correction=0) + 1e-5)


WHOLE = (products.softmax, rms_after, norm_after, standardized, gated_norm, softmax_until)
# Of these, several tiles share the columns of wider rows. The other one reads other rows.
SHARED = tuple(f for f in WHOLE if f is not norm_after)


def arguments(f, m, n, k, dtype=BF16, seed=0):
    """Arguments of one of these functions: m rows of k elements, and products of n."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=made) * scale).to(dtype)

    more = {
        rms_after: lambda: (normal(n),),
        norm_after: lambda: (normal(m, n), normal(n), normal(n)),
        gated_norm: lambda: (normal(n, k, scale=k**-0.5),),
        softmax_until: lambda: (torch.randint(1, n + 1, (m,), generator=made),),
        constant_norm: lambda: (torch.full((m,), 123.456),),
    }
    return normal(m, k), normal(n, k, scale=k**-0.5), *more.get(f, tuple)()

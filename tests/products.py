"""Functions with matrix products, and their arguments, for tests with and without a GPU."""

import torch
import torch.nn.functional as F

import htile

BF16, F16 = torch.bfloat16, torch.float16


@htile.rowwise
def linear(x, W: htile.Matrix):
    return F.linear(x, W)


@htile.rowwise
def matmul(x, W: htile.Matrix):
    return x @ W


@htile.rowwise
def gelu(x, W: htile.Matrix, bias):
    return F.gelu(F.linear(x, W, bias))


@htile.rowwise
def swiglu(x, gate: htile.Matrix, up: htile.Matrix):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@htile.rowwise
def packed_swiglu(x, W: htile.Matrix):
    gate, up = F.linear(x, W).chunk(2, -1)
    return F.silu(gate) * up


@htile.rowwise
def nll(h, head: htile.Matrix, label: htile.PerRow):
    z = F.linear(h, head)
    return z.logsumexp(-1) - z[label]


@htile.rowwise
def statistics(x, W: htile.Matrix, scale: htile.PerRow):
    z = F.linear(x, W) * scale
    return {"max": z.amax(), "min": z.amin(), "sum": z.sum(), "mean": z.mean(-1, keepdim=True)}


@htile.rowwise
def project(x, residual, W: htile.Matrix):
    h = x @ W + residual
    return h, (h * h).mean()


@htile.rowwise
def norm_linear(x, W: htile.Matrix, eps: float = 1e-6):
    return F.linear(x * torch.rsqrt((x * x).mean() + eps), W)


@htile.rowwise
def mlp(x, up: htile.Matrix, down: htile.Matrix):
    h = F.gelu(F.linear(x, up)).to(x.dtype)
    return F.linear(h, down) + x


@htile.rowwise
def softmax(x, W: htile.Matrix):
    return torch.softmax(F.linear(x, W), -1)


@htile.rowwise
def three(x, a: htile.Matrix, b: htile.Matrix, c: htile.Matrix):
    return F.linear(x, a) * F.linear(x, b) + F.linear(x, c)


@htile.rowwise
def turned(x, W: htile.Matrix):
    return x @ W.T + x.sum()


@htile.rowwise
def variance(x, W: htile.Matrix):
    return F.linear(x, W).var(-1)


@htile.rowwise
def bounded(x, W: htile.Matrix, cap: float = 30.0):
    return torch.tanh(F.linear(x, W) / cap) * cap


@htile.rowwise
def averaged(x, W: htile.Matrix, beta: float = 0.99999):
    """The difference of a float from 1 has digits that float32 has not."""
    z = F.linear(x, W) * (1 - beta)
    return z, z.amax()


@htile.rowwise
def masked(x, W: htile.Matrix, length: htile.PerRow):
    z = F.linear(x, W)
    return torch.where(torch.arange(z.shape[-1]) < length, F.silu(z), 0.0)


def arguments(f, m, n, k, dtype=BF16, device="cpu", seed=0):
    """Arguments of one of these functions: m rows of k elements, and products of n."""
    made = torch.Generator().manual_seed(seed)

    def normal(*shape, scale=1.0):
        return (torch.randn(shape, generator=made) * scale).to(device, dtype)

    x, weight, width = normal(m, k), normal(n, k, scale=k**-0.5), n
    more = {
        gelu: lambda: (normal(width),),
        swiglu: lambda: (normal(n, k, scale=k**-0.5),),
        nll: lambda: (torch.randint(-n, n, (m,), generator=made).to(device),),
        masked: lambda: (torch.randint(n + 1, (m,), generator=made).to(device),),
        statistics: lambda: (normal(m).float(),),
        mlp: lambda: (normal(k, n, scale=n**-0.5),),
        three: lambda: (normal(n, k, scale=k**-0.5), normal(n, k, scale=k**-0.5)),
    }
    if f is packed_swiglu:
        return x, normal(2 * n, k, scale=k**-0.5)
    if f is matmul:
        return x, normal(k, n, scale=k**-0.5)
    if f is project:
        return x, normal(m, n), normal(k, n, scale=k**-0.5)
    return x, weight, *more.get(f, tuple)()


def some_tiles(found):
    """Of each form of some tiles the narrowest and the widest, and two between them."""
    forms = {}
    for tile in found:
        form = tile.rows, tile.warps, tile.in_turns, tile.cluster, tile.parts
        forms.setdefault(form, []).append(tile)
    picked = []
    for k, of_form in enumerate(forms.values()):
        of_form.sort(key=lambda tile: tile.columns)
        odd = [t for t in of_form[1:-1] if t.columns % 16] or of_form[1:-1]
        even = [t for t in of_form[1:-1] if t not in odd] or odd
        between = [each[k % len(each)] for each in (odd, even) if each]
        picked += dict.fromkeys([of_form[0], *between, of_form[-1]])
    return picked


FUNCTIONS = (
    linear, matmul, gelu, swiglu, packed_swiglu, nll, statistics, project, norm_linear, mlp,
    softmax, three, turned, variance, bounded, masked, averaged,
)  # fmt: skip

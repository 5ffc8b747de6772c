"""Times functions with matrix products beside cuBLAS, and beside cuBLAS and a row kernel.

    python -m benchmarks.products [--suites product few fused vocabulary] [--rounds 15]

A ratio above 1 is faster than cuBLAS's bare product of the same operands, whose result has 16 bits.
Where a function does more than multiply, `pair` is the ratio of cuBLAS followed by HTile's row
kernel for the rest. Calls are captured in CUDA graphs, so that no time of the host is in them.
Tensors are bfloat16, and random normal.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
import torch.nn.functional as F

import htile
from htile.tune.timing import interleave

PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 4096), (8192, 4096, 14336),
            (2048, 4096, 4096), (3000, 5000, 6000))  # fmt: skip
FEW = (1, 16, 64, 128, 256, 512)  # rows
OF_FEW = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (128256, 4096), (11008, 5120))
FUSED = ((8192, 14336, 4096), (4096, 4096, 4096), (4096, 4096, 14336), (5000, 11008, 5120))
VOCABULARY = ((8192, 32000, 4096), (4096, 128256, 4096), (2048, 151936, 5120))
SUITES = ("product", "few", "fused", "vocabulary")


@htile.rowwise
def linear(x, W: htile.Matrix):
    return F.linear(x, W)


@htile.rowwise
def gelu_linear(x, W: htile.Matrix, bias):
    return F.gelu(F.linear(x, W, bias))


@htile.rowwise
def swiglu_linear(x, gate: htile.Matrix, up: htile.Matrix):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


@htile.rowwise
def norm_linear(x, W: htile.Matrix, eps: float = 1e-6):
    return F.linear(x * torch.rsqrt((x * x).mean() + eps), W)


@htile.rowwise
def residual_linear(x, W: htile.Matrix, residual):
    return F.linear(x, W) + residual


@htile.rowwise
def nll(h, head: htile.Matrix, label: htile.PerRow):
    z = F.linear(h, head)
    return z.logsumexp(-1) - z[label]


# The row kernels that follow cuBLAS.
gelu = htile.rowwise(lambda z, bias: F.gelu(z + bias))
swiglu = htile.rowwise(lambda gate, up: F.silu(gate) * up)
rmsnorm = htile.rowwise(lambda x, eps=1e-6: x * torch.rsqrt((x * x).mean() + eps))
added = htile.rowwise(lambda z, residual: z + residual)


@htile.rowwise
def loss(z, label: htile.PerRow):
    return z.logsumexp(-1) - z[label]


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def captured(call: Callable) -> Callable:
    """The call as the replay of a CUDA graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = call()
    return graph.replay


def ratios(calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """How much faster than the call `cublas` each other one is, and the microseconds of that."""
    times = interleave({name: captured(call) for name, call in calls.items()}, rounds)
    whole = median(times.pop("cublas"))
    return {"us": whole} | {name: whole / median(each) for name, each in times.items()}


def product(m: int, n: int, k: int) -> dict[str, Callable]:
    """The bare product, with both orders of the matrix in memory."""
    x, weight, out = normal(m, k), normal(n, k), normal(m, n)
    turned = weight.t().contiguous().t()
    return {
        "cublas": lambda: torch.mm(x, weight.t(), out=out),
        "htile": lambda: linear(x, weight),
        "htile (K, N)": lambda: linear(x, turned),
    }


def fused(m: int, n: int, k: int) -> dict[str, dict[str, Callable]]:
    """Functions of one product or two, each with cuBLAS and the row kernel that it replaces."""
    x, weight, up, bias = normal(m, k), normal(n, k), normal(n, k), normal(n)
    residual, both = normal(m, n), torch.cat([weight, up])
    out, wide = normal(m, n), normal(m, 2 * n)

    def multiplied(left=x):
        return torch.mm(left, weight.t(), out=out)

    def two():
        return torch.mm(x, both.t(), out=wide)

    return {
        "bias + gelu": {
            "cublas": multiplied, "htile": lambda: gelu_linear(x, weight, bias),
            "pair": lambda: gelu(multiplied(), bias),
        },
        "residual": {
            "cublas": multiplied, "htile": lambda: residual_linear(x, weight, residual),
            "pair": lambda: added(multiplied(), residual),
        },
        "swiglu": {
            "cublas": two, "htile": lambda: swiglu_linear(x, weight, up),
            "pair": lambda: swiglu(*two().chunk(2, -1)),
        },
        "rmsnorm before": {
            "cublas": multiplied, "htile": lambda: norm_linear(x, weight),
            "pair": lambda: multiplied(rmsnorm(x)),
        },
    }  # fmt: skip


def vocabulary(m: int, n: int, k: int) -> dict[str, Callable]:
    """A loss of each row of logits, which are never stored."""
    x, head, out = normal(m, k), normal(n, k), normal(m, n)
    labels = torch.randint(0, n, (m,), device="cuda")
    return {
        "cublas": lambda: torch.mm(x, head.t(), out=out),
        "htile": lambda: nll(x, head, labels),
        "pair": lambda: loss(torch.mm(x, head.t(), out=out), labels),
    }


def shown(title: str, size: tuple, found: dict[str, float]) -> None:
    each = [f"{found.get(name, float('nan')):.3f}" for name in ("htile", "htile (K, N)", "pair")]
    told = " | ".join(cell if cell != "nan" else "" for cell in each)
    print(f"| {title} | {'x'.join(map(str, size))} | {found['us']:.1f} | {told} |", flush=True)


def main() -> None:
    """Print a table of each suite."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--suites", nargs="+", choices=SUITES, default=SUITES)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a GPU\n")
    torch.manual_seed(0)
    print("| function | M x N x K | cuBLAS, us | HTile | HTile, W as (K, N) | pair |")
    print("|---|---|---|---|---|---|")
    for size in PRODUCTS if "product" in options.suites else ():
        shown("linear", size, ratios(product(*size), options.rounds))
    for n, k in OF_FEW if "few" in options.suites else ():
        for m in FEW:
            shown("linear", (m, n, k), ratios(product(m, n, k), options.rounds))
    for size in FUSED if "fused" in options.suites else ():
        for title, calls in fused(*size).items():
            shown(title, size, ratios(calls, options.rounds))
    for size in VOCABULARY if "vocabulary" in options.suites else ():
        shown("logsumexp - z[label]", size, ratios(vocabulary(*size), options.rounds))


if __name__ == "__main__":
    main()

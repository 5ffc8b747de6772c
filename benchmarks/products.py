"""Times functions with matrix products beside cuBLAS and other libraries.

    python -m benchmarks.products [--suite product few fused reduced vocabulary]
                                  [--contenders htile pair] [--rounds 15] [--seconds 300]

A ratio above 1 is faster than cuBLAS's bare product of the same operands, whose result has 16 bits.
`(K, N)` is the product of a matrix that lies so in memory, by HTile and by cuBLAS; both ratios are
beside cuBLAS's product of the matrix as (N, K).
Where a function does more than multiply, `pair` is the ratio of cuBLAS followed by HTile's row
kernel for the rest. Each result is compared with float64 first. A contender that is not installed,
fails or is wrong has a dash, and the reason goes to stderr. Calls are captured in CUDA graphs, so
that no time of the host is in them; those of liger and cut wait for the GPU and can not be. Tensors
are bfloat16, and random normal. For losses a second table has the memory that a call takes at its
peak, as a share of that of the logits in bfloat16.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

import torch
import torch.nn.functional as F

import htile
from benchmarks import product_peers as peers
from benchmarks.contenders import failures
from htile.tune.timing import interleave

PRODUCTS = ((4096, 4096, 4096), (8192, 8192, 8192), (8192, 28672, 4096), (8192, 4096, 14336),
            (2048, 4096, 4096), (3000, 5000, 6000))  # fmt: skip
FEW = (1, 16, 64, 128, 256, 512)  # rows
OF_FEW = ((4096, 4096), (28672, 4096), (4096, 14336), (8192, 8192), (128256, 4096), (11008, 5120))
FUSED = ((8192, 14336, 4096), (4096, 4096, 4096), (4096, 4096, 14336), (5000, 11008, 5120))
REDUCED = ((65536, 256, 128), (65536, 512, 64), (65536, 1024, 128), (65536, 2048, 128),
           (20000, 1536, 96), (4096, 2048, 128), (4096, 512, 64))  # fmt: skip
VOCABULARY = ((8192, 32000, 4096), (4096, 128256, 4096), (2048, 151936, 5120))
SUITES = ("product", "few", "fused", "reduced", "vocabulary")


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
def softmax_linear(x, W: htile.Matrix):
    return torch.softmax(F.linear(x, W), -1)


@htile.rowwise
def linear_norm(x, W: htile.Matrix, eps: float = 1e-6):
    y = F.linear(x, W)
    return y * torch.rsqrt((y * y).mean() + eps)


@htile.rowwise
def nll(h, head: htile.Matrix, label: htile.PerRow):
    z = F.linear(h, head)
    return z.logsumexp(-1) - z[label]


# The row kernels that follow cuBLAS.
gelu = htile.rowwise(lambda z, bias: F.gelu(z + bias))
swiglu = htile.rowwise(lambda gate, up: F.silu(gate) * up)
rmsnorm = htile.rowwise(lambda x, eps=1e-6: x * torch.rsqrt((x * x).mean() + eps))
softmax = htile.rowwise(lambda z: torch.softmax(z, -1))
added = htile.rowwise(lambda z, residual: z + residual)


@htile.rowwise
def loss(z, label: htile.PerRow):
    return z.logsumexp(-1) - z[label]


CONTENDERS = ("htile", "htile (K, N)", "cublas (K, N)", "pair", "compile", "quack",
              "quack tuned", "liger", "cut")  # fmt: skip
USUAL = ("htile", "htile (K, N)", "cublas (K, N)", "pair")
UNCAPTURED = ("liger", "cut")
SAMPLED = 64  # rows that are compared with float64
ERROR = {torch.bfloat16: 2.0**-6, torch.float32: 2.0**-8}  # of the largest magnitude of such a row
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True)
class Cell:
    """A function at one size.

    means: the function of whole tensors. arguments: of it. by_row: which of them have a row each.
    bare: cuBLAS's product. makers: for each contender what makes a call of the arguments.
    """

    title: str
    size: tuple[int, int, int]
    means: Callable
    arguments: tuple[torch.Tensor, ...]
    by_row: tuple[int, ...]
    bare: Callable
    makers: dict[str, Callable] = field(default_factory=dict)


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=torch.bfloat16)


def of(call: Callable) -> Callable[..., Callable]:
    """What makes a call of this function and some arguments."""
    return lambda *args: lambda: call(*args)


def product(m: int, n: int, k: int) -> Iterator[Cell]:
    """The bare product, with both orders of the matrix in memory."""
    x, weight, out = normal(m, k), normal(n, k), normal(m, n)
    turned = weight.t().contiguous().t()
    yield Cell("linear", (m, n, k), linear_means, (x, weight), (0,),
               lambda: torch.mm(x, weight.t(), out=out), {
        "htile": of(linear), "htile (K, N)": lambda x, weight: lambda: linear(x, turned),
        "cublas (K, N)": lambda x, weight: lambda: torch.mm(x, turned.t(), out=out),
        "compile": peers.compiled(linear_means), "quack": peers.quack_linear(False),
        "quack tuned": peers.quack_linear(True),
    })  # fmt: skip


def linear_means(x, weight):
    return F.linear(x, weight)


def gelu_means(x, weight, bias):
    return F.gelu(F.linear(x, weight, bias))


def residual_means(x, weight, residual):
    return F.linear(x, weight) + residual


def swiglu_means(x, gate, up):
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def norm_means(x, weight):
    wide = x if x.dtype is torch.float64 else x.float()
    scale = torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)
    return F.linear((wide * scale).to(x.dtype), weight)


def softmax_means(x, weight):
    z = F.linear(x, weight)
    return torch.softmax(z if z.dtype is torch.float64 else z.float(), -1).to(z.dtype)


def linear_norm_means(x, weight):
    z = F.linear(x, weight)
    wide = z if z.dtype is torch.float64 else z.float()
    return (wide * torch.rsqrt((wide * wide).mean(-1, keepdim=True) + 1e-6)).to(z.dtype)


def loss_means(h, head, label):
    z = F.linear(h, head)
    z = z if z.dtype is torch.float64 else z.float()
    return z.logsumexp(-1) - z.gather(-1, label[:, None])[:, 0]


def fused(m: int, n: int, k: int) -> Iterator[Cell]:
    """Functions of one product or two, each with cuBLAS and the row kernel that it replaces."""
    x, weight, up, bias = normal(m, k), normal(n, k), normal(n, k), normal(n)
    residual, both = normal(m, n), torch.cat([weight, up])
    out, wide, size = normal(m, n), normal(m, 2 * n), (m, n, k)

    def multiplied(left=x):
        return torch.mm(left, weight.t(), out=out)

    def two():
        return torch.mm(x, both.t(), out=wide)

    yield Cell("bias + gelu", size, gelu_means, (x, weight, bias), (0,), multiplied, {
        "htile": of(gelu_linear), "pair": lambda *_: lambda: gelu(multiplied(), bias),
        "compile": peers.compiled(gelu_means),
    })  # fmt: skip
    yield Cell("residual", size, residual_means, (x, weight, residual), (0, 2), multiplied, {
        "htile": of(residual_linear), "pair": lambda *_: lambda: added(multiplied(), residual),
        "compile": peers.compiled(residual_means), "quack": peers.quack_residual,
    })  # fmt: skip
    yield Cell("swiglu", size, swiglu_means, (x, weight, up), (0,), two, {
        "htile": of(swiglu_linear), "pair": lambda *_: lambda: swiglu(*two().chunk(2, -1)),
        "compile": peers.compiled(swiglu_means), "quack": peers.quack_swiglu,
    })  # fmt: skip
    yield Cell("rmsnorm before", size, norm_means, (x, weight), (0,), multiplied, {
        "htile": of(norm_linear), "pair": lambda *_: lambda: multiplied(rmsnorm(x)),
        "compile": peers.compiled(norm_means),
    })  # fmt: skip


def reduced(m: int, n: int, k: int) -> Iterator[Cell]:
    """Functions whose rows are reduced in the tiles that have all their columns."""
    x, weight, out = normal(m, k), normal(n, k).mul_(k**-0.5), normal(m, n)

    def bare():
        return torch.mm(x, weight.t(), out=out)

    for title, function, means, rows in (
        ("softmax", softmax_linear, softmax_means, softmax),
        ("rms norm", linear_norm, linear_norm_means, rmsnorm),
    ):  # fmt: skip
        yield Cell(title, (m, n, k), means, (x, weight), (0,), bare, {
            "htile": of(function), "pair": lambda *_, rows=rows: lambda: rows(bare()),
            "compile": peers.compiled(means),
        })  # fmt: skip


def vocabulary(m: int, n: int, k: int) -> Iterator[Cell]:
    """A loss of each row of logits, which are never stored."""
    x, head = normal(m, k), normal(n, k).mul_(k**-0.5)
    labels = torch.randint(0, n, (m,), device=DEVICE)

    def bare():
        return torch.mm(x, head.t())

    yield Cell("logsumexp - z[label]", (m, n, k), loss_means, (x, head, labels), (0, 2), bare, {
        "htile": of(nll), "pair": lambda *_: lambda: loss(bare(), labels),
        "compile": peers.compiled(loss_means), "quack": peers.quack_loss,
        "liger": peers.liger_loss, "cut": peers.cut_loss,
    })  # fmt: skip


def check(cell: Cell, result: torch.Tensor) -> None:
    """Raise RuntimeError unless sampled rows of a result are near those in float64."""
    rows = torch.linspace(0, cell.size[0] - 1, min(SAMPLED, cell.size[0]), device=DEVICE).long()
    args = [v[rows] if k in cell.by_row else v for k, v in enumerate(cell.arguments)]
    exact = cell.means(*(v.double() if v.is_floating_point() else v for v in args))
    found = result[rows]
    if found.shape != exact.shape:
        raise RuntimeError(f"wrong: shape {tuple(found.shape)}, not {tuple(exact.shape)}")
    error = (found.double() - exact).abs()
    error = (error / exact.abs().amax(-1, keepdim=True)).max().item()
    if not error <= ERROR[found.dtype]:
        raise RuntimeError(f"wrong: an error of {error:.2g} of the row's largest magnitude")


def calls_of(cell: Cell, contenders: list[str]) -> dict[str, Callable]:
    """The calls of those contenders that are there and right."""
    found = {}
    for name in contenders:
        if name not in cell.makers:
            continue
        try:
            call = cell.makers[name](*cell.arguments)
            check(cell, call())
            found[name] = call
        except failures() as error:
            complain(cell, name, error)
    return found


def complain(cell: Cell, name: str, error: Exception) -> None:
    """Say why a contender is left out."""
    said = str(error).strip().splitlines() or [""]
    print(f"{cell.title} {cell.size}: {name}: {type(error).__name__}: {said[0]}", file=sys.stderr)


def captured(call: Callable) -> Callable:
    """The call as the replay of a CUDA graph."""
    for _ in range(2):
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        graph.kept = call()
    return graph.replay


def ratios(cell: Cell, calls: dict[str, Callable], rounds: int) -> dict[str, float]:
    """How much faster than cuBLAS each call is, and the microseconds of cuBLAS."""
    timed = {"cublas": captured(cell.bare)}
    for name, call in calls.items():
        try:
            timed[name] = call if name in UNCAPTURED else captured(call)
        except failures() as error:
            complain(cell, name, error)
    times = interleave(timed, rounds)
    whole = median(times.pop("cublas"))
    return {"us": whole} | {name: whole / median(each) for name, each in times.items()}


def memory(cell: Cell, call: Callable) -> float:
    """The bytes that a call takes at its peak, as a share of those of the logits."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    del kept
    return taken / (2 * cell.size[0] * cell.size[1])


def line(cell: Cell, first: str, found: dict[str, float], names: list[str], form: str) -> str:
    """A line of a table: a dash for what could not be measured, nothing for what there is not."""
    told = [f"{found[name]:{form}}" if name in found else "–" if name in cell.makers else ""
            for name in names]  # fmt: skip
    return f"| {' | '.join([cell.title, 'x'.join(map(str, cell.size)), first, *told])} |"


def cells(suite: str) -> Iterator[Cell]:
    """The cells of a suite, one after the other, because their tensors are large."""
    few = [(m, n, k) for n, k in OF_FEW for m in FEW]
    made = {"product": (product, PRODUCTS), "few": (product, few), "fused": (fused, FUSED),
            "reduced": (reduced, REDUCED), "vocabulary": (vocabulary, VOCABULARY)}  # fmt: skip
    make, sizes = made[suite]
    for size in sizes:
        yield from make(*size)


def main(arguments: list[str] | None = None) -> None:
    """Print a table, and one of memory for losses."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.products",
                                     description=__doc__.split("\n")[0])  # fmt: skip
    parser.add_argument("--suite", nargs="+", choices=SUITES, default=SUITES, metavar="SUITE",
                        help=f"of {', '.join(SUITES)} (all)")  # fmt: skip
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=USUAL,
                        metavar="NAME", help=f"of {', '.join(CONTENDERS)}")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--seconds", type=float, help="begin no cell after so many seconds")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a GPU\n")
    torch.manual_seed(0)
    begun, names, of_memory = time.monotonic(), list(options.contenders), []
    print(f"| function | M x N x K | cuBLAS, us | {' | '.join(names)} |")
    print("|---" * (3 + len(names)) + "|", flush=True)
    for cell in (cell for suite in options.suite for cell in cells(suite)):
        if options.seconds is not None and time.monotonic() - begun > options.seconds:
            print(f"{options.seconds:.0f} s are over", file=sys.stderr)
            break
        calls = calls_of(cell, names)
        found = ratios(cell, calls, options.rounds)
        print(line(cell, f"{found.pop('us'):.1f}", found, names, ".3f"), flush=True)
        if cell.means is loss_means:
            shares = {name: memory(cell, call) for name, call in calls.items()}
            of_memory.append(line(cell, "", shares, names, ".1%"))
    if of_memory:
        print("\nThe memory of a call at its peak, as a share of the logits in bfloat16:\n")
        print("\n".join(of_memory))


if __name__ == "__main__":
    main()

"""Times backward passes beside those of other libraries, and beside an addition of the same rows.

    python -m benchmarks.training [--contenders htile compile quack liger] [--shapes 32768x4096]
    python -m benchmarks.training --memory [--json FILE]

A share of 1 means that a backward pass takes as long as an addition of two tensors that moves as
many bytes: those of the rows that it must read, of the cotangent, and of the gradients of rows. The
gradients of weights and biases are part of each pass, too. A pass is `torch.autograd.grad`,
captured in a CUDA graph, so that no time of the host is in it. Tensors are bfloat16.

With `--memory` it measures the peak memory of a forward and a backward pass instead.

The host's time of both passes is what `python -m benchmarks.calls` measures.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.nn.functional as F

import htile
from benchmarks.contenders import failures
from htile.tune.timing import interleave

SHAPES = (
    (32768, 1024), (32768, 4096), (16384, 8192), (8192, 16384), (4096, 32768), (20000, 5120),
    (12000, 11008),
)  # fmt: skip
CONTENDERS = ("htile", "compile", "quack", "liger")
OF_MEMORY = ("htile", "torch", "compile", "quack", "liger")
LOSS = "cross_entropy"  # of which only memory is measured
CLOSE = 0.02  # of the largest gradient: who is farther from float64 takes no part
DTYPE = torch.bfloat16


def softmax(x):
    return torch.softmax(x, -1)


def log_softmax(x):
    return torch.log_softmax(x, -1)


def rmsnorm(x, weight):
    return F.rms_norm(x, x.shape[-1:], weight, 1e-6)


def layernorm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias, 1e-5)


def swiglu(gate, up):
    return F.silu(gate) * up


def entropy(x):
    return -(torch.softmax(x, -1) * torch.log_softmax(x, -1)).sum(-1)


def divergence(x, target):
    return F.kl_div(x.log_softmax(-1), target.softmax(-1), reduction="none").sum(-1)


def soft_cross_entropy(x, target):
    return -(target.softmax(-1) * x.log_softmax(-1)).sum(-1)


@dataclass(frozen=True)
class Kernel:
    """A function of rows, how many of its arguments are vectors, and who else has it.

    reduces: whether its result is one value of each row, and not a row.
    """

    function: Callable
    rows: int
    vectors: int
    others: dict[str, str]
    reduces: bool = False

    def arguments(self, m: int, n: int) -> list[torch.Tensor]:
        """Rows (m, n), then vectors (n,)."""
        made = [torch.randn(m, n, device="cuda", dtype=DTYPE) for _ in range(self.rows)]
        return made + [torch.rand(n, device="cuda", dtype=DTYPE) for _ in range(self.vectors)]


KERNELS = {
    "softmax": Kernel(softmax, 1, 0, {"quack": "softmax", "liger": "LigerSoftmaxFunction"}),
    "log_softmax": Kernel(log_softmax, 1, 0, {}),
    "swiglu": Kernel(swiglu, 2, 0, {"liger": "LigerSiLUMulFunction"}),
    "rmsnorm": Kernel(rmsnorm, 1, 1, {"quack": "rmsnorm", "liger": "LigerRMSNormFunction"}),
    "layernorm": Kernel(layernorm, 1, 2, {"liger": "LigerLayerNormFunction"}),
    "entropy": Kernel(entropy, 1, 0, {}, reduces=True),
    "divergence": Kernel(divergence, 2, 0, {}, reduces=True),
    "soft_cross_entropy": Kernel(soft_cross_entropy, 2, 0, {}, reduces=True),
}


def forward(kernel: Kernel, contender: str) -> Callable:
    """The function whose backward pass is timed. Raises KeyError or ImportError if there is none.
    """
    if contender == "htile":
        return htile.rowwise(kernel.function)
    if contender == "torch":
        return kernel.function
    if contender == "compile":
        return torch.compile(kernel.function, dynamic=False)
    name = kernel.others[contender]
    if contender == "quack":
        import quack

        of = {"rmsnorm": lambda x, w: quack.rmsnorm(x, w, eps=1e-6)}
        return of.get(name) or getattr(quack, name)
    from liger_kernel import ops

    apply = getattr(ops, name).apply
    more = {
        "LigerRMSNormFunction": lambda x, w: apply(x, w, 1e-6, 0.0, "llama", False),
        "LigerLayerNormFunction": lambda x, w, b: apply(x, w, b, 1e-5),
    }
    return more.get(name, apply)


def captured(function: Callable, args: list, cotangent: torch.Tensor) -> torch.cuda.CUDAGraph:
    """A graph of the backward pass, and the gradients that it writes."""
    leaves = [arg.detach().requires_grad_() for arg in args]
    side = torch.cuda.Stream()  # autograd runs a backward pass on the stream of its forward pass
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        result = function(*leaves)
        for _ in range(3):
            torch.autograd.grad(result, leaves, cotangent, retain_graph=True)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        graph.found = torch.autograd.grad(result, leaves, cotangent, retain_graph=True)
    graph.kept = leaves, result
    return graph


def is_right(graph: torch.cuda.CUDAGraph, right: list[torch.Tensor]) -> bool:
    graph.replay()
    torch.cuda.synchronize()
    pairs = zip(graph.found, right, strict=True)
    return all((a.double() - b).abs().max() <= CLOSE * b.abs().max() for a, b in pairs)


def shares(name: str, m: int, n: int, contenders: list[str], rounds: int) -> dict[str, float]:
    """Each contender's share of the speed of an addition of as many bytes."""
    torch.manual_seed(0)
    kernel = KERNELS[name]
    args = kernel.arguments(m, n)
    other = torch.randn(m, n, device="cuda", dtype=DTYPE)
    cotangent = other[:, 0].contiguous() if kernel.reduces else other
    wide = [arg.double().requires_grad_() for arg in args]
    right = torch.autograd.grad(kernel.function(*wide), wide, cotangent.double())
    graphs = {}
    for contender in contenders:
        try:
            graph = captured(forward(kernel, contender), args, cotangent)
        except failures() as error:
            print(f"  {contender} takes no part in {name} {m}x{n}: {str(error)[:120]}")
            continue
        if is_right(graph, right):
            graphs[contender] = graph
        else:
            print(f"  {contender} is wrong in {name} {m}x{n}")
    del right, wide
    torch.cuda.empty_cache()
    x, out = args[0], torch.empty_like(args[0])
    runs = {contender: graph.replay for contender, graph in graphs.items()}
    times = interleave(runs | {"add": lambda: torch.add(x, other, out=out)}, rounds)
    moved = 2 * kernel.rows + (not kernel.reduces)  # rows of the pass; the addition moves three
    limit = median(times.pop("add")) * moved / 3
    return {contender: limit / median(found) for contender, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.training", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--contenders", nargs="+", choices=OF_MEMORY)
    parser.add_argument("--kernels", nargs="+", choices=[*KERNELS, LOSS])
    parser.add_argument("--shapes", nargs="+", help="such as 32768x4096")
    parser.add_argument("--memory", action="store_true", help="measure memory in place of time")
    parser.add_argument("--json", type=Path, help="a file for the bytes, with --memory")
    options = parser.parse_args()
    given = options.shapes and [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    if options.memory:
        from benchmarks import training_memory  # which takes what is above

        names = options.kernels or [*KERNELS, LOSS]
        who = options.contenders or OF_MEMORY
        training_memory.main(names, given or training_memory.SHAPES, who, options.json)
        return
    options.contenders = options.contenders or [*CONTENDERS]
    options.kernels = options.kernels or [*KERNELS]
    if LOSS in options.kernels:
        parser.error(f"of {LOSS} only --memory is measured")
    print(f"| backward of | rows x N | {' | '.join(options.contenders)} |")
    print(f"|---|---|{'---|' * len(options.contenders)}")
    for name in options.kernels:
        for m, n in given or SHAPES:
            found = shares(name, m, n, options.contenders, options.rounds)
            texts = [f"{found[c]:.2f}" if c in found else "–" for c in options.contenders]
            print(f"| {name} | {m}x{n} | {' | '.join(texts)} |", flush=True)


if __name__ == "__main__":
    main()

"""Compile times: the first call at each N, and of functions of more and more operations.

Each contender runs in a fresh process with empty caches; it compiles one kernel first, so that
imports are not counted. `python -m benchmarks.compile_time CONTENDER KERNEL N...` is that process;
in place of a kernel `chain` takes numbers of operations. Without a GPU only htile takes part: it
compiles for sm_90a.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path

import torch

import htile
from benchmarks import fresh
from benchmarks.cell import reason
from benchmarks.contenders import build, failures
from benchmarks.kernels import KERNELS, Kernel
from benchmarks.results import Job, key, record

ROUNDS = 3
KERNEL_NAMES = ("softmax", "layernorm")
SIZES = (256, 1024, 4096, 8192, 16384, 32768, 131072, 262144)
OPERATIONS = (10, 50, 100, 250, 500)
CONTENDERS = ("htile", "quack", "liger", "compile")
CHAINED = ("htile", "compile")
WARM_UP = {"chain": 5}  # elsewhere N = 1000


def chain(operations: int) -> Kernel:
    """About so many operations over a row and a column: one reduction, the rest elementwise."""

    def function(x, w):
        y = x
        for k in range(operations // 5):
            y = torch.tanh(y * w) + x * (k + 1.5)
        return y - y.amax(-1, keepdim=True)

    def arguments(m, n, dtype, device):
        return torch.empty(m, n, dtype=dtype, device=device), torch.empty(
            n, dtype=dtype, device=device
        )

    return Kernel("chain", htile.rowwise(function), arguments, function, ("row", "column"))


def first_call(contender: str, kernel: Kernel, n: int) -> float:
    """Seconds of the first call at 64 rows of N, the GPU's work included, which is little."""
    on_gpu = torch.cuda.is_available()
    args = kernel.arguments(64, n, torch.bfloat16, "cuda" if on_gpu else "meta")
    with torch.no_grad():
        start = time.perf_counter()
        if on_gpu:
            build(contender, kernel, args)()
            torch.cuda.synchronize()
        else:
            kernel.function.inspect(*args).artifact  # noqa: B018 (compiled when it is asked for)
        return time.perf_counter() - start


def child(contender: str, kernel: str, sizes: list[int]) -> None:
    """Print [size, seconds or why not] for each size."""
    failure = failures()
    for size in (WARM_UP.get(kernel, 1000), *sizes):
        try:
            subject = chain(size) if kernel == "chain" else KERNELS[kernel]
            took = first_call(contender, subject, 4096 if kernel == "chain" else size)
        except failure as error:
            took = reason(error)
        if contender == "compile":
            torch._dynamo.reset()
        print(json.dumps([size, took]), flush=True)


def measure(kernel: str, sizes: tuple[int, ...], names: tuple[str, ...], rounds: int, say):
    """A record for each size, in seconds."""
    found: dict[int, dict] = {size: {} for size in sizes}
    for name in names:
        for k in range(rounds):
            say(f"{name}, process {k + 1} of {rounds}")
            with tempfile.TemporaryDirectory(prefix="htile-bench-") as folder:
                command = ["-m", "benchmarks.compile_time", name, kernel, *map(str, sizes)]
                try:
                    rows = dict(fresh.python(command, Path(folder)))
                except RuntimeError as error:
                    rows = dict.fromkeys(sizes, str(error))
            for size in sizes:
                if isinstance(rows[size], str):
                    found[size][name] = {"error": rows[size]}
                else:
                    found[size].setdefault(name, {"times": []})["times"].append(rows[size])
            if any(isinstance(took, str) for took in rows.values()):
                break  # it would fail again
    return [record(_key(kernel, size), results, "s") for size, results in found.items()]


def _key(kernel: str, size: int) -> tuple:
    if kernel == "chain":
        return key("compile_time", "chain", "bf16", 64, 4096, f"{size} operations")
    return key("compile_time", kernel, "bf16", 64, size)


def jobs(options) -> list[Job]:
    """One job for each kernel over N, and one over the number of operations."""
    on_gpu = torch.cuda.is_available()
    asked = options.contenders or CONTENDERS
    rounds = options.rounds or ROUNDS
    sizes = tuple(dict.fromkeys(n for _, n in options.cells)) if options.cells else SIZES
    listed = []
    for kernel in (*(options.kernels or KERNEL_NAMES), "chain"):
        able = CHAINED if kernel == "chain" else CONTENDERS
        names = tuple(n for n in asked if n in able and (on_gpu or n == "htile"))
        points = OPERATIONS if kernel == "chain" else sizes
        if names:
            keys = tuple(_key(kernel, size) for size in points)
            run = lambda say, a=(kernel, points, names, rounds): measure(*a, say)  # noqa: E731
            listed.append(Job(f"compile_time {kernel}", keys, names, run))
    return listed


if __name__ == "__main__":
    child(sys.argv[1], sys.argv[2], [int(size) for size in sys.argv[3:]])

"""The host's time of calls: for inference, for a forward and a backward pass, and of products.

    python -m benchmarks.calls [--contenders htile torch compile quack liger] [--kernels rmsnorm]
    python -m benchmarks.calls --idle

The first measures on a GPU, with rows so few that the host never waits for it. With `--idle` no GPU
is needed: kernels do nothing, and torch's own functions get no rows, so what is measured is Python,
torch's dispatcher and autograd. `compiled` is one more call inside a function that torch.compile
has compiled. Times are microseconds: the median of the rounds, or with `--idle` the time that a
tenth of them does not exceed, because other work on the machine adds to the rest.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F

import htile
from benchmarks import timing
from benchmarks.contenders import failures
from benchmarks.idle import idle_gpu, keep_memory
from benchmarks.training import DTYPE, KERNELS, forward
from htile.tune.timing import turns

ROWS, N = 8, 4096  # so few that the host waits for no GPU
CALLS = 100  # of a round
CONTENDERS = ("htile", "torch", "compile", "quack", "liger")
IDLE = ("htile", "torch")  # the contenders that need no GPU
CHAIN = 9  # calls inside one compiled function
FAST = 0.1  # the quantile that is shown of times of an idle GPU

Runs = dict[str, Callable[[], object]]


@htile.rowwise
def linear(x, W: htile.Matrix):
    return F.linear(x, W)


@htile.rowwise
def gelu_linear(x, W: htile.Matrix):
    return F.gelu(F.linear(x, W))


@htile.rowwise
def nll(x, W: htile.Matrix, label: htile.PerRow):
    logits = F.linear(x, W)
    return logits.logsumexp(-1) - logits[label]


PRODUCTS = {"linear": linear, "gelu_linear": gelu_linear, "nll": nll}


def passes(name: str, contender: str, device: str) -> Runs:
    """The calls of one function by what they do: inference, forward, and both passes."""
    kernel = KERNELS[name]
    rows = 0 if device == "cpu" and contender == "torch" else ROWS
    shapes = [(rows, N)] * kernel.rows + [(N,)] * kernel.vectors
    args = [torch.rand(shape, device=device, dtype=DTYPE) for shape in shapes]
    leaves = [arg.clone().requires_grad_() for arg in args]
    cotangent = torch.rand(rows, N, device=device, dtype=DTYPE)
    function = forward(kernel, contender)
    return {
        "inference": partial(function, *args),
        "forward": partial(function, *leaves),
        "both": lambda: torch.autograd.grad(function(*leaves), leaves, cotangent),
    }


def products(contender: str, device: str) -> Runs:
    """The calls of functions with products, beside torch's own product."""
    rows = 0 if device == "cpu" and contender == "torch" else ROWS
    x, W = (torch.rand(m, N, device=device, dtype=DTYPE) for m in (rows, N))
    label = torch.zeros(rows, device=device, dtype=torch.int64)
    if contender == "torch":
        return {"linear": partial(F.linear, x, W)}
    given = {name: (x, W, label)[: len(f._signature.names)] for name, f in PRODUCTS.items()}
    return {name: partial(f, *given[name]) for name, f in PRODUCTS.items()}


def compiled(device: str) -> Runs:
    """Functions that torch.compile has compiled, with one call of a row-wise one and with more."""
    norm = htile.rowwise(KERNELS["rmsnorm"].function)
    x, weight = torch.rand(ROWS, N, device=device), torch.rand(N, device=device)

    def chain(count: int) -> Callable[[], object]:
        def calls(x, weight):
            for _ in range(count):
                x = norm(x, weight)
            return x

        return partial(torch.compile(calls, dynamic=False), x, weight)

    return {"one": chain(1), "more": chain(CHAIN)}


def measured(contenders: dict[str, Runs], rounds: int, is_idle: bool) -> dict[str, dict]:
    """Microseconds a call, by contender and by what it does. All take turns."""
    flat = {(c, what): run for c, runs in contenders.items() for what, run in runs.items()}
    ready = {}
    for key, run in flat.items():
        try:
            for _ in range(3):
                run()
            ready[key] = run
        except failures() as error:
            print(f"  {key[0]} takes no part in {key[1]}: {str(error)[:120]}")
    times = on_host(ready, rounds) if is_idle else timing.host(ready, rounds, CALLS)
    quantile = FAST if is_idle else 0.5
    found: dict[str, dict] = {c: {} for c in contenders}
    for (contender, what), each in times.items():
        found[contender][what] = sorted(each)[int(quantile * len(each))]
    return found


def on_host(runs: Runs, rounds: int) -> dict:
    """As `timing.host`, by the time that this thread computes: nothing runs elsewhere."""
    times = {name: [] for name in runs}
    gc.disable()
    for name, counts in turns(runs, rounds):
        start = time.thread_time_ns()
        for _ in range(CALLS):
            runs[name]()
        if counts:
            times[name].append((time.thread_time_ns() - start) / CALLS / 1e3)
    gc.enable()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.calls", description=__doc__)
    parser.add_argument("--idle", action="store_true", help="without a GPU")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS)
    every = [*KERNELS, "products", "compiled"]
    parser.add_argument("--kernels", nargs="+", choices=every, default=every)
    parser.add_argument("--json", type=Path, help="a file for the figures")
    options = parser.parse_args()
    device = "cpu" if options.idle else "cuda"
    contenders = options.contenders or (IDLE if options.idle else CONTENDERS)
    results = {}
    if options.idle:
        torch.set_num_threads(1)
        keep_memory()
    with idle_gpu() if options.idle else nullcontext():
        for name in options.kernels:
            results[name] = _of(name, contenders, device, options)
            for contender, found in results[name].items():
                figures = ", ".join(f"{what} {spent:.1f}" for what, spent in found.items())
                print(f"{name:12s} {contender:8s} {figures}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1), encoding="utf-8")


def _of(name: str, contenders: tuple[str, ...], device: str, options) -> dict[str, dict]:
    """The microseconds of one line of the table, by contender."""
    if name == "compiled":
        found = measured({"htile": compiled(device)}, options.rounds, options.idle)["htile"]
        return {"htile": {"one more call": (found["more"] - found["one"]) / (CHAIN - 1)}}
    runs = {}
    for contender in contenders:
        if name == "products" and contender not in IDLE:
            continue
        try:
            make = partial(products, contender) if name == "products" else partial(
                passes, name, contender)  # fmt: skip
            runs[contender] = make(device)
        except failures() as error:
            print(f"  {contender} takes no part in {name}: {str(error)[:120]}")
    return measured(runs, options.rounds, options.idle)


if __name__ == "__main__":
    main()

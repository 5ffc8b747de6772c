"""Times `topk` of held rows, whose ranks come of one stage, beside a reduction for each rank.

    python -m benchmarks.ranks [--rounds 11] [--out FILE]
    python -m benchmarks.ranks --beside-torch

The second form times long rows beside `torch.topk` alone: normal numbers, numbers of which many are
equal, sorted ones, and smooth ones.

All kernels take turns with a copy of the same bytes, each with a cold L2. The results of both forms
are compared with torch's stable sort of the same rows first. `torch.topk` is timed where it fits.
"""

from __future__ import annotations

import argparse
import functools
import itertools
from collections.abc import Callable
from statistics import median
from unittest.mock import patch

import torch
from torch.utils import _pytree as pytree

import htile
from benchmarks.limit import copy_of
from examples import gallery
from htile.build.compile import building
from htile.lower import work
from htile.tune.timing import interleave

ARCH = "sm_90a"
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
BYTES = 64 << 20  # of what a kernel reads
CELLS = (
    (64, 8, BF16), (256, 1, BF16), (256, 2, BF16), (256, 8, BF16), (256, 8, F16), (256, 8, F32),
    (256, 64, F32), (1000, 8, BF16), (1024, 8, F32), (4096, 1, BF16), (4096, 2, BF16),
    (4096, 8, BF16), (4096, 8, F32), (4096, 64, BF16), (10007, 8, BF16), (16384, 8, BF16),
    (32768, 8, BF16), (8192, 50, BF16), (32000, 20, BF16), (32000, 50, F32), (50257, 50, BF16),
    (128256, 8, BF16), (151936, 50, BF16), (151936, 64, BF16),
)  # fmt: skip
LONG = ((8192, 2048), (32000, 1024), (50257, 1024), (151936, 512))  # elements, and rows
KERNELS = (
    "router", "router_scores", "grouped_router", "hash_router", "router_quantized", "topk_softmax",
    "sampling_probabilities",
)  # fmt: skip


# Other plans of some cells: how many threads work on a row.
THREADS = {
    (256, 8, BF16): (4, 16, 32), (256, 8, F32): (8, 32), (4096, 8, BF16): (64, 256),
    (4096, 8, F32): (128, 512), (256, 64, F32): (16, 64),
}  # fmt: skip


def top() -> Callable:
    """A new function each time, which shares no kernel with another."""

    @htile.rowwise
    def top(x, k: htile.Static):
        return tuple(x.topk(k))

    return top


def forms(make: Callable[[], Callable], args: tuple, options: dict) -> dict:
    """The function and what it is compiled from, in each form."""
    found = {}
    for name, chains in (("stage", work.chains), ("rounds", no_chains)):
        with patch.object(work, "chains", chains):
            f = make()
            kernel = f.inspect(*args, arch=ARCH, **options)
            found[name] = f, (kernel.source, kernel.lowered.function, ARCH)
    return found


def planned(cell: tuple, args: tuple) -> dict:
    """The same of one stage with other plans."""
    found = {}
    for threads in THREADS.get(cell, ()):
        f = top().with_plan(form="held", threads_per_row=threads, cluster_n=1)
        kernel = f.inspect(*args, arch=ARCH)
        found[f"{threads} threads"] = f, (kernel.source, kernel.lowered.function, ARCH)
    return found


def again(name: str) -> Callable:
    """A function of the gallery that shares no kernel with another."""
    return htile.rowwise(getattr(gallery.load(name), name).__wrapped__)


def order(x: torch.Tensor) -> torch.Tensor:
    """The indices in order: of equal elements the first one first, NaN as the largest."""
    keys = x.double()
    keys = torch.where(keys.isnan(), 1e300, keys.clamp(-1e200, 1e200)) + 0.0
    return torch.sort(-keys, dim=-1, stable=True).indices


def check(x: torch.Tensor, k: int, values: torch.Tensor, indices: torch.Tensor) -> str:
    rows = slice(0, 512)
    expected = order(x[rows])[:, :k]
    is_right = torch.equal(indices[rows], expected)
    gathered = x[rows].gather(1, expected).to(values.dtype)
    same = torch.allclose(values[rows], gathered, rtol=0, atol=0, equal_nan=True)
    return "right" if is_right and same else "WRONG"


def rows(m: int, n: int, dtype: torch.dtype) -> torch.Tensor:
    """Half of the rows have many equal elements, infinities and NaN of both signs."""
    x = torch.randn(m, n, device="cuda")
    rough = (x[1::2] * 8).round() / 4
    rough = torch.where(torch.rand_like(rough) < 1 / n, torch.inf, rough)
    rough = torch.where(torch.rand_like(rough) < 0.3 / n, torch.nan, rough)
    rough = torch.where(torch.rand_like(rough) < 0.3 / n, -torch.tensor(torch.nan), rough)
    x[1::2] = rough
    x[3 % m], x[5 % m] = -torch.inf, torch.nan
    return x.to(dtype)


def numbers(x: torch.Tensor) -> torch.Tensor:
    """What tells whether two results are the same: any NaN is as good as another."""
    return x.float().nan_to_num(nan=12345.0) if x.is_floating_point() else x


def line(label: str, us: dict[str, float], verdict: str) -> str:
    share = us["copy"] / us["stage"]
    before = us["copy"] / us["rounds"]
    eager = f"{us['torch']:.1f}" if "torch" in us else ""
    return (
        f"| {label} | {us['rounds']:.1f} | {us['stage']:.1f} | {us['rounds'] / us['stage']:.2f} | "
        f"{before:.2f} | {share:.2f} | {eager} | {verdict} |"
    )


def beside_torch(rounds: int) -> None:
    """Microseconds of some batches of long rows."""
    for k, (n, m) in itertools.product((8, 20, 50, 64), LONG):
        x, f = torch.randn(m, n, device="cuda").to(BF16), top()
        at = torch.linspace(0, 50, n, device="cuda")
        batches = {
            "HTile": x,
            "of equal numbers": (x * 8).round() / 4,
            "sorted": x.sort(-1, descending=True).values,
            "smooth": (torch.sin(at) + 0.1 * torch.sin(7.3 * at)).to(BF16).repeat(m, 1),
        }
        calls = {"torch.topk": functools.partial(torch.topk, x, k)}
        for name, each in batches.items():
            values, indices = f(each, k)
            expected = each.topk(k).values
            assert torch.equal(values, expected.to(values.dtype))
            assert torch.equal(each.gather(1, indices), expected)
            calls[name] = functools.partial(f, each, k)
        us = {name: round(median(each), 1) for name, each in interleave(calls, rounds).items()}
        print(f"top-{k} of {m} rows of {n}: {us}", flush=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ranks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--out", help="a file for the table")
    parser.add_argument("--beside-torch", action="store_true", help="time long rows only")
    options = parser.parse_args(arguments)
    if options.beside_torch:
        beside_torch(options.rounds)
        return
    lines = []

    def say(text: str) -> None:
        print(text, flush=True)
        lines.append(text)

    cells = []
    for n, k, dtype in CELLS:
        m = BYTES // (n * dtype.itemsize)
        args = (torch.empty(m, n, dtype=dtype, device="meta"), k)
        made = forms(top, args, {}) | planned((n, k, dtype), args)
        cells.append((f"top-{k} of {n} {str(dtype)[6:]}", made, (m, n, k, dtype)))
    for name in KERNELS:
        module = gallery.load(name)
        m, n = module.SIZE
        args = module.arguments(m, n, BF16, "meta")
        for variant in gallery.variants(name):
            label = " ".join([name, *(f"{key}={value}" for key, value in variant.items())])
            made = forms(functools.partial(again, name), args, variant)
            cells.append((label, made, (name, variant)))
    say("| | rounds, µs | one stage, µs | ratio | share of a copy before | now | torch.topk | |")
    say("|---|---|---|---|---|---|---|---|")
    requests = {(i, form): each[1] for i, (_, made, _) in enumerate(cells)
                for form, each in made.items()}  # fmt: skip
    with building([*dict.fromkeys(requests.values())]) as built:
        for i, (label, made, of) in enumerate(cells):
            for form in made:
                built(requests[i, form])
            contenders, verdict = {}, ""
            if len(of) == 4:
                m, n, k, dtype = of
                args, variant = (rows(m, n, dtype), k), {}
                contenders["torch"] = functools.partial(torch.topk, args[0], k)
            else:
                name, variant = of
                module = gallery.load(name)
                args = module.arguments(*module.SIZE, BF16, "cuda")
            results = {}
            for form, (f, _) in made.items():
                with patch.object(work, "chains", no_chains if form == "rounds" else work.chains):
                    results[form] = outs = f(*args, **variant)
                    contenders[form] = functools.partial(f, *args, **variant, out=outs)
                    contenders[form]()  # which plans nothing anew later
            first, *others = (pytree.tree_leaves(each) for each in results.values())
            pairs = [pair for other in others for pair in zip(first, other, strict=True)]
            same = all(torch.equal(numbers(a), numbers(b)) for a, b in pairs)
            verdict = "as rounds" if same else "NOT as rounds"
            if len(of) == 4:
                verdict += ", " + check(args[0], k, *first)
            tensors = [t for t in (*args, *first) if isinstance(t, torch.Tensor)]
            contenders["copy"] = copy_of(sum(t.nbytes for t in tensors), tensors[0].device).call
            times = interleave(contenders, options.rounds)
            us = {name: median(each) for name, each in times.items()}
            rest = [f"{form} {us[form]:.1f}" for form in made if form not in ("stage", "rounds")]
            say(line(label, us, ", ".join([verdict, *rest])))
            torch.cuda.empty_cache()
    if options.out:
        with open(options.out, "w") as file:
            file.write("\n".join(lines) + "\n")


def no_chains(graph) -> list:
    return []


if __name__ == "__main__":
    main()

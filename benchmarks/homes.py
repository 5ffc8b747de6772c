"""Odd lengths: the default plan, the same of aligned rows, and the best where rows live elsewhere.

A row lives in registers, packed in registers, or in shared memory. This times one plan of each,
with the numerics and the placement of the least expected time, beside the default and the limit
kernel. The default of the next multiple of 8 is timed too, beside a limit kernel of its own. All
kernels are compiled first, side by side. The expected times are printed too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from math import exp, log
from pathlib import Path
from statistics import median

import torch

from benchmarks import limit, plans, throughput
from benchmarks.kernels import KERNELS
from htile.build.compile import build_all
from htile.lower import Lowered, enumerate_plans
from htile.lower.choice.cost import cost
from htile.lower.choice.default import choose
from htile.lower.steps import Home

MEASURED = ("softmax", "rmsnorm", "layernorm", "softmax_backward")
LENGTHS = (1173, 1913, 3357, 6011, 10513, 15015, 25117, 50257, 81001, 120003)
ROW_BYTES = 256 << 20  # of the first row argument
DTYPE = torch.bfloat16


def rows_of(n: int) -> int:
    """So many rows fill a GPU, and keep its memory busy for a while."""
    return max(1024, ROW_BYTES // (n * DTYPE.itemsize))


def of(kernel, n: int, only_default: bool) -> dict[str, Lowered]:
    """The default plan, and the best of each home, by name. Those of the same text are one."""
    m = rows_of(n)
    found = kernel.function.inspect(*kernel.arguments(m, n, DTYPE, "meta"))
    every = enumerate_plans(found.graph, found.plan.target)
    named = {"default": choose(every)}
    for plan in [] if only_default else sorted(every, key=lambda plan: cost(plan, m).time):
        if plan.rows_home is not Home.REREAD:
            named.setdefault(plan.rows_home.value, plan)
    texts: dict[str, str] = {}
    result = {}
    for name, plan in named.items():
        lowered = plans.printed(found.lowered.traced, plan)
        if texts.setdefault(lowered.source, name) == name:
            result[name] = lowered
    return result


def measure(kernel, n: int, lowered: dict[str, Lowered], rounds: int) -> list[dict]:
    """The median times of the plans of a cell, as records."""
    m = rows_of(n)
    args = kernel.arguments(m, n, DTYPE, "cuda")
    calls = plans.launches(kernel, list(lowered.values()), args)
    contenders = dict(zip(lowered, calls, strict=True))
    candidates = limit.candidates(kernel, args)
    contenders["limit"] = limit.fastest(candidates, throughput.interleave).call
    times = throughput.METHOD.at_once(contenders, rounds)
    us = {name: median(each) for name, each in times.items()}
    return [
        {"kernel": kernel.name, "m": m, "n": n, "home": name, "share": us["limit"] / us[name],
         "us": us[name], "expected_us": cost(one.plan, m).time / 1e3,
         "label": plans.label(one.plan), "plan": one.plan.properties()}
        for name, one in lowered.items()
    ]  # fmt: skip


def mean(shares: list[float]) -> float:
    """Their geometric mean."""
    return exp(sum(map(log, shares)) / len(shares))


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Time and print all cells, and write them as JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.homes", description=__doc__)
    parser.add_argument("--kernels", nargs="+", choices=KERNELS, default=MEASURED, metavar="K")
    parser.add_argument("--lengths", nargs="+", type=int, default=LENGTHS, metavar="N")
    parser.add_argument("--only-default", action="store_true", help="no plans but the defaults")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, default=Path("bench-out/homes.json"))
    options = parser.parse_args(arguments)
    if any(n % 8 == 0 for n in options.lengths):
        parser.error("a multiple of 8 is no odd length")
    found = {}
    for kernel in (KERNELS[name] for name in options.kernels):
        for n in options.lengths:
            found[kernel, n] = of(kernel, n, options.only_default)
            aligned = -(-n // 8) * 8
            found.setdefault((kernel, aligned), of(kernel, aligned, only_default=True))
    build_all([plans.request(one) for cell in found.values() for one in cell.values()])
    records = []
    for (kernel, n), lowered in found.items():
        for record in measure(kernel, n, lowered, options.rounds):
            records.append(record)
            say("{kernel:16} {m}x{n:<6} {home:9} {share:.3f} {us:8.1f} µs, expected "
                "{expected_us:6.1f}: {label}".format(**record))  # fmt: skip
    for name in options.kernels:
        defaults = [r for r in records if (r["kernel"], r["home"]) == (name, "default")]
        given = mean([r["share"] for r in defaults if r["n"] % 8])
        aligned = mean([r["share"] for r in defaults if r["n"] % 8 == 0])
        say(f"{name:16} defaults, geometric means: {given:.3f}, of aligned rows {aligned:.3f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(records, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()

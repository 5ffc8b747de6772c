"""Times some plans of many cells on this GPU, for the cost model to be fitted to.

    python -m benchmarks.general.measure times.jsonl --seconds 300

The cells are the known kernels, and the functions of the fitting half, at lengths of the fitting
half. Functions have powers of two too. `--odd` takes odd lengths of 16-bit rows, which are shifted.
A cell's plans are the default, those with the least expected times, and some at random.
`benchmarks.general.fit` takes the file. With several GPUs, each may measure a part: `--part 0 2` is
the first of two.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch

from benchmarks.cell import reason
from benchmarks.contenders import failures
from benchmarks.kernels import DTYPES, KERNELS
from benchmarks.plans import launches, request, timed
from benchmarks.results import Record, key, record
from htile.build.compile import building
from htile.lower import Lowered, enumerate_plans, printed
from htile.lower.choice.cost import cost

from .population import FEW_ROWS, FITTING, FUNCTIONS, LENGTHS, Cell, half, rows_of
from .suite import method

EVERY = KERNELS | FUNCTIONS
BEST, RANDOM = 11, 7  # plans of a cell beside its default: the best by cost, and others
LONGER = 1.5  # Plans that are expected to take more than this many times the least are left out.
ROUNDS = 9
# Lengths that divide over threads well. Those of models and the drawn ones come from `population`.
MULTIPLES = tuple(k << shift for shift in range(5, 16) for k in (3, 5, 7, 9, 11))
POWERS = tuple(1 << k for k in range(6, 19))
ODD = (8, 17)  # logarithms to base 2 of the shortest odd length and of the longest


def cells() -> list[Cell]:
    """What is measured, in an order of which any beginning is a fair sample."""
    rng = random.Random("measured plans")
    drawn = [n for n in LENGTHS + MULTIPLES if n <= LENGTHS[-1] and half(n) == FITTING]
    found = []
    for name in KERNELS:
        found += [_cell(name, n, turn > 10, rng) for turn, n in enumerate(rng.sample(drawn, 14))]
    for name in FUNCTIONS:
        if half(name) == FITTING:
            lengths = rng.sample(POWERS, 2) + rng.sample(drawn, 3)
            found += [_cell(name, n, turn == 1, rng) for turn, n in enumerate(lengths)]
    rng.shuffle(found)
    return list(dict.fromkeys(found))


def odd_cells() -> list[Cell]:
    """Many rows of odd lengths, in an order of which any beginning is a fair sample."""
    rng = random.Random("measured plans of odd lengths")
    found = []
    for name in EVERY:
        if name in KERNELS or half(name) == FITTING:
            for _ in range(10 if name in KERNELS else 2):
                n = _odd(rng)
                found.append(Cell(name, "bf16", rows_of(n, "bf16"), n))
    rng.shuffle(found)
    return found


def _odd(rng: random.Random) -> int:
    """An odd length of the fitting half, drawn log-uniformly."""
    while True:
        n = round(2 ** rng.uniform(*ODD)) | 1
        if half(n) == FITTING:
            return n


def _cell(name: str, n: int, is_few: bool, rng: random.Random) -> Cell:
    dtype = rng.choices(("bf16", "fp32"), (3, 1))[0]
    return Cell(name, dtype, rng.choice(FEW_ROWS) if is_few else rows_of(n, dtype), n)


def plans(c: Cell) -> list[Lowered]:
    """The plans of a cell that are timed, of different texts. The first is the default."""
    kernel = EVERY[c.function]
    found = kernel.function.inspect(*kernel.arguments(c.m, c.n, DTYPES[c.dtype], "meta"))
    times = {p: cost(p, c.m).time for p in enumerate_plans(found.graph, found.plan.target)}
    rest = [p for p in times if times[p] <= LONGER * min(times.values())]
    random.Random(str(c)).shuffle(rest)
    some = [found.plan, *sorted(times, key=times.__getitem__)[:BEST], *rest]
    texts: dict[str, Lowered] = {}
    for plan in some:
        one = printed(found.lowered.traced, plan)
        texts.setdefault(one.source, one)
        if len(texts) == 1 + BEST + RANDOM:
            break
    return list(texts.values())


def measure(c: Cell, lowered: list[Lowered]) -> Record:
    """The median time of each plan, after its results were checked."""
    kernel, dtype = EVERY[c.function], DTYPES[c.dtype]
    calls = dict(enumerate(launches(kernel, lowered, kernel.arguments(c.m, c.n, dtype, "cuda"))))
    us = {k: median(times) for k, times in method(c).at_once(calls, ROUNDS).items()}
    cell = key("regret", c.function, c.dtype, c.m, c.n)
    return record(cell, {}, "us", bytes=kernel.bytes(c.m, c.n, dtype), plans=timed(lowered, us))


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    """Compile in processes side by side, and measure each cell when its plans are there."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.general.measure")
    parser.add_argument("file", type=Path)
    parser.add_argument("--part", type=int, nargs=2, default=(0, 1), metavar=("K", "OF"))
    parser.add_argument("--odd", action="store_true", help="cells of odd lengths only")
    parser.add_argument("--seconds", type=float, default=300, help="begin no cell after so many")
    options = parser.parse_args(arguments)
    began = time.monotonic()
    first, step = options.part
    found = odd_cells() if options.odd else cells()
    todo = {c: plans(c) for c in found[first::step]}
    requests = [request(one) for lowered in todo.values() for one in lowered]
    workers = max(1, os.cpu_count() // step - 1)
    with (
        open(options.file, "w", encoding="utf-8") as file,
        building(requests, workers) as built,
    ):
        for c, lowered in todo.items():
            if time.monotonic() - began > options.seconds:
                break
            try:
                for one in lowered:
                    built(request(one))
                times = measure(c, lowered)
            except (*failures(), torch.cuda.OutOfMemoryError) as error:
                say(f"{c}: {reason(error)}")
                continue
            file.write(json.dumps(times) + "\n")
            file.flush()
            say(f"{c}: default {times['plans'][0]['us']}, {len(lowered)} plans")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

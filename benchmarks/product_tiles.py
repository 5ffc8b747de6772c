"""How well the tiles of products are chosen: the chosen tile's time over that of the fastest one.

    python -m benchmarks.product_tiles [--measure FILE.xz] [--grid]

Without a file it reads `product-tiles-h200.jsonl.xz`, which `--measure` has written on an H200: the
microseconds of each tile of a bare product, at sizes that `benchmarks.products` does not have. With
`--grid` it shows what other constants of the tile's model would choose; so they were fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean, median

import torch

from benchmarks.general.fit import records_of
from benchmarks.products import captured, linear, normal
from htile.build.arch import DEFAULT
from htile.build.compile import build_all, load
from htile.frontend.graph import Graph
from htile.lower import product_tiles, run_passes
from htile.lower.emit_products import emit
from htile.lower.fused import Fused, Tile, fused
from htile.lower.names import kernel_name
from htile.lower.products import levels
from htile.tune.timing import interleave

TIMES = Path(__file__).with_name("product-tiles-h200.jsonl.xz")
SIZES = ((5120, 5120), (2560, 10240), (14336, 5120), (50304, 2048), (9728, 4096), (6144, 7168))
ROWS = (96, 192, 256, 384, 512, 768, 1024, 1536, 2304, 3072, 4608, 6000)
PROCESSORS = 132  # multiprocessors of an H200
GRID = {"BYTES_PER_CYCLE": (36, 40, 44, 48), "CLOSE": (1.0, 1.01, 1.02, 1.03, 1.05)}
WORST = 5  # sizes that are named


@cache
def kernel_of(n: int, k: int) -> Fused:
    """The kernel of a bare product of bfloat16."""
    x, weight = (torch.empty(s, k, dtype=torch.bfloat16, device="meta") for s in (4, n))
    traced: Graph = linear.inspect(x, weight).traced
    (level,) = levels(traced)
    return fused(run_passes(level.graph), level.products, n)


def name(tile: Tile) -> str:
    """`128x256, 2, 1`: rows, columns, thread blocks of a cluster, parts of a last wave's tile."""
    turns = ", in turns" if tile.in_turns else ""
    return f"{tile.rows}x{tile.columns}, {tile.cluster}, {tile.parts}{turns}"


def possible(n: int, k: int, m: int) -> list[Tile]:
    """The tiles among which one is chosen for so many rows."""
    return product_tiles.tiles(kernel_of(n, k), "k", DEFAULT, m)


def measure(file: Path, rounds: int) -> None:
    """Time all tiles at all sizes on this GPU, into a file that xz compresses."""
    lines = []
    for n, k in SIZES:
        kernel, requests = kernel_of(n, k), {}
        for tile in itertools.chain(*(possible(n, k, m) for m in ROWS)):
            source = emit(kernel, replace(tile, a_rows=0), "k", True)
            requests[name(tile)] = source, kernel_name(kernel.graph), DEFAULT.name
        built = zip(requests, build_all(list(requests.values())), strict=True)
        functions = {key: load(artifact) for key, artifact in built}
        for m in ROWS:
            us = timed(functions, n, k, m, rounds)
            lines.append(json.dumps({"n": n, "k": k, "m": m, "us": us}) + "\n")
    with lzma.open(file, "wt", encoding="utf-8") as opened:
        opened.writelines(lines)


def timed(functions: dict[str, Callable], n: int, k: int, m: int, rounds: int) -> dict[str, float]:
    """The microseconds of each tile that is possible at a size, and of cuBLAS."""
    x, weight, out = normal(m, k), normal(n, k), normal(m, n)
    calls: dict[str, Callable] = {"cublas": partial(torch.mm, x, weight.t(), out=out)}
    for tile in possible(n, k, m):
        given = x, weight, out, PROCESSORS // tile.cluster
        calls[name(tile)] = partial(functions[name(tile)], *given)
    captured_calls = {key: captured(call) for key, call in calls.items()}
    return {key: median(times) for key, times in interleave(captured_calls, rounds).items()}


def regrets(records: list[dict]) -> dict[str, float]:
    """The chosen tile's time over that of the fastest one, by size, of those that were timed."""
    found = {}
    for r in records:
        n, k, m, us = r["n"], r["k"], r["m"], r["us"]
        timed = [tile for tile in possible(n, k, m) if name(tile) in us]
        chosen = product_tiles.fastest(kernel_of(n, k), timed, m, PROCESSORS)
        fastest = min(us[name(tile)] for tile in timed)
        found[f"{m}x{n}x{k}: {name(chosen)}"] = us[name(chosen)] / fastest
    return found


def shown(found: dict[str, float]) -> str:
    """The mean and the worst of some regrets."""
    values = list(found.values())
    return f"{geometric_mean(values):.4f} in the mean, {max(values):.3f} at most"


def main(arguments: list[str] | None = None) -> None:
    """Print how well tiles are chosen."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.product_tiles", description=__doc__)
    parser.add_argument("--measure", type=Path, metavar="FILE.xz",
                        help="time the tiles on this GPU")  # fmt: skip
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--grid", action="store_true", help="try other constants, too")
    options = parser.parse_args(arguments)
    if options.measure is not None:
        measure(options.measure, options.rounds)
    records = records_of(options.measure or TIMES)
    found = regrets(records)
    print(f"{len(records)} sizes: {shown(found)}")
    for size in sorted(found, key=found.get, reverse=True)[:WORST]:
        print(f"  {found[size]:.3f} {size}")
    if options.grid:
        own = {key: getattr(product_tiles, key) for key in GRID}
        for values in itertools.product(*GRID.values()):
            for key, value in zip(GRID, values, strict=True):
                setattr(product_tiles, key, value)
            print(", ".join(f"{key} {value}" for key, value in zip(GRID, values, strict=True)),
                  shown(regrets(records)))  # fmt: skip
        for key, value in own.items():
            setattr(product_tiles, key, value)


if __name__ == "__main__":
    main()

"""How well the tiles of products are chosen: the chosen tile's time over that of the fastest one.

    python -m benchmarks.product_tiles [--measure FILE.xz] [--grid]

Without a file it reads `product-tiles-h200.jsonl.xz`, which `--measure` has written on an H200: the
microseconds of tiles of a product and of what follows it, at sizes that `benchmarks.products` does
not have. With `--grid` it shows what other constants of the tile's model would choose; so they were
fitted.
"""

from __future__ import annotations

import argparse
import itertools
import json
import lzma
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean, median

import torch

from benchmarks.general.fit import records_of
from benchmarks.products import captured, gelu_linear, linear, normal, residual_linear
from htile.build.arch import DEFAULT
from htile.build.compile import build_all, load
from htile.lower import run_passes
from htile.lower.emission.names import kernel_name
from htile.lower.products import tiles as product_tiles
from htile.lower.products.emit import emit
from htile.lower.products.fused import Fused, Tile, fused
from htile.lower.products.levels import levels
from htile.lower.products.tile_kernel import sharing
from htile.tune.timing import interleave

TIMES = Path(__file__).with_name("product-tiles-h200.jsonl.xz")
SIZES = ((5120, 5120), (2560, 10240), (14336, 5120), (50304, 2048), (9728, 4096), (6144, 7168))
ROWS = (1, 16, 64, 96, 192, 256, 384, 512, 768, 1024, 1536, 2304, 3072, 4608, 6000)
TURNED, MANY = (1, 16, 128, 512, 1024, 2304, 3072, 4608), (1024, 2304, 4608)
PROCESSORS = 132  # multiprocessors of an H200
GRID = {"BYTES_PER_CYCLE": (36, 40, 44, 48), "CLOSE": (1.0, 1.01, 1.02, 1.03),
        "TURN_CYCLES": (400, 800, 1200), "RARE": (1.0, 1.02, 1.03, 1.05)}  # fmt: skip
TIMED = 10  # tiles of a size that are timed: the ones that are expected to be fastest
WORST = 5  # sizes that are named


@dataclass(frozen=True)
class Form:
    """A function whose tiles are timed: how its matrix lies in memory, and numbers of rows.

    sizes: N and K.
    """

    function: str
    major: str
    rows: tuple[int, ...]
    sizes: tuple[tuple[int, int], ...] = SIZES[::2]


FORMS = (Form("linear", "k", ROWS, SIZES), Form("linear", "mn", TURNED, SIZES),
         Form("gelu", "k", MANY), Form("residual", "k", MANY))  # fmt: skip
CASES = [(form, n, k) for form in FORMS for n, k in form.sizes]
FUNCTIONS = {"linear": linear, "gelu": gelu_linear, "residual": residual_linear}


def arguments(function: str, n: int, k: int, m: int, make: Callable) -> list[torch.Tensor]:
    """What the function takes, made by `make(*shape)`."""
    beside = {"linear": (), "gelu": ((n,),), "residual": ((m, n),)}[function]
    return [make(*shape) for shape in ((m, k), (n, k), *beside)]


@cache
def kernel_of(n: int, k: int, function: str = "linear") -> Fused:
    """The kernel of a function with one product of bfloat16."""
    given = arguments(function, n, k, 4, partial(torch.empty, dtype=torch.bfloat16, device="meta"))
    (level,) = levels(FUNCTIONS[function].inspect(*given).traced, sharing)
    return fused(run_passes(level.graph), level.products, n)


def name(tile: Tile) -> str:
    """`128x256, 2, 1`: rows, columns, thread blocks of a cluster, parts of a last wave's tile."""
    turns = ", in turns" if tile.in_turns else ""
    return f"{tile.rows}x{tile.columns}, {tile.cluster}, {tile.parts}{turns}"


def possible(kernel: Fused, major: str, m: int) -> list[Tile]:
    """The tiles among which one is chosen for so many rows."""
    return product_tiles.tiles(kernel, major, DEFAULT, m)


def timed(kernel: Fused, major: str, m: int) -> list[Tile]:
    """Those that are timed: what is expected to be fast, and the best one of each form."""
    found = possible(kernel, major, m)
    found.sort(key=lambda tile: product_tiles.cycles(kernel, tile, m, PROCESSORS))
    best: dict[tuple, Tile] = {}
    for tile in found:
        best.setdefault((tile.rows, tile.in_turns, tile.columns % 32 == 0), tile)
    return list(dict.fromkeys([*found[:TIMED], *best.values()]))


def measure(file: Path, rounds: int) -> None:
    """Time tiles at all sizes on this GPU, into a file that xz compresses."""
    requests, lines = {}, []
    for form, n, k in CASES:
        kernel = kernel_of(n, k, form.function)
        for tile in itertools.chain(*(timed(kernel, form.major, m) for m in form.rows)):
            source = emit(kernel, replace(tile, a_rows=0), form.major, True)
            key = n, k, form, name(tile)
            requests[key] = source, kernel_name(kernel.graph), DEFAULT.name
    built = zip(requests, build_all(list(requests.values())), strict=True)
    functions = {key: load(artifact) for key, artifact in built}
    for form, n, k in CASES:
        for m in form.rows:
            us = times_of(functions, n, k, m, form, rounds)
            record = {"n": n, "k": k, "m": m, "function": form.function, "major": form.major}
            lines.append(json.dumps(record | {"us": us}) + "\n")
    with lzma.open(file, "wt", encoding="utf-8") as opened:
        opened.writelines(lines)


def times_of(
    functions: dict[tuple, Callable], n: int, k: int, m: int, form: Form, rounds: int
) -> dict[str, float]:
    """The microseconds of tiles at a size, and of cuBLAS's product."""
    x, weight, *others = arguments(form.function, n, k, m, normal)
    out = normal(m, n)
    calls: dict[str, Callable] = {"cublas": partial(torch.mm, x, weight.t(), out=out)}
    matrix = weight if form.major == "k" else weight.t().contiguous()
    kernel = kernel_of(n, k, form.function)
    for tile in timed(kernel, form.major, m):
        given = x, matrix, *others, out, product_tiles.clusters_of(kernel, tile, PROCESSORS)
        calls[name(tile)] = partial(functions[n, k, form, name(tile)], *given)
    captured_calls = {key: captured(call) for key, call in calls.items()}
    return {key: median(times) for key, times in interleave(captured_calls, rounds).items()}


def regrets(records: list[dict]) -> dict[str, float]:
    """The chosen tile's time over that of the fastest one, by size, of those that were timed."""
    found = {}
    for r in records:
        function, major = r.get("function", "linear"), r.get("major", "k")
        kernel, m, us = kernel_of(r["n"], r["k"], function), r["m"], r["us"]
        known = [tile for tile in possible(kernel, major, m) if name(tile) in us]
        chosen = product_tiles.fastest(kernel, known, m, PROCESSORS)
        fastest = min(us[name(tile)] for tile in known)
        size = f"{function} {m}x{r['n']}x{r['k']} {major}: {name(chosen)}"
        found[size] = us[name(chosen)] / fastest
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

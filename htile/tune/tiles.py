"""The search for faster tiles of kernels of products; no tile changes a bit of a result."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from concurrent.futures import BrokenExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from ..build.arch import Arch
from ..build.compile import building
from ..errors import CompileError
from ..lower.products.fused import Fused, Tile
from ..lower.products.plan import ProductPlan
from ..lower.products.tiles import cycles, tiles
from .kept_tiles import keep_tile
from .search import BesideDefault, search, shown, time_on
from .statistics import Estimate

MOST = 64  # tiles of a kernel that are tried; the others are expected to be slow


@dataclass(frozen=True)
class Asked:
    """What a tile is chosen for: a kernel, how its matrices lie, rows, multiprocessors, the GPU."""

    kernel: Fused
    major: str
    rows: int
    processors: int
    arch: Arch


@dataclass(frozen=True)
class TunedTile(BesideDefault):
    """What `tune` found for one kernel of products; `str` says it in words.

    gpu: the name of the GPU.
    plan: that of the winner; it is `default` where nothing was faster beyond the noise.
    tried, tiles: how many tiles were timed, and how many there were to try.
    seconds: how long the search took.
    us, default_us: the medians of calls with both tiles in microseconds, of the same rounds.
    ratio: the time of a call with the winner over that with the default, with its 95 % interval.
    file: the file that keeps the winner; None where it could not be written.
    """

    gpu: str
    plan: ProductPlan
    default: ProductPlan
    tried: int
    tiles: int
    seconds: float
    us: float
    default_us: float
    ratio: Estimate
    file: Path | None

    def __str__(self) -> str:
        kernel = self.plan.kernel
        heading = (
            f"tuned {kernel.graph.name}, N = {kernel.n}, on {self.gpu}: {self.tried} of "
            f"{self.tiles} tiles tried in {self.seconds:.1f} s"
        )
        return "\n".join(self._told(heading, " a call"))


@dataclass(frozen=True)
class TunedProducts:
    """What `tune` found for a function with products; `str` says it in words.

    kernels: a `TunedTile` for each kernel of products, in the order in which they run.
    """

    kernels: tuple[TunedTile, ...]

    def __str__(self) -> str:
        return "\n".join(map(str, self.kernels))


def tune_tile(
    asked: Asked,
    default: Tile,
    device: torch.device,
    requests: Callable[[Tile], list[tuple[str, str, str]]],
    prepare: Callable[[Tile], Callable[[], object]],
    seconds: float,
    fastmath: bool,
    progress: bool,
) -> TunedTile:
    """Search for the fastest tile of a kernel, and keep it.

    default: the tile that is expected to be fastest.
    requests: the kernels that calls with a tile have, as (source, function, architecture).
    prepare: compiles and loads them, and returns a function that calls with that tile.
    """
    kernel, rows = asked.kernel, asked.rows
    found = tiles(kernel, asked.major, asked.arch, rows)
    found.sort(key=lambda tile: cycles(kernel, tile, rows, asked.processors))
    tried = list(dict.fromkeys([default, *found[:MOST]]))
    wanted = {tile: requests(tile) for tile in tried}
    start = time.monotonic()
    with (
        building(request for each in wanted.values() for request in each) as built,
        shown(kernel.graph.name, len(tried), progress) as show,
    ):

        def prepared(tile: Tile) -> Callable[[], object]:
            for request in wanted[tile]:
                with contextlib.suppress(CompileError, BrokenExecutor):  # `prepare` tries it again
                    built(request)
            return prepare(tile)

        def measure(contenders, rounds):
            return time_on(device, contenders, rounds)

        best = search(tried, prepared, measure, seconds, show, name=short)

    def plan(tile: Tile) -> ProductPlan:
        return ProductPlan(kernel, tile, asked.major, asked.arch.name, fastmath)

    own = plan(default)
    return TunedTile(
        gpu=torch.cuda.get_device_name(device),
        plan=own if best.plan == default else plan(best.plan),
        default=own,
        tried=best.tried,
        tiles=len(tried),
        seconds=time.monotonic() - start,
        us=best.us,
        default_us=best.default_us,
        ratio=best.ratio,
        file=keep_tile(best.plan, kernel, asked.major, rows, asked.arch, device),
    )


def short(tile: Tile) -> str:
    """A tile in a few words."""
    return f"tiles of {tile.rows}x{tile.columns}" + ", in turns" * tile.in_turns

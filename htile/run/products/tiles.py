"""Which tile a call's product kernel has: a tuned one, or the one expected to be the fastest."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from ...build.arch import Arch
from ...lower.products import tiles as product_tiles
from ...lower.products.fused import Fused, Tile
from ...tune.kept_tiles import recall_tile

# Tiles that `tune` tries, by kernel, and what it learns of a call: the arguments of `choose_tile`
# with the tile that follows.
_TRIED: ContextVar[dict[Fused, Tile]] = ContextVar("tried", default={})  # noqa: B039
_CHOSEN: ContextVar[list | None] = ContextVar("chosen", default=None)


def choose_tile(kernel: Fused, major: str, rows: int, processors: int, arch: Arch) -> Tile | None:
    """The tile for so many rows; None if none is possible. The GPU is the current one, if any."""
    if kernel in _TRIED.get():
        return _TRIED.get()[kernel]
    tile = product_tiles.choose_tile(kernel, major, rows, processors, arch)
    if tile is not None and torch.cuda.is_initialized():
        tile = recall_tile(tile, kernel, major, max(rows, 1), arch, torch.cuda.current_device())
    if _CHOSEN.get() is not None and tile is not None:
        _CHOSEN.get().append(((kernel, major, max(rows, 1), processors, arch), tile))
    return tile


@contextmanager
def trying(kernel: Fused, tile: Tile) -> Iterator[None]:
    """Calls that begin in the block have this tile for that kernel."""
    token = _TRIED.set(_TRIED.get() | {kernel: tile})
    try:
        yield
    finally:
        _TRIED.reset(token)


@contextmanager
def choices() -> Iterator[list[tuple[tuple, Tile]]]:
    """The arguments of `choose_tile` and the tiles of calls that begin in the block."""
    token = _CHOSEN.set([])
    try:
        yield _CHOSEN.get()
    finally:
        _CHOSEN.reset(token)

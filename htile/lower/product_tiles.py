"""Which tile a kernel of products has, for a number of rows: the one that is expected to be fastest.

A tile changes no bit of a result. It is chosen among a few, so a function has a few kernels, each of
which serves any number of rows.
"""

from __future__ import annotations

from math import ceil

from .emit_products import Fused, Tile

# These count for one multiprocessor of sm_90a, in clock cycles.
PRODUCTS_PER_CYCLE = 2048  # of the tensor cores
BYTES_PER_CYCLE = 40  # that a multiprocessor gets from L2
MEMORY_BYTES_PER_CYCLE = 20  # that it gets from memory, if all of them load
TILE_CYCLES = 1500  # for what nothing hides of a tile: the first loads, and what follows the sums
ELEMENT_CYCLES = 0.03  # for what is computed of an element, and stored

SHARED_BYTES = 200 * 1024  # for the stages of a thread block
BOXES = (16, 32, 64)  # rows of the left operand that are loaded, where there are no more
MN_BLOCK = 64  # columns that a swizzled line has of a matrix (K, N)


def tiles(kernel: Fused, majors: str) -> list[Tile]:
    """The tiles that the kernel can have, without those of few rows."""
    found = [
        Tile(256, rows=128, cluster=2), Tile(128, rows=128, cluster=1),
        Tile(128, rows=64, cluster=1, warp_groups=1), Tile(64, rows=64, cluster=1, warp_groups=1),
    ]  # fmt: skip
    count, least = len(kernel.operands), MN_BLOCK if majors == "mn" else 1
    return [
        tile for tile in found
        if tile.columns // count % kernel.chunk == 0 and tile.columns // count >= kernel.chunk
        and tile.columns // count % least == 0
    ]  # fmt: skip


def choose_tile(kernel: Fused, majors: str, rows: int, processors: int) -> Tile | None:
    """The tile for so many rows, on a GPU of so many multiprocessors; None if none is possible."""
    found = [_for_rows(tile, rows) for tile in tiles(kernel, majors)]
    return min(found, key=lambda tile: cycles(kernel, tile, rows, processors), default=None)


def _for_rows(tile: Tile, rows: int) -> Tile:
    """The tile with as many stages as fit; with few rows it loads no more than there are."""
    boxes = [box for box in BOXES if rows <= box < tile.rows]
    a_rows = boxes[0] if boxes and tile.rows == 64 else 0
    bytes_ = 2 * 64 * (tile.rows + tile.columns)
    stages = min(SHARED_BYTES // bytes_, 12)
    return Tile(tile.columns, tile.rows, tile.cluster, stages, a_rows, tile.warp_groups)


def cycles(kernel: Fused, tile: Tile, rows: int, processors: int) -> float:
    """About how long the kernel takes on a GPU."""
    columns = tile.columns // len(kernel.operands)
    k = kernel.operands[0].product.k
    high = ceil(rows / (tile.rows * tile.cluster)) * tile.cluster
    count = high * ceil(kernel.n / columns)
    waves = ceil(count / processors)
    loaded = 2 * ((tile.a_rows or tile.rows) + tile.columns / tile.cluster)
    busy = min(count, processors) / processors
    from_memory = 2 * tile.columns / max(high, 1) / MEMORY_BYTES_PER_CYCLE * busy
    step = max(tile.rows * tile.columns / PRODUCTS_PER_CYCLE, loaded / BYTES_PER_CYCLE, from_memory)
    after = TILE_CYCLES + ELEMENT_CYCLES * tile.rows * tile.columns
    return waves * (k * step + after)

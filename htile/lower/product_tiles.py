"""Which tile a kernel of products has: the one that is expected to be fastest for a number of rows.

A tile changes no bit of a result. It is chosen among a few, so a function has a few kernels. Each
of them serves any number of rows.
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

CLOSE = 1.03  # Of tiles whose times differ by no more than this, that which loads least is taken.
SHARED_BYTES = 200 * 1024  # for the stages of a thread block
COLUMNS = (256, 224, 192, 160, 128, 96, 64)  # of a tile
CLUSTERS = (2, 1)  # thread blocks along the rows that share the matrix's tiles
BOXES = (16, 32, 64)  # rows of the left operand that are loaded, where there are no more
MN_BLOCK = 64  # columns that a swizzled line has of a matrix (K, N)


def tiles(kernel: Fused, major: str) -> list[Tile]:
    """The tiles that the kernel can have, without the number of stages.

    A warpgroup has 64 rows. One of them leaves more thread blocks for few rows than two.
    """
    count, least = len(kernel.operands), MN_BLOCK if major == "mn" else 1
    return [
        Tile(columns, rows, cluster, warp_groups=rows // 64)
        for rows in (128, 64) for columns in COLUMNS for cluster in CLUSTERS
        if columns % count == 0 and columns // count >= kernel.chunk
        and columns // count % kernel.chunk == columns // count % least == 0
    ]  # fmt: skip


def choose_tile(kernel: Fused, major: str, rows: int, processors: int) -> Tile | None:
    """The tile for so many rows, on a GPU of so many multiprocessors; None if none is possible.

    For no rows, which no kernel is launched for, it is that of one row.
    """
    rows = max(rows, 1)
    found = [
        _for_rows(tile, rows) for tile in tiles(kernel, major)
        if tile.cluster == 1 or rows > tile.rows * (tile.cluster - 1)  # no thread block is idle
    ]  # fmt: skip
    times = [cycles(kernel, tile, rows, processors) for tile in found]
    close = [
        tile for tile, time in zip(found, times, strict=True) if time <= CLOSE * min(times)
    ]  # fmt: skip
    return min(close, key=lambda tile: loaded(kernel, tile, rows), default=None)


def _clusters(kernel: Fused, tile: Tile, rows: int) -> int:
    columns = tile.columns // len(kernel.operands)
    return ceil(rows / (tile.rows * tile.cluster)) * ceil(kernel.n / columns)


def loaded(kernel: Fused, tile: Tile, rows: int) -> float:
    """How many rows of both operands all thread blocks load of L2; a cluster shares columns."""
    of_each = (tile.a_rows or tile.rows) + tile.columns / tile.cluster
    return _clusters(kernel, tile, rows) * tile.cluster * of_each


def _for_rows(tile: Tile, rows: int) -> Tile:
    """The tile with as many stages as fit; with few rows it loads no more than there are."""
    boxes = [box for box in BOXES if rows <= box < tile.rows]
    a_rows = boxes[0] if boxes and tile.rows == 64 else 0
    bytes_ = 2 * 64 * (tile.rows + tile.columns)
    stages = min(SHARED_BYTES // bytes_, 12)
    return Tile(tile.columns, tile.rows, tile.cluster, stages, a_rows, tile.warp_groups)


def cycles(kernel: Fused, tile: Tile, rows: int, processors: int) -> float:
    """About how long the kernel takes on a GPU."""
    k = kernel.operands[0].product.k
    clusters = _clusters(kernel, tile, rows)
    waves = ceil(clusters / (processors // tile.cluster))
    own_rows = tile.a_rows or tile.rows
    from_l2 = 2 * (own_rows + tile.columns / tile.cluster) / BYTES_PER_CYCLE
    products = tile.rows * tile.columns / PRODUCTS_PER_CYCLE
    multiplied = k * max(products, from_l2)
    # All that is read of memory, by those multiprocessors that are at work: few rows wait for it.
    busy = min(clusters * tile.cluster, processors)
    read = 2 * k * (rows + kernel.n * len(kernel.operands)) / (MEMORY_BYTES_PER_CYCLE * busy)
    after = TILE_CYCLES + ELEMENT_CYCLES * tile.rows * tile.columns
    return max(waves * multiplied, read) + waves * after

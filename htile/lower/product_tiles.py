"""Which tile a kernel of products has: the one that is expected to be fastest for a number of rows.

A tile changes no bit of a result. It is chosen among a few, so a function has a few kernels. Each
of them serves any number of rows.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from ..build.arch import Arch
from .fused import Fused, Tile

# These count for one multiprocessor of sm_90a, in clock cycles.
PRODUCTS_PER_CYCLE = 2048  # of the tensor cores
BYTES_PER_CYCLE = 44  # that a multiprocessor gets from L2
MEMORY_BYTES_PER_CYCLE = 20  # that it gets from memory, if all of them load
TILE_CYCLES = 1500  # for what nothing hides of a tile: the first loads, and what follows the sums
ELEMENT_CYCLES = 0.03  # for what is computed of an element, and stored
# These count for one of sm_80, where each warp multiplies by itself. It is taken for all others.
WARP_PRODUCTS_PER_CYCLE = 1024
SHARED_BYTES_PER_CYCLE = 128  # that all warps read of shared memory

CLOSE = 1.03  # Of tiles whose times differ by no more than this, that which loads least is taken.
SHARED_BYTES = 200 * 1024  # for the stages of a thread block
COLUMNS = (256, 224, 192, 160, 128, 96, 64)  # of a tile
CLUSTERS = (2, 1)  # thread blocks along the rows that share the matrix's tiles
PARTS = (1, 2)  # narrower tiles that one of the last wave is cut into
NARROWEST = 64  # columns of a narrower tile
BOXES = (16, 32, 64)  # rows of the left operand that are loaded, where there are no more
MN_BLOCK = 64  # columns that a swizzled line has of a matrix (K, N)
# Rows, columns and warps of tiles without wgmma. A thread has at most 128 sums.
WARP_TILES = (
    (256, 128, 8), (128, 256, 8), (128, 128, 4), (128, 64, 4),
    (64, 256, 4), (64, 128, 4), (64, 64, 4), (64, 32, 4),
)  # fmt: skip
WARP_K = 32  # elements of K of a stage there
WARP_STAGES = 3, 8  # the fewest and the most


def tiles(kernel: Fused, major: str, arch: Arch) -> list[Tile]:
    """The tiles that the kernel can have, without the number of stages.

    A warpgroup has 64 rows. One of them leaves more thread blocks for few rows than two.
    """
    if arch.has_wgmma:
        found = [
            Tile(columns, rows, cluster, warp_groups=rows // 64, parts=parts)
            for rows in (128, 64) for columns in COLUMNS for cluster in CLUSTERS for parts in PARTS
            if parts == 1 or columns // parts >= NARROWEST
        ]  # fmt: skip
    else:
        found = [
            Tile(columns, rows, warps=warps, is_dependent=arch.dependent_launch)
            for rows, columns, warps in WARP_TILES
        ]
    return [tile for tile in found if _is_possible(kernel, tile, major)]


def _is_possible(kernel: Fused, tile: Tile, major: str) -> bool:
    """Whether a tile has whole chunks of each product, and whole lines for all that copy them.

    Four threads copy a line of a stage of a matrix (N, K).
    """
    columns, rest = divmod(tile.columns, tile.parts * len(kernel.operands))
    least = MN_BLOCK if major == "mn" else max(8 * tile.warps, 1)
    return not rest and columns > 0 and columns % kernel.chunk == columns % least == 0


def candidates(kernel: Fused, major: str, rows: int, arch: Arch) -> list[Tile]:
    """The tiles for so many rows, with as many stages as fit."""
    found = [
        _for_rows(tile, rows, arch) for tile in tiles(kernel, major, arch)
        if tile.cluster == 1 or rows > tile.rows * (tile.cluster - 1)  # no thread block is idle
    ]  # fmt: skip
    return [tile for tile in found if not tile.warps or tile.stages >= WARP_STAGES[0]]


def choose_tile(kernel: Fused, major: str, rows: int, processors: int, arch: Arch) -> Tile | None:
    """The tile for so many rows, on a GPU of so many multiprocessors; None if none is possible.

    For no rows, which no kernel is launched for, it is that of one row.
    """
    rows = max(rows, 1)
    found = candidates(kernel, major, rows, arch)
    times = {tile: cycles(kernel, tile, rows, processors) for tile in found}
    close = [tile for tile, time in times.items() if time <= CLOSE * min(times.values())]
    return min(close, key=lambda t: (loaded(kernel, t, rows), times[t]), default=None)


def _clusters(kernel: Fused, tile: Tile, rows: int) -> int:
    columns = tile.columns // len(kernel.operands)
    return ceil(rows / (tile.rows * tile.cluster)) * ceil(kernel.n / columns)


def loaded(kernel: Fused, tile: Tile, rows: int) -> float:
    """How many rows of both operands all thread blocks load of L2; a cluster shares columns."""
    of_each = (tile.a_rows or tile.rows) + tile.columns / tile.cluster
    return _clusters(kernel, tile, rows) * tile.cluster * of_each


def _blocks(tile: Tile) -> int:
    """How many thread blocks share a multiprocessor, so that one multiplies while another stores.

    Two of four warps have registers enough. A block of wgmma hides by itself what it loads.
    """
    return 2 if tile.warps == 4 else 1


def _for_rows(tile: Tile, rows: int, arch: Arch) -> Tile:
    """The tile with as many stages as fit; with few rows it loads no more than there are.

    Each thread block takes 1 KiB beside its own shared memory.
    """
    if tile.warps:
        bytes_ = 2 * WARP_K * (tile.rows + tile.columns)
        stages = ((arch.shared_bytes + 1024) // _blocks(tile) - 1024) // bytes_
        return replace(tile, stages=min(stages, WARP_STAGES[1]))
    boxes = [box for box in BOXES if rows <= box < tile.rows]
    a_rows = boxes[0] if boxes and tile.rows == 64 else 0
    bytes_ = 2 * 64 * (tile.rows + tile.columns)
    stages = min(SHARED_BYTES // bytes_, 12)
    return replace(tile, stages=stages, a_rows=a_rows)


def cycles(kernel: Fused, tile: Tile, rows: int, processors: int) -> float:
    """About how long the kernel takes on a GPU."""
    k, clusters = kernel.operands[0].product.k, _clusters(kernel, tile, rows)
    slots = processors // tile.cluster
    waves, rest = divmod(clusters, slots)
    narrow = tile
    if waves and tile.parts > 1:
        narrow, rest = replace(tile, columns=tile.columns // tile.parts), rest * tile.parts
    counted = (tile, waves), (narrow, ceil(rest / slots))
    multiplied = k * sum(count * _of_element_of_k(each) for each, count in counted)
    # All that is read of memory, by those multiprocessors that are at work: few rows wait for it.
    busy = min(clusters * tile.cluster, processors)
    read = 2 * k * (rows + kernel.n * len(kernel.operands)) / (MEMORY_BYTES_PER_CYCLE * busy)
    after = [count * (TILE_CYCLES + ELEMENT_CYCLES * each.rows * each.columns)
             for each, count in counted]  # fmt: skip
    exposed = sum(after) if _blocks(tile) == 1 else max(after) / max(waves, 1)
    return max(multiplied, read) + exposed


def _of_element_of_k(tile: Tile) -> float:
    """Cycles of a tile for each element of K: those of its products, or of what they wait for."""
    from_l2 = 2 * ((tile.a_rows or tile.rows) + tile.columns / tile.cluster) / BYTES_PER_CYCLE
    return max(_products(tile), from_l2)


def _products(tile: Tile) -> float:
    """How long a tile multiplies for an element of K.

    Each warp reads its rows and all columns of shared memory, to which they are written before.
    """
    if not tile.warps:
        return tile.rows * tile.columns / PRODUCTS_PER_CYCLE
    read = 2 * tile.rows + (tile.warps + 1) * tile.columns
    of_shared = 2 * read / SHARED_BYTES_PER_CYCLE
    return max(tile.rows * tile.columns / WARP_PRODUCTS_PER_CYCLE, of_shared)

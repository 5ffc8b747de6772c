"""Which tile a kernel of products has: the one that is expected to be fastest for a number of rows.

A tile changes no bit of a result. There are many possible tiles, but a few usual ones are preferred
(`USUAL`, `RARE`), so that a function has few kernels. Each of them serves any number of rows.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from ...build.arch import Arch
from ...frontend.graph import Role
from .fused import LINE, Fused, Tile

# These count for one multiprocessor of sm_90a, in clock cycles.
PRODUCTS_PER_CYCLE = 2048  # of the tensor cores
BYTES_PER_CYCLE = 40  # that a multiprocessor gets from L2
MEMORY_BYTES_PER_CYCLE = 18  # that it gets from memory, if all of them load
ALONE_BYTES_PER_CYCLE = 22  # that it gets from memory, if few of them load
TILE_CYCLES = 1500  # for what nothing hides of a tile: the first loads, and the wait for the sums
TURN_CYCLES = 800  # of a tile, if warpgroups work in turns: from one's last product to the other's
ELEMENT_CYCLES = 0.03  # for an element that is stored
INSTRUCTIONS_PER_CYCLE = 128  # of threads, for what is computed of an element
SPECIAL_PER_CYCLE = 16  # of them, on the special function units
ALONE = 2  # One warpgroup takes so much longer for an element than two together take for two.
# These count for one of sm_80, where each warp multiplies by itself. It is taken for all others.
WARP_PRODUCTS_PER_CYCLE = 1024
SHARED_BYTES_PER_CYCLE = 128  # that all warps read of shared memory

CLOSE = 1.01  # Of tiles whose times differ by no more than this, that which loads least is taken.
RARE = 1.03  # An unusual tile is only taken if it is expected to save more than this.
USUAL, USUAL_ROWS = 32, 128  # Tiles are usual with multiples of so many columns, and so many rows.
SHARED_BYTES = 227 * 1024  # of a thread block
MOST_STAGES = 12
# Rows of a tile, warpgroups, whether these work in turns, and the fewest and the most columns. A
# thread has at most 192 sums.
SHAPES = ((128, 2, False, 64, 256), (64, 1, False, 32, 256), (256, 2, False, 64, 192),
          (128, 2, True, 128, 192))  # fmt: skip
CLUSTERS = (2, 1)  # thread blocks along the rows that share the matrix's tiles
PARTS = (1, 2)  # narrower tiles that one of the last wave is cut into
NARROWEST = 64  # columns of a narrower tile
WGMMA_COLUMNS = 8  # that wgmma takes a multiple of
BOXES = (16, 32)  # rows of the left operand that are loaded, where there are no more
MANY = 1 << 20  # rows, for which all tiles are possible
MN_LINES = LINE, 32  # columns that a swizzled line has of a matrix (K, N), in whole tiles of them
MOST_SUMS = 128  # of a thread that has registers for what is read beside products
WHOLE_SUMS = 96  # of one that goes over its rows several times, if not one warpgroup multiplies
READ = (Role.ROW, Role.COLUMN)
# Rows, columns and warps of tiles without wgmma. A thread has at most 128 sums.
WARP_TILES = (
    (256, 128, 8), (128, 256, 8), (128, 128, 4), (128, 64, 4),
    (64, 256, 4), (64, 128, 4), (64, 64, 4), (64, 32, 4),
)  # fmt: skip
STORED_BYTES = 2 * 64 * 32 * 2  # of shared memory in which a warpgroup stages what it stores
BARRIER_BYTES = 2048  # of it for barriers, and for the alignment of tiles
EXCHANGE_BUFFERS = 2  # for what the tiles of a row exchange, as `MatmulTileConfig` has them
# The share of all multiprocessors that clusters of four and eight can have at a time, as a
# quotient: 120 of an H200's 132. The others are left in parts of the GPU that no cluster fits.
CLUSTERED = 10, 11
WARP_K = 32  # elements of K of a stage there
WARP_STAGES = 3, 8  # the fewest and the most


def tiles(kernel: Fused, major: str, arch: Arch, rows: int = MANY) -> list[Tile]:
    """The tiles that the kernel can have for so many rows, with as many stages as fit."""
    found = _of_warpgroups(kernel, rows) if arch.has_wgmma else _of_warps(arch)
    return [tile for tile in found if _is_possible(kernel, tile, major)]


def _of_warpgroups(kernel: Fused, rows: int) -> Iterator[Tile]:
    """Tiles for wgmma. No thread block of a cluster is idle, and of few rows no more are loaded.

    A warpgroup has 64 rows. One of them leaves more thread blocks for few rows than two.
    """
    words = EXCHANGE_BUFFERS * max(kernel.exchanges, default=0) * kernel.shares  # of each row
    box = next((box for box in BOXES if rows <= box < 64), 0)
    for height, groups, in_turns, fewest, most in SHAPES:
        left = SHARED_BYTES - STORED_BYTES * groups - BARRIER_BYTES - 4 * words * height
        a_rows = box if height == 64 else 0
        for columns in range(fewest, most + 1, WGMMA_COLUMNS):
            stages = min(left // (2 * 64 * (height + columns)), MOST_STAGES)
            for cluster, parts in itertools.product(CLUSTERS, PARTS):
                is_cut = columns % USUAL == 0 and columns // parts >= NARROWEST
                if rows > height * (cluster - 1) and (parts == 1 or is_cut):
                    yield Tile(
                        columns, height, cluster, stages, a_rows, groups, in_turns, parts
                    )


def _of_warps(arch: Arch) -> Iterator[Tile]:
    """Tiles for mma.sync. Each thread block takes 1 KiB beside its own shared memory."""
    for rows, columns, warps in WARP_TILES:
        tile = Tile(columns, rows, warps=warps, is_dependent=arch.dependent_launch)
        bytes_ = (arch.shared_bytes + 1024) // _blocks(tile) - 1024
        stages = min(bytes_ // (2 * WARP_K * (rows + columns)), WARP_STAGES[1])
        if stages >= WARP_STAGES[0]:
            yield replace(tile, stages=stages)


def _is_possible(kernel: Fused, tile: Tile, major: str) -> bool:
    """Whether a tile has a chunk of each product, and whole lines for all that copy them.

    Chunks that are no groups may overlap. wgmma takes 8 columns at a time, and the swizzle of its
    operands 8 lines. Four threads copy a line of a stage of a matrix (N, K).
    """
    columns, rest = divmod(tile.columns, tile.parts * len(kernel.operands))
    chunk = kernel.chunk if tile.warps or kernel.graph.group_size is not None else WGMMA_COLUMNS
    least = max(8 * tile.warps, 1)
    if major == "mn":  # all parts of a stage have the swizzled lines of the whole
        if tile.columns < MN_LINES[0]:  # boxes of less than a line of the L2 would be many
            return False
        least = next((size for size in MN_LINES if tile.columns % size == 0), MN_LINES[0])
    is_whole = not rest and columns >= kernel.chunk and columns % chunk == columns % least == 0
    if kernel.is_whole and not _has_all_columns(kernel, tile, columns):
        return False
    is_read = any(i.role in READ for i in kernel.others)
    return is_whole and not (is_read and _has_many_sums(kernel, tile))


def _has_all_columns(kernel: Fused, tile: Tile, columns: int) -> bool:
    """Whether rows are whole chunks, and as few of them as there can be, of a tile.

    Where tiles share a row, warpgroups do not work in turns: one that waits for another thread
    block would hold up the other's turn.
    """
    if kernel.shares > 1:
        is_alone = tile.cluster == tile.parts == 1 and not (tile.in_turns or tile.warps)
        return is_alone and columns == kernel.columns
    if tile.parts > 1 or columns % kernel.chunk or columns < kernel.n:
        return False
    return bool(tile.warps) or columns - kernel.chunk < max(kernel.n, 64 // len(kernel.operands))


def _has_many_sums(kernel: Fused, tile: Tile) -> bool:
    """Whether a thread has no registers for what is read beside products and nothing hides that.

    In turns, the products of the other warpgroup hide it.
    """
    threads = 32 * tile.warps or 128 * (1 if tile.in_turns else tile.warp_groups)
    sums = tile.rows * tile.columns // threads
    if kernel.is_whole and tile.warp_groups > 1:
        return sums > WHOLE_SUMS
    return not tile.in_turns and sums > MOST_SUMS


def choose_tile(kernel: Fused, major: str, rows: int, processors: int, arch: Arch) -> Tile | None:
    """The tile for so many rows, on a GPU of so many multiprocessors; None if none is possible.

    For no rows, which no kernel is launched for, it is that of one row.
    """
    rows = max(rows, 1)
    return fastest(kernel, tiles(kernel, major, arch, rows), rows, processors)


def fastest(kernel: Fused, found: list[Tile], rows: int, processors: int) -> Tile | None:
    """The one of some tiles that is expected to be fastest, or nearly so and better known."""
    times = {tile: cycles(kernel, tile, rows, processors) for tile in found}
    least = min(times.values(), default=0.0)
    usual = {tile: time for tile, time in times.items() if _is_usual(tile)}
    if usual and min(usual.values()) <= RARE * least:
        times, least = usual, min(usual.values())
    close = [tile for tile, time in times.items() if time <= CLOSE * least]
    return min(close, key=lambda t: (loaded(kernel, t, rows), times[t]), default=None)


def _is_usual(tile: Tile) -> bool:
    return tile.columns % USUAL == 0 and tile.rows <= USUAL_ROWS


def blocks_of_cluster(kernel: Fused, tile: Tile) -> int:
    """How many thread blocks a cluster has, along rows or along columns."""
    return tile.cluster * kernel.shares


def clusters_of(kernel: Fused, tile: Tile, processors: int) -> int:
    """How many clusters run at the same time, each thread block on a multiprocessor of its own."""
    blocks, (part, whole) = blocks_of_cluster(kernel, tile), CLUSTERED
    return max((processors if blocks <= 2 else processors * part // whole) // blocks, 1)


def _clusters(kernel: Fused, tile: Tile, rows: int) -> int:
    columns = tile.columns // len(kernel.operands) * kernel.shares
    return ceil(rows / (tile.rows * tile.cluster)) * ceil(kernel.n / columns)


def _loaded_rows(kernel: Fused, tile: Tile) -> float:
    """How many rows of both operands a thread block loads of L2 for a tile; clusters share them."""
    return (tile.a_rows or tile.rows) / kernel.shares + tile.columns / tile.cluster


def loaded(kernel: Fused, tile: Tile, rows: int) -> float:
    """How many rows of both operands all thread blocks load of L2."""
    blocks = _clusters(kernel, tile, rows) * blocks_of_cluster(kernel, tile)
    return blocks * _loaded_rows(kernel, tile)


def _blocks(tile: Tile) -> int:
    """How many thread blocks share a multiprocessor, so that one multiplies while another stores.

    Two of four warps have registers enough. A block of wgmma hides by itself what it loads.
    """
    return 2 if tile.warps == 4 else 1


def cycles(kernel: Fused, tile: Tile, rows: int, processors: int) -> float:
    """About how long the kernel takes on a GPU."""
    k, clusters = kernel.operands[0].product.k, _clusters(kernel, tile, rows)
    slots = clusters_of(kernel, tile, processors)
    waves, rest = divmod(clusters, slots)
    last = tile
    if waves and tile.parts > 1:
        last, rest = replace(tile, columns=tile.columns // tile.parts), rest * tile.parts
    # What a cluster reads of memory for an element of K: few rows wait for it.
    read = 2 * (rows + kernel.n * len(kernel.operands)) / clusters
    total = after = 0.0
    for each, count, at_work in (
        (tile, waves, slots), (last, ceil(rest / slots), min(rest, slots)),
    ):  # fmt: skip
        if not count:
            continue
        most = ALONE_BYTES_PER_CYCLE * at_work * blocks_of_cluster(kernel, tile)
        most = min(most, MEMORY_BYTES_PER_CYCLE * processors)
        from_memory = read * each.columns / tile.columns * at_work / most
        multiplied = k * max(_of_element_of_k(kernel, each), from_memory)
        after = _of_element(kernel, each) * each.rows * each.columns
        if each.in_turns:  # what follows one's products is hidden by those of the other
            total += count * max(multiplied + TURN_CYCLES, (multiplied + after) / 2)
        elif _blocks(each) > 1:
            total += count * multiplied
        else:
            total += count * (multiplied + TILE_CYCLES + after)
    is_hidden = tile.in_turns or _blocks(tile) > 1  # of all tiles but the last one
    return total + (TILE_CYCLES + after) * is_hidden


def _of_element(kernel: Fused, tile: Tile) -> float:
    """Cycles for what is computed of an element of a tile, for storing it and for other rows."""
    instructions, special = kernel.instructions
    computed = max(instructions / INSTRUCTIONS_PER_CYCLE, special / SPECIAL_PER_CYCLE)
    alone = ALONE if tile.in_turns or tile.warp_groups == 1 else 1
    read = kernel.row_bytes / MEMORY_BYTES_PER_CYCLE  # by all thread blocks at about the same time
    return (alone * (ELEMENT_CYCLES + computed) + read) / len(kernel.operands)


def _of_element_of_k(kernel: Fused, tile: Tile) -> float:
    """Cycles of a tile for each element of K: those of its products, or of what they wait for."""
    from_l2 = 2 * _loaded_rows(kernel, tile) / BYTES_PER_CYCLE
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

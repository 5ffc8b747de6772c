"""Kernels in which rows are products, where warps multiply by mma.sync: the tile and the context.

They are for architectures without wgmma, from sm_80 on. A thread block has one tile of the product.
All of its warps copy pieces of both operands to shared memory, several stages ahead (cp.async), and
each warp multiplies some rows of the tile by all of its columns. So the four lanes of a quad have
all columns of a row, and what follows a product is that of other kernels of products
(`htile/compute/tile_rows.py`). While a block stores, another one on its multiprocessor multiplies.

Products are summed over K in order, and no sum is split. So the bits of a row depend on that row
and the matrix alone: not on the tile, the number of rows or the place in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32
from cutlass.memory import SmemAllocator

from htile.compute.gemm import gemm, tiled_mma
from htile.compute.tile_rows import place_in_band
from htile.copy.matrix import GlobalToSharedLoader, SharedToRegLoader
from htile.types.global_tile import TileIterator
from htile.types.register import AccumulatorMap, AccumulatorTile, WarpLayout
from htile.types.shared import SharedTile
from htile.utils import Static

K_CHUNK = 32  # elements of K that are loaded as one stage
MOST_REGISTERS = 255  # of a thread
SLICE = 64  # columns of the matrices that a warp has in registers at a time, at most


@dataclass(frozen=True)
class WarpMatmulConfig:
    """The tile of a kernel with products.

    dtype: of both operands.
    tile: rows and columns of a thread block's tile. Several products share the columns.
    stages: how many chunks of K are on their way or being multiplied, at least 2.
    products: how many matrices the rows are multiplied by.
    major: which neighbours of the matrices are contiguous: "k" for (N, K), "mn" for (K, N).
    chunk: columns that a thread works on at a time, together with the three others of its quad.
    warps: how many there are. They take turns along the rows, in blocks of 16.
    """

    dtype: type = BFloat16
    tile: tuple[int, int] = (128, 128)
    stages: int = 4
    products: int = 1
    major: str = "k"
    chunk: int = 32
    warps: int = 4

    stored = None  # no result goes through shared memory

    @property
    def columns(self) -> int:
        """Columns of a product in a tile."""
        return self.tile[1] // self.products

    @property
    def slice(self) -> int:
        """Columns of the matrices that a warp multiplies by in one step."""
        return min(SLICE, self.tile[1])

    @property
    def layout(self) -> WarpLayout:
        """How the warps are laid over the tile."""
        return WarpLayout(self.warps, 1)

    @property
    def places(self) -> AccumulatorMap:
        """Which sums of the tile a thread has."""
        return AccumulatorMap(self.tile, self.layout)

    @property
    def free_registers(self) -> int:
        """Registers that a thread has beside its sums."""
        return MOST_REGISTERS - self.places.num_registers

    @property
    def blocks(self) -> int:
        """How many times 16 rows a warp has."""
        return self.places.num_blocks

    @property
    def block(self) -> list[int]:
        """The launch block."""
        return [self.layout.num_threads, 1, 1]

    @property
    def left_tile(self) -> SharedTile:
        """Where the left operand is staged."""
        return SharedTile(self.dtype, (self.tile[0], K_CHUNK), "k", self.stages)

    def right_tile(self, columns: int) -> SharedTile:
        """Where so many columns of the matrices are staged; all matrices lie side by side."""
        return SharedTile(self.dtype, (columns, K_CHUNK), self.major, self.stages)

    def tiles(self, m, n) -> tuple:
        """How many tiles M rows and N columns have, along rows and columns."""
        return cute.ceil_div(m, self.tile[0]), cute.ceil_div(n, self.columns)

    def tiled_mma(self) -> cute.TiledMma:
        """The product of all warps."""
        return tiled_mma(self.dtype, self.layout)


class WarpMatmulContext(Static):
    """What a kernel with products sets up first. It is made and used inside one @cute.kernel."""

    exchange = None  # A thread block has whole rows or groups of their columns.

    def __init__(self, config: WarpMatmulConfig):
        self.config = config

    def setup(
        self, left: cute.Tensor, rights: tuple, tiled_mma: cute.TiledMma, tiles: tuple, shape: tuple
    ) -> None:
        """Allocate shared memory.

        left, rights: the operands (M, K) and (N, K).
        tiles: how many tiles there are, along rows and columns.
        shape: (M, N) of the product.
        """
        c, self.tiled_mma, self.tiles, self.shape = self.config, tiled_mma, tiles, shape
        self.thread, _, _ = cute.arch.thread_idx()
        self.index, _, _ = cute.arch.block_idx()
        m, n = self.tile_at(self.index)
        whole, smem = c.right_tile(c.tile[1]), SmemAllocator()
        sA, sB = c.left_tile.allocate(smem), whole.allocate(smem)
        parts = [(TileIterator(left, c.left_tile.shape, m), c.left_tile, sA)]
        part = c.right_tile(c.columns)
        for p, right in enumerate(rights):
            sP = cute.local_tile(sB, (*part.shape, c.stages), (p, 0, 0))
            parts.append((TileIterator(right, part.shape, n), part, sP))
        threads = c.layout.num_threads
        self.loads = [
            (source, GlobalToSharedLoader(tile, sX, threads, self.thread))
            for source, tile, sX in parts
        ]
        self.chunks = parts[0][0].count
        self.left = SharedToRegLoader(c.left_tile, sA, tiled_mma, "a", self.thread)
        part = c.right_tile(c.slice)
        slices = [
            cute.local_tile(sB, (*part.shape, c.stages), (s, 0, 0))
            for s in range(c.tile[1] // c.slice)
        ]
        self.rights = [
            SharedToRegLoader(part, sP, tiled_mma, "b", self.thread) for sP in slices
        ]
        self.rA = self.left.make_tile()
        self.rB = [right.make_tile() for right in self.rights]
        self.acc = AccumulatorTile(tiled_mma, c.places)

    def tile_at(self, index) -> tuple:
        """(row, column) of a tile by its number."""
        return place_in_band(index, self.tiles)

    def _load(self, k, stage) -> None:
        """Start to load a chunk of K into a stage. A chunk beyond K is zeros."""
        for source, loader in self.loads:
            loader.load(source[k], stage)
        cute.arch.cp_async_commit_group()

    def _await(self) -> None:
        """Wait for the stage that was loaded first. All warps have read the one before it."""
        cute.arch.cp_async_wait_group(self.config.stages - 2)
        cute.arch.sync_threads()

    def _read(self, stage, step: tuple[int, int]) -> None:
        """Read what a step of a stage multiplies into registers."""
        block, s = step
        if s == 0:
            self.left.load(stage, block, self.rA)
        self.rights[s].load(stage, block, self.rB[s])

    def _multiply_step(self, step: tuple[int, int]) -> None:
        block, s = step
        sums = self.acc.of_columns(s * self.config.slice, self.config.slice)
        gemm(self.tiled_mma, self.rA.block(block), self.rB[s].block(block), sums)

    @cute.jit
    def multiply(self):
        """The products of the thread block's tile.

        A step is 16 elements of K by a slice of columns. Registers are read a step ahead.
        """
        stages = self.config.stages
        steps = [(b, s) for b in range(self.left.blocks) for s in range(len(self.rights))]
        self.acc.fill(0)
        for stage in cutlass.range_constexpr(stages - 1):
            self._load(stage, stage)
        self._await()
        self._read(0, steps[0])
        stage, free = Int32(0), Int32(stages - 1)
        for k in cutlass.range(self.chunks, unroll=1):
            following = stage + 1 if stage + 1 < stages else 0
            for i in cutlass.range_constexpr(len(steps)):
                if cutlass.const_expr(i + 1 < len(steps)):
                    self._read(stage, steps[i + 1])
                else:
                    self._await()
                    self._read(following, steps[0])
                if cutlass.const_expr(i == 0):
                    self._load(k + stages - 1, free)
                self._multiply_step(steps[i])
            free, stage = stage, following
        cute.arch.cp_async_wait_group(0)

"""The context that every row-wise kernel begins with, and the verbs that move its rows.

A kernel makes an `ElementwiseKernelContext` and calls `setup`. The context then has this thread's
part of a row (`htile/copy/tile.py`) and reduces over the row (`htile/compute/row.py`). The loaders
and the storer (`htile/copy/loaders.py`) bring rows to registers and back.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, const_expr
from cutlass.memory import SmemAllocator

from htile.compute.row import RowReductions
from htile.config import ElementwiseTileConfig
from htile.copy.loaders import (
    ElementwiseLoader,
    ElementwiseStorer,
    GlobalToRegLoader,
    PrefetchedChunks,
)
from htile.copy.shifted import Staging

__all__ = [
    "ElementwiseKernelContext",
    "ElementwiseLoader",
    "ElementwiseStorer",
    "GlobalToRegLoader",
    "PrefetchedChunks",
]


def _columns(mX: cute.Tensor) -> int | Int32:
    """How many columns a row tensor has, which may be groups of them."""
    return cute.size(mX, mode=[1]) if isinstance(mX.shape[1], tuple) else mX.shape[1]


class ElementwiseKernelContext(RowReductions):
    """What a row-wise kernel sets up first. It is made and used inside one @cute.kernel."""

    def __init__(self, config: ElementwiseTileConfig):
        self.config = config

    def setup(
        self,
        mX: cute.Tensor,
        tiler_mn: tuple[int, int],
        tiled_copy: cute.TiledCopy,
        extra_smem_tensors: int | tuple = 0,
        shared: bool = True,
        turns: int = 1,
    ) -> None:
        """Find this thread's row and columns, allocate shared memory, and start the cluster.

        mX: a row tensor (M, N), or ((...), N) as `as_rows` makes it of more leading dimensions.
        tiler_mn, tiled_copy: the tile and the map, from `ElementwiseTileConfig`.
        extra_smem_tensors: how many more tiles of mX's dtype to allocate in shared memory, or a
            tuple of their dtypes.
        shared: whether mX gets a tile in shared memory. Without one its rows go straight to
            registers.
        turns: how many rows of each tensor have a tile of their own, one after the other; with more
            than 1 a tile has a third mode for them.
        """
        config = self.config
        self.shape, self.tiler_mn = (cute.size(mX, mode=[0]), _columns(mX)), tiler_mn
        self.leading = mX.shape[0]
        self.tidx, _, _ = cute.arch.thread_idx()
        self.bidx, self.cluster_y, _ = cute.arch.block_idx()
        if const_expr(config.apart):
            self.bidx, self.cluster_y = self.bidx // config.ctas, self.bidx % config.ctas
        elif const_expr(config.ctas == 1):
            self.cluster_y = 0
        # With one row a CTA, the grid is exact, and no row is out of bounds.
        group = self.tidx // config.threads_per_row
        self.row = self.bidx * config.rows + group // config.abreast
        self.row_in_bounds = True if const_expr(config.rows == 1) else self.row < self.shape[0]
        self.beside = 0 if config.abreast == 1 else group % config.abreast
        self.rank = self.cluster_y * config.abreast + self.beside
        self.tile, self.share, self.k = self.rank, 0, 0

        self.thr_copy = tiled_copy.get_slice(self.tidx)
        self.capacity = tiler_mn[1] * config.abreast * config.ctas
        self._take_columns()
        self.vec_size = cute.size(self.tXcX, mode=[0])
        self.num_chunks = cute.size(self.tXcX, mode=[2]) // config.turns

        smem = SmemAllocator()
        extra = extra_smem_tensors
        extra = (mX.element_type,) * extra if isinstance(extra, int) else tuple(extra)
        dtypes = (mX.element_type, *extra) if shared else extra
        tiles = [self._allocate_tile(smem, dtype, turns) for dtype in dtypes]
        self.sX = tiles.pop(0) if shared else None
        self.extra_sX = tiles
        buffer, mbar_ptr = config.allocate_reduction_buffer_and_mbar(smem)
        self.reduction_buffer, self.mbar_ptr = buffer, mbar_ptr
        self.staging = Staging(self)

        self.tXgX = self.partition_dest(self.partition_global(mX))
        has_tile = shared and turns == 1
        self.tXsX = self.partition_dest(self.sX) if has_tile else None
        self.tXrX = self.make_fragment(self.tXgX, mX.element_type)
        self._cluster_pending = config.has_mbars
        config.initialize_cluster(self.tidx, mbar_ptr)

    def _allocate_tile(self, smem: SmemAllocator, dtype: type, turns: int) -> cute.Tensor:
        """A row-major tile of `dtype` in shared memory, or one for each turn.

        A vector follows it where a shifted result may take its place (`StagedRow`). With turns, the
        pieces of a shifted row are one more than its vectors (`PiecesAhead`).
        """
        layout = cute.make_ordered_layout(self.tiler_mn, order=(1, 0))
        more = self.vec_size if self.config.shifted else 0
        if turns > 1:
            rows, columns = self.tiler_mn
            layout = cute.make_ordered_layout((rows, columns + more, turns), order=(1, 0, 2))
            more = 0
        memory = smem.allocate_tensor(
            dtype, cute.make_layout(cute.cosize(layout) + more), byte_alignment=16
        )
        return cute.make_tensor(memory.iterator, layout)

    # The pipeline of one tensor, as a whole

    def load_to_smem_and_regs(self) -> None:
        """Load mX through shared memory into tXrX. What is out of bounds becomes 0."""
        ElementwiseLoader(self).load_into(self.tXgX, self.tXsX, self.tXrX)

    def store_from_regs(self, tXrO: cute.Tensor, tXgO: cute.Tensor) -> None:
        """Store a fragment to a partition of global memory, where row and column are in bounds."""
        self.copy_row(tXrO, tXgO)

    def prefetch(
        self,
        count: int,
        *tensors: cute.Tensor,
        backwards: bool = False,
        padding: float = 0,
        ends: tuple | None = None,
        there: tuple | None = None,
    ) -> PrefetchedChunks:
        """The chunks of the row with what they have of `tensors`, loaded `count` chunks ahead.

        tensors: rows (M, N) and vectors (N,). The loads of the first chunks start here.
        ends: for each of them the column from which on nothing is loaded, or None.
        there: for each of them which columns are in memory, as for `load_row`, or None.
        """
        return PrefetchedChunks(self, count, tensors, backwards, padding, ends, there)

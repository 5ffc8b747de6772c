"""Vectors that all rows share, on their way to shared memory while rows are on theirs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import const_expr

from htile.copy.shifted import memory_of
from htile.copy.vector import are_neighbours, vector_copy
from htile.utils import Static, as_bytes, element_bits, expand

if TYPE_CHECKING:
    from htile.copy.tile import RowTile

LEAST_BITS = 32  # of what cp.async moves at a time


class StagedColumn(Static):
    """What a thread block with one row has of a vector (N,), on its way to shared memory.

    It takes no registers until it is read. Each thread reads only what it has copied itself, so
    that no barrier is needed.

    tile: where it arrives. Once a thread has read a vector for the last time, a result of as many
        bytes may take its place.
    """

    def __init__(self, ctx: RowTile, mW: cute.Tensor):
        tXgW = ctx.partition_dest(ctx.partition_global(expand(mW, 0, ctx.shape[0])))
        dtype = as_bytes(tXgW).element_type
        size = ctx.vec_size * element_bits(dtype) // 8
        vectors = cute.size(ctx.tXcX, mode=[2]) * ctx.config.num_threads
        memory = memory_of(vectors + 1, size)  # one more, as every tile has that a result may take
        layout = cute.make_ordered_layout(ctx.tiler_mn, order=(1, 0))
        self.tile = cute.make_tensor(cute.recast_ptr(memory, dtype=dtype), layout)
        tXsW = ctx.partition_dest(self.tile)
        width = ctx.num_copy_elems(dtype) if are_neighbours(tXgW) else 1
        if const_expr(width * element_bits(dtype) < LEAST_BITS or ctx.is_shifted_column(mW)):
            cute.autovec_copy(as_bytes(ctx.load_column(mW)), tXsW)
            return
        as_shared = {"is_async": True, "is_shared": True, "num_copy_elems": width}
        vector_copy(as_bytes(tXgW), tXsW, pred=ctx.tXpX, **as_shared)
        cute.arch.cp_async_commit_group()

    def arrived(self) -> cute.Tensor:
        """The tile, once all that this thread has copied is there."""
        cute.arch.cp_async_wait_group(0)
        return self.tile

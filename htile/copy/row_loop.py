"""The rows of a group, one after the other: a loop for kernels that add up over rows.

Rows are dealt to groups in turn: row i belongs to group `i % groups`. Each group has the threads of
one row of a CTA, or of a cluster. How many groups there are does not depend on the rows, so neither
does the order in which a group adds.
"""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Int32, Numeric, const_expr
from cutlass.memory import SmemAllocator

from htile.compute.exchange import wait_for_share
from htile.copy.loaders import as_fragment
from htile.copy.pieces_ahead import PiecesAhead
from htile.utils import WARP, Static, element_bits

if TYPE_CHECKING:
    from htile.copy.tile import RowTile
    from htile.dataflow import ElementwiseKernelContext

TURNS = 2  # Rows that follow each other take so many tiles and reduction buffers in turn.


class RowLoop(Static):
    """The loop of this thread's group over its rows.

    ctx: the context, which stands at the first row of each group: its row is the number of the
        group. Its reduction buffer has `TURNS` times the slots that a row takes. All exchanges of a
        row pass a barrier, so a slot that is used again two rows later has been read by all.
    groups: how many groups there are, a multiple of the rows of a CTA.

    count: how many rows the first group of the CTA has. The others of the CTA have as many, or one
        fewer: then a row is out of bounds.
    """

    def __init__(self, ctx: ElementwiseKernelContext, groups: int):
        if groups % ctx.config.rows:
            raise ValueError(
                f"{groups} groups are no multiple of the {ctx.config.rows} rows of a thread block"
            )
        ctx.cluster_wait()
        self.ctx, self.groups, self._memory = ctx, groups, None
        self.first = ctx.bidx * ctx.config.rows
        self.count = (ctx.shape[0] - self.first - 1) // groups + 1

    def row(self, k: int | Int32, is_there: bool = True) -> ElementwiseKernelContext:
        """The context of the k-th row of each group.

        is_there: whether the first group of the CTA is known to have it.
        """
        ctx, done = self.ctx, k * self.groups
        part = copy.copy(ctx)
        part.row = ctx.row + done
        if const_expr(ctx.config.rows > 1 or not is_there):
            # What is left is compared, because the number of a row might exceed 32 bits.
            part.row_in_bounds = ctx.row - self.first < ctx.shape[0] - self.first - done
        columns = ctx.tXpX
        part._predicates = columns, part._copy_predicate(columns), ctx.tXpWhole
        slots, turn = ctx.config.stage // TURNS, k % TURNS
        if const_expr(ctx.reduction_buffer is not None):
            buffer = ctx.reduction_buffer
            start = buffer[None, None, turn * slots].iterator
            part.reduction_buffer = cute.make_tensor(start, buffer.layout)
        if const_expr(ctx.mbar_ptr is not None):
            part.mbar_ptr = ctx.mbar_ptr + turn * slots
            part.phase = k // TURNS % 2
        return part

    @property
    def batch(self) -> int:
        """How many rows the lanes of a warp hold the numbers of, one each."""
        return min(WARP, self.ctx.config.threads_per_row)

    def values(self, k: int | Int32, tensors: tuple[cute.Tensor, ...]) -> tuple[Numeric, ...]:
        """What this lane holds for a batch of rows from the k-th on: the numbers of one of them.

        tensors: tensors (M,) of 4 bytes an element.
        """
        row = self.row(k + self.ctx.tidx % self.batch, is_there=False)
        return tuple(row.load_row_value(mT) for mT in tensors)

    @cute.jit
    def next_values(self, k, tensors: tuple, held: tuple):
        """What this lane holds for the row after the k-th, whose numbers have been read.

        held: what it holds for the k-th. Only after the last row of a batch is anything loaded.
        With a load in each row, the next read of shared memory would wait for it, where the two
        have one scoreboard.
        """
        if (k + 1) % self.batch == 0:
            held = self.values(k + 1, tensors)
        return held

    def value(self, k: Int32, held: Numeric) -> Numeric:
        """The number of the k-th row, of what the lanes hold of one tensor."""
        place = k % self.batch
        if self.batch < WARP:
            lane = cute.arch.lane_idx()
            place += lane - lane % self.batch
        return cute.arch.shuffle_sync(held, place)

    def of_part(self) -> ElementwiseKernelContext:
        """The context whose row is the number of the CTA, or cluster; of its first group only."""
        part, ctx = copy.copy(self.ctx), self.ctx
        part.row, part.row_in_bounds = ctx.bidx, True
        part.leading = ctx.shape[0]  # CTAs are counted in one dimension, also if rows are not
        if const_expr(ctx.config.rows > 1):
            part.row_in_bounds = ctx.row == self.first
        return part

    @property
    def slot(self) -> Int32:
        """Which group of its CTA this is."""
        return self.ctx.row - self.first

    def scratch(self, dtype: type[Numeric], shape: tuple[int, int]) -> cute.Tensor:
        """Shared memory of this shape, row after row, once all rows are done.

        It is that of the tiles where they are large enough. A barrier has to follow before it is
        written.
        """
        layout = cute.make_layout(shape, stride=(shape[1], 1))
        tile, size = self.ctx.sX, shape[0] * shape[1] * dtype.width // 8
        if tile is not None and cute.size(tile) * element_bits(tile.element_type) // 8 >= size:
            cute.arch.cp_async_wait_group(0)
            return cute.make_tensor(cute.recast_ptr(tile.iterator, dtype=dtype), layout)
        if self._memory is None or self._memory[1] < size:  # one for all results of a size
            made = SmemAllocator().allocate_tensor(dtype, layout, byte_alignment=16)
            self._memory = made, size
        return cute.make_tensor(cute.recast_ptr(self._memory[0].iterator, dtype=dtype), layout)


class RowsAhead(Static):
    """Rows of several tensors on their way through shared memory (cp.async), one row ahead.

    loop: the loop, whose context has `TURNS` tiles in shared memory for each tensor.
    tensors: the row tensors (M, N). The loads of the first row start here.
    ends: for each tensor the column from which on nothing is loaded, or None. By default there is
        no such column, as of shifted rows.
    """

    def __init__(
        self, loop: RowLoop, *tensors: cute.Tensor, ends: tuple[int | None, ...] | None = None
    ):
        self.loop, self.tensors = loop, tensors
        self.ends = (None,) * len(tensors) if ends is None else ends
        self.tiles = [loop.ctx.sX, *loop.ctx.extra_sX]
        self.is_shifted = loop.ctx.config.shifted
        self._start(0)

    def _start(self, k: int | Int32) -> None:
        """Issue the loads of the k-th row, if there is one."""
        row = self.loop.row(k, is_there=isinstance(k, int))
        if self.is_shifted:
            for pieces in self._pieces(row, k):
                pieces.copy()
        else:
            for (mX, tile), end in zip(self._in_turn(k), self.ends, strict=True):
                tXgX = row.partition_dest(row.partition_global(mX))
                row.until(end).copy_row(tXgX, row.partition_dest(tile), is_async=True)
        cute.arch.cp_async_commit_group()

    def _in_turn(self, k: int | Int32) -> list[tuple[cute.Tensor, cute.Tensor]]:
        """Each tensor, and the tile that its k-th row has."""
        tiles = [tile[None, None, k % TURNS] for tile in self.tiles]
        return list(zip(self.tensors, tiles, strict=True))

    def _pieces(self, row: RowTile, k: int | Int32) -> list[PiecesAhead]:
        """The pieces that each tensor has of the k-th row, whose context is `row`."""
        return [PiecesAhead(row, mX, tile) for mX, tile in self._in_turn(k)]

    def take(self, k: Int32) -> tuple[cute.Tensor, ...]:
        """The fragments of the k-th row. The loads of the next one start before it is waited for.

        A thread reads what it has copied itself, so no barrier is needed. But of shifted rows it
        also reads pieces that other threads have copied. And the next row overwrites what they have
        read of the row before: where its threads have exchanged nothing since, they wait here.
        """
        ctx = self.loop.ctx
        if self.is_shifted and ctx.reduction_buffer is None:
            wait_for_share(ctx.tidx, ctx.config.num_threads, ctx.config.threads_per_row)
        self._start(k + 1)
        cute.arch.cp_async_wait_group(1)
        if not self.is_shifted:
            return tuple(as_fragment(ctx, tile) for _, tile in self._in_turn(k))
        wait_for_share(ctx.tidx, ctx.config.num_threads, ctx.config.threads_per_row)
        return tuple(pieces.vectors() for pieces in self._pieces(self.loop.row(k), k))

"""Reductions of rows of products, in the tiles that have all columns of them.

A thread has a part of each of its rows, and the four lanes of a quad have all that the tile has of
it. Where the tile has the whole row, no other thread takes part. Wider rows are shared by the tiles
of a cluster, which exchange what they have of them. In which order a row's elements combine depends
on the function and the lengths of both operands' rows alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64, const_expr
from cutlass.memory import SmemAllocator

from htile.compute.exchange import begin_barriers
from htile.compute.math import lt, where
from htile.compute.mean import quotient
from htile.compute.operands import Vector, make_vector, select
from htile.compute.products import Product
from htile.compute.reduce import (
    ADD,
    MAX,
    MIN,
    combine,
    combine_terms,
    identity,
    thread_reduce,
    warp_reduce,
)
from htile.utils import Static, elem_pointer, store_shared_remote

if TYPE_CHECKING:
    from htile.compute.tile_rows import TileChunk, TileRows
    from htile.matmul import MatmulTileConfig

QUAD = 4  # lanes that have the columns of one row of a tile


class RowPartial(Static):
    """A reduction of each of a thread's rows, chunk by chunk: one number for each."""

    def __init__(self, rows: TileRows, op: cute.ReductionOp):
        self.rows, self.op = rows, op
        self.parts = [Float32(identity(op, Float32)) for _ in range(rows.places.num_rows)]

    def take(self, chunk: TileChunk, value: Vector | Product) -> None:
        """Combine with the values of a chunk. Columns behind the end of the row do not count."""
        value = _until_end(chunk, value, identity(self.op, Float32))
        part = thread_reduce(value, self.op)
        self.parts[chunk.r] = combine(self.op, self.parts[chunk.r], part)

    def reduced(self) -> Vector:
        """The results of all rows, as a vector."""
        (found,) = _of_rows(self.rows, [self])
        return make_vector(found, (len(found),), Float32)


class RowMeans(Static):
    """The mean of each of a thread's rows. If all elements of a row are equal, it is exactly that.
    """

    OPS = (ADD, MAX, MIN)

    def __init__(self, rows: TileRows):
        self.rows = rows
        self.parts = [RowPartial(rows, op) for op in self.OPS]

    def take(self, chunk: TileChunk, value: Vector | Product) -> None:
        """Go on with the values of a chunk."""
        total, *ends = self.parts
        total.take(chunk, value)
        rounded = value.rounded() if isinstance(value, Product) else value
        for part in ends:
            part.take(chunk, rounded)

    def reduced(self) -> Vector:
        """The means of all rows, as a vector."""
        each = zip(*_of_rows(self.rows, self.parts), strict=True)
        n = self.rows.ctx.shape[1]
        means = [select(high == low, high, quotient(total, n)) for total, high, low in each]
        return make_vector(means, (len(means),), Float32)


class RowExchange(Static):
    """What the tiles of a cluster that share rows hand each other of them, in shared memory.

    Exchanges take two buffers in turns, and each warpgroup has barriers of its own. No buffer is
    written before it is read. A thread block writes to a buffer again two exchanges later. By then
    it has the words of the exchange between from every warp, and each warp has sent those after its
    reads.

    place: of the warpgroup, among those of the tile. rank: which tile of the row this one is.
    """

    def __init__(self, config: MatmulTileConfig, smem: SmemAllocator, tidx, place, rank):
        self.config, self.tidx, self.place, self.rank = config, tidx, place, rank
        self.shares = config.cluster[1]
        shape = self.shares, config.tile[0], config.words, config.buffers
        self.words = smem.allocate_tensor(Float32, cute.make_layout(shape), 16)
        count = config.buffers * config.sharers
        self.barriers = smem.allocate_array(Int64, count)
        begin_barriers(self.barriers, count, 1)

    def combine(self, rows: TileRows, parts: list[list[Float32]], ops: list, number) -> list[list]:
        """What all tiles have of each row, from what this one has of it.

        parts: for each op a number of each row, which all lanes of a quad have.
        number: of this exchange among those of the thread block.
        """
        buffers = self.config.buffers
        buffer, phase = number % buffers, number // buffers % 2
        barrier = self.barriers + buffers * self.place + buffer
        own = [rows.places.row(rows.thread, r) for r in range(rows.places.num_rows)]
        self._send(parts, own, buffer, barrier)
        cute.arch.mbarrier_wait(barrier, phase)
        return [
            [combine_terms(self._words_of(row, k, buffer), op) for row in own]
            for k, op in enumerate(ops)
        ]

    def _words_of(self, row, k: int, buffer) -> list[Float32]:
        """What the tiles have sent of a row, in their order."""
        return [self.words[share, row, k, buffer] for share in range(self.shares)]

    @cute.jit
    def _send(self, parts: list, rows: list, buffer, barrier):
        """Each lane of a quad sends to every fourth tile."""
        c = self.config
        if cute.arch.warp_idx() % 4 == 0:
            with cute.arch.elect_one():
                bytes_ = self.shares * (c.tile[0] // c.sharers) * len(parts) * 4
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, bytes_)
        for first in cutlass.range_constexpr(0, self.shares, QUAD):
            peer = self.tidx % QUAD + first
            if peer < self.shares:
                for k in cutlass.range_constexpr(len(parts)):
                    for r in cutlass.range_constexpr(len(rows)):
                        to = elem_pointer(self.words, (self.rank, rows[r], k, buffer))
                        store_shared_remote(parts[k][r], to, barrier, peer)


def _of_rows(rows: TileRows, partials: list[RowPartial]) -> list[list[Float32]]:
    """For each of some reductions the results of all rows."""
    found = [[warp_reduce(part, each.op, QUAD) for part in each.parts] for each in partials]
    return rows.exchanged(found, [each.op for each in partials])


def _until_end(chunk: TileChunk, value: Vector | Product, neutral) -> Vector | Product:
    """The values, with what leaves a reduction as it is in columns behind the end of the row."""
    n, c = chunk.rows.ctx.shape[1], chunk.rows.config
    # All tiles of a row have the same code, so what holds for the last of them decides.
    before = 0 if chunk.rows.ctx.exchange is None else (c.cluster[1] - 1) * c.columns
    if const_expr(before + chunk.start + c.chunk <= n):
        return value
    inside = lt(chunk.cols, n)
    if isinstance(value, Product):
        return value.map(lambda factor: where(inside, factor, 0.0))
    return where(inside, value, Float32(neutral))

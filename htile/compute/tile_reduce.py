"""Reductions of the rows of a tile that has all columns of them.

A thread has a part of each of its rows, and the four lanes of a quad have all of it. So no other
thread takes part. In which order a row's elements combine depends on the number of columns alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass.cute as cute
from cutlass import Float32, const_expr

from htile.compute.math import lt, where
from htile.compute.mean import quotient
from htile.compute.operands import Vector, make_vector, select
from htile.compute.products import Product
from htile.compute.reduce import ADD, MAX, MIN, combine, identity, thread_reduce, warp_reduce
from htile.utils import Static

if TYPE_CHECKING:
    from htile.compute.tile_rows import TileChunk, TileRows

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

    def of_rows(self) -> list[Float32]:
        """The result of each row."""
        return [warp_reduce(part, self.op, QUAD) for part in self.parts]

    def reduced(self) -> Vector:
        """The results of all rows, as a vector."""
        found = self.of_rows()
        return make_vector(found, (len(found),), Float32)


class RowMeans(Static):
    """The mean of each of a thread's rows. If all elements of a row are equal, it is exactly that.
    """

    def __init__(self, rows: TileRows):
        self.rows = rows
        self.parts = [RowPartial(rows, op) for op in (ADD, MAX, MIN)]

    def take(self, chunk: TileChunk, value: Vector | Product) -> None:
        """Go on with the values of a chunk."""
        total, *ends = self.parts
        total.take(chunk, value)
        rounded = value.rounded() if isinstance(value, Product) else value
        for part in ends:
            part.take(chunk, rounded)

    def reduced(self) -> Vector:
        """The means of all rows, as a vector."""
        each = zip(*(part.of_rows() for part in self.parts), strict=True)
        n = self.rows.ctx.shape[1]
        means = [select(high == low, high, quotient(total, n)) for total, high, low in each]
        return make_vector(means, (len(means),), Float32)


def _until_end(chunk: TileChunk, value: Vector | Product, neutral) -> Vector | Product:
    """The values, with what leaves a reduction as it is in columns behind the end of the row."""
    n = chunk.rows.ctx.shape[1]
    if const_expr(chunk.start + chunk.rows.config.chunk <= n):
        return value
    inside = lt(chunk.cols, n)
    if isinstance(value, Product):
        return value.map(lambda factor: where(inside, factor, 0.0))
    return where(inside, value, Float32(neutral))

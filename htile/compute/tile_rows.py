"""A thread's rows of a tile of products, and the chunks of columns that it works on.

What is emitted for rows that are products calls these: a chunk has the elements of the products, of
other rows and of columns, reduces groups of columns, and stores results.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr
from cutlass.cute.nvgpu import warp

from htile.compute.conversion import convert
from htile.compute.reduce import make_vector, thread_reduce, warp_reduce
from htile.compute.tile_reduce import QUAD, RowMeans, RowPartial
from htile.copy.tma import SharedToGlobalStorer
from htile.utils import Static

if TYPE_CHECKING:
    from htile.matmul import MatmulKernelContext
    from htile.warp_matmul import WarpMatmulContext

WARPGROUP = 128  # threads
BLOCK = 64  # rows that one instruction of a warpgroup multiplies
BAND = 8  # tiles along the rows that follow each other, so that L2 has what they share


def place_in_band(index, tiles: tuple) -> tuple:
    """(row, column) of a tile by its number: bands of `BAND` tiles along the rows.

    tiles: how many there are, along rows and columns.
    """
    tiles_m, tiles_n = tiles
    band = index // (BAND * tiles_n)
    inside = index - band * (BAND * tiles_n)
    height = cutlass.min(tiles_m - band * BAND, BAND)
    n = inside // height
    return band * BAND + inside - n * height, n


class TileRows(Static):
    """The rows of one tile as a thread has them: two of each block, and of these a quarter.

    ctx: of a kernel of wgmma (htile/matmul.py) or of mma.sync (htile/warp_matmul.py).
    index: of the tile among all of them.
    number: of the tile among those of this thread block. Only rows that several thread blocks share
        need it.
    """

    def __init__(self, ctx: MatmulKernelContext | WarpMatmulContext, index, number=None):
        self.ctx, self.config = ctx, ctx.config
        self.number, self.exchanges = number, 0  # what has been exchanged so far of the tile
        c, self.tile = ctx.config, ctx.tile_at(index)
        self.thread, self.places, self.vec_size = ctx.thread, c.places, c.chunk // QUAD
        self.m, self.n = self.tile[0] * c.tile[0], self.tile[1] * c.columns
        if const_expr(c.stored is not None):
            atom = cute.make_copy_atom(warp.StMatrix8x8x16bOp(False, 4), c.stored)
            mma = c.tiled_mma(1)
            self.copy = cute.make_tiled_copy_S(atom, cute.make_tiled_copy_C_atom(atom, mma))
            self.tRsO = self.copy.get_slice(ctx.tidx % WARPGROUP).partition_D(ctx.storer.sT)
            self.rO = cute.make_rmem_tensor(self.tRsO.shape[:3], c.stored)

    def row(self, r: int):
        """The row of the whole product that is the thread's r-th."""
        return self.m + self.places.row(self.thread, r)

    def load_row_value(self, mT: cute.Tensor) -> cute.TensorSSA:
        """An element of a tensor (M,) for each row. Behind the last row it is the last one's."""
        last = self.ctx.shape[0] - 1
        count = self.places.num_rows
        values = [mT[cutlass.min(self.row(r), last)] for r in range(count)]
        return make_vector(values, (count,), mT.element_type)

    def prefetch(self, *tensors: cute.Tensor, in_pairs: bool = True) -> LoadedAhead:
        """What the chunks have of tensors (M, N) and (N,). The first chunks are loaded now."""
        return LoadedAhead(self, tensors, in_pairs)

    def partial(self, op: cute.ReductionOp) -> RowPartial:
        """A reduction of each row, where the tile has all its columns, or those of a cluster do."""
        return RowPartial(self, op)

    def partial_mean(self) -> RowMeans:
        """The mean of each row, likewise."""
        return RowMeans(self)

    def exchanged(self, parts: list[list], ops: list) -> list[list]:
        """What all tiles of a row have of it, from a number of each row for each op."""
        if self.ctx.exchange is None:
            return parts
        number = self.number * self.config.exchanges + self.exchanges
        self.exchanges += 1
        return self.ctx.exchange.combine(self, parts, ops, number)

    @property
    def count(self) -> int:
        """How many chunks the rows of a block have."""
        return -(-self.config.columns // self.config.chunk)

    @property
    def num_chunks(self) -> int:
        """How many pairs of chunks all rows have, one pair for each two rows of a block."""
        return self.config.blocks * self.count

    def chunk(self, i: int, half: int) -> TileChunk:
        """The chunk of one of the two rows of pair `i`.

        All chunks are equally wide. So the last one of a row may have columns of the one before,
        which are computed and stored twice, with the same bits.
        """
        c, (block, k) = self.config, divmod(i, self.count)
        return TileChunk(self, k, min(k * c.chunk, c.columns - c.chunk), 2 * block + half)

    def chunks(self, ahead: LoadedAhead | None = None):
        """The chunks of all rows, which are to be worked on one after the other.

        ahead: from `prefetch`; the elements of its tensors are given with each chunk.
        """
        for i in range(self.num_chunks):
            self.has_stored = False
            for half in range(2):
                chunk = self.chunk(i, half)
                yield chunk if ahead is None else (chunk, *ahead.take(i, half))
            if self.has_stored:
                self._flush(chunk.start, i // self.count, i)

    @cute.jit
    def _flush(self, start: cutlass.Constexpr, block: cutlass.Constexpr, count: cutlass.Constexpr):
        """Store the chunk that all rows of a block have by now, from column `start` on."""
        ctx, c = self.ctx, self.config
        stage = ctx.group * c.STORE_STAGES + count % c.STORE_STAGES
        if ctx.warp % 4 == 0:  # a tile's first chunk may have the stage of the last tile's last one
            SharedToGlobalStorer.wait(c.STORE_STAGES - 1 if count else 0)
        cute.arch.barrier(barrier_id=1 + ctx.group, number_of_threads=WARPGROUP)
        cute.copy(self.copy, self.rO, self.tRsO[None, None, None, stage])
        cute.arch.fence_proxy("async.shared", space="cta")
        cute.arch.barrier(barrier_id=1 + ctx.group, number_of_threads=WARPGROUP)
        if ctx.warp % 4 == 0:
            row = self.m + BLOCK * (ctx.place + c.sharers * block)
            ctx.storer.store(stage, (row, self.n + start))


class LoadedAhead(Static):
    """The elements of tensors for the chunks of some rows, a few chunks before they are needed.

    Nothing moves a load across the barriers of a store, so it would be waited for in each chunk.
    Where the sums leave few registers, each chunk is loaded when it is worked on.
    """

    COLUMNS = 96  # that are loaded ahead, of two rows; of wider chunks none, to save registers
    ROOM = 96  # registers beside the sums from which on there is room for what is loaded ahead

    def __init__(self, rows: TileRows, tensors: tuple, in_pairs: bool):
        self.rows, self.tensors, self.in_pairs = rows, tensors, in_pairs
        has_room = rows.config.free_registers >= self.ROOM
        self.depth = self.COLUMNS // rows.config.chunk if has_room else 0
        self.loaded: dict[tuple[int, int], list] = {}
        for i in range(min(self.depth, rows.num_chunks)):
            self._load(i, 0)
            self._load(i, 1)

    def take(self, i: int, half: int) -> list:
        """What chunk i of one of its two rows has; another one is loaded in its place."""
        ahead = i + self.depth
        if ahead < self.rows.num_chunks and (self.depth == 0 or half == 0):
            self._load(ahead, half)
            if self.depth:
                self._load(ahead, 1)
        return self.loaded.pop((i, half))

    def _load(self, i: int, half: int) -> None:
        found = []
        for k, tensor in enumerate(self.tensors):
            chunk = self.rows.chunk(i, half)
            if len(tensor.shape) > 1:
                found.append(chunk.load_row(tensor, self.in_pairs))
            elif half and (i, 0) in self.loaded:  # both rows have the same
                found.append(self.loaded[i, 0][k])
            else:
                found.append(chunk.load_column(tensor, self.in_pairs))
        self.loaded[i, half] = found


class TileChunk(Static):
    """Some columns of one of a thread's rows.

    A thread has 2 of each 8 columns. Its elements are a vector, in the order of the columns.
    """

    def __init__(self, rows: TileRows, k: int, start: int, r: int):
        """k: which of the row's chunks it is. start: its first column in the tile. r: the row."""
        self.rows, self.k, self.start, self.r = rows, k, start, r
        self.vec_size = rows.vec_size
        self.layout = cute.make_layout((2, self.vec_size // 2), stride=(1, 4))
        self.n = rows.n + start + rows.places.column(rows.thread, 0)

    def read(self, product: int = 0) -> cute.TensorSSA:
        """The elements of a product, in float32."""
        c = self.rows.config
        first = (product * c.columns + self.start) // QUAD
        return self.rows.ctx.acc.load_row(self.r, first, self.vec_size)

    def of(self, values):
        """What this row has of values that a thread has one a row of."""
        return values[self.r] if isinstance(values, cute.TensorSSA) else values

    @property
    def columns(self) -> list:
        """The numbers of the columns."""
        return [self.n + 8 * (i // 2) + i % 2 for i in range(self.vec_size)]

    @property
    def cols(self) -> cute.TensorSSA:
        """The numbers of the columns, as a vector."""
        return make_vector(self.columns, (self.vec_size,), Int32)

    @property
    def offsets(self) -> cute.TensorSSA:
        """How far behind the first column of the thread each of its columns is."""
        return make_vector([Int32(8 * (i // 2) + i % 2) for i in range(self.vec_size)],
                           (self.vec_size,), Int32)  # fmt: skip

    def offset_of(self, column):
        """How far behind the first column of the thread this one is."""
        return column - self.n

    def load_column(self, mW: cute.Tensor, in_pairs: bool = True) -> cute.TensorSSA:
        """The elements of a vector (N,). Behind its end they are other elements of it.

        in_pairs: whether two neighbours may be loaded at a time: N is even, and so is the address.
        """
        return self._load(mW, mW.shape[0], in_pairs)

    def load_row(self, mX: cute.Tensor, in_pairs: bool = True) -> cute.TensorSSA:
        """The elements of a tensor (M, N). Out of its bounds they are other elements of it."""
        m = cutlass.min(self.rows.row(self.r), self.rows.ctx.shape[0] - 1)
        return self._load(mX[m, None], mX.shape[1], in_pairs)

    def _load(self, row: cute.Tensor, n, in_pairs: bool) -> cute.TensorSSA:
        dtype, values = row.element_type, []
        if not in_pairs:
            for column in self.columns:
                values.append(row[cutlass.min(column, n - 1)])
            return make_vector(values, (self.vec_size,), dtype)
        found = cute.make_rmem_tensor((2, self.vec_size // 2), dtype)
        for j in range(self.vec_size // 2):
            at = row.iterator + cutlass.min(self.n + 8 * j, n - 2)
            pair = cute.make_tensor(at.align(2 * dtype.width // 8), cute.make_layout(2))
            cute.autovec_copy(pair, found[None, j])
        return found.load().reshape((self.vec_size,))

    def group_reduce(self, value: cute.TensorSSA, op, size: int) -> cute.TensorSSA:
        """The reduction of the chunk, which is a group of columns, in all its elements."""
        assert size == self.rows.config.chunk, "a group is a chunk"
        return warp_reduce(thread_reduce(value, op), op, QUAD)

    @cute.jit
    def group_element(self, value: cute.TensorSSA, column, end=None):
        """The element at a column of the row, in all lanes of the quad; -inf if it is not here.

        end: the number of columns, if the chunk may reach behind the row.
        """
        # Few of the chunks have it, and no others look at all their elements.
        found, first = -Float32.inf, self.rows.n + self.start
        is_here = column >= first and column < first + self.rows.config.chunk
        if const_expr(end is not None):
            is_here = is_here and column < end
        if is_here:
            others = cute.full_like(value, -Float32.inf)
            picked = cute.where(self.offsets == self.offset_of(column), value, others)
            found = thread_reduce(picked, cute.ReductionOp.MAX)
        return warp_reduce(found, cute.ReductionOp.MAX, QUAD)

    def _vector(self, value) -> cute.TensorSSA:
        """The elements of a result; what a group is reduced to is one number for all of them."""
        if isinstance(value, cutlass.Numeric):
            return make_vector([value] * self.vec_size, (self.vec_size,), type(value))
        return value

    def store(self, value) -> None:
        """Store the elements of the result that is stored as whole tiles."""
        rows = self.rows
        rows.has_stored = True
        view = cute.make_tensor(rows.rO.iterator + 2 * (self.r % 2), self.layout)
        view.store(convert(self._vector(value), rows.config.stored).reshape(view.shape))

    @cute.jit
    def store_direct(self, mO, value, in_pairs: cutlass.Constexpr = True):
        """Store the elements of a result (M, N) without staging."""
        m = self.rows.row(self.r)
        stored = convert(self._vector(value), mO.element_type)
        elements = cute.make_rmem_tensor((2, self.vec_size // 2), mO.element_type)
        elements.store(stored.reshape(elements.shape))
        for j in cutlass.range_constexpr(self.vec_size // 2):
            n = self.n + 8 * j
            if const_expr(in_pairs):
                at = mO[m, None].iterator + n
                pair = cute.make_tensor(
                    at.align(2 * mO.element_type.width // 8), cute.make_layout(2)
                )
                if m < mO.shape[0] and n < mO.shape[1]:
                    cute.autovec_copy(elements[None, j], pair)
            else:
                for i in cutlass.range_constexpr(2):
                    if m < mO.shape[0] and n + i < mO.shape[1]:
                        mO[m, n + i] = elements[i, j]

    @cute.jit
    def store_group(self, mP, value):
        """Store the chunk's element of a result (M, groups)."""
        m, group = self.rows.row(self.r), self.rows.tile[1] * self.rows.count + self.k
        if self.rows.thread % QUAD == 0 and m < mP.shape[0] and group < mP.shape[1]:
            mP[m, group] = value

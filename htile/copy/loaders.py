"""How rows get from global memory to registers and back: two loaders, a storer, loads ahead of use.

The loaders have one interface. `start` issues the load of a row tensor and returns its fragment,
and `finish` makes every fragment valid that was started.
"""

from __future__ import annotations

from collections.abc import Iterator

import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Numeric, Uint8, const_expr

from htile.compute.conversion import to_stored
from htile.copy.shifted import (
    Pieces,
    PiecesInFlight,
    RowOnChip,
    StagedRow,
    batches,
    memory_of,
    most_staged,
    one_vector,
    single,
)
from htile.copy.tile import RowTile
from htile.copy.vector import are_one, vector_copy
from htile.utils import Static, as_bytes, elem_pointer, element_bits, expand


def as_fragment(ctx: RowTile, tile: cute.Tensor) -> cute.Tensor:
    """Registers with this thread's part of a tile (rows, N) in shared memory."""
    tXsX = ctx.partition_dest(tile)
    tXrX = ctx.make_fragment(tXsX, tile.element_type)
    cute.autovec_copy(as_bytes(tXsX), as_bytes(tXrX))
    return tXrX


class ElementwiseLoader(Static):
    """Loads rows from global to shared memory (cp.async), and from there to registers.

    Any number of row tensors may be in flight. Each takes a tile of shared memory, which the
    context has allocated (`extra_smem_tensors`).
    """

    def __init__(self, ctx: RowTile):
        self.ctx = ctx
        self.free = [] if ctx.sX is None else [ctx.sX]
        self.free += ctx.extra_sX
        self.started = []  # the (shared, register) partitions that are in flight
        self.finished = []

    def start(self, mX: cute.Tensor, end: Int32 | None = None) -> cute.Tensor:
        """Issue the load of a row tensor. Its fragment is valid after `finish`.

        end: the column from which on nothing is loaded, and elements become 0.

        Raises ValueError where no tile of shared memory is left, and TypeError where the next tile
        is of another width.
        """
        ctx = self.ctx
        sX = self._take(mX)
        tXgX = ctx.partition_dest(ctx.partition_global(mX))
        tXrX = ctx.make_fragment(tXgX, mX.element_type)
        if ctx.config.shifted:
            tXsX = ctx.partition_dest(sX)
            RowOnChip(ctx, mX, tXsX)
            self.started.append((tXsX, tXrX))
            return tXrX
        return self.start_into(tXgX, ctx.partition_dest(sX), tXrX, end)

    def keep(self, mX: cute.Tensor, end: Int32 | None = None) -> cute.Tensor:
        """Issue the load of a row tensor that stays in shared memory, and return its tile.

        After `finish`, `ctx.chunk(k).read_row(tile)` reads it. `end` and what is raised are as for
        `start`.
        """
        ctx, sX = self.ctx, self._take(mX)
        if ctx.config.shifted:
            RowOnChip(ctx, mX, ctx.partition_dest(sX))
            return sX
        tXgX, tXsX = ctx.partition_dest(ctx.partition_global(mX)), ctx.partition_dest(sX)
        if are_one(tXgX):
            tXrX = ctx.make_fragment(tXgX, mX.element_type)
            ctx.until(end).load_direct(tXgX, tXrX)
            cute.autovec_copy(as_bytes(tXrX), as_bytes(tXsX))
            return sX
        ctx.until(end).copy_row(tXgX, tXsX, is_async=True)
        return sX

    def _take(self, mX: cute.Tensor) -> cute.Tensor:
        """The next free tile, which has to fit the tensor."""
        if not self.free:
            raise ValueError("no tile of shared memory is left: raise extra_smem_tensors")
        sX = self.free.pop(0)
        if element_bits(sX.element_type) != element_bits(mX.element_type):
            raise TypeError(
                f"the next tile of shared memory is of {sX.element_type} and the tensor of "
                f"{mX.element_type}: name the dtypes in extra_smem_tensors, in the order of loads"
            )
        return sX

    def start_into(
        self,
        tXgX: cute.Tensor,
        tXsX: cute.Tensor,
        tXrX: cute.Tensor,
        end: Int32 | None = None,
    ) -> cute.Tensor:
        """Issue the load of a partition through a given shared partition into a given fragment.

        cp.async moves no less than 4 bytes, so narrower accesses go straight to the registers.
        """
        dtype, ctx = tXgX.element_type, self.ctx.until(end)
        if ctx.num_copy_elems(dtype) * element_bits(dtype) < 32 or are_one(tXgX):
            ctx.load_direct(tXgX, tXrX)
        else:
            ctx.copy_row(tXgX, tXsX, is_async=True)
            self.started.append((tXsX, tXrX))
        return tXrX

    def finish(self) -> None:
        """Wait until every started fragment is valid.

        No barrier is needed, because each thread reads only what it has copied itself.
        """
        cute.arch.cp_async_commit_group()
        self.ctx.cluster_wait()
        cute.arch.cp_async_wait_group(0)
        self._read(self.started)
        self.finished, self.started = self.finished + self.started, []

    def reload(self) -> None:
        """Read every fragment from shared memory again, so that its registers are free between."""
        cute.arch.sync_warp()  # without any barrier between, the compiler keeps the first copy
        self._read(self.finished)

    def _read(self, parts: list[tuple[cute.Tensor, cute.Tensor]]) -> None:
        """Copy from shared memory to registers.

        No predicate is needed: where cp.async has read nothing it has written zeros.
        """
        for tXsX, tXrX in parts:
            cute.autovec_copy(as_bytes(tXsX), as_bytes(tXrX))

    def load(self, mX: cute.Tensor) -> cute.Tensor:
        """`start` and `finish` at once."""
        tXrX = self.start(mX)
        self.finish()
        return tXrX

    def load_into(self, tXgX: cute.Tensor, tXsX: cute.Tensor, tXrX: cute.Tensor) -> cute.Tensor:
        """`start_into` and `finish` at once."""
        self.start_into(tXgX, tXsX, tXrX)
        self.finish()
        return tXrX


class GlobalToRegLoader(Static):
    """Loads rows from global memory to registers, with the interface of `ElementwiseLoader`."""

    def __init__(self, ctx: RowTile):
        self.ctx = ctx
        self.started = []  # the (pieces in flight, fragment) of shifted rows

    def start(
        self,
        mX: cute.Tensor,
        end: Int32 | None = None,
        there: tuple[int, int] | None = None,
    ) -> cute.Tensor:
        """Issue the load of a row tensor into a fragment. It is valid after `finish`.

        end: the column from which on nothing is loaded, and elements become 0.
        there: as for `RowTile.load_row`.
        """
        ctx = self.ctx
        if not (ctx.config.shifted or (there and ctx.has_words(mX))):
            return ctx.until(end).load_row(mX, there=there)
        fragment = cute.make_rmem_tensor(ctx.vector_shape, mX.element_type)
        pieces = Pieces(ctx, mX, there=there, policy=ctx.policy)
        pieces = PiecesInFlight(ctx, pieces, cute.size(fragment, mode=[2]))
        self.started.append((pieces.load(ctx), fragment))
        return fragment

    def keep(
        self,
        mX: cute.Tensor,
        end: Int32 | None = None,
        there: tuple[int, int] | None = None,
    ) -> cute.Tensor:
        """Load a shifted row into a fragment that loops read, some vectors at a time.

        After `finish`, `ctx.chunk(k).read_row(fragment)` reads it. Shifted rows are loaded whole,
        so that `end` has no effect. `there` is as for `RowTile.load_row`.
        """
        fragment = cute.make_rmem_tensor(self.ctx.vector_shape, mX.element_type)
        RowOnChip(self.ctx, mX, fragment, there)
        return fragment

    def finish(self) -> None:
        """Wait for the cluster's start-up, which the loads have hidden, and shift what came."""
        self.ctx.cluster_wait()
        for pieces, fragment in self.started:
            pieces.into(fragment)
        self.started = []

    def load(self, mX: cute.Tensor) -> cute.Tensor:
        """`start` and `finish` at once."""
        tXrX = self.start(mX)
        self.finish()
        return tXrX


class ElementwiseStorer(Static):
    """Stores rows from registers to global memory."""

    def __init__(self, ctx: RowTile):
        self.ctx = ctx

    def store(
        self,
        mO: cute.Tensor,
        y: cute.TensorSSA | Numeric | float,
        tile: cute.Tensor | None = None,
        end: int | None = None,
    ) -> None:
        """Store a vector, or a scalar for the whole row, into this row of mO, as its dtype.

        tile: for a shifted row, a tile in shared memory whose elements have as many bytes, and of
            which each thread has read its own for the last time. The result takes its place.
        end: the column from which on nothing is stored, because the rows of mO end there.
        """
        ctx, tXrO = self.ctx, as_stored(self.ctx, mO, y)
        if ctx.config.shifted or (end is not None and end % ctx.vec_size):
            store_shifted(ctx, mO, tXrO, tile, end)
            return
        if has_one_a_group(mO):  # all groups are stored, so that there is no end
            ctx.store_of_groups(mO, tXrO)
            return
        ctx.until(end).copy_row(tXrO, ctx.partition_dest(ctx.partition_global(mO)))

    def keep(
        self, mO: cute.Tensor, tile: cute.Tensor | None = None, end: int | None = None
    ) -> KeptRow:
        """Keep a result on chip until loops over chunks have made all of it.

        Its rows are shifted, or end inside a vector.

        tile: the tile or the fragment of a row that no thread reads after it has made the same
            chunk of the result, and whose elements have as many bytes. The result takes its place.
            By default there is shared memory of its own.
        end: as for `store`.
        """
        return KeptRow(self.ctx, mO, tile, end)


class KeptRow(Static):
    """A result of a row that loops over its chunks make, on chip until it is stored."""

    def __init__(
        self, ctx: RowTile, mO: cute.Tensor, tile: cute.Tensor | None, end: int | None
    ):
        self.ctx, self.mO, self.end, self.row, self.fragment = ctx, mO, end, None, None
        if tile is not None and tile.memspace == cute.AddressSpace.rmem:
            self.fragment = cute.recast_tensor(as_bytes(tile), as_bytes(mO).element_type)
            return
        vectors = cute.size(ctx.tXcX, mode=[2]) * ctx.config.num_threads
        size = ctx.vec_size * element_bits(mO.element_type) // 8
        memory = memory_of(vectors, size) if tile is None else tile.iterator
        self.row = StagedRow(ctx, mO, memory, end=end)

    def put(self, chunk: RowTile, y: cute.TensorSSA | Numeric | float) -> None:
        """Put a vector, or a scalar for all of it, to the place of a chunk, as its dtype."""
        k = chunk.vector_place
        vector = as_stored(chunk, self.mO, y)[(None, 0), 0, 0]
        if self.fragment is not None:
            cute.autovec_copy(vector, self.fragment[(None, 0), 0, k])
        else:
            self.row.put(k, vector)

    def store(self) -> None:
        """Store the whole result. All threads have put it."""
        if self.fragment is not None:
            store_shifted(self.ctx, self.mO, self.fragment, end=self.end)
        else:
            self.row.store()


def store_shifted(
    ctx: RowTile, mO: cute.Tensor, tXrO: cute.Tensor, tile: cute.Tensor | None = None,
    end: int | None = None,
) -> None:  # fmt: skip
    """Store a fragment to a row that may begin anywhere.

    tile, end: as for `ElementwiseStorer.store`.
    """
    if not ctx.has_words(mO):  # of shifted rows, all vectors have
        store_elements(ctx, mO, tXrO, end)
        return
    vectors = cute.size(tXrO, mode=[2])
    if tile is not None:
        row = StagedRow(ctx, mO, tile.iterator, end=end)
        for k in range(vectors):
            row.put(k, tXrO[(None, 0), 0, k])
        row.store(tXrO)
        return
    size = ctx.vec_size * element_bits(tXrO.element_type) // 8
    most = most_staged(ctx.config.num_threads)
    room = min(vectors, most)
    memory = ctx.staging.of(room, size)
    for first, count in batches(vectors, most):
        row = StagedRow(ctx, mO, memory, first, count, room, end)
        row.wait()  # until all have stored what was staged before
        for k in range(count):
            row.put(k, tXrO[(None, 0), 0, first + k])
        row.store(tXrO)


def store_elements(ctx: RowTile, mO: cute.Tensor, tXrO: cute.Tensor, end: int) -> None:
    """Store a fragment to a row that ends inside a vector, at the column `end`, one by one."""
    tXgO, tXrO = (as_bytes(each) for each in (ctx.partition_dest(ctx.partition_global(mO)), tXrO))
    for k in range(cute.size(tXrO, mode=[2])):
        for i in range(ctx.vec_size):
            wanted = ctx.tXcX[(0, 0), 0, k][1] + i < end
            if const_expr(ctx.row_in_bounds is not True):
                wanted = wanted & ctx.row_in_bounds
            value = cute.make_rmem_tensor(one_vector(1), tXrO.element_type)
            value[0] = tXrO[i, 0, k]
            target = cute.make_tensor(elem_pointer(tXgO, (i, 0, k)), one_vector(1))
            vector_copy(value, target, pred=single(wanted), num_copy_elems=1)


def as_stored(
    ctx: RowTile, mO: cute.Tensor, y: cute.TensorSSA | Numeric | float
) -> cute.Tensor:
    """A fragment with a vector, or a scalar for all of it, as the dtype of mO is stored."""
    # A view of a Boolean or Uint8 tensor has elements of Int8, and so has a tensor of Int8.
    is_8_bits = getattr(y, "dtype", Boolean) in (Int8, Uint8)
    is_mask = mO.element_type is Int8 and not is_8_bits
    y = to_stored(y, Boolean if is_mask else mO.element_type)
    y = y if isinstance(y, cute.TensorSSA) else ctx.full(y)
    if const_expr(y.dtype is Boolean):  # the DSL would store the True of a vector as 255
        y = cute.where(y, ctx.full(1, Int8), ctx.full(0, Int8))
    tXrO = cute.make_rmem_tensor(ctx.vector_shape, y.dtype)
    tXrO.store(y)
    return tXrO


def has_one_a_group(mO: cute.Tensor) -> bool:
    """Whether all columns of a group of a row tensor are one element."""
    step = mO.stride[1][0] if isinstance(mO.shape[1], tuple) else None
    return isinstance(step, int) and step == 0


class PrefetchedChunks(Static):
    """The chunks of a thread's shares in order, with what they have of tensors in global memory.

    Each chunk is loaded some chunks before it is used. The text has to say so, because no compiler
    moves a load above a store, or out of the branch that a predicate makes.

    ctx: the context of the whole row. count: how many chunks ahead.
    tensors: rows (M, N) and vectors (N,).
    backwards: from the last chunk of the last share to the first of the first.
    padding: what rows hold behind their end. Shifted rows hold any number there.
    ends: for each tensor the column from which on nothing is loaded, or None.
    there: for each tensor which columns are in its rows, as for `RowTile.load_row`, or None.
    """

    def __init__(
        self,
        ctx: RowTile,
        count: int,
        tensors: tuple[cute.Tensor, ...],
        backwards: bool,
        padding: float,
        ends: tuple[Int32 | None, ...] | None = None,
        there: tuple[tuple[int, int] | None, ...] | None = None,
    ):
        if ctx.config.shifted and padding != 0:
            raise ValueError("shifted rows are not padded: leave padding out, and mask the values")
        self.ctx, self.tensors, self.backwards, self.padding = ctx, tensors, backwards, padding
        self.ends = (None,) * len(tensors) if ends is None else ends
        self.there = (None,) * len(tensors) if there is None else there
        self.total = ctx.config.turns * ctx.num_chunks
        self.pieces = [self._pieces(*each) for each in zip(tensors, self.there, strict=True)]
        self.ring = [self._load(k) for k in range(min(count, self.total))]

    def _pieces(self, mT: cute.Tensor, there: tuple[int, int] | None) -> Pieces | None:
        """The pieces of this thread's row of a tensor, if its vectors are shifted."""
        ctx, is_row = self.ctx, cute.rank(mT) > 1
        is_shifted = ctx.config.shifted if is_row else ctx.is_shifted_column(mT)
        if not (is_shifted or (there and ctx.has_words(mT))):
            return None
        if is_row:
            return Pieces(ctx, mT, there=there, policy=ctx.policy)
        return Pieces(ctx, expand(mT, 0, ctx.shape[0]), there=there)

    def _load(
        self, k: int | Int32, into: list | None = None
    ) -> list[cute.Tensor | PiecesInFlight]:
        """Load the k-th of all chunks: what is in flight of each tensor, new or given."""
        chunk = self.ctx.chunk(self.total - 1 - k if self.backwards else k)
        into = [None] * len(self.tensors) if into is None else into
        return [
            self._load_one(chunk, *each)
            for each in zip(self.tensors, self.pieces, self.ends, self.there, into, strict=True)
        ]

    def _load_one(
        self,
        chunk: RowTile,
        mT: cute.Tensor,
        pieces: Pieces | None,
        end: Int32 | None,
        there: tuple[int, int] | None,
        into: cute.Tensor | PiecesInFlight | None,
    ) -> cute.Tensor | PiecesInFlight:
        """Load what a chunk has of one tensor."""
        if pieces is not None:
            return (PiecesInFlight(chunk, pieces, 1) if into is None else into).load(chunk)
        if cute.rank(mT) > 1:
            return chunk.until(end).load_row(mT, into, self.padding, there)
        return chunk.load_column(mT, into, there, end)

    def _arrived(self, mT: cute.Tensor, loaded: cute.Tensor | PiecesInFlight) -> cute.Tensor:
        """A fragment of its own of what has been loaded."""
        if isinstance(loaded, PiecesInFlight):
            return loaded.into(cute.make_rmem_tensor(loaded.shape, mT.element_type))
        fragment = cute.make_rmem_tensor_like(loaded)
        cute.autovec_copy(as_bytes(loaded), as_bytes(fragment))
        return fragment

    def take(
        self, first: int | Int32, count: int, share: int = 0
    ) -> Iterator[tuple[RowTile | cute.Tensor, ...]]:
        """`count` chunks of a share from `first` on, each as (chunk, fragment of each tensor, ...).

        first: a multiple of how many chunks are loaded ahead. Where it is known only when the
            kernel runs, at least as many chunks must follow in the share.
        """
        ctx, before = self.ctx, share * self.ctx.num_chunks
        for k in range(count):
            fragments = self.ring[(before + k) % len(self.ring)]
            now = [self._arrived(*each) for each in zip(self.tensors, fragments, strict=True)]
            following = before + first + k + len(self.ring)
            if not isinstance(following, int) or following < self.total:
                self._load(following, fragments)
            if self.backwards:
                chunk = ctx.chunk(ctx.num_chunks - 1 - first - k, ctx.config.turns - 1 - share)
            else:
                chunk = ctx.chunk(first + k, share)
            yield chunk, *now

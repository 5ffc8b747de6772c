"""How rows get from global memory to registers and back: two loaders, a storer, loads ahead of use.

The loaders have one interface. `start` issues the load of a row tensor and returns its fragment,
and `finish` makes every fragment valid that was started.
"""

from __future__ import annotations

from collections.abc import Iterator

import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Numeric, const_expr

from htile.compute.conversion import to_stored
from htile.copy.tile import RowTile, Static
from htile.utils import as_bytes, element_bits


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

    def start(self, mX: cute.Tensor) -> cute.Tensor:
        """Issue the load of a row tensor. Its fragment is valid after `finish`.

        Raises ValueError where no tile of shared memory is left, and TypeError where the next tile
        is of another width.
        """
        ctx = self.ctx
        sX = self._take(mX)
        tXgX = ctx.partition_dest(ctx.partition_global(mX))
        tXrX = ctx.make_fragment(tXgX, mX.element_type)
        return self.start_into(tXgX, ctx.partition_dest(sX), tXrX)

    def keep(self, mX: cute.Tensor) -> cute.Tensor:
        """Issue the load of a row tensor that stays in shared memory, and return its tile.

        After `finish`, `ctx.chunk(k).read_row(tile)` reads it. Raises what `start` raises.
        """
        ctx, sX = self.ctx, self._take(mX)
        tXgX = ctx.partition_dest(ctx.partition_global(mX))
        ctx.copy_row(tXgX, ctx.partition_dest(sX), is_async=True)
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

    def start_into(self, tXgX: cute.Tensor, tXsX: cute.Tensor, tXrX: cute.Tensor) -> cute.Tensor:
        """Issue the load of a partition through a given shared partition into a given fragment.

        cp.async moves no less than 4 bytes, so narrower accesses go straight to the registers.
        """
        dtype = tXgX.element_type
        if self.ctx.num_copy_elems(dtype) * element_bits(dtype) < 32:
            self.ctx.load_direct(tXgX, tXrX)
        else:
            self.ctx.copy_row(tXgX, tXsX, is_async=True)
            self.started.append((tXsX, tXrX))
        return tXrX

    def finish(self) -> None:
        """Wait until every started fragment is valid.

        There is no barrier, because each thread reads only what it has copied itself.
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

    def start(self, mX: cute.Tensor) -> cute.Tensor:
        """Issue the load of a row tensor into a fragment."""
        return self.ctx.load_row(mX)

    def finish(self) -> None:
        """Wait for the cluster's start-up, which the loads have hidden."""
        self.ctx.cluster_wait()

    def load(self, mX: cute.Tensor) -> cute.Tensor:
        """`start` and `finish` at once."""
        tXrX = self.start(mX)
        self.finish()
        return tXrX


class ElementwiseStorer(Static):
    """Stores rows from registers to global memory."""

    def __init__(self, ctx: RowTile):
        self.ctx = ctx

    def store(self, mO: cute.Tensor, y: cute.TensorSSA | Numeric | float) -> None:
        """Store a vector, or a scalar for the whole row, into this row of mO, as its dtype."""
        ctx = self.ctx
        tXgO = ctx.partition_dest(ctx.partition_global(mO))
        is_mask = mO.element_type is Int8  # a Boolean tensor that went through a view
        y = to_stored(y, Boolean if is_mask else mO.element_type)
        y = y if isinstance(y, cute.TensorSSA) else ctx.full(y)
        if const_expr(y.dtype is Boolean):  # the DSL would store the True of a vector as 255
            y = cute.where(y, ctx.full(1, Int8), ctx.full(0, Int8))
        tXrO = ctx.make_fragment(tXgO, y.dtype)
        tXrO.store(y)
        ctx.copy_row(tXrO, tXgO)


class PrefetchedChunks(Static):
    """The chunks of a thread's shares in order, with what they have of tensors in global memory.

    Each chunk is loaded some chunks before it is used. The text has to say so, because no compiler
    moves a load above a store, or out of the branch that a predicate makes.

    ctx: the context of the whole row. count: how many chunks ahead.
    tensors: rows (M, N) and vectors (N,).
    backwards: from the last chunk of the last share to the first of the first.
    padding: what rows hold behind their end.
    """

    def __init__(
        self,
        ctx: RowTile,
        count: int,
        tensors: tuple[cute.Tensor, ...],
        backwards: bool,
        padding: float,
    ):
        self.ctx, self.tensors, self.backwards, self.padding = ctx, tensors, backwards, padding
        self.total = ctx.config.turns * ctx.num_chunks
        self.ring = [self._load(k) for k in range(min(count, self.total))]

    def _load(self, k: int | Int32, into: list | None = None) -> list[cute.Tensor]:
        """Load the k-th of all chunks: a fragment of each tensor, new or given."""
        chunk = self.ctx.chunk(self.total - 1 - k if self.backwards else k)
        into = [None] * len(self.tensors) if into is None else into
        return [
            chunk.load_row(mT, fragment, self.padding)
            if cute.rank(mT) > 1
            else chunk.load_column(mT, fragment)
            for mT, fragment in zip(self.tensors, into, strict=True)
        ]

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
            now = [cute.make_rmem_tensor_like(fragment) for fragment in fragments]
            for fragment, value in zip(now, fragments, strict=True):
                cute.autovec_copy(as_bytes(value), as_bytes(fragment))
            following = before + first + k + len(self.ring)
            if not isinstance(following, int) or following < self.total:
                self._load(following, fragments)
            if self.backwards:
                chunk = ctx.chunk(ctx.num_chunks - 1 - first - k, ctx.config.turns - 1 - share)
            else:
                chunk = ctx.chunk(first + k, share)
            yield chunk, *now

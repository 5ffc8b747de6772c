"""This thread's part of a row, and how it is copied."""

from __future__ import annotations

import copy
from functools import partial

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64, Numeric, const_expr

from htile.compute.operands import select
from htile.copy.columns import Columns
from htile.copy.shifted import Pieces, PiecesInFlight, load_elements
from htile.copy.staged_columns import StagedColumn
from htile.copy.vector import (
    EVICT_FIRST,
    EVICT_NORMAL,
    are_neighbours,
    are_one,
    copy_firsts,
    copy_hidden,
    has_neighbours,
    predicate_k,
    vector_copy,
)
from htile.utils import as_bytes, element_bits, expand, place_of_row


class RowTile(Columns):
    """The part of a row that this thread works on, once `ElementwiseKernelContext.setup` is done.

    config: the tile's configuration. shape: (rows, N) of the row tensors. leading: the number of
        rows, or the sizes of several leading dimensions, as `as_rows` has them.
    tidx, row: this thread, and its row. row_in_bounds: whether there is such a row; the Python True
        where a CTA has one row, because the grid is exact then.
    tile: which tile of columns this CTA, or this chunk, has. tiler_mn: its (rows, columns).
    rank: which group of threads this is, of those that work on the row.
    share: which share this is, of those that the group works on one after the other.
    tXcX: the coordinates of the thread's elements, ((vec_size, 1), 1, num_vectors).
    """

    is_row = True  # whether the context is of a whole row, and not of a chunk

    def chunk(self, k: int | Int32, share: int = 0) -> RowTile:
        """The same context with one vector a thread: the k-th of `num_chunks`.

        k: a Python number, or one that is known when the kernel runs.
        share: which share of the row, of those that the thread works on one after the other.
        """
        part = copy.copy(self)
        part.tiler_mn = (self.tiler_mn[0], self.vec_size * self.config.threads_per_row)
        part.k, part.share, part.is_row = k, share, False
        part.tile = (self.rank * self.config.turns + share) * self.num_chunks + k
        part._take_columns()
        return part

    def until(self, end: int | Int32 | None) -> RowTile:
        """The same context, which does not load the vectors from the column `end` on.

        They become what elements out of bounds become. Shifted rows are loaded whole, and rows are
        where `end` is None.
        """
        if end is None or self.config.shifted:
            return self
        part = copy.copy(self)
        part.end = Int32(end)
        columns = predicate_k(self.tXcX, cutlass.min(part.end, Int32(self.shape[1])))
        part._predicates = self.tXpX, self._copy_predicate(columns), self.tXpWhole
        return part

    def counted_from(self, zero: Int32) -> RowTile:
        """The same context, whose columns are counted from an `unknown_zero`.

        What is computed of them is then computed again, where the compiler would keep what a loop
        before has computed, in many registers.
        """
        part = copy.copy(self)
        part.zero = zero
        return part

    # Partitions

    def partition_global(
        self, mT: cute.Tensor, tiler_mn: tuple | None = None, row: Int64 | None = None
    ) -> cute.Tensor:
        """The tile of this CTA in a row tensor (M, N), as this thread may use it: at its row.

        A thread has one row, so all rows of the tile lie at that row's address. Any nesting of
        leading dimensions has one. It is of 64 bits where the strides are.

        row: another row than that of the thread, for a tensor of rows that an index chooses.
        """
        tiler = self.tiler_mn if tiler_mn is None else tiler_mn
        if row is None:  # a column has the same elements in all rows, however these are numbered
            row = self.row_place if isinstance(mT.shape[0], tuple) else self.row
        start = mT.iterator + cute.crd2idx((row, 0), mT.layout)
        layout = cute.make_layout((tiler[0], mT.shape[1]), stride=(0, mT.stride[1]))
        return cute.local_tile(cute.make_tensor(start, layout), tiler, (0, self.tile))

    @property
    def row_place(self) -> Int32 | tuple[Int32, ...]:
        """The number of this thread's row, or its place in each of several leading dimensions."""
        return place_of_row(self.row, self.leading)

    def partition_dest(self, gT: cute.Tensor) -> cute.Tensor:
        """This thread's part of a tile: ((vec_size, 1), 1, num_vectors)."""
        return self.thr_copy.partition_D(gT)

    def make_fragment(self, tXgT: cute.Tensor, dtype: type[Numeric] | None = None) -> cute.Tensor:
        """Registers for this thread's part of a tile.

        dtype: by default that of the partition, which forgets a dtype of Boolean: name it.
        """
        return cute.make_rmem_tensor(tXgT.shape, dtype or tXgT.element_type)

    def num_copy_elems(self, dtype: type[Numeric]) -> int:
        """How many elements of `dtype` one access moves, as the alignment of the rows allows."""
        bytes_per_copy = min(self.config.copy_bytes, 16)
        vec_size = cute.size(self.tXcX, mode=[0])
        return max(1, min(vec_size, 8 * bytes_per_copy // element_bits(dtype)))

    def cluster_wait(self) -> None:
        """Wait until all CTAs of the cluster have initialised their mbarriers; once a kernel."""
        if self._cluster_pending:
            self._cluster_pending = False
            cute.arch.cluster_wait()

    # Copies of rows

    @property
    def vector_copy_fn(self) -> partial:
        """`vector_copy` under the predicates of the columns."""
        return partial(vector_copy, pred=self.tXpX)

    @property
    def policy(self) -> Int64 | None:
        """How long the L2 cache keeps what is loaded of rows; None where nothing is said."""
        most = self.config.evict_first_rows
        if not most:
            return None
        return select(Boolean(self.shape[0] <= most), Int64(EVICT_FIRST), Int64(EVICT_NORMAL))

    def copy_row(
        self,
        src: cute.Tensor,
        dst: cute.Tensor,
        is_async: bool = False,
        policy: Int64 | None = None,
    ) -> None:
        """Copy a partition of a row tensor where its row and column are in bounds.

        is_async, policy: as for `vector_copy`.
        """
        width = self.num_copy_elems(src.element_type)
        if not (are_neighbours(src) and are_neighbours(dst)):
            width = 1  # the elements of a piece may lie apart
        vector_copy(
            src, dst, pred=self.tXpCopy, is_async=is_async, policy=policy, num_copy_elems=width
        )

    def load_row(
        self,
        mX: cute.Tensor,
        into: cute.Tensor | None = None,
        padding: float = 0,
        there: tuple[int, int] | None = None,
    ) -> cute.Tensor:
        """Load this thread's part of a row tensor (M, N) into a fragment, which is returned.

        into: the fragment, by default a new one.
        padding: what the elements out of bounds become. Those of shifted rows become any number.
        there: which columns are in memory, where the row reaches beyond the ends of a tensor: the
            first one, and the one behind the last. Others become any number.
        """
        tXgX = self.partition_dest(self.partition_global(mX))
        tXrX = self.make_fragment(tXgX, mX.element_type) if into is None else into
        if self.config.shifted or there:
            return self.load_shifted(mX, tXrX, there=there, policy=self.policy)
        self.load_direct(tXgX, tXrX, padding)
        return tXrX

    def load_shifted(
        self,
        mX: cute.Tensor,
        tXrX: cute.Tensor,
        row: Int64 | None = None,
        there: tuple[int, int] | None = None,
        policy: Int64 | None = None,
    ) -> cute.Tensor:
        """Load this thread's part of a row that begins anywhere into a fragment, which is returned.

        row, policy: as for `Pieces`. there: as for `load_row`.
        """
        if there and not self.has_words(mX):
            return load_elements(self, mX, tXrX, there)
        pieces, count = Pieces(self, mX, row, there, policy), cute.size(self.tXcX, mode=[2])
        return PiecesInFlight(self, pieces, count).load(self).into(tXrX)

    def has_words(self, mT: cute.Tensor) -> bool:
        """Whether words of a tensor's vectors can be shifted: of neighbours, in four bytes or more.
        """
        return self.vec_size * element_bits(mT.element_type) >= 32 and has_neighbours(mT)

    def load_direct(self, tXgX: cute.Tensor, tXrX: cute.Tensor, padding: float = 0) -> None:
        """Copy a partition from global memory to registers.

        Elements whose row or column is out of bounds become `padding`.
        """
        if const_expr(self.tXpCopy is not None):
            tXrX.fill(tXrX.element_type(padding))
        if are_one(tXgX):
            self._load_of_groups(tXgX, tXrX)
        else:
            self.copy_row(tXgX, tXrX, policy=self.policy)

    def _load_of_groups(self, tXgX: cute.Tensor, tXrX: cute.Tensor) -> None:
        """Copy a partition in which each group of columns has one element."""
        copy_firsts(tXgX, tXrX, self.tXpCopy)
        for k in range(cute.size(tXrX, mode=[2])):
            for i in range(1, cute.size(tXrX, mode=[0])):
                tXrX[i, 0, k] = tXrX[0, 0, k]

    def store_of_groups(self, mO: cute.Tensor, tXrO: cute.Tensor) -> None:
        """Store the one element that each group of columns has into this row of mO.

        mO: (M, (size, count)), of which all columns of a group are one element. The thread with the
            group's first column stores it, once all lanes of the warp are here: they may have read
            what it overwrites.
        """
        cute.arch.sync_warp()
        # Chunks have whole groups, so a thread that is the first of one is so in every chunk.
        is_first = Boolean(self.tXcX[0][1] % mO.shape[1][0] == 0)
        if const_expr(self.row_in_bounds is not True):
            is_first = is_first & self.row_in_bounds
        predicate = self.predicate_where(self.tXpX, is_first)
        tXgO = self.partition_dest(self.partition_global(mO))
        copy_firsts(tXrO, tXgO, predicate)

    def read_row(self, tile: cute.Tensor) -> cute.Tensor:
        """Read this chunk of a row from its tile in shared memory, or from a fragment of all of it.

        A compiler does not know that a fragment is read twice (`copy_hidden`).
        """
        if tile.memspace == cute.AddressSpace.rmem:
            return self.take_row(tile, is_hidden=True)
        place = (0, self.vector_place)
        tXsX = self.partition_dest(cute.local_tile(tile, self.tiler_mn, place))
        tXrX = self.make_fragment(tXsX)
        cute.autovec_copy(as_bytes(tXsX), as_bytes(tXrX))
        return tXrX

    def make_row(self, dtype: type[Numeric]) -> cute.Tensor:
        """Registers for a value of each of this thread's elements, which `put_row` fills."""
        return cute.make_rmem_tensor(self.vector_shape, dtype)

    @property
    def vector_place(self) -> int | Int32:
        """Which of the thread's vectors this chunk is."""
        return self.share * self.num_chunks + self.k

    def take_row(self, row: cute.Tensor, is_hidden: bool = False) -> cute.Tensor:
        """This chunk of registers with a value of each of this thread's elements.

        is_hidden: whether a compiler does not know that it is (`copy_hidden`).
        """
        fragment = cute.make_rmem_tensor(self.vector_shape, row.element_type)
        vector = as_bytes(row)[(None, 0), 0, self.vector_place]
        copy_one = copy_hidden if is_hidden else cute.autovec_copy
        copy_one(vector, as_bytes(fragment)[(None, 0), 0, 0])
        return fragment

    def put_row(self, row: cute.Tensor, y: cute.TensorSSA | Numeric | float) -> None:
        """Put a vector, or a scalar for all of it, to the place of this chunk in `make_row`'s."""
        vector = cute.make_rmem_tensor(self.vector_shape, row.element_type)
        vector.store(y if isinstance(y, cute.TensorSSA) else self.full(y))
        cute.autovec_copy(vector[(None, 0), 0, 0], row[(None, 0), 0, self.vector_place])

    # Operands that are no rows

    def load_column(
        self,
        mW: cute.Tensor,
        into: cute.Tensor | None = None,
        there: tuple[int, int] | None = None,
        end: int | None = None,
    ) -> cute.Tensor:
        """Load this thread's part of a vector (N,) that all rows share.

        Padded columns become 0, or any number where rows are shifted.

        into: the fragment, by default a new one. there: as for `load_row`.
        end: the column from which on nothing is loaded, a multiple of the vector size. Rows are not
            shifted then.
        """
        rows = expand(mW, 0, self.shape[0])
        tXgW = self.partition_dest(self.partition_global(rows))
        tXrW = self.make_fragment(tXgW, mW.element_type) if into is None else into
        if self.is_shifted_column(mW) or there:
            return self.load_shifted(rows, tXrW, there=there)
        predicate = self.tXpX if end is None else predicate_k(self.tXcX, end)
        if const_expr(predicate is not None):
            tXrW.fill(tXrW.element_type(0))
        width = self.num_copy_elems(mW.element_type) if are_neighbours(tXgW) else 1
        vector_copy(tXgW, tXrW, pred=predicate, num_copy_elems=width)
        return tXrW

    def stage_column(self, mW: cute.Tensor) -> StagedColumn:
        """Start to bring a vector (N,) that all rows share to shared memory, while rows are loaded.

        The thread block has one row.
        """
        return StagedColumn(self, mW)

    def is_shifted_column(self, mW: cute.Tensor) -> bool:
        """Whether the vectors of a column may begin anywhere in memory."""
        vector = self.vec_size * element_bits(mW.element_type) // 8
        return self.config.shifted and self.config.copy_bytes < min(vector, 16)

    def wait_for_row(self) -> None:
        """Wait until all threads that work on rows with this one are here."""
        self.cluster_wait()
        cute.arch.sync_threads()
        if const_expr(self.config.ctas > 1):
            cute.arch.cluster_arrive()
            cute.arch.cluster_wait()

"""Which columns a thread's elements are, and which of them are in the row."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Numeric, as_numeric, const_expr
from cutlass._mlir import ir

from htile.compute.operands import make_vector
from htile.config import ElementwiseTileConfig
from htile.copy.layout import RowLayout
from htile.copy.vector import predicate_k
from htile.utils import Static


class Columns(Static):
    """The columns of the vectors that a `RowTile` has, which says what its attributes are."""

    config: ElementwiseTileConfig
    end: Int32 | None = None  # see `RowTile.until`
    zero: Int32 | None = None  # see `RowTile.counted_from`

    def _take_columns(self) -> None:
        """Take the columns of `tile`: their coordinates, and what comes of them."""
        coordinates = cute.make_identity_tensor((self.tiler_mn[0], self.capacity))
        tile = cute.local_tile(coordinates, self.tiler_mn, (0, self.tile))
        self.tXcX = self.thr_copy.partition_D(tile)
        # A static N that fills the tiles needs no predicate. A dynamic one always has them.
        self.is_even_N = isinstance(self.shape[1], int) and self.capacity == self.shape[1]
        self._predicates = None

    def chunk_of(self, k: int) -> int | Int32:
        """Which chunk of its share the k-th vector of this context is in."""
        return self.k if cute.size(self.tXcX, mode=[2]) == 1 else k % self.num_chunks

    def is_whole_vector(self, k: int) -> bool:
        """Whether the k-th vector of this context is in the row, for all threads of all shares."""
        return self.is_even_N or self.layout.is_whole(self.chunk_of(k))

    @property
    def is_whole(self) -> bool:
        """Whether all vectors of this context are in the row, for all threads of all shares."""
        vectors = range(cute.size(self.tXcX, mode=[2]))
        return self.is_even_N or all(self.is_whole_vector(k) for k in vectors)

    @property
    def layout(self) -> RowLayout:
        """How the row lies over its shares and threads."""
        threads, shares = self.config.threads_per_row, self.config.cluster_n
        any_end = self.config.any_end
        return RowLayout(self.shape[1], self.vec_size, threads, self.num_chunks, shares, any_end)

    @property
    def share_in_row(self) -> int | Int32:
        """Which share of the row this is."""
        return self.rank * self.config.turns + self.share

    # Predicates

    @property
    def tXpX(self) -> cute.Tensor | None:
        """One Boolean for each vector: is its first column in the row? None if all are."""
        return None if self.is_whole else self._made_predicates()[0]

    @property
    def tXpWhole(self) -> cute.Tensor | None:
        """One Boolean for each vector: is its last column in the row? None if all are."""
        return None if self.is_whole else self._made_predicates()[2]

    @property
    def tXpCopy(self) -> cute.Tensor | None:
        """tXpX and row_in_bounds together, one Boolean for each vector. None if all are true.

        Copies take this predicate and no branch around them. Each vector is then loaded, computed
        and stored by itself: layernorm of 6144 float32 elements takes 134 registers on sm_90a, and
        with a branch 255 and a stack frame.
        """
        if const_expr(self.is_whole and self.row_in_bounds is True and self.end is None):
            return None
        return self._made_predicates()[1]

    def _made_predicates(self) -> tuple[cute.Tensor | None, cute.Tensor, cute.Tensor | None]:
        """tXpX, tXpCopy and tXpWhole, which are made when they are first asked for.

        A row of 2 ** 30 elements, which is worked on chunk by chunk, has 262144 vectors a thread,
        and nobody asks for the predicates of all. Whoever asks may be in the body of a dynamic `if`
        or `for`, so they are made where the columns were taken, for all that follows.
        """
        if self._predicates is None:
            with ir.InsertionPoint.after(self.tXcX.value.owner):
                columns = None if self.is_whole else self._columns_below(self.shape[1])
                whole = columns
                if columns is not None and self.layout.rest:
                    whole = self._columns_below(self.shape[1] - self.vec_size + 1)
                self._predicates = columns, self._copy_predicate(columns), whole
        return self._predicates

    def _columns_below(self, limit: int | Int32) -> cute.Tensor:
        """One Boolean for each vector: is its first column below a limit? True if it is whole.

        A compiler does not know which share of a row a CTA of a cluster has, so it would compare.
        """
        columns = predicate_k(self.tXcX, limit)
        for k in range(cute.size(self.tXcX, mode=[2])):
            if self.is_whole_vector(k):
                columns[0, 0, k] = Boolean(True)
        return columns

    def _copy_predicate(self, columns: cute.Tensor | None) -> cute.Tensor:
        """The predicates of the columns and row_in_bounds together."""
        if const_expr(self.row_in_bounds is True):
            return columns
        return self.predicate_where(columns, self.row_in_bounds)

    def predicate_where(self, columns: cute.Tensor | None, condition: Boolean) -> cute.Tensor:
        """The predicates of the columns, where they are needed, and a condition together."""
        steps = cute.size(self.tXcX, mode=[2])
        if const_expr(columns is None):
            every = cute.make_rmem_tensor(cute.make_layout(1), Boolean)
            every[0] = condition
            layout = cute.make_layout((1, 1, steps), stride=(0, 0, 0))
            return cute.make_tensor(every.iterator, layout)
        each = cute.make_rmem_tensor(columns.layout, Boolean)
        for k in range(steps):
            each[0, 0, k] = columns[0, 0, k] & condition
        return each

    def predicate_between(self, first: int, end: int) -> cute.Tensor:
        """The predicates of the vectors that have columns from `first` on and before `end`."""
        below = predicate_k(self.tXcX, end)
        for k in range(cute.size(self.tXcX, mode=[2])):
            column = self.tXcX[(0, 0), 0, k][1]
            below[0, 0, k] = below[0, 0, k] & (column + self.vec_size > first)
            if const_expr(self.tXpX is not None):
                below[0, 0, k] = below[0, 0, k] & self.tXpX[0, 0, k]
        return below

    # Vectors that the columns give

    @property
    def vector_shape(self) -> tuple:
        """The shape of every vector of a row: ((vec_size, 1), 1, num_vectors)."""
        return self.tXcX.shape

    @property
    def mask(self) -> cute.TensorSSA | None:
        """A Boolean vector: is the element a column of the row? None if all are."""
        if self.is_whole:
            return None
        vec_size = cute.size(self.tXcX, mode=[0])
        steps, layout = cute.size(self.tXcX, mode=[2]), self.layout
        every = [self._in_row(k) for k in range(steps)]
        which = [layout.place_of(i) for i in range(vec_size)]
        bits = [each[i] for each in every for i in which]
        return make_vector(bits, self.vector_shape, Boolean)

    def _in_row(self, k: int) -> tuple[Boolean, ...]:
        """Whether the first and the last element of this thread's k-th vector are in the row.

        It is told of each element where the row may end at any.
        """
        if self.is_whole_vector(k):
            return (Boolean(True),) * (self.vec_size if self.config.any_end else 2)
        if self.config.any_end:
            left = self.shape[1] - self.tXcX[(0, 0), 0, k][1]
            return tuple(Boolean(left > i) for i in range(cute.size(self.tXcX, mode=[0])))
        return self.tXpX[0, 0, k], self.tXpWhole[0, 0, k]

    @property
    def in_row(self) -> tuple[Boolean, ...] | None:
        """Whether the first and the last element of this chunk's vector are in the row.

        It is told of each element where the row may end at any. None if all elements of this chunk
        are in the row, for all threads.
        """
        if self.is_whole:
            return None
        return self._in_row(0)

    @property
    def ends(self) -> int | Int32:
        """How many elements of this chunk's vector are in the row, if the row may end in it.

        It is 0 if the row cannot, and any number above 0 where none is in the row.
        """
        if self.config.any_end:
            left = self.shape[1] - self.tXcX[0][1]
            return cutlass.max(cutlass.min(left, self.vec_size), 1)
        return self.layout.rest if self.layout.may_end_in(self.k) else 0

    @property
    def elements_in_row(self) -> int | Int32:
        """How many elements of the share, from this chunk on, this thread has in the row.

        Its others are padding.
        """
        if self.is_even_N:
            return self.num_chunks * self.vec_size
        step, first = self.vec_size * self.config.threads_per_row, self.tXcX[0][1]
        if not (self.layout.rest or self.config.any_end):
            left = cutlass.max(self.shape[1] - 1 + step - first, 0)
            return cutlass.min(left // step, self.num_chunks) * self.vec_size
        left = cutlass.max(self.shape[1] - first, 0)
        found = left // step * self.vec_size + cutlass.min(left % step, self.vec_size)
        return cutlass.min(found, self.num_chunks * self.vec_size)

    @property
    def cols(self) -> cute.TensorSSA:
        """An Int32 vector: the column of each element."""
        count = cute.size(self.tXcX)
        cols = make_vector([self.tXcX[i][1] for i in range(count)], self.vector_shape, Int32)
        return cols if self.zero is None else cols + self.zero

    @staticmethod
    def unknown_zero() -> Int32:
        """A 0 that no compiler knows to be 0: how far a lane's number is from what it is told."""
        lane = cute.arch.lane_idx()
        return cute.arch.shuffle_sync(lane, lane) - lane

    @property
    def offsets(self) -> cute.TensorSSA:
        """An Int32 vector of constants: how far the column of each element is behind the first.

        `math.lt(ctx.offsets, ctx.offset_of(end))` is one instruction for an element, because a
        constant is part of it. `math.lt(ctx.cols, end)` also adds each column up.
        """
        first, count = self.tXcX[0][1], cute.size(self.tXcX)
        far = [self.tXcX[i][1] - first for i in range(count)]
        return make_vector(far, self.vector_shape, Int32)

    def below(self, end: int) -> cute.TensorSSA:
        """A Boolean vector: is the column of each element below `end`?

        The elements of a vector are on one side of it, so that one comparison is made for each.
        """
        steps, first = cute.size(self.tXcX, mode=[2]), 0 if self.zero is None else self.zero
        every = [Boolean(self.tXcX[(0, 0), 0, k][1] + first < end) for k in range(steps)]
        bits = [each for each in every for _ in range(self.vec_size)]
        return make_vector(bits, self.vector_shape, Boolean)

    def offset_of(self, column: int | Int32) -> Int32:
        """How far a column, from -1 to N, is behind the first of this thread."""
        return Int32(column) - self.tXcX[0][1]

    def of_one_chunk(self, x: cute.TensorSSA) -> cute.TensorSSA:
        """The elements that the first chunk of this thread has, as a vector of one chunk."""
        return make_vector([x[i] for i in range(self.vec_size)], (self.vec_size,), x.dtype)

    def in_every_chunk(self, x: cute.TensorSSA) -> cute.TensorSSA:
        """A vector of which every chunk has the elements of a vector of one chunk."""
        count = cute.size(self.tXcX)
        words = [x[i % self.vec_size] for i in range(count)]
        return make_vector(words, self.vector_shape, x.dtype)

    def full(self, value: Numeric | float, dtype: type[Numeric] | None = None) -> cute.TensorSSA:
        """A vector with the same value in every element.

        dtype: by default that of the value.
        """
        dtype = as_numeric(value).dtype if dtype is None else dtype
        return cute.full(self.vector_shape, value, dtype)

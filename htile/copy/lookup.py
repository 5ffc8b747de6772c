"""What indices choose: an element of the row, an element for each column, and a row of a table.

Indices are data. What is beyond the ends of a table is not read.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float8E8M0FNU, Int8, Int32, Int64, const_expr

from htile.compute.conversion import to_stored
from htile.compute.operands import Vector, as_numeric, select
from htile.copy.row_values import RowValues
from htile.copy.vector import are_neighbours, vector_copy
from htile.utils import as_bytes


class Lookups(RowValues):
    """A row tile that loads what an index of its row chooses."""

    @cute.jit
    def load_element(self, mT, column):
        """Load the element at a column of this row's tensor (M, N), or of one (N,) of all rows.

        The column is in the row. The element is 0 if there is no such row.
        """
        value = mT.element_type(0)
        if self.row_in_bounds:
            place = (Int32(column),)
            if const_expr(cute.rank(mT) > 1):
                place = (self.row_place, Int32(column))
            start = mT.iterator + cute.crd2idx(place, mT.layout)
            element = cute.make_tensor(start, cute.make_layout(1))
            value = to_stored(element[0], mT.element_type)
        return value

    @cute.jit
    def gather(self, mT: cute.Tensor, columns: Vector) -> cute.Tensor:
        """Load the elements at columns of this row's tensor (M, N), or of one (N,) of all rows.

        columns: one for each element of this thread, Int32 or Int64, or one for all of them. A
            column beyond the ends is replaced by the first or the last one. The elements are 0 if
            there is no such row.
        """
        if const_expr(not isinstance(columns, Vector)):
            columns = cute.full(self.vector_shape, columns, as_numeric(columns).dtype)
        found = cute.make_rmem_tensor(columns.shape, mT.element_type)
        target, last = as_bytes(found), columns.dtype(mT.shape[-1] - 1)
        if const_expr(self.row_in_bounds is not True):
            target.fill(target.element_type(0))
        if self.row_in_bounds:
            for i in cutlass.range_constexpr(cute.size(found)):
                column = Int32(cutlass.min(cutlass.max(columns[i], columns.dtype(0)), last))
                place = (column,)
                if const_expr(cute.rank(mT) > 1):
                    place = (self.row_place, column)
                start = mT.iterator + cute.crd2idx(place, mT.layout)
                target[i] = as_bytes(cute.make_tensor(start, cute.make_layout(1)))[0]
        return found

    def look_up(
        self, mT: cute.Tensor, index: Int32 | Int64, first: int = 0, end: int | None = None
    ) -> cute.Tensor:
        """Load this thread's part of the row of a table (P, N) at an index of the thread's row.

        A negative index counts from the end. Beyond the ends nothing is read, and the fragment has
        NaN, or 0, or False. Padded columns become that too, or any number where rows are shifted.

        first, end: only the columns from `first` on and before `end` are needed. Vectors that have
            none of them are not read, and become NaN, or 0, or False, or any number where rows are
            shifted.
        """
        row, is_there = self._row_of_table(mT, index)
        tXgT = self.partition_dest(self.partition_global(mT, row=row))
        tXrT = self.make_fragment(tXgT, mT.element_type)
        if self.is_shifted_column(mT):
            return self._look_up_shifted(mT, row, is_there, tXrT)
        _fill_with_nothing(tXrT)
        width = self.num_copy_elems(mT.element_type) if are_neighbours(tXgT) else 1
        needed = self.tXpX
        if const_expr(end is not None):
            needed = self.predicate_between(first, end)
        predicate = self.predicate_where(needed, is_there)
        vector_copy(tXgT, tXrT, pred=predicate, num_copy_elems=width)
        return tXrT

    @cute.jit
    def _look_up_shifted(self, mT, row, is_there, tXrT):
        """The same, of rows that may begin anywhere in memory."""
        _fill_with_nothing(tXrT)
        if is_there:
            self.load_shifted(mT, tXrT, row)
        return tXrT

    @cute.jit
    def look_up_element(self, mT, index):
        """Load the element of a tensor (P,) at an index of this row, as `look_up` does."""
        row, is_there = self._row_of_table(mT, index)
        one = cute.make_rmem_tensor(cute.make_layout(1), mT.element_type)
        _fill_with_nothing(one)
        if is_there:
            start = mT.iterator + cute.crd2idx((row,), mT.layout)
            found = cute.make_tensor(start, cute.make_layout(1))
            cute.autovec_copy(as_bytes(found), as_bytes(one))
        return one[0]

    def _row_of_table(self, mT: cute.Tensor, index: Int32 | Int64) -> tuple[Int64, Boolean]:
        """Which row of a table an index means, 0 if none, and whether there is one."""
        index, rows = Int64(index), Int64(mT.shape[0])
        index = select(index < 0, index + rows, index)
        is_there = (index >= 0) & (index < rows)
        if const_expr(self.row_in_bounds is not True):
            is_there = is_there & self.row_in_bounds
        return select(is_there, index, Int64(0)), is_there


def _fill_with_nothing(fragment: cute.Tensor) -> None:
    """Fill with what a table has beyond its ends: NaN, or 0, or False."""
    dtype = fragment.element_type
    if const_expr(not dtype.is_float):
        as_bytes(fragment).fill(as_bytes(fragment).element_type(0))
    elif const_expr(dtype.width == 8):  # the bits of a NaN
        cute.recast_tensor(fragment, Int8).fill(Int8(-1 if dtype is Float8E8M0FNU else 0x7F))
    else:
        fragment.fill(dtype(float("nan")))

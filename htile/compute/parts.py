"""What is added up over rows: in each group of rows, and then over the groups.

A group adds its rows in ascending order, each column in a register (`OverRows`). The groups of a
CTA combine what they have in shared memory, and leave a *part*, which is a row in global memory. A
second kernel combines the parts. A sum starts with 0.0 and never becomes -0.0, so rows of zeros
change no bit.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Numeric, const_expr
from cutlass.memory import SmemAllocator

from htile.compute.accumulate import Accumulator
from htile.compute.conversion import to_stored
from htile.compute.operands import Vector, select
from htile.compute.products import Product
from htile.compute.reduce import combine, combine_terms, identity
from htile.copy.row_loop import RowLoop
from htile.copy.tile import RowTile
from htile.copy.vector import vector_copy
from htile.utils import WARP

COLUMNS = WARP  # that a CTA of the second kernel combines
COLUMNS_OF_GROUPS = 8  # the same where parts have several groups of columns, and so more to combine
THREADS = 512  # of such a CTA: 16 for each column, or 64
MOST_LOADS = 16  # that such a thread has under way at a time


class OverRows(Accumulator):
    """A reduction over the rows of a group: a vector, or a number of the row."""

    def __init__(self, op: cute.ReductionOp, value: Vector | Numeric):
        self.op, self.values = op, (value,)

    @classmethod
    def of_rows(cls, ctx: RowTile, op: cute.ReductionOp, dtype: type[Numeric]) -> OverRows:
        """The start of a reduction of whole rows."""
        return cls(op, ctx.full(identity(op, dtype), dtype))

    @classmethod
    def of_values(cls, op: cute.ReductionOp, dtype: type[Numeric]) -> OverRows:
        """The start of a reduction of a number of each row."""
        return cls(op, dtype(identity(op, dtype)))

    @property
    def value(self) -> Vector | Numeric:
        """What the group has."""
        return self.values[0]

    def take(self, row: RowTile, value: Vector | Numeric | Product) -> OverRows:
        """With a row's values. A row that is out of bounds is left out, whatever was loaded.

        row: the context of the row, or of a chunk of it, whose values these are.
        """
        (old,) = self.values
        if row.is_row or not isinstance(old, cute.TensorSSA):
            return self._with(self._combined(row, old, value))
        every = cute.make_rmem_tensor(old.shape, old.dtype)
        every.store(old)
        row.put_row(every, self._combined(row, row.take_row(every).load(), value))
        return self._with(every.load())

    def _combined(
        self, row: RowTile, old: Vector | Numeric, value: Vector | Numeric | Product
    ) -> Vector | Numeric:
        """What the group has of some columns, with a row's values of them."""
        is_vector = isinstance(old, cute.TensorSSA)
        if isinstance(value, Product):
            vectors = value.map(lambda v: v if isinstance(v, cute.TensorSSA) else row.full(v))
            new = vectors.plus(old)
        else:
            is_number = isinstance(value, bool | int | float)
            value = old.dtype(value) if is_number else value.to(old.dtype)
            if is_vector and not isinstance(value, cute.TensorSSA):
                value = row.full(value)
            new = combine(self.op, old, value)
        if const_expr(row.row_in_bounds is True):
            return new
        if not is_vector:
            return select(row.row_in_bounds, new, old)
        return cute.where(row.full(row.row_in_bounds, Boolean), new, old)


class Parts:
    """What the CTAs have of one result, in the workspace: (parts, columns), row after row.

    start: the first byte in the workspace, a multiple of 16. dtype: of an element.
    columns: of a row with its padding, or 1 for a number of each row.
    """

    def __init__(
        self, workspace: cute.Tensor, start: int, dtype: type[Numeric], parts: int, columns: int
    ):
        pointer = cute.recast_ptr(workspace.iterator + start, dtype=dtype)
        layout = cute.make_layout((parts, columns), stride=(columns, 1))
        self.tensor = cute.make_tensor(pointer, layout)

    def store(self, loop: RowLoop, total: OverRows) -> None:
        """Combine what the groups of this CTA have, and store it. Padding is stored too."""
        ctx, mP = loop.of_part(), self.tensor
        if isinstance(total.value, cute.TensorSSA):
            tXrP = cute.make_rmem_tensor(ctx.vector_shape, mP.element_type)
            tXrP.store(total.value)
            if ctx.config.rows > 1:
                shape = (ctx.config.rows, ctx.tiler_mn[1])
                tile = loop.scratch(mP.element_type, shape)
                _combine_groups(loop, total.op, tXrP, ctx.partition_dest(tile), shape[1])
            pred = None
            if ctx.row_in_bounds is not True:
                pred = ctx.predicate_where(None, ctx.row_in_bounds)
            vector_copy(tXrP, ctx.partition_dest(ctx.partition_global(mP)), pred=pred)
            return
        number = cute.make_rmem_tensor((1,), mP.element_type)
        number[0] = total.value
        if ctx.config.rows > 1:
            numbers = loop.scratch(mP.element_type, (ctx.config.rows, 1))
            mine = cute.make_tensor(numbers.iterator + loop.slot, cute.make_layout(1))
            _combine_groups(loop, total.op, number, mine, 1)
        column = cute.make_tensor(mP.iterator, cute.make_layout((mP.shape[0],)))
        ctx.store_row_value(column, number[0])

    def combine(
        self,
        op: cute.ReductionOp,
        mO: cute.Tensor,
        columns: int,
        parts: Int32,
        place: int = 0,
        groups: int = 1,
    ) -> None:
        """Combine all parts of each column, and store the result.

        mO: the result, of `columns` elements.
        parts: how many there are. Those from there on were stored by nobody, and are nothing.
        place: which result of the kernel it is. The CTAs with this number along y work on it.
        groups: how many groups of `columns` elements each part has, which are combined too.

        Each thread of a column combines every 16th part in ascending order, or every 64th group of
        all parts. A halving tree combines what the threads have. So the order does not depend on
        how many parts there are.
        """
        shape, stride = (*mO.shape,)[::-1] or (1,), (*mO.stride,)[::-1] or (1,)
        mO = cute.make_tensor(mO.iterator, cute.make_layout(shape, stride=stride))
        _combine_parts(self.tensor, op, mO, columns, parts, place, groups)


def _combine_groups(
    loop: RowLoop, op: cute.ReductionOp, own: cute.Tensor, mine: cute.Tensor, columns: int
) -> None:
    """Combine a fragment over the groups of the CTA, a power of two, by a halving tree.

    Every group gets the result. mine: where the thread leaves its own in shared memory, in which
    groups are `columns` elements apart.
    """
    slot, other = loop.slot, cute.make_rmem_tensor_like(own)
    distance = loop.ctx.config.rows // 2
    while distance:
        cute.arch.barrier()  # what was there before has been read
        cute.autovec_copy(own, mine)
        cute.arch.barrier()
        far = cute.assume(((slot ^ distance) - slot) * columns, divby=columns)
        cute.autovec_copy(cute.make_tensor(mine.iterator + far, mine.layout), other)
        own.store(combine(op, own.load(), other.load()))
        distance //= 2


@cute.jit
def _combine_parts(
    mP,
    op: cutlass.Constexpr,
    mO,
    columns: cutlass.Constexpr,
    parts,
    place: cutlass.Constexpr,
    groups: cutlass.Constexpr,
):
    x, y, _ = cute.arch.block_idx()
    if y == place:
        tidx, _, _ = cute.arch.thread_idx()
        width = COLUMNS if groups == 1 else COLUMNS_OF_GROUPS
        column, first = x * width + tidx % width, tidx // width
        dtype, height = mP.element_type, THREADS // width
        loads = min(-(-mP.shape[0] * groups // height), MOST_LOADS)
        count = parts * groups
        there = cutlass.min(column, columns - 1)
        nothing = dtype(identity(op, dtype))
        total = nothing
        for k in cutlass.range((count - 1) // (height * loads) + 1, unroll=1):
            values = []
            for i in cutlass.range_constexpr(loads):
                number = (k * loads + i) * height + first
                part = cutlass.min(number, count - 1)
                group = 0 if groups == 1 else part % groups * columns
                found = mP[part // groups, group + there]
                values.append(select(number < count, found, nothing))
            for i in cutlass.range_constexpr(loads):
                total = combine(op, total, values[i])
        layout = cute.make_layout((height, width), stride=(width, 1))
        sP = SmemAllocator().allocate_tensor(dtype, layout, byte_alignment=16)
        sP[first, tidx % width] = total
        cute.arch.barrier()
        if first == 0 and column < columns:
            terms = [sP[i, tidx % width] for i in range(height)]
            mO[column] = to_stored(combine_terms(terms, op), mO.element_type)

"""Rows that begin anywhere in memory: moved in aligned pieces, and shifted in registers.

Memory is accessed in pieces, each as long as a vector and aligned to its own length. A row that
begins inside a piece has every vector in two neighbouring pieces. A load takes both and shifts the
vector out of them. A store goes the other way round: each lane shifts a piece out of its own vector
and that of the next lane, which it finds in shared memory. The elements at both ends of what the
lanes of a warp have of a row are stored one by one.

Which thread has which element does not depend on where a row begins.

A load may read bytes before and behind a row, but only in pieces that have an element of the row.
Behind the end of a tensor it reads 15 bytes at most, of the same aligned 16 bytes as the last
element. They belong to the same allocation, because CUDA's are multiples of 256 bytes. A store
writes elements of the row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64, Numeric
from cutlass._mlir.dialects import llvm

from htile.compute.operands import select
from htile.copy.vector import vector_copy
from htile.utils import WARP, Static, as_bytes, element_bits

if TYPE_CHECKING:
    from htile.copy.tile import RowTile

WORDS = 4  # of 4 bytes, in a piece of 16 bytes


class RowStart(Static):
    """Where this thread's row of a tensor begins.

    ctx: the thread's part of the row. mT: rows (M, N).
    row: the row whose address this is; by default that of the context.

    address: of the first element. size: bytes of a piece.
    """

    def __init__(self, ctx: RowTile, mT: cute.Tensor, row: Int32 | None = None):
        mT = as_bytes(mT)
        self.dtype, self.itemsize = mT.element_type, element_bits(mT.element_type) // 8
        self.log2_itemsize = self.itemsize.bit_length() - 1
        self.vec_size, self.size = ctx.vec_size, ctx.vec_size * self.itemsize
        start = mT.iterator + cute.crd2idx((ctx.row if row is None else row, 0), mT.layout)
        self.address = start.toint()

    def view(self, address: Int64, column: int | Int32, elements: int) -> cute.Tensor:
        """Elements from a column on, counted from `address`, as a partition of one vector.

        They are aligned to as many bytes as they have.
        """
        address, size = address + Int64(column) * self.itemsize, elements * self.itemsize
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=size)
        return cute.make_tensor(pointer, one_vector(elements))

    def fragment(self, count: int) -> cute.Tensor:
        """Registers for `count` vectors."""
        layout = cute.make_layout(((self.vec_size, 1), 1, count))
        return cute.make_rmem_tensor(layout, self.dtype)


class Pieces(Static):
    """The pieces of this thread's row of a tensor, to be loaded: two for each vector.

    Every load reads a piece of the row. One that is behind the end of the row is replaced by the
    last of the row, and a row that there is not by the last row. So no load needs a predicate. What
    is not in the row becomes some number of the row, or bytes beside it.

    row: that of a table which an index chooses; it is there. By default, that of the context.

    below: the address of the first piece. shift: bytes from there to the row.
    last: the column of the last piece, counted from the first.
    """

    def __init__(self, ctx: RowTile, mX: cute.Tensor, row: Int64 | None = None):
        if row is None:
            row = ctx.row
            if ctx.row_in_bounds is not True:
                row = cutlass.min(row, ctx.shape[0] - 1)
        self.start = start = RowStart(ctx, mX, row)
        self.below = start.address & -start.size
        self.shift = Int32(start.address) & (start.size - 1)
        elements = ctx.shape[1] + (self.shift >> start.log2_itemsize)
        self.last = (elements - 1) & -ctx.vec_size

    def of_vector(self, ctx: RowTile, k: int, beyond: int = 0) -> cute.Tensor:
        """The first piece of the thread's k-th vector in this context, or one `beyond` it."""
        column = ctx.tXcX[(0, 0), 0, k][1] + beyond * ctx.vec_size
        if not ctx.layout.is_whole(ctx.chunk_of(k), beyond):
            column = cutlass.min(column, self.last)
        return self.at(column)

    def at(self, column: int | Int32) -> cute.Tensor:
        """The piece that begins at a column, counted from the first piece."""
        return self.start.view(self.below, column, self.start.vec_size)


class PiecesInFlight(Static):
    """Both pieces of each vector of a thread, on their way to registers.

    ctx: the context whose vectors are loaded, or one with as many.
    """

    def __init__(self, ctx: RowTile, pieces: Pieces):
        self.pieces, self.shape = pieces, ctx.vector_shape
        self.count = cute.size(ctx.tXcX, mode=[2])
        # A thread with a single vector does not branch, because loops load single vectors ahead. A
        # branch would make all of them wait for each.
        self.branches = ctx.config.threads_per_row >= WARP and self.count > 1
        self.both = [pieces.start.fragment(self.count) for _ in range(2)]

    def load(self, ctx: RowTile) -> PiecesInFlight:
        """Issue the loads of the context's vectors."""
        for k in range(self.count):
            for beyond, part in enumerate(self.both):
                source = self.pieces.of_vector(ctx, k, beyond)
                cute.autovec_copy(source[(None, 0), 0, 0], part[(None, 0), 0, k])
        return self

    def into(self, fragment: cute.Tensor) -> cute.Tensor:
        """Shift the vectors out of the pieces, into a fragment, which is returned."""
        return shift_out(*self.both, self.pieces.shift, fragment, self.branches)


class SharedPieces(Static):
    """A tile of shared memory with the pieces that the lanes of a warp have of a row.

    For each chunk and each group of lanes that works on one row there are as many pieces as lanes,
    and one more, which the last lane needs too.

    allocate: gives so many elements of shared memory, aligned to 16 bytes.
    """

    def __init__(
        self,
        ctx: RowTile,
        dtype: type[Numeric],
        chunks: int,
        allocate: Callable[[type[Numeric], int], cute.Tensor],
    ):
        self.lanes, self.chunks = min(ctx.config.threads_per_row, WARP), chunks
        self.groups = ctx.config.num_threads // self.lanes
        self.element_type, self.vec_size = dtype, ctx.vec_size
        group = (self.lanes + 1) * ctx.vec_size
        stored = Int8 if dtype is Boolean else dtype
        memory = allocate(stored, chunks * self.groups * group)
        shape = (ctx.vec_size, self.lanes + 1, self.groups, chunks)
        stride = (1, ctx.vec_size, group, group * self.groups)
        self.places = cute.make_tensor(memory.iterator, cute.make_layout(shape, stride=stride))
        self.lane, self.group = ctx.tidx % self.lanes, ctx.tidx // self.lanes

    def fill(self, ctx: RowTile, mX: cute.Tensor) -> None:
        """Issue the copies of all chunks of this thread's row (cp.async)."""
        self.pieces = pieces = Pieces(ctx, mX)
        for k in range(self.chunks):
            self._copy(pieces.of_vector(ctx, k), self.lane, k)
        for chunk in range(0, self.chunks, self.lanes):
            self._fill_end(ctx, self.lane + chunk)

    @cute.jit
    def _fill_end(self, ctx, chunk):
        """Bring the piece behind the lanes' vectors of a chunk. Each lane does it for another."""
        if chunk < self.chunks:
            first = ctx.tXcX[(0, 0), 0, 0][1] + (self.lanes - self.lane) * self.vec_size
            column = first + chunk * (self.vec_size * ctx.config.threads_per_row)
            piece = self.pieces.at(cutlass.min(column, self.pieces.last))
            self._copy(piece, self.lanes, chunk)

    def _copy(self, source: cute.Tensor, lane: int | Int32, chunk: int | Int32) -> None:
        """Copy a piece to the place of a lane in a chunk."""
        target = cute.make_tensor(self._place(lane, chunk).iterator, source.layout)
        vector_copy(source, target, is_async=True, num_copy_elems=self.vec_size)

    def _place(self, lane: int | Int32, chunk: int | Int32) -> cute.Tensor:
        """The piece of a lane in a chunk."""
        return self.places[None, lane, self.group, chunk]

    def read(self, fragment: cute.Tensor, first: int | Int32 = 0) -> cute.Tensor:
        """Shift this thread's vectors from a chunk on into a fragment, which is returned."""
        count = cute.size(fragment, mode=[2])
        both = [self.pieces.start.fragment(count) for _ in range(2)]
        for k in range(count):
            for beyond, part in enumerate(both):
                place = self._place(self.lane + beyond, first + k)
                cute.autovec_copy(place, part[(None, 0), 0, k])
        return shift_out(*both, self.pieces.shift, fragment, self.lanes == WARP)


def store_shifted(ctx: RowTile, mO: cute.Tensor, fragment: cute.Tensor) -> None:
    """Store a thread's vectors of a row (M, N), whose elements the fragment has as bytes.

    All lanes of a warp call this together.
    """
    start, vec_size = RowStart(ctx, mO), ctx.vec_size
    lanes = min(ctx.config.threads_per_row, WARP)
    lane, group = ctx.tidx % lanes, ctx.tidx // lanes
    pointer = cute.recast_ptr(ctx.staging.iterator, dtype=start.dtype)
    # The lanes have the same bytes for outputs of every dtype. Other lanes may store another one.
    groups = ctx.config.num_threads // lanes
    own_elements = ctx.config.staging_bytes // groups // start.itemsize
    layout = cute.make_layout((vec_size, lanes + 1, groups), stride=(1, vec_size, own_elements))
    staged = cute.make_tensor(pointer, layout)[None, None, group]
    head_bytes = -Int32(start.address) & (start.size - 1)  # before the first piece in the row
    head = head_bytes >> start.log2_itemsize
    above = start.address + head_bytes.to(Int64)
    own, following, piece = (start.fragment(1) for _ in range(3))
    for k in range(cute.size(fragment, mode=[2])):
        column = ctx.tXcX[(0, 0), 0, k][1]
        first = column - lane * vec_size  # of the lanes' first element
        count = cutlass.min(cutlass.max(ctx.shape[1] - first, 0), lanes * vec_size)
        if ctx.row_in_bounds is not True:
            count = select(ctx.row_in_bounds, count, 0)
        cute.autovec_copy(fragment[(None, 0), 0, k], own[(None, 0), 0, 0])
        cute.arch.sync_warp()  # what was staged before has been read
        cute.autovec_copy(own[(None, 0), 0, 0], staged[None, lane])
        cute.arch.sync_warp()
        cute.autovec_copy(staged[None, lane + 1], following[(None, 0), 0, 0])
        shift_out(own, following, head_bytes, piece, lanes == WARP)
        is_whole = head + (lane + 1) * vec_size <= count
        target = start.view(above, column, vec_size)
        vector_copy(piece, target, pred=single(is_whole), num_copy_elems=vec_size)
        _store_ends(start, staged, lane, lanes, head, first, count)


def _store_ends(
    start: RowStart,
    staged: cute.Tensor,
    lane: Int32,
    lanes: int,
    head: Int32,
    first: Int32,
    count: Int32,
) -> None:
    """Store what lies before the first whole piece and behind the last, one element a lane."""
    vec_size = start.vec_size
    behind = head + ((count - head) & -vec_size)
    for i in range(0, 2 * vec_size, lanes):
        place = lane + i
        is_head = place < vec_size
        element = select(is_head, place, behind + place - vec_size)
        wanted = (element < count) & ((element < head) == is_head)
        element = select(wanted, element, 0)
        target = start.view(start.address, first + element, 1)
        value = cute.make_rmem_tensor(target.layout, start.dtype)
        value[0] = cute.make_tensor(staged.iterator + element, target.layout)[0]
        vector_copy(value, target, pred=single(wanted), num_copy_elems=1)


def shift_out(
    low: cute.Tensor, high: cute.Tensor, shift: Int32, fragment: cute.Tensor, branches: bool
) -> cute.Tensor:
    """Take each vector from `shift` bytes on out of two pieces; `fragment` is returned.

    low, high: the pieces of all vectors, of a shape ((vec_size, 1), 1, count).
    branches: whether to branch on the shift, so that no words are selected. Lanes of a warp that
        have other shifts than their neighbours would take the branches one after the other.
    """
    result = as_bytes(fragment)
    itemsize = element_bits(result.element_type) // 8
    if itemsize < 4:
        low, high, result = (cute.recast_tensor(part, Int32) for part in (low, high, result))
    word, behind = max(itemsize, 4), int(itemsize < 4)  # a last word that bytes are taken from
    count = cute.size(fragment, mode=[2])
    words = cute.size(result) // count
    bits = (shift & 3) * 8
    if branches and behind and words == WORDS:
        _branch(low, high, shift >> 2, bits, result)
        return fragment
    for k in range(count):
        found = [part[k * words + i] for part in (low, high) for i in range(words)]
        step = words // 2
        while step:
            is_far = (shift & (step * word)) != 0
            found = [
                result.element_type(cutlass.select_(is_far, found[i + step], found[i]))
                for i in range(words + step - 1 + behind)
            ]
            step //= 2
        for i in range(words):
            result[k * words + i] = _funnel(found[i], found[i + 1], bits) if behind else found[i]
    return fragment


@cute.jit
def _branch(low, high, first, bits, result):
    """Take each vector from word `first` and some bits on: one branch for each number of words."""
    if first < 2:
        if first == 0:
            _take(0, low, high, bits, result)
        else:
            _take(1, low, high, bits, result)
    else:
        if first == 2:
            _take(2, low, high, bits, result)
        else:
            _take(3, low, high, bits, result)


def _take(first: int, low, high, bits: Int32, result) -> None:
    """What one of the branches does.

    Neighbouring branches have different instructions, which do the same. A compiler would move
    equal ones behind the branches, and would then have to move words to where these find them.
    """
    which = 0x3210 + (bits >> 3) * 0x1111  # the bytes of both words that prmt takes
    for k in range(0, cute.size(result), WORDS):
        found = [part[k + i] for part in (low, high) for i in range(WORDS)]
        for i, (one, other) in enumerate(pairwise(found[first : first + WORDS + 1])):
            is_odd = first % 2
            value = cute.arch.prmt(one, other, which) if is_odd else _funnel(one, other, bits)
            result[k + i] = value


def _funnel(low: Int32, high: Int32, bits: Int32) -> Int32:
    """The 32 bits from the given one on, of the 64 that two words have."""
    return Int32(llvm.intr_fshr(high.ir_value(), low.ir_value(), bits.ir_value()))


def one_vector(elements: int) -> cute.Layout:
    """The layout of a partition of one vector."""
    return cute.make_layout(((elements, 1), 1, 1))


def single(condition: Boolean) -> cute.Tensor:
    """The predicate of one vector."""
    predicate = cute.make_rmem_tensor(cute.make_layout((1, 1, 1)), Boolean)
    predicate[0] = condition
    return predicate

"""Rows that begin anywhere in memory: moved in aligned pieces, and shifted in registers.

Memory is accessed in pieces, each as long as a vector and aligned to its own length. A row that
begins inside a piece has every vector in two neighbouring pieces. A load takes both and shifts the
vector out of them. A store goes the other way round: vectors are put beside each other in shared
memory, as they lie in the row, and each thread shifts a piece out of its own vector and the one
that follows. What a thread block has of a row it stores in whole pieces, but for the elements
before the first of them and behind the last, which are stored one by one.

Which thread has which element does not depend on where a row begins.

A load may read bytes before and behind a row, but only in pieces that have an element of the row.
Behind the end of a tensor it reads 15 bytes at most, of the same aligned 16 bytes as the last
element. They belong to the same allocation, because CUDA's are multiples of 256 bytes. A store
writes elements of the row alone.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int8, Int32, Int64, const_expr
from cutlass._mlir import ir
from cutlass._mlir.dialects import llvm
from cutlass.memory import SmemAllocator

from htile.compute.exchange import wait_for_share
from htile.compute.operands import select
from htile.copy.vector import has_neighbours, vector_copy
from htile.utils import WARP, Static, as_bytes, element_bits

if TYPE_CHECKING:
    from htile.copy.tile import RowTile

WORDS = 4  # of 4 bytes, in a piece of 16 bytes
# So many vectors of a thread are on their way at a time: to shared memory, to registers where loops
# read them, and from shared memory to a result. Each takes the registers of two pieces.
TO_TILE, TO_REGISTERS, TO_RESULT = 3, 5, 4
# A thread block stages so many bytes of a held result at a time, at most, if its vectors have 16.
# Results of all sizes fit into 99 KiB together, so that any row can be staged on every GPU.
STAGED_BYTES = 48 << 10
WRITTEN_OUT = 16  # More vectors of a thread than these are moved in a loop.


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

    def view(self, address: Int64, elements: int) -> cute.Tensor:
        """Elements at an address, aligned to as many bytes, as a partition of one vector."""
        size = elements * self.itemsize
        pointer = cute.make_ptr(self.dtype, address, cute.AddressSpace.gmem, assumed_align=size)
        return cute.make_tensor(pointer, one_vector(elements))

    def fragment(self, count: int) -> cute.Tensor:
        """Registers for `count` vectors."""
        layout = cute.make_layout(((self.vec_size, 1), 1, count))
        return cute.make_rmem_tensor(layout, self.dtype)


def row_that_is(ctx: RowTile) -> Int32:
    """The thread's row, or the last one where there is no such row."""
    if ctx.row_in_bounds is True:
        return ctx.row
    return cutlass.min(ctx.row, ctx.shape[0] - 1)


def load_elements(
    ctx: RowTile, mX: cute.Tensor, fragment: cute.Tensor, there: tuple[int, int]
) -> cute.Tensor:
    """Load a row element by element: its vectors are shorter than a word, or its elements apart.

    there: as for `Pieces`.
    """
    start = RowStart(ctx, mX, row_that_is(ctx))
    target, is_near = as_bytes(fragment), has_neighbours(mX)
    for k in range(cute.size(fragment, mode=[2])):
        for i in range(ctx.vec_size):
            column = cutlass.max(ctx.tXcX[(0, 0), 0, k][1] + i, there[0])
            column = cutlass.min(column, there[1] - 1)
            place = column if is_near else cute.crd2idx((0, column), mX.layout)
            source = start.view(start.address + Int64(place) * start.itemsize, 1)
            target[i, 0, k] = source[0]
    return fragment


class Pieces(Static):
    """The pieces of this thread's row of a tensor, to be loaded: two for each vector.

    Every load reads a piece of the row. One that is behind the end of the row is replaced by the
    last of the row, and a row that there is not by the last row. So no load needs a predicate. What
    is not in the row becomes some number of the row, or bytes beside it.

    row: that of a table which an index chooses; it is there. By default, that of the context.
    there: the first column that is in the row, and the one behind the last; by default all are.
    policy: how long the L2 cache keeps what is loaded (`vector_copy`).

    below: the address of the piece of column 0. shift: bytes from there to that column.
    first, last: the columns of the first and of the last piece, counted from there.
    missing: how many columns lie before the row. ends_early: whether some lie behind it.
    """

    def __init__(
        self,
        ctx: RowTile,
        mX: cute.Tensor,
        row: Int64 | None = None,
        there: tuple[int, int] | None = None,
        policy: Int64 | None = None,
    ):
        self.policy = policy
        self.start = start = RowStart(ctx, mX, row_that_is(ctx) if row is None else row)
        self.below = start.address & -start.size
        self.shift = Int32(start.address) & (start.size - 1)
        first, end = (0, ctx.shape[1]) if there is None else there
        before = self.shift >> start.log2_itemsize
        self.last = (end + before - 1) & -ctx.vec_size
        self.missing = first
        self.first = (first + before) & -ctx.vec_size if first else 0
        self.ends_early = there is not None and end < ctx.shape[1]

    def of_vector(self, ctx: RowTile, k: int | Int32, beyond: int = 0) -> cute.Tensor:
        """The first piece of the thread's k-th vector in this context, or one `beyond` it."""
        column, more = ctx.tXcX[(0, 0), 0, 0][1], 0
        from_first, to_last = self._reaches(ctx, ctx.chunk_of(k), beyond)
        if not from_first and not to_last:
            more = (k * ctx.config.threads_per_row + beyond) * ctx.vec_size
        else:
            column = ctx.tXcX[(0, 0), 0, k][1] + beyond * ctx.vec_size
            column = cutlass.max(column, self.first) if from_first else column
            column = cutlass.min(column, self.last) if to_last else column
        # What is known is added last, so that it becomes a part of the instruction.
        address = self.below + Int64(column) * self.start.itemsize + more * self.start.itemsize
        return self.start.view(address, ctx.vec_size)

    def _reaches(self, ctx: RowTile, chunk: int | Int32, beyond: int) -> tuple[bool, bool]:
        """Whether pieces of a chunk may lie before the first one of the row, and behind the last.
        """
        step = ctx.config.threads_per_row * ctx.vec_size
        is_behind = isinstance(chunk, int) and chunk * step >= self.missing + ctx.vec_size
        is_whole = ctx.layout.is_whole(chunk, beyond) and not self.ends_early
        return self.missing > 0 and not is_behind, not is_whole


class PiecesInFlight(Static):
    """Both pieces of each of `count` vectors of a thread, on their way to registers."""

    def __init__(self, ctx: RowTile, pieces: Pieces, count: int):
        self.pieces, self.count = pieces, count
        self.shape = ((ctx.vec_size, 1), 1, count)
        # A thread with a single vector does not branch, because loops load single vectors ahead. A
        # branch would make all of them wait for each.
        self.branches = ctx.config.threads_per_row >= WARP and count > 1
        self.both = [pieces.start.fragment(count) for _ in range(2)]

    def load(self, ctx: RowTile, first: int | Int32 = 0) -> PiecesInFlight:
        """Issue the loads of the context's vectors from the one with the number `first` on."""
        for k in range(self.count):
            for beyond, part in enumerate(self.both):
                source = self.pieces.of_vector(ctx, first + k, beyond)
                place = part[(None, 0), 0, k].iterator
                vector_copy(
                    source,
                    cute.make_tensor(place, one_vector(ctx.vec_size)),
                    policy=self.pieces.policy,
                    num_copy_elems=ctx.vec_size,
                )
        return self

    def into(self, fragment: cute.Tensor) -> cute.Tensor:
        """Shift the vectors out of the pieces, into a fragment, which is returned."""
        return shift_out(*self.both, self.pieces.shift, fragment, self.branches)


class Batches(Static):
    """Something that is done with some vectors of a thread at a time."""

    def for_all(self, count: int, most: int) -> None:
        """Do it with the vectors 0 to `count - 1`, at most `most` at a time.

        The last one is never in a loop, so that its batch knows that it is the last.
        """
        done = 0
        if count > WRITTEN_OUT:
            done = (count - 1) // most * most
            self._in_loop(done, most)
        for first, size in batches(count - done, most):
            self.batch(done + first, size)

    @cute.jit
    def _in_loop(self, done: cutlass.Constexpr, most: cutlass.Constexpr):
        for first in cutlass.range(0, done, most, unroll=1):
            self.batch(first, most)

    def batch(self, first: int | Int32, count: int) -> None:
        """Do it with `count` vectors from `first` on."""
        raise NotImplementedError


def batches(count: int, most: int) -> list[tuple[int, int]]:
    """(first, size) of as few batches as possible of `count`, which have about as many."""
    number = -(-count // most)
    bounds = [k * count // number for k in range(number + 1)]
    return [(first, last - first) for first, last in pairwise(bounds)]


class RowOnChip(Batches):
    """Brings all vectors of a thread's row to where loops read them.

    places: a partition of a tile in shared memory, or a fragment. Each thread reads what it brings.
    """

    def __init__(
        self,
        ctx: RowTile,
        mX: cute.Tensor,
        places: cute.Tensor,
        there: tuple[int, int] | None = None,
    ):
        pieces = Pieces(ctx, mX, there=there, policy=ctx.policy)
        self.ctx, self.pieces, self.places = ctx, pieces, as_bytes(places)
        is_fragment = places.memspace == cute.AddressSpace.rmem
        self.for_all(cute.size(ctx.tXcX, mode=[2]), TO_REGISTERS if is_fragment else TO_TILE)

    def batch(self, first: int | Int32, count: int) -> None:
        """Bring some vectors."""
        fragment = self.pieces.start.fragment(count)
        PiecesInFlight(self.ctx, self.pieces, count).load(self.ctx, first).into(fragment)
        for k in range(count):
            cute.autovec_copy(fragment[(None, 0), 0, k], self.places[(None, 0), 0, first + k])


def most_staged(threads: int) -> int:
    """How many vectors each thread stages at a time, if it holds its row."""
    return max(1, STAGED_BYTES // (threads * 4 * WORDS))


def memory_of(vectors: int, size: int) -> cute.Pointer:
    """New shared memory for so many vectors of `size` bytes."""
    layout = cute.make_layout(vectors * size)
    return SmemAllocator().allocate_tensor(Int8, layout, byte_alignment=16).iterator


class Staging(Static):
    """The shared memory through which all results of a kernel are stored whose rows are held.

    ctx: the context of a whole row, which is set up.
    """

    def __init__(self, ctx: RowTile):
        self.anchor, self.threads, self.memory = ctx.tXcX, ctx.config.num_threads, {}

    def of(self, vectors: int, size: int) -> cute.Pointer:
        """Memory for so many vectors of `size` bytes of each thread.

        Whoever asks first may be in the body of a dynamic `if` or `for`, so that it is allocated
        where all that follows can use it.
        """
        if (vectors, size) not in self.memory:
            with ir.InsertionPoint.after(self.anchor.value.owner):
                self.memory[vectors, size] = memory_of(vectors * self.threads, size)
        return self.memory[vectors, size]


class StagedRow(Batches):
    """A result of this thread's row in shared memory, from where it is stored in whole pieces.

    ctx: the context of the whole row, or of a chunk of it. mO: rows (M, N).
    memory: for all vectors of the context's threads, in the order of the row.
        What several rows or shares of the thread block have lies behind each other.
    first, count: of the context's vectors, those that are stored; by default all.
    room: for how many vectors of each thread there is memory; by default for `count`. Results that
        are staged one after the other in the same memory have the same room, because a row waits
        only for its own threads before it overwrites what was staged before.
    end: the column from which on nothing is stored; by default the number of columns.

    All threads that work on the row make each call together.
    """

    def __init__(
        self,
        ctx: RowTile,
        mO: cute.Tensor,
        memory: cute.Pointer,
        first: int = 0,
        count: int | None = None,
        room: int | None = None,
        end: int | None = None,
    ):
        config, self.ctx, self.start = ctx.config, ctx, RowStart(ctx, mO)
        each, vec_size = config.threads_per_row, ctx.vec_size
        vectors = cute.size(ctx.tXcX, mode=[2])
        self.first, self.count = first, vectors if count is None else count
        # All shares of a thread block follow each other in the row, but some chunks of them do not.
        self.is_all = self.count == vectors > 1
        self.threads = each * config.abreast if self.is_all else each
        self.thread = ctx.tidx % self.threads
        place = self.thread // each * (self.count * each) + self.thread % each
        elements = self.threads * self.count * vec_size
        memory = cute.recast_ptr(memory, dtype=self.start.dtype)
        most = elements if room is None else self.threads * room * vec_size
        self.memory = memory + ctx.tidx // self.threads * most
        self.places = cute.make_tensor(
            self.memory + place * vec_size,
            cute.make_layout((vec_size, self.count, 2), stride=(1, each * vec_size, vec_size)),
        )
        # Behind the last vector of all lies what other threads have. Itself is taken in its place,
        # because no piece is stored that would have any of it.
        following = place + (self.count - 1) * each + Int32(self.thread != self.threads - 1)
        self.behind_last = cute.make_tensor(
            self.memory + following * vec_size, cute.make_layout(vec_size)
        )
        column = ctx.tXcX[(0, 0), 0, first][1] - place * vec_size  # of the first element
        self.ends_early, end = end is not None, ctx.shape[1] if end is None else end
        number = cutlass.min(cutlass.max(end - column, 0), elements)
        if ctx.row_in_bounds is not True:
            number = select(ctx.row_in_bounds, number, 0)
        self.number = number  # of elements of the row
        self.address = self.start.address + Int64(column) * self.start.itemsize
        self.head_bytes = -Int32(self.start.address) & (self.start.size - 1)
        self.head = self.head_bytes >> self.start.log2_itemsize  # before the first whole piece
        self.target = self.address + self.head_bytes.to(Int64) + Int64(place * self.start.size)
        self.left = number - self.head - (place + 1) * vec_size  # behind the thread's first piece
        self.own = None

    def wait(self) -> None:
        """Wait for all threads that work on the row."""
        config = self.ctx.config
        if self.threads <= WARP or self.threads == config.threads_per_row * config.abreast:
            wait_for_share(self.ctx.tidx, config.num_threads, self.threads)
        else:  # the numbers of barriers are those of whole rows
            cute.arch.sync_threads()

    def put(self, k: int | Int32, vector: cute.Tensor) -> None:
        """Put the k-th vector of the thread to its place. It is stored by `store`."""
        cute.autovec_copy(vector, self.places[None, k, 0])

    def store(self, own: cute.Tensor | None = None) -> None:
        """Store what all threads have put.

        own: all vectors of the context's thread, if it has them in registers.
        """
        self.wait()
        self.own = own
        self.for_all(self.count, TO_RESULT if own is None else 2 * TO_RESULT)
        self._store_ends()

    def batch(self, first: int | Int32, count: int) -> None:
        """Store some pieces of this thread."""
        ctx, start = self.ctx, self.start
        own, following, pieces = (start.fragment(count) for _ in range(3))
        for k in range(count):
            if self.own is not None:
                source = self.own[(None, 0), 0, self.first + first + k]
            else:
                source = self.places[None, first + k, 0]
            cute.autovec_copy(source, own[(None, 0), 0, k])
            is_last = isinstance(first, int) and first + k == self.count - 1
            behind = self.behind_last if is_last else self.places[None, first + k, 1]
            cute.autovec_copy(behind, following[(None, 0), 0, k])
        is_warp = ctx.config.threads_per_row >= WARP
        shift_out(own, following, self.head_bytes, pieces, is_warp)
        each = ctx.config.threads_per_row
        for k in range(count):
            elements = (first + k) * (each * ctx.vec_size)
            target = start.view(self.target + elements * start.itemsize, ctx.vec_size)
            predicate = None if self._is_inside(first + k) else single(self.left >= elements)
            piece = cute.make_tensor(pieces[(None, 0), 0, k].iterator, target.layout)
            vector_copy(piece, target, pred=predicate, num_copy_elems=ctx.vec_size)

    def _is_inside(self, k: int | Int32) -> bool:
        """Whether the piece behind the start of the k-th vector is whole, for all threads."""
        ctx = self.ctx
        if ctx.row_in_bounds is not True or not ctx.is_row or isinstance(k, Int32):
            return False
        if self.ends_early:
            return False
        is_last = k == self.count - 1 and not self.is_all
        return not is_last and ctx.layout.is_whole(ctx.chunk_of(self.first + k), beyond=1)

    @cute.jit
    def _store_ends(self):
        """Store what lies before the first whole piece and behind the last."""
        most = 2 * self.start.vec_size
        if const_expr(self.threads <= WARP):
            for i in cutlass.range_constexpr(0, most, self.threads):
                self._store_end(self.thread + i)
        else:
            if self.thread < most:
                self._store_end(self.thread)

    def _store_end(self, place: Int32) -> None:
        """Store an element: of the first `vec_size` of these, or of those behind the last piece."""
        start, number, vec_size = self.start, self.number, self.start.vec_size
        behind = self.head + ((number - self.head) & -vec_size)
        is_head = place < vec_size
        element = select(is_head, place, behind + place - vec_size)
        wanted = (element < number) & ((element < self.head) == is_head)
        element = select(wanted, element, 0)
        target = start.view(self.address + Int64(element) * start.itemsize, 1)
        value = cute.make_rmem_tensor(target.layout, start.dtype)
        value[0] = cute.make_tensor(self.memory + element, target.layout)[0]
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
    if branches and behind and words == WORDS:
        _branch(low, high, shift, result)
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
            result[k * words + i] = _funnel(found[i], found[i + 1], shift) if behind else found[i]
    return fragment


@cute.jit
def _branch(low, high, shift, result):
    """Take each vector from `shift` bytes on: one branch for each number of words."""
    first = shift >> 2
    if first < 2:
        if first == 0:
            _take(0, low, high, shift, result)
        else:
            _take(1, low, high, shift, result)
    else:
        if first == 2:
            _take(2, low, high, shift, result)
        else:
            _take(3, low, high, shift, result)


def _take(first: int, low, high, shift: Int32, result) -> None:
    """What one of the branches does.

    Neighbouring branches have different instructions, which do the same. A compiler would move
    equal ones behind the branches, and would then have to move words to where these find them.
    """
    for k in range(0, cute.size(result), WORDS):
        found = [part[k + i] for part in (low, high) for i in range(WORDS)]
        for i, (one, other) in enumerate(pairwise(found[first : first + WORDS + 1])):
            result[k + i] = (_extract if first % 2 else _funnel)(one, other, shift)


def _funnel(low: Int32, high: Int32, shift: Int32) -> Int32:
    """The four bytes from number `shift % 4` on, of the eight that two words have."""
    bits = shift * 8  # of which only those below 32 count
    return Int32(llvm.intr_fshr(high.ir_value(), low.ir_value(), bits.ir_value()))


def _extract(low: Int32, high: Int32, shift: Int32) -> Int32:
    """The same as `_funnel`, with an instruction that no compiler moves to another branch."""
    words = [word.ir_value() for word in (low, high, shift)]
    text = "prmt.b32.f4e $0, $1, $2, $3;"
    found = llvm.inline_asm(Int32.mlir_type, words, text, "=r,r,r,r", has_side_effects=True)
    return Int32(found)


def one_vector(elements: int) -> cute.Layout:
    """The layout of a partition of one vector."""
    return cute.make_layout(((elements, 1), 1, 1))


def single(condition: Boolean) -> cute.Tensor:
    """The predicate of one vector."""
    predicate = cute.make_rmem_tensor(cute.make_layout((1, 1, 1)), Boolean)
    predicate[0] = condition
    return predicate

"""The reductions of a kernel's context: over the whole row at once, or chunk by chunk."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric

from htile.compute.accumulate import (
    Accumulators,
    MeanSum,
    Partial,
    SoftmaxPair,
    TwoLevelSum,
    WelfordTriple,
)
from htile.compute.candidates import ElementKeys, Keys
from htile.compute.exchange import slots_from
from htile.compute.following import (
    FollowingAccumulators,
    FollowingSums,
    Move,
    reduce_following,
)
from htile.compute.keys import Indexed, as_key, in_order
from htile.compute.mean import MEAN, RowMean, ThreadPart
from htile.compute.moments import RowMoments, reduce_moments
from htile.compute.online import about_finite, online_softmax_reduce, softmax_pair_reduce
from htile.compute.operands import make_vector, select
from htile.compute.products import Product
from htile.compute.ranks import first_of_row
from htile.compute.reduce import (
    ADD,
    MAX,
    MIN,
    MUL,
    identity,
    row_reduce,
    thread_reduce,
    warp_reduce,
)
from htile.compute.scan import row_scan
from htile.compute.selection import BITS, kth_of_row, nothing_of
from htile.compute.together import SLOTS, FoundTogether, first_together
from htile.compute.trees import VectorTree, combine_vectors, leaves
from htile.copy.lookup import Lookups


class RowReductions(Lookups):
    """A row tile whose values can be reduced over the row.

    slot: the first slot of the reduction buffer that a reduction takes. Each slot is used once, or
        with a barrier between (of the cluster, where the row has one).
    phase: how often before the slot was used in a cluster, modulo 2. That of the context is added:
        how often rows before this one have used it.
    """

    phase: int | Int32 = 0

    def row_reduce(self, values, ops, slot: int = 0, phase: int | Int32 = 0):
        """Reduce values over the row, with one barrier. Padded elements do not count.

        values: one or a tuple: vectors, or scalars of the row that stand for N equal elements.
            Boolean vectors take MAX (any) and MIN (all). Products take ADD and MEAN, and `Indexed`
            takes MAX. Each of several may be a `tree` that has taken all vectors.
        ops: ADD, MUL, MAX, MIN or MEAN for each value. Value i takes the slot `slot + i`.
        """
        if not isinstance(values, tuple):
            return self.row_reduce((values,), (ops,), slot, phase)[0]
        operands = tuple(self._of_thread(v, o) for v, o in zip(values, ops, strict=True))
        results = self._reduce(operands, ops, slot, phase)
        return tuple(
            r != 0 if v.dtype is Boolean else r for v, r in zip(values, results, strict=True)
        )

    def tree(self, op: cute.ReductionOp) -> VectorTree:
        """What combines this thread's vectors as they come, in the order of `in_tree`."""
        return VectorTree(op, self.num_chunks)

    def in_tree(self, j: int) -> RowReductions:
        """The context of the j-th vector that a tree takes."""
        return self.chunk(leaves(self.num_chunks)[j])

    def add_to(self, tree: VectorTree, value) -> None:
        """Let a tree take this vector's values. Padded elements do not count."""
        operand = self._operand(value, tree.op)
        tree.take(operand.reshape((self.vec_size,)), value.dtype)

    def group_reduce(self, value: cute.TensorSSA, op: cute.ReductionOp, size: int):
        """Reduce each group of `size` neighbouring columns: a vector with its group's in each.

        value: a vector, or a scalar of the row, of Float32, Int32, Int64, or of Boolean for MAX
            (any) and MIN (all).
        op: ADD, MUL, MAX or MIN.
        size: a power of two, of one to 32 vectors.

        Raises ValueError for other sizes, and where the row or a chunk of it ends inside a group.
        """
        value = value if isinstance(value, cute.TensorSSA) else self.full(value)
        chunks, lanes = cute.size(value.shape) // self.vec_size, size // self.vec_size
        if lanes not in (1, 2, 4, 8, 16, 32) or lanes * self.vec_size != size:
            raise ValueError(
                f"a group has 1, 2, 4, 8, 16 or 32 vectors of {self.vec_size}, not {size} elements"
            )
        if self.config.threads_per_row % lanes or self.shape[1] % size:
            raise ValueError(
                f"groups of {size} do not divide the row of {self.shape[1]}, or what its "
                f"{self.config.threads_per_row} threads have of it at a time"
            )
        x = self._vector(value, op).reshape((self.vec_size, chunks))
        found = [warp_reduce(thread_reduce(x[None, k], op), op, lanes) for k in range(chunks)]
        each = [element for element in found for _ in range(self.vec_size)]
        result = make_vector(each, self.vector_shape, x.dtype)
        return result != 0 if value.dtype is Boolean else result

    def row_scan(self, values, ops, slot: int = 0, phase: int | Int32 = 0, from_end=False):
        """Each element combined with all before it in the row, with one barrier.

        values: one or a tuple: vectors, or scalars of the row that stand for N equal elements.
        ops: ADD, MUL, MAX, MIN or LOGADD for each value. Each takes `num_chunks` slots, the first
            those from `slot`.
        from_end: for each value whether elements are combined with all behind them.

        The context is of a whole row, and each of its shares has a CTA of its own.
        """
        if not isinstance(values, tuple):
            return self.row_scan((values,), (ops,), slot, phase, (from_end,))[0]
        if self.config.shares > 1 or cute.size(self.tXcX, mode=[2]) != self.num_chunks:
            raise ValueError("a scan is of all of a row: each of its shares takes a CTA")
        across = self._across_row(slot, self.num_chunks * len(values), phase)
        del across["abreast"]
        from_end = from_end or (False,) * len(values)
        values = tuple(
            self._operand(v, op) if back else self._vector(v, op)
            for v, op, back in zip(values, ops, from_end, strict=True)
        )
        across |= dict(share=self.share_in_row, from_end=from_end)
        return row_scan(values, ops, self.vec_size, **across)

    def online_softmax(self, x: cute.TensorSSA, slot: int = 0, phase: int | Int32 = 0):
        """The row's maximum m, the sum of exp(x - m) and the vector exp(x - m).

        One exchange brings both numbers, through a buffer of Int64. Padded elements of the vector
        are 0.
        """
        x = self._operand(x, MAX)
        return online_softmax_reduce(x, **self._across_row(slot, 1, phase))

    def online_logsumexp(self, x: cute.TensorSSA, slot: int = 0, phase: int | Int32 = 0):
        """The row's maximum m and the sum of exp(x - m); of exp(x) where m is infinite.

        One exchange brings both numbers, through a buffer of Int64.
        """
        peak, total, _ = self.online_softmax(x, slot, phase)
        return peak, about_finite(peak, total)

    def ranks(
        self,
        keys,
        count: int,
        slot: int = 0,
        phase: int | Int32 = 0,
        smaller: bool = False,
        index_bits: int = 0,
        group: int = 1,
        candidates: bool = False,
        elements=None,
        together: bool = False,
        zero_bits: int = 0,
    ) -> list[Int64] | FoundTogether:
        """The `count` largest keys of the row in order, or the smallest.

        keys: a vector of what `math.key` makes, or a tuple of several for pieces of the row. No two
            keys of the row are equal, but for those of a group.
        slot: the first of `count` slots of a buffer of Int64; of SLOTS with `together`.
        index_bits: so many of the lowest bits of each element are zero, and no index has more bits.
            Keys are compared as words of 32 bits then. With 0 they are of 64 bits.
        group: so many neighbouring columns have the same key, which counts once.
        candidates: whether a thread sorts only keys that may be among the first ones.
        elements: the vectors of Float32 that the largest keys are of, which saves instructions.
        together: whether the warps of a row of several look for the first keys together.
        zero_bits: so many of the lowest bits of each element are zero, with `together`.
        """
        pieces = keys if isinstance(keys, tuple) else (keys,)
        across = self._across_row(slot, SLOTS if together else count, phase)
        listed = self._listed(pieces, smaller, index_bits, group, elements)
        if together:
            across |= dict(smaller=smaller, index_bits=index_bits, is_there=self.row_in_bounds)
            return first_together(listed, count, zero_bits, **across)
        if candidates:
            across["listing_threads"] = self.config.num_threads
        keys = listed.keys if isinstance(listed, Keys) else listed
        found = first_of_row(keys, count, **across)
        return [as_key(key, smaller, index_bits) for key in found]

    def _listed(
        self, pieces: tuple, smaller: bool, index_bits: int, group: int, elements
    ) -> Keys | ElementKeys:
        """The keys of this thread, as `in_order` makes them; of floats the elements, if given."""
        if elements is not None and (self.is_even_N or self._tells_padding(pieces, index_bits)):
            elements = elements if isinstance(elements, tuple) else (elements,)
            elements = [self._operand(x, MAX) for x in elements]
            floats = [x[i] for x in elements for i in range(cute.size(x.shape))]
            low = [key[i].to(Int32) for key in pieces for i in range(cute.size(key.shape))]
            return ElementKeys(floats, low, index_bits)
        vectors = [in_order(self._vector(piece, MAX), smaller, index_bits) for piece in pieces]
        vectors = [self._operand(vector, MAX) for vector in vectors]
        step = 1 if group == 1 else self.vec_size
        words = [vector[i] for vector in vectors for i in range(0, cute.size(vector.shape), step)]
        if group > 1:
            is_first = Boolean(self.tXcX[0][1] % group == 0)  # and so in every chunk
            words = [select(is_first, word, identity(MAX, type(word))) for word in words]
        return Keys(words)

    def _tells_padding(self, pieces: tuple, index_bits: int) -> bool:
        """Whether a padded element, which is -inf, comes behind all of the row by its index."""
        return len(pieces) == 1 and (index_bits == 0 or self.capacity <= 1 << index_bits)

    def kthvalue(
        self, rows, ranks, slot: int = 0, phase: int | Int32 = 0, zero_bits: int = 0
    ) -> Numeric | tuple[Numeric, ...]:
        """The element of a row that so many others come before in ascending order.

        NaN is the largest element. A rank that there is not gives NaN, and of Int32 any number.

        rows: a vector of Float32 or Int32, or a tuple of several for pieces of the row. Where
            `ranks` is a tuple, a tuple with one such for each rank.
        ranks: a number of the row, or a tuple of several, which share their exchanges.
        slot: the first of 32 - zero_bits slots for each rank.
        zero_bits: so many of the lowest bits of every element are zero.
        """
        if not isinstance(ranks, tuple):
            return self.kthvalue((rows,), (ranks,), slot, phase, zero_bits)[0]
        rows = [each if isinstance(each, tuple) else (each,) for each in rows]
        elements = [[e for piece in row for e in self._ranked(piece)] for row in rows]
        across = self._across_row(slot, (BITS - zero_bits) * len(ranks), phase)
        ranks = [Int32(rank) for rank in ranks]
        return tuple(kth_of_row(elements, ranks, zero_bits, **across))

    def _ranked(self, piece: cute.TensorSSA) -> list[Numeric]:
        """The elements of this thread; padded ones come after all others."""
        vector = self._vector(piece, MAX)
        if not self.is_whole:
            nothing = self.full(nothing_of(vector.dtype), vector.dtype)
            vector = cute.where(self.mask, vector, nothing)
        return [vector[i] for i in range(cute.size(vector.shape))]

    # Chunk by chunk

    def partial(self, op: cute.ReductionOp, dtype: type[Numeric] = Float32) -> Accumulators:
        """The start of a reduction chunk by chunk: the identity of `op`, in values of `dtype`."""
        return self._for_shares(lambda share: Partial.start(op, dtype, self.vec_size))

    def two_level_sum(self) -> Accumulators:
        """The start of a sum of Float32 over many chunks."""
        return self._for_shares(lambda share: TwoLevelSum(self.vec_size))

    def mean_sum(self) -> Accumulators:
        """The start of a mean of Float32."""
        return self._for_shares(lambda share: MeanSum(self.chunk(0, share)))

    def softmax_pair(self) -> Accumulators:
        """The start of a maximum and of the sum of exponentials below it."""
        return self._for_shares(lambda share: SoftmaxPair(self.vec_size))

    def welford_triple(self, in_pairs: bool = False) -> Accumulators:
        """The start of a mean and of the sum of squares about it (see `WelfordTriple`).

        in_pairs: merge two chunks at a time. Raises ValueError unless the chunks are even in number
            and none is padded.
        """
        if in_pairs and (self.num_chunks % 2 or not self.is_even_N):
            raise ValueError(
                f"in_pairs=True needs an even number of chunks without padding, but a thread has "
                f"{self.num_chunks} of a row of {self.shape[1]} elements: leave it out"
            )
        return self._for_shares(lambda share: WelfordTriple(self.chunk(0, share), in_pairs))

    def following_sums(self, peaks: Sequence[Accumulators], *moves: Move) -> FollowingAccumulators:
        """The start of sums of products with exponentials below maxima of this thread.

        peaks: those maxima, of all elements that the thread has.
        """
        cute.arch.sync_warp()
        of_shares = zip(*(each.parts for each in peaks), strict=True)
        own = [[thread_reduce(part.vector, MAX) for part in parts] for parts in of_shares]
        return FollowingAccumulators(FollowingSums(each, moves) for each in own)

    def row_partial(self, value, op: cute.ReductionOp) -> Accumulators:
        """What this thread has of a reduction of a held row, as `accumulate` makes it of chunks."""
        operand = self._of_thread(value, op)
        return Accumulators([Partial(op, thread_reduce(operand, op), value.dtype is Boolean)])

    def _for_shares(self, start: Callable[[int], object]) -> Accumulators:
        """An accumulator for each share that this thread works on."""
        return Accumulators([start(share) for share in range(self.config.turns)])

    def accumulate(self, accumulators: Accumulators, value, padded: bool = False) -> Accumulators:
        """The accumulators with the values of this chunk. Padded elements do not count.

        padded: the padded elements hold the identity of the reduction already.
        """
        op = accumulators.op
        keeps = accumulators.keeps_padding or padded
        value = self._vector(value, op) if keeps else self._operand(value, op)
        return accumulators.take(self, value.reshape((self.vec_size,)))

    def add_following(self, sums: FollowingAccumulators, *terms) -> FollowingAccumulators:
        """The sums with the terms of this chunk, or of a row that is held."""
        return sums.added(self.share, [self._operand(each, ADD) for each in terms])

    def reduce_partials(self, partials, slot: int = 0, phase: int | Int32 = 0):
        """Reduce what `accumulate` has made over the row: one thing or a tuple, one barrier."""
        if not isinstance(partials, tuple):
            return self.reduce_partials((partials,), slot, phase)[0]
        operands = tuple(tuple(part.vector for part in p.parts) for p in partials)
        results = self._reduce(operands, tuple(p.op for p in partials), slot, phase)
        return tuple(r != 0 if p.is_mask else r for p, r in zip(partials, results, strict=True))

    def reduce_pair(
        self, pair: Accumulators, slot: int = 0, phase: int | Int32 = 0, finite: bool = False
    ) -> tuple[Float32, Float32]:
        """The row's maximum m and sum of exp(x - m), of a `softmax_pair`, with one exchange.

        finite: the sum is of exp(x) where m is infinite. The buffer is of Int64.
        """
        across = self._across_row(slot, 1, phase)
        peak, total = softmax_pair_reduce([part.of_thread for part in pair.parts], **across)
        return peak, about_finite(peak, total) if finite else total

    def reduce_following(
        self, sums: FollowingAccumulators, *others, slot: int = 0, phase: int | Int32 = 0
    ) -> tuple[object, ...]:
        """What `accumulate` has made of others over the row, and what gives maxima and sums.

        One exchange brings all, through a buffer of Int64. The last of what is returned has
        `maximum(place)`, and `sum(place, *maxima)` about the maxima of the row.
        """
        first = sums.parts[0]
        count = len(others) + len(first.peaks) + len(first.moves)
        across = self._across_row(slot, -(-count // 2), phase)
        values = [[part.vector for part in each.parts] for each in others]
        results, found = reduce_following(
            sums.parts, values, [each.op for each in others], **across
        )
        given = [r != 0 if p.is_mask else r for p, r in zip(others, results, strict=True)]
        return (*given, found)

    def reduce_moments(
        self, triple: Accumulators, slot: int = 0, phase: int | Int32 = 0
    ) -> tuple[Float32, RowMoments]:
        """The row's mean, and what gives the sum of squares, of a `welford_triple`.

        `about(reference)` of the latter is the sum of (x - reference)**2. One exchange brings both,
        through two slots of a buffer of Int64.
        """
        across = self._across_row(slot, 2, phase)
        found = [part.of_thread for part in triple.parts]
        moments = reduce_moments(found, self.shape[1], **across)
        return moments.mean, moments

    @property
    def row_mean(self) -> RowMean:
        """How a mean over this row is reduced."""
        return RowMean(self.layout)

    # What all reductions need

    def _reduce(self, operands: tuple, ops: tuple, slot: int, phase: int | Int32) -> tuple:
        """Reduce what `_operand` has made, each in the next slot.

        An operand may be a tuple, with what is reduced of each share.
        """
        taken = tuple(self.row_mean.op if op is MEAN else op for op in ops)
        results = row_reduce(operands, taken, **self._across_row(slot, len(operands), phase))
        return tuple(
            self.row_mean.scaled(result) if op is MEAN else result
            for result, op in zip(results, ops, strict=True)
        )

    def _across_row(self, slot: int, count: int, phase: int | Int32) -> dict:
        """The arguments beside the operands of a reduction that takes `count` slots.

        The cluster has started when this returns.
        """
        self.cluster_wait()
        return dict(
            threads_per_row=self.config.threads_per_row,
            reduction_buffer=self._slots(slot, count),
            mbar_ptr=None if self.mbar_ptr is None else self.mbar_ptr + slot,
            phase=phase + self.phase,
            abreast=self.config.abreast,
        )

    def _of_thread(self, value, op):
        """What is reduced over the row, of this thread's elements.

        Sums and products are combined in the order of a `tree`, so that their bits do not depend on
        whether they came as trees.
        """
        if isinstance(value, VectorTree):
            return value.total
        operand = self._operand(value, op)
        if op not in (ADD, MUL):
            return operand
        return combine_vectors(operand, self.vec_size, op)

    def _operand(self, value, op) -> cute.TensorSSA | Product | Indexed | Float32 | ThreadPart:
        """What is reduced: a full vector whose padded elements hold the identity of `op`."""
        value = self._vector(value, op)
        if op is MEAN:
            in_row = None if self.is_whole else self._vectors_in_row
            return self.row_mean.of_vectors(value, in_row, self.share_in_row)
        if self.is_whole:
            return value
        if isinstance(value, Product):  # of two zeros: a factor of padding may be infinite
            return value.map(lambda factor: cute.where(self.mask, factor, self.full(0.0, Float32)))
        if isinstance(value, Indexed):  # a padded element has a larger index than all of the row
            return value.map(lambda elements: self._operand(elements, op))
        return cute.where(self.mask, value, self.full(identity(op, value.dtype), value.dtype))

    @property
    def _vectors_in_row(self) -> list[tuple[Boolean, ...]]:
        """For each vector of this thread, whether its first and last elements are in the row."""
        return [self._in_row(k) for k in range(cute.size(self.tXcX, mode=[2]))]

    def _vector(self, value, op) -> cute.TensorSSA | Product | Indexed:
        """A full vector of a dtype that `op` reduces. Padded elements stay as they are."""
        if isinstance(value, Product | Indexed):
            return value.map(lambda factor: self._vector(factor, op))
        if not isinstance(value, cute.TensorSSA):
            value = self.full(value)
        if value.dtype is Boolean:
            if op not in (MAX, MIN):
                raise TypeError(f"a Boolean vector takes MAX (any) or MIN (all), not {op}")
            value = cute.where(value, self.full(1, Int32), self.full(0, Int32))
        elif op is MEAN and not value.dtype.is_float:
            raise TypeError(f"a mean is of floats, not of {value.dtype}: convert it to Float32")
        elif value.dtype.is_float and value.dtype is not Float32:
            value = value.to(Float32)
        return value

    def _slots(self, slot: int, count: int) -> cute.Tensor | None:
        """The slots from `slot` to `slot + count - 1` of the reduction buffer."""
        buffer = self.reduction_buffer
        if buffer is None:
            return None
        if slot + count > self.config.stage:
            raise ValueError(
                f"the reduction needs the slots {slot} to {slot + count - 1}, and the buffer has "
                f"{self.config.stage}: raise `stage` of the configuration"
            )
        return slots_from(buffer, slot, count)

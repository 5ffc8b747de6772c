"""Reductions that go on from chunk to chunk: what a loop over a row's chunks carries in registers.

`take` adds the values of a chunk. At the end `vector` is what each thread has, and `op` reduces it
over the row. `Accumulators` has one accumulator for each share of a row that the thread works on,
as if each share had a CTA of its own, so that every sum has the same order.

A sum over many chunks has two levels, and `fold` adds the inner one to the outer. In a single level
terms would vanish that are tiny beside the sum of a thread. Nothing is compensated by subtraction,
which would make NaN of infinite sums.

`SoftmaxPair` and `WelfordTriple` accumulate two reductions, of which the second needs the result of
the first. The second is summed relative to a reference of the thread's own, and `about` moves the
sum to the row's reference when that is known.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Numeric, const_expr

from htile.compute.division import reciprocal
from htile.compute.math import abs
from htile.compute.mean import MEAN, Statistic, ThreadPart, quotient
from htile.compute.moments import Moments
from htile.compute.online import exp_diff
from htile.compute.operands import Vector, make_vector, select
from htile.compute.powers import exp_bounded
from htile.compute.products import Product
from htile.compute.reduce import ADD, MAX, combine, identity, thread_reduce
from htile.copy.tile import RowTile

INF = float("inf")


class Accumulator:
    """Vectors and scalars, `values`, that dynamic loops carry.

    op: how `vector` is reduced over the row. is_mask: whether the result is a Boolean.
    keeps_padding: whether `take` gets padded elements as they are, not as the identity of `op`.
    """

    op, is_mask, keeps_padding = ADD, False, False
    values: tuple[Vector | Numeric, ...]

    def _with(self, *values: Vector | Numeric) -> Accumulator:
        """The same with other values."""
        new = copy.copy(self)
        new.values = values
        return new

    def __extract_mlir_values__(self):
        return [word for value in self.values for word in value.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, words):
        pairs = zip(self.values, words, strict=True)
        return self._with(*(value.__new_from_mlir_values__([word]) for value, word in pairs))


class Accumulators:
    """An accumulator for each share of a row that a thread works on. It has their interface."""

    def __init__(self, parts: Iterable[Accumulator]):
        self.parts = tuple(parts)

    @property
    def op(self) -> cute.ReductionOp | Statistic:
        """How what the threads have is reduced over the row."""
        return self.parts[0].op

    @property
    def is_mask(self) -> bool:
        """Whether the result is a Boolean."""
        return self.parts[0].is_mask

    @property
    def keeps_padding(self) -> bool:
        """Whether `take` gets padded elements as they are."""
        return self.parts[0].keeps_padding

    @property
    def first(self) -> Accumulators:
        """The first of two reductions."""
        return Accumulators(part.first for part in self.parts)

    def take(self, chunk: RowTile, value: Vector | Product) -> Accumulators:
        """With the values of a chunk, which go to the accumulator of its share."""
        return self._with(chunk.share, self.parts[chunk.share].take(chunk, value))

    def fold(self, share: int = 0) -> Accumulators:
        """With the inner level of a share added to its outer level."""
        return self._with(share, self.parts[share].fold())

    def _with(self, share: int, part: Accumulator) -> Accumulators:
        """The same with another accumulator for a share."""
        return type(self)([*self.parts[:share], part, *self.parts[share + 1 :]])

    def about(self, reference: Float32) -> Accumulators:
        """The second of two reductions, relative to the row's reference."""
        return Accumulators(part.about(reference) for part in self.parts)

    def __extract_mlir_values__(self):
        return [word for part in self.parts for word in part.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, words):
        left = iter(words)
        each = [(part, len(part.__extract_mlir_values__())) for part in self.parts]
        return type(self)(
            part.__new_from_mlir_values__([next(left) for _ in range(n)]) for part, n in each
        )


class Partial(Accumulator):
    """One reduction, element by element: a vector, or a scalar that is complete."""

    def __init__(
        self,
        op: cute.ReductionOp | Statistic,
        vector: Vector | Numeric | ThreadPart,
        is_mask: bool = False,
    ):
        self.op, self.values, self.is_mask = op, (vector,), is_mask

    @classmethod
    def start(cls, op: cute.ReductionOp, dtype: type[Numeric], vec_size: int) -> Partial:
        """The identity of `op` in a vector of `dtype`. Booleans are counted in Int32."""
        number = Int32 if dtype is Boolean else dtype
        return cls(op, cute.full((vec_size,), identity(op, number), number), dtype is Boolean)

    @property
    def vector(self) -> Vector | Numeric | ThreadPart:
        """What is reduced over the row."""
        return self.values[0]

    def take(self, chunk: RowTile, value: Vector | Product) -> Partial:
        """With the values of a chunk."""
        return self._with(combine(self.op, self.values[0], value))

    def fold(self) -> Partial:
        """All in the first element, and the identity in the others."""
        (vector,) = self.values
        size = cute.size(vector.shape)
        rest = [vector.dtype(identity(self.op, vector.dtype))] * (size - 1)
        total = thread_reduce(vector, self.op)
        return self._with(make_vector([total, *rest], vector.shape, vector.dtype))


class TwoLevelSum(Accumulator):
    """A Float32 sum of many chunks. Its values are (the inner vector, the outer scalar)."""

    def __init__(self, vec_size: int):
        self.values = cute.full((vec_size,), 0.0, Float32), Float32(0.0)

    @property
    def vector(self) -> Float32:
        """What is reduced over the row."""
        return self.fold().values[1]

    def take(self, chunk: RowTile, value: Vector | Product) -> TwoLevelSum:
        """With the values of a chunk."""
        inner, outer = self.values
        return self._with(combine(ADD, inner, value), outer)

    def fold(self) -> TwoLevelSum:
        """With the inner sums added to the outer one."""
        inner, outer = self.values
        return self._with(cute.full_like(inner, 0.0), outer + thread_reduce(inner, ADD))


class MeanSum(Accumulator):
    """The mean of x. Its values are the sum of x, and what rounding has taken from that sum.

    The error of each addition is that of the fast two-sum (T. J. Dekker, A floating-point technique
    for extending the available precision, 1971), which is exact where the sum is no smaller in
    magnitude than what is added. Of equal elements it is, so the two values are N times the element
    without any error. One level of sums is enough.
    """

    op, keeps_padding = MEAN, True

    def __init__(self, share: RowTile):
        """share: its first chunk."""
        self.share, self.values = share, (Float32(0.0), Float32(0.0))

    def take(self, chunk: RowTile, value: Vector | Product) -> MeanSum:
        """With the values of a chunk."""
        if const_expr(chunk.in_row is None):
            return self._added(thread_reduce(value, ADD))
        runs = chunk.row_mean.runs_of_vector(value, chunk.k, chunk.in_row)
        return functools.reduce(MeanSum._added, [run.total for run in runs], self)

    def _added(self, term: Float32) -> MeanSum:
        """With one number more."""
        total, error = self.values
        new = total + term
        return self._with(new, error + (term - (new - total)))

    def fold(self) -> MeanSum:
        """The same, because there is no inner level."""
        return self

    @property
    def vector(self) -> Float32 | ThreadPart:
        """What is reduced over the row."""
        total, error = self.values
        error = select(abs(error) < INF, error, Float32(0.0))  # that of an infinite sum is NaN
        number = self.share.elements_in_row
        some = number if isinstance(number, int) else cutlass.max(number, 1)
        mean = quotient(total, some, error)
        return self.share.row_mean.of_mean(mean, total + error, number)


class SoftmaxPair(Accumulator):
    """The maximum of x, and the sum of exp(x - m) for the row's maximum m.

    Its values are the thread's maximum, a vector of sums relative to that, and their outer level.
    One exponential for each chunk moves the sums to a new maximum. A maximum of -inf counts as 0,
    as in `exp_diff`. One of NaN or +inf makes the sums NaN.
    """

    op = MAX

    def __init__(self, vec_size: int):
        self.values = Float32(-INF), cute.full((vec_size,), 0.0, Float32), Float32(0.0)

    def take(self, chunk: RowTile, value: Vector) -> SoftmaxPair:
        """With the x of a chunk, whose padded elements are -inf."""
        peak, sums, total = self.values
        new = combine(MAX, peak, thread_reduce(value, MAX))
        scale, exp = exp_diff(peak, new), exp_diff(value, new)
        sums = cute.math.fma(sums, cute.full_like(sums, scale), exp)
        return self._with(new, sums, total * scale)

    def fold(self) -> SoftmaxPair:
        """With the inner sums added to the outer one."""
        peak, sums, total = self.values
        return self._with(peak, cute.full_like(sums, 0.0), total + thread_reduce(sums, ADD))

    @property
    def of_thread(self) -> tuple[Float32, Float32]:
        """The thread's maximum, and its sum of exponentials relative to that."""
        peak, _, total = self.fold().values
        return peak, total

    @property
    def first(self) -> Partial:
        """The maximum."""
        return Partial(MAX, self.values[0])

    def about(self, reference: Float32) -> Partial:
        """The sum of exp(x - reference), for the row's maximum, or 0 where that is infinite.

        It is +inf for an x of +inf and a reference of 0, as the sum itself would be: nothing finite
        counts beside it.
        """
        peak, _, total = self.fold().values
        total = select(peak == INF, Float32(INF), total)
        gap = cute.arch.fmin(peak - reference, Float32(0.0), nan=True)
        return Partial(ADD, total * exp_bounded(gap))


class WelfordTriple(Accumulator):
    """The mean of x, and the sum of (x - reference)**2 for the row's reference.

    Its values are a base, which is a number near the mean of what the thread has seen; that mean
    less the base, so that no digit is lost in a mean far from 0; the sum of squares about the mean;
    and the outer level of that sum.

    Every chunk is summed relative to the base, and so are its squares. Then the base moves to the
    new mean. What is subtracted of the squares is no larger than what is left of them. Only the
    first chunk is relative to its first element instead. Chunks of padding come last in a thread,
    and are dropped. A vector that the row ends in counts with the elements that are in the row. Two
    chunks may be merged at a time where none is padded and their number is known: that is half of
    the work of merging.
    """

    keeps_padding = True

    def __init__(self, share: RowTile, in_pairs: bool = False):
        """share: its first chunk. in_pairs: merge two chunks at a time."""
        self.share, self.in_pairs, self.waiting = share, in_pairs, None
        self.values = (Float32(0.0),) * 4

    def take(self, chunk: RowTile, value: Vector) -> WelfordTriple:
        """With the x of a chunk."""
        if not self.in_pairs:
            places = [chunk.layout.place_of(i) for i in range(cute.size(value.shape))]
            in_row = chunk.in_row and [chunk.in_row[place] for place in places]
            return self._merged(chunk.k, in_row, value, chunk.ends)
        if self.waiting is None:
            new = copy.copy(self)
            new.waiting = value
            return new
        size = cute.size(value.shape)
        both = [half[i] for half in (self.waiting, value) for i in range(size)]
        new = self._merged(chunk.k // 2, None, make_vector(both, (2 * size,), Float32))
        new.waiting = None
        return new

    def _merged(
        self,
        k: int | Int32,
        in_row: Sequence[Boolean] | None,
        value: Vector,
        ends: int | Int32 = 0,
    ) -> WelfordTriple:
        """With the k-th vector, if it is in the row.

        in_row: whether each of its elements is in the row; None if all are.
        ends: how many elements it has in the row if the row may end in it; 0 if it can not.
        """
        may_end = not isinstance(ends, int) or ends > 0
        base, rest, squares, outer = self.values
        size = cute.size(value.shape)
        start = value[0]
        starts = (Int32(k) == 0) & (abs(start) < INF)
        base = select(starts, start, base)
        shifted = value - base
        if may_end:
            elements = [shifted[i] for i in range(size)]
            for i in range(ends if isinstance(ends, int) else 1, size):
                elements[i] = select(in_row[i], elements[i], Float32(0.0))
            shifted = make_vector(elements, value.shape, Float32)
        total = thread_reduce(shifted, ADD)
        square = thread_reduce(Product(shifted, shifted), ADD)
        weight, number = reciprocal(Float32(k + 1)), size
        if may_end:
            part = ends if isinstance(ends, int) else Float32(ends)
            weight = select(in_row[-1], weight, part * reciprocal(Float32(k * size + ends)))
            number = select(in_row[-1], Float32(size), Float32(ends))
        keep = 1.0 - weight
        merged = number * keep
        if const_expr(in_row is not None):
            some = total, square, weight, merged
            total, square, weight, merged = (select(in_row[0], v, Float32(0.0)) for v in some)
            keep = 1.0 - weight
        delta = total * (1.0 / size)
        if may_end:
            delta = select(in_row[-1], delta, quotient(total, ends))
        within = cute.math.fma(-total, delta, square)
        within = select(square < INF, within, square)  # inf - inf would be NaN
        gap = delta - rest
        mean = cute.math.fma(rest, keep, delta * weight)  # an infinite rest stays what it is
        moved = base + mean
        moved = select(abs(moved) < INF, moved, base)
        squares = squares + cute.math.fma(merged * gap, gap, within)
        return self._with(moved, (base - moved) + mean, squares, outer)

    def fold(self) -> WelfordTriple:
        """With the squares added to the outer ones."""
        base, rest, squares, outer = self.values
        return self._with(base, rest, Float32(0.0), outer + squares)

    @property
    def first(self) -> Partial:
        """The mean."""
        moments = self.of_thread
        return Partial(MEAN, self.share.row_mean.of_mean(moments.mean, moments.total, self.number))

    def about(self, reference: Float32) -> Partial:
        """The sum of (x - reference)**2."""
        return Partial(ADD, self.of_thread.about(reference))

    @property
    def of_thread(self) -> Moments:
        """What the thread has of the row."""
        base, rest, _, squares = self.fold().values
        number = self.number if isinstance(self.number, int) else Float32(self.number)
        return Moments(number, base, rest, squares)

    @property
    def number(self) -> int | Int32:
        """How many elements of the row the thread has."""
        return self.share.elements_in_row

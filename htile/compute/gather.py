"""Reductions that go on from chunk to chunk: what a loop over a row's chunks carries in registers.

`take(chunk, value)` adds the values of a chunk, a context; `op` and `vector` are what is reduced
over the row at the end. `Gathered` has one of them for each share of a row that a CTA works on, as
if each were a CTA's of its own, so that every sum has the same order. A sum over many chunks goes
in two levels, `fold` from the inner to the outer: terms that are tiny beside the whole sum of a
thread would vanish in it. Nothing is compensated by subtraction, which makes NaN of infinite sums.

`SoftmaxPair` and `WelfordTriple` gather two reductions of which the second needs the first: what
the second one sums is relative to a reference of the thread's own, and `about` moves it.
"""

import copy

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, const_expr

from htile.compute import math
from htile.compute.moments import Moments
from htile.compute.reduce import (
    ADD,
    MAX,
    combine,
    exp_diff,
    identity,
    make_vector,
    select,
    thread_reduce,
)

INF = float("inf")


class Gathered:
    """The same for each share of a row: a `_Part`'s interface, over `parts`."""

    def __init__(self, parts):
        self.parts = tuple(parts)

    @property
    def op(self):
        """How vectors are reduced."""
        return self.parts[0].op

    @property
    def is_mask(self):
        """Whether the result is a Boolean."""
        return self.parts[0].is_mask

    @property
    def keeps_padding(self):
        """Whether `take` gets padded lanes as they are."""
        return self.parts[0].keeps_padding

    @property
    def first(self):
        """Of two reductions the first."""
        return Gathered(part.first for part in self.parts)

    def take(self, chunk, value):
        """With a chunk's values, in the part of its share."""
        return self._with(chunk.share, self.parts[chunk.share].take(chunk, value))

    def fold(self, share=0):
        """The inner level of a share added to the outer: in fewer registers, of one structure."""
        return self._with(share, self.parts[share].fold())

    def _with(self, share, part):
        return Gathered([*self.parts[:share], part, *self.parts[share + 1 :]])

    def about(self, reference):
        """Of two reductions the second, relative to the row's reference."""
        return Gathered(part.about(reference) for part in self.parts)

    def __extract_mlir_values__(self):
        return [word for part in self.parts for word in part.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, words):
        left = iter(words)
        each = [(part, len(part.__extract_mlir_values__())) for part in self.parts]
        return Gathered(
            part.__new_from_mlir_values__([next(left) for _ in range(n)]) for part, n in each
        )


class _Part:
    """`values`, vectors and scalars, that dynamic loops carry.

    keeps_padding: `take` gets padded lanes as they are, not as the identity of `op`.
    """

    op, is_mask, keeps_padding = ADD, False, False

    def _with(self, *values):
        new = copy.copy(self)
        new.values = values
        return new

    def __extract_mlir_values__(self):
        return [word for value in self.values for word in value.__extract_mlir_values__()]

    def __new_from_mlir_values__(self, words):
        pairs = zip(self.values, words, strict=True)
        return self._with(*(value.__new_from_mlir_values__([word]) for value, word in pairs))


class Partial(_Part):
    """One reduction, gathered element by element: a vector, or a scalar that is complete."""

    def __init__(self, op, vector, is_mask=False):
        self.op, self.values, self.is_mask = op, (vector,), is_mask

    @classmethod
    def start(cls, op, dtype, vec_size):
        """`op`'s identity, in a vector of `dtype`; a Boolean one is counted in Int32."""
        number = Int32 if dtype is Boolean else dtype
        return cls(op, cute.full((vec_size,), identity(op, number), number), dtype is Boolean)

    @property
    def vector(self):
        """What is reduced over the row."""
        return self.values[0]

    def take(self, chunk, value):
        """With a chunk's values."""
        return self._with(combine(self.op, self.values[0], value))

    def fold(self):
        """All in the first element, the identity in the others."""
        (vector,) = self.values
        size = cute.size(vector.shape)
        rest = [vector.dtype(identity(self.op, vector.dtype))] * (size - 1)
        total = thread_reduce(vector, self.op)
        return self._with(make_vector([total, *rest], vector.shape, vector.dtype))


class TwoLevelSum(_Part):
    """A Float32 sum of many chunks: (inner vector, outer scalar)."""

    def __init__(self, vec_size):
        self.values = cute.full((vec_size,), 0.0, Float32), Float32(0.0)

    @property
    def vector(self):
        """What is reduced over the row."""
        return self.fold().values[1]

    def take(self, chunk, value):
        """With a chunk's values."""
        inner, outer = self.values
        return self._with(combine(ADD, inner, value), outer)

    def fold(self):
        """The inner sums added to the outer."""
        inner, outer = self.values
        return self._with(cute.full_like(inner, 0.0), outer + thread_reduce(inner, ADD))


class SoftmaxPair(_Part):
    """The maximum of x, and the sum of exp(x - reference) for the row's.

    Values: the thread's maximum, a vector of sums relative to it, and their outer level. One exp a
    chunk moves them to a new maximum; a maximum of -inf counts as 0, as in `exp_diff`, NaN and
    +inf make NaN of the sums.
    """

    op = MAX

    def __init__(self, vec_size):
        self.values = Float32(-INF), cute.full((vec_size,), 0.0, Float32), Float32(0.0)

    def take(self, chunk, value):
        """With a chunk's x, padded lanes -inf."""
        peak, sums, total = self.values
        new = combine(MAX, peak, thread_reduce(value, MAX))
        scale, exp = exp_diff(peak, new), exp_diff(value, new)
        sums = cute.math.fma(sums, cute.full_like(sums, scale), exp)
        return self._with(new, sums, total * scale)

    def fold(self):
        """The inner sums added to the outer."""
        peak, sums, total = self.values
        return self._with(peak, cute.full_like(sums, 0.0), total + thread_reduce(sums, ADD))

    @property
    def of_thread(self):
        """(maximum, sum of exponentials relative to it)"""
        peak, _, total = self.fold().values
        return peak, total

    @property
    def first(self):
        """The maximum."""
        return Partial(MAX, self.values[0])

    def about(self, reference):
        """The sum of exp(x - reference): the row's maximum, or 0 for an infinite one.

        As the sum itself gives it: +inf for an x of +inf and a reference of 0, where everything
        else that is finite does not count.
        """
        peak, _, total = self.fold().values
        total = select(peak == INF, Float32(INF), total)
        gap = cute.arch.fmin(peak - reference, Float32(0.0), nan=True)
        return Partial(ADD, total * math.exp_bounded(gap))


class WelfordTriple(_Part):
    """The sum of x, and the sum of (x - reference)**2 for the row's.

    Values: a number near the mean of what the thread has seen, that mean less the number (so that
    no digit is lost in a mean far from 0), the sum of squares about the mean, and its outer level.
    Every chunk is summed relative to the number, its squares too, and the number moves to the new
    mean: what is subtracted of the squares is no larger than what is left, but in the first chunk,
    which begins with its first element. Chunks of padding, which are a thread's last, are dropped.
    Chunks of static numbers may be merged in pairs, which is half of the merging.
    """

    keeps_padding = True

    def __init__(self, share, in_pairs=False):
        """share: its first chunk. in_pairs: two at a time, of an even count, without predicates."""
        self.share, self.in_pairs, self.waiting = share, in_pairs, None
        self.values = (Float32(0.0),) * 4

    def take(self, chunk, value):
        """With a chunk's x."""
        if not self.in_pairs:
            return self._merged(chunk.k, chunk.in_row, value)
        if self.waiting is None:
            new = copy.copy(self)
            new.waiting = value
            return new
        size = cute.size(value.shape)
        both = [half[i] for half in (self.waiting, value) for i in range(size)]
        new = self._merged(chunk.k // 2, None, make_vector(both, (2 * size,), Float32))
        new.waiting = None
        return new

    def _merged(self, k, in_row, value):
        """With the k-th vector."""
        base, rest, squares, outer = self.values
        size = cute.size(value.shape)
        start = value[0]
        starts = (Int32(k) == 0) & (math.abs(start) < INF)
        base = select(starts, start, base)
        shifted = value - base
        total = thread_reduce(shifted, ADD)
        square = thread_reduce(math.Product(shifted, shifted), ADD)
        weight = math.reciprocal(Float32(k + 1))
        keep = 1.0 - weight
        merged = size * keep
        if const_expr(in_row is not None):
            some = total, square, weight, merged
            total, square, weight, merged = (select(in_row, v, Float32(0.0)) for v in some)
            keep = 1.0 - weight
        delta = total * (1.0 / size)
        within = cute.math.fma(-total, delta, square)
        within = select(square < INF, within, square)  # not inf - inf
        gap = delta - rest
        mean = cute.math.fma(rest, keep, delta * weight)  # an infinite rest stays what it is
        moved = base + mean
        moved = select(math.abs(moved) < INF, moved, base)
        squares = squares + cute.math.fma(merged * gap, gap, within)
        return self._with(moved, (base - moved) + mean, squares, outer)

    def fold(self):
        """The squares added to the outer ones."""
        base, rest, squares, outer = self.values
        return self._with(base, rest, Float32(0.0), outer + squares)

    @property
    def first(self):
        """The sum."""
        return Partial(ADD, self.of_thread.total)

    def about(self, reference):
        """The sum of (x - reference)**2."""
        return Partial(ADD, self.of_thread.about(reference))

    @property
    def of_thread(self):
        """What the thread has of the row, as `Moments`."""
        base, rest, _, squares = self.fold().values
        return Moments(self.share.chunks_in_row * self.share.vec_size, base, rest, squares)

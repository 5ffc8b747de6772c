"""The mean of a row. The mean of equal elements is exactly that element.

A sum divided by N does not give that. A sum of N times c rounds on its way, and even fl(N * c) / N
need not round to c. A row of 70001 times 123.456 then differs from its mean by an ulp, 7.6e-6, and
layernorm makes 0.0024 of that where 0 is right. So a mean is not made of the sum of x, but of a
base and of the sum of (x - base):

- The lanes of a warp take the same base: of the means of their first vectors the smallest in
  magnitude. Equal elements differ from it by exactly 0, so the mean of the warp is the base plus 0.
  An outlier is no base where another lane has none, so no digits are lost to it.
- The warps exchange their means, one number each as for a sum. The mean of the row is the smallest
  of them in magnitude, plus the sum of what the others differ from it, each times the share of the
  row's elements that its warp has. Of equal elements that is again a number plus 0.

Nothing of this is needed where all threads have equally many vectors, and their number is a power
of two. Every sum of equal elements is exact there, and so is its product with 1 / N: a mean costs
what a sum does. Elsewhere it needs no more exchanges than a sum, but some instructions of each
thread: 6 to find the base, one for each run of vectors (see `_runs`), and about 25 where warps have
different numbers of elements, which have to be counted. It saves a select for each padded element,
because a padded vector is left out as a whole.

The promise holds where the sum of the row is finite, as a sum divided by N needs it too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from htile.compute.division import reciprocal
from htile.compute.exchange import lanes_of_peers, peer_places, peers
from htile.compute.math import abs
from htile.compute.operands import Vector, select
from htile.compute.products import Product
from htile.compute.reduce import ADD, add_up, combine_lanes, thread_reduce, warp_reduce


class Statistic(Enum):
    """What rows are reduced to beside the ADD, MUL, MAX and MIN of `cute.ReductionOp`."""

    MEAN = "mean"


MEAN = Statistic.MEAN


@dataclass(frozen=True)
class Spread:
    """How the vectors of a row lie over its shares and threads.

    vectors: how many vectors the row has. vec_size: how many elements a vector has.
    threads: how many threads work on a share. chunks: how many vectors of a share a thread has,
    padding included. shares: how many shares the row has.
    """

    vectors: int | Int32
    vec_size: int
    threads: int
    chunks: int
    shares: int

    @property
    def is_even(self) -> bool:
        """Whether every thread has as many vectors, and none is padding."""
        every = self.threads * self.chunks * self.shares
        return isinstance(self.vectors, int) and self.vectors == every

    @property
    def is_exact(self) -> bool:
        """Whether a sum of equal elements does not round, nor its product with 1 / N."""
        return self.is_even and self.vectors & (self.vectors - 1) == 0

    @property
    def lanes(self) -> int:
        """How many lanes of a warp work on a share."""
        return min(self.threads, 32)

    @property
    def whole_chunks(self) -> int:
        """How many chunks, from the first on, are in the row for all threads of all shares."""
        if not isinstance(self.vectors, int):
            return 0
        last = self.vectors - (self.shares - 1) * self.threads * self.chunks
        return _clamp(last // self.threads, 0, self.chunks)

    def of_warp(self, warp: int | Int32, share: int | Int32) -> int | Int32:
        """How many elements of the row a warp of a share has."""
        left = self.vectors
        if self.shares > 1:
            width = self.threads * self.chunks
            left = _clamp(left - share * width, 0, width)
        rest = _clamp(left % self.threads - warp * 32, 0, self.lanes)
        return (left // self.threads * self.lanes + rest) * self.vec_size


def _clamp(x: int | Int32, low: int, high: int) -> int | Int32:
    """The nearest number to x from `low` to `high`."""
    if isinstance(x, int):
        return min(max(x, low), high)
    return cutlass.min(cutlass.max(x, low), high)


@dataclass(frozen=True)
class Deviation:
    """What a thread has of a mean: the sum of (x - base) over its elements of a share.

    All lanes of the warp that work on the share have the same base.
    """

    base: Float32
    total: Float32
    share: int | Int32

    @property
    def dtype(self) -> type[Float32]:
        """The dtype of what is reduced."""
        return self.total.dtype


class RowMean:
    """The mean as an op of `row_reduce`, for rows that are spread in a certain way.

    It reduces a `Deviation` of each thread. The row's mean is in every thread afterwards.
    """

    def __init__(self, spread: Spread):
        self.spread = spread

    def of_thread(
        self, x: Vector | Product, in_row: Sequence[Boolean] | None, share: int | Int32
    ) -> Deviation:
        """What a thread has whose vectors x are all there.

        x: of ((vec_size, 1), 1, chunks), padded elements as they are.
        in_row: whether each vector is in the row; None if all are.
        """
        spread = self.spread
        vectors = x.reshape((spread.vec_size, spread.chunks))
        totals = [thread_reduce(_vector(vectors, k), ADD) for k in range(spread.chunks)]
        whole = spread.chunks if in_row is None else spread.whole_chunks
        base = self.common(totals[0] * (1.0 / spread.vec_size), None if whole else in_row[0])
        terms, first = [], 0
        for size in _runs(whole, spread.chunks):
            total = add_up(totals[first : first + size])
            term = cute.math.fma(Float32(-size * spread.vec_size), base, total)
            if first >= whole:
                term = select(in_row[first], term, Float32(0.0))
            terms.append(term)
            first += size
        return Deviation(base, add_up(terms), share)

    def moved(self, mean: Float32, number: int | Int32, share: int | Int32) -> Deviation:
        """What a thread has that knows the mean of its `number` elements."""
        is_known = isinstance(number, int)
        base = self.common(mean, None if is_known else number > 0)
        total = Float32(number) * (mean - base)
        if not is_known:
            total = select(number > 0, total, Float32(0.0))
        return Deviation(base, total, share)

    def common(self, mean: Float32, counts: Boolean | None) -> Float32:
        """The base of all lanes that work on a share: the smallest mean, or 0.

        counts: whether this lane has elements; None if all have.

        Infinite means and NaN are no base, nor are those so large that deviations from them may
        overflow in sum.
        """
        spread = self.spread
        base = _smallest([_key(mean, counts)], spread.lanes)
        most = 2.0 ** (126 - (spread.chunks * spread.vec_size * 32).bit_length())
        return select(abs(base) < most, base, Float32(0.0))

    def of_warp(self, part: Deviation, lanes: int) -> Float32:
        """The mean of what `lanes` lanes have. Without any elements it is a finite number."""
        total = warp_reduce(part.total, ADD, lanes)
        warps_per_share = max(self.spread.threads // 32, 1)
        warp = 0 if warps_per_share == 1 else cute.arch.warp_idx() % warps_per_share
        count = self.spread.of_warp(warp, part.share)
        if self.spread.is_even:
            count = self.spread.chunks * self.spread.lanes * self.spread.vec_size
        return cute.math.fma(total, one_over(count), part.base)

    def of_row(self, slot: cute.Tensor, abreast: int) -> Float32:
        """The mean of the row, of the warps' means in a slot of the reduction buffer."""
        means, width = peers(slot, Float32, abreast), lanes_of_peers(slot)
        count = cute.size(slot.shape[1])
        if self.spread.is_even and count & (count - 1) == 0:
            return combine_lanes(means, ADD, width) * (1.0 / count)
        counts = [self.spread.of_warp(*place) for place in peer_places(slot)]
        return mean_about_smallest(
            means, counts, one_over(self.spread.vectors * self.spread.vec_size), width
        )


def mean_about_smallest(
    means: list[Float32], counts: list[Float32 | Int32], one_over_all: Float32, width: int
) -> Float32:
    """The mean of the row, of the means and counts of its warps.

    means, counts: those of the warps that this lane combines, of neighbouring `width` lanes all.
    one_over_all: 1 / N.
    """
    keys = [_key(mean, count > 0) for mean, count in zip(means, counts, strict=True)]
    base = _smallest(keys, 32)
    base = select(abs(base) < 2.0**126, base, Float32(0.0))
    terms = []
    for mean, count in zip(means, counts, strict=True):
        away = (mean - base) * (Float32(count) * one_over_all)
        terms.append(select(count > 0, away, Float32(0.0)))
    return base + combine_lanes(terms, ADD, width)


def _key(x: Float32, counts: Boolean | None) -> Uint32:
    """A number that orders x by magnitude: its bits, the sign last. The largest if x is not to."""
    bits = x.bitcast(Uint32)
    key = (bits << 1) | (bits >> 31)
    return key if counts is None else Uint32(cutlass.select_(counts, key, Uint32(0xFFFFFFFF)))


def _smallest(keys: list[Uint32], lanes: int) -> Float32:
    """The x whose key is the smallest of each group of `lanes` lanes. It is NaN if none counts."""
    key = keys[0]
    for other in keys[1:]:
        key = cutlass.min(key, other)
    if lanes == 32:
        key = cute.arch.warp_redux_sync(key, "umin")
    else:  # with groups of lanes redux.sync takes a hundred instructions
        key = cute.arch.warp_reduction(key, cutlass.min, threads_in_group=lanes)
    return ((key >> 1) | (key << 31)).bitcast(Float32)


def _vector(vectors: Vector | Product, k: int) -> Vector | Product:
    """The k-th of the vectors (vec_size, chunks)."""
    if isinstance(vectors, Product):
        return vectors.map(lambda factor: factor[None, k])
    return vectors[None, k]


def _runs(whole: int, chunks: int) -> list[int]:
    """How many chunks are added up before the base is subtracted of them.

    A sum of equal numbers is exact if their number is a power of two. So the whole chunks make runs
    of such lengths. Each of the others, which may be padding, is a run of its own.
    """
    powers = [1 << k for k in reversed(range(whole.bit_length())) if whole >> k & 1]
    return powers + [1] * (chunks - whole)


def one_over(count: int | Int32) -> Float32:
    """1 / count, and 1 of nothing."""
    if isinstance(count, int):
        return Float32(1.0 / max(count, 1))
    return reciprocal(Float32(cutlass.max(count, 1)))

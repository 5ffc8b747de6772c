"""The mean of a row. The mean of equal elements is exactly that element.

A sum divided by N does not give that. A sum of N times c rounds on its way, and even fl(N * c) / N
need not round to c. A row of 70001 times 123.456 then differs from its mean by an ulp, 7.6e-6, and
layernorm makes 0.0024 of that where 0 is right.

So a mean is made of the means of parts, by two rules. The mean of parts that all have the same mean
is that mean. The mean of others is the sum of their means, each times its share of the elements;
where all shares are 1 / 2**k, that sum is exact for equal means too, and needs no comparison. The
smallest parts are runs of 2**k elements, of which a sum of equal elements is exact. Their means
make that of a thread, those of lanes that of a warp, and those of warps that of the row. No part is
subtracted from another, so nothing is lost to an outlier, and infinities give what a sum gives.

It needs no more exchanges than a sum: each warp sends one number. Where the number of elements is a
power of two and none is padding, a mean costs what a sum does. Where there is no padding but 3, 5,
6, ... vectors a thread, it costs a comparison for each run of them. With padding it costs some 30
instructions of a thread, most of which count the elements of its warp and of the others; it saves a
select for each element, because a padded vector is left out as a whole.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from htile.compute.division import reciprocal
from htile.compute.exchange import lanes_of_peers, peer_places, peers
from htile.compute.math import abs as absolute
from htile.compute.operands import Vector, select
from htile.compute.products import Product
from htile.compute.reduce import ADD, add_up, combine_lanes, thread_reduce, warp_reduce
from htile.copy.layout import RowLayout


class Statistic(Enum):
    """What rows are reduced to beside the ADD, MUL, MAX and MIN of `cute.ReductionOp`."""

    MEAN = "mean"


MEAN = Statistic.MEAN


@dataclass(frozen=True)
class Run:
    """Neighbouring vectors of a thread: their sum, and how many elements they have, 2**k.

    in_row: whether they are in the row. The sum is 0 if they are not. None: they are.
    """

    total: Float32
    size: int
    in_row: Boolean | None = None

    def agrees(self, mean: Float32) -> Boolean:
        """Whether their mean is `mean`, or they are not in the row."""
        expected = mean * float(self.size)
        if self.in_row is not None:
            expected = select(self.in_row, expected, Float32(0.0))
        return self.total == expected


@dataclass(frozen=True)
class ThreadPart:
    """What a thread has of a share whose threads have different numbers of elements.

    total: the sum of its elements. first: the mean that the first lane of its warp has.
    agrees: whether all that it has has that mean. number: how many elements its warp has.
    """

    total: Float32
    first: Float32
    agrees: Boolean
    number: int | Int32

    @property
    def dtype(self) -> type[Float32]:
        """The dtype of what is reduced."""
        return self.total.dtype


class RowMean:
    """How the mean of a row is reduced.

    Where the row is even, the threads' sums or means are reduced by ADD, and `scaled` makes the
    mean of the result. Elsewhere this is the op of `row_reduce`, of a `ThreadPart` of each thread.
    """

    def __init__(self, layout: RowLayout):
        self.layout = layout

    @property
    def op(self) -> cute.ReductionOp | RowMean:
        """What `row_reduce` reduces by."""
        return ADD if self.layout.is_even else self

    def scaled(self, result: Float32) -> Float32:
        """The mean, of what `row_reduce` gives."""
        layout = self.layout
        if not layout.is_even:
            return result
        elements = layout.chunks * layout.vec_size if layout.is_exact else 1
        return result * (1.0 / (elements * layout.threads * layout.shares))

    def of_vectors(
        self, x: Vector | Product, in_row: Sequence[Boolean] | None, share: int | Int32
    ) -> Vector | Product | Float32 | ThreadPart:
        """What is reduced of a thread that has all its vectors at once.

        x: the vectors, ((vec_size, 1), 1, chunks), padded elements as they are.
        in_row: whether each vector is in the row; None if all are.
        share: which share of the row they are of.
        """
        layout = self.layout
        if layout.is_exact:
            return x
        runs = self._runs(x.reshape((layout.vec_size, layout.chunks)), in_row)
        total = add_up([run.total for run in runs])
        own = runs[0].total * (1.0 / runs[0].size)
        others_agree = [run.agrees(own) for run in runs[1:]]
        if layout.is_even:
            mean = quotient(total, layout.chunks * layout.vec_size)
            return select(_all(others_agree), own, mean)
        first, warps = self._of_first_lane(own), max(layout.threads // 32, 1)
        warp = 0 if warps == 1 else cute.arch.warp_idx() % warps
        if runs[0].in_row is not None:  # a thread without elements agrees
            own = select(runs[0].in_row, own, first)
        agrees = _all([own == first, *others_agree])
        return ThreadPart(total, first, agrees, layout.of_warp(warp, share))

    def of_mean(
        self, mean: Float32, total: Float32, number: int | Int32
    ) -> Float32 | ThreadPart:
        """What is reduced of a thread that has a mean, a sum and a number of elements."""
        if self.layout.is_even:
            return total if self.layout.is_exact else mean
        first, number = self._of_first_lane(mean), Int32(number)
        agrees = (mean == first) | (number == 0)
        return ThreadPart(total, first, agrees, cute.arch.warp_redux_sync(number, "add"))

    def of_warp(self, part: ThreadPart, lanes: int) -> Float32:
        """The mean of what `lanes` lanes have, and any number if they have nothing."""
        mean = quotient(warp_reduce(part.total, ADD, lanes), part.number)
        return select(_all_lanes(part.agrees, lanes), part.first, mean)

    def of_row(self, slot: cute.Tensor, abreast: int) -> Float32:
        """The mean of the row, of the warps' means in a slot of the reduction buffer."""
        numbers = [self.layout.of_warp(*place) for place in peer_places(slot)]
        one_over_all = one_over(self.layout.vectors * self.layout.vec_size)
        means, width = peers(slot, Float32, abreast), lanes_of_peers(slot)
        any_empty = self.layout.whole_chunks == 0
        return mean_of_warps(means, numbers, one_over_all, width, any_empty)

    def _runs(self, vectors: Vector | Product, in_row: Sequence[Boolean] | None) -> list[Run]:
        """The runs of a thread's vectors (vec_size, chunks).

        Those that are in the row for all threads make runs of as many vectors as powers of two,
        the longest first. Each of the others is a run of its own.
        """
        chunks, vec_size = self.layout.chunks, self.layout.vec_size
        sums = [thread_reduce(_vector(vectors, k), ADD) for k in range(chunks)]
        whole = chunks if in_row is None else self.layout.whole_chunks
        runs, first = [], 0
        for size in (1 << k for k in reversed(range(whole.bit_length())) if whole >> k & 1):
            runs.append(Run(add_up(sums[first : first + size]), size * vec_size))
            first += size
        for k in range(whole, chunks):
            total = select(in_row[k], sums[k], Float32(0.0))
            runs.append(Run(total, vec_size, in_row[k]))
        return runs

    def _of_first_lane(self, x: Float32) -> Float32:
        """The x of the first of the lanes that work on the share."""
        lanes = self.layout.lanes
        lane = 0 if lanes == 32 else cute.arch.lane_idx() // lanes * lanes
        return cute.arch.shuffle_sync(x, lane)


def mean_of_warps(
    means: list[Float32],
    numbers: list[Float32 | Int32 | int],
    one_over_all: Float32,
    width: int,
    any_empty: bool = True,
) -> Float32:
    """The mean of a row, of the means of its warps and the numbers of their elements.

    means, numbers: those that this lane combines, of which neighbouring `width` lanes have all. The
        first lane has the first warp, which is not empty.
    one_over_all: 1 / N.
    any_empty: whether a warp may be empty whose number is not a Python number.
    """
    first = cute.arch.shuffle_sync(means[0], 0)
    agrees, terms = [], []
    for mean, number in zip(means, numbers, strict=True):
        agree, term = mean == first, mean * (Float32(number) * one_over_all)
        if any_empty and not isinstance(number, int):
            agree, term = agree | (number == 0), select(number > 0, term, Float32(0.0))
        agrees.append(agree)
        terms.append(term)
    total = combine_lanes(terms, ADD, width)
    return select(_all_lanes(_all(agrees), 32), first, total)


def _all(conditions: Iterable[Boolean]) -> Boolean:
    """Whether all conditions hold."""
    return functools.reduce(operator.and_, conditions)


def _all_lanes(condition: Boolean, lanes: int) -> Boolean:
    """Whether a condition holds in all lanes of each group of `lanes`."""
    if lanes == 32:
        return cute.arch.vote_all_sync(condition)
    every = (1 << lanes) - 1
    shift = cute.arch.lane_idx() // lanes * lanes
    return (cute.arch.vote_ballot_sync(condition) >> shift) & every == every


def _vector(vectors: Vector | Product, k: int) -> Vector | Product:
    """The k-th of the vectors (vec_size, chunks)."""
    if isinstance(vectors, Product):
        return vectors.map(lambda factor: factor[None, k])
    return vectors[None, k]


def quotient(total: Float32, count: int | Int32, error: Float32 | float = 0.0) -> Float32:
    """(total + error) / count, rounded once: the remainder corrects the rounded quotient."""
    inverse = one_over(count)
    mean = total * inverse
    rest = cute.math.fma(-Float32(count), mean, total) + error
    return select(absolute(rest) < inf, cute.math.fma(rest, inverse, mean), mean)


def one_over(count: int | Int32) -> Float32:
    """1 / count, rounded."""
    return Float32(1.0 / count) if isinstance(count, int) else reciprocal(Float32(count))

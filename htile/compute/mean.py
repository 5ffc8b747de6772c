"""The mean of a row. If all elements of the row are equal, it is exactly that element.

A sum divided by N does not promise that. The sum of N elements that equal c rounds on its way, and
even N * c, rounded once and divided by N, need not round to c. If 70001 elements are 123.456, the
result differs from them by an ulp, 7.6e-6. A layer norm then gives 0.0024 where 0 is right.

So the mean of a row is made from the means of its parts, by two rules:

- If all parts have the same mean, the result is that mean.
- Otherwise it is the sum of their means, each times the fraction of the elements that the part has.

The first rule takes a comparison. It is not needed where each part has 1 / 2**k of the elements,
because the sum of equal means is then exact anyway.

The smallest part is a run: 2**k elements of a thread. A sum of so many equal elements is exact. The
means of its runs make the mean of a thread, the means of the lanes make that of a warp, and the
means of the warps make that of the row. No part is subtracted from another, so an outlier takes no
digits from the others, and infinities give what a sum gives.

A mean needs no more exchanges than a sum, because each warp sends one number. It costs this:

- Where N is a power of two and nothing is padded, it costs what a sum costs.
- Where nothing is padded, but a thread has 3, 5, 6, ... vectors, it costs a comparison for each run
  beyond the first.
- Where vectors are padded, it costs some 30 instructions of a thread. Most of them count the
  elements of warps. It saves a select for each element, because a padded vector is left out whole.
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
from htile.compute.operands import Vector, make_vector, select
from htile.compute.products import Product
from htile.compute.reduce import ADD, add_up, combine_lanes, thread_reduce, warp_reduce
from htile.copy.layout import RowLayout


class Statistic(Enum):
    """The reductions that `cute.ReductionOp` (ADD, MUL, MAX, MIN) does not have."""

    MEAN = "mean"


MEAN = Statistic.MEAN


@dataclass(frozen=True)
class Run:
    """Some vectors of a thread that are summed together.

    total: the sum of their elements; 0 if they are padding.
    size: how many elements they have.
    in_row: whether they are in the row; they are padding if not. None means that they are.
    """

    total: Float32
    size: int
    in_row: Boolean | None = None

    def agrees(self, mean: Float32) -> Boolean:
        """Whether the mean of the run is `mean`. A run of padding agrees with every mean."""
        expected = mean * float(self.size)
        if self.in_row is not None:
            expected = select(self.in_row, expected, Float32(0.0))
        return self.total == expected


@dataclass(frozen=True)
class ThreadPart:
    """What a thread has of a share of the row whose threads have different numbers of elements.

    total: the sum of the elements of the thread.
    first: the mean of the elements of the first lane of its warp that works on the share.
    agrees: whether all runs of the thread have the mean `first`, so that the first rule may apply.
    number: how many elements all lanes of its warp have together.
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

    If the row is even (`RowLayout.is_even`: all threads have equally many elements, and there are
    2**k threads), the sums or the means of the threads are added, and `scaled` makes the mean of
    the result. Otherwise each thread has a `ThreadPart`, and `row_reduce` takes this object as its
    op, which combines them.
    """

    def __init__(self, layout: RowLayout):
        self.layout = layout

    @property
    def op(self) -> cute.ReductionOp | RowMean:
        """The op that `row_reduce` takes."""
        return ADD if self.layout.is_even else self

    def scaled(self, result: Float32) -> Float32:
        """The mean of the row, from what `row_reduce` gives."""
        layout = self.layout
        if not layout.is_even:
            return result
        elements = layout.chunks * layout.vec_size if layout.is_exact else 1
        return result * (1.0 / (elements * layout.threads * layout.shares))

    def of_vectors(
        self,
        x: Vector | Product,
        in_row: Sequence[tuple[Boolean, ...]] | None,
        share: int | Int32,
    ) -> Vector | Product | Float32 | ThreadPart:
        """What a thread gives to `row_reduce`, if it has all its vectors at once.

        x: the vectors, of shape ((vec_size, 1), 1, chunks). Padded elements may have any value.
        in_row: for each vector, whether its first element is in the row, and whether its last is,
            or whether each is (`RowLayout.any_end`); None if all are.
        share: which share of the row they belong to.
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
        if runs[0].in_row is not None:  # a thread that has padding only agrees with the others
            own = select(runs[0].in_row, own, first)
        agrees = _all([own == first, *others_agree])
        return ThreadPart(total, first, agrees, layout.of_warp(warp, share))

    def of_mean(
        self, mean: Float32, total: Float32, number: int | Int32
    ) -> Float32 | ThreadPart:
        """What a thread gives to `row_reduce`, if it has a mean, a sum and a number of elements."""
        if self.layout.is_even:
            return total if self.layout.is_exact else mean
        first, number = self._of_first_lane(mean), Int32(number)
        agrees = (mean == first) | (number == 0)
        return ThreadPart(total, first, agrees, cute.arch.warp_redux_sync(number, "add"))

    def of_warp(self, part: ThreadPart, lanes: int) -> Float32:
        """The mean of the elements of `lanes` lanes. If they have none, it is any number."""
        mean = quotient(warp_reduce(part.total, ADD, lanes), part.number)
        return select(_all_lanes(part.agrees, lanes), part.first, mean)

    def of_row(self, slot: cute.Tensor, abreast: int) -> Float32:
        """The mean of the row, from the means that its warps left in a slot of the buffer."""
        numbers, any_empty = [], self.layout.whole_chunks == 0
        for place, is_there in peer_places(slot):
            number = self.layout.of_warp(*place)
            if is_there is not None:
                number, any_empty = select(is_there, Int32(number), 0), True
            numbers.append(number)
        one_over_all = one_over(self.layout.elements)
        means, width = peers(slot, Float32, abreast, 0.0), lanes_of_peers(slot)
        return mean_of_warps(means, numbers, one_over_all, width, any_empty)

    def _runs(
        self, vectors: Vector | Product, in_row: Sequence[tuple[Boolean, ...]] | None
    ) -> list[Run]:
        """The runs of a thread's vectors (vec_size, chunks).

        Some vectors are in the row for all threads. They make runs of 2**k vectors, the longest
        first: 6 vectors make a run of 4 and one of 2. Each other vector is a run of its own, or
        some runs if the row may end inside it.
        """
        chunks, vec_size = self.layout.chunks, self.layout.vec_size
        whole = chunks if in_row is None else self.layout.whole_chunks
        sums = [thread_reduce(_vector(vectors, k), ADD) for k in range(whole)]
        runs, first = [], 0
        for size in (1 << k for k in reversed(range(whole.bit_length())) if whole >> k & 1):
            runs.append(Run(add_up(sums[first : first + size]), size * vec_size))
            first += size
        for k in range(whole, chunks):
            runs += self.runs_of_vector(_vector(vectors, k), k, in_row[k])
        return runs

    def runs_of_vector(
        self, x: Vector | Product, chunk: int | Int32, in_row: tuple[Boolean, ...]
    ) -> list[Run]:
        """The runs of one vector, which may be padding or have the end of the row in it."""
        runs = []
        for first, last in self.layout.exact_parts(chunk):
            inside = in_row[self.layout.place_of(last - 1)]
            total = thread_reduce(part_of(x, first, last), ADD)
            runs.append(Run(select(inside, total, Float32(0.0)), last - first, inside))
        return runs

    def _of_first_lane(self, x: Float32) -> Float32:
        """The value that x has in the first of the lanes that work on the share."""
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
    """The mean of a row, from the means of its warps and the numbers of their elements.

    means, numbers: those that this lane combines. The first lane has the first warp, which is not
        empty.
    one_over_all: 1 / N.
    width: how many neighbouring lanes have the means of all warps together.
    any_empty: whether a warp may have no elements where its number is not a Python int.
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


def part_of(x: Vector | Product, first: int, last: int) -> Vector | Product:
    """The elements of a vector from `first` on, up to `last`, which is not among them."""
    if isinstance(x, Product):
        return x.map(lambda factor: part_of(factor, first, last))
    if last - first == cute.size(x.shape):
        return x
    return make_vector([x[i] for i in range(first, last)], (last - first,), x.dtype)


def quotient(total: Float32, count: int | Int32, error: Float32 | float = 0.0) -> Float32:
    """(total + error) / count, rounded once: the remainder corrects the rounded quotient.

    error: what was lost when `total` was rounded.
    """
    inverse = one_over(count)
    mean = total * inverse
    rest = cute.math.fma(-Float32(count), mean, total) + error
    return select(absolute(rest) < inf, cute.math.fma(rest, inverse, mean), mean)


def one_over(count: int | Int32) -> Float32:
    """1 / count, rounded."""
    return Float32(1.0 / count) if isinstance(count, int) else reciprocal(Float32(count))

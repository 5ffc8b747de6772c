"""Means, and sums of squares about a mean, that each part of a row has of its own."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32

from htile.compute.division import reciprocal
from htile.compute.exchange import exchange_pairs
from htile.compute.math import abs
from htile.compute.mean import mean_of_warps
from htile.compute.operands import select
from htile.compute.reduce import ADD, combine_lanes, warp_reduce
from htile.utils import is_power_of_two

INF = float("inf")
NEAR = 2.0**-20  # relative: a few roundings of a mean of equal numbers
TINY = 2.0**-126  # absolute: below it such roundings are no longer relative
MOST = 3e38  # the largest difference between two means that is used: a mean of such is finite


class Moments:
    """The number and the mean of some elements, and the sum of squares about their mean.

    The mean is `base + rest`: a number near it, and what is left, so that no digit is lost in a
    mean far from 0. Of equal elements the base is the element, and the rest is 0.
    """

    def __init__(self, number: Float32 | int, base: Float32, rest: Float32, squares: Float32):
        """number: of the elements, a Python number where all threads have as many."""
        self.number, self.base, self.rest, self.squares = number, base, rest, squares

    @property
    def is_static(self) -> bool:
        """Whether the number of elements is known when the kernel is compiled."""
        return isinstance(self.number, int)

    @property
    def count(self) -> Float32:
        """The number of elements."""
        return Float32(self.number)

    @property
    def mean(self) -> Float32:
        """The mean of the elements, rounded."""
        return self.base + self.rest

    @property
    def total(self) -> Float32:
        """The sum of the elements. Of equal elements it is as exact as one product."""
        return cute.math.fma(self.count, self.base, self.count * self.rest)

    def about(self, reference: Float32) -> Float32:
        """The sum of (x - reference)**2."""
        gap = (self.base - reference) + self.rest
        moved = cute.math.fma(self.count, gap * gap, self.squares)
        return select(self.count > 0.0, moved, Float32(0.0))


def _of_warp(moments: Moments, lanes: int) -> Moments:
    """The moments of what `lanes` lanes have.

    T. F. Chan, G. H. Golub and R. J. LeVeque, Algorithms for computing the sample variance (1983),
    merge two sets of moments. Here all are merged at once, about one number: the mean of their
    means, so that little is subtracted of the squares. The first lane's mean is taken instead where
    it is as near, because equal elements differ from it by exactly 0.
    """
    part = Float32(1.0 / lanes)
    if moments.is_static:
        number = moments.number * lanes
        count = Float32(number)
    else:
        number = count = warp_reduce(moments.count, ADD, lanes)
        part = select(count > 0.0, moments.count * reciprocal(count), Float32(0.0))
    mean = warp_reduce(part * moments.base, ADD, lanes)
    mean = select(abs(mean) < INF, mean, Float32(0.0))
    lane = 0 if lanes == 32 else cute.arch.lane_idx() // lanes * lanes
    first = cute.arch.shuffle_sync(moments.base, lane)
    near = cute.math.fma(abs(mean), Float32(NEAR), Float32(TINY))
    base = select(abs(first - mean) <= near, first, mean)
    away = cute.arch.fmax(cute.arch.fmin(moments.base - base, Float32(MOST)), Float32(-MOST))
    gap = away + moments.rest
    rest = warp_reduce(part * gap, ADD, lanes)
    squares = cute.math.fma(moments.count * gap, gap, moments.squares)
    if not moments.is_static:
        squares = select(moments.count > 0.0, squares, Float32(0.0))
    squares = warp_reduce(squares, ADD, lanes)
    within = cute.math.fma(-(count * rest), rest, squares)
    within = select(squares < INF, within, squares)  # inf - inf would be NaN
    return Moments(number, base, rest, within)


class RowMoments:
    """The moments of all warps of a row, of which each lane has some."""

    def __init__(self, moments: list[Moments], width: int, count: int | Int32):
        """width: how many lanes have those of all warps. count: how many elements the row has."""
        self.moments, self.width, self.count = moments, width, count

    @property
    def mean(self) -> Float32:
        """The row's mean. Of equal elements it is the element.

        Warps with equally many elements count alike: as many equal means as a power of two have an
        exact sum. `mean_of_warps` combines others.
        """
        warps = len(self.moments) * self.width
        if warps == 1:
            return self.moments[0].mean
        if self.moments[0].is_static and is_power_of_two(warps):
            means = [each.mean for each in self.moments]
            return combine_lanes(means, ADD, self.width) * (1.0 / warps)
        means = [each.mean for each in self.moments]
        numbers = [each.number for each in self.moments]
        return mean_of_warps(means, numbers, reciprocal(Float32(self.count)), self.width)

    def about(self, reference: Float32) -> Float32:
        """The row's sum of (x - reference)**2."""
        return combine_lanes([each.about(reference) for each in self.moments], ADD, self.width)


def reduce_moments(
    moments: list[Moments],
    count: int | Int32,
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    abreast: int = 1,
) -> RowMoments:
    """The row's moments, with one exchange, of those of each thread.

    moments: one for each share of the row that the thread works on.
    count: how many elements the row has.

    The buffer is of Int64 and has two slots; it and the other arguments are as for `row_reduce`.
    """
    lanes = min(threads_per_row, 32)
    found = [_of_warp(each, lanes) for each in moments]
    if mbar_ptr is None and threads_per_row <= 32:
        return RowMoments(found, 1, count)
    means = tuple((own.base, own.rest) for own in found)
    squares_and_counts = tuple((own.squares, own.count) for own in found)
    (means, squares_and_counts), width = exchange_pairs(
        (means, squares_and_counts), reduction_buffer, mbar_ptr, phase, abreast, (0.0, 0.0)
    )
    every_lane_has_a_warp = is_power_of_two(threads_per_row)
    of_warp = found[0].number if found[0].is_static and every_lane_has_a_warp else None
    peers = [
        Moments(n if of_warp is None else of_warp, base, rest, squares)
        for (base, rest), (squares, n) in zip(means, squares_and_counts, strict=True)
    ]
    return RowMoments(peers, width, count)

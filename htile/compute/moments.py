"""Sums, and sums of squares about a mean, that each part of a row has of its own."""

import cutlass.cute as cute
from cutlass import Float32

from htile.compute.division import reciprocal
from htile.compute.exchange import exchange_pairs
from htile.compute.math import abs
from htile.compute.operands import select
from htile.compute.reduce import ADD, combine_lanes, warp_reduce

INF = float("inf")
NEAR = 2.0**-20  # a few roundings of a mean of equal numbers
MOST = 3e38  # what means differ by, so that a mean of what they do is finite


class Moments:
    """Number and mean of some elements, and the sum of squares about their mean.

    The mean is a number near it and the rest, so that no digit is lost in a mean far from 0.
    """

    def __init__(self, count, base, rest, squares):
        """count: a Float32, or a Python number."""
        self.is_static = isinstance(count, int)
        self.count, self.base, self.rest, self.squares = Float32(count), base, rest, squares

    @property
    def total(self):
        """The sum: of equal elements as exact as one product."""
        return cute.math.fma(self.count, self.base, self.count * self.rest)

    def about(self, reference):
        """The sum of (x - reference)**2."""
        gap = (self.base - reference) + self.rest
        moved = cute.math.fma(self.count, gap * gap, self.squares)
        return select(self.count > 0.0, moved, Float32(0.0))


def _of_warp(moments: Moments, lanes: int) -> Moments:
    """What `lanes` threads have.

    As T. F. Chan et al., Algorithms for computing the sample variance (1983), merge two, but all
    about one number: the mean of their means, so that little is subtracted of the squares, or the
    first's, of which equal elements differ by nothing, where that is as near.
    """
    count = moments.count * lanes if moments.is_static else warp_reduce(moments.count, ADD, lanes)
    part = Float32(1.0 / lanes)
    if not moments.is_static:
        part = select(count > 0.0, moments.count * reciprocal(count), Float32(0.0))
    mean = warp_reduce(part * moments.base, ADD, lanes)
    mean = select(abs(mean) < INF, mean, Float32(0.0))
    lane = 0 if lanes == 32 else cute.arch.lane_idx() // lanes * lanes
    first = cute.arch.shuffle_sync(moments.base, lane)
    base = select(abs(first - mean) <= abs(mean) * NEAR, first, mean)
    away = cute.arch.fmax(cute.arch.fmin(moments.base - base, Float32(MOST)), Float32(-MOST))
    gap = away + moments.rest
    rest = warp_reduce(part * gap, ADD, lanes)
    squares = cute.math.fma(moments.count * gap, gap, moments.squares)
    if not moments.is_static:
        squares = select(moments.count > 0.0, squares, Float32(0.0))
    squares = warp_reduce(squares, ADD, lanes)
    within = cute.math.fma(-(count * rest), rest, squares)
    return Moments(count, base, rest, select(squares < INF, within, squares))  # not inf - inf


class RowMoments:
    """The `Moments` of all warps of a row, some in each lane."""

    def __init__(self, moments, width: int):
        """width: how many lanes have those of all warps."""
        self.moments, self.width = moments, width

    def about(self, reference):
        """The row's sum of (x - reference)**2."""
        return combine_lanes([each.about(reference) for each in self.moments], ADD, self.width)


def reduce_moments(
    moments, threads_per_row: int, reduction_buffer=None, mbar_ptr=None, phase=0, abreast=1
):
    """The row's sum and its `RowMoments`, with one exchange, of each thread's `Moments`: one for
    each share of the row that it works on.

    The buffer is of Int64, two slots. abreast: see `row_reduce`.
    """
    lanes = min(threads_per_row, 32)
    found = [_of_warp(each, lanes) for each in moments]
    if mbar_ptr is None and threads_per_row <= 32:
        (own,) = found
        return own.total, RowMoments([own], 1)
    means = tuple((own.base, own.rest) for own in found)
    spreads = tuple((own.squares, own.count) for own in found)
    (means, spreads), width = exchange_pairs(
        (means, spreads), reduction_buffer, mbar_ptr, phase, abreast
    )
    count = moments[0].count * lanes if moments[0].is_static else None
    peers = [
        Moments(n if count is None else count, base, rest, squares)
        for (base, rest), (squares, n) in zip(means, spreads, strict=True)
    ]
    return combine_lanes([peer.total for peer in peers], ADD, width), RowMoments(peers, width)

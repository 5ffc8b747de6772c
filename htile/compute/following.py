"""Sums of products with exponentials below maxima, in one exchange with the maxima.

A thread computes with the maxima of its own elements. When those of its warp are known, it moves
its sums to them, and those of all warps are moved to the maxima of the row.
`htile/lower/following.py` says which sums can do so, and has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from htile.compute.accumulate import Accumulator, Accumulators
from htile.compute.exchange import exchange, lanes_of_peers, peers, slots_of
from htile.compute.moves import Move
from htile.compute.operands import Vector, select
from htile.compute.powers import exp_bounded
from htile.compute.products import Product
from htile.compute.reduce import ADD, MAX, combine_lanes, identity, thread_reduce, warp_reduce
from htile.utils import pack64, unpack64

INF = float("inf")
FARTHEST = -1024.0  # An exponential of less is 0, and so is a sum that has moved by more.


@dataclass(frozen=True)
class Found:
    """Maxima, and sums relative to them."""

    peaks: Sequence[Float32]
    sums: Sequence[Float32]

    def moved(self, falls: Sequence[Float32], moves: Sequence[Move]) -> list[Float32]:
        """The sums relative to other maxima. `falls` are the old ones less the new ones."""
        scales = [exp_bounded(fall) for fall in falls]
        moved = []
        for move, total in zip(moves, self.sums, strict=True):
            for place, slope in enumerate(move.slopes):
                if slope != 0.0:
                    fall = falls[place]
                    if place in move.powers:  # it may be infinite, and the sum becomes 0
                        fall = cute.arch.fmax(fall, Float32(FARTHEST), nan=True)
                    total = cute.math.fma(fall * slope, self.sums[move.base], total)
            for place in move.powers:
                total = total * scales[place]
            moved.append(total)
        return moved

    def of_warp(self, moves: Sequence[Move], lanes: int) -> Found:
        """What `lanes` threads beside each other have."""
        peaks = [warp_reduce(peak, MAX, lanes) for peak in self.peaks]
        falls = [
            select((own == -INF) | (own == peak), Float32(0.0), own - peak)
            for own, peak in zip(self.peaks, peaks, strict=True)
        ]
        return Found(peaks, [warp_reduce(each, ADD, lanes) for each in self.moved(falls, moves)])

    def about(self, references: Sequence[Float32], moves: Sequence[Move]) -> list[Float32]:
        """The sums relative to the maxima of the row, or to 0 where one is infinite.

        A maximum of -inf that is subtracted itself makes sums NaN, as in torch's softmax.
        """
        falls = []
        for peak, reference in zip(self.peaks, references, strict=True):
            nothing = select(reference == -INF, Float32(float("nan")), Float32(0.0))
            fall = cute.arch.fmin(peak - reference, Float32(0.0), nan=True)
            falls.append(select(peak == -INF, nothing, fall))
        return self.moved(falls, moves)


class FollowingSums(Accumulator):
    """Sums relative to maxima of the thread. Its values are the sums, and their outer levels.

    A thread that has no element, or -inf alone, has a maximum of -inf, and computes with 0 instead.
    """

    def __init__(self, peaks: Sequence[Float32], moves: Sequence[Move]):
        self.peaks, self.moves = tuple(peaks), tuple(moves)
        self.values = (Float32(0.0),) * (2 * len(self.moves))

    @property
    def levels(self) -> tuple[tuple[Float32, ...], tuple[Float32, ...]]:
        """The sums, and their outer levels."""
        return self.values[: len(self.moves)], self.values[len(self.moves) :]

    def added(self, terms: Sequence[Vector | Product]) -> FollowingSums:
        """With further terms, of which padded ones are 0."""
        inner, outer = self.levels
        inner = [total + thread_reduce(x, ADD) for total, x in zip(inner, terms, strict=True)]
        return self._with(*inner, *outer)

    def fold(self) -> FollowingSums:
        """With the inner sums added to the outer ones."""
        both = [outer + inner for inner, outer in zip(*self.levels, strict=True)]
        return self._with(*[Float32(0.0)] * len(both), *both)

    @property
    def found(self) -> Found:
        """What the thread has."""
        return Found(self.peaks, self.fold().levels[1])


class FollowingAccumulators(Accumulators):
    """Those of each share that a thread works on."""

    def added(self, share: int, terms: Sequence[Vector | Product]) -> FollowingAccumulators:
        """With further terms of a share."""
        return self._with(share, self.parts[share].added(terms))

    def of_thread(self, share: int | Int32, place: int) -> Float32:
        """The maximum at a place that the thread has of a share, or 0 for -inf."""
        peak = self.parts[share].peaks[place]
        return select(peak == -INF, Float32(0.0), peak)


class RowSums:
    """What all warps of a row have found, of which each lane has some."""

    def __init__(self, found: Sequence[Found], moves: Sequence[Move], width: int):
        """width: how many neighbouring lanes have what all warps have found."""
        self.found, self.moves, self.width = found, moves, width

    def maximum(self, place: int) -> Float32:
        """The row's maximum at a place."""
        return combine_lanes([each.peaks[place] for each in self.found], MAX, self.width)

    def sum(self, place: int, *references: Float32) -> Float32:
        """The row's sum at a place, about these maxima of the row."""
        moved = [each.about(references, self.moves)[place] for each in self.found]
        return combine_lanes(moved, ADD, self.width)


def reduce_following(
    sums: Sequence[FollowingSums],
    others: Sequence[Sequence[Vector | Numeric]],
    ops: Sequence[cute.ReductionOp],
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    abreast: int = 1,
) -> tuple[list[Numeric], RowSums]:
    """What the row has, with one exchange: of other reductions, and of maxima and their sums.

    sums: for each share of the row that the thread works on.
    others, ops: further reductions: of each a value for each share, and its op.

    The buffer is of Int64, and has a slot for two results. It and the other arguments are as for
    `row_reduce`.
    """
    lanes, moves = min(threads_per_row, 32), sums[0].moves
    values = [
        [warp_reduce(thread_reduce(each, op), op, lanes) for each in shares]
        for shares, op in zip(others, ops, strict=True)
    ]
    found = [each.found.of_warp(moves, lanes) for each in sums]
    if mbar_ptr is None and threads_per_row <= 32:
        return [shares[0] for shares in values], RowSums(found, moves, 1)
    dtypes, count = [type(each[0]) for each in values], len(found[0].peaks)
    starts = [(identity(op, dtype), dtype) for dtype, op in zip(dtypes, ops, strict=True)]
    starts += [(-INF, Float32)] * count + [(0.0, Float32)] * len(moves)
    of_shares = [
        [*(each[k] for each in values), *one.peaks, *one.sums] for k, one in enumerate(found)
    ]
    lists, width = _exchanged(of_shares, starts, reduction_buffer, mbar_ptr, phase, abreast)
    results = [combine_lanes(each, op, width) for each, op in zip(lists, ops, strict=False)]
    mine = zip(*lists[len(values) :], strict=True)
    return results, RowSums([Found(each[:count], each[count:]) for each in mine], moves, width)


def _exchanged(
    of_shares: list[list[Numeric]],
    starts: list[tuple[float, type[Numeric]]],
    reduction_buffer: cute.Tensor,
    mbar_ptr: cute.Pointer | None,
    phase: int | Int32,
    abreast: int,
) -> tuple[list[list[Numeric]], int]:
    """Exchange values of 32 bits, two in a word, because each word is a message of its own.

    of_shares: for each share that the warp works on, what it has.
    starts: of each value, what a lane without a warp gets, and the dtype.

    Returns of each value a list of those that this lane combines, and how many neighbouring lanes
    have all of them.
    """
    pairs = range(0, len(starts), 2)
    padded = [[*values, Int32(0)] for values in of_shares]
    words = tuple(tuple(pack64(each[i], each[i + 1]) for each in padded) for i in pairs)
    slots = slots_of(reduction_buffer, len(words))
    exchange(words, slots, mbar_ptr, phase, abreast)
    beyond = [*(dtype(start) for start, dtype in starts), Int32(0)]
    lists = []
    for i, slot in zip(pairs, slots, strict=True):
        found = peers(slot, Int64, abreast, pack64(beyond[i], beyond[i + 1]))
        halves = zip(*map(unpack64, found), strict=True)
        for half, (_, dtype) in zip(halves, starts[i : i + 2], strict=False):
            lists.append([each if dtype is Int32 else each.bitcast(dtype) for each in half])
    return lists, lanes_of_peers(slots[0])

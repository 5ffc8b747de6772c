"""Elements of a row by their rank, of which a row need not be sorted: bisection of their bits.

The bits of an element, with those of a negative one turned round, are a number in the order of the
elements, as the keys of `topk` have it. The bits of the number that is looked for are found one
after the other, from the highest on: a bit is 1 if no more elements than the rank tells are below
the number that has this bit and no lower one. Each bit takes a count over the row, and so an
exchange. Of elements of 16 bits the lower half of all numbers is alike, and is not looked for.

Elements are compared as they are, with the element before the number. So they need no registers
but their own. NaN is not counted below anything, and so it is the largest element.
"""

from __future__ import annotations

import math

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric

from htile.compute.exchange import slots_from
from htile.compute.keys import last_below, unordered
from htile.compute.operands import select
from htile.compute.reduce import (
    ADD,
    MAX,
    MIN,
    block_reduce,
    cluster_reduce,
    how_many,
    identity,
    warp_reduce,
)
from htile.utils import WARP, Static

LOWEST, HIGHEST = identity(MAX, Int32), identity(MIN, Int32)
BITS = 32


def nothing_of(dtype: type[Numeric]) -> float | int:
    """What a padded element holds, which is not counted below anything."""
    return math.nan if dtype is Float32 else HIGHEST


def _before(number: Int32, dtype: type[Numeric]) -> Numeric:
    """The last element before a number; of the numbers of NaN it is infinity."""
    if dtype is Int32:
        return number - 1
    return last_below(number)


def _element(number: Int32, dtype: type[Numeric], zero_bits: int) -> Numeric:
    """The element of a number whose `zero_bits` lowest bits are not known."""
    if dtype is Int32:
        return number
    low = (1 << zero_bits) - 1  # what a negative float has there
    return unordered(select(number < 0, number | low, number)) + 0.0  # -0.0 + 0.0 is 0.0


def kth_of_row(
    rows: list[list[Numeric]],
    ranks: list[Int32],
    zero_bits: int,
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    abreast: int = 1,
) -> list[Numeric]:
    """For each rank the element of the row that so many others are below, in every thread.

    rows: the elements of Float32 or Int32 that a thread has of the row that each rank is of. What
        is no element of the row is `nothing_of` their dtype. A rank that there is not gives NaN, or
        the lowest or the highest integer.
    zero_bits: so many of the lowest bits of all elements are zero.
    reduction_buffer, mbar_ptr, phase, abreast: as for `row_reduce`. The buffer has a slot for each
        rank and round.
    """
    across = reduction_buffer, mbar_ptr, phase, abreast
    search = _Search(rows, ranks, BITS - zero_bits, threads_per_row, across)
    found = _found(search, tuple(Int32(LOWEST) for _ in ranks))
    return [_element(n, type(row[0]), zero_bits) for n, row in zip(found, rows, strict=True)]


@cute.jit
def _found(search: cutlass.Constexpr, found: tuple) -> tuple:
    for k in cutlass.range(search.rounds, unroll=1):
        found = search.with_bit(k, found)
    return found


class _Search(Static):
    """What stays the same in all rounds."""

    def __init__(self, rows, ranks, rounds: int, threads_per_row: int, across: tuple):
        self.rows, self.ranks, self.rounds = rows, ranks, rounds
        self.lanes, self.spans_warps = min(threads_per_row, WARP), threads_per_row > WARP
        self.buffer, self.mbar_ptr, self.phase, self.abreast = across

    def with_bit(self, k: Int32, found: tuple) -> tuple:
        """What has been found, with the next bit: after k bits."""
        bit = Int32(1) << (BITS - 1 - k)
        candidates = [number + bit for number in found]
        counts = [
            self._of_warp(self._below(row, candidate))
            for row, candidate in zip(self.rows, candidates, strict=True)
        ]
        counts = self._of_row(k, tuple(counts))
        each = zip(counts, self.ranks, candidates, found, strict=True)
        return tuple(select(count <= rank, new, old) for count, rank, new, old in each)

    @staticmethod
    def _below(row: list[Numeric], number: Int32) -> Int32:
        """How many of a thread's elements are below a number."""
        last = _before(number, type(row[0]))
        return how_many(element <= last for element in row)

    def _of_warp(self, count: Int32) -> Int32:
        if self.lanes < WARP:
            return warp_reduce(count, ADD, self.lanes)
        return cute.arch.warp_redux_sync(count, "add")

    def _of_row(self, k: Int32, counts: tuple) -> tuple:
        """The counts of the row, of those of its warps, through the slots of this round."""
        ops = (ADD,) * len(counts)
        if self.mbar_ptr is None and not self.spans_warps:
            return counts
        slots = slots_from(self.buffer, k * len(counts), len(counts))
        if self.mbar_ptr is None:
            return block_reduce(counts, ops, slots, self.abreast)
        mbar_ptr = self.mbar_ptr + k * len(counts)
        return cluster_reduce(counts, ops, slots, mbar_ptr, self.phase, self.abreast)

"""How many elements of a row lie where: over its shares, their warps and threads."""

from __future__ import annotations

from dataclasses import dataclass

import cutlass
from cutlass import Int32


@dataclass(frozen=True)
class RowLayout:
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
        """Whether all threads have as many elements, and the threads are 2**k."""
        threads = self.threads * self.shares
        is_full = isinstance(self.vectors, int) and self.vectors == threads * self.chunks
        return is_full and _is_power(threads)

    @property
    def is_exact(self) -> bool:
        """Whether a halving tree over all elements is exact for equal ones."""
        return self.is_even and _is_power(self.vectors)

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

    def of_warp(
        self, warp: int | Int32, share: int | Int32, last: int | None = None
    ) -> int | Int32:
        """How many elements of the row a warp of a share has.

        last: the last share that it may be, by default of all. The number is a Python number where
            all shares up to it are whole.
        """
        width, left = self.threads * self.chunks, self.vectors
        up_to = self.shares if last is None else last + 1
        if isinstance(left, int) and up_to * width <= left:
            return self.chunks * self.lanes * self.vec_size
        if self.shares > 1:
            left = _clamp(left - share * width, 0, width)
        rest = _clamp(left % self.threads - warp * 32, 0, self.lanes)
        return (left // self.threads * self.lanes + rest) * self.vec_size


def _is_power(n: int) -> bool:
    """Whether n is a power of two."""
    return n & (n - 1) == 0


def _clamp(x: int | Int32, low: int, high: int) -> int | Int32:
    """The nearest number to x from `low` to `high`."""
    if isinstance(x, int):
        return min(max(x, low), high)
    return cutlass.min(cutlass.max(x, low), high)

"""How many elements of a row lie where: over its shares, their warps and threads."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import cutlass
from cutlass import Int32

from htile.utils import is_power_of_two


@dataclass(frozen=True)
class RowLayout:
    """How the vectors of a row lie over its shares and threads.

    elements: how many elements the row has. If the kernel is compiled for this number, the row may
        end inside a vector; otherwise only if `any_end` says so.
    vec_size: how many elements a vector has. threads: how many threads work on a share.
    chunks: how many vectors of a share a thread has, padding included.
    shares: how many shares the row has.
    any_end: whether a row whose length is known when the kernel runs may end inside a vector.
    """

    elements: int | Int32
    vec_size: int
    threads: int
    chunks: int
    shares: int
    any_end: bool = False

    @property
    def is_even(self) -> bool:
        """Whether all threads have as many elements, and the threads are 2**k."""
        threads, elements = self.threads * self.shares, self.elements
        is_full = isinstance(elements, int) and elements == threads * self.chunks * self.vec_size
        return is_full and is_power_of_two(threads)

    @property
    def is_exact(self) -> bool:
        """Whether a halving tree over all elements is exact for equal ones."""
        return self.is_even and is_power_of_two(self.elements // self.vec_size)

    @property
    def rest(self) -> int:
        """How many elements of the row are in the vector that it ends in; 0 if they fill it.

        It is 0 as well where only the kernel knows (`any_end`).
        """
        return self.elements % self.vec_size if isinstance(self.elements, int) else 0

    def is_whole(self, chunk: int | Int32, beyond: int = 0) -> bool:
        """Whether the vectors of a chunk are in the row, for all threads of all shares.

        beyond: so many vectors behind each of them are in the row too.
        """
        if not (isinstance(chunk, int) and isinstance(self.elements, int)):
            return False
        vectors = ((self.shares - 1) * self.chunks + chunk + 1) * self.threads + beyond
        return vectors * self.vec_size <= self.elements

    def may_end_in(self, chunk: int | Int32) -> bool:
        """Whether the row may end inside a vector of this chunk of some share."""
        if not self.rest or not isinstance(chunk, int):
            return self.rest > 0
        last = self.elements // self.vec_size
        return chunk == last % (self.threads * self.chunks) // self.threads

    def place_of(self, element: int) -> int:
        """Which of the Booleans that say what of a vector is in the row is that of an element.

        There are two, of the first element and of the last; or one for each (`any_end`).
        """
        return element if self.any_end else int(element >= self.rest)

    def exact_parts(self, chunk: int | Int32) -> list[tuple[int, int]]:
        """The elements (first, behind the last) of parts of a vector of this chunk.

        Each part is in the row as a whole, or not at all, and has 2**k elements.
        """
        if self.any_end:
            return [(k, k + 1) for k in range(self.vec_size)]
        bounds = (0, self.rest, self.vec_size) if self.may_end_in(chunk) else (0, self.vec_size)
        parts = []
        for first, last in pairwise(bounds):
            for bit in reversed(range(self.vec_size.bit_length())):
                if last - first & 1 << bit:
                    parts.append((first, first + (1 << bit)))
                    first += 1 << bit
        return parts

    @property
    def lanes(self) -> int:
        """How many lanes of a warp work on a share."""
        return min(self.threads, 32)

    @property
    def whole_chunks(self) -> int:
        """How many chunks, from the first on, are in the row for all threads of all shares."""
        if not isinstance(self.elements, int):
            return 0
        last = self.elements // self.vec_size - (self.shares - 1) * self.threads * self.chunks
        return _clamp(last // self.threads, 0, self.chunks)

    def of_warp(
        self, warp: int | Int32, share: int | Int32, last: int | None = None
    ) -> int | Int32:
        """How many elements of the row a warp of a share has.

        last: the last share that it may be, by default of all. The number is a Python number where
            all shares up to it are whole.
        """
        of_chunk = self.threads * self.vec_size
        width, left = of_chunk * self.chunks, self.elements
        up_to = self.shares if last is None else last + 1
        if isinstance(left, int) and up_to * width <= left:
            return self.chunks * self.lanes * self.vec_size
        if self.shares > 1:
            left = _clamp(left - share * width, 0, width)
        of_lanes = self.lanes * self.vec_size
        rest = _clamp(left % of_chunk - warp * 32 * self.vec_size, 0, of_lanes)
        return left // of_chunk * of_lanes + rest


def _clamp(x: int | Int32, low: int, high: int) -> int | Int32:
    """The nearest number to x from `low` to `high`."""
    if isinstance(x, int):
        return min(max(x, low), high)
    return cutlass.min(cutlass.max(x, low), high)

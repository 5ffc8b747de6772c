"""Which functions, lengths, dtypes and numbers of rows there are, and which half each is in.

A hash of its name says whether a function or a length is for fitting or for judging. A cell has
both of one half. Whatever is fitted is fitted on cells of FITTING. Nothing is changed because of
what a cell of JUDGING shows.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

from benchmarks.kernels import DTYPES, Kernel

from . import gates, losses, norms  # noqa: F401 (they enter their functions)
from .programs import PROGRAMS
from .variant import VARIANTS

FUNCTIONS: dict[str, Kernel] = VARIANTS | PROGRAMS

FITTING, JUDGING = "fitting", "judging"
HALVES = (FITTING, JUDGING)

SHORTEST, LONGEST = 64, 1 << 18  # elements of the lengths that are drawn
# Lengths of models: hidden and intermediate sizes, and vocabularies.
REAL = (
    768, 1152, 1536, 2880, 3584, 5120, 7168, 11008, 13824, 14336, 18432, 28672, 32000, 50257,
    50304, 65024, 100352, 128256, 129280, 151936, 152064, 201088, 256000, 262144,
)  # fmt: skip
DRAWN = 72  # lengths beside those
BYTES = 256 << 20  # of the first row argument where rows are many
LEAST_BYTES = 64 << 20  # of the tensors of a cell from which its time is that of the memory
FEW_ROWS = (1, 4, 16, 64, 256)


def half(name: object) -> str:
    """FITTING or JUDGING, by a hash of the name of a function or of a length in digits."""
    return HALVES[hashlib.sha256(str(name).encode()).digest()[0] & 1]


def _lengths() -> tuple[int, ...]:
    """Half multiples of 8 that are no powers of two, a quarter odd numbers, a quarter primes."""
    rng = random.Random("lengths")
    found = set(REAL)
    while len(found) < len(REAL) + DRAWN:
        n = round(math.exp(rng.uniform(math.log(SHORTEST), math.log(LONGEST))))
        kind = len(found) % 4
        if kind < 2:
            n = -(-n // 8) * 8
            n += 8 * (n & (n - 1) == 0)
        else:
            n |= 1
            while kind == 3 and not _is_prime(n):
                n += 2
        if n <= LONGEST:
            found.add(n)
    return tuple(sorted(found))


def _is_prime(n: int) -> bool:
    return n > 1 and all(n % k for k in range(2, math.isqrt(n) + 1))


LENGTHS = _lengths()


@dataclass(frozen=True)
class Cell:
    """One function at one size."""

    function: str
    dtype: str
    m: int
    n: int

    @property
    def half(self) -> str:
        """Of its function, and of its length."""
        return half(self.function)


def cells(halves: tuple[str, ...], each: int) -> list[Cell]:
    """So many cells of every function, in an order that any beginning of is a fair sample.

    Three quarters have many rows, three quarters are of bfloat16, and half the lengths are
    multiples of 8. The first so many of a function are the same whatever `each` is.
    """
    found: list[tuple[int, float, Cell]] = []
    for function in FUNCTIONS:
        if half(function) not in halves:
            continue
        rng = random.Random(f"cells of {function}")
        lengths = [n for n in LENGTHS if half(n) == half(function)]
        for turn in range(each):
            n = rng.choice(lengths)
            dtype = rng.choices(tuple(DTYPES), (12, 1, 3))[0]
            few = rng.random() < 0.25
            m = rng.choice(FEW_ROWS) if few else rows_of(n, dtype)
            found.append((turn, rng.random(), Cell(function, dtype, m, n)))
    found.sort(key=lambda entry: entry[:2])
    return list(dict.fromkeys(cell for _, _, cell in found))


def rows_of(n: int, dtype: str) -> int:
    """As many rows as BYTES hold, a multiple of 64 where there are that many."""
    rows = BYTES // (n * DTYPES[dtype].itemsize)
    return rows // 64 * 64 or rows

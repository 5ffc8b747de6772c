"""The kernels whose emitted text and resources are recorded, and how both are digested.

A cell is a function at one row length, number of rows, dtype and architecture. A group is all
cells of one function, dtype and architecture.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch

from benchmarks.kernels import KERNELS
from htile.build.cache import _code

from . import functions

BF16, F32 = torch.bfloat16, torch.float32
ARCHS = ("sm_80", "sm_86", "sm_89", "sm_90a", "sm_100a", "sm_120a")
MAIN_ARCH = "sm_90a"  # the one that the benchmarks run on, so the one with all cells

# Every row length of the benchmark suites.
BENCHMARKED = (
    64, 128, 256, 512, 1024, 2048, 4096, 6144, 8192, 16384, 32768, 65536, 128256, 131072, 152064,
    262144, 1 << 20, 1 << 22,
)  # fmt: skip
# Lengths between and beyond them: multiples of 8, odd ones, vocabularies.
OTHERS = (
    96, 1000, 3001, 4096, 7168, 11008, 14336, 24576, 32768, 50257, 50304, 57344, 65536, 131072,
    151936, 262208, 300040, 1 << 20,
)  # fmt: skip
OTHERS_ELSEWHERE = (1000, 4096, 11008, 24576, 50257, 57344, 65536, 131072, 300040)
ROWS = (1, 64, 256, 4096)  # one number of each class that plans distinguish
# The record holds the resources of these lengths, for many rows. All cells take hours to compile.
COMPILED = (4096, 65536)


@dataclass(frozen=True)
class Cell:
    """One kernel: the name of its function, the row length, rows, dtype and architecture."""

    function: str
    n: int
    rows: int
    dtype: torch.dtype
    arch: str

    @property
    def group(self) -> str:
        """`softmax bfloat16 sm_90a`"""
        return f"{self.function} {str(self.dtype).removeprefix('torch.')} {self.arch}"

    @property
    def is_compiled(self) -> bool:
        """Whether the record holds what its kernel uses."""
        return self.n in COMPILED and self.rows == ROWS[-1]

    def kernel(self):
        """What `inspect` returns for it."""
        if self.function in KERNELS:
            known = KERNELS[self.function]
            function, args = known.function, known.arguments(self.rows, self.n, self.dtype, "meta")
        else:
            function = functions.FUNCTIONS[self.function][0]
            args = functions.arguments(self.function, self.rows, self.n, self.dtype)
        return function.inspect(*args, arch=self.arch)


def cells() -> list[Cell]:
    """All of them, in a fixed order."""
    found = []
    for arch in ARCHS:
        everywhere = arch == MAIN_ARCH
        for name in KERNELS:
            for dtype in (BF16, F32):
                for n in BENCHMARKED:
                    rows = ROWS if everywhere else ROWS[-1:]
                    found += [Cell(name, n, m, dtype, arch) for m in rows]
        for name in functions.FUNCTIONS:
            for n in OTHERS if everywhere else OTHERS_ELSEWHERE:
                rows = (ROWS[0], ROWS[-1]) if everywhere else ROWS[-1:]
                found += [Cell(name, n, m, BF16, arch) for m in rows]
                if everywhere:
                    found.append(Cell(name, n, ROWS[-1], F32, arch))
    return found


def digest(*parts: object) -> str:
    """Sixteen hexadecimal digits of these values."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def text_digest(source: str) -> str:
    """The digest of emitted text without comments, which hold the user's lines."""
    return digest(_code(source))

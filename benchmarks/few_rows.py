"""Few rows: the GPU's time of one call in a CUDA graph of many, which leaves the host out."""

from __future__ import annotations

import functools

from benchmarks.cell import Method, job
from benchmarks.kernels import DEFAULT, KERNELS
from benchmarks.results import Job
from benchmarks.timing import captured, replays

CELLS = tuple((m, n) for m in (1, 16, 64, 256) for n in (4096, 8192, 32768, 128256))
CONTENDERS = ("htile", "quack", "liger", "eager", "limit")
CALLS, ROUNDS = 50, 50
METHOD = Method(functools.partial(replays, calls=CALLS), functools.partial(captured, calls=CALLS))


def jobs(options) -> list[Job]:
    """Every kernel at every cell that the command line asks for."""
    return [
        job("few_rows", KERNELS[kernel], dtype, *cell, options.contenders or CONTENDERS, METHOD,
            options.rounds or ROUNDS)
        for kernel in options.kernels or DEFAULT
        for dtype in options.dtype
        for cell in options.cells or CELLS
    ]  # fmt: skip

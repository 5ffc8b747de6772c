"""The host's time of a call, on rows so few that the GPU is never waited for.

Beside it, in the same run, what of it no Python can save: the compiled function alone, and
`torch.empty_like`.
"""

from __future__ import annotations

from benchmarks import timing
from benchmarks.cell import Method, job
from benchmarks.kernels import DEFAULT, KERNELS
from benchmarks.results import Job

CELLS = ((8, 4096),)
CONTENDERS = ("htile", "bare", "empty_like", "quack", "liger", "compile", "eager", "limit")
ROUNDS = 50


def jobs(options) -> list[Job]:
    """Every kernel that the command line asks for, at one size."""
    method = Method(timing.host)
    return [
        job("host", KERNELS[kernel], dtype, *cell, options.contenders or CONTENDERS, method,
            options.rounds or ROUNDS)
        for kernel in options.kernels or DEFAULT
        for dtype in options.dtype
        for cell in options.cells or CELLS
    ]  # fmt: skip

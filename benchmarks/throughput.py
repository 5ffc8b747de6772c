"""Bandwidth of large tensors: one launch after the other, each with a cold L2."""

from __future__ import annotations

from benchmarks.cell import Method, job
from benchmarks.kernels import DEFAULT, KERNELS
from benchmarks.results import Job
from htile.tune.timing import interleave

SMALL_N = tuple((1 << 20, n) for n in (64, 128, 256, 512))
SHORT = ((32768, 1024), (32768, 2048), (32768, 4096), (32768, 6144), (16384, 8192))
LONG = ((16384, 16384), (4096, 32768), (4096, 65536), (4096, 131072), (2048, 262144))
VERY_LONG = ((256, 1 << 20), (64, 1 << 22))
CELLS = SMALL_N + SHORT + LONG + VERY_LONG

# torch.compile takes seconds a cell, max-autotune tens of them.
COMPILED = ((1 << 20, 256), (32768, 1024), (32768, 4096), (16384, 8192), (4096, 32768),
            (4096, 131072))  # fmt: skip
AUTOTUNED = ((32768, 4096), (16384, 8192), (4096, 32768))
ROUNDS = 50
METHOD = Method(interleave)


def contenders(cell: tuple[int, int]) -> tuple[str, ...]:
    """Who takes part at a cell, unless the command line says."""
    compiled = ("compile",) if cell in COMPILED else ()
    autotuned = ("autotune",) if cell in AUTOTUNED else ()
    return ("htile", "quack", "liger", *compiled, *autotuned, "eager", "limit")


def jobs(options) -> list[Job]:
    """Every kernel at every cell that the command line asks for."""
    return [
        job("throughput", KERNELS[kernel], dtype, *cell,
            options.contenders or contenders(cell), METHOD, options.rounds or ROUNDS)
        for kernel in options.kernels or DEFAULT
        for dtype in options.dtype
        for cell in options.cells or CELLS
    ]  # fmt: skip

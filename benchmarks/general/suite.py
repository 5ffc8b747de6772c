"""The suite `general`: the default plan of every cell beside torch.compile and the limit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence

import torch

from benchmarks import cell as measured
from benchmarks import few_rows, throughput
from benchmarks.contenders import build, failures
from benchmarks.kernels import DTYPES
from benchmarks.plans import request
from benchmarks.results import Job
from htile.build.compile import build_all

from .population import FEW_ROWS, FUNCTIONS, Cell, cells

CONTENDERS = ("htile", "compile", "limit")
ROUNDS = 25


def chosen(options) -> list[Cell]:
    """The cells that the command line asks for."""
    found = cells(options.half, options.each)
    return [c for c in found if not options.functions or c.function in options.functions]


def jobs(options) -> list[Job]:
    """One job a cell. Few rows are timed in a CUDA graph, many with a cold L2."""
    names = tuple(options.contenders or CONTENDERS)
    return [
        measured.job("general", FUNCTIONS[c.function], c.dtype, c.m, c.n, names, method(c),
                     options.rounds or ROUNDS)
        for c in chosen(options)
    ]  # fmt: skip


def method(c: Cell) -> measured.Method:
    """How a cell is timed."""
    return few_rows.METHOD if c.m in FEW_ROWS else throughput.METHOD


def prepare(options) -> None:
    """Compile what the cells need, in processes side by side, into the caches on disk."""
    found = chosen(options)
    requests = []
    for c in found:
        kernel = FUNCTIONS[c.function]
        args = kernel.arguments(c.m, c.n, DTYPES[c.dtype], "meta")
        requests.append(request(kernel.function.inspect(*args).lowered))
    build_all(requests)
    if "compile" in (options.contenders or CONTENDERS):
        _call_compiled(found, options.workers)


def _call_compiled(found: list[Cell], workers: int) -> None:
    """Have torch.compile keep the kernels of these cells. The processes share the GPU."""
    context = multiprocessing.get_context("spawn")
    shares = [found[k::workers] for k in range(workers)]
    processes = [context.Process(target=_call_share, args=(share,)) for share in shares if share]
    for process in processes:
        process.start()
    for process in processes:
        process.join()


def _call_share(found: Sequence[Cell]) -> None:
    for c in found:
        kernel = FUNCTIONS[c.function]
        torch._dynamo.reset()
        try:
            args = kernel.arguments(c.m, c.n, DTYPES[c.dtype], "cuda")
            with torch.no_grad():
                build("compile", kernel, args)()
        except (*failures(), torch.cuda.OutOfMemoryError):
            continue  # the suite has the reason in its record
        del args
        torch.cuda.empty_cache()

"""The suite `regret`: the default plan's time over that of the fastest plan there is.

Every plan of a cell is timed for some rounds. The fastest ones are then timed again beside the
default, because the least of many times is partly luck. A record keeps the time of every plan,
which is what the constants of the cost model are fitted to.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from statistics import median

import torch

from benchmarks.cell import reason
from benchmarks.contenders import failures
from benchmarks.kernels import DTYPES
from benchmarks.plans import launches, of, request, timed
from benchmarks.results import Job, key, record
from htile.build.compile import build
from htile.lower import Lowered

from .population import FUNCTIONS, Cell
from .suite import chosen, method

CONTENDERS = ("default", "best")
ROUNDS = 7  # of every plan
AGAIN = 25  # of the default and the fastest ones
FASTEST = 4  # how many plans are timed again

_UNDER_WAY: dict[tuple[str, str, str], Future] = {}  # what is being compiled, by its request


def jobs(options) -> list[Job]:
    """One job a cell, with at most `--most` plans: the default and the best by expected time."""
    return [_job(c, options) for c in chosen(options)]


def prepare(options) -> None:
    """Begin to compile every plan of every cell, in processes side by side.

    They are forked before the GPU is used. Each cell waits for its own plans, which the cache on
    disk then has.
    """
    requests = [request(one) for c in chosen(options) for one in _plans(c, options.most)]
    build(*requests[0])  # imports CuTe-DSL, which the processes then have
    pool = ProcessPoolExecutor(options.workers, mp_context=multiprocessing.get_context("fork"))
    _UNDER_WAY.update({each: pool.submit(build, *each) for each in dict.fromkeys(requests)})


def _plans(c: Cell, most: int) -> list[Lowered]:
    return of(FUNCTIONS[c.function], c.m, c.n, DTYPES[c.dtype], most)


def _job(c: Cell, options) -> Job:
    cell = key("regret", c.function, c.dtype, c.m, c.n)

    def run(say):
        try:
            found, plans = _measure(c, options, say)
        except (*failures(), torch.cuda.OutOfMemoryError) as error:
            found, plans = {name: {"error": reason(error)} for name in CONTENDERS}, []
        moved = FUNCTIONS[c.function].bytes(c.m, c.n, DTYPES[c.dtype])
        return [record(cell, found, "us", bytes=moved, plans=plans)]

    return Job(f"regret {c.function} {c.dtype} {c.m}x{c.n}", (cell,), CONTENDERS, run)


def _measure(c: Cell, options, say: Callable[[str], None]) -> tuple[dict, list[dict]]:
    """The times of the default and of the fastest plan, and the median of every plan."""
    kernel = FUNCTIONS[c.function]
    plans = _plans(c, options.most)
    args = kernel.arguments(c.m, c.n, DTYPES[c.dtype], "cuda")
    say(f"checking {len(plans)} plans")
    for one in plans:
        if under_way := _UNDER_WAY.pop(request(one), None):
            under_way.result()
    calls = dict(enumerate(launches(kernel, plans, args)))
    how = method(c)
    say(f"timing {len(plans)} plans")
    first = {k: median(times) for k, times in how.at_once(calls, ROUNDS).items()}
    again = sorted(first, key=first.get)[:FASTEST]
    times = how.at_once({k: calls[k] for k in {0, *again}}, options.rounds or AGAIN)
    best = min(times, key=lambda k: median(times[k]))
    found = {
        "default": {"times": [round(t, 4) for t in times[0]]},
        "best": {"times": [round(t, 4) for t in times[best]], "plan": best},
    }
    return found, timed(plans, first)

"""More ways to time functions than `htile.tune.timing` has: on the host, and with a warm L2.

One call of each a round, the order rotated each round.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable

import torch

from htile.tune.timing import Contenders, Times, turns


def captured(call: Callable[[], object], calls: int) -> Callable[[], None]:
    """The replay of a CUDA graph of so many calls. `call` has run before: nothing compiles here."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            call()
    return graph.replay


def replays(contenders: Contenders, rounds: int, calls: int) -> Times:
    """Microseconds of the GPU a call, where each contender is the replay of a graph of `calls`.

    The tensors stay in L2 where they fit: what follows another kernel of few rows finds them there.
    """
    times: Times = {name: [] for name in contenders}
    for name, counts in turns(contenders, rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        contenders[name]()  # the launch of the graph that is timed hides behind this one
        start.record()
        contenders[name]()
        stop.record()
        torch.cuda.synchronize()
        if counts:
            times[name].append(start.elapsed_time(stop) * 1e3 / calls)
    return times


def host(contenders: Contenders, rounds: int, calls: int = 100) -> Times:
    """Microseconds of the host a call: `calls` in a row, the GPU idle before and never waited for.

    Fewer launches than a stream queues (1024), or the host would wait for the GPU.
    """
    times: Times = {name: [] for name in contenders}
    collecting = gc.isenabled()
    gc.disable()
    try:
        for name, counts in turns(contenders, rounds):
            call = contenders[name]
            torch.cuda.synchronize()
            start = time.perf_counter_ns()
            for _ in range(calls):
                call()
            took = time.perf_counter_ns() - start
            if counts:
                times[name].append(took / calls / 1e3)
        torch.cuda.synchronize()
    finally:
        if collecting:
            gc.enable()
    return times

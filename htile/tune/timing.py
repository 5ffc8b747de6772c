"""Times functions against each other on the GPU: one launch of each in a round, with a cold L2.

Only ratios inside one run count: the time of a kernel changes by some per cent from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

FLUSH_BYTES = 256 << 20  # bytes that are written to empty the L2: several times its size
WARM_UP = 3  # rounds at the beginning that are not counted

Contenders = dict[str, Callable[[], object]]
Times = dict[str, list[float]]


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Every name once in each round, and whether the round counts; the order is rotated."""
    names = list(names)
    for k in range(-WARM_UP, rounds):
        first = k % len(names)
        for name in names[first:] + names[:first]:
            yield name, k >= 0


def interleave(contenders: Contenders, rounds: int) -> Times:
    """The microseconds that each launch takes, measured by GPU events with a cold L2.

    Before each launch the L2 is flushed. That takes the GPU longer than the launch takes the host,
    so the GPU does not wait for the host in between.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    pairs = {name: [] for name in contenders}
    for name, counts in turns(contenders, rounds):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush.zero_()
        start.record()
        contenders[name]()
        stop.record()
        if counts:
            pairs[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e3 for a, b in found] for name, found in pairs.items()}

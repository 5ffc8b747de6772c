"""Times functions against each other on the GPU: one launch of each a round, with a cold L2.

Ratios inside one run are what counts: the same kernel moves by some per cent from run to run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU so far
WARM_UP = 3  # rounds that are not counted

Contenders = dict[str, Callable[[], object]]
Times = dict[str, list[float]]


def turns(names: Iterable[str], rounds: int) -> Iterator[tuple[str, bool]]:
    """Every name once a round, the order rotated each round, and whether the round counts."""
    names = list(names)
    for k in range(-WARM_UP, rounds):
        first = k % len(names)
        for name in names[first:] + names[:first]:
            yield name, k >= 0


def interleave(contenders: Contenders, rounds: int) -> Times:
    """Microseconds of each launch by GPU events, with a cold L2, the order rotated each round.

    The flush of the L2 runs before each launch, longer than the launch takes the host, so that the
    GPU does not wait for the host in between.
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

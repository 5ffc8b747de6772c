"""Times functions against each other on the GPU: one launch of each a round, with a cold L2.

Ratios inside one run are what counts: the same kernel moves by some per cent from run to run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU so far
WARM_UP = 3  # rounds that are not counted

Contenders = dict[str, Callable[[], object]]
Times = dict[str, list[float]]


def rotated(names: list[str], k: int) -> list[str]:
    """The names, begun with the k-th."""
    return names[k % len(names) :] + names[: k % len(names)]


def interleave(contenders: Contenders, rounds: int) -> Times:
    """Microseconds of each launch by GPU events, with a cold L2, the order rotated each round.

    The flush of the L2 runs before each launch, longer than the launch takes the host, so that the
    GPU does not wait for the host in between.
    """
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    names = list(contenders)
    pairs = {name: [] for name in names}
    for k in range(-WARM_UP, rounds):
        for name in rotated(names, k):
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            flush.zero_()
            start.record()
            contenders[name]()
            stop.record()
            if k >= 0:
                pairs[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e3 for a, b in found] for name, found in pairs.items()}

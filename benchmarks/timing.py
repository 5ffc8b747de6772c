"""Times GPU functions against each other: interleaved launch by launch, rotated, with a cold L2.

Ratios inside one run are what counts: the same kernel moves by some per cent from run to run.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

FLUSH_BYTES = 256 << 20  # several times the L2 of any GPU so far


def interleave(contenders: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each launch: one of every contender a round, the order rotated each round."""
    flush = torch.empty(FLUSH_BYTES, dtype=torch.int8, device="cuda")
    names = list(contenders)
    for name in names:
        contenders[name]()
    events = {name: [] for name in names}
    for k in range(rounds):
        for name in names[k % len(names) :] + names[: k % len(names)]:
            start = torch.cuda.Event(enable_timing=True)
            stop = torch.cuda.Event(enable_timing=True)
            flush.zero_()
            start.record()
            contenders[name]()
            stop.record()
            events[name].append((start, stop))
    torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) for a, b in pairs] for name, pairs in events.items()}


def median(numbers: list[float]) -> float:
    """The middle of the sorted numbers."""
    ordered = sorted(numbers)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def quartiles(numbers: list[float]) -> tuple[float, float]:
    """The first and the third quartile."""
    ordered = sorted(numbers)
    return ordered[len(ordered) // 4], ordered[(3 * len(ordered)) // 4]

"""Medians with their 95 % intervals, and ratios of times that are paired by round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True)
class Estimate:
    """A median and its 95 % interval."""

    median: float
    low: float
    high: float

    @property
    def half_width(self) -> float:
        """Half the interval's width."""
        return (self.high - self.low) / 2

    def map(self, f) -> Estimate:
        """The estimate of `f` of the quantity, `f` monotonic."""
        low, high = sorted((f(self.low), f(self.high)))
        return Estimate(f(self.median), low, high)


def estimate(numbers: Sequence[float]) -> Estimate:
    """The median with its 95 % interval; of fewer than 6 numbers the interval is their range.

    The interval is between two order statistics: whatever the distribution of the values, the
    number of them that lie below the true median is binomial.
    """
    ordered = sorted(numbers)
    count = len(ordered)
    cut, tail = 0, 0.5**count
    while tail <= 0.025:
        cut += 1
        tail += math.comb(count, cut) / 2**count
    cut = max(cut - 1, 0)
    return Estimate(median(ordered), ordered[cut], ordered[count - 1 - cut])


def paired(above: Sequence[float], below: Sequence[float]) -> Estimate:
    """The median ratio of two contenders' times, each taken in one round, with its interval."""
    return estimate([a / b for a, b in zip(above, below, strict=True)])

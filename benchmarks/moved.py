"""Rows that are moved along themselves, beside a scaled copy of the same rows and `torch.roll`.

No row function is faster than the copy, because it reads and writes the same bytes.
"""

from __future__ import annotations

from statistics import median

import torch
import torch.nn.functional as F

import htile
from htile.tune.timing import interleave

LENGTHS = (1024, 4096, 4099, 5000, 16384, 65536)
ROW_BYTES = 128 << 20  # of all rows together
DTYPE = torch.bfloat16
ROUNDS = 15


@htile.rowwise
def scaled(x):
    return x * 1.5


@htile.rowwise
def rolled(x):
    return x.roll(1, -1)


@htile.rowwise
def half_rolled(x):
    return x.roll(len(x) // 2 + 5, -1)


@htile.rowwise
def difference(x):
    return F.pad(x[1:] - x[:-1], (0, 1))


@htile.rowwise
def token_shift(x, mu):
    before = F.pad(x[:-1], (1, 0))
    return x + (before - x) * mu


@htile.rowwise
def smoothed(x):
    return F.pad(x[2:], (0, 2)) * 0.25 + F.pad(x[1:-1], (1, 1)) * 0.5 + x * 0.25


def measure(n: int) -> dict[str, float]:
    """The time of the copy over that of each function, for rows of n elements."""
    x = torch.randn(ROW_BYTES // (DTYPE.itemsize * n), n, device="cuda").to(DTYPE)
    mu = torch.rand(n, device="cuda").to(DTYPE)
    calls = {
        "scaled copy": lambda: scaled(x), "rolled": lambda: rolled(x),
        "half rolled": lambda: half_rolled(x), "difference": lambda: difference(x),
        "token shift": lambda: token_shift(x, mu), "three neighbours": lambda: smoothed(x),
        "torch.roll": lambda: torch.roll(x, 1, -1),
    }  # fmt: skip
    for call in calls.values():
        call()  # compiles the kernel
    times = {name: median(each) for name, each in interleave(calls, ROUNDS).items()}
    return {name: times["scaled copy"] / time for name, time in times.items()}


def main() -> None:
    print(torch.cuda.get_device_name())
    for n in LENGTHS:
        print(n, *(f"{name} {share:.2f}" for name, share in measure(n).items()), sep="  ")


if __name__ == "__main__":
    main()

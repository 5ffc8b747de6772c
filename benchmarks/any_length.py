"""Times kernels of rows of any length (`dynamic_n=True`) beside those of one length, and a copy.

    python -m benchmarks.any_length [--rounds 15]

A share of 1 means that the kernel takes as long as torch's copy of its rows, in bfloat16.
"""

from __future__ import annotations

import argparse
from statistics import median

import torch
import torch.nn.functional as F

import htile
from htile.tune.timing import interleave

# Rows of a whole capacity, of one that is not full, of an odd length, and a few more.
SHAPES = (
    (32768, 4096), (32768, 4000), (32768, 3001), (32768, 2304), (65536, 1000), (8192, 16000),
    (4096, 32768),
)  # fmt: skip


def softmax(x):
    return torch.softmax(x, -1)


def rmsnorm(x, weight):
    return F.rms_norm(x, x.shape, weight, 1e-6)


def shares(f, m: int, n: int, rounds: int) -> dict[str, float]:
    """What share of the speed of a copy the kernel for N has, and the one for any length."""
    x = torch.randn(m, n, device="cuda", dtype=torch.bfloat16)
    args = (x, torch.rand(n, device="cuda", dtype=torch.bfloat16))[: f.__code__.co_argcount]
    one, any_length = htile.rowwise(f), htile.rowwise(f, dynamic_n=True)
    y = one(*args)
    times = interleave({
        "one": lambda: one(*args, out=y),
        "any": lambda: any_length(*args, out=y),
        "copy": lambda: y.copy_(x),
    }, rounds)  # fmt: skip
    copied = median(times.pop("copy"))
    return {name: copied / median(found) for name, found in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.any_length", description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    print("| function | rows x N | of one length | of any length |\n|---|---|---|---|")
    for f in (softmax, rmsnorm):
        for m, n in SHAPES:
            found = shares(f, m, n, rounds)
            print(f"| {f.__name__} | {m}x{n} | {found['one']:.2f} | {found['any']:.2f} |")


if __name__ == "__main__":
    main()

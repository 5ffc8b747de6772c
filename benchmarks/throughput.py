"""Bandwidth of the emitted kernels beside a copy that moves the same bytes, in one run.

    python -m benchmarks.throughput [--json FILE] [--rounds R]
"""

from __future__ import annotations

import argparse
import json

import torch

from benchmarks.timing import interleave, median, quartiles
from examples import load
from examples.handwritten_rmsnorm import layernorm_fwd, rmsnorm_fwd
from examples.handwritten_softmax import softmax_fwd
from htile.testing import assert_close

SHORT = ((32768, 1024), (32768, 2048), (32768, 4096), (32768, 6144), (16384, 8192))
LONG = ((16384, 16384), (4096, 32768), (4096, 131072), (2048, 262144))


def wide_columns(arguments):
    """The same arguments with float32 columns, which are read again from L2 for every row."""

    def make(*options):
        row, *columns = arguments(*options)
        return row, *(c.float() for c in columns)

    return make


def cases() -> dict:
    """(function, its arguments, the same by hand) of each kernel."""
    softmax, rmsnorm, layernorm = (load(name) for name in ("softmax", "rmsnorm", "layernorm"))
    return {
        "softmax": (*softmax, softmax_fwd),
        "rmsnorm": (*rmsnorm, rmsnorm_fwd),
        "layernorm": (*layernorm, layernorm_fwd),
        "layernorm, float32 columns": (layernorm[0], wide_columns(layernorm[1]), layernorm_fwd),
    }


def measure(name: str, m: int, n: int, rounds: int) -> dict[str, object]:
    """Times of one kernel, its hand-written twin and a copy of the same rows; GB/s by median."""
    function, arguments, by_hand = cases()[name]
    args = arguments(m, n, torch.bfloat16, "cuda")
    some = args[0][:64], *args[1:]
    worst = assert_close(function, function(*some), *some)
    x, copy = args[0], torch.empty_like(args[0])
    times = interleave(
        {
            "htile": lambda: function(*args),
            "handwritten": lambda: by_hand(*args),
            "copy": lambda: copy.copy_(x),
        },
        rounds,
    )
    gigabytes = 2 * x.numel() * x.element_size() / 1e9
    ratios = [c / h for h, c in zip(times["htile"], times["copy"], strict=True)]
    return {
        "kernel": name,
        "m": m,
        "n": n,
        "GB/s": {k: gigabytes / median(t) * 1e3 for k, t in times.items()},
        "of_copy": median(ratios),
        "of_copy_quartiles": quartiles(ratios),
        "error_of_bound": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", help="write the figures here")
    parser.add_argument("--rounds", type=int, default=50)
    options = parser.parse_args()
    results = []
    print(f"{torch.cuda.get_device_name()}, bf16, GB/s by median of {options.rounds} launches")
    print(f"{'kernel':<28}{'shape':<14}{'htile':>8}{'by hand':>9}{'copy':>8}{'of copy':>9}")
    for name in cases():
        for m, n in SHORT + LONG:
            row = measure(name, m, n, options.rounds)
            results.append(row)
            speed = row["GB/s"]
            print(
                f"{name:<28}{f'{m}x{n}':<14}{speed['htile']:>8.0f}{speed['handwritten']:>9.0f}"
                f"{speed['copy']:>8.0f}{row['of_copy']:>9.3f}",
                flush=True,
            )
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"device": torch.cuda.get_device_name(), "results": results}, file, indent=1)


if __name__ == "__main__":
    main()

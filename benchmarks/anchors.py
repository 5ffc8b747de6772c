"""What cuBLAS and HTile reach under sustained load and with rests, with the clock and the power.

    python -m benchmarks.anchors [--sizes 4096x4096x4096] [--seconds 0.5] [--rounds 15]

A GPU that multiplies without a pause reaches its power limit and lowers its clock. Then other
things decide what is fast than at full clock. So each size of the product suite is measured twice:
the contenders take turns without a pause, after a warm-up, or each launch follows a rest. A ratio
above 1 is faster than cuBLAS. The clock and the power are what `nvidia-smi` says meanwhile. Tensors
are bfloat16, random normal, and larger than the L2.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import time
from collections.abc import Callable, Iterator
from statistics import median

import torch

from benchmarks.products import PRODUCTS, calls_of, captured, product
from htile.tune.timing import Contenders, Times, turns

WARM_UP = 0.2  # seconds of load before the launches that count
REST = 0.01  # seconds before a launch; products take less than a fifth of that
BATCH = 8  # rounds after which the host waits for the GPU
CONTENDERS = ("htile", "htile (K, N)", "quack")
QUERY = ("nvidia-smi", "--query-gpu=clocks.sm,power.draw.instant",
         "--format=csv,noheader,nounits", "--loop-ms=20")  # fmt: skip


class Meter:
    """The clock of the multiprocessors in MHz and the power in W, while a block runs."""

    def __init__(self) -> None:
        self.text = ""

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Ask for both until the block is left; nothing is known without `nvidia-smi`."""
        command = [*QUERY, f"--id={torch.cuda.current_device()}"]
        try:
            asked = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        except FileNotFoundError:
            yield
            return
        try:
            yield
        finally:
            asked.terminate()
            self.text = asked.communicate()[0]

    @property
    def found(self) -> tuple[float, float] | None:
        """The medians of both; None if there are none."""
        return readings(self.text)


def readings(text: str) -> tuple[float, float] | None:
    """The medians of the columns of numbers; a last line that was cut off does not count."""
    pairs = []
    for line in text.splitlines(keepends=True):
        values = line.split(",")
        with contextlib.suppress(ValueError):
            if line.endswith("\n") and len(values) == 2:
                pairs.append([float(value) for value in values])
    return tuple(median(column) for column in zip(*pairs, strict=True)) if pairs else None


def timed(call: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    """The events before and after a launch."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    stop.record()
    return start, stop


def sustained(calls: Contenders, seconds: float, meter: Meter) -> Times:
    """The microseconds of launches that follow each other without a pause."""
    found, begun = {name: [] for name in calls}, time.monotonic()
    names = list(calls)

    def load(until: float, kept: dict | None) -> None:
        first = 0
        while time.monotonic() < until:
            for _ in range(BATCH):
                first += 1
                for k in range(len(names)):
                    name = names[(first + k) % len(names)]
                    pair = timed(calls[name])
                    if kept is not None:
                        kept[name].append(pair)
            torch.cuda.synchronize()

    load(begun + WARM_UP, None)
    with meter.running():
        load(begun + WARM_UP + seconds, found)
    return {name: [a.elapsed_time(b) * 1e3 for a, b in pairs] for name, pairs in found.items()}


def rested(calls: Contenders, rounds: int, meter: Meter) -> Times:
    """The microseconds of launches that each follow a rest."""
    found = {name: [] for name in calls}
    with meter.running():
        for name, counts in turns(calls, rounds):
            torch.cuda.synchronize()
            time.sleep(REST)
            pair = timed(calls[name])
            if counts:
                found[name].append(pair)
        torch.cuda.synchronize()
    return {name: [a.elapsed_time(b) * 1e3 for a, b in pairs] for name, pairs in found.items()}


def line(size: tuple[int, int, int], load: str, times: Times, meter: Meter) -> str:
    """A line of the table."""
    us = {name: median(each) for name, each in times.items()}
    whole = us.pop("cublas")
    m, n, k = size
    clock, power = (f"{value:.0f}" for value in meter.found) if meter.found else ("–", "–")
    told = [f"{whole / us[name]:.3f}" if name in us else "–" for name in CONTENDERS]
    speed = f"{2e-6 * m * n * k / whole:.0f}"
    return f"| {' | '.join([f'{m}x{n}x{k}', load, f'{whole:.1f}', speed, clock, power, *told])} |"


def main(arguments: list[str] | None = None) -> None:
    """Print a table with two lines for each size."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.anchors",
                                     description=__doc__.split("\n")[0])  # fmt: skip
    parser.add_argument("--sizes", nargs="+", metavar="MxNxK",
                        default=["x".join(map(str, size)) for size in PRODUCTS])  # fmt: skip
    parser.add_argument("--seconds", type=float, default=0.5, help="of sustained load")
    parser.add_argument("--rounds", type=int, default=15, help="with rests")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.exit(1, "this benchmark needs a GPU\n")
    torch.manual_seed(0)
    names = ["M x N x K", "load", "cuBLAS, us", "TFLOP/s", "MHz", "W", *CONTENDERS]
    print(f"| {' | '.join(names)} |\n" + "|---" * len(names) + "|", flush=True)
    for text in options.sizes:
        size = tuple(map(int, text.split("x")))
        (cell,) = product(*size)
        calls = {"cublas": cell.bare, **calls_of(cell, list(CONTENDERS))}
        graphs = {name: captured(call) for name, call in calls.items()}
        for load in ("sustained", "rests"):
            meter = Meter()
            if load == "rests":
                times = rested(graphs, options.rounds, meter)
            else:
                times = sustained(graphs, options.seconds, meter)
            print(line(size, load, times, meter), flush=True)


if __name__ == "__main__":
    main()

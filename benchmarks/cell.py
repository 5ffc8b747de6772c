"""One cell: make every contender, check it, then time those that are right against each other."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import limit
from benchmarks.check import Sample
from benchmarks.contenders import PARTS, build, failures
from benchmarks.kernels import DTYPES, LENIENT, Kernel
from benchmarks.results import Job, key, record
from htile.build.cubin import Resources

OURS = ("htile", "handwritten")


def size(text: str) -> tuple[int, int]:
    """`32768x4096` as (32768, 4096)."""
    rows, _, columns = text.partition("x")
    if not (rows.isdecimal() and columns.isdecimal() and int(rows) and int(columns)):
        raise argparse.ArgumentTypeError(f"{text!r} is no cell such as 32768x4096")
    return int(rows), int(columns)


@dataclass(frozen=True)
class Method:
    """How functions are timed: `wrap` each one, then `measure` them all for some rounds."""

    measure: Callable
    wrap: Callable[[Callable], Callable] = lambda call: call

    def at_once(self, contenders: dict[str, Callable], rounds: int) -> dict[str, list[float]]:
        """`wrap` and `measure` together."""
        return self.measure({n: self.wrap(call) for n, call in contenders.items()}, rounds)


def compare(
    kernel: Kernel,
    args: tuple,
    names: tuple[str, ...],
    method: Method,
    rounds: int,
    say: Callable[[str], None] = lambda text: None,
) -> tuple[dict[str, dict], str | None]:
    """Results of every contender by name, as a record has them, and which limit kernel it was.

    One that fails, is not installed or is wrong has the reason in place of its times.
    """
    results: dict[str, dict] = {}
    ready: dict[str, Callable] = {}
    chosen = None
    failure = failures()
    if {"compile", "autotune"} & set(names):
        torch._dynamo.reset()  # or it stops compiling after some cells
    with torch.no_grad():
        sample = Sample(kernel, args)
        for name in names:
            say(f"{name}: preparing and checking")
            try:
                if name == "limit":
                    best = limit.fastest(limit.candidates(kernel, args), method.at_once)
                    chosen, call = best.name, best.call
                    results[name] = {}
                else:
                    call = build(name, kernel, args)
                    results[name] = {}
                    if name not in PARTS:
                        bound = kernel.tolerance if name in OURS else LENIENT
                        error = sample.check(call(), bound)
                        results[name] = {"error_of_bound": error}
                    if name == "htile" and args[0].is_cuda:
                        results[name] |= resources(kernel, args)
                ready[name] = method.wrap(call)
            except failure as error:
                results[name] = {"error": reason(error)}
                if args[0].device.type == "cuda":
                    torch.cuda.synchronize()  # a GPU that an error has broken ends the run here
        if ready:
            say(f"timing {', '.join(ready)}")
            for name, times in method.measure(ready, rounds).items():
                results[name]["times"] = [round(t, 4) for t in times]
    return results, chosen


def resources(kernel: Kernel, args: tuple) -> dict[str, float]:
    """What the emitted kernel uses, and its occupancy."""
    found = kernel.function.inspect(*args).resources
    gpu = torch.cuda.get_device_properties(args[0].device)
    return {
        "registers": found.registers,
        "stack": found.stack,
        "shared": found.static_shared + found.dynamic_shared,
        "occupancy": occupancy(found, gpu),
    }


def occupancy(found: Resources, gpu) -> float:
    """Resident threads over the most, by registers, shared memory and threads.

    As the CUDA C++ Programming Guide has it: registers are given to warps by 256, and 1 KiB of
    shared memory a thread block is the system's.
    """
    warps = found.threads // 32
    blocks = min(
        gpu.regs_per_multiprocessor // (-(-found.registers // 8) * 256 * warps),
        gpu.shared_memory_per_multiprocessor // (found.static_shared + found.dynamic_shared + 1024),
        gpu.max_threads_per_multi_processor // found.threads,
    )
    return blocks * found.threads / gpu.max_threads_per_multi_processor


def reason(error: BaseException) -> str:
    """The first line of a message, with its kind where that says more."""
    text = str(error).strip().split("\n")[0][:200]
    plain = type(error).__name__ in ("Absent", "RuntimeError") and text
    return text if plain else f"{type(error).__name__}: {text}"


def job(
    suite: str, kernel: Kernel, dtype: str, m: int, n: int, names: tuple[str, ...], method: Method,
    rounds: int,
) -> Job:  # fmt: skip
    """The job of one kernel at one size."""
    cell = key(suite, kernel.name, dtype, m, n)

    def run(say):
        moved = kernel.bytes(m, n, DTYPES[dtype])
        say("making the arguments")
        try:
            args = kernel.arguments(m, n, DTYPES[dtype], "cuda")
            results, chosen = compare(kernel, args, names, method, rounds, say)
        except torch.cuda.OutOfMemoryError as error:
            results, chosen = {name: {"error": reason(error)} for name in names}, None
        return [record(cell, results, "us", bytes=moved, limit=chosen)]

    return Job(f"{suite} {kernel.name} {dtype} {m}x{n}", (cell,), tuple(names), run)

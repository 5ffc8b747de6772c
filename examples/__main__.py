"""`make demo`: every example, run and checked; on a GPU with its speed beside a copy.

Without a GPU the examples run through the reference, and each is compiled for sm_90a all the same.
"""

import time
from statistics import median

import torch

from examples import NAMES, load
from htile.testing import assert_close

SHAPE = 64, 4096  # checked against float64
LARGE = 32768, 4096  # timed


def main():
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda" if on_gpu else "cpu")
    if on_gpu:
        print(f"{torch.cuda.get_device_name()}: each kernel against float64, then its speed\n")
    else:
        print("No GPU: each example runs through the reference, and is compiled for sm_90a\n")
    for name in NAMES:
        function, arguments = load(name)
        args = arguments(*SHAPE, torch.bfloat16, device)
        worst = assert_close(function, function(*args), *args)
        line = f"{name:<15} error {worst:4.2f} of the bound"
        print(f"{line}, {_speed(function, arguments) if on_gpu else _compiled(function, args)}")
    _show_softmax(device)


def _compiled(function, args) -> str:
    kernel = function.inspect(*args, arch="sm_90a")
    start = time.perf_counter()
    resources = kernel.resources
    seconds = time.perf_counter() - start
    stages = kernel.plan.stages
    return f"stages: {stages}, registers: {resources.registers}, compiled in {seconds:.2f} s"


def _speed(function, arguments) -> str:
    from benchmarks.timing import interleave

    args = arguments(*LARGE, torch.bfloat16, "cuda")
    moved = sum(function.inspect(*args).plan.bytes_per_row()) * LARGE[0]
    source = torch.empty(moved // 2, dtype=torch.int8, device="cuda")
    copy = torch.empty_like(source)
    times = interleave(
        {"kernel": lambda: function(*args), "copy": lambda: copy.copy_(source)}, rounds=20
    )
    kernel, copied = (moved / median(times[name]) / 1e3 for name in ("kernel", "copy"))
    shape = "x".join(map(str, LARGE))
    return f"{kernel:.0f} GB/s at {shape} bf16, a copy of as many bytes {copied:.0f}"


def _show_softmax(device) -> None:
    function, arguments = load("softmax")
    kernel = function.inspect(*arguments(*SHAPE, torch.bfloat16, device))
    folder = kernel.save("dump")
    print(f"\n{kernel.graph}\n\n{kernel.plan}\n\n{kernel.arch}: {kernel.resources}")
    print(f"The emitted source is {folder}/kernel.py; PTX and graphs lie beside it.")


if __name__ == "__main__":
    main()

"""Times the kernels of `examples/gallery` beside a copy of the same bytes, at their natural sizes.

    python -m benchmarks.gallery [NAME ...] [--rounds 11]

A share of 1 means that the kernel takes as long as a copy of as many bytes as it must read and
write. There are as many rows as make 64 MiB or more.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median

import torch
from torch.utils import _pytree as pytree

from benchmarks.contenders import failures
from benchmarks.limit import copy_of
from examples import gallery
from htile.build.compile import building
from htile.tune.timing import interleave

LEAST_BYTES = 64 << 20  # of what a kernel reads; smaller tensors would stay in the L2 cache
MOST_ROWS = 1 << 18
ARCH = "sm_90a"


def rows_of(module) -> int:
    """As many rows as read LEAST_BYTES."""
    m, n = module.SIZE
    args = module.arguments(m, n, torch.bfloat16, "meta")
    read = sum(each.nbytes for each in args if isinstance(each, torch.Tensor))
    return min(max(m, m * LEAST_BYTES // max(read, 1)), MOST_ROWS)


def request(name: str, variant: dict) -> tuple[str, str, str]:
    """The kernel of one cell, as `build` takes it."""
    module = gallery.load(name)
    args = module.arguments(rows_of(module), module.SIZE[1], torch.bfloat16, "meta")
    kernel = getattr(module, name).inspect(*args, arch=ARCH, **variant)
    return kernel.source, kernel.lowered.function, ARCH


def measure(name: str, variant: dict, rounds: int) -> tuple[tuple[int, int], float, float]:
    """Rows and elements, the kernel's microseconds, and those of the copy."""
    module = gallery.load(name)
    f, size = getattr(module, name), (rows_of(module), module.SIZE[1])
    args = module.arguments(*size, torch.bfloat16, "cuda")
    outs = f(*args, **variant)
    tensors = [t for t in (*args, *pytree.tree_leaves(outs)) if isinstance(t, torch.Tensor)]
    copy = copy_of(sum(t.nbytes for t in tensors), tensors[0].device)
    contenders = {"kernel": lambda: f(*args, **variant, out=outs), "copy": copy.call}
    times = interleave(contenders, rounds)
    return size, median(times["kernel"]), median(times["copy"])


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels; by default all")
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args(arguments)
    unknown = [name for name in options.names if name not in gallery.NAMES]
    if unknown:
        parser.error(f"no such kernel: {', '.join(unknown)}")
    names = options.names or gallery.NAMES
    cells = [(name, each) for name in names for each in gallery.variants(name)]
    requests = {k: request(*cell) for k, cell in enumerate(cells)}
    say("| kernel | rows x N | microseconds | share of a copy |\n|---|---|---|---|")
    with building([*requests.values()]) as built:
        for k, (name, variant) in enumerate(cells):
            label = " ".join([name, *(f"{key}={value}" for key, value in variant.items())])
            try:
                built(requests[k])
                size, us, copied = measure(name, variant, options.rounds)
            except (*failures(), torch.cuda.OutOfMemoryError) as error:
                say(f"| {label} | {type(error).__name__} | | |")
                continue
            say(f"| {label} | {size[0]}x{size[1]} | {us:.1f} | {copied / us:.2f} |")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()

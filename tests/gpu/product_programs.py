"""Runs random functions with products on a GPU: `python -m tests.gpu.product_programs 0:64`.

Their kernels are compiled in workers that are forked before CUDA is used. It prints how many
programs were right. `test_products.py` starts it in a process of its own with a time limit.
"""

import multiprocessing
import os
import sys
import time
from concurrent.futures import ProcessPoolExecutor

import torch

from htile.run.products.kernels import ProductKernel
from tests.generated.measure import check
from tests.generated.products import program
from tests.generated.test_on_gpu import poisoned


def compiled(seed: int) -> int:
    """Compile what a program needs; how many kernels of products it has."""
    p = program(seed, "all")
    shown = p.function().inspect(*p.arguments(filled=False))
    shown.build_ahead()
    return sum(isinstance(kernel, ProductKernel) for kernel in shown.kernels)


def main(low: int, high: int) -> None:
    """Compile, run and check the programs of some seeds."""
    seeds, start = range(low, high), time.monotonic()
    context = multiprocessing.get_context("fork")
    with ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,)) as pool:
        kernels = sum(pool.map(compiled, seeds))
    print(f"{kernels} kernels of products compiled in {time.monotonic() - start:.0f} s", flush=True)
    for seed in seeds:
        p = program(seed, "all")
        f, args = p.function(), p.arguments("cuda")
        try:
            check(p, f, poisoned(f, args), args, "cuda", elements=1 << 16, fair=True)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{p}") from None
    print(f"{len(seeds)} programs right in {time.monotonic() - start:.0f} s")


if __name__ == "__main__":
    main(*map(int, sys.argv[1].split(":")))

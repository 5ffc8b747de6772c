"""Times the kernels of `examples/gallery` beside a copy of the same bytes, at their natural sizes.

    python -m benchmarks.gallery [NAME ...] [--compile] [--rounds 11] [--workers 4]

A share of 1 means that the kernel takes as long as a copy of as many bytes as it must read and
write. There are as many rows as make 64 MiB or more. `--compile` adds the share that torch.compile
reaches with the same function over all rows, by `torch.vmap` in float32.

Functions with products (`gallery.PRODUCTS`) are timed where they are named. They have the rows that
`SIZE` says, and torch.compile gets them in their own dtype. A copy says little of them:
`benchmarks.products` has cuBLAS beside them.

Processes compile side by side. Then each times its kernels while the others wait.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from statistics import median

import torch
from torch.utils import _pytree as pytree

from benchmarks.contenders import failures
from benchmarks.limit import copy_of
from examples import gallery
from htile.build.compile import build_all
from htile.frontend.graph import Role
from htile.frontend.roles import classify
from htile.tune.timing import interleave

LEAST_BYTES = 64 << 20  # of what a kernel reads; smaller tensors would stay in the L2 cache
MOST_ROWS = 1 << 18
ARCH = "sm_90a"
NARROW = (torch.bfloat16, torch.float16)  # what torch.compile is given in float32


@dataclass(frozen=True)
class Cell:
    """A kernel of the gallery with one choice of its keyword arguments."""

    name: str
    variant: dict

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.variant.items())])

    @property
    def function(self) -> Callable:
        return getattr(gallery.load(self.name), self.name)

    def arguments(self, device: str) -> tuple:
        """As many rows as read LEAST_BYTES."""
        module = gallery.load(self.name)
        m, *sizes = module.SIZE
        args = module.arguments(m, *sizes, torch.bfloat16, "meta")
        read = sum(each.nbytes for each in args if isinstance(each, torch.Tensor))
        rows = min(max(m, m * LEAST_BYTES // max(read, 1)), MOST_ROWS)
        return module.arguments(rows, *sizes, torch.bfloat16, device)

    def requests(self) -> list[tuple[str, str, str]]:
        """Its kernels, as `build` takes them."""
        shown = self.function.inspect(*self.arguments("meta"), arch=ARCH, **self.variant)
        return [(kernel.source, kernel.lowered.function, ARCH)
                for kernel in getattr(shown, "kernels", (shown,))]  # fmt: skip


def batched(cell: Cell, args: tuple) -> Callable[..., list[torch.Tensor]]:
    """The cell's function over all rows of its tensors by `torch.vmap`, in float32."""
    signature = cell.function._signature
    values = signature.bind(args, cell.variant)
    call = classify(signature, values)
    specs = [s for s, v in zip(call.specs, values, strict=True) if _is_tensor(v)]
    dims = tuple(0 if spec.role in (Role.ROW, Role.PER_ROW) else None for spec in specs)
    body, numbers = cell.function.__wrapped__, [v for v in values if not _is_tensor(v)]
    order = [_is_tensor(v) for v in values]
    dtypes = [each.dtype for each in pytree.tree_leaves(cell.function(*args, **cell.variant))]
    count = math.prod(call.lead)
    has_products = any(spec.role is Role.MATRIX for spec in specs)

    def rows_of(t, spec):
        wide = t.float() if t.dtype in NARROW and not has_products else t
        if spec.role not in (Role.ROW, Role.PER_ROW):
            return wide
        return wide.expand((*call.lead, *spec.inner)).reshape((count, *spec.inner))

    def one_row(*tensors):
        left, others = iter(tensors), iter(numbers)
        return body(*(next(left if is_tensor else others) for is_tensor in order))

    def over_rows(*tensors):
        given = [rows_of(t, spec) for t, spec in zip(tensors, specs, strict=True)]
        results = zip(pytree.tree_leaves(torch.vmap(one_row, dims)(*given)), dtypes, strict=True)
        return [t.to(dtype).reshape((*call.lead, *t.shape[1:])) for t, dtype in results]

    return over_rows


def _is_tensor(value: object) -> bool:
    return isinstance(value, torch.Tensor)


@dataclass
class Worker:
    """Times its share of the cells, when all workers have compiled theirs."""

    cells: Sequence[Cell]
    with_compile: bool
    rounds: int
    seconds: float  # after which nothing more is compiled by torch
    compiled: dict[str, Callable | str] = field(default_factory=dict)  # or why there is none

    def compile(self) -> None:
        """Have torch compile the functions, each with the tensors that it will be called with."""
        end = time.monotonic() + self.seconds
        for cell in self.cells if self.with_compile else ():
            if time.monotonic() > end:
                self.compiled[cell.label] = "no time left"
                continue
            try:
                args = cell.arguments("cuda")
                function = torch.compile(batched(cell, args), dynamic=False)
                function(*filter(_is_tensor, args))
                self.compiled[cell.label] = function
            except (*failures(), torch.cuda.OutOfMemoryError) as error:
                self.compiled[cell.label] = type(error).__name__
                print(cell.label, str(error)[-600:], file=sys.stderr)
            args = None
            torch.cuda.empty_cache()

    def row(self, cell: Cell) -> str:
        """The line of the table of one cell."""
        try:
            args = cell.arguments("cuda")
            f, variant = cell.function, cell.variant
            outs = f(*args, **variant)
            contenders = {"kernel": lambda: f(*args, **variant, out=outs)}
            tensors = [*filter(_is_tensor, (*args, *pytree.tree_leaves(outs)))]
            copy = copy_of(sum(t.nbytes for t in tensors), tensors[0].device)
            contenders["copy"] = copy.call
            function = self.compiled.get(cell.label)
            if callable(function):
                given = [*filter(_is_tensor, args)]
                contenders["compile"] = lambda: function(*given)
            times = {k: median(v) for k, v in interleave(contenders, self.rounds).items()}
        except (*failures(), torch.cuda.OutOfMemoryError) as error:
            return f"| {cell.label} | {type(error).__name__} | | |"
        finally:
            torch.cuda.empty_cache()
        rows = max(t.shape[:-1].numel() for t in tensors)
        columns = [cell.label, str(rows), f"{times['kernel']:.1f}"]
        columns.append(f"{times['copy'] / times['kernel']:.2f}")
        if self.with_compile:
            found = times.get("compile")
            columns.append(f"{times['copy'] / found:.2f}" if found else str(function))
        return f"| {' | '.join(columns)} |"

    def run(self, said, compiled, turn) -> None:
        """`compiled` is a barrier of all workers; the one that has `turn` may use the GPU."""
        torch.set_default_device("cuda")  # of torch.arange in a function
        # All cells share the code of `over_rows`; beyond the limit torch runs it as it is.
        torch._dynamo.config.recompile_limit = 1 << 20
        torch._dynamo.config.accumulated_recompile_limit = 1 << 20
        self.compile()
        compiled.wait()
        for cell in self.cells:
            with turn:
                said.put(self.row(cell))


def lines_of(said: Queue, processes: Sequence[BaseProcess], count: int) -> Iterator[str]:
    """So many lines of the workers. If one of them dies, the others are ended: they wait for it."""
    for _ in range(count):
        while True:
            is_dead = any(process.exitcode for process in processes)
            try:
                yield said.get(timeout=1)
                break
            except queue.Empty:
                if is_dead:
                    for process in processes:
                        process.terminate()
                    raise SystemExit("a worker has died; its error is above") from None


def main(arguments: list[str] | None = None, say: Callable[[str], None] = print) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gallery", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="kernels; by default all")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--compile", action="store_true", help="beside torch.compile")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile and time")
    parser.add_argument("--seconds", type=float, default=600.0, help="that torch.compile has")
    options = parser.parse_args(arguments)
    known = gallery.NAMES + gallery.PRODUCTS
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no such kernel: {', '.join(unknown)}")
    names = options.names or gallery.NAMES
    cells = [Cell(name, each) for name in names for each in gallery.variants(name)]
    build_all([request for cell in cells for request in cell.requests()])
    more = " torch.compile |" if options.compile else ""
    say(f"| kernel | rows | microseconds | share of a copy |{more}")
    say("|---" * (5 if options.compile else 4) + "|")
    context = multiprocessing.get_context("spawn")
    workers = min(options.workers, len(cells))
    said, barrier, turn = context.Queue(), context.Barrier(workers), context.Lock()
    settings = options.compile, options.rounds, options.seconds
    shares = [Worker(cells[k::workers], *settings) for k in range(workers)]
    processes = [context.Process(target=w.run, args=(said, barrier, turn)) for w in shares]
    for process in processes:
        process.start()
    for line in lines_of(said, processes, len(cells)):
        say(line)
    for process in processes:
        process.join()


if __name__ == "__main__":
    main()

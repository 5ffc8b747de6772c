"""Times the kernels of `examples/gallery` beside a kernel that moves the same bytes.

    python -m benchmarks.gallery [NAME ...] [--compile] [--peers] [--rounds 11] [--workers 4]
    python -m benchmarks.gallery [NAME ...] --bounds

A share of 1 means that the kernel takes as long as one that reads and writes as many bytes as it
must (`limit.of_mix`). There are as many rows as make 64 MiB or more. `--compile` adds the share
that torch.compile reaches with the same function over all rows, by `torch.vmap` in float32, and
`--peers` those of quack and Liger, where they have the kernel.

Each cell says what bounds it: memory, instructions or waits (`gallery_bounds`). Of those bound by
instructions it says which share of that bound the kernel reaches. `--bounds` prints what bounds
them without a GPU. `--plans FILE` times other plans beside the default: the file has, by label, the
properties of one, as JSON.

Functions with products (`gallery.PRODUCTS`) are timed where they are named. They have the rows that
`SIZE` says, and torch.compile gets them in their own dtype. A copy says little of them:
`benchmarks.products` has cuBLAS beside them.

Processes compile side by side. Then each times its kernels while the others wait.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import queue
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.process import BaseProcess
from multiprocessing.queues import Queue
from pathlib import Path
from statistics import median

import torch
from torch.utils import _pytree as pytree

from benchmarks import gallery_bounds
from benchmarks.contenders import failures
from benchmarks.gallery_peers import PEERS
from benchmarks.limit import fastest, of_mix
from examples import gallery
from htile.build.compile import build_all
from htile.errors import HTileError
from htile.frontend.graph import Role
from htile.frontend.roles import classify
from htile.tune.timing import interleave

LEAST_BYTES = 64 << 20  # of what a kernel reads; smaller tensors would stay in the L2 cache
MOST_ROWS = 1 << 21
ARCH = "sm_90a"
COMPILE, OTHER = "torch.compile", "other plan"
NARROW = (torch.bfloat16, torch.float16)  # what torch.compile is given in float32


@dataclass(frozen=True)
class Cell:
    """A kernel of the gallery with one choice of its keyword arguments, by default as planned."""

    name: str
    variant: dict
    plan: dict = field(default_factory=dict)

    @property
    def label(self) -> str:
        return " ".join([self.name, *(f"{key}={value}" for key, value in self.variant.items())])

    @property
    def function(self) -> Callable:
        found = getattr(gallery.load(self.name), self.name)
        return found.with_plan(**self.plan) if self.plan else found

    def arguments(self, device: str) -> tuple:
        """As many rows as read LEAST_BYTES."""
        module = gallery.load(self.name)
        m, *sizes = module.SIZE
        args = module.arguments(m, *sizes, torch.bfloat16, "meta")
        read = sum(each.nbytes for each in args if isinstance(each, torch.Tensor))
        rows = min(max(m, m * LEAST_BYTES // max(read, 1)), MOST_ROWS)
        return module.arguments(rows, *sizes, torch.bfloat16, device)

    def bounds(self) -> gallery_bounds.Bounds | None:
        """What bounds it; nothing is known of functions with products."""
        if self.name in gallery.PRODUCTS:
            return None
        return gallery_bounds.bounds(self.function, self.arguments("meta"), self.variant, ARCH)

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


def line(found: dict, contenders: Sequence[str]) -> str:
    """A record as a line of the table."""
    us, kind = found["us"], found.get("kind", "")
    columns = [found["label"], str(found.get("rows", "")), f"{us['kernel']:.1f}"]
    columns.append(f"{us['limit'] / us['kernel']:.2f}")
    if kind == "instructions":  # it can take no less than memory does
        kind += f", {max(found['issued'], us['limit']) / us['kernel']:.2f} of it"
    columns.append(kind)
    for name in contenders:
        absent = found["absent"].get(name, "")
        columns.append(f"{us['limit'] / us[name]:.2f}" if name in us else absent)
    return f"| {' | '.join(columns)} |"


@dataclass
class Worker:
    """Times its share of the cells, when all workers have compiled theirs."""

    cells: Sequence[Cell]
    contenders: Sequence[str]  # beside the kernel: torch.compile, the peers, another plan
    rounds: int
    seconds: float  # after which nothing more is compiled by torch
    plans: dict[str, dict] = field(default_factory=dict)
    compiled: dict[str, Callable | str] = field(default_factory=dict)  # or why there is none

    def compile(self) -> None:
        """Have torch compile the functions, each with the tensors that it will be called with."""
        end = time.monotonic() + self.seconds
        for cell in self.cells if COMPILE in self.contenders else ():
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

    def beside(self, cell: Cell, args: tuple, outs: object) -> dict[str, Callable | str]:
        """What is timed beside the kernel, by name; why not, of what there is none."""
        given, found = [*filter(_is_tensor, args)], {}
        for name in self.contenders:
            if name == COMPILE:
                function = self.compiled.get(cell.label, "")
            elif name == OTHER:
                other = replace(cell, plan=self.plans.get(cell.label, {}))
                planned = partial(other.function, *args, **cell.variant, out=outs)
                found[name] = planned if other.plan else ""
                continue
            else:
                function = PEERS[name](cell.name, cell.variant) or ""
            found[name] = partial(function, *given) if callable(function) else function
        return found

    def timed(self, cell: Cell) -> dict:
        """The microseconds of a cell, by what took them, and what bounds it."""
        args = cell.arguments("cuda")
        outs = cell.function(*args, **cell.variant)
        beside = {}
        for name, call in self.beside(cell, args, outs).items():
            try:
                beside[name] = call if isinstance(call, str) else (call(), call)[1]
            except (*failures(), HTileError, torch.cuda.OutOfMemoryError) as error:
                beside[name] = type(error).__name__
                print(cell.label, name, str(error)[-600:], file=sys.stderr)
        bounds, tensors = cell.bounds(), [*filter(_is_tensor, (*args, *pytree.tree_leaves(outs)))]
        total = sum(t.nbytes for t in tensors)
        read, written = (bounds.read, bounds.written) if bounds else (total // 2, total // 2)
        limit = fastest(of_mix(read, written, tensors[0].device), interleave)
        contenders = {"kernel": lambda: cell.function(*args, **cell.variant, out=outs)}
        contenders |= {"limit": limit.call} | {k: v for k, v in beside.items() if callable(v)}
        times = {name: median(us) for name, us in interleave(contenders, self.rounds).items()}
        found = {"label": cell.label, "us": times, "limit": limit.name}
        found["absent"] = {name: why for name, why in beside.items() if isinstance(why, str)}
        if bounds is not None:
            found |= {"rows": bounds.rows, "read": read, "written": written, "kind": bounds.kind}
            found["issued"] = bounds.issued / 1e3
        return found

    def row(self, cell: Cell) -> tuple[str, dict]:
        """The line of the table of one cell, and the same as a record."""
        try:
            found = self.timed(cell)
        except (*failures(), torch.cuda.OutOfMemoryError) as error:
            return f"| {cell.label} | {type(error).__name__} |" + " |" * 4, {"label": cell.label}
        finally:
            torch.cuda.empty_cache()
        return line(found, self.contenders), found

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


def lines_of(said: Queue, processes: Sequence[BaseProcess], count: int) -> Iterator:
    """What the workers say, so often. If one dies, the others are ended: they wait for it."""
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
    parser.add_argument("--peers", action="store_true", help="beside quack and Liger")
    parser.add_argument("--plans", type=Path, help="beside these plans")
    parser.add_argument("--bounds", action="store_true", help="what bounds them; no GPU needed")
    parser.add_argument("--json", type=Path, help="where the records go")
    parser.add_argument("--workers", type=int, default=1, help="processes that compile and time")
    parser.add_argument("--seconds", type=float, default=600.0, help="that torch.compile has")
    options = parser.parse_args(arguments)
    known = gallery.NAMES + gallery.PRODUCTS
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"no such kernel: {', '.join(unknown)}")
    names = options.names or gallery.NAMES
    cells = [Cell(name, each) for name in names for each in gallery.variants(name)]
    requests = [request for cell in cells for request in cell.requests()]
    if options.bounds:
        build_all(requests, options.workers)
        found = [(cell.label, cell.bounds()) for cell in cells if cell.name in gallery.NAMES]
        for text in gallery_bounds.table(found):
            say(text)
        return
    plans = json.loads(options.plans.read_text()) if options.plans else {}
    for cell in cells:
        if cell.label in plans:
            requests += replace(cell, plan=plans[cell.label]).requests()
    build_all(requests)
    contenders = [COMPILE] * options.compile + [*PEERS] * options.peers + [OTHER] * bool(plans)
    heads = ["kernel", "rows", "microseconds", "share of the limit", "bound by", *contenders]
    say(f"| {' | '.join(heads)} |")
    say("|---" * len(heads) + "|")
    context = multiprocessing.get_context("spawn")
    workers = min(options.workers, len(cells))
    said, barrier, turn = context.Queue(), context.Barrier(workers), context.Lock()
    settings = contenders, options.rounds, options.seconds, plans
    shares = [Worker(cells[k::workers], *settings) for k in range(workers)]
    processes = [context.Process(target=w.run, args=(said, barrier, turn)) for w in shares]
    for process in processes:
        process.start()
    records = []
    for text, record in lines_of(said, processes, len(cells)):
        say(text)
        records.append(record)
    for process in processes:
        process.join()
    if options.json:
        options.json.write_text(json.dumps(records, indent=1))


if __name__ == "__main__":
    main()

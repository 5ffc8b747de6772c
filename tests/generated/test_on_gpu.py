"""1000 random functions on the GPU against the oracle, over sizes, layouts and plans.

A quarter of them run a plan drawn from all that there are, the others the default one. Workers that
are forked before CUDA is used trace, choose and compile. HTILE_PROGRAMS=1000:3000 in the
environment runs others.
"""

import multiprocessing
import os
import re
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.build.arch import arch_of_capability
from htile.build.compile import build
from htile.errors import HTileError
from htile.frontend.ops import SCANS, Op
from htile.lower import enumerate_plans
from htile.lower.steps import Home
from htile.testing import assert_close

from . import movements
from .measure import check
from .programs import LONG, program

pytestmark = pytest.mark.gpu

FOUND = ()  # seeds that once failed; a change of programs.py makes other programs of them
PROGRAMS = range(*map(int, os.environ.get("HTILE_PROGRAMS", "0:1000").split(":")))
RARE = 1691, 2491, 2537  # seeds of loops over rows that are read up to a limit, which few are
SEEDS = (*PROGRAMS, *FOUND, *RARE)
WITH_TABLES = range(60)  # seeds of random functions of parts, which look rows of a table up
EXACT = 0.97  # of the programs keep the strict measure

CAPABILITIES = {
    "column numbers": {Op.INDEX}, "elements at indices": {Op.TAKE}, "rows of tables": {Op.LOOKUP},
    "ranks": {Op.KEY}, "groups": {Op.GROUPED}, "pairs": {Op.UNBUNDLE, Op.BUNDLE}, "scans": SCANS,
    "random numbers": {Op.PHILOX, Op.WORD}, "bits": {Op.XOR, Op.LSHIFT, Op.RSHIFT},
}  # fmt: skip
HELD_ONLY = {"scans"}
# What a CPU checks: on a GPU torch's log2 of a power of two is not exact, not even in float64.
EXACT_LOG2 = re.compile(r"floor\(torch\.log2|log2\(\)\.ceil")

KINDS = Counter()
beyond = []  # seeds of results beyond the strict measure


def forced(seed, arch=None):
    """The program, its function, and the properties of the plan that it is to have."""
    p = program(seed, "all")
    f = p.function()
    if p.variant is None:
        return p, f, {}
    kernel = f.inspect(*p.arguments(filled=False), arch=arch)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    plan = plans[int(p.variant * len(plans))]
    wanted = plan.properties()
    return p, f.with_plan(**wanted), wanted


def prepared(seed, arch):
    """In a worker: (source, host function, forced properties, kinds of the plan); None: no plan."""
    try:
        p, f, wanted = forced(seed, arch)
        # empty CPU tensors: nothing is read, and pointers and strides are those of the real ones
        kernel = f.inspect(*p.arguments(filled=False), arch=arch)
    except HTileError:
        return None  # the test fails by itself
    return kernel.source, kernel.lowered.function, wanted, kinds(kernel.plan)


def with_tables(seed):
    """A random function that looks rows of a table up; of some, loops work on the rows."""
    return movements.program(seed, "long" if seed % 3 == 0 else "all", tables=True)


def prepared_with_tables(seed, arch):
    """As `prepared`, with the default plan, or a loop where that holds a long row."""
    p = with_tables(seed)
    args = p.arguments(lead=(5,), filled=False)
    try:
        kernel, wanted = p.function().inspect(*args, arch=arch), {}
        if seed % 3 == 0 and kernel.graph.n > 10000:
            wanted = {"form": "loops"}
            kernel = p.function().with_plan(**wanted).inspect(*args, arch=arch)
    except HTileError:
        return None
    return kernel.source, kernel.lowered.function, wanted, kinds(kernel.plan)


def kinds(plan):
    """What a plan is, for counting."""
    num, place = plan.numerics, plan.placement
    tile = plan.elements_per_thread * num.threads_per_row * num.cluster_n
    found = [
        f"loader {place.loader}", f"columns {place.columns}", f"copy bytes {place.copy_bytes}",
        f"cluster {num.cluster_n}", f"threads a row {num.threads_per_row}",
        f"threads {place.num_threads}", f"vector {num.vec_size}", f"stages {plan.stages}",
        "ragged" if tile != plan.graph.n else "even",
        f"row {'long' if plan.graph.n in LONG else 'short'}",
    ]  # fmt: skip
    found += [f"home {home.value}" for home in set(plan.homes.values())]
    return [*found, *(f"{num.form.value}: {each}" for each in ["any", *capabilities(plan.graph)])]


def capabilities(graph):
    """What of the language is in a placed graph."""
    ops, pieces = {node.op for node in graph}, [*graph.inputs, *graph.outputs]
    found = [name for name, some in CAPABILITIES.items() if ops & some]
    found += ["parts"] * any(piece.view is not None for piece in pieces)
    found += ["limits"] * any(i.end is not None for i in graph.inputs)
    narrow = (p.dtype for p in pieces if p.dtype.itemsize == 1 and p.dtype is not torch.bool)
    return [*found, *["8 bits"] * any(narrow)]


def _pool():
    """Workers of one thread each: those of torch do not survive a fork, and are waited for."""
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(os.cpu_count(), context, torch.set_num_threads, (1,))


@cache
def all_prepared(arch):
    with _pool() as pool:
        found = pool.map(partial(prepared, arch=arch), SEEDS, chunksize=8)
        return dict(zip(SEEDS, found, strict=True))


@cache
def all_with_tables(arch):
    with _pool() as pool:
        found = pool.map(partial(prepared_with_tables, arch=arch), WITH_TABLES)
        return dict(zip(WITH_TABLES, found, strict=True))


def jobs(arch):
    """Everything, for the workers of tests/gpu."""
    found = [*all_prepared(arch).values(), *all_with_tables(arch).values()]
    return [(build, (entry[0], entry[1], arch)) for entry in found if entry is not None]


def compile_ahead(arch):
    """The same, where tests/gpu is not run."""
    with _pool() as pool:
        futures = [pool.submit(f, *args) for f, args in dict.fromkeys(jobs(arch))]
    for future in futures:
        future.exception()  # the test that needs it fails by itself; the disk cache has the others


@pytest.mark.parametrize("seed", SEEDS)
def test_program(device, seed):
    arch = arch_here()
    entry = all_prepared(arch)[seed]
    p = program(seed, "all")
    f = p.function()
    if entry is not None and entry[2]:
        f = f.with_plan(**entry[2])
    args = p.arguments(device)
    before = htile.cache_info().compiled
    try:
        result = poisoned(f, args)
        if EXACT_LOG2.search(p.text):
            device = torch.device("cpu")
            result, args = pytree.tree_map(on_cpu, (result, args))
        worst = check(p, f, result, args, device, elements=1 << 16, fair=True)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None
    if worst > 1:
        beyond.append(seed)
    assert htile.cache_info().compiled == before, "the kernel was not compiled ahead"
    KINDS.update(entry[3])


@pytest.mark.parametrize("seed", WITH_TABLES)
def test_program_with_tables(device, seed):
    entry = all_with_tables(arch_here())[seed]
    p = with_tables(seed)
    f, args = p.function(), p.arguments(device, (5,))
    if entry is None:
        with pytest.raises(HTileError, match="pieces"):
            f(*args)
        return
    f = f.with_plan(**entry[2]) if entry[2] else f
    before = htile.cache_info().compiled
    try:
        assert_close(f, poisoned(f, args), *args)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None
    assert htile.cache_info().compiled == before, "the kernel was not compiled ahead"


def on_cpu(value):
    """A tensor on the CPU; other values as they are."""
    return value.cpu() if isinstance(value, torch.Tensor) else value


def arch_here():
    """The name of the architecture here."""
    return arch_of_capability(torch.cuda.get_device_capability()).name


def poisoned(f, args):
    """`f(*args)`, with outputs in which an element that is not written shows."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return f(*args)
    finally:
        torch.use_deterministic_algorithms(before)


def summary():
    """Lines for the end of the run; none where no program ran."""
    groups = {}
    for kind, count in sorted(KINDS.items(), key=lambda item: (len(item[0]), item[0])):
        name, _, value = kind.rpartition(": " if ": " in kind else " ")
        groups.setdefault(name or "tile", []).append(f"{value} {count}")
    lines = [f"generated {name}: {', '.join(counts)}" for name, counts in groups.items()]
    if lines:
        lines.append(f"generated: beyond the strict measure {len(beyond)}: {beyond[:20]}")
    return lines


def test_every_kind_of_plan_is_reached(device):
    """By all of the programs above, however many of them are run; of those few may be inexact."""
    arch = arch_here()
    entries = [*all_prepared(arch).values(), *all_with_tables(arch).values()]
    drawn = Counter(kind for entry in entries if entry is not None for kind in entry[3])
    expected = [f"loader {loader}" for loader in ("shared", "direct")]
    expected += [f"columns {columns}" for columns in ("early", "late")]
    expected += [f"copy bytes {size}" for size in (2, 4, 8, 16)]
    expected += [f"threads a row {2**k}" for k in range(11)]
    expected += [f"threads {2**k}" for k in range(6, 11)]
    expected += [f"cluster {2**k}" for k in range(5)]
    expected += [f"home {home.value}" for home in Home]
    expected += ["ragged", "even", "row long"]
    names = ["any", *CAPABILITIES, "parts", "limits", "8 bits"]
    expected += [f"held: {each}" for each in names]
    expected += [f"loops: {each}" for each in names if each not in HELD_ONLY]
    expected.append("streamed: any")  # few programs have rows as long as that
    missing = [kind for kind in expected if not drawn[kind]]
    assert not missing, f"{missing} of {sorted(drawn.items())}"
    assert len(beyond) <= (1 - EXACT) * len(SEEDS), beyond

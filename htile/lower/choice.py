"""Which plans a graph has on a target, and which of them is the default.

Numerics come from N, dtypes and the graph alone, so a row's bits never depend on the batch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from math import gcd, log2

import torch

from ..frontend.graph import Graph, Input, Role
from ..frontend.ops import REDUCTIONS
from .plan import Home, Load, Numerics, Placement, Plan, Target
from .schedule import Schedule, make_loops, make_schedule

ACCESS_BYTES = 16  # the widest load and store
SPARE_REGISTERS = 40  # addresses, predicates, partial results: seen in the examples on sm_90a
MAX_REGISTERS = 255  # of a thread
MIN_CLUSTER_N = 8192  # no shorter row is worth a cluster, or reading it again
UNROLLED_CHUNKS = 8  # as many have no loop
UNROLL = 4  # chunks at once of a loop over more
STREAMED_CLUSTER = 4  # of a row that no cluster holds


def row_dtypes(graph: Graph) -> list:
    """The dtypes in memory of everything that has a row's length, in and out."""
    inputs = [i.dtype for i in graph.inputs if i.role in (Role.ROW, Role.COLUMN)]
    return inputs + [o.dtype for o in graph.outputs if o.is_row]


def vector_size(graph: Graph) -> int:
    """Neighbouring elements a thread: 16 bytes of the widest row or column, and a divisor of N.

    A divisor, so that no vector straddles the end of a row, and so that in a contiguous tensor
    every vector is as aligned as it is long.
    """
    widest = max(dtype.itemsize for dtype in row_dtypes(graph))
    return gcd(graph.n, ACCESS_BYTES // widest)


def enumerate_plans(graph: Graph, target: Target) -> list[Plan]:
    """Every sensible plan; none only where reductions need more shared memory than there is."""
    has_columns = any(i.role is Role.COLUMN for i in graph.inputs)
    in_place = bool(target.aliases)
    kept = {
        columns: make_schedule(graph, target.fastmath, columns == "late", in_place)
        for columns in (("early", "late") if has_columns else ("early",))
    }
    plans = [
        _plan(graph, target, schedule, numerics, placement)
        for numerics in _numerics(graph, target, min(s.words for s in kept.values()))
        for columns, schedule in kept.items()
        for placement in _placements(graph, target, schedule, numerics, columns)
    ]
    if graph.n >= MIN_CLUSTER_N or not plans:
        homes = {"shared": Home.SHARED, "direct": Home.REREAD}
        if not any(node.op in REDUCTIONS for node in graph):
            del homes["shared"]  # nothing is read twice
        found = list(_loop_numerics(graph, target, next(iter(kept.values()))))
        for (loader, home), streamed in itertools.product(homes.items(), (False, True)):
            fitting = [numerics for numerics in found if numerics.streamed == streamed]
            if not fitting or (streamed and home is Home.SHARED):
                continue
            schedule = make_loops(graph, home, target.fastmath, streamed)
            plans += [
                _plan(graph, target, schedule, numerics, placement)
                for numerics in fitting
                for placement in _loop_placements(graph, target, schedule, numerics, loader)
            ]
    return plans


def _plan(
    graph: Graph, target: Target, schedule: Schedule, numerics: Numerics, placement: Placement
) -> Plan:
    return Plan(
        graph=graph,
        target=target,
        prologue=(),
        steps=schedule.steps,
        epilogue=(),
        homes=schedule.homes,
        numerics=numerics,
        placement=placement,
        slots=schedule.slots,
        aliases=target.aliases,
    )


def choose(plans: list[Plan]) -> Plan:
    """The default among plans of one graph and target: see `_preference`."""
    return min(plans, key=_preference)


def closest_first(plans: list[Plan]) -> list[Plan]:
    """The plans as they are preferred, the default first."""
    return sorted(plans, key=_preference)


def _numerics(graph: Graph, target: Target, words: float) -> Iterator[Numerics]:
    """Threads a row and clusters, as far as the registers of a thread hold its elements."""
    vec = vector_size(graph)
    for cluster in _clusters(graph, target):
        threads = 1 if cluster == 1 else 128
        while threads <= target.arch.max_threads:
            elements = -(-graph.n // (vec * threads * cluster)) * vec
            if elements <= vec or elements * (words + 1) <= MAX_REGISTERS - SPARE_REGISTERS:
                yield Numerics(vec, threads, cluster)
            if threads * vec * cluster >= graph.n:
                break
            threads *= 2


def _clusters(graph: Graph, target: Target) -> list[int]:
    most = 1 if graph.n < MIN_CLUSTER_N else target.arch.max_cluster
    return [cluster for cluster in (1, 2, 4, 8, 16) if cluster <= most]


def _loop_numerics(graph: Graph, target: Target, schedule: Schedule) -> Iterator[Numerics]:
    """Threads a row and clusters of loops over chunks: two chunks or more."""
    vec = vector_size(graph)
    for cluster in _clusters(graph, target):
        for threads in (128, 256, 512, 1024):
            if 2 * vec * threads * cluster <= graph.n:
                num = Numerics(vec, threads, cluster, reload=True)
                free = _free_bytes(graph, target, schedule, num, threads)
                yield replace(num, streamed=_tile_bytes(graph, schedule, num) > free)


def _rows_of(schedule: Schedule) -> list[Input]:
    """The rows that are loaded."""
    loads = [step.input for step in schedule.steps if isinstance(step, Load)]
    return [i for i in loads if i.role is Role.ROW]


def _tile_bytes(graph: Graph, schedule: Schedule, num: Numerics) -> int:
    """Bytes of a row that one CTA has."""
    elements = _chunks(graph, num) * num.vec_size * num.threads_per_row
    return elements * sum(i.dtype.itemsize for i in _rows_of(schedule))


def _chunks(graph: Graph, num: Numerics) -> int:
    """Vectors of a row that a thread has."""
    return -(-graph.n // (num.vec_size * num.threads_per_row * num.cluster_n))


def _placements(
    graph: Graph, target: Target, schedule: Schedule, numerics: Numerics, columns: str
) -> Iterator[Placement]:
    vec, threads_per_row = numerics.vec_size, numerics.threads_per_row
    loaded = _rows_of(schedule)
    elements = _chunks(graph, numerics) * vec
    registers = elements * (schedule.words + 1) + SPARE_REGISTERS
    if registers > MAX_REGISTERS and elements > vec:
        return
    registers = min(registers, MAX_REGISTERS)  # the rest is spilled
    for num_threads in (64, 128, 256, 512, 1024):
        rows = num_threads // threads_per_row
        if num_threads < max(threads_per_row, 32) or (rows > 32 and num_threads > 128):
            continue
        if registers * num_threads > target.arch.registers or (numerics.cluster_n > 1 < rows):
            continue
        free = _free_bytes(graph, target, schedule, numerics, num_threads)
        tiles = num_threads * elements * sum(i.dtype.itemsize for i in loaded)
        if tiles <= free and _is_asynchronous(loaded, vec, target):
            yield Placement(num_threads, "shared", columns, target.align)
        if free >= 0:
            yield Placement(num_threads, "direct", columns, target.align)


def _loop_placements(
    graph: Graph, target: Target, schedule: Schedule, numerics: Numerics, loader: str
) -> Iterator[Placement]:
    """One row a CTA, or two a thread; rows stay in shared memory, or in global memory."""
    vec, threads = numerics.vec_size, numerics.threads_per_row
    chunks = _chunks(graph, numerics)
    unroll = chunks if chunks <= UNROLLED_CHUNKS else UNROLL
    for rows in (1, 2):
        if rows > 1 and (numerics.streamed or not target.many_rows or unroll < chunks):
            return
        registers = SPARE_REGISTERS + rows * vec * schedule.words
        if min(registers, MAX_REGISTERS) * threads > target.arch.registers:
            return
        tiles = 0
        if loader == "shared":
            if not _is_asynchronous(_rows_of(schedule), vec, target):
                return
            tiles = rows * _tile_bytes(graph, schedule, numerics)
        if tiles > _free_bytes(graph, target, schedule, numerics, threads, rows):
            return
        yield Placement(threads, loader, "late", target.align, rows, unroll)


def _free_bytes(
    graph: Graph, target: Target, schedule: Schedule, num: Numerics, threads: int, rows: int = 1
) -> int:
    """Shared memory that is left for tiles by the reduction buffer, its mbarriers, alignment.

    Negative where they do not fit; mbarriers are initialized by a thread each.
    """
    if num.threads_per_row <= 32 and num.cluster_n == 1:
        return target.arch.shared_bytes
    slots = schedule.slots * rows
    if num.cluster_n > 1 and slots > threads:
        return -1
    wide = any(node.value.dtype is torch.int64 for node in graph if node.op in REDUCTIONS)
    buffer = slots * (threads // 32 * num.cluster_n * (8 if wide else 4) + 8)
    return target.arch.shared_bytes - buffer - 64


def _is_asynchronous(loaded: list[Input], vec: int, target: Target) -> bool:
    """Whether cp.async, of 4, 8 or 16 bytes, can bring these rows."""
    return bool(loaded) and all(min(vec * i.dtype.itemsize, target.align) >= 4 for i in loaded)


def _preference(plan: Plan) -> tuple:
    """Lower is better; measured on an H200, bf16 (CONTRIBUTING.md has the figures).

    Numerics first, by N and the graph alone. Short rows stay in registers: 16 elements a thread,
    few of them padding, at most 512 threads a row, 256 where columns are read; columns late,
    because early ones cost registers, so rows in flight; and with columns, rows go straight to
    registers, because shared memory is taken from the L1 cache that columns live in. Long rows stay
    in shared memory, in clusters, and are worked on chunk by chunk.
    """
    num, place, n = plan.numerics, plan.placement, plan.graph.n
    columns = sum(i.role is Role.COLUMN for i in plan.graph.inputs)
    padding = plan.elements_per_thread * num.threads_per_row * num.cluster_n / n - 1
    if n <= (16384 if columns and plan.stages == 1 else 8192):
        loader = "direct" if columns else "shared"
        most, elements = 256 if columns else 512, 16
        wanted = num.reload, num.cluster_n > 1, num.threads_per_row > most
    else:
        loader = "shared"
        most, elements = _long_rows(plan, bool(columns))
        wanted = num.reload != (plan.stages > 0), False, num.threads_per_row != most
    return (
        *wanted,
        abs(log2(plan.elements_per_thread / elements)) + 4 * padding,
        -num.threads_per_row,
        abs(place.num_threads - max(128, num.threads_per_row)),
        place.loader != loader,
        place.columns != "late",
        place.rows_per_thread != (2 if columns > 1 and _pairs_fit(plan) else 1),
    )


def _long_rows(plan: Plan, has_columns: bool) -> tuple[int, float]:
    """Threads and elements a thread of a row that is worked on in chunks."""
    n, arch = plan.graph.n, plan.target.arch
    rows = sum(i.dtype.itemsize for i in plan.graph.inputs if i.role is Role.ROW)
    if n > 262144 and rows * n > arch.max_cluster * arch.shared_bytes:
        return 512, n / (512 * STREAMED_CLUSTER)
    if n > 262144:
        return (1024, 64) if plan.stages == 1 else (512, 128)
    if has_columns:
        return 512, 32 if n <= 131072 else 64
    return 512 if n <= 16384 else 256, 32 if n <= 32768 else 64


def _pairs_fit(plan: Plan) -> bool:
    """Whether two rows a thread leave room for three thread blocks; a row alone needs no pair."""
    rows = [s.input for s in plan.steps if isinstance(s, Load) and s.input.role is Role.ROW]
    tile = plan.elements_per_thread * plan.numerics.threads_per_row
    shared = 2 * tile * sum(i.dtype.itemsize for i in rows)
    return plan.numerics.cluster_n > 1 and 3 * shared <= plan.target.arch.shared_bytes

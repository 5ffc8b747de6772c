"""Which plans a graph has on a target, and which of them is the default.

Numerics come from N, dtypes and the graph alone, so a row's bits never depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, log2

from ..errors import LoweringError
from ..frontend.graph import Graph, Role
from ..frontend.ops import REDUCTIONS
from .plan import Home, Load, Numerics, Placement, Plan, Target
from .schedule import Schedule, make_schedule

ACCESS_BYTES = 16  # the widest load and store
SPARE_REGISTERS = 40  # addresses, predicates, partial results: seen in the examples on sm_90a
MAX_REGISTERS = 255  # of a thread
REDUCTION_BYTES = 4096  # of shared memory, more than any reduction buffer
MIN_CLUSTER_N = 8192  # no shorter row is worth a cluster, or reading it again


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
    """Every sensible plan. Raises LoweringError where there is none."""
    has_columns = any(i.role is Role.COLUMN for i in graph.inputs)
    kept = {
        columns: make_schedule(
            graph, target.fastmath, columns == "late", in_place=bool(target.aliases)
        )
        for columns in (("early", "late") if has_columns else ("early",))
    }
    plans = [
        _plan(graph, target, schedule, numerics, placement)
        for numerics in _numerics(graph, target, min(s.words for s in kept.values()))
        for columns, schedule in kept.items()
        for placement in _placements(graph, target, schedule, numerics, columns)
    ]
    if any(node.op in REDUCTIONS for node in graph):
        for loader, home in (("shared", Home.SHARED), ("direct", Home.REREAD)):
            schedule = make_schedule(graph, target.fastmath, True, home, bool(target.aliases))
            plans += [
                _plan(graph, target, schedule, numerics, placement)
                for numerics in _numerics(graph, target, schedule.words, reload=True)
                for placement in _placements(graph, target, schedule, numerics, "late")
                if placement.loader == loader
            ]
    if not plans:
        clusters = target.arch.max_cluster
        where = f"a cluster of {clusters} thread blocks" if clusters > 1 else "one thread block"
        raise LoweringError(
            f"{graph.name}: a row of N = {graph.n} elements does not fit {where} of "
            f"{target.arch.name}, and longer rows are not supported yet; split the row, or use "
            "fewer arguments of its length"
        )
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


def _numerics(
    graph: Graph, target: Target, words: float, reload: bool = False
) -> Iterator[Numerics]:
    """Threads a row and clusters, as far as the registers of a thread hold its elements."""
    vec = vector_size(graph)
    for cluster in (1, 2, 4, 8, 16):
        if cluster > target.arch.max_cluster or (
            (cluster > 1 or reload) and graph.n < MIN_CLUSTER_N
        ):
            return
        threads = 1 if cluster == 1 else 128
        while threads <= target.arch.max_threads:
            elements = -(-graph.n // (vec * threads * cluster)) * vec
            if elements * (words + 1) <= MAX_REGISTERS - SPARE_REGISTERS:
                yield Numerics(vec, threads, cluster, reload)
            if threads * vec * cluster >= graph.n:
                break
            threads *= 2


def _placements(
    graph: Graph, target: Target, schedule: Schedule, numerics: Numerics, columns: str
) -> Iterator[Placement]:
    vec, threads_per_row = numerics.vec_size, numerics.threads_per_row
    loaded = [s.input for s in schedule.steps if isinstance(s, Load) and s.input.role is Role.ROW]
    share = vec * threads_per_row * numerics.cluster_n
    elements = -(-graph.n // share) * vec
    registers = elements * (schedule.words + 1) + SPARE_REGISTERS
    if registers > MAX_REGISTERS:
        return
    for num_threads in (64, 128, 256, 512, 1024):
        rows = num_threads // threads_per_row
        if num_threads < max(threads_per_row, 32) or (rows > 32 and num_threads > 128):
            continue
        if registers * num_threads > target.arch.registers or (numerics.cluster_n > 1 < rows):
            continue
        tiles = num_threads * elements * sum(i.dtype.itemsize for i in loaded)
        # cp.async copies 4, 8 or 16 bytes
        asynchronous = loaded and all(
            min(vec * i.dtype.itemsize, target.align) >= 4 for i in loaded
        )
        if asynchronous and tiles + REDUCTION_BYTES <= target.arch.shared_bytes:
            yield Placement(num_threads, "shared", columns, target.align)
        yield Placement(num_threads, "direct", columns, target.align)


def _preference(plan: Plan) -> tuple:
    """Lower is better; measured on an H200, bf16 (CONTRIBUTING.md has the figures).

    Numerics first, by N and the graph alone. Short rows: 16 elements a thread, few of them padding,
    at most 512 threads a row, 256 where columns are read; columns late, because early ones cost
    registers, so rows in flight; and with columns, rows go straight to registers, because shared
    memory is taken from the L1 cache that columns live in. Long rows: kept in shared memory and
    read again after each barrier, 32 or 64 elements a thread, in clusters.
    """
    num, place, n = plan.numerics, plan.placement, plan.graph.n
    has_columns = any(i.role is Role.COLUMN for i in plan.graph.inputs)
    padding = plan.elements_per_thread * num.threads_per_row * num.cluster_n / n - 1
    if n <= (16384 if has_columns else 8192):
        loader = "direct" if has_columns else "shared"
        most, elements = 256 if has_columns else 512, 16
        wanted = num.reload, num.cluster_n > 1, num.threads_per_row > most
    else:
        loader = "shared"
        most, elements = 512 if n <= 16384 else 256, 32 if n <= 32768 else 64
        wanted = plan.stages > 0 and not num.reload, False, num.threads_per_row != most
    return (
        *wanted,
        abs(log2(plan.elements_per_thread / elements)) + 4 * padding,
        -num.threads_per_row,
        abs(place.num_threads - max(128, num.threads_per_row)),
        place.loader != loader,
        place.columns != "late",
    )

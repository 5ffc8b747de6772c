"""Which of a graph's plans is the default: the closest to what was measured to be fast."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from ..frontend.graph import Graph, Role
from ..frontend.ops import Op
from .arch import Arch
from .enumeration import has_columns
from .plan import LONG_N, Home, Plan
from .schedule import assign_stages, has_pair, make_loops, make_schedule


def choose(plans: list[Plan]) -> Plan:
    """The default among plans of one graph and target: the closest to what is wanted."""
    wanted = _wanted(plans[0].graph, plans[0].target.arch)
    return min(plans, key=lambda plan: _distance(plan, wanted))


def closest_first(plans: list[Plan]) -> list[Plan]:
    """The plans as they are preferred, the default first."""
    wanted = _wanted(plans[0].graph, plans[0].target.arch)
    return sorted(plans, key=lambda plan: _distance(plan, wanted))


@dataclass(frozen=True)
class Wanted:
    """What the default plan is closest to.

    in_chunks, streamed: a row is worked on in loops (`Numerics.reload`), or held in registers.
    threads: a row, where it may be spread over a cluster; at most so many where one CTA has it.
    elements: of a row, a thread.
    few_blocks: that have a row, where there are many.
    """

    in_chunks: bool
    threads: int
    elements: float
    loader: str
    spread: bool = True
    streamed: bool = False
    few_blocks: bool = False


def _distance(plan: Plan, wanted: Wanted) -> tuple:
    """Lower is better: numerics first, which come from N, the dtypes and the graph alone."""
    num, place = plan.numerics, plan.placement
    padding = plan.elements_per_thread * num.threads_per_row * num.cluster_n / plan.graph.n - 1
    other_threads = num.threads_per_row != wanted.threads
    if not wanted.spread:
        other_threads = num.threads_per_row > wanted.threads
    return (
        num.reload != wanted.in_chunks,
        num.streamed != wanted.streamed,
        num.cluster_n > 1 and not wanted.spread,
        other_threads,
        abs(log2(plan.elements_per_thread / wanted.elements)) + 4 * padding,
        -num.threads_per_row,
        not num.paired,
        0 if num.reload else abs(place.num_threads - max(128, num.threads_per_row)),
        place.loader != wanted.loader,
        place.columns != "late",
        -place.shares if wanted.few_blocks else place.shares,
        -plan.abreast if wanted.few_blocks else plan.abreast,
    )


def _wanted(graph: Graph, arch: Arch) -> Wanted:
    """The table: measured on an H200, CONTRIBUTING.md has the figures.

    Short rows stay in registers: 32 bytes a thread, little of it padding. Long ones stay in shared
    memory, in clusters, and are worked on chunk by chunk; what is only read, and very long ones,
    are streamed. Columns are loaded late, because early they cost registers, so rows in flight; and
    beside columns, short rows go straight to registers, because shared memory is taken from the L1
    cache that columns live in.
    """
    n, columns = graph.n, has_columns(graph)
    stages = max(assign_stages(graph).values())
    if n > LONG_N:
        return _wanted_of_very_long(graph, arch, stages)
    if not stages:
        if n <= 8192:
            return Wanted(False, 256 if columns else 512, 16, "direct", spread=False)
        return Wanted(False, 256, 32, "direct") if n <= 131072 else Wanted(True, 512, 32, "direct")
    writes = any(output.is_row for output in graph.outputs)
    if n > 8192:
        return _wanted_of_long(graph, arch, stages, writes)
    narrow = 1 if _is_wide(graph) else 2  # as many bytes a thread
    if not writes:
        return Wanted(False, 512 // narrow, 16 * narrow, "direct", spread=False)
    if stages > 2 and n > 4096:
        return Wanted(False, 512 // narrow, 16 * narrow, "shared", spread=False)
    if columns:
        threads = 1024 if stages == 1 and n > 4096 else 512
        return Wanted(False, threads // narrow, 8 * narrow, "direct", spread=False)
    return Wanted(False, 1024 // narrow, 8 * narrow, "shared", spread=False)


def _wanted_of_long(graph: Graph, arch: Arch, stages: int, writes: bool) -> Wanted:
    """Of rows of more than 8192 elements that are reduced: 256 threads and as many CTAs as go.

    So few rows are spread over a GPU. Many are not, where a CTA takes several shares.
    """
    n, columns, loops = graph.n, has_columns(graph), make_loops(graph, Home.REREAD)
    if not writes and len(loops.loops) == 1:
        elements = 64 if n <= 16384 else 32
        return Wanted(True, 256, elements, "direct", streamed=True, few_blocks=True)
    if n <= 16384 and stages > 2:
        return Wanted(False, 256, 32, "direct", spread=False)
    longest_kept = 0
    if not columns and (stages == 1 or _repeats_exp(graph)) and stages <= 2:
        longest_kept = 131072 if _is_wide(graph) else 65536 if has_pair(graph) else 32768
    if n <= longest_kept:
        return Wanted(False, 256, 16 if n <= 16384 else 32, "shared")
    if arch.max_cluster == 1:
        return Wanted(True, 1024, 32, "shared")
    if stages > 2:
        return Wanted(True, 256, 64, "shared")
    few_blocks = loops.is_online and (columns or loops.exchanges > 1 or n <= 32768)
    threads = 512 if n > 131072 and columns and not loops.is_online else 256
    return Wanted(True, threads, 16 if n <= 32768 else 32, "shared", few_blocks=few_blocks)


def _wanted_of_very_long(graph: Graph, arch: Arch, stages: int) -> Wanted:
    """Of rows of more than LONG_N elements: streamed, but where one loop more would be too many."""
    loops = make_loops(graph, Home.REREAD)
    fits = _row_bytes(graph) * graph.n <= 16 * arch.shared_bytes
    if len(loops.loops) == 2 and stages == 1 and fits:
        return Wanted(True, 1024, graph.n / (16 * 1024), "shared")
    elements = graph.n / (8 * 512)
    return Wanted(True, 512, elements, "direct", streamed=True, few_blocks=True)


def _is_wide(graph: Graph) -> bool:
    """Whether elements of the rows have more than 16 bits."""
    rows = [i.dtype for i in graph.inputs if i.role is Role.ROW]
    rows += [o.dtype for o in graph.outputs if o.is_row]
    return max(dtype.itemsize for dtype in rows) > 2


def _row_bytes(graph: Graph) -> int:
    """Bytes of one element of all row inputs."""
    return sum(i.dtype.itemsize for i in graph.inputs if i.role is Role.ROW)


def _repeats_exp(graph: Graph) -> bool:
    """Whether an exponential that a reduction needs is read after it: loops would repeat it."""
    return any(graph[id].op is Op.EXP for id in make_schedule(graph).homes)

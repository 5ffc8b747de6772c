"""Which of a graph's plans is the default: the closest to what was measured to be fast."""

from __future__ import annotations

from dataclasses import dataclass
from math import log2

from ..build.arch import Arch
from ..frontend.graph import Graph, Input, Role
from ..frontend.ops import Op
from .enumeration import has_columns
from .plan import LONG_N, Home, Plan, Target
from .schedule import assign_stages, has_pair, make_loops, make_schedule

MANY_ROWS = 1024  # that fill a GPU


def choose(plans: list[Plan]) -> Plan:
    """The default among plans of one graph and target: the closest to what is wanted."""
    wanted = _wanted(plans[0].graph, plans[0].target)
    return min(plans, key=lambda plan: _distance(plan, wanted))


def closest_first(plans: list[Plan]) -> list[Plan]:
    """The plans as they are preferred, the default first."""
    wanted = _wanted(plans[0].graph, plans[0].target)
    return sorted(plans, key=lambda plan: _distance(plan, wanted))


@dataclass(frozen=True)
class Wanted:
    """What the default plan is closest to.

    in_chunks, streamed: a row is worked on in loops (`Numerics.reload`), or held in registers.
    threads: a row, where it may be spread over a cluster; at most so many where one CTA has it.
    elements: of a row, a thread.
    block: threads of a CTA, where it holds rows in registers, and a row takes no more.
    two_rows: a CTA, where one takes 256 threads and there are many.
    shares: of a row a CTA, where there are many rows; abreast: how many at a time.
    """

    in_chunks: bool
    threads: int
    elements: float
    loader: str
    columns: str = "late"
    spread: bool = True
    streamed: bool = False
    block: int = 128
    two_rows: bool = False
    shares: int = 1
    abreast: int = 1

    def block_of(self, threads_per_row: int) -> int:
        """Threads of a CTA whose rows take so many."""
        if self.two_rows and threads_per_row == 256:
            return 512
        return max(self.block, threads_per_row)


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
        0 if num.reload else abs(place.num_threads - wanted.block_of(num.threads_per_row)),
        place.loader != wanted.loader,
        place.columns != wanted.columns,
        abs(place.shares - wanted.shares),
        abs(plan.abreast - wanted.abreast),
    )


def _wanted(graph: Graph, target: Target) -> Wanted:
    """The table: measured on an H200, CONTRIBUTING.md has the figures.

    Short rows stay in registers. Long ones stay in shared memory, in clusters, and are worked on
    chunk by chunk; what is only read, and very long ones, are streamed.
    """
    stages = max(assign_stages(graph).values())
    if graph.n > LONG_N:
        return _wanted_of_very_long(graph, target.arch, stages)
    if not stages:
        return _wanted_of_map(graph, target)
    if graph.n > 8192:
        return _wanted_of_long(graph, target.arch, stages)
    return _wanted_of_short(graph, target, stages)


def _wanted_of_map(graph: Graph, target: Target) -> Wanted:
    """Where nothing is reduced."""
    n = graph.n
    if n <= 8192:
        threads = 256 if has_columns(graph) else 512
        return Wanted(False, threads, 16, "direct", spread=False, two_rows=_pairs_pay(target))
    return Wanted(False, 256, 32, "direct") if n <= 131072 else Wanted(True, 512, 32, "direct")


def _wanted_of_short(graph: Graph, target: Target, stages: int) -> Wanted:
    """32 bytes of a row a thread, little of it padding, and CTAs of 128 threads.

    Where little is left to do after the last exchange, rows of up to 128 elements take 16 bytes and
    CTAs of 256, and many rows of 256 threads CTAs of two. Rows of more than two stages come through
    shared memory, and many rows of more than 2048 elements, but not beside columns: it is taken
    from the L1 cache that they live in. Columns are loaded late, because early they cost registers,
    so rows in flight; but one alone beside a single row is not, nor are those of a single wide row,
    of which a thread has fewer elements.
    """
    n, columns, wide = graph.n, has_columns(graph), _is_wide(graph)
    narrow = 1 if wide else 2  # as many bytes a thread
    if not any(output.is_row for output in graph.outputs):
        return Wanted(False, 512 // narrow, 16 * narrow, "direct", spread=False)
    if stages > 2 and n > 4096:
        return Wanted(False, 512 // narrow, 16 * narrow, "shared", spread=False)
    few_threads = columns and (stages > 1 or n <= 4096)
    threads, elements, block = 512 if few_threads else 1024, 8 * narrow, 128
    is_light = stages == 1 or (stages == 2 and _repeats_exp(graph))
    if is_light and n <= 128 and not wide:
        elements, block = 8, 256
    direct = columns or (stages <= 2 and (n <= 2048 or target.rows < 256))
    takes_few = len(_of(graph, Role.COLUMN)) == 1 or (wide and n <= 4096)
    early = takes_few and len(_of(graph, Role.ROW)) == 1
    return Wanted(
        False,
        threads // narrow,
        elements,
        "direct" if direct else "shared",
        "early" if early else "late",
        spread=False,
        block=block,
        two_rows=is_light and _pairs_pay(target),
    )


def _pairs_pay(target: Target) -> bool:
    """Whether rows are so many and so long that CTAs of two pay; longer ones were not measured."""
    return 2048 < target.n <= 4096 and target.rows >= MANY_ROWS


def _wanted_of_long(graph: Graph, arch: Arch, stages: int) -> Wanted:
    """Of rows of more than 8192 elements that are reduced: as many CTAs as go, most of 256 threads.

    So few rows are spread over a GPU. Many are not, where a CTA takes several shares.
    """
    n, columns, loops = graph.n, has_columns(graph), make_loops(graph, Home.REREAD)
    writes = any(output.is_row for output in graph.outputs)
    if not writes and len(loops.loops) == 1:
        elements, abreast = 64 if n <= 16384 else 32, 2 if n > 65536 else 1
        return Wanted(True, 256, elements, "direct", streamed=True, shares=16, abreast=abreast)
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
        return Wanted(True, 256, 64, "shared", shares=2 if n > 32768 else 1)
    threads = 512 if n > 131072 and columns and not loops.is_online else 256
    elements = max(16 if n <= 32768 else 32, n // (threads * arch.max_cluster))
    shares = abreast = 1
    is_small = columns and 16384 < n <= 32768 and _row_bytes(graph) == 2  # 64 KiB at most
    if loops.is_online and (columns or loops.exchanges > 1 or n <= 32768):
        abreast = 2
        if is_small:
            threads, elements, abreast = 128, 32, 4
        shares = abreast * max(1, 64 // elements)
    elif is_small:
        shares = 2
    return Wanted(True, threads, elements, "shared", shares=shares, abreast=abreast)


def _wanted_of_very_long(graph: Graph, arch: Arch, stages: int) -> Wanted:
    """Of rows of more than LONG_N elements: streamed, but where one loop more would be too many."""
    loops = make_loops(graph, Home.REREAD)
    fits = _row_bytes(graph) * graph.n <= 16 * arch.shared_bytes
    if len(loops.loops) == 2 and stages == 1 and fits:
        return Wanted(True, 1024, graph.n / (16 * 1024), "shared")
    elements = graph.n / (8 * 512)
    return Wanted(True, 512, elements, "direct", streamed=True, shares=8)


def _of(graph: Graph, role: Role) -> list[Input]:
    return [i for i in graph.inputs if i.role is role]


def _is_wide(graph: Graph) -> bool:
    """Whether elements of the rows have more than 16 bits."""
    rows = [i.dtype for i in _of(graph, Role.ROW)]
    rows += [o.dtype for o in graph.outputs if o.is_row]
    return max(dtype.itemsize for dtype in rows) > 2


def _row_bytes(graph: Graph) -> int:
    """Bytes of one element of all row inputs."""
    return sum(i.dtype.itemsize for i in _of(graph, Role.ROW))


def _repeats_exp(graph: Graph) -> bool:
    """Whether an exponential that a reduction needs is read after it: loops would repeat it."""
    return any(graph[id].op is Op.EXP for id in make_schedule(graph).homes)

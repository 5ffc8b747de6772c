"""Plans of kernels with results that are reduced over all rows, and where their parts lie.

Such a kernel is a loop over rows that are held. Row i belongs to group `i % groups`, and each group
has the threads of one row of a CTA, or of a cluster. The groups of a CTA combine what they have,
and a second kernel combines the parts of all CTAs. How many groups there are, and how many of them
a CTA has, follows from N, the dtypes, the graph and the architecture. So does the order of every
sum.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import sqrt
from typing import NamedTuple

import torch

from ..build.arch import MAX_REGISTERS, Arch
from ..frontend.dynamic import ACCESS_BYTES
from ..frontend.graph import Graph, Output
from ..frontend.ops import Op
from .plan import Numerics, Placement, Plan, Target
from .shifting import staged_bytes
from .vectors import WARP
from .work import Work

CTA_THREADS = 512  # of all rows of a CTA, unless one has more
MOST_BLOCKS = 4  # CTAs of a multiprocessor
# Bytes of the rows that a multiprocessor works on at a time. With fewer, memory waits for the next
# rows; with more, the compiler lacks registers. docs/traps.md says what they were chosen with.
FEWEST_BYTES, MOST_BYTES = 32 << 10, 40 << 10
TURNS = 2  # tiles of each row that comes through shared memory: one is on its way
# How many elements of a row a thread has where nothing else decides it. Where the CTAs of a cluster
# exchange something, it has more, because fewer warps then have less to exchange.
ELEMENTS, EXCHANGED_ELEMENTS = 16, 32
MOST_ELEMENTS = 48  # that a thread has of a row without being slower for it
# Bytes of a row that its threads access at a time. With fewer, accesses take longer than memory.
FEWEST_AT_A_TIME = 24
# These count 32-bit registers of a thread: for addresses, predicates and what is computed of a few
# elements at a time.
OTHER_REGISTERS = 24
RAGGED_REGISTERS = 16  # more, where rows do not fill the threads
PARTS_OF_SM = 4  # parts of a multiprocessor, each of which has warps and registers of its own
EXCHANGE_BYTES = 2048  # of shared memory, for what else a CTA keeps there


class PartsOf(NamedTuple):
    """Where the parts of a result lie in the workspace.

    dtype: of an element. columns: of a part, padding included; 1 for a number of each row.
    start: the first byte.
    """

    output: Output
    dtype: torch.dtype
    columns: int
    start: int


def parts_of(plan: Plan) -> list[PartsOf]:
    """Where the parts of each result over all rows lie."""
    found, start = [], 0
    for output in plan.graph.over_rows:
        dtype = part_dtype(plan.graph, output)
        columns = plan.numerics.step * plan.chunks if output.is_row else 1
        found.append(PartsOf(output, dtype, columns, start))
        start += _whole_accesses(plan.parts * columns * dtype.itemsize)
    return found


def _whole_accesses(size: int) -> int:
    """So many bytes, or a few more, so that the widest accesses take all of them."""
    return -(-size // ACCESS_BYTES) * ACCESS_BYTES


def part_dtype(graph: Graph, output: Output) -> torch.dtype:
    """The dtype in which a result is reduced over rows: integers are added in int64."""
    dtype = graph[output.id].value.dtype
    return torch.int64 if output.over is Op.SUM and not dtype.is_floating_point else dtype


def workspace_bytes(plan: Plan) -> int:
    """Bytes of global memory that a launch needs for parts; 0 without results over all rows."""
    parts = parts_of(plan)
    if not parts:
        return 0
    last = parts[-1]
    return last.start + _whole_accesses(plan.parts * last.columns * last.dtype.itemsize)


def without_sums(graph: Graph) -> Graph | None:
    """The graph without such results, whose numerics row results take; None if empty."""
    left = tuple(output for output in graph.outputs if output.over is None)
    return replace(graph, outputs=left) if left else None


def plans_over_rows(work: Work, target: Target, held: Iterable[Plan]) -> Iterator[Plan]:
    """The plans with a loop over rows, of those whose rows are held."""
    seen: set[Numerics] = set()
    for plan in held:
        if plan.numerics in seen:
            continue
        seen.add(plan.numerics)
        yield from _of_numerics(work, target, plan)


def _of_numerics(work: Work, target: Target, plan: Plan) -> Iterator[Plan]:
    """The plans with a loop over rows for the numerics of this plan of held rows."""
    fitting = [way for way in _ways(work, target, plan) if way.free >= 0]
    if not fitting:
        return
    way = min(fitting, key=lambda way: (_shortage(plan, way.rows * way.blocks), way.blocks))
    # As many clusters as fit with one CTA on each multiprocessor fit again for each further CTA.
    clusters = max(1, target.arch.loop_ctas // plan.numerics.cluster_n)
    groups = clusters * way.blocks * way.rows
    numerics = replace(plan.numerics, groups=groups)
    threads = way.rows * numerics.threads_per_row
    for loader in ("shared", "direct"):
        if loader == "shared" and (not way.has_tiles or not _may_come_shared(work, plan)):
            continue
        moves = loader, "early", target.align, plan.placement.shifted
        yield Plan(work, target, numerics, Placement(threads, *moves, blocks=way.blocks))


class _Way(NamedTuple):
    """How many rows a CTA works on, and how many CTAs of a multiprocessor have registers.

    free: bytes of shared memory that a CTA has beside what it needs; negative if it lacks some.
    has_tiles: whether the rows may come through shared memory.
    """

    rows: int
    blocks: int
    free: int
    has_tiles: bool


def _ways(work: Work, target: Target, plan: Plan) -> Iterator[_Way]:
    """All that there are registers for."""
    num, arch, elements = plan.numerics, target.arch, plan.elements_per_thread
    registers = int(_words(work, plan) * elements) + OTHER_REGISTERS
    registers += RAGGED_REGISTERS * plan.is_ragged
    sizes = {part_dtype(work.graph, o).itemsize for o in work.graph.over_rows if o.is_row}
    for rows in _numbers_of_rows(num):
        threads = rows * num.threads_per_row
        sizes_of_rows = sum(i.dtype.itemsize for i in work.rows)
        tile = elements * threads * sizes_of_rows
        scratch = elements * threads * sum(sizes) * (rows > 1)  # one for the results of each size
        # Shifted results are stored by some. The groups must not depend on whether they are.
        staged = staged_bytes(work.writes, num.vec_size, plan.chunks, threads)
        buffer = TURNS * plan.slots * (threads // 32 + 1) * num.cluster_n * 8
        buffer += work.rank_bytes(threads, num.threads_per_row, num.cluster_n, elements)
        for blocks in range(1, MOST_BLOCKS + 1):
            if registers < _registers_of(arch, threads, blocks):
                free = arch.shared_bytes // blocks - buffer - EXCHANGE_BYTES
                has_tiles = max(TURNS * tile, scratch) <= free
                if plan.placement.shifted:  # a piece more for each row, beside staged results
                    pieces = TURNS * (tile + rows * num.vec_size * sizes_of_rows)
                    has_tiles = pieces + scratch + staged <= free
                yield _Way(rows, blocks, free - scratch - staged, has_tiles)


def _numbers_of_rows(num: Numerics) -> list[int]:
    """How many rows a CTA may work on: powers of two whose threads are whole warps."""
    each, found = num.threads_per_row, [1]
    while num.cluster_n == 1 and 2 * found[-1] * each <= CTA_THREADS:
        found.append(2 * found[-1])
    whole = [rows for rows in found if rows * each % WARP == 0]
    return whole or [WARP // each]


def _registers_of(arch: Arch, threads: int, blocks: int) -> int:
    """Registers of a thread, if a multiprocessor has so many CTAs.

    Each of its four parts has a quarter of them, for a quarter of the warps. A warp takes a
    multiple of 8 for each of its lanes.
    """
    warps = -(-blocks * (threads // WARP) // PARTS_OF_SM)
    return min(MAX_REGISTERS, arch.registers // PARTS_OF_SM // (warps * WARP) // 8 * 8)


def _shortage(plan: Plan, rows: int) -> float:
    """How much longer it is expected to take, if a multiprocessor works on so many rows at a time.

    It is rounded, so that other reasons decide between plans that are about as good.
    """
    graph, num = plan.graph, plan.numerics
    size = rows * graph.n // num.cluster_n * sum(i.dtype.itemsize for i in plan.work.rows)
    padding = num.step * plan.chunks / graph.n
    at_a_time = num.threads_per_row * num.vec_size * plan.work.narrowest
    factor = max(1.0, FEWEST_BYTES / max(1, size), size / MOST_BYTES)
    factor *= max(1.0, FEWEST_AT_A_TIME / at_a_time)
    factor *= max(1.0, plan.elements_per_thread / MOST_ELEMENTS)
    return round(factor * sqrt(padding), 2)


def _words(work: Work, plan: Plan) -> float:
    """Registers for each element of a row: what is held, columns, and what is added up.

    It is what ptxas takes for the backward pass of an rmsnorm, with 24 elements a thread.
    """
    graph = work.graph
    columns = sum(i.dtype.itemsize / 4 for i in work.columns)
    added = [part_dtype(graph, o).itemsize / 4 for o in graph.over_rows if o.is_row]
    rows = {i.id: i.dtype.itemsize / 4 for i in work.rows}  # they stay as they were loaded
    held = [sum(rows.values()), 1.0]
    for ids in work.crossing(plan.sweeps, late_columns=False):
        nodes = [graph[id] for id in ids - {i.id for i in work.columns}]
        spread = [node for node in nodes if node.value.spread and node.op is not Op.CONST]
        words = [rows.get(n.id, max(1, n.value.dtype.itemsize / 4)) for n in spread]
        held.append(sum(words))
    return columns + sum(added) + max(held)


def _may_come_shared(work: Work, plan: Plan) -> bool:
    """Whether cp.async, of 4 bytes or more, can bring all rows."""
    views = [i.view for i in work.rows if i.view is not None]
    if (work.beyond if plan.placement.shifted else work.torn) or not work.rows:
        return False
    if any(not view.is_contiguous or view.is_of_groups for view in views):
        return False
    sizes = [i.dtype.itemsize for i in work.rows]
    align = ACCESS_BYTES if plan.placement.shifted else plan.target.align  # of shifted pieces
    return min(min(plan.numerics.vec_size * size, align) for size in sizes) >= 4


def preferred(plans: list[Plan], usual: Numerics | None) -> Plan:
    """The default of plans with a loop over rows.

    usual: the numerics that row results have without the loop. If rows are reduced, these numerics
        are taken if a plan has them, so that row results keep their bits.
    """
    same = [plan for plan in plans if usual == replace(plan.numerics, groups=0) and plan.slots]
    numerics = min(same or plans, key=_distance).numerics
    placed = [plan for plan in plans if plan.numerics == numerics]
    return min(placed, key=lambda plan: plan.placement.loader != "shared")


def _distance(plan: Plan) -> tuple:
    """Less for plans that are expected to be faster."""
    num, place = plan.numerics, plan.placement
    rows = place.num_threads // num.threads_per_row * place.blocks
    exchanges = num.cluster_n > 1 and plan.slots > 0
    far = abs(plan.elements_per_thread - (EXCHANGED_ELEMENTS if exchanges else ELEMENTS))
    return _shortage(plan, rows), num.cluster_n, place.blocks, far, num.threads_per_row

"""Which plans a graph has on a target: schedules, numerics and placements that go together.

Numerics come from N, dtypes and the graph alone, so a row's bits never depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import gcd

from ..frontend.graph import Graph, Input, Output, Role
from ..frontend.ops import REDUCTIONS
from .plan import (
    LONG_N,
    UNROLLED_CHUNKS,
    Home,
    Load,
    Numerics,
    Placement,
    Plan,
    Target,
    has_wide_words,
)
from .schedule import Schedule, has_pair, make_loops, make_schedule

ACCESS_BYTES = 16  # the widest load and store
SPARE_REGISTERS = 40  # addresses, predicates, partial results: seen in the examples on sm_90a
MAX_REGISTERS = 255  # of a thread
MIN_CLUSTER_N = 8192  # no shorter row is worth a cluster, or reading it again
UNROLL = 4  # chunks at once of a loop over more
# Registers for what is on its way from global memory to unrolled loops: columns alone, rows too.
COLUMN_REGISTERS, ROW_REGISTERS = 16, 32
LOOP_REGISTERS = 32  # of a loop over more chunks, beside what it computes, reads and writes
SHARE_REGISTERS = 2  # of each share for each reduction that is gathered beside the first
COUNT_REGISTERS = 8  # of how many elements a thread has, where it counts in an exchange
ADDRESS_REGISTERS, FEW_TENSORS = 8, 5  # of each tensor that a loop moves beside a few
HELD_REGISTERS = 32  # of a row in a thread, from which on the compiler is told how many blocks
OTHER_REGISTERS = 16  # beside them
COLUMN_THREADS = 1536  # of an SM, for which short rows with columns spare registers
ONLINE_THREADS = 1536  # of an SM, for which loops that gather two stages spare registers
STREAMED_THREADS = 1280  # the same where they read rows from global memory, and are unrolled
CROWDED_THREADS = 1024  # the same for other loops, where registers would be more than
CROWDED_REGISTERS = 72
LONG_SHARES = 4  # of a very long row that may be a CTA's, where there are many
# The same of one that is kept, from how many rows on; chunks that a thread has in all of them, and
# threads of a CTA that works on some at a time.
KEPT_SHARES = {256: (2, 8, 256), 1024: (8, 16, 512)}
KEPT_BLOCKS = 3  # of an SM, that fit with several shares each
# How many CTAs are left of a row that is streamed and long, if that takes half of them away.
STREAMED_CTAS = {64: 2, 256: 1, 1024: 4}
# Of such a row in 16 shares, how many a CTA may work on two at a time: the first that fit.
STREAMED_PAIRS = {64: (8,), 256: (16, 8), 1024: (16,)}
STREAMED_CHUNKS = 32  # of such a row, that a thread has in all of its shares


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


def has_columns(graph: Graph) -> bool:
    """Whether there are vectors that all rows share."""
    return any(i.role is Role.COLUMN for i in graph.inputs)


def enumerate_plans(graph: Graph, target: Target) -> list[Plan]:
    """Every sensible plan; none only where reductions need more shared memory than there is."""
    in_place = bool(target.aliases)
    kept = {
        columns: make_schedule(graph, target.fastmath, columns == "late", in_place)
        for columns in (("early", "late") if has_columns(graph) else ("early",))
    }
    paired = {
        columns: make_schedule(graph, target.fastmath, columns == "late", in_place, paired=True)
        for columns in (kept if has_pair(graph) else ())
    }
    plans = [
        _plan(graph, target, schedule, numerics, placement)
        for numerics in _numerics(graph, target, min(s.words for s in kept.values()), bool(paired))
        for columns, schedule in (paired if numerics.paired else kept).items()
        for placement in _placements(graph, target, schedule, numerics, columns)
    ]
    if graph.n >= MIN_CLUSTER_N or not plans:
        homes = {"shared": Home.SHARED, "direct": Home.REREAD}
        if not any(node.op in REDUCTIONS for node in graph):
            del homes["shared"]  # nothing is read twice
        loops = {loader: make_loops(graph, home, target.fastmath) for loader, home in homes.items()}
        plans += [
            _plan(graph, target, schedule, numerics, placement)
            for numerics in _loop_numerics(graph, target, loops["direct"])
            for loader, schedule in loops.items()
            if loader == "direct" or not numerics.streamed
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


def _numerics(graph: Graph, target: Target, words: float, paired: bool) -> Iterator[Numerics]:
    """Threads a row and clusters, as far as the registers of a thread hold its elements.

    paired: in clusters, whose exchanges take long, also with a maximum and a sum in one.
    """
    vec = vector_size(graph)
    for cluster in _clusters(graph, target):
        threads = 1 if cluster == 1 else 128
        while threads <= target.arch.max_threads:
            num = Numerics(vec, threads, cluster)
            elements = num.chunks(graph.n) * vec
            if elements <= vec or elements * (words + 1) <= MAX_REGISTERS - SPARE_REGISTERS:
                yield num
                if paired and cluster > 1:
                    yield replace(num, paired=True)
            if threads * vec * cluster >= graph.n:
                break
            threads *= 2


def _clusters(graph: Graph, target: Target) -> list[int]:
    most = 1 if graph.n < MIN_CLUSTER_N else target.arch.max_cluster
    return [cluster for cluster in (1, 2, 4, 8, 16) if cluster <= most]


def _loop_numerics(graph: Graph, target: Target, loops: Schedule) -> Iterator[Numerics]:
    """Threads a row and clusters of loops over chunks: two chunks or more.

    Rows are streamed where they do not fit, and may be where they are read once or are very long.
    """
    vec, once = vector_size(graph), len(loops.loops) == 1
    paired = has_pair(graph)
    for cluster in _clusters(graph, target):
        for threads in (128, 256, 512, 1024):
            if 2 * vec * threads * cluster <= graph.n:
                num = Numerics(vec, threads, cluster, reload=True, paired=paired)
                free = _free_bytes(graph, target, loops, num, threads)
                fits = _tile_bytes(graph, loops, num) <= free
                if fits:
                    yield num
                if once or not fits or graph.n > LONG_N:
                    yield replace(num, streamed=True)


def _rows_of(schedule: Schedule) -> list[Input]:
    """The rows that are loaded."""
    loads = [step.input for step in schedule.steps if isinstance(step, Load)]
    return [i for i in loads if i.role is Role.ROW]


def _tile_bytes(graph: Graph, schedule: Schedule, num: Numerics) -> int:
    """Bytes of a share of a row."""
    elements = num.chunks(graph.n) * num.vec_size * num.threads_per_row
    return elements * sum(i.dtype.itemsize for i in _rows_of(schedule))


def _placements(
    graph: Graph, target: Target, schedule: Schedule, numerics: Numerics, columns: str
) -> Iterator[Placement]:
    vec, threads_per_row = numerics.vec_size, numerics.threads_per_row
    loaded = _rows_of(schedule)
    elements = numerics.chunks(graph.n) * vec
    held = elements * schedule.words
    registers = held + elements + SPARE_REGISTERS
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
            blocks = _blocks(graph, target, schedule, num_threads, held, tiles)
            yield Placement(num_threads, "shared", columns, target.align, blocks=blocks)
        if free >= 0:
            blocks = _blocks(graph, target, schedule, num_threads, held)
            yield Placement(num_threads, "direct", columns, target.align, blocks=blocks)


def _loop_placements(
    graph: Graph, target: Target, schedule: Schedule, numerics: Numerics, loader: str
) -> Iterator[Placement]:
    """One share of a row a CTA, or several; rows stay in shared memory, or in global memory."""
    vec, chunks = numerics.vec_size, numerics.chunks(graph.n)
    registers = SPARE_REGISTERS + vec * schedule.words
    for shares, abreast in _shares(target, numerics, chunks):
        threads, turns = abreast * numerics.threads_per_row, shares // abreast
        if min(registers, MAX_REGISTERS) * threads > target.arch.registers:
            continue
        if chunks <= UNROLLED_CHUNKS:
            ahead, unroll = _ahead(schedule, vec, turns * chunks, loader), chunks
        else:
            free = target.arch.registers // threads
            if numerics.is_ragged(graph.n) and any(r.carried for r in schedule.reduces):
                free -= COUNT_REGISTERS
            ahead = _ahead_in_loop(schedule, vec, turns, free)
            unroll = ahead or UNROLL
        tiles = 0
        if loader == "shared":
            if not _is_asynchronous(_rows_of(schedule), vec, target):
                return
            tiles = shares * _tile_bytes(graph, schedule, numerics)
        if tiles > _free_bytes(graph, target, schedule, numerics, threads // abreast):
            continue
        if shares > 1 and _fitting(target, tiles) < KEPT_BLOCKS:
            continue
        blocks = 0
        if schedule.is_online and not numerics.streamed:
            blocks = min(ONLINE_THREADS // threads, _fitting(target, tiles))
        elif schedule.is_online and unroll == chunks:
            blocks = STREAMED_THREADS // threads
        elif ahead and unroll < chunks:
            blocks = 1  # or some are spilled, so that two blocks fit
        elif threads >= 512 and registers > CROWDED_REGISTERS:
            blocks = CROWDED_THREADS // threads
        yield Placement(threads, loader, "late", target.align, shares, unroll, ahead, blocks)


def _words(moved: tuple[Input | Output, ...], vec: int) -> float:
    """Registers for a chunk of each."""
    return sum(max(1, vec * each.dtype.itemsize / 4) for each in moved)


def _ahead(schedule: Schedule, vec: int, every: int, loader: str) -> int:
    """How many chunks, of every one, are on their way to loops that are unrolled."""
    reads = max((_words(loop.reads, vec) for loop in schedule.loops), default=0.0)
    if not reads:
        return 0
    if loader == "direct":
        return min(every, max(1, int(ROW_REGISTERS / reads)))
    fit = int(COLUMN_REGISTERS / reads)  # with those of the chunk that is worked on, or all
    return every if fit >= every else max(1, fit // 2)


def _ahead_in_loop(schedule: Schedule, vec: int, shares: int, registers: int) -> int:
    """The same of loops over more chunks, as the registers of a thread go."""
    if not any(loop.reads for loop in schedule.loops):
        return 0
    moved = [loop.reads + loop.writes for loop in schedule.loops]
    gathered = [loop.reduce.gathered for loop in schedule.loops if loop.reduce]
    free = registers - LOOP_REGISTERS - vec * schedule.words
    free -= SHARE_REGISTERS * shares * (max(map(len, gathered), default=1) - 1)
    free -= ADDRESS_REGISTERS * max(0, max(map(len, moved)) - FEW_TENSORS)
    words = max(_words(each, vec) for each in moved)
    return max(ahead for ahead in (1, 2, 4) if ahead == 1 or ahead * words <= free)


def _shares(target: Target, numerics: Numerics, chunks: int) -> Iterator[tuple[int, int]]:
    """How many shares of a row a CTA may have, and how many of them it works on at a time.

    One, or so many that CTAs are left for a GPU.
    """
    yield 1, 1
    cluster, most, turns, abreast = numerics.cluster_n, 1, numerics.cluster_n, (1,)
    if not numerics.streamed:
        if target.rows in KEPT_SHARES:
            most, every, threads = KEPT_SHARES[target.rows]
            turns = max(1, every // chunks)
            abreast = [n for n in (1, 2, 4) if n * numerics.threads_per_row <= threads]
    elif target.n > LONG_N:  # unrolled, they would be too much code
        most = LONG_SHARES if target.rows > 1 and chunks > UNROLLED_CHUNKS else 1
    elif target.rows in STREAMED_CTAS:
        most = max(2, cluster // STREAMED_CTAS[target.rows])
        turns = STREAMED_CHUNKS // chunks
        fits = [n for n in STREAMED_PAIRS[target.rows] if n <= 2 * turns]
        if fits and cluster == 16:
            yield fits[0], 2
    for shares, count in product((2, 4, 8), abreast):
        if count <= shares <= min(most, cluster, turns * count):
            yield shares, count


def _blocks(
    graph: Graph, target: Target, schedule: Schedule, threads: int, held: float, tiles: int = 0
) -> int:
    """Thread blocks of an SM where a thread holds so many registers of its row.

    As the compiler likes where they are few, but for one row with columns and one stage, and where
    they depend on when it loads columns.
    """
    if not schedule.reduces:
        return 0
    if has_columns(graph):
        alone = len(_rows_of(schedule)) == len(schedule.reduces) == 1 and not schedule.has_pairs
        few = alone and held <= HELD_REGISTERS / 2 and threads < 1024
        return COLUMN_THREADS // threads if few else 0
    if held < HELD_REGISTERS:
        return 0
    registers = -(-int(held + OTHER_REGISTERS) // 8) * 8
    return min(target.arch.registers // (registers * threads), _fitting(target, tiles))


def _fitting(target: Target, tiles: int) -> int:
    """Thread blocks of an SM whose tiles fit its shared memory, of which each takes 1 KiB more."""
    return (target.arch.shared_bytes + 1024) // (tiles + 2048)


def _free_bytes(
    graph: Graph, target: Target, schedule: Schedule, num: Numerics, threads: int
) -> int:
    """Shared memory that is left for tiles by the reduction buffer, its mbarriers, alignment.

    Negative where they do not fit; mbarriers are initialized by a thread each.
    """
    if num.threads_per_row <= 32 and num.cluster_n == 1:
        return target.arch.shared_bytes
    slots = schedule.slots
    if num.cluster_n > 1 and slots > threads:
        return -1
    word = 8 if has_wide_words(graph, schedule.reduces) else 4
    buffer = slots * (threads // 32 * num.cluster_n * word + 8)
    return target.arch.shared_bytes - buffer - 64


def _is_asynchronous(loaded: list[Input], vec: int, target: Target) -> bool:
    """Whether cp.async, of 4, 8 or 16 bytes, can bring these rows."""
    return bool(loaded) and all(min(vec * i.dtype.itemsize, target.align) >= 4 for i in loaded)

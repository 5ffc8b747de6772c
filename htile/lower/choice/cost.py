"""How long a plan's kernel takes, computed from what it moves, computes and waits for.

Seven things bound a kernel: the bytes between memory and chip, the bytes from the L2 cache, the
instructions that a multiprocessor issues, those of them that its special function units (MUFU)
work on, its accesses, the start of thread blocks, and what a thread block waits for. Each takes a
time of its own. They overlap, so the whole takes little more than the longest of them: the
constant `blend` says how much more.

A multiprocessor hides the waits of a thread block behind other blocks, as many as registers,
shared memory and threads let stay on it at a time. This is Little's law: bytes in flight are bytes
a second times the seconds that each is under way.

`Rates` are figures of a GPU. `Constants` are fitted to measured times of plans by
`python -m benchmarks.general.fit`. `tune` tries plans in the order of their cost.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, log2
from typing import NamedTuple

from ...frontend.graph import Input, Output, Role
from ..patterns import ancestors
from ..periods import instructions_saved
from ..plan import Form, Numerics, Plan
from ..reductions import FOLLOWING
from ..shifting import EACH, ON_THEIR_WAY, longer, shifting
from ..steps import Home
from ..vectors import WARP
from .instructions import OF_ROUND, SCAN_COSTS, following_costs
from .registers import allowed, estimated_registers, looked_up

OF_EACH_ROW = frozenset({Role.ROW, Role.TAKEN, Role.PER_ROW})
LINE = 128  # bytes of memory that a multiprocessor accesses at a time
MOST_THREADS, MOST_BLOCKS = 2048, 32  # of a multiprocessor

# About how many instructions a load and a store of a vector's element take, where code is counted.
LOAD_CODE, STORE_CODE = 1.5, 2
# Instructions of a thread for the place of its row in a leading dimension beside the first one, and
# for what each tensor's address takes there.
DIVISION, STEP = 25, 6
COMPUTING = 0.75  # the share of the memory's time from which on the issue of instructions counts
FAST_CODE = 1024  # instructions of a kernel, written out, that are issued without delay
# More instructions than CACHED_CODE do not fit into a multiprocessor's instruction cache, which has
# 128 KiB. Threads wait for them then, so that all instructions take UNCACHED times as long, or more
# (docs/traps.md).
CACHED_CODE, UNCACHED = 7 << 10, 1.8
# Rows that are only read take LONGER_STREAMED times as long as the constants say, where a loop over
# memory is written out and a thread block has FEW_THREADS or fewer. 33 plans of the fitting half
# take 1.12 times as long in the median, and 40 of twice the threads 1.02 (many rows of 16 bits).
LONGER_STREAMED, FEW_THREADS = 1.1, 128


class Rates(NamedTuple):
    """What a GPU can do.

    multiprocessors: how many it has.
    clock: cycles a nanosecond, under load.
    memory: bytes a nanosecond that a copy reads and writes together.
    cache: bytes a nanosecond that the L2 cache gives to all multiprocessors.
    cache_bytes: of the L2 cache.
    """

    multiprocessors: int
    clock: float
    memory: float
    cache: float
    cache_bytes: int


# The memory's rate is that of torch's copy in docs/performance.md. Clock and cache are rough.
H200 = Rates(132, 1.755, 4300.0, 5500.0, 50 << 20)


class Constants(NamedTuple):
    """What is fitted. Times are in nanoseconds, instructions are of a thread.

    launch: from the launch to the first thread block, and from the last one to the end.
    memory, cache: from a load to its data, from memory and from the L2 cache.
    start: of a thread block, until its first load. clustered: the same, more in a cluster.
    warp, block, cluster: an exchange inside a warp, inside a thread block and over a cluster.
    iteration: an iteration of a loop, beside its instructions.
    latency: cycles of an instruction that the next one of the thread waits for.
    spacing: between the starts of two thread blocks on a multiprocessor.
    spacing_clustered: the same, more for each doubling of a cluster.
    elements: instructions that are issued for each that is counted for an element.
    code: the share of the issue's time that each doubling of the code beyond FAST_CODE adds.
    moved: instructions for each element that is loaded or stored, with what converts it.
    access: instructions for each vector that is loaded or stored.
    thread: instructions of a thread beside those of its elements.
    exchange: instructions of a thread for each exchange.
    spilled: instructions for each register that a thread lacks.
    lines_read, lines_written, lines_shared: cycles for each line that is read, written, or moved
        to or from shared memory.
    columns: the share of the bytes of columns that come from the L2 cache, and not from L1.
    hits: the share of the L2 cache in which rows that are read again are still found.
    single: bytes a nanosecond that one multiprocessor reads and writes at most.
    together: how much of the memory's time a thread block waits for, if it is alone.
    overlap: thread blocks beside each other shorten the waits by their number to this power.
    tail: the share of a thread block's time that the last wave lasts longer.
    blend: how sharply the longest of the times wins: they are joined as a norm of this order.
    """

    launch: float
    memory: float
    cache: float
    start: float
    clustered: float
    warp: float
    block: float
    cluster: float
    iteration: float
    latency: float
    spacing: float
    spacing_clustered: float
    elements: float
    code: float
    moved: float
    access: float
    thread: float
    exchange: float
    spilled: float
    lines_read: float
    lines_written: float
    lines_shared: float
    columns: float
    hits: float
    single: float
    together: float
    overlap: float
    tail: float
    blend: float


# `python -m benchmarks.general.fit` prints these, of an H200.
CONSTANTS = Constants(
    launch=315, memory=138, cache=242, start=151, clustered=159, warp=49.2, block=121,
    cluster=636, iteration=15.7, latency=1.39, spacing=151, spacing_clustered=45, elements=1.06,
    code=0.0358, moved=2.2, access=3.87, thread=38.4, exchange=51, spilled=2, lines_read=1.93,
    lines_written=2.05, lines_shared=1.23, columns=0.177, hits=0.539, single=75.8, together=0.839,
    overlap=0.577, tail=0.774, blend=6.97,
)  # fmt: skip


class Features(NamedTuple):
    """What the time of a plan depends on for some number of rows, all thread blocks together.

    Choosing makes one for each plan. A frozen dataclass of so many fields takes 5 µs, this 1 µs.

    bytes: between memory and chip, if every byte moves once.
    again: bytes of rows that are read again.
    in_flight: bytes of all rows that are worked on at a time.
    columns: bytes of columns that thread blocks read, and of rows of tables that rows beside each
        other share.
    tables: bytes of other rows of tables. They come from the L2 cache.
    moved: elements that threads load or store, padding included, of all rows and columns.
    accesses: loads and stores of vectors of them.
    computed: instructions for elements and for values of rows.
    special: those for MUFU, of elements.
    code: doublings of the kernel's code beyond FAST_CODE.
    fetched: how many times as long all instructions take, because the code is too long.
    threads, blocks: how many there are.
    lacking: registers that each thread lacks.
    read, written, shared: lines that are read, written, and moved to or from shared memory.
    resident: thread blocks that a multiprocessor has at a time.
    busy: multiprocessors that have a thread block.
    doublings: the logarithm to base 2 of the size of a cluster.
    warp, block, cluster: exchanges of one thread block, by what they span.
    iterations: of the loops of one thread block.
    memory_waits, cache_waits: how often one thread block waits for memory and for the L2 cache.
    longer: how many times as long all takes.
    """

    bytes: float
    again: float
    in_flight: float
    columns: float
    tables: float
    moved: float
    accesses: float
    computed: float
    special: float
    code: float
    fetched: float
    threads: float
    blocks: float
    lacking: float
    read: float
    written: float
    shared: float
    resident: float
    busy: float
    doublings: float
    warp: float
    block: float
    cluster: float
    iterations: float
    memory_waits: float
    cache_waits: float
    longer: float


def features(plan: Plan, rows: int, rates: Rates = H200) -> Features:
    """The features of a plan for so many rows on a GPU."""
    work, num, place, sweeps = plan.work, plan.numerics, plan.placement, plan.sweeps
    n, rows_per_block, rows_home = work.graph.n, plan.rows_per_block, plan.rows_home
    groups = ceil(rows / rows_per_block)
    blocks = groups * num.cluster_n // place.shares
    elements = groups * rows_per_block * num.step * plan.chunks
    read, written = work.bytes_per_row
    saved, special_saved = instructions_saved(plan)
    computed, special = sweeps.costs[0] - saved, sweeps.costs[1] - special_saved
    computed += SCAN_COSTS * sweeps.scan_words / num.vec_size
    loops, row_loads, column_loads = 1, work.rows, work.columns
    if rows_home is not Home.REGISTERS:
        loops = len(sweeps.loops)
        if place.columns != "staged":
            column_loads = [i for s in sweeps.all for i in s.columns]
    if rows_home is Home.REREAD:
        row_loads = [i for s in sweeps.loops for i in s.rows]
    if work.lookups:
        row_loads = [*row_loads, *looked_up(plan)]
    moved = elements * (len(row_loads) + len(column_loads) + len(work.writes))
    fit, lacking = _resident(plan)
    in_flight = rates.multiprocessors * fit * place.shares / num.cluster_n * rows_per_block
    iterations, memory_waits, cache_waits = _waits(plan)
    spans_warp = num.threads_per_row <= WARP and num.cluster_n == 1
    shared_columns = min(num.threads_per_row, WARP) / WARP  # the rows of a warp read them at once
    shared = 0.0
    if place.loader == "shared":  # once in, and out for each loop
        shared = elements * work.row_bytes / LINE * (1 + loops)
    of_thread = _value_costs(plan)
    if place.shifted:  # two accesses read a vector, and stores go through shared memory
        shared += elements * _lines(num, row_loads)  # The second access finds its lines in L1.
        each, once = shifting(work, rows_home)
        computed, of_thread = computed + each, of_thread + once
        times = 3 if rows_home is Home.SHARED else 2  # once in, and two vectors or one out
        shared += elements * sum([o.dtype.itemsize for o in work.writes]) / LINE * times
    elif work.torn or work.cut:  # so do some rows here
        torn, cut = [i for i in row_loads if i in work.torn], work.cut
        shared += elements * _lines(num, torn)
        shared += elements * sum([o.dtype.itemsize for o in cut]) / LINE * 2
        computed += EACH[rows_home][0] * len(torn) + EACH[rows_home][1] * len(cut)
    if place.columns == "staged":
        shared += elements * _staged_lines(plan)
    own, shared_by_rows = _of_tables(plan) if work.lookups else (0, 0)
    code = _code(plan)
    return Features(
        bytes=rows * (read + written - own - shared_by_rows),
        again=rows * plan.bytes_read_again(),
        in_flight=min(rows, in_flight) * n * work.row_bytes,
        columns=groups * n * sum([i.dtype.itemsize for i in column_loads]) + rows * shared_by_rows,
        tables=rows * own,
        moved=moved,
        accesses=moved / num.vec_size,
        computed=elements * computed + blocks * place.num_threads * of_thread,
        special=elements * special,
        code=max(0.0, log2(code / FAST_CODE)),
        fetched=UNCACHED if code > CACHED_CODE else 1.0,
        threads=blocks * place.num_threads,
        blocks=blocks,
        lacking=lacking,
        read=elements * (_lines(num, row_loads) + _lines(num, column_loads) * shared_columns),
        written=elements * _lines(num, work.writes),
        shared=shared,
        resident=fit,
        busy=min(blocks, rates.multiprocessors),
        doublings=0.0 if place.apart else log2(num.cluster_n),
        warp=sweeps.exchanges * spans_warp,
        block=sweeps.exchanges * (num.cluster_n == 1 and not spans_warp),
        cluster=sweeps.exchanges * (num.cluster_n > 1),
        iterations=iterations,
        memory_waits=memory_waits,
        cache_waits=cache_waits,
        longer=longer(plan) if place.shifted else _longer_streamed(plan),
    )


def _staged_lines(plan: Plan) -> float:
    """Lines of shared memory for an element: columns come in once, and out for each that reads."""
    staged = plan.staged_columns
    reads = [i for sweep in plan.sweeps.all for i in sweep.columns if i in staged]
    return sum([i.dtype.itemsize for i in (*staged, *reads)]) / LINE


def _value_costs(plan: Plan) -> int:
    """Instructions of a thread for what its row has once: values, ranks and addresses."""
    work, target = plan.work, plan.target
    found = plan.sweeps.value_costs + work.value_costs
    if FOLLOWING.name in plan.sweeps.joint:
        warps = ceil(plan.numerics.threads_per_row / WARP) * plan.numerics.cluster_n
        found += following_costs(plan.sweeps.reduces, warps)
    if target.lead > 1 and not target.flat:
        inputs = {i.name for i in work.graph.inputs if i.role in OF_EACH_ROW}
        results = {o.name for o in work.writes}  # pieces of a tensor take its steps together
        found += (DIVISION + STEP * (len(inputs) + len(results))) * (target.lead - 1)
    if work.needs_held:
        by_rank = [reduce for reduce in plan.sweeps.reduces if reduce.is_by_rank]
        found += OF_ROUND * sum([reduce.waits * len(reduce.results) for reduce in by_rank])
    if not plan.work.chains or plan.numerics.in_loops:
        return found
    row = plan.numerics.threads_per_row, plan.numerics.cluster_n
    elements = plan.elements_per_thread
    return found + sum([chain.rounds(*row, elements) for chain in work.chains])


def _of_tables(plan: Plan) -> tuple[int, int]:
    """Bytes of rows of tables for one row: those of its own, and those that its neighbours share.

    Rows beside each other share them where no index has the last leading dimension.
    """
    work, graph = plan.work, plan.graph
    repeated = {name for name, own in plan.target.broadcast if not own[-1]}
    shared = 0
    for node in work.lookups:
        of_index = ancestors(graph, [graph[node.inputs[1]]])
        those = [i for i in graph.inputs if i.id in of_index and i.role in OF_EACH_ROW]
        if all([i.name in repeated for i in those]):
            shared += work.bytes_looked_up(node)
    return work.table_bytes - shared, shared


def _lines(num: Numerics, moved: Iterable[Input | Output]) -> float:
    """Lines of memory for an element of each of these, as warps access them.

    The threads of a row access its neighbouring elements. Where a vector is one element, rows
    begin anywhere in a line.
    """
    elements = min(num.threads_per_row, WARP) * num.vec_size
    beyond = 0.7 if num.vec_size == 1 else 0.0
    lines = 0.0
    for each in moved:
        lines += max(1.0, elements * each.dtype.itemsize / LINE + beyond)
    return lines / elements


def _waits(plan: Plan) -> tuple[int, int, int]:
    """Iterations of loops of one thread block, and how often it waits for memory and for L2."""
    place, loops, rows_home = plan.placement, plan.sweeps.loops, plan.rows_home
    if rows_home is Home.REGISTERS:
        memory_waits = 1 + bool(plan.work.lookups)  # rows of tables wait for their indices
        return 0, memory_waits, int(place.columns == "late" and bool(plan.work.columns))
    together = max(place.unroll, place.prefetch)  # chunks that are waited for together
    if place.prefetch and plan.is_unrolled and rows_home is Home.REREAD:
        together = place.prefetch
    trips = plan.turns * ceil(plan.chunks / together)
    iterations = len(loops) * plan.turns * ceil(plan.chunks / place.unroll)
    if rows_home in (Home.SHARED, Home.PACKED):
        together = ON_THEIR_WAY[rows_home] if place.shifted else plan.turns * plan.chunks
        waits = ceil(plan.turns * plan.chunks / together)
        trips = 0 if place.columns == "staged" else trips
        return iterations, waits, trips * sum([bool(loop.columns) for loop in loops])
    return iterations, trips, trips * max(0, len(loops) - 1)  # no loop: nothing of a row is read


def _code(plan: Plan) -> float:
    """About how many instructions the kernel has, as they are written out."""
    loads, stores = plan.sweeps.moved
    each = plan.sweeps.costs[0] - plan.sweeps.counting_costs  # which is a loop
    each += LOAD_CODE * loads + STORE_CODE * stores
    if not plan.numerics.in_loops:
        return (each + LOAD_CODE * len(plan.work.rows)) * plan.elements_per_thread
    shares = plan.turns if plan.is_unrolled else 1
    return max(1.0, each * plan.numerics.vec_size * plan.placement.unroll * shares)


def _resident(plan: Plan) -> tuple[int, float]:
    """Thread blocks that fit on a multiprocessor, and the registers that each thread lacks."""
    arch, threads = plan.target.arch, plan.placement.num_threads
    needed, most = estimated_registers(plan), allowed(plan, 1)
    tiles = plan.tile_bytes
    if plan.work.chains and not plan.numerics.in_loops:
        row = plan.numerics.threads_per_row, plan.numerics.cluster_n
        tiles += plan.work.rank_bytes(threads, *row, plan.elements_per_thread)
    registers = -(-int(min(max(needed, 24), most)) // 8) * 8
    fit = min(
        arch.registers // (registers * threads),
        arch.fitting(tiles),
        MOST_THREADS // threads,
        MOST_BLOCKS,
    )
    return max(1, fit), max(0.0, needed - most)


@dataclass(frozen=True)
class Cost:
    """The expected time of a kernel in nanoseconds, and the parts that overlap in it.

    memory, cache, issue, special, accesses, blocks, waits: the time of each bound alone; see the
        module.
    around: what nothing overlaps: the launch, and the last wave of thread blocks.
    time: all together.
    """

    memory: float
    cache: float
    issue: float
    special: float
    accesses: float
    blocks: float
    waits: float
    around: float
    time: float

    @property
    def bounds(self) -> dict[str, float]:
        """Each part as a share of the whole time, the largest first."""
        parts = {name: value / self.time for name, value in vars(self).items() if name != "time"}
        return dict(sorted(parts.items(), key=lambda item: -item[1]))

    def __str__(self) -> str:
        """`46.2 µs, bound by memory 0.97, issue 0.61, ...`: the four largest shares."""
        shares = [f"{name} {share:.2f}" for name, share in self.bounds.items()]
        return f"{self.time / 1e3:.1f} µs, bound by {', '.join(shares[:4])}"


def estimate(f, rates: Rates, c, larger=max, smaller=min):
    """The parts of a Cost, in its order, of features and constants.

    Both may have numbers, or for the fit, tensors with an element for each plan.
    larger, smaller: what gives the larger and the smaller of two.
    """
    missed = larger(1 - c.hits * rates.cache_bytes / larger(f.in_flight, 1.0), 0.0)
    memory = (f.bytes + f.again * missed) / smaller(rates.memory, f.busy * c.single)
    cache = (f.bytes + f.again + f.tables + f.columns * c.columns) / rates.cache
    cycles = f.busy * rates.clock  # of all multiprocessors, a nanosecond
    exchanges = f.warp + f.block + f.cluster
    of_thread = c.thread + c.exchange * exchanges + c.spilled * f.lacking
    issued = c.elements * f.computed + c.moved * f.moved + c.access * f.accesses
    issued = (issued + f.threads * of_thread) * f.fetched
    issue = issued / (cycles * 4 * WARP) * (1 + c.code * f.code)
    special = f.special / (cycles * 16)
    accesses = c.lines_read * f.read + c.lines_written * f.written
    accesses = (accesses + c.lines_shared * f.shared) / cycles
    blocks = f.blocks / f.busy * (c.spacing + c.spacing_clustered * f.doublings)
    block = c.start + c.clustered * smaller(f.doublings, 1.0) + c.iteration * f.iterations
    block = block + c.memory * f.memory_waits + c.cache * f.cache_waits
    block = block + c.warp * f.warp + c.block * f.block + c.cluster * f.cluster
    # A thread block alone computes as fast as one thread can, or as all of them are issued.
    alone = larger(c.latency * issued / f.threads, issued / f.blocks / (4 * WARP))
    block = block + alone / rates.clock
    beside = larger(smaller(f.resident, f.blocks / f.busy), 1.0) ** c.overlap
    waits = (c.together * memory + f.blocks / f.busy * block) / beside
    waves = f.blocks / (rates.multiprocessors * f.resident)
    around = c.launch + c.tail * block * smaller(waves, 1.0)
    parts = (memory, cache, issue, special, accesses, blocks, waits)
    together = f.longer * sum([part**c.blend for part in parts]) ** (1 / c.blend)
    return (*parts, around, together + around)


def _longer_streamed(plan: Plan) -> float:
    """How many times as long aligned rows take as the constants say; see LONGER_STREAMED."""
    is_streamed = plan.numerics.form is Form.STREAMED and plan.is_unrolled and not plan.work.writes
    return LONGER_STREAMED if is_streamed and plan.placement.num_threads <= FEW_THREADS else 1.0


def is_computing(plan: Plan, rows: int, share: float = COMPUTING) -> bool:
    """Whether the instructions of so many rows take that share of their memory's time, or more."""
    found = cost(plan, rows)
    return found.issue >= share * found.memory


def cost(plan: Plan, rows: int, rates: Rates = H200, constants: Constants = CONSTANTS) -> Cost:
    """What a plan costs for so many rows."""
    return Cost(*estimate(features(plan, rows, rates), rates, constants))

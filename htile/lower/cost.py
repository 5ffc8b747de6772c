"""How long a plan's kernel takes, computed from what it moves, computes and waits for.

Five things bound a kernel: the bytes between memory and chip, the bytes from the L2 cache, the
instructions that a multiprocessor issues, those of them that its special function units (MUFU)
work on, and what a thread block waits for. Each takes a time of its own. They overlap, so the
whole takes little more than the longest of them: the constant `blend` says how much more.

A multiprocessor hides the waits of a thread block behind other blocks, as many as registers,
shared memory and threads let stay on it at a time. This is Little's law: bytes in flight are bytes
a second times the seconds that each is under way.

The rates of an architecture (`Rates`) are figures of a GPU. The constants (`Constants`) are fitted
to measured times by `python -m benchmarks.general.fit`. Those here are a first guess, and nothing
chooses by them yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from htile.frontend.graph import Graph
from htile.frontend.ops import Op
from htile.lower.patterns import Function
from htile.lower.plan import Plan
from htile.lower.steps import Compute, Home
from htile.lower.work import instructions

WARP = 32  # threads
BLOCK_BYTES = 1024  # of shared memory that a thread block takes beside its own
MOST_THREADS, MOST_BLOCKS = 2048, 32  # of a multiprocessor
MOST_REGISTERS = 255  # of a thread
LOOP_REGISTERS = 48  # about what ptxas gives a thread of a loop, unless the plan says how many fit
FIXED_REGISTERS = 16  # of a thread, beside what it holds of its row
LIVE_REGISTERS = 1.75  # for each register that the row takes by `Work`: what comes of it beside


# Instructions of the special function units (MUFU) that an operation takes for an element.
SPECIAL = {
    Op.SQRT: 1, Op.RSQRT: 1, Op.EXP: 1, Op.EXP2: 1, Op.TANH: 2, Op.SIGMOID: 2, Op.ERF: 1, Op.DIV: 1,
    Op.POW: 2,
}  # fmt: skip
SPECIAL_OF_FUNCTION = {
    Function.BOUNDED: 1, Function.QUOTIENT: 1, Function.NUMBER: 0, Function.FAST: 1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Rates:
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


@dataclass(frozen=True, slots=True)
class Constants:
    """What is fitted. Times are in nanoseconds, instructions are of a thread.

    launch: from the launch to the first thread block, and from the last one to the end.
    memory: from a load to its data, through the L2 cache, on a busy GPU.
    start: of a thread block, until its first load.
    warp, block, cluster: an exchange inside a warp, inside a thread block and over a cluster.
    iteration: an iteration of a loop, beside its instructions.
    moved: instructions for each element that is loaded or stored, with what converts it.
    access: instructions for each vector that is loaded or stored.
    thread: instructions of a thread beside those of its elements.
    exchange: instructions of a thread for each exchange.
    cached: the share of the bytes of columns that come from the L2 cache, and not from L1.
    blend: how sharply the longest of the times wins: they are joined as a norm of this order.
    tail: the share of a thread block's time that the last wave lasts longer.
    single: bytes a nanosecond that one multiprocessor reads and writes at most.
    """

    launch: float = 1500.0
    memory: float = 900.0
    start: float = 400.0
    warp: float = 30.0
    block: float = 120.0
    cluster: float = 900.0
    iteration: float = 25.0
    moved: float = 1.0
    access: float = 3.0
    thread: float = 60.0
    exchange: float = 40.0
    cached: float = 0.6
    blend: float = 4.0
    tail: float = 0.5
    single: float = 70.0


CONSTANTS = Constants()


@dataclass(frozen=True, slots=True)
class Features:
    """What the time of a plan depends on for some number of rows, all thread blocks together.

    bytes: between memory and chip.
    again: bytes of rows that are read again, from the L2 cache.
    columns: bytes of columns that thread blocks read.
    moved: elements that threads load or store, padding included, of all rows and columns.
    accesses: loads and stores of vectors of them.
    computed: instructions for elements. special: those of them for MUFU.
    threads: how many threads there are.
    waves: how often the multiprocessors are filled with thread blocks.
    busy: multiprocessors that have a thread block.
    warp, block, cluster: exchanges of one thread block, by what they span.
    iterations: of the loops of one thread block.
    loads: how often one thread block waits for memory or the L2 cache.
    """

    bytes: float
    again: float
    columns: float
    moved: float
    accesses: float
    computed: float
    special: float
    threads: float
    waves: float
    busy: float
    warp: float
    block: float
    cluster: float
    iterations: float
    loads: float


def features(plan: Plan, rows: int, rates: Rates) -> Features:
    """The features of a plan for so many rows on a GPU."""
    work, num, place = plan.work, plan.numerics, plan.placement
    graph, sweeps = plan.graph, plan.sweeps
    groups = ceil(rows / plan.rows_per_block)
    ctas = groups * num.cluster_n // place.shares
    blocks = resident(plan)
    elements = groups * plan.rows_per_block * num.step * plan.chunks
    read, written = plan.bytes_per_row()
    again = rows * plan.bytes_read_again()
    in_flight = min(rows, rates.multiprocessors * blocks * place.shares / num.cluster_n)
    if in_flight * graph.n * work.row_bytes > rates.cache_bytes / 2:
        read, again = read + again / rows, 0.0  # the L2 cache does not hold them
    parts = [(s.computes, s.parts) for s in sweeps.all]
    parts += [] if num.in_loops else [((), reduce.parts) for reduce in sweeps.reduces]
    moved = sum(len(s.rows) + len(s.columns) for s in sweeps.all) + len(work.writes)
    loads = 1 + sum(bool(s.columns) for s in sweeps.all[1:])
    iterations = 0
    if num.in_loops:
        loops = len(sweeps.loops)
        loads = loops if plan.rows_home is Home.REREAD else loads
        iterations = loops * plan.turns * ceil(plan.chunks / place.unroll)
    else:
        moved += len(work.rows)
    spans_warp = num.threads_per_row <= WARP and num.cluster_n == 1
    passes = len(sweeps.loops) if num.in_loops else 1
    columns = graph.n * sum(i.dtype.itemsize for i in work.columns)
    return Features(
        bytes=rows * (read + written),
        again=again,
        columns=groups * columns * passes,
        moved=moved * elements,
        accesses=moved * elements / num.vec_size,
        computed=elements * sum(instructions(graph, *part) for part in parts),
        special=elements * sum(special_instructions(graph, steps) for steps, _ in parts),
        threads=ctas * place.num_threads,
        waves=ctas / (rates.multiprocessors * blocks),
        busy=min(ctas, rates.multiprocessors),
        warp=sweeps.exchanges * spans_warp,
        block=sweeps.exchanges * (num.cluster_n == 1 and not spans_warp),
        cluster=sweeps.exchanges * (num.cluster_n > 1),
        iterations=iterations,
        loads=loads,
    )


def special_instructions(graph: Graph, computes: tuple[Compute, ...]) -> int:
    """Instructions of MUFU for each element."""
    count = 0
    for step in computes:
        op = graph[step.id].op
        if not graph[step.id].value.spread:
            continue
        if step.function in SPECIAL_OF_FUNCTION:
            count += SPECIAL_OF_FUNCTION[step.function]
        elif op is not Op.DIV or graph[step.inputs[1]].value.spread:
            count += SPECIAL.get(op, 0)
    return count


def registers(plan: Plan) -> int:
    """About how many registers a thread has; ptxas decides it, under what `blocks` allows."""
    num, place, work = plan.numerics, plan.placement, plan.work
    if num.in_loops:
        if not place.blocks:
            return LOOP_REGISTERS
        live = num.vec_size * (work.loops.words + 2 * place.prefetch * work.row_bytes / 4)
    else:
        words = work.held_words(plan.sweeps, place.columns == "late")
        live = plan.elements_per_thread * words
    needed = max(32, int(FIXED_REGISTERS + LIVE_REGISTERS * live))
    most = plan.target.arch.registers // (place.num_threads * max(1, place.blocks))
    return min(needed, most // 8 * 8, MOST_REGISTERS)


def resident(plan: Plan) -> int:
    """CTAs that stay on a multiprocessor at a time, by registers, shared memory and threads."""
    arch, threads = plan.target.arch, plan.placement.num_threads
    tiles = 0
    if plan.placement.loader == "shared":
        tiles = plan.placement.shares * plan.elements_per_thread * plan.work.row_bytes
        tiles *= threads if not plan.numerics.in_loops else plan.numerics.threads_per_row
    return max(1, min(
        arch.registers // (-(-registers(plan) // 8) * 8 * threads),
        (arch.shared_bytes + BLOCK_BYTES) // (tiles + 2 * BLOCK_BYTES),
        MOST_THREADS // threads,
        MOST_BLOCKS,
    ))  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """The expected time of a kernel in nanoseconds, and the parts that overlap in it.

    memory, cache, issue, special, waits: the time of each bound alone; see the module.
    around: what nothing overlaps: the launch, and the last wave of thread blocks.
    """

    memory: float
    cache: float
    issue: float
    special: float
    waits: float
    around: float
    time: float

    @property
    def bounds(self) -> dict[str, float]:
        """Each part as a share of the whole time, the largest first."""
        names = ("memory", "cache", "issue", "special", "waits", "around")
        shares = {name: getattr(self, name) / self.time for name in names}
        return dict(sorted(shares.items(), key=lambda item: -item[1]))


def estimate(f, rates: Rates, c):
    """The parts of a Cost, in its order, of features and constants.

    Both may be of numbers, or of tensors whose elements are plans: so they are fitted.
    """
    bandwidth = _smaller(rates.memory, f.busy * c.single)
    memory = f.bytes / bandwidth
    cache = (f.bytes + f.again + f.columns * c.cached) / rates.cache
    per_ns = rates.multiprocessors * rates.clock * 128  # instructions of threads that are issued
    exchanges = f.warp + f.block + f.cluster
    of_threads = f.threads * (c.thread + c.exchange * exchanges)
    issue = (f.computed + c.moved * f.moved + c.access * f.accesses + of_threads) / per_ns
    special = f.special * 8 / per_ns  # one of eight lanes
    block = c.start + c.memory * f.loads + c.iteration * f.iterations
    block = block + c.warp * f.warp + c.block * f.block + c.cluster * f.cluster
    waits = block * _larger(f.waves, 1.0)
    around = c.launch + c.tail * block * _smaller(f.waves, 1.0)
    parts = (memory, cache, issue, special, waits)
    longest = parts[0]
    for part in parts[1:]:
        longest = _larger(longest, part)
    together = sum((part / longest) ** c.blend for part in parts) ** (1 / c.blend) * longest
    return (*parts, around, together + around)


def cost(plan: Plan, rows: int, rates: Rates = H200, constants: Constants = CONSTANTS) -> Cost:
    """What a plan costs for so many rows."""
    return Cost(*estimate(features(plan, rows, rates), rates, constants))


def _smaller(a, b):
    return (a + b - abs(a - b)) / 2


def _larger(a, b):
    return (a + b + abs(a - b)) / 2

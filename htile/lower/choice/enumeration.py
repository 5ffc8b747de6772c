"""Which plans a graph has on a target: numerics and placements that go together.

Numerics come from N, dtypes, the graph and the architecture alone, so that a row's bits never
depend on the batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product

from ...build.arch import MAX_REGISTERS
from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Graph, Input, Output
from ..over_rows import plans_over_rows
from ..plan import HELD_REGISTERS, ONE_KERNEL_N, ROWS, Form, Numerics, Placement, Plan, Target
from ..ranks import ROWS_TOGETHER
from ..reductions import MOMENTS, VERY_LONG_N
from ..shifting import ON_THEIR_WAY, shifting, staged_bytes
from ..steps import Home
from ..sweeps import Sweeps
from ..vectors import WARP, is_shifted, vector_size
from ..work import Work
from .cost import is_computing

BLOCKS = (64, 128, 256, 512, 1024)  # threads of a CTA whose rows have 2**k threads each
PADDING_SAVED = 0.04  # of a row
MIN_CLUSTER_N = 8192  # Reducing shorter rows is not worth a cluster, or reading them again.
UNROLLED_CHUNKS = 8  # A loop over at most this many chunks of a thread is written out.
UNROLL = 4  # The body of a longer loop works on this many chunks, if nothing is prefetched.

# A kernel's loops may take this many instructions as they are written out: MOST_CODE if they are
# unrolled, and MOST_LOOPED if not. More would take long to compile and overflow the instruction
# cache, so loops whose elements take many instructions have fewer shares of a row, and fewer chunks
# in their bodies. A row of more than MOST_LOOPED * ELEMENTS elements may have one instruction for
# each ELEMENTS of them: it runs longer, and may compile longer. A plan with one share a CTA is
# always listed.
MOST_CODE = 8192
MOST_LOOPED = 1600
ELEMENTS = 200

# A lane takes this many instructions at most for the elements of a row that it holds, if more lanes
# of its warp can work on the row. More would take long to compile, and spill registers.
MOST_HELD_CODE = 4096

# Sums over more than MOST_CHUNKS chunks of a streamed row have two levels. The inner level has
# FOLDED chunks.
MOST_CHUNKS = 32
FOLDED = 16

# These count 32-bit registers of a thread.
SPARE_REGISTERS = 40  # Addresses, predicates and partial results take this many in the examples.
COLUMN_REGISTERS = 16  # Columns that are on their way to unrolled loops may take this many.
ROW_REGISTERS = 32  # Rows and columns that are on their way to unrolled loops may take this many.
MOST_PREFETCHED = 64  # A loop prefetches if one chunk of all that it reads takes no more.
MOST_PACKED = 40  # The rows that a thread has packed take no more.
PACKED_REGISTERS = 8  # Loops over packed rows need this many beside those and what they compute.
LOOP_REGISTERS = 32  # A loop needs this many beside what it computes, reads and writes.
PART_REGISTERS = 9  # Each reduction that a loop carries beside the first takes this many.
SHARE_REGISTERS = 2  # It takes this many more for each share of the row.
COUNT_REGISTERS = 8  # An exchange that counts the elements of a thread takes this many.
ADDRESS_REGISTERS = 8  # Each tensor that a loop moves beside the first FEW_TENSORS takes this many.
POINTER_REGISTERS = 2  # The address of each tensor beside the first FEW_TENSORS takes this many.
FEW_TENSORS = 5
OTHER_REGISTERS = 16  # A thread needs this many beside those of its held row.
RANKS_REGISTERS = 16  # and this many more where it looks for ranks together with others
SCAN_REGISTERS = 2  # A scan needs so many words of its result for each vector of a thread.
CROWDED_REGISTERS = 72  # In CTAs of 512 threads or more, threads that need more are crowded.

# Registers are spared so that this many threads fit on a multiprocessor.
COLUMN_THREADS = 1536  # This is for short rows with columns.
TWO_STAGE_THREADS = 1536  # This is for loops that carry reductions of two stages.
STREAMED_THREADS = 1280  # This is for such loops if they are unrolled and read global memory.
CROWDED_THREADS = 1024  # This is for other loops whose threads are crowded.

LOADERS = {Home.SHARED: "shared", Home.PACKED: "packed", Home.REREAD: "direct"}

FEWEST_APART = 256  # From so many rows on, the CTAs of a row may start apart from each other.
LONG_SHARES = 4  # If there are many very long rows, one CTA may have this many shares of a row.
# A CTA may have several shares of a row that is kept in shared memory, from as many rows on as a
# key says. The values are the most shares, the most chunks that a thread has in all of them, and
# the most threads of a CTA that works on some of them at a time.
KEPT_SHARES = {256: (2, 8, 256), 1024: (8, 16, 512)}
KEPT_BLOCKS = 3  # This many CTAs with several shares each must fit on a multiprocessor.
# A CTA may have so many shares of a streamed row that the row has this many CTAs left, or half of
# its cluster if that is fewer. The key is the number of rows from which on this holds.
STREAMED_CTAS = {64: 2, 256: 1, 1024: 4}
# If a streamed row has 16 shares and a CTA works on two at a time, it may have this many: the first
# that fits. STREAMED_CHUNKS are the chunks that a thread has in all of its shares.
STREAMED_PAIRS = {64: (8,), 256: (16, 8), 1024: (16,)}
STREAMED_CHUNKS = 32


def enumerate_plans(graph: Graph, target: Target) -> list[Plan]:
    """Every sensible plan; none only where reductions need more shared memory than there is."""
    return plans_of_work(Work(graph, target.fastmath), target)


def plans_of_work(work: Work, target: Target) -> list[Plan]:
    """The same, of a graph whose work is there already."""
    enumeration = _Enumeration(work, target)
    if work.graph.over_rows:
        return list(plans_over_rows(work, target, enumeration.held()))
    plans = list(enumeration.held())
    if work.needs_held:  # One CTA may not hold the rows of many inputs
        return plans or list(enumeration.held_in_clusters())
    if work.graph.n >= MIN_CLUSTER_N or not plans:
        plans += enumeration.in_loops()
    return _apart(plans) if _may_start_apart(work, target) else plans


def _may_start_apart(work: Work, target: Target) -> bool:
    """Whether the CTAs of a row do not wait for each other, and rows are so many that it counts."""
    return work.is_map and not target.aliases and target.rows >= FEWEST_APART


def _apart(plans: list[Plan]) -> list[Plan]:
    """The same plans, whose CTAs start in no clusters if they compute about as long as they move.

    The CTAs of a cluster start together, when there is room for all of them. Until then, the room
    of those that have ended is empty. Where memory is what all wait for, that costs nothing, and
    clusters are even a little faster. `docs/traps.md` has the figures.
    """
    divided = [plan for plan in plans if plan.ctas > 1]
    if not divided or not is_computing(divided[0], ROWS[-1]):
        return plans
    return [
        replace(plan, placement=replace(plan.placement, apart=True)) if plan.ctas > 1 else plan
        for plan in plans
    ]


class _Enumeration:
    def __init__(self, work: Work, target: Target):
        self.work, self.target = work, target
        self.n, self.arch = work.graph.n, target.arch
        self.vec = vector_size(work.graph)
        # Threads of a row have whole groups, so that the lanes of a warp have them in every chunk.
        self.fewest = max(1, (work.graph.group_size or 1) // self.vec)
        self.is_shifted = is_shifted(work.graph, target.align)
        tensors = len(work.loaded) + len(work.lookups) + len(work.writes)
        self.most_looped = max(MOST_LOOPED, self.n // ELEMENTS)
        self.spare = SPARE_REGISTERS + POINTER_REGISTERS * max(0, tensors - FEW_TENSORS)
        words = max([node.value.dtype.itemsize / 4 for node in work.scans], default=0)
        self.scan_registers = SCAN_REGISTERS * words  # for each vector of a thread
        # Where nothing is reduced, a row is divided over CTAs that do not wait for each other.
        divides = self.n >= MIN_CLUSTER_N or (work.is_map and self.n > ONE_KERNEL_N)
        self.clusters = self._clusters(self.arch.max_cluster if divides else 1)
        sizes = [i.dtype.itemsize for i in work.rows]
        # Whether cp.async, of 4, 8 or 16 bytes, can bring the rows.
        align = ACCESS_BYTES if self.is_shifted else target.align
        may_come = bool(sizes) and not work.beyond
        self.is_asynchronous = may_come and min(self.vec * min(sizes), align) >= 4

    def is_whole(self, numerics: Numerics) -> bool:
        """Whether no vector reaches beyond the end of a row."""
        return self.work.graph.fills(numerics.step)

    @staticmethod
    def _clusters(most: int) -> list[int]:
        return [cluster for cluster in (1, 2, 4, 8, 16) if cluster <= most]

    def held_in_clusters(self) -> Iterator[Plan]:
        """Plans of rows that are divided although they are short."""
        self.clusters = self._clusters(self.arch.max_cluster)
        return self.held()

    def held(self) -> Iterator[Plan]:
        """Plans whose rows are held, as far as the registers of a thread go.

        In a cluster, whose exchanges take long, a maximum and a sum may be one exchange.
        """
        work = self.work
        columns = ("early", "late") if work.columns else ("early",)
        joins = work.has_pair or work.follows is not None
        kinds = (work.held, work.held_joint) if joins else (work.held,)
        for cluster in self.clusters:
            counts = self._threads(cluster, 1 if cluster == 1 else 128)
            for threads in counts:
                for sweeps, when in product(kinds if cluster > 1 else kinds[:1], columns):
                    numerics = Numerics(self.vec, threads, cluster, joint=sweeps.joint)
                    chunks = numerics.chunks(self.n)
                    code = sweeps.costs[0] * chunks * self.vec
                    if chunks > 1 and threads < min(WARP, counts[-1]) and code > MOST_HELD_CODE:
                        continue
                    yield from self._held_plans(numerics, sweeps, when)

    def _threads(self, cluster: int, least: int) -> list[int]:
        """How many threads may work on a share of a row: powers of two from `least` on.

        Between two of them lies the multiple of 32 that pads rows the least, if it pads them less
        than both by `PADDING_SAVED`.
        """
        vectors = -(-self.n // (self.vec * cluster))

        def padded(threads: int) -> int:
            return -(-vectors // threads) * threads

        found, threads = [], max(least, self.fewest)
        while threads <= self.arch.max_threads:
            found.append(threads)
            if threads >= vectors:
                break
            both = min(padded(threads), padded(2 * threads))
            between = range(threads + WARP, min(2 * threads, self.arch.max_threads), WARP)
            if threads > WARP and between:
                best = min(between, key=padded)
                if padded(best) <= both - PADDING_SAVED * vectors:
                    found.append(best)
            threads *= 2
        return found

    def _held_plans(self, numerics: Numerics, sweeps: Sweeps, columns: str) -> Iterator[Plan]:
        chunks = numerics.chunks(self.n)
        elements = chunks * self.vec
        held = elements * self.work.held_words(sweeps, columns == "late")
        registers = held + max(elements, self.scan_registers * chunks) + self.spare
        if registers > MAX_REGISTERS and elements > self.vec:
            return
        row, chains = (numerics.threads_per_row, numerics.cluster_n), self.work.chains
        if elements > self.vec and not all(c.fits(*row, elements) for c in chains):
            return
        are_together = any([chain.are_together(*row) for chain in chains])
        others = OTHER_REGISTERS + RANKS_REGISTERS * are_together
        registers = min(registers, MAX_REGISTERS)  # the rest is spilled
        share = numerics.share_bytes(self.work)
        of_row = numerics.threads_per_row
        for threads in (of_row, 2 * of_row) if numerics.is_between_powers else BLOCKS:
            rows = threads // of_row
            if threads < of_row or threads > BLOCKS[-1] or (rows > 32 and threads > 256):
                continue
            if registers * threads > self.arch.registers or (numerics.cluster_n > 1 < rows):
                continue
            if are_together and rows > ROWS_TOGETHER:
                continue
            free = self._free_bytes(sweeps, numerics, threads)
            listed = self.work.rank_bytes(threads, *row, elements) if chains else 0
            loaders = {"shared": rows * share} if self.is_asynchronous else {}
            loaders["direct"] = 0
            if self.is_shifted:  # such rows come through registers anyway
                loaders = {"direct": staged_bytes(self.work, self.vec, chunks, threads)}
            for loader, tiles in loaders.items():
                tiles += listed
                if tiles <= free:
                    blocks = self._blocks(sweeps, threads, held, others, tiles)
                    moves = (loader, columns, self.target.align, self.is_shifted)
                    placement = Placement(threads, *moves, blocks=blocks)
                    yield Plan(self.work, self.target, numerics, placement)

    def _blocks(
        self, sweeps: Sweeps, threads: int, held: float, others: int, tiles: int
    ) -> int:
        """CTAs of a multiprocessor that registers are spared for; 0: the compiler decides.

        It decides where a thread holds few registers of its row. With columns it does so too,
        because what is live then depends on when it loads them; but not for one row with one stage.

        held, others: the registers that a thread needs for its row, and beside.
        """
        if not sweeps.reduces:
            return 0
        if self.work.columns:
            alone = len(self.work.rows) == len(sweeps.reduces) == 1 and not sweeps.joint
            few = alone and held <= HELD_REGISTERS / 2 and threads < 1024
            return COLUMN_THREADS // threads if few else 0
        if held < HELD_REGISTERS:
            return 0
        registers = -(-int(held + others) // 8) * 8
        return min(self.arch.registers // (registers * threads), self.arch.fitting(tiles))

    def in_loops(self) -> Iterator[Plan]:
        """Plans whose rows are worked on in loops over two chunks or more.

        Rows are streamed where they do not fit, and may be where they are read once or very long.
        """
        sweeps, loops = self.work.loops, self.work.loops.loops
        has_moments = any(part.kind is MOMENTS for loop in loops for part in loop.parts)
        pairs = ((c, threads) for c in self.clusters for threads in self._threads(c, 128))
        for cluster, threads in pairs:
            numerics = Numerics(self.vec, threads, cluster, Form.LOOPS, sweeps.joint)
            if 2 * numerics.step > self.n:
                continue
            chunks = numerics.chunks(self.n)
            if chunks <= UNROLLED_CHUNKS and chunks % 2 == 0 and self.is_whole(numerics):
                numerics = replace(numerics, merged=has_moments)
            # Numerics do not depend on alignment, so what shifted rows take more does not count.
            fits = numerics.share_bytes(self.work) <= self._free_bytes(sweeps, numerics, threads)
            # Rows that are read only once, because nothing is reduced, need not be kept.
            if fits and self.work.stages and self.is_asynchronous:
                yield from self._loop_plans(numerics, Home.SHARED)
            if fits and self.work.stages and self.is_shifted:
                yield from self._loop_plans(numerics, Home.PACKED)
            if fits:
                yield from self._loop_plans(numerics, Home.REREAD)
            if len(loops) == 1 or not fits or self.n > VERY_LONG_N:
                folded = FOLDED if chunks > MOST_CHUNKS else 0
                streamed = replace(numerics, form=Form.STREAMED, folded=folded)
                yield from self._loop_plans(streamed, Home.REREAD)

    def _loop_plans(self, numerics: Numerics, rows: Home) -> Iterator[Plan]:
        """Plans of one share of a row a CTA, or of several. The rows live at `rows`."""
        loops, chunks = self.work.loops, numerics.chunks(self.n)
        registers = self.spare + self.vec * loops.words
        for shares, abreast in self._shares(numerics, chunks):
            threads, turns = abreast * numerics.threads_per_row, shares // abreast
            if threads > self.arch.max_threads:
                continue
            if min(registers, MAX_REGISTERS) * threads > self.arch.registers:
                continue
            packed = turns * chunks * self._words(self.work.rows) if rows is Home.PACKED else 0
            if packed and (packed > MOST_PACKED or chunks > UNROLLED_CHUNKS):
                continue
            prefetch = self._prefetch(numerics, rows, threads, turns)
            loader = LOADERS[rows]
            unroll = chunks
            if chunks > UNROLLED_CHUNKS:
                unroll = prefetch or (UNROLL if self._reads[rows] <= ROW_REGISTERS else 1)
            most = MOST_CODE if unroll == chunks else self.most_looped
            moves = (loader, "late", self.target.align, self.is_shifted)
            placement = Placement(threads, *moves, shares, abreast, unroll, prefetch)
            tiles = Plan(self.work, self.target, numerics, placement).tile_bytes
            # One vector more follows each row in shared memory, if results may take its place.
            more = ACCESS_BYTES * (len(self.work.rows) + len(self.work.writes)) * self.is_shifted
            if tiles + more > self._free_bytes(loops, numerics, numerics.threads_per_row):
                continue
            if shares > 1 and (
                self._written_out(chunks, unroll, prefetch, rows) * turns > most
                or self.arch.fitting(tiles) < KEPT_BLOCKS
            ):
                continue
            blocks = 0
            if packed:
                needed = packed + self.vec * loops.words + prefetch * self._reads[rows]
                needed += max(0, packed - MOST_PACKED / 2) / 4  # so much more code needs more
                needed = max(needed, self._on_their_way(turns * chunks))
                needed = -(-int(PACKED_REGISTERS + needed) // 8) * 8
                blocks = max(1, self.arch.registers // (threads * needed))
            elif loops.carries_two_stages and numerics.form is Form.LOOPS:
                blocks = min(TWO_STAGE_THREADS // threads, self.arch.fitting(tiles))
                if rows is Home.REREAD and prefetch:  # what is on its way takes registers too
                    needed = LOOP_REGISTERS + self.vec * loops.words + prefetch * self._reads[rows]
                    blocks = max(1, min(blocks, int(self.arch.registers / (threads * needed))))
            elif loops.carries_two_stages and unroll == chunks:
                blocks = STREAMED_THREADS // threads
            elif prefetch and unroll < chunks:
                blocks = 1  # or some registers are spilled, so that two CTAs fit
            elif threads >= 512 and registers > CROWDED_REGISTERS:
                blocks = CROWDED_THREADS // threads
            yield Plan(self.work, self.target, numerics, replace(placement, blocks=blocks))

    @cached_property
    def _reads(self) -> dict[Home, float]:
        """Registers for a chunk of all that the widest loop reads from global memory.

        A key says where the rows live.
        """
        loops, homes = self.work.loops.loops, (Home.SHARED, Home.PACKED, Home.REREAD)
        return {
            home: max((self._words(loop.reads(home)) for loop in loops), default=0.0)
            for home in homes
        }

    def _on_their_way(self, vectors: int) -> float:
        """Registers for the pieces that a thread waits for at a time, of packed rows."""
        most = min(vectors, ON_THEIR_WAY[Home.PACKED])
        return 2 * most * max([self._words((i,)) for i in self.work.rows])

    def _words(self, moved: tuple[Input | Output, ...]) -> float:
        """Registers for a chunk of each."""
        return sum(max(1, self.vec * each.dtype.itemsize / 4) for each in moved)

    def _written_out(self, chunks: int, unroll: int, prefetch: int, rows: Home) -> int:
        """Instructions of a share of the row in all loops, if they are emitted so."""
        bodies = unroll
        if prefetch and unroll < chunks:  # a group, and the rest behind the last whole group
            bodies = prefetch + chunks % prefetch + (prefetch if chunks >= 2 * prefetch else 0)
        instructions = sum(loop.instructions for loop in self.work.loops.loops)
        if self.is_shifted and rows is Home.REREAD:
            instructions += shifting(self.work, rows)[0]
        return int(bodies * self.vec * instructions)

    def _prefetch(self, numerics: Numerics, rows: Home, threads: int, turns: int) -> int:
        """How many chunks are on their way to loops, as the registers of a thread go."""
        loops, chunks = self.work.loops.loops, numerics.chunks(self.n)
        if not (reads := self._reads[rows]):
            return 0
        free = self.arch.registers // threads - LOOP_REGISTERS - self.vec * self.work.loops.words
        if chunks <= UNROLLED_CHUNKS:
            if reads > MOST_PREFETCHED:
                return 0
            every = turns * chunks
            if rows is Home.REREAD:
                return min(every, max(1, int(min(ROW_REGISTERS, free) / reads)))
            fit = int(COLUMN_REGISTERS / reads)  # with those of the chunk that is worked on, or all
            return every if fit >= every else max(1, fit // 2)
        moved = [loop.reads(rows) + loop.stores for loop in loops]
        words = max(map(self._words, moved))
        if words > MOST_PREFETCHED:
            return 0
        if not self.is_whole(numerics) and MOMENTS.name in numerics.joint:
            free -= COUNT_REGISTERS
        carried = max(1, *(len(loop.parts) for loop in loops))
        free -= (PART_REGISTERS + SHARE_REGISTERS * turns) * (carried - 1)
        free -= ADDRESS_REGISTERS * max(0, max(map(len, moved)) - FEW_TENSORS)
        for count in (4, 2):
            code = turns * self._written_out(chunks, count, count, rows)
            if count * words <= free and code <= self.most_looped:
                return count
        return 1

    def _shares(self, numerics: Numerics, chunks: int) -> Iterator[tuple[int, int]]:
        """How many shares of a row a CTA may have, and how many it works on at a time.

        One, or so many that CTAs are left for a GPU.
        """
        yield 1, 1
        rows, cluster = self.target.rows, numerics.cluster_n
        most, turns, abreast = 1, cluster, (1,)
        if numerics.form is Form.LOOPS:
            if rows in KEPT_SHARES:
                most, every, threads = KEPT_SHARES[rows]
                turns = max(1, every // chunks)
                abreast = [k for k in (1, 2, 4) if k * numerics.threads_per_row <= threads]
        elif self.n > VERY_LONG_N:  # unrolled, they would be too much code
            most = LONG_SHARES if rows > ROWS[0] and chunks > UNROLLED_CHUNKS else 1
        elif rows in STREAMED_CTAS:
            most = max(2, cluster // STREAMED_CTAS[rows])
            turns = STREAMED_CHUNKS // chunks
            fits = [k for k in STREAMED_PAIRS[rows] if k <= 2 * turns]
            if fits and cluster == 16:
                yield fits[0], 2
        for shares, count in product((2, 4, 8), abreast):
            if count <= shares <= min(most, cluster, turns * count):
                yield shares, count

    def _free_bytes(self, sweeps: Sweeps, numerics: Numerics, threads: int) -> int:
        """Shared memory that the exchange buffer, its mbarriers and alignment leave for tiles.

        Negative where they do not fit. An mbarrier is initialized by a thread of its own.
        """
        if numerics.threads_per_row <= 32 and numerics.cluster_n == 1:
            return self.arch.shared_bytes
        slots = sweeps.slots + sweeps.scans * numerics.chunks(self.n)
        if numerics.cluster_n > 1 and slots > threads:
            return -1
        word = 8 if sweeps.has_wide_words else 4
        buffer = slots * (threads // 32 * numerics.cluster_n * word + 8)
        return self.arch.shared_bytes - buffer - 64

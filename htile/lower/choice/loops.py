"""The plans whose rows are worked on in loops over their chunks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import product

from ...build.arch import MAX_REGISTERS
from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Input, Output
from ..plan import ROWS, Form, Numerics, Placement, Plan
from ..reductions import MOMENTS, VERY_LONG_N
from ..shifting import ON_THEIR_WAY, shifting
from ..steps import Home
from .bounds import FEW_TENSORS, Bounds

UNROLLED_CHUNKS = 8  # A loop over at most this many chunks of a thread is written out.
UNROLL = 4  # The body of a longer loop works on this many chunks, if nothing is prefetched.

# Unrolled loops may take this many instructions as they are written out, and others MOST_LOOPED.
# More would take long to compile and overflow the instruction cache. So loops whose elements take
# many instructions have fewer shares of a row, and fewer chunks in their bodies. A plan with one
# share a CTA is always listed.
MOST_CODE = 8192

# Sums over more than MOST_CHUNKS chunks of a streamed row have two levels. The inner level has
# FOLDED chunks.
MOST_CHUNKS = 32
FOLDED = 16

# These count 32-bit registers of a thread.
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
CROWDED_REGISTERS = 72  # In CTAs of 512 threads or more, threads that need more are crowded.

# Registers are spared so that this many threads fit on a multiprocessor.
TWO_STAGE_THREADS = 1536  # This is for loops that carry reductions of two stages.
STREAMED_THREADS = 1280  # This is for such loops if they are unrolled and read global memory.
CROWDED_THREADS = 1024  # This is for other loops whose threads are crowded.

LOADERS = {Home.SHARED: "shared", Home.PACKED: "packed", Home.REREAD: "direct"}

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


class LoopPlans(Bounds):
    """A row has several chunks, and lives in shared or global memory, or packed in registers."""

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
            # Numerics do not depend on alignment, so the additional needs of shifted rows do not
            # count.
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
            for columns in self._columns_of_loops(rows):
                yield from self._placed_loops(numerics, rows, columns, shares, abreast)

    def _columns_of_loops(self, rows: Home) -> tuple[str, ...]:
        """How the columns of loops may be loaded, if the rows live at `rows`.

        Beside shifted rows in shared memory, which need some for their results too, staged columns
        leave room for too few CTAs. Without clusters nobody has measured them.
        """
        may_stage = rows is Home.PACKED
        if rows is Home.SHARED:
            may_stage = not self.is_shifted and self.arch.max_cluster > 1
        return ("staged", "late") if may_stage and self._may_stage(self.work.columns) else ("late",)

    def _placed_loops(
        self, numerics: Numerics, rows: Home, columns: str, shares: int, abreast: int
    ) -> Iterator[Plan]:
        """The plan of a CTA that has so many shares of a row, if it fits."""
        loops, chunks = self.work.loops, numerics.chunks(self.n)
        registers = self.spare + self.vec * loops.words
        threads, turns = abreast * numerics.threads_per_row, shares // abreast
        packed = turns * chunks * self._words(self.work.rows) if rows is Home.PACKED else 0
        staged = columns == "staged"
        prefetch = 0 if staged else self._prefetch(numerics, rows, threads, turns)
        loader = LOADERS[rows]
        unroll = chunks
        if chunks > UNROLLED_CHUNKS:
            is_small = staged or self._reads[rows] <= ROW_REGISTERS
            unroll = prefetch or (UNROLL if is_small else 1)
        most = MOST_CODE if unroll == chunks else self.most_looped
        moves = (loader, columns, self.target.align, self.is_shifted)
        placement = Placement(threads, *moves, shares, abreast, unroll, prefetch)
        tiles = Plan(self.work, self.target, numerics, placement).tile_bytes
        # One vector more follows each row in shared memory, if results may take its place, and each
        # staged column.
        tensors = (len(self.work.rows) + len(self.work.writes)) * self.is_shifted
        more = ACCESS_BYTES * (tensors + staged * len(self.work.columns))
        if tiles + more > self._free_bytes(loops, numerics, numerics.threads_per_row):
            return
        if shares > 1 and (
            self._written_out(chunks, unroll, prefetch, rows) * turns > most
            or self.arch.fitting(tiles) < KEPT_BLOCKS
        ):
            return
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
        """How many chunks loops load ahead, as far as the registers of a thread go."""
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

        It is one, or as many as leave enough CTAs to fill a GPU.
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

"""The plans whose rows are held in registers."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product

from ...build.arch import MAX_REGISTERS
from ...frontend.dynamic import ACCESS_BYTES
from ..plan import HELD_REGISTERS, Numerics, Placement, Plan
from ..ranks import ROWS_TOGETHER
from ..shifting import staged_bytes
from ..sweeps import Sweeps
from ..vectors import WARP
from .bounds import Bounds

BLOCKS = (64, 128, 256, 512, 1024)  # threads of a CTA whose rows have 2**k threads each
# A lane takes this many instructions at most for the elements of a row that it holds, if more lanes
# of its warp can work on the row. More would take long to compile, and spill registers.
MOST_HELD_CODE = 4096
# These count 32-bit registers of a thread.
OTHER_REGISTERS = 16  # A thread needs this many beside those of its held row.
RANKS_REGISTERS = 16  # and this many more where it looks for ranks together with others
# Registers are spared so that this many threads of short rows with columns fit on a multiprocessor.
COLUMN_THREADS = 1536


class HeldPlans(Bounds):
    """A row is held as far as the registers of a thread go."""

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
        behind = [i for sweep in sweeps.all[1:] for i in sweep.columns]  # the first exchange
        may_stage = columns == "late" and self._may_stage(behind)
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
                loaders = {"direct": staged_bytes(self.work.writes, self.vec, chunks, threads)}
            ways: dict[tuple[str, str], int] = {}
            for loader, tiles in loaders.items():
                if may_stage and rows == 1:
                    moves = (loader, "staged", self.target.align, self.is_shifted)
                    staged = Plan(self.work, self.target, numerics, Placement(threads, *moves))
                    more = staged.tile_bytes + ACCESS_BYTES * len(behind)  # a vector behind each
                    fit = self.arch.registers // (threads * _whole_registers(held + others))
                    if self.arch.fitting(more) >= min(fit, self.arch.fitting(tiles)):
                        ways[loader, "staged"] = more  # as many CTAs fit as without
                ways[loader, columns] = tiles
            for (loader, when), tiles in ways.items():
                tiles += listed
                if tiles <= free:
                    blocks = self._blocks(sweeps, threads, held, others, tiles)
                    moves = (loader, when, self.target.align, self.is_shifted)
                    placement = Placement(threads, *moves, blocks=blocks)
                    yield Plan(self.work, self.target, numerics, placement)

    def _blocks(
        self, sweeps: Sweeps, threads: int, held: float, others: int, tiles: int
    ) -> int:
        """CTAs of a multiprocessor that registers are spared for; 0: the compiler decides.

        The compiler decides if a thread holds few registers of its row. It also decides if there
        are columns, because what is live then depends on when it loads them, but not for one row
        with one stage.

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
        fit = self.arch.registers // (_whole_registers(held + others) * threads)
        return min(fit, self.arch.fitting(tiles))


def _whole_registers(needed: float) -> int:
    """The registers that a thread gets if it needs so many."""
    return -(-int(needed) // 8) * 8

"""What bounds the plans of one graph on one target, however its rows are kept."""

from __future__ import annotations

from collections.abc import Sequence

from ...frontend.dynamic import ACCESS_BYTES
from ...frontend.graph import Input
from ..plan import ONE_KERNEL_N, Numerics, Target
from ..sweeps import Sweeps
from ..vectors import WARP, is_shifted, vector_size
from ..work import Work

PADDING_SAVED = 0.04  # of a row
MIN_CLUSTER_N = 8192  # Reducing shorter rows is not worth a cluster, or reading them again.
# Columns come to shared memory beside rows of more elements than these, and beside shifted rows of
# more than SHIFTED_N. A CTA may have several shorter rows, which share what it loads of a column.
UNSTAGED_N, SHIFTED_N = 4096, 2048

# Loops that are not unrolled may take MOST_LOOPED instructions as they are written out. A row of
# more than MOST_LOOPED * ELEMENTS elements may have one instruction for each ELEMENTS of them: it
# runs longer, and may compile longer.
MOST_LOOPED = 1600
ELEMENTS = 200

# These count 32-bit registers of a thread.
SPARE_REGISTERS = 40  # Addresses, predicates and partial results take this many in the examples.
POINTER_REGISTERS = 2  # The address of each tensor beside the first FEW_TENSORS takes this many.
FEW_TENSORS = 5
SCAN_REGISTERS = 2  # A scan needs so many words of its result for each vector of a thread.


class Bounds:
    """The numbers and the questions that both kinds of plans share."""

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
        may_come = bool(sizes) and not (work.beyond if self.is_shifted else work.torn)
        self.is_asynchronous = may_come and min(self.vec * min(sizes), align) >= 4

    def is_whole(self, numerics: Numerics) -> bool:
        """Whether no vector reaches beyond the end of a row."""
        return self.work.graph.fills(numerics.step)

    @staticmethod
    def _clusters(most: int) -> list[int]:
        return [cluster for cluster in (1, 2, 4, 8, 16) if cluster <= most]

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

    def _may_stage(self, columns: Sequence[Input]) -> bool:
        """Whether these columns may come to shared memory while rows are on their way.

        They are copied as they are, so their vectors are aligned, and have no fewer bytes than
        cp.async moves.
        """
        is_short = self.n <= (SHIFTED_N if self.is_shifted else UNSTAGED_N)
        if not columns or self.work.graph.over_rows or is_short:
            return False
        sizes = [self.vec * i.dtype.itemsize for i in columns]
        is_aligned = self.target.align >= min(max(sizes), ACCESS_BYTES) and min(sizes) >= 4
        return is_aligned and not any([i.there(self.n) for i in columns])

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

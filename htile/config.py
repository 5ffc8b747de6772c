"""The static decisions of a row-wise kernel: how a row is laid over threads, warps and CTAs.

An emitted kernel names each of them, as its plan has it. Kernels written by hand may leave some
out: the length of the row and its dtype then decide, by the tables below.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from htile.compute.reduce import ReduceLayout
from htile.copy.vector import VectorCopy
from htile.utils import is_power_of_two

# (largest N, threads_per_row). Rows longer than the last N take 256 threads. N counts elements of
# any dtype, because every value takes 32 bits of a register, whatever it takes in memory.
THREADS_PER_ROW = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128))
# (largest N of a 16-bit dtype, cluster_n). Longer rows take clusters of 16. A CTA gets 32 KiB of
# the row, so the limits shrink in proportion for wider dtypes. Narrower dtypes count as 16 bits.
CLUSTER_N = ((16 * 1024, 1), (32 * 1024, 2), (64 * 1024, 4), (128 * 1024, 8))


def default_threads_per_row(N: int) -> int:
    """How many threads of a CTA work on one row."""
    return next((threads for limit, threads in THREADS_PER_ROW if limit >= N), 256)


def default_num_threads(N: int) -> int:
    """How many threads a CTA has."""
    return 128 if N <= 16384 else 256


def default_cluster_n(dtype: type, N: int) -> int:
    """How many CTAs work on one row. More than one needs the clusters of sm_90 and newer."""
    scale = max(dtype.width, 16) // 16
    return next((cluster for limit, cluster in CLUSTER_N if N * scale <= limit), 16)


@dataclass(frozen=True)
class ElementwiseTileConfig:
    """The tile of a row-wise kernel.

    A row of N elements is split into `cluster_n` equal shares. `threads_per_row` threads work on
    each share. Raises ValueError where the numbers do not fit each other.

    dtype: the dtype of the row in memory, from which the defaults of `cluster_n` and `vec_size`
        follow.
    cluster_n: how many shares a row has. With one share a CTA, they are the CTAs of a cluster.
    stage: how many slots the reduction buffer has. With none, nothing is exchanged, and the CTAs of
        a row do not wait for each other.
    shares: how many shares one CTA works on. A cluster then has `cluster_n / shares` CTAs.
    abreast: how many of these shares it works on at the same time, each with threads of its own.
    apart: whether the CTAs of a row start apart from each other, in no cluster. They can not wait
        for each other, so nothing is exchanged.
    num_threads: how many threads a CTA has. As many rows as these threads are enough for make one
        tile.
    threads_per_row: how many threads work on a share: 1, 2, 4, 8, 16 or a multiple of 32.
    copy_bytes: the widest memory access that the alignment of all row operands allows, in bytes:
        16, 8, 4, 2 or 1.
    shifted: whether rows may begin anywhere in memory, and end inside a vector. They are moved in
        aligned pieces as long as vectors, of 4 bytes or more, and shifted in registers. Then
        `copy_bytes` is for columns only.
    any_end: whether rows have another length than N, which is known when the kernel runs, and may
        end at any element. They are shifted.
    evict_first_rows: of up to so many rows the L2 cache drops what is loaded before what else it
        holds. It is for kernels that read rows and write none. With 0, it drops all in their turn.
    reduction_dtype: the dtype of an element of the reduction buffer. It is Float32, or Int64 where
        64-bit values or pairs of numbers are exchanged.
    """

    dtype: type
    N: int
    cluster_n: int | None = None
    stage: int = 1
    shares: int = 1
    abreast: int = 1
    apart: bool = False
    num_threads: int | None = None
    threads_per_row: int | None = None
    copy_bytes: int = 16
    shifted: bool = False
    any_end: bool = False
    evict_first_rows: int = 0
    reduction_dtype: type = Float32

    def __post_init__(self) -> None:
        if self.N < 1:
            raise ValueError(f"N must be at least 1, got {self.N}")
        defaults = {
            "cluster_n": default_cluster_n(self.dtype, self.N),
            "threads_per_row": default_threads_per_row(self.N),
        }
        for name, value in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)
        if self.num_threads is None:
            of_row = max(self.threads_per_row * self.abreast, 1)
            rows = max(default_num_threads(self.N) // of_row, 1)
            object.__setattr__(self, "num_threads", rows * of_row)
        for name in ("cluster_n", "shares", "abreast", "copy_bytes"):
            value = getattr(self, name)
            if value < 1 or not is_power_of_two(value):
                raise ValueError(f"{name} must be a power of two, got {value}")
        threads = self.threads_per_row
        if threads < 1 or (threads % 32 and threads not in (1, 2, 4, 8, 16)):
            raise ValueError(
                f"threads_per_row must be 1, 2, 4, 8, 16 or a multiple of 32, got {threads}"
            )
        if self.num_threads % 32 or not threads <= self.num_threads <= 1024:
            raise ValueError(
                f"num_threads must be a multiple of 32, at most 1024 and at least threads_per_row "
                f"({self.threads_per_row}), got {self.num_threads}"
            )
        if self.cluster_n > 1 and self.threads_per_row < 32:
            raise ValueError(
                "the CTAs of a cluster need whole warps for a row: threads_per_row must be 32 or "
                f"more, got {self.threads_per_row}"
            )
        if self.shares > 1 and self.threads_per_row == 32:
            raise ValueError(
                f"a CTA that works on {self.shares} shares of a row needs two warps or more for "
                f"each: threads_per_row must be 64 or more, got {self.threads_per_row}"
            )
        if self.cluster_n > 16:
            raise ValueError(f"cluster_n must be at most 16, got {self.cluster_n}")
        if self.cluster_n % self.shares:
            raise ValueError(
                f"shares ({self.shares}) must divide cluster_n ({self.cluster_n}): "
                "every CTA works on as many shares of a row"
            )
        if self.apart and self.stage:
            raise ValueError(f"CTAs apart from each other exchange nothing, got stage={self.stage}")
        if self.shares % self.abreast or self.num_threads % (self.threads_per_row * self.abreast):
            raise ValueError(
                f"{self.num_threads} threads do not work on {self.abreast} of {self.shares} shares "
                f"at a time, {self.threads_per_row} on each"
            )

    @property
    def rows(self) -> int:
        """How many rows a CTA works on."""
        return self.num_threads // (self.threads_per_row * self.abreast)

    @property
    def turns(self) -> int:
        """How many shares of its row a thread works on, one after the other."""
        return self.shares // self.abreast

    @property
    def ctas(self) -> int:
        """How many CTAs work on one row."""
        return self.cluster_n // self.shares

    @property
    def warps_per_row(self) -> int:
        """How many warps work on one share of a row: 1 also where several rows fit one warp."""
        return max(self.threads_per_row // 32, 1)

    def vec_size(self, *dtypes: type) -> int:
        """How many neighbouring elements a thread holds: 128 bits of the widest dtype.

        The number is cut to a divisor of N, so that no vector straddles the end of a row.
        """
        widest = max(max(d.width, 8) for d in dtypes or (self.dtype,))
        return math.gcd(self.N, 128 // widest)

    def num_blocks_N(self, vec_size: int) -> int:
        """How many vectors of a share each thread holds, padding included."""
        self._check(vec_size)
        return math.ceil(self.N / (vec_size * self.threads_per_row * self.cluster_n))

    def tiler_mn(self, vec_size: int) -> tuple[int, int]:
        """The tile of one CTA as (rows, columns).

        Shares that are worked on at the same time count as rows, because each has threads of its
        own. The columns are all those that a thread's row of the tile has.
        """
        share = vec_size * self.threads_per_row * self.num_blocks_N(vec_size)
        return (self.rows * self.abreast, share * self.turns)

    def is_even(self, vec_size: int) -> bool:
        """Whether the row fills its tiles, so that no column needs a predicate."""
        return self.tiler_mn(vec_size)[1] * self.abreast * self.ctas == self.N

    def grid(self, M: int | Int32) -> list:
        """The launch grid for M rows. CTAs that are apart have one axis, a row's side by side."""
        tiles = cute.ceil_div(M, self.rows)
        return [tiles * self.ctas, 1, 1] if self.apart else [tiles, self.ctas, 1]

    def grid_of_groups(self, M: int | Int32, groups: int) -> list:
        """The launch grid for M rows that so many groups work on, each row of a CTA for a group."""
        return [cutlass.min(cute.ceil_div(M, self.rows), groups // self.rows), self.ctas, 1]

    @property
    def block(self) -> list[int]:
        """The launch block."""
        return [self.num_threads, 1, 1]

    @property
    def cluster(self) -> list[int] | None:
        """The launch cluster, or None where one CTA has the whole row, or CTAs are apart."""
        return [1, self.ctas, 1] if self.ctas > 1 and not self.apart else None

    def make_vector_copy(self, vec_size: int | None = None) -> VectorCopy:
        """The map of threads to elements, with `vec_size` elements a vector."""
        vec_size = self.vec_size() if vec_size is None else vec_size
        self._check(vec_size)
        return VectorCopy(self.dtype, self.threads_per_row, self.num_threads, vec_size)

    @property
    def reduce_layout(self) -> ReduceLayout:
        """The layout of the reduction buffer."""
        warps = self.num_threads // (32 * self.abreast)
        return ReduceLayout(
            warps, self.warps_per_row, self.cluster_n, self.stage, self.reduction_dtype
        )

    @property
    def needs_buffer(self) -> bool:
        """Whether reductions leave the warp, so that there is a reduction buffer."""
        return self.stage > 0 and (self.threads_per_row > 32 or self.cluster_n > 1)

    @property
    def has_mbars(self) -> bool:
        """Whether reductions leave the CTA, so that there are mbarriers."""
        return self.stage > 0 and self.ctas > 1

    def allocate_reduction_buffer_and_mbar(
        self, smem: SmemAllocator
    ) -> tuple[cute.Tensor | None, cute.Pointer | None]:
        """Allocate (reduction buffer, mbarriers) from the SmemAllocator `smem`.

        The buffer is None where reductions stay in a warp. The mbarriers are None where reductions
        stay in a CTA.
        """
        if not self.needs_buffer:
            return None, None
        buffer = self.reduce_layout.allocate(smem)
        mbar = smem.allocate_array(Int64, self.stage) if self.has_mbars else None
        return buffer, mbar

    @cute.jit
    def initialize_cluster(self, tidx: Int32, mbar_ptr):
        """Initialise one mbarrier for each slot, and arrive at the cluster's barrier.

        `cute.arch.cluster_wait` must follow before a slot is used.
        """
        if cutlass.const_expr(self.has_mbars):
            if tidx < self.stage:
                cute.arch.mbarrier_init(mbar_ptr + tidx, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

    def _check(self, vec_size: int) -> None:
        """Raise ValueError unless vectors of this size end where the row ends."""
        if vec_size < 1 or not is_power_of_two(vec_size) or vec_size > 16:
            raise ValueError(f"vec_size must be 1, 2, 4, 8 or 16, got {vec_size}")
        if self.N % vec_size and not self.shifted:
            raise ValueError(
                f"vec_size {vec_size} does not divide N {self.N}: make it "
                f"{math.gcd(vec_size, self.N)}, or set shifted=True"
            )

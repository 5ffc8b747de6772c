"""How a row is laid over threads, warps and clusters: the static decisions of a row-wise kernel,
made from the row's length and dtype alone, each of which can be overridden."""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int64

from htile.compute.reduce import ReduceLayout
from htile.copy.vector import VectorCopy

# (largest N, threads_per_row); beyond the last: 256. In elements, for every dtype, because a
# row's values are 32 bits in registers whatever they are in memory.
THREADS_PER_ROW = ((64, 8), (128, 16), (3072, 32), (6144, 64), (16384, 128))
# (largest N at 16 bits, cluster_n); beyond the last: 16. That is 32 KiB of row a CTA, so the
# limits are divided by dtype.width / 16 for wider dtypes (narrower ones count as 16 bits).
CLUSTER_N = ((16 * 1024, 1), (32 * 1024, 2), (64 * 1024, 4), (128 * 1024, 8))


def default_threads_per_row(N: int) -> int:
    """Threads that share one row in one CTA."""
    return next((threads for limit, threads in THREADS_PER_ROW if limit >= N), 256)


def default_num_threads(N: int) -> int:
    """Threads of a CTA."""
    return 128 if N <= 16384 else 256


def default_cluster_n(dtype, N: int) -> int:
    """CTAs that share one row (Hopper and newer)."""
    scale = max(dtype.width, 16) // 16
    return next((cluster for limit, cluster in CLUSTER_N if N * scale <= limit), 16)


@dataclass(frozen=True)
class ElementwiseTileConfig:
    """Tile of a row-wise kernel: `threads_per_row` threads to each of `cluster_n` shares of a row.

    shares: how many of them one CTA works on, `abreast` at a time, each with threads of its own;
    the launch has clusters of `cluster_n / shares` CTAs. stage: slots of the reduction buffer; with
    none, nothing is exchanged, and the CTAs of a row do not wait for each other. copy_bytes: widest
    memory access that the alignment of all row operands allows (16, 8, 4, 2, 1). reduction_dtype:
    Float32, or Int64 where 64-bit values or pairs are exchanged.
    """

    dtype: type
    N: int
    cluster_n: int | None = None
    stage: int = 1
    shares: int = 1
    abreast: int = 1
    num_threads: int | None = None
    threads_per_row: int | None = None
    copy_bytes: int = 16
    reduction_dtype: type = Float32

    def __post_init__(self):
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
            threads = max(default_num_threads(self.N), self.threads_per_row * self.abreast)
            object.__setattr__(self, "num_threads", threads)
        sizes = ("cluster_n", "shares", "abreast", "threads_per_row", "num_threads", "copy_bytes")
        for name in sizes:
            value = getattr(self, name)
            if value < 1 or value & (value - 1):
                raise ValueError(f"{name} must be a power of two, got {value}")
        if not self.threads_per_row <= self.num_threads <= 1024 or self.num_threads < 32:
            raise ValueError(
                f"num_threads must be 32 to 1024 and at least threads_per_row "
                f"({self.threads_per_row}), got {self.num_threads}"
            )
        if self.cluster_n > 1 and self.threads_per_row < 32:
            raise ValueError(
                f"a cluster needs whole warps a row, got threads_per_row {self.threads_per_row}"
            )
        if self.shares > 1 and self.threads_per_row == 32:
            raise ValueError("shares of a row that one CTA works on need two warps or more")
        if self.cluster_n > 16:
            raise ValueError(f"cluster_n must be at most 16, got {self.cluster_n}")
        if self.cluster_n % self.shares:
            raise ValueError(f"{self.cluster_n} shares of a row are not {self.shares} a CTA")
        if self.shares % self.abreast or self.num_threads < self.threads_per_row * self.abreast:
            raise ValueError(
                f"{self.num_threads} threads do not work on {self.abreast} of {self.shares} shares "
                f"at a time, {self.threads_per_row} on each"
            )

    @property
    def rows(self) -> int:
        """Rows of a tile."""
        return self.num_threads // (self.threads_per_row * self.abreast)

    @property
    def turns(self) -> int:
        """Shares that a thread works on one after the other."""
        return self.shares // self.abreast

    @property
    def ctas(self) -> int:
        """CTAs that share a row."""
        return self.cluster_n // self.shares

    @property
    def warps_per_row(self) -> int:
        """Warps of one CTA that share a row; 1 also when rows share a warp."""
        return max(self.threads_per_row // 32, 1)

    def vec_size(self, *dtypes) -> int:
        """Vector size of the map: 128 bits of the widest dtype, cut to a divisor of N."""
        widest = max(max(d.width, 8) for d in dtypes or (self.dtype,))
        return math.gcd(self.N, 128 // widest)

    def num_blocks_N(self, vec_size: int) -> int:
        """Vectors of a share that each thread has."""
        self._check(vec_size)
        return math.ceil(self.N / (vec_size * self.threads_per_row * self.cluster_n))

    def tiler_mn(self, vec_size: int) -> tuple[int, int]:
        """(rows, columns) of the tile of one CTA; of rows, as many as have threads of their own."""
        share = vec_size * self.threads_per_row * self.num_blocks_N(vec_size)
        return (self.rows * self.abreast, share * self.turns)

    def is_even(self, vec_size: int) -> bool:
        """Does the row fill its tiles, so that nothing is predicated by column?"""
        return self.tiler_mn(vec_size)[1] * self.abreast * self.ctas == self.N

    def grid(self, M):
        """Launch grid for M rows."""
        return [cute.ceil_div(M, self.rows), self.ctas, 1]

    @property
    def block(self):
        """Launch block."""
        return [self.num_threads, 1, 1]

    @property
    def cluster(self):
        """Launch cluster, None without one."""
        return [1, self.ctas, 1] if self.ctas > 1 else None

    def make_vector_copy(self, vec_size: int | None = None) -> VectorCopy:
        """The map of the tile with `vec_size` elements a vector."""
        vec_size = self.vec_size() if vec_size is None else vec_size
        self._check(vec_size)
        return VectorCopy(self.dtype, self.threads_per_row, self.num_threads, vec_size)

    @property
    def reduce_layout(self) -> ReduceLayout:
        """Layout of the reduction buffer."""
        warps = self.num_threads // (32 * self.abreast)
        return ReduceLayout(
            warps, self.warps_per_row, self.cluster_n, self.stage, self.reduction_dtype
        )

    @property
    def needs_buffer(self) -> bool:
        """Do reductions leave the warp?"""
        return self.stage > 0 and (self.threads_per_row > 32 or self.cluster_n > 1)

    @property
    def has_mbars(self) -> bool:
        """Do reductions leave the CTA?"""
        return self.stage > 0 and self.ctas > 1

    def allocate_reduction_buffer_and_mbar(self, smem):
        """(buffer, mbarriers): None where reductions stay in a warp, or in a CTA."""
        if not self.needs_buffer:
            return None, None
        buffer = self.reduce_layout.allocate(smem)
        mbar = smem.allocate_array(Int64, self.stage) if self.has_mbars else None
        return buffer, mbar

    @cute.jit
    def initialize_cluster(self, tidx, mbar_ptr):
        """Initialise one mbarrier a slot and arrive; `cute.arch.cluster_wait` must follow."""
        if cutlass.const_expr(self.has_mbars):
            if tidx < self.stage:
                cute.arch.mbarrier_init(mbar_ptr + tidx, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive_relaxed()

    def _check(self, vec_size: int):
        """A vector must not straddle the end of the row, nor be odd in size."""
        if vec_size < 1 or vec_size & (vec_size - 1) or vec_size > 16:
            raise ValueError(f"vec_size must be 1, 2, 4, 8 or 16, got {vec_size}")
        if self.N % vec_size:
            raise ValueError(f"vec_size {vec_size} does not divide N {self.N}")

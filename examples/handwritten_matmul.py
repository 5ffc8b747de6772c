"""C = A B^T over all three memories by mma.sync, written by hand over HTile's tiles.

A is (M, K) with contiguous rows, and B is (N, K) like a weight, contiguous along K or along N.
Tiles go from global to swizzled shared memory (cp.async, several stages ahead), from there to
registers (ldmatrix, a block of K ahead), through the tensor cores, and back by way of shared
memory. It runs on sm_80 and newer.
"""

import functools
import math
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.memory import SmemAllocator

from examples.handwritten_softmax import device_arch
from htile.compute.gemm import gemm, tiled_mma
from htile.copy.matrix import (
    GlobalToSharedLoader,
    RegToSharedStorer,
    SharedToGlobalStorer,
    SharedToRegLoader,
    check_alignment,
)
from htile.types.global_tile import GlobalTile, TileIterator
from htile.types.register import AccumulatorMap, AccumulatorTile, WarpLayout
from htile.types.shared import ALIGNMENT, SharedTile
from htile.utils import Static, make_fake_tensor

DTYPES = {torch.float16: cutlass.Float16, torch.bfloat16: cutlass.BFloat16}
TWO_BY_TWO = WarpLayout(2, 2)


@dataclass(frozen=True)
class MatmulConfig:
    """The static decisions of the kernel, apart from its data flow.

    tile: rows, columns and K of the tile that a CTA works on at a time.
    warps: how the warps of the CTA are laid over the tile.
    stages: how many tiles of each operand are in shared memory, loaded or being loaded.
    """

    dtype: type
    b_major: str = "k"
    tile: tuple[int, int, int] = (128, 128, 32)
    warps: WarpLayout = TWO_BY_TWO
    stages: int = 4

    def __post_init__(self) -> None:
        if self.stages < 2 or self.tile[2] < 32:
            raise ValueError(
                "loads ahead take 2 stages or more, and registers that are read ahead take 2 "
                f"blocks of 16 along K or more; got {self.stages} stages of {self.tile[2]}"
            )

    @property
    def a(self) -> SharedTile:
        """Where tiles of A are staged."""
        return SharedTile(self.dtype, (self.tile[0], self.tile[2]), "k", self.stages)

    @property
    def b(self) -> SharedTile:
        """Where tiles of B are staged."""
        return SharedTile(self.dtype, (self.tile[1], self.tile[2]), self.b_major, self.stages)

    @property
    def c(self) -> SharedTile:
        """Where the result is put in order. It takes the place of A and B."""
        return SharedTile(self.dtype, self.tile[:2])


class StagedOperands(Static):
    """Both operands of a product: stages of them in shared memory, and one's K in registers.

    a, b: the shared tiles. sA, sB: their tensors, with as many stages.
    """

    def __init__(
        self, a: SharedTile, b: SharedTile, sA: cute.Tensor, sB: cute.Tensor, mma: cute.TiledMma,
        threads: int, thread: cutlass.Int32,
    ):  # fmt: skip
        self.mma, self.ahead = mma, a.stages - 1
        self.to_shared = [
            GlobalToSharedLoader(tile, sX, threads, thread) for tile, sX in ((a, sA), (b, sB))
        ]
        self.to_registers = [
            SharedToRegLoader(a, sA, mma, "a", thread), SharedToRegLoader(b, sB, mma, "b", thread)
        ]  # fmt: skip
        self.registers = [loader.make_tile() for loader in self.to_registers]
        self.blocks = self.to_registers[0].blocks

    def load(self, gA: GlobalTile, gB: GlobalTile, stage) -> None:
        """Start to copy a tile of each operand to a stage."""
        for loader, tile in zip(self.to_shared, (gA, gB), strict=True):
            loader.load(tile, stage)
        cute.arch.cp_async_commit_group()

    def wait(self) -> None:
        """Wait for the oldest stage that is on its way, and until all warps have come here."""
        cute.arch.cp_async_wait_group(self.ahead - 1)
        cute.arch.sync_threads()

    def read(self, stage, block: int) -> None:
        """Read a block of K of a stage to registers."""
        for loader, tile in zip(self.to_registers, self.registers, strict=True):
            loader.load(stage, block, tile)

    def multiply(self, block: int, acc: AccumulatorTile) -> None:
        """Add the product of a block that was read."""
        gemm(self.mma, *(tile.block(block) for tile in self.registers), acc)


class Matmul:
    """Write A B^T to C (M, N), for mA (M, K) and mB (N, K).

    out_bytes: what the rows of C start and end at multiples of, at most 16.
    has_stmatrix: whether the architecture has that instruction (sm_90 and newer).
    """

    def __init__(self, config: MatmulConfig, out_bytes: int = 16, has_stmatrix: bool = False):
        self.config, self.out_bytes, self.has_stmatrix = config, out_bytes, has_stmatrix

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream: cuda.CUstream):
        tile = self.config.tile
        mma = tiled_mma(self.config.dtype, self.config.warps)
        blocks = cute.ceil_div(mC.shape[0], tile[0]), cute.ceil_div(mC.shape[1], tile[1])
        self.kernel(mA, mB, mC, mma).launch(
            grid=[*blocks, 1], block=[self.config.warps.num_threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mma: cute.TiledMma):
        config, threads = self.config, self.config.warps.num_threads
        thread, _, _ = cute.arch.thread_idx()
        m, n, _ = cute.arch.block_idx()

        # Tiles in all three memories. The result takes the place of the operands.
        gAs = TileIterator(mA, config.a.shape, m)
        gBs = TileIterator(mB, config.b.shape, n)
        gC = GlobalTile(mC, config.c.shape, (m, n))
        smem = SmemAllocator()
        start = smem.allocate(max(config.a.nbytes + config.b.nbytes, config.c.nbytes), ALIGNMENT)
        sA, sB = config.a.over(start), config.b.over(start + config.a.nbytes)
        sC = config.c.over(start)
        places = AccumulatorMap(config.tile[:2], config.warps)
        acc = AccumulatorTile(mma, places)
        acc.fill(0)

        # The first stages are loaded ahead. Tiles beyond K are zeros.
        operands = StagedOperands(config.a, config.b, sA, sB, mma, threads, thread)
        ahead = operands.ahead
        for stage in cutlass.range_constexpr(ahead):
            operands.load(gAs[stage], gBs[stage], stage)
        operands.wait()
        operands.read(0, 0)

        stage, free = cutlass.Int32(0), cutlass.Int32(ahead)
        for k in cutlass.range(gAs.count, unroll=1):
            following = stage + 1 if stage + 1 < config.stages else 0
            for block in cutlass.range_constexpr(operands.blocks):
                if cutlass.const_expr(block == operands.blocks - 1):
                    operands.wait()  # Every warp has read all of this stage; the next is there.
                    operands.read(following, 0)
                else:
                    operands.read(stage, block + 1)
                if cutlass.const_expr(block == 0):
                    # The stage that was read last is free since the barrier above.
                    operands.load(gAs[k + ahead], gBs[k + ahead], free)
                operands.multiply(block, acc)
            free, stage = stage, following

        # Through shared memory, so that whole lines are written.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        RegToSharedStorer(config.c, sC, mma, thread, self.has_stmatrix).store(acc)
        cute.arch.sync_threads()
        SharedToGlobalStorer(config.c, sC, threads, thread, self.out_bytes).store(gC)


def major_of(name: str, matrix: torch.Tensor) -> str:
    """Which neighbours of a matrix (rows, K) are contiguous, as `SharedTile` calls them.

    Raises ValueError where none are.
    """
    if matrix.stride(1) == 1:
        return "k"
    if matrix.stride(0) == 1:
        return "mn"
    raise ValueError(f"{name} has strides {matrix.stride()}: one of them must be 1")


def line_alignment(matrix: torch.Tensor, major: str = "k") -> int:
    """What the lines of a matrix start and end at multiples of, in bytes, at most 16."""
    lines, size = (0, 1) if major == "k" else (1, 0), matrix.element_size()
    between, along = matrix.stride(lines[0]) * size, matrix.shape[lines[1]] * size
    return math.gcd(16, matrix.data_ptr(), between, along)


def fake_operand(dtype: type, rows, columns, major: str = "k", align: int = 16) -> cute.Tensor:
    """What stands for a matrix of any size when a kernel is compiled."""
    step = cute.sym_int64(divisibility=max(align * 8 // dtype.width, 1))
    stride = (step, 1) if major == "k" else (1, step)
    return make_fake_tensor(dtype, (rows, columns), align=align, stride=stride)


@functools.cache
def compile_matmul(dtype, arch, b_major="k", *, out_bytes=16, options="", **variant):
    """Compile for any M, N and K, where lines of A and B are aligned to 16 bytes."""
    config = MatmulConfig(DTYPES[dtype], b_major, **variant)
    m, n, k = (cute.sym_int() for _ in range(3))
    operands = (
        fake_operand(config.dtype, m, k),
        fake_operand(config.dtype, n, k, b_major),
        fake_operand(config.dtype, m, n, align=out_bytes),
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = Matmul(config, out_bytes, has_stmatrix=not arch.startswith("sm_8"))
    return cute.compile(
        kernel, *operands, stream, options=f"--enable-tvm-ffi --gpu-arch {arch} {options}"
    )


def check_operands(**operands: torch.Tensor) -> None:
    """Raise ValueError unless all operands are matrices of one dtype, of 16 bits.

    The rows of the left operand, a, must be contiguous, too.
    """
    dtypes = {each.dtype for each in operands.values()}
    if len(dtypes) > 1 or not dtypes <= set(DTYPES) or any(o.dim() != 2 for o in operands.values()):
        got = ", ".join(f"{name} {o.dtype} {tuple(o.shape)}" for name, o in operands.items())
        raise ValueError(f"expected matrices of one dtype of {list(DTYPES)}, got {got}")
    if major_of("a", operands["a"]) != "k":
        strides = operands["a"].stride()
        raise ValueError(f"the rows of a must be contiguous, but its strides are {strides}")


def check_product(a: torch.Tensor, b: torch.Tensor) -> str:
    """Which neighbours of b are contiguous. Raises ValueError unless a b^T can be computed."""
    check_operands(a=a, b=b)
    if a.shape[1] != b.shape[1]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} differ in K")
    return major_of("b", b)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b^T on the current stream, for CUDA tensors a (M, K) and b (N, K) of 16 bits.

    The rows of a are contiguous. Of b, either rows or columns are, so a (K, N) matrix w is
    multiplied as matmul(a, w.T).
    """
    b_major = check_product(a, b)
    out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    if not a.shape[1]:
        return out.zero_()
    check_alignment("a", "k", line_alignment(a))
    check_alignment("b", b_major, line_alignment(b, b_major))
    if out.numel():
        arch, out_bytes = device_arch(a.device), line_alignment(out)
        compile_matmul(a.dtype, arch, b_major, out_bytes=out_bytes)(a, b, out)
    return out


def error_bound(a: torch.Tensor, b: torch.Tensor, exact: torch.Tensor, dtype) -> torch.Tensor:
    """How far a product may be from the exact one: a chain of float32 sums, and the result's end.

    Each of the K additions may round by 2^-24 of the largest sum that can be, and the result is
    allowed two units in the last place of its dtype.
    """
    sums = a.shape[1] * 2.0**-24 * (a.double().abs() @ b.double().abs().T)
    return sums + 2 * torch.finfo(dtype).eps * exact.abs()


def main():
    """Check the kernel against torch in float64, or compile it for sm_80 if there is no GPU."""
    for dtype in DTYPES:
        for transposed in (False, True):
            major = "mn" if transposed else "k"
            if not torch.cuda.is_available():
                compile_matmul(dtype, "sm_80", major)
                print(f"no GPU: compiled a product of {dtype}, B {major}-major, for sm_80")
                continue
            for m, n, k in ((1, 8, 8), (128, 128, 64), (200, 328, 136), (1000, 1000, 1000)):
                a = torch.randn(m, k, device="cuda", dtype=dtype)
                b = torch.randn(n, k, device="cuda", dtype=dtype)
                b = b.T.contiguous().T if transposed else b
                exact = a.double() @ b.double().T
                error = (matmul(a, b).double() - exact).abs()
                assert (error <= error_bound(a, b, exact, dtype)).all(), (m, n, k)
                print(f"{m}x{n}x{k} {dtype}, B {major}-major: max |error| {error.max():.2e}")


if __name__ == "__main__":
    main()

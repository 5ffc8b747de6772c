"""D = (A B^T) C^T in one kernel, by mma.sync, written by hand over HTile's tiles.

A is (M, K), B (N, K) and C (P, N), like two weights that follow each other. The first product
never leaves the registers: its sums, rounded to 16 bits, lie as the second product wants its left
operand. It runs on sm_80 and newer.
"""

import functools
from dataclasses import dataclass

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass.memory import SmemAllocator

from examples.handwritten_matmul import (
    DTYPES,
    StagedOperands,
    check_operands,
    fake_operand,
    line_alignment,
    major_of,
)
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


@dataclass(frozen=True)
class FusedConfig:
    """The static decisions of the kernel, apart from its data flow.

    tile: rows of A, rows of B, columns of both, and rows of C that a CTA works on at a time.
    rows: how many warps there are. Each has all columns of its rows, so that the first product can
        stay with it.
    stages: how many tiles of A and of B are in shared memory, loaded or being loaded.
    """

    dtype: type
    b_major: str = "k"
    c_major: str = "k"
    tile: tuple[int, int, int, int] = (128, 64, 32, 128)
    rows: int = 8
    stages: int = 4

    @property
    def warps(self) -> WarpLayout:
        return WarpLayout(self.rows, 1)

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
        """Where a tile of C is staged. Its columns are the rows of a tile of B."""
        return SharedTile(self.dtype, (self.tile[3], self.tile[1]), self.c_major)

    @property
    def d(self) -> SharedTile:
        """Where the result is put in order. It takes the place of A, B and C."""
        return SharedTile(self.dtype, (self.tile[0], self.tile[3]))


class FusedMatmul:
    """Write (A B^T) C^T to D (M, P), for mA (M, K), mB (N, K) and mC (P, N).

    out_bytes: what the rows of D start and end at multiples of, at most 16.
    has_stmatrix: whether the architecture has that instruction (sm_90 and newer).
    """

    def __init__(self, config: FusedConfig, out_bytes: int = 16, has_stmatrix: bool = False):
        self.config, self.out_bytes, self.has_stmatrix = config, out_bytes, has_stmatrix

    @cute.jit
    def __call__(
        self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor,
        stream: cuda.CUstream,
    ):  # fmt: skip
        config = self.config
        blocks = (cute.ceil_div(mD.shape[i], config.d.shape[i]) for i in range(2))
        self.kernel(mA, mB, mC, mD, tiled_mma(config.dtype, config.warps)).launch(
            grid=[*blocks, 1], block=[config.warps.num_threads, 1, 1], stream=stream
        )

    @cute.kernel
    def kernel(
        self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mD: cute.Tensor,
        mma: cute.TiledMma,
    ):  # fmt: skip
        config, threads = self.config, self.config.warps.num_threads
        thread, _, _ = cute.arch.thread_idx()
        m, p, _ = cute.arch.block_idx()

        gAs = TileIterator(mA, config.a.shape, m)
        gCs = TileIterator(mC, config.c.shape, p)
        gD = GlobalTile(mD, config.d.shape, (m, p))
        smem = SmemAllocator()
        staged = config.a.nbytes + config.b.nbytes + config.c.nbytes
        start = smem.allocate(max(staged, config.d.nbytes), ALIGNMENT)
        sA, sB = config.a.over(start), config.b.over(start + config.a.nbytes)
        sC = config.c.over(start + config.a.nbytes + config.b.nbytes)
        sD = config.d.over(start)
        inner = AccumulatorTile(mma, AccumulatorMap((config.tile[0], config.tile[1]), config.warps))
        outer = AccumulatorTile(mma, AccumulatorMap(config.d.shape, config.warps))
        outer.fill(0)

        operands = StagedOperands(config.a, config.b, sA, sB, mma, threads, thread)
        to_sC = GlobalToSharedLoader(config.c, sC, threads, thread)
        to_rC = SharedToRegLoader(config.c, sC, mma, "b", thread)
        rC = to_rC.make_tile()

        # The tiles of A and B are one stream over all blocks of N, so that loads stay ahead of
        # their use where a block of N ends. Tiles beyond N are zeros.
        num_k, ahead = gAs.count, operands.ahead
        for stage in cutlass.range_constexpr(ahead):
            gBs = TileIterator(mB, config.b.shape, stage // num_k)
            operands.load(gAs[stage % num_k], gBs[stage % num_k], stage)
        operands.wait()
        operands.read(0, 0)

        stage, free = cutlass.Int32(0), cutlass.Int32(ahead)
        next_n, next_k = ahead // num_k, ahead % num_k
        for n in cutlass.range(gCs.count, unroll=1):
            to_sC.load(gCs[n], 0)  # the commit of the next tiles of A and B is its commit, too
            inner.fill(0)
            for _ in cutlass.range(num_k, unroll=1):
                following = stage + 1 if stage + 1 < config.stages else 0
                for block in cutlass.range_constexpr(operands.blocks):
                    if cutlass.const_expr(block == operands.blocks - 1):
                        operands.wait()  # Every warp has read all of this stage; the next is there.
                        operands.read(following, 0)
                    else:
                        operands.read(stage, block + 1)
                    if cutlass.const_expr(block == 0):
                        # The stage that was read last is free since the barrier above.
                        gBs = TileIterator(mB, config.b.shape, next_n)
                        operands.load(gAs[next_k], gBs[next_k], free)
                        is_last = next_k + 1 == num_k
                        next_n = next_n + 1 if is_last else next_n
                        next_k = 0 if is_last else next_k + 1
                    operands.multiply(block, inner)
                free, stage = stage, following

            # The second product takes the sums of the first as they lie.
            rounded = inner.as_operand(config.dtype)
            cute.arch.cp_async_wait_group(0)
            cute.arch.sync_threads()
            to_rC.load(0, 0, rC)
            for block in cutlass.range_constexpr(to_rC.blocks):
                if cutlass.const_expr(block + 1 < to_rC.blocks):
                    to_rC.load(0, block + 1, rC)
                gemm(mma, rounded[None, None, block], rC.block(block), outer)
            cute.arch.sync_threads()  # every warp has read C, whose place is free

        # All loads have arrived, those beyond the last tile too: the place of A, B and C is free.
        cute.arch.cp_async_wait_group(0)
        cute.arch.sync_threads()
        RegToSharedStorer(config.d, sD, mma, thread, self.has_stmatrix).store(outer)
        cute.arch.sync_threads()
        SharedToGlobalStorer(config.d, sD, threads, thread, self.out_bytes).store(gD)


@functools.cache
def compile_fused(dtype, arch, b_major="k", c_major="k", *, out_bytes=16, options="", **variant):
    """Compile for any M, N, K and P, where lines of A, B and C are aligned to 16 bytes."""
    config = FusedConfig(DTYPES[dtype], b_major, c_major, **variant)
    m, n, k, p = (cute.sym_int() for _ in range(4))
    operands = (
        fake_operand(config.dtype, m, k),
        fake_operand(config.dtype, n, k, b_major),
        fake_operand(config.dtype, p, n, c_major),
        fake_operand(config.dtype, m, p, align=out_bytes),
    )
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = FusedMatmul(config, out_bytes, has_stmatrix=not arch.startswith("sm_8"))
    options = f"--enable-tvm-ffi --gpu-arch {arch} {options}"
    return cute.compile(kernel, *operands, stream, options=options)


def fused_matmul(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """(a b^T) c^T on the current stream, for CUDA tensors a (M, K), b (N, K) and c (P, N).

    They have 16 bits. The rows of a are contiguous; of b and c either rows or columns are. The
    first product is rounded to their dtype.
    """
    check_operands(a=a, b=b, c=c)
    if a.shape[1] != b.shape[1] or b.shape[0] != c.shape[1]:
        shapes = ", ".join(str(tuple(each.shape)) for each in (a, b, c))
        raise ValueError(f"expected shapes (M, K), (N, K) and (P, N), got {shapes}")
    b_major, c_major = major_of("b", b), major_of("c", c)
    out = torch.empty(a.shape[0], c.shape[0], dtype=a.dtype, device=a.device)
    if not b.numel():
        return out.zero_()
    for name, matrix, major in (("a", a, "k"), ("b", b, b_major), ("c", c, c_major)):
        check_alignment(name, major, line_alignment(matrix, major))
    if out.numel():
        kernel = compile_fused(
            a.dtype, device_arch(a.device), b_major, c_major, out_bytes=line_alignment(out)
        )
        kernel(a, b, c, out)
    return out


def error_bound(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, exact: torch.Tensor
) -> torch.Tensor:
    """How far the result may be from the exact one.

    The first product is off by a chain of float32 sums and by its rounding, and the second one
    carries that on, besides its own chain and two units in the last place of the result.
    """
    eps = torch.finfo(a.dtype).eps
    n, k = b.shape
    a, b, c = (each.double() for each in (a, b, c))
    first = (a @ b.T).abs()
    off = k * 2.0**-24 * (a.abs() @ b.abs().T) + eps / 2 * first
    sums = n * 2.0**-24 * (first + off)
    return (off + sums) @ c.abs().T + 2 * eps * exact.abs()


def main():
    """Check the kernel against torch in float64, or compile it for sm_80 if there is no GPU."""
    for dtype in DTYPES:
        if not torch.cuda.is_available():
            compile_fused(dtype, "sm_80")
            print(f"no GPU: compiled two products of {dtype} in one kernel for sm_80")
            continue
        for m, n, k, p in ((1, 8, 8, 1), (128, 64, 32, 128), (300, 200, 136, 100)):
            shapes = ((m, k), (n, k), (p, n))
            a, b, c = (torch.randn(s, device="cuda", dtype=dtype) for s in shapes)
            exact = a.double() @ b.double().T @ c.double().T
            error = (fused_matmul(a, b, c).double() - exact).abs()
            assert (error <= error_bound(a, b, c, exact)).all(), (m, n, k, p)
            print(f"{m}x{n}x{k}x{p} {dtype}, two products: max |error| {error.max():.2e}")


if __name__ == "__main__":
    main()

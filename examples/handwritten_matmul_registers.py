"""C = A B^T over registers only, by mma.sync, written by hand over HTile's tiles.

This is the first product of documents on tiles: global memory to registers, through the tensor
cores, and back. It is short, and slow, because every warp reads its operands from global memory
itself. `handwritten_matmul.py` goes through shared memory.
"""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch

from examples.handwritten_matmul import (
    DTYPES,
    check_product,
    error_bound,
    fake_operand,
    line_alignment,
)
from examples.handwritten_softmax import device_arch
from htile.compute.gemm import gemm, tiled_mma
from htile.copy.matrix import GlobalToRegLoader, RegToGlobalStorer
from htile.types.global_tile import GlobalTile, TileIterator
from htile.types.register import AccumulatorMap, AccumulatorTile, WarpLayout

PAIR = 4  # bytes of two elements that a thread reads or writes at once


class RegisterMatmul:
    """Write A B^T to C (M, N), for mA (M, K) and mB (N, K).

    pairs: for A, B and C, whether two neighbours of a line are one access of 4 bytes.
    """

    warps = WarpLayout(2, 2)
    tile = (64, 64, 32)  # rows, columns and K that a CTA works on at a time

    def __init__(self, dtype: type, pairs: tuple[bool, bool, bool]):
        self.dtype, self.pairs = dtype, pairs

    @cute.jit
    def __call__(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, stream: cuda.CUstream):
        grid = [*(cute.ceil_div(mC.shape[i], self.tile[i]) for i in range(2)), 1]
        mma = tiled_mma(self.dtype, self.warps)
        block = [self.warps.num_threads, 1, 1]
        self.kernel(mA, mB, mC, mma).launch(grid=grid, block=block, stream=stream)

    @cute.kernel
    def kernel(self, mA: cute.Tensor, mB: cute.Tensor, mC: cute.Tensor, mma: cute.TiledMma):
        (tile_m, tile_n, tile_k), (a_pairs, b_pairs, c_pairs) = self.tile, self.pairs
        thread, _, _ = cute.arch.thread_idx()
        m, n, _ = cute.arch.block_idx()

        gAs = TileIterator(mA, (tile_m, tile_k), m)
        load_a = GlobalToRegLoader(mma, "a", thread, a_pairs)
        rA = load_a.make_tile(self.dtype, gAs.shape)

        gBs = TileIterator(mB, (tile_n, tile_k), n)
        load_b = GlobalToRegLoader(mma, "b", thread, b_pairs)
        rB = load_b.make_tile(self.dtype, gBs.shape)

        acc = AccumulatorTile(mma, AccumulatorMap((tile_m, tile_n), self.warps))
        acc.fill(0)
        for k in cutlass.range(gAs.count, unroll=1):
            load_a.load(gAs[k], rA)
            load_b.load(gBs[k], rB)
            gemm(mma, rA, rB, acc)

        gC = GlobalTile(mC, (tile_m, tile_n), (m, n))
        RegToGlobalStorer(mma, thread, c_pairs).store(acc, gC)


@functools.cache
def compile_matmul(dtype, arch, b_major="k", *, pairs=(True, True, True), options=""):
    """Compile for any M, N and K."""
    m, n, k = (cute.sym_int() for _ in range(3))
    operands = [
        fake_operand(DTYPES[dtype], *shape, major, PAIR if paired else PAIR // 2)
        for shape, major, paired in zip(
            ((m, k), (n, k), (m, n)), ("k", b_major, "k"), pairs, strict=True
        )
    ]
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = f"--enable-tvm-ffi --gpu-arch {arch} {options}"
    kernel = RegisterMatmul(DTYPES[dtype], pairs)
    return cute.compile(kernel, *operands, stream, options=options)


def matmul(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """a b^T on the current stream, for CUDA tensors a (M, K) and b (N, K) of 16 bits.

    The rows of a are contiguous. Of b, either rows or columns are.
    """
    b_major = check_product(a, b)
    out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    if not a.shape[1]:
        return out.zero_()
    if out.numel():
        pairs = (
            line_alignment(a) % PAIR == 0,
            b_major == "k" and line_alignment(b) % PAIR == 0,  # along N they are no neighbours
            line_alignment(out) % PAIR == 0,
        )
        compile_matmul(a.dtype, device_arch(a.device), b_major, pairs=pairs)(a, b, out)
    return out


def main():
    """Check the kernel against torch in float64, or compile it for sm_80 if there is no GPU."""
    for dtype in DTYPES:
        if not torch.cuda.is_available():
            compile_matmul(dtype, "sm_80")
            print(f"no GPU: compiled a product of {dtype} over registers for sm_80")
            continue
        for m, n, k in ((1, 1, 1), (64, 64, 32), (77, 100, 50), (500, 300, 129)):
            a = torch.randn(m, k, device="cuda", dtype=dtype)
            b = torch.randn(n, k, device="cuda", dtype=dtype)
            exact = a.double() @ b.double().T
            error = (matmul(a, b).double() - exact).abs()
            assert (error <= error_bound(a, b, exact, dtype)).all(), (m, n, k)
            print(f"{m}x{n}x{k} {dtype} over registers: max |error| {error.max():.2e}")


if __name__ == "__main__":
    main()

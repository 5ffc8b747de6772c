"""C = A B^T on sm_90a, written by hand over HTile's kernel with products.

A is (M, K) with contiguous rows, and B is (N, K) like a weight, contiguous along K or along N.
One warp loads tiles by TMA, several chunks of K ahead, and the thread blocks of a cluster share
those of B. Two warpgroups multiply them by wgmma. The sums go through shared memory (stmatrix) and
by TMA to C, while the next tile is loaded. What HTile emits for `F.linear(x, W)` is this kernel.
"""

import functools

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32

from examples.handwritten_matmul import DTYPES, check_product, error_bound, line_alignment
from htile.compute.tile_rows import TileRows
from htile.copy.matrix import check_alignment
from htile.matmul import MatmulKernelContext, MatmulTileConfig
from htile.utils import make_fake_tensor


class Matmul:
    """Write A B^T to C (M, N)."""

    def __init__(self, config: MatmulTileConfig):
        self.config = config

    @cute.jit
    def __call__(self, mA, mB, mC, clusters: Int32, stream: cuda.CUstream):
        c = self.config
        a_atom, a = c.left_atom(mA)
        b_atom, b = c.right_atom(mB)
        out_atom, out = c.store_atom(mC)
        tiles = c.tiles(mC.shape[0], mC.shape[1])
        self.kernel(
            a_atom, a, b_atom, b, out_atom, out, c.tiled_mma(), Int32(tiles[0]), Int32(tiles[1]),
            Int32(mC.shape[0]), Int32(mC.shape[1]),
        ).launch(
            grid=[*c.cluster, cutlass.min(clusters, tiles[0] * tiles[1])],
            block=c.block, cluster=[*c.cluster, 1], stream=stream, min_blocks_per_mp=1,
        )  # fmt: skip

    @cute.kernel
    def kernel(
        self, a_atom: cute.CopyAtom, a: cute.Tensor, b_atom: cute.CopyAtom, b: cute.Tensor,
        out_atom: cute.CopyAtom, out: cute.Tensor, tiled_mma: cute.TiledMma, tiles_m: Int32,
        tiles_n: Int32, m: Int32, n: Int32,
    ):  # fmt: skip
        ctx = MatmulKernelContext(self.config)
        ctx.setup(
            (a_atom, a), ((b_atom, b),), (out_atom, out), tiled_mma, (tiles_m, tiles_n), (m, n)
        )
        if ctx.is_loader:
            ctx.load_tiles()
        else:
            tile = ctx.begin()
            while ctx.index_of(tile) < ctx.total:
                ctx.multiply(tile)
                for chunk in TileRows(ctx, ctx.index_of(tile)).chunks():
                    chunk.store(chunk.read())
                tile += ctx.step
            ctx.end()


@functools.cache
def compile_matmul(dtype: torch.dtype, major: str = "k", **fields):
    """Compile for any M, N and K whose lines are multiples of 16 bytes."""
    of = DTYPES[dtype]
    config = MatmulTileConfig(of, majors=(major,), stored=of, **fields)
    m, n, k = (cute.sym_int() for _ in range(3))
    b = make_fake_tensor(of, (n, k), 8)
    if major == "mn":
        stride = (1, cute.sym_int64(divisibility=8))
        b = make_fake_tensor(of, (n, k), stride=stride, align=16)
    a, c = make_fake_tensor(of, (m, k), 8), make_fake_tensor(of, (m, n), 8)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    options = "--enable-tvm-ffi --gpu-arch sm_90a"
    return cute.compile(Matmul(config), a, b, c, Int32(1), stream, options=options)


def matmul(a: torch.Tensor, b: torch.Tensor, **fields) -> torch.Tensor:
    """a @ b.T of CUDA tensors (M, K) and (N, K); N and all lines are multiples of 8 elements."""
    major = check_product(a, b)
    out = torch.empty(a.shape[0], b.shape[0], dtype=a.dtype, device=a.device)
    if not a.shape[1]:
        return out.zero_()
    for name, matrix, lines in (("a", a, "k"), ("b", b, major), ("the result", out, "k")):
        check_alignment(name, lines, line_alignment(matrix, lines))
    if out.numel():
        processors = torch.cuda.get_device_properties(a.device).multi_processor_count
        cluster = fields.get("cluster", MatmulTileConfig.cluster)
        function = compile_matmul(a.dtype, major, **fields)
        function(a, b, out, processors // (cluster[0] * cluster[1]))
    return out


def main():
    """Check the kernel against torch in float64 on sm_90a, or compile it elsewhere."""
    is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    for dtype in DTYPES:
        for major in ("k", "mn"):
            if not is_hopper:
                compile_matmul(dtype, major)
                print(f"no GPU of sm_90a: compiled a product of {dtype}, B {major}-major")
                continue
            for m, n, k in ((1, 8, 8), (128, 256, 64), (200, 328, 136), (1000, 1000, 1000)):
                a = torch.randn(m, k, device="cuda", dtype=dtype)
                b = torch.randn(n, k, device="cuda", dtype=dtype)
                b = b.T.contiguous().T if major == "mn" else b
                exact = a.double() @ b.double().T
                error = (matmul(a, b).double() - exact).abs()
                assert (error <= error_bound(a, b, exact, dtype)).all(), (m, n, k)
                print(f"{m}x{n}x{k} {dtype}, B {major}-major: max |error| {error.max():.2e}")


if __name__ == "__main__":
    main()

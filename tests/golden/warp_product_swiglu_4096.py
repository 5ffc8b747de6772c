"""swiglu: rows of N = 4096, 2 products of bf16."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from htile.compute import math
from htile.compute.tile_rows import TileRows
from htile.utils import make_fake_tensor
from htile.warp_matmul import WarpMatmulConfig, WarpMatmulContext

config = WarpMatmulConfig(
    BFloat16, tile=(128, 128), stages=5, products=2, major="k", chunk=32, warps=4
)


@cute.kernel
def swiglu_kernel(
    left: cute.Tensor,
    right0: cute.Tensor,
    right1: cute.Tensor,
    mOut_0: cute.Tensor,
    tiled_mma: cute.TiledMma,
    tiles_m: Int32,
    tiles_n: Int32,
    rows_m: Int32,
):
    ctx = WarpMatmulContext(config)
    ctx.setup(left, (right0, right1), tiled_mma, (tiles_m, tiles_n), (rows_m, 4096))
    rows = TileRows(ctx, ctx.index)
    ctx.multiply()
    for chunk in rows.chunks():
        product0 = chunk.read(0)
        product1 = chunk.read(1)
        sigmoid0 = math.sigmoid_near(product0)  # products.py:28
        mul0 = product0 * sigmoid0  # products.py:28
        mul1 = mul0 * product1  # products.py:28
        chunk.store_direct(mOut_0, mul1, in_pairs=True)


@cute.jit
def swiglu(
    mLeft: cute.Tensor,
    mRight0: cute.Tensor,
    mRight1: cute.Tensor,
    mOut_0: cute.Tensor,
    stream: cuda.CUstream,
):
    tiles_m, tiles_n = config.tiles(mLeft.shape[0], 4096)
    swiglu_kernel(
        mLeft,
        mRight0,
        mRight1,
        mOut_0,
        config.tiled_mma(),
        Int32(tiles_m),
        Int32(tiles_n),
        Int32(mLeft.shape[0]),
    ).launch(
        grid=[tiles_m * tiles_n, 1, 1],
        block=config.block,
        stream=stream,
        min_blocks_per_mp=1,
        preferred_smem_carveout=-1,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (
        make_fake_tensor(BFloat16, (m, 64), 8),
        make_fake_tensor(BFloat16, (4096, 64), 8),
        make_fake_tensor(BFloat16, (4096, 64), 8),
        make_fake_tensor(BFloat16, (m, 4096), 2),
    )

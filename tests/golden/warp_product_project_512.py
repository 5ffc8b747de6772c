"""project: rows of N = 512, 1 product of bf16."""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from htile.compute import math
from htile.compute.tile_rows import TileRows
from htile.utils import make_fake_tensor, transposed
from htile.warp_matmul import WarpMatmulConfig, WarpMatmulContext

config = WarpMatmulConfig(
    BFloat16, tile=(64, 128), stages=6, products=1, major="mn", chunk=128, warps=4
)


@cute.kernel
def project_kernel(
    left: cute.Tensor,
    right0: cute.Tensor,
    mResidual_0: cute.Tensor,
    mOut0_0: cute.Tensor,
    mSumOfGroups4_0: cute.Tensor,
    tiled_mma: cute.TiledMma,
    tiles_m: Int32,
    tiles_n: Int32,
    rows_m: Int32,
):
    ctx = WarpMatmulContext(config)
    ctx.setup(left, (right0,), tiled_mma, (tiles_m, tiles_n), (rows_m, 512))
    rows = TileRows(ctx, ctx.index)
    ctx.multiply()
    ahead = rows.prefetch(mResidual_0, in_pairs=True)
    for chunk, loaded0 in rows.chunks(ahead):
        product0 = chunk.read(0)
        loaded0 = math.convert(loaded0, Float32)
        add0 = product0 + loaded0  # products.py:51
        mul0 = add0 * add0  # products.py:52
        grouped0 = chunk.group_reduce(mul0, cute.ReductionOp.ADD, 128)
        chunk.store_direct(mOut0_0, add0, in_pairs=True)
        chunk.store_group(mSumOfGroups4_0, grouped0)


@cute.jit
def project(
    mLeft: cute.Tensor,
    mRight0: cute.Tensor,
    mResidual_0: cute.Tensor,
    mOut0_0: cute.Tensor,
    mSumOfGroups4_0: cute.Tensor,
    stream: cuda.CUstream,
):
    tiles_m, tiles_n = config.tiles(mLeft.shape[0], 512)
    project_kernel(
        mLeft,
        transposed(mRight0),
        mResidual_0,
        mOut0_0,
        mSumOfGroups4_0,
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
        make_fake_tensor(BFloat16, (64, 512), 8),
        make_fake_tensor(BFloat16, (m, 512), 2),
        make_fake_tensor(BFloat16, (m, 512), 2),
        make_fake_tensor(Float32, (m, 4), 1),
    )

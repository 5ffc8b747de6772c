"""project: rows of N = 512, 1 product of bf16."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32

from htile.compute import math
from htile.compute.tile_rows import TileRows
from htile.matmul import MatmulKernelContext, MatmulTileConfig
from htile.utils import make_fake_tensor, transposed

config = MatmulTileConfig(
    BFloat16,
    tile=(128, 128),
    cluster=(2, 1),
    stages=6,
    products=1,
    majors=("mn",),
    chunk=128,
    stored=None,
    warp_groups=2,
)


@cute.jit
def project_tiles(
    ctx, tile, mResidual_0: cute.Tensor, mOut0_0: cute.Tensor, mSumOfGroups4_0: cute.Tensor
):
    while ctx.index_of(tile) < ctx.total:
        rows = TileRows(ctx, ctx.index_of(tile))
        ahead = rows.prefetch(mResidual_0, in_pairs=True)
        ctx.multiply(tile)
        for chunk, loaded0 in rows.chunks(ahead):
            product0 = chunk.read(0)
            loaded0 = math.convert(loaded0, Float32)
            add0 = product0 + loaded0  # products.py:51
            mul0 = add0 * add0  # products.py:52
            grouped0 = chunk.group_reduce(mul0, cute.ReductionOp.ADD, 128)
            chunk.store_direct(mOut0_0, add0, in_pairs=True)
            chunk.store_group(mSumOfGroups4_0, grouped0)
        tile += ctx.step
    return tile


@cute.kernel
def project_kernel(
    left_atom: cute.CopyAtom,
    left: cute.Tensor,
    right0_atom: cute.CopyAtom,
    right0: cute.Tensor,
    mResidual_0: cute.Tensor,
    mOut0_0: cute.Tensor,
    mSumOfGroups4_0: cute.Tensor,
    tiled_mma: cute.TiledMma,
    tiles_m: Int32,
    tiles_n: Int32,
    rows_m: Int32,
):
    ctx = MatmulKernelContext(config)
    ctx.setup(
        (left_atom, left),
        ((right0_atom, right0),),
        None,
        tiled_mma,
        (tiles_m, tiles_n),
        (rows_m, 512),
    )
    cute.arch.griddepcontrol_wait()  # the kernel before has ended
    if ctx.is_loader:
        ctx.load_tiles()
    else:
        tile = ctx.begin()
        project_tiles(ctx, tile, mResidual_0, mOut0_0, mSumOfGroups4_0)
        ctx.end()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start


@cute.jit
def project(
    mLeft: cute.Tensor,
    mRight0: cute.Tensor,
    mResidual_0: cute.Tensor,
    mOut0_0: cute.Tensor,
    mSumOfGroups4_0: cute.Tensor,
    clusters: Int32,
    stream: cuda.CUstream,
):
    left_atom, left = config.left_atom(mLeft)
    right0_atom, right0 = config.right_atom(transposed(mRight0))
    tiles_m, tiles_n = config.tiles(mLeft.shape[0], 512)
    project_kernel(
        left_atom,
        left,
        right0_atom,
        right0,
        mResidual_0,
        mOut0_0,
        mSumOfGroups4_0,
        config.tiled_mma(),
        Int32(tiles_m),
        Int32(tiles_n),
        Int32(mLeft.shape[0]),
    ).launch(
        grid=[*config.cluster, cutlass.min(clusters, tiles_m * tiles_n)],
        block=config.block,
        cluster=[*config.cluster, 1],
        stream=stream,
        use_pdl=True,
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
        Int32(1),
    )

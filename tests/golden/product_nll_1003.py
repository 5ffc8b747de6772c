"""nll: rows of N = 1003, 1 product of bf16."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from htile.compute import math
from htile.compute.tile_rows import TileRows
from htile.matmul import MatmulKernelContext, MatmulTileConfig
from htile.utils import make_fake_tensor

config = MatmulTileConfig(
    BFloat16,
    tile=(128, 256),
    cluster=(2, 1),
    stages=4,
    products=1,
    majors=("k",),
    chunk=128,
    stored=None,
    warp_groups=2,
)


@cute.jit
def nll_tiles(
    ctx,
    tile,
    mLabel_0: cute.Tensor,
    mMaxOfGroups2_0: cute.Tensor,
    mSumOfGroups10_0: cute.Tensor,
    mMaxOfGroups27_0: cute.Tensor,
):
    while ctx.index_of(tile) < ctx.total:
        rows = TileRows(ctx, ctx.index_of(tile))
        given0 = rows.load_row_value(mLabel_0)
        lt1 = math.lt(given0, Int64(0))  # products.py:40
        add0 = given0 + Int64(1003)  # products.py:40
        where3 = math.where(lt1, add0, given0)  # products.py:40
        maximum0 = math.maximum(where3, Int64(-1))  # products.py:40
        minimum0 = math.minimum(maximum0, Int64(1003))  # products.py:40
        convert0 = math.convert(minimum0, Int32)  # products.py:40
        ctx.multiply(tile)
        for chunk in rows.chunks():
            product0 = chunk.read(0)
            index0 = chunk.cols
            lt0 = math.lt(index0, Int32(1003))
            where0 = math.where(lt0, product0, -Float32.inf)
            grouped0 = chunk.group_reduce(where0, cute.ReductionOp.MAX, 128)
            abs0 = math.abs(grouped0)
            eq0 = math.eq(abs0, Float32.inf)
            where1 = math.where(eq0, 0.0, grouped0)
            sub0 = product0 - where1
            exp0 = math.exp(sub0)
            where2 = math.where(lt0, exp0, 0.0)
            grouped1 = chunk.group_reduce(where2, cute.ReductionOp.ADD, 128)
            grouped2 = chunk.group_element(product0, chunk.of(convert0), Int32(1003))
            chunk.store_group(mMaxOfGroups2_0, grouped0)
            chunk.store_group(mSumOfGroups10_0, grouped1)
            chunk.store_group(mMaxOfGroups27_0, grouped2)
        tile += ctx.step
    return tile


@cute.kernel
def nll_kernel(
    left_atom: cute.CopyAtom,
    left: cute.Tensor,
    right0_atom: cute.CopyAtom,
    right0: cute.Tensor,
    mLabel_0: cute.Tensor,
    mMaxOfGroups2_0: cute.Tensor,
    mSumOfGroups10_0: cute.Tensor,
    mMaxOfGroups27_0: cute.Tensor,
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
        (rows_m, 1003),
    )
    cute.arch.griddepcontrol_wait()  # the kernel before has ended
    if ctx.is_loader:
        ctx.load_tiles()
    else:
        tile = ctx.begin()
        nll_tiles(ctx, tile, mLabel_0, mMaxOfGroups2_0, mSumOfGroups10_0, mMaxOfGroups27_0)
        ctx.end()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start


@cute.jit
def nll(
    mLeft: cute.Tensor,
    mRight0: cute.Tensor,
    mLabel_0: cute.Tensor,
    mMaxOfGroups2_0: cute.Tensor,
    mSumOfGroups10_0: cute.Tensor,
    mMaxOfGroups27_0: cute.Tensor,
    clusters: Int32,
    stream: cuda.CUstream,
):
    left_atom, left = config.left_atom(mLeft)
    right0_atom, right0 = config.right_atom(mRight0)
    tiles_m, tiles_n = config.tiles(mLeft.shape[0], 1003)
    nll_kernel(
        left_atom,
        left,
        right0_atom,
        right0,
        mLabel_0,
        mMaxOfGroups2_0,
        mSumOfGroups10_0,
        mMaxOfGroups27_0,
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
        make_fake_tensor(BFloat16, (1003, 64), 8),
        make_fake_tensor(Int64, (m,), any_stride=True),
        make_fake_tensor(Float32, (m, 8), 1),
        make_fake_tensor(Float32, (m, 8), 1),
        make_fake_tensor(Float32, (m, 8), 1),
        Int32(1),
    )

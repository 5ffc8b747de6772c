"""softmax: rows of N = 104, 1 product of bf16."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32

from htile.compute import math
from htile.compute.tile_rows import TileRows
from htile.matmul import MatmulKernelContext, MatmulTileConfig
from htile.utils import make_fake_tensor

config = MatmulTileConfig(
    BFloat16,
    tile=(64, 128),
    cluster=(2, 1),
    stages=9,
    products=1,
    majors=("k",),
    chunk=32,
    stored=BFloat16,
    warp_groups=1,
)


@cute.jit
def softmax_tiles(ctx, tile):
    while ctx.index_of(tile) < ctx.total:
        rows = TileRows(ctx, ctx.index_of(tile))
        ctx.multiply(tile)
        max0 = rows.partial(cute.ReductionOp.MAX)
        for chunk in rows.chunks():
            product0 = chunk.read(0)
            max0.take(chunk, product0)
        max1 = max0.reduced()  # products.py:68
        sum0 = rows.partial(cute.ReductionOp.ADD)
        for chunk in rows.chunks():
            product0 = chunk.read(0)
            sub0 = product0 - chunk.of(max1)  # products.py:68
            exp0 = math.exp_bounded(sub0)  # products.py:68
            sum0.take(chunk, exp0)
        sum1 = sum0.reduced()  # products.py:68
        for chunk in rows.chunks():
            product0 = chunk.read(0)
            sub0 = product0 - chunk.of(max1)  # products.py:68
            exp0 = math.exp_bounded(sub0)  # products.py:68
            div0 = math.div_bounded(exp0, chunk.of(sum1))  # products.py:68
            chunk.store(div0)
        tile += ctx.step
    return tile


@cute.kernel
def softmax_kernel(
    left_atom: cute.CopyAtom,
    left: cute.Tensor,
    right0_atom: cute.CopyAtom,
    right0: cute.Tensor,
    out_atom: cute.CopyAtom,
    out: cute.Tensor,
    tiled_mma: cute.TiledMma,
    tiles_m: Int32,
    tiles_n: Int32,
    rows_m: Int32,
):
    ctx = MatmulKernelContext(config)
    ctx.setup(
        (left_atom, left),
        ((right0_atom, right0),),
        (out_atom, out),
        tiled_mma,
        (tiles_m, tiles_n),
        (rows_m, 104),
    )
    cute.arch.griddepcontrol_wait()  # the kernel before has ended
    if ctx.is_loader:
        ctx.load_tiles()
    else:
        tile = ctx.begin()
        softmax_tiles(ctx, tile)
        ctx.end()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start


@cute.jit
def softmax(
    mLeft: cute.Tensor,
    mRight0: cute.Tensor,
    mOut_0: cute.Tensor,
    clusters: Int32,
    stream: cuda.CUstream,
):
    left_atom, left = config.left_atom(mLeft)
    right0_atom, right0 = config.right_atom(mRight0)
    out_atom, out = config.store_atom(mOut_0)
    tiles_m, tiles_n = config.tiles(mLeft.shape[0], 104)
    softmax_kernel(
        left_atom,
        left,
        right0_atom,
        right0,
        out_atom,
        out,
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
        make_fake_tensor(BFloat16, (104, 64), 8),
        make_fake_tensor(BFloat16, (m, 104), 8),
        Int32(1),
    )

"""swiglu: rows of N = 4096, 2 products of bf16."""

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
    tile=(128, 192),
    cluster=(2, 1),
    stages=5,
    products=2,
    majors=("k",),
    chunk=32,
    stored=BFloat16,
    warp_groups=2,
    in_turns=True,
    parts=2,
)


@cute.jit
def swiglu_tiles(ctx, tile):
    while ctx.index_of(tile) < ctx.total:
        rows = TileRows(ctx, ctx.index_of(tile))
        ctx.multiply(tile)
        for chunk in rows.chunks():
            product0 = chunk.read(0)
            product1 = chunk.read(1)
            sigmoid0 = math.sigmoid_near(product0)  # products.py:28
            mul0 = product0 * sigmoid0  # products.py:28
            mul1 = mul0 * product1  # products.py:28
            chunk.store(mul1)
        tile += ctx.step
    return tile


@cute.kernel
def swiglu_kernel(
    left_atom: cute.CopyAtom,
    left: cute.Tensor,
    right0_atom: cute.CopyAtom,
    right0: cute.Tensor,
    right1_atom: cute.CopyAtom,
    right1: cute.Tensor,
    out_atom: cute.CopyAtom,
    out: cute.Tensor,
    right0_narrow: cute.CopyAtom,
    right1_narrow: cute.CopyAtom,
    tiled_mma: cute.TiledMma,
    tiles_m: Int32,
    tiles_n: Int32,
    rows_m: Int32,
):
    ctx = MatmulKernelContext(config)
    ctx.setup(
        (left_atom, left),
        ((right0_atom, right0), (right1_atom, right1)),
        (out_atom, out),
        tiled_mma,
        (tiles_m, tiles_n),
        (rows_m, 4096),
        (right0_narrow, right1_narrow),
    )
    cute.arch.griddepcontrol_wait()  # the kernel before has ended
    if ctx.is_loader:
        ctx.load_tiles()
    else:
        tile = ctx.begin()
        tile = swiglu_tiles(ctx, tile)
        swiglu_tiles(ctx.narrow, tile)
        ctx.end()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start


@cute.jit
def swiglu(
    mLeft: cute.Tensor,
    mRight0: cute.Tensor,
    mRight1: cute.Tensor,
    mOut_0: cute.Tensor,
    clusters: Int32,
    stream: cuda.CUstream,
):
    left_atom, left = config.left_atom(mLeft)
    right0_atom, right0 = config.right_atom(mRight0)
    right1_atom, right1 = config.right_atom(mRight1)
    out_atom, out = config.store_atom(mOut_0)
    right0_narrow, _ = config.narrow.right_atom(mRight0)
    right1_narrow, _ = config.narrow.right_atom(mRight1)
    tiles_m, tiles_n = config.tiles(mLeft.shape[0], 4096)
    swiglu_kernel(
        left_atom,
        left,
        right0_atom,
        right0,
        right1_atom,
        right1,
        out_atom,
        out,
        right0_narrow,
        right1_narrow,
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
        make_fake_tensor(BFloat16, (4096, 64), 8),
        make_fake_tensor(BFloat16, (4096, 64), 8),
        make_fake_tensor(BFloat16, (m, 4096), 8),
        Int32(1),
    )

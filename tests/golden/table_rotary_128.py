"""table_rotary: one row of N = 64.

x bf16, pos i64, table bf16 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor, table_of, view_of

config = ElementwiseTileConfig(
    BFloat16, N=64, num_threads=128, threads_per_row=8, cluster_n=1, stage=0
)


@cute.kernel
def table_rotary_kernel(
    mX: cute.Tensor,
    mPos: cute.Tensor,
    mTable: cute.Tensor,
    mOut: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    mX0 = view_of(mX, (0,), (1,), 64)
    mX1 = view_of(mX, (64,), (1,), 64)
    mTable0 = table_of(mTable, (0, 0), (0, 1), 64)
    mTable1 = table_of(mTable, (0, 64), (0, 1), 64)
    mOut0 = view_of(mOut, (0,), (1,), 64)
    mOut1 = view_of(mOut, (64,), (1,), 64)
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX0, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX0 = loader.start(mX0)
    tXrX1 = loader.start(mX1)
    pos = ctx.load_row_value(mPos)
    lookup0 = math.convert(ctx.look_up(mTable0, pos).load(), Float32)  # cases.py:61
    lookup1 = math.convert(ctx.look_up(mTable1, pos).load(), Float32)  # cases.py:61
    loader.finish()
    x0 = math.convert(tXrX0.load(), Float32)
    x1 = math.convert(tXrX1.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # output
    mul0 = x0 * lookup0  # cases.py:63
    mul1 = x1 * lookup1  # cases.py:63
    sub0 = mul0 - mul1  # cases.py:63
    ElementwiseStorer(ctx).store(mOut0, sub0)
    mul2 = x1 * lookup0  # cases.py:63
    mul3 = x0 * lookup1  # cases.py:63
    add0 = mul2 + mul3  # cases.py:63
    ElementwiseStorer(ctx).store(mOut1, add0)


@cute.jit
def table_rotary(
    mX: cute.Tensor,
    mPos: cute.Tensor,
    mTable: cute.Tensor,
    mOut: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    table_rotary_kernel(mX, mPos, mTable, mOut, tiled_copy).launch(
        grid=config.grid(mOut.shape[0]),
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (
        make_fake_tensor(BFloat16, (m, 128), 8),
        make_fake_tensor(Int64, (m,), any_stride=True),
        make_fake_tensor(BFloat16, (cute.sym_int64(), 128), 8),
        make_fake_tensor(BFloat16, (m, 128), 8),
    )

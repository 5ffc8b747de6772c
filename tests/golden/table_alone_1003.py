"""table_alone: one row of N = 1003.

x bf16, pos i64, table bf16 -> out0 bf16, out1 f32, out2 f32
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer
from htile.utils import make_fake_tensor, table_of

config = ElementwiseTileConfig(
    BFloat16,
    N=1003,
    num_threads=128,
    threads_per_row=32,
    cluster_n=1,
    stage=1,
    copy_bytes=2,
    shifted=True,
)
blocks = 6  # of an SM, for which registers are spared


@cute.kernel
def table_alone_kernel(
    mX: cute.Tensor,
    mPos: cute.Tensor,
    mTable: cute.Tensor,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    mOut2: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    mTable0 = table_of(mTable, (0, 0), (0, 1), 1003)
    mTable1 = table_of(mTable, (0, 1002))
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mOut0, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    x = math.convert(ctx.load_row_value(mX), Float32)
    pos = ctx.load_row_value(mPos)
    lookup0 = math.convert(ctx.look_up(mTable0, pos).load(), Float32)  # cases.py:77
    lookup1 = math.convert(ctx.look_up_element(mTable1, pos), Float32)  # cases.py:77
    sub0 = pos - Int64(1)  # cases.py:78
    lookup2 = math.convert(ctx.look_up(mTable0, sub0).load(), Float32)  # cases.py:78
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum
    mul0 = math.product(lookup0, lookup2)  # cases.py:78
    sum0 = ctx.row_reduce(mul0, cute.ReductionOp.ADD, slot=0)  # cases.py:78

    # output
    mul1 = lookup0 * x  # cases.py:78
    ElementwiseStorer(ctx).store(mOut0, mul1)
    ctx.store_row_value(mOut1, lookup1)
    ctx.store_row_value(mOut2, sum0)


@cute.jit
def table_alone(
    mX: cute.Tensor,
    mPos: cute.Tensor,
    mTable: cute.Tensor,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    mOut2: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    table_alone_kernel(mX, mPos, mTable, mOut0, mOut1, mOut2, tiled_copy).launch(
        grid=config.grid(mOut0.shape[0]),
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
        min_blocks_per_mp=blocks,
        preferred_smem_carveout=-1,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (
        make_fake_tensor(BFloat16, (m,), any_stride=True),
        make_fake_tensor(Int64, (m,), any_stride=True),
        make_fake_tensor(BFloat16, (cute.sym_int64(), 1003), 1),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(Float32, (m,), any_stride=True),
        make_fake_tensor(Float32, (m,), any_stride=True),
    )

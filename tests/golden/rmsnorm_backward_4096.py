"""rmsnorm_backward: one row of N = 4096.

dy bf16, x bf16, weight bf16, eps f32 -> out0 bf16, out1 f32
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32

from htile.compute import math
from htile.compute.parts import OverRows, Parts
from htile.config import ElementwiseTileConfig
from htile.copy.row_loop import RowLoop, RowsAhead
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=4096, num_threads=512, threads_per_row=256, cluster_n=1, stage=4
)
blocks = 1  # of an SM, for which registers are spared


@cute.kernel
def rmsnorm_backward_kernel(
    mDy: cute.Tensor,
    mX: cute.Tensor,
    mWeight: cute.Tensor,
    eps: Float32,
    mOut0: cute.Tensor,
    mParts: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    block = ElementwiseKernelContext(config)
    block.setup(mDy, config.tiler_mn(8), tiled_copy, extra_smem_tensors=(BFloat16,), turns=2)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    tXrWeight = block.load_column(mWeight)
    total0 = OverRows.of_rows(block, cute.ReductionOp.ADD, Float32)
    row_loop = RowLoop(block, 240)
    rows_ahead = RowsAhead(row_loop, mDy, mX)
    for k in cutlass.range(row_loop.count, unroll=1):
        ctx = row_loop.row(k)
        tXrDy, tXrX = rows_ahead.take(k)
        dy = math.convert(tXrDy.load(), Float32)
        x = math.convert(tXrX.load(), Float32)
        weight = math.convert(tXrWeight.load(), Float32)

        # stage 1: sum
        mul0 = math.product(x, x)  # backward.py:10
        sum0 = ctx.row_reduce(mul0, cute.ReductionOp.ADD, slot=0)  # backward.py:10

        # stage 2: sum
        div0 = math.div_number(sum0, 4096.0)  # backward.py:10
        add0 = div0 + eps  # backward.py:10
        rsqrt0 = math.rsqrt(add0)  # backward.py:10
        mul1 = x * rsqrt0  # backward.py:11
        mul2 = dy * weight  # backward.py:11
        mul3 = math.product(mul2, mul1)  # backward.py:12
        sum1 = ctx.row_reduce(mul3, cute.ReductionOp.ADD, slot=1)  # backward.py:12

        # output
        div1 = math.div_number(sum1, 4096.0)  # backward.py:12
        mul4 = mul1 * div1  # backward.py:12
        sub0 = mul2 - mul4  # backward.py:12
        mul5 = sub0 * rsqrt0  # backward.py:12
        ElementwiseStorer(ctx).store(mOut0, mul5)
        mul6 = dy * x  # backward.py:13
        mul7 = math.product(mul6, rsqrt0)  # backward.py:13
        total0 = total0.take(ctx, mul7)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # the part of this CTA
    Parts(mParts, 0, Float32, 120, 4096).store(row_loop, total0)


@cute.kernel
def rmsnorm_backward_combine(mParts: cute.Tensor, mOut1: cute.Tensor, parts: Int32):
    cute.arch.griddepcontrol_wait()  # all parts are there
    cute.arch.griddepcontrol_launch_dependents()  # the next may start
    Parts(mParts, 0, Float32, 120, 4096).combine(cute.ReductionOp.ADD, mOut1, 4096, parts)


@cute.jit
def rmsnorm_backward(
    mDy: cute.Tensor,
    mX: cute.Tensor,
    mWeight: cute.Tensor,
    eps: Float32,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    mParts: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    grid = config.grid_of_groups(mOut0.shape[0], 240)
    rmsnorm_backward_kernel(mDy, mX, mWeight, eps, mOut0, mParts, tiled_copy).launch(
        grid=grid,
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
        min_blocks_per_mp=blocks,
        preferred_smem_carveout=-1,
    )
    rmsnorm_backward_combine(mParts, mOut1, grid[0]).launch(
        grid=[128, 1, 1],
        block=[512, 1, 1],
        stream=stream,
        use_pdl=True,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (
        make_fake_tensor(BFloat16, (m, 4096), 8),
        make_fake_tensor(BFloat16, (m, 4096), 8),
        make_fake_tensor(BFloat16, (4096,), 8),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 4096), 8),
        make_fake_tensor(Float32, (4096,), any_stride=True),
        make_fake_tensor(Int8, (1966080,), align=16),
    )

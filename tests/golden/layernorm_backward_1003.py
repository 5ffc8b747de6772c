"""layernorm_backward: one row of N = 1003.

dy bf16, x bf16, weight bf16, eps f32 -> out0 bf16, out1 bf16, out2 bf16
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int8, Int32

from htile.compute import math
from htile.compute.mean import MEAN
from htile.compute.parts import OverRows, Parts
from htile.config import ElementwiseTileConfig
from htile.copy.row_loop import RowLoop, RowsAhead
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=1003, num_threads=256, threads_per_row=32, cluster_n=1, stage=8, shifted=True
)
blocks = 1  # of an SM, for which registers are spared


@cute.kernel
def layernorm_backward_kernel(
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
    total1 = OverRows.of_rows(block, cute.ReductionOp.ADD, Float32)
    row_loop = RowLoop(block, 960)
    rows_ahead = RowsAhead(row_loop, mDy, mX)
    for k in cutlass.range(row_loop.count, unroll=1):
        ctx = row_loop.row(k)
        tXrDy, tXrX = rows_ahead.take(k)
        dy = math.convert(tXrDy.load(), Float32)
        x = math.convert(tXrX.load(), Float32)
        weight = math.convert(tXrWeight.load(), Float32)

        # stage 1: mean, mean
        mul0 = dy * weight  # backward.py:19
        mean0, mean1 = ctx.row_reduce((x, mul0), (MEAN, MEAN), slot=0)  # backward.py:17

        # stage 2: sum
        sub0 = x - mean0  # backward.py:17
        mul1 = math.product(sub0, sub0)  # backward.py:18
        sum0 = ctx.row_reduce(mul1, cute.ReductionOp.ADD, slot=2)  # backward.py:18

        # stage 3: sum
        div0 = math.div_number(sum0, 1003.0)  # backward.py:18
        add0 = div0 + eps  # backward.py:18
        rsqrt0 = math.rsqrt(add0)  # backward.py:18
        mul2 = sub0 * rsqrt0  # backward.py:19
        mul3 = math.product(mul0, mul2)  # backward.py:20
        sum1 = ctx.row_reduce(mul3, cute.ReductionOp.ADD, slot=3)  # backward.py:20

        # output
        sub1 = mul0 - mean1  # backward.py:20
        div1 = math.div_number(sum1, 1003.0)  # backward.py:20
        sub2 = math.fnma(mul2, div1, sub1)  # backward.py:20
        mul4 = sub2 * rsqrt0  # backward.py:20
        ElementwiseStorer(ctx).store(mOut0, mul4)
        mul5 = math.product(dy, mul2)  # backward.py:21
        total0 = total0.take(ctx, mul5)
        total1 = total1.take(ctx, dy)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # the part of this CTA
    Parts(mParts, 0, Float32, 120, 1024).store(row_loop, total0)
    Parts(mParts, 491520, Float32, 120, 1024).store(row_loop, total1)


@cute.kernel
def layernorm_backward_combine(
    mParts: cute.Tensor, mOut1: cute.Tensor, mOut2: cute.Tensor, parts: Int32
):
    cute.arch.griddepcontrol_wait()  # all parts are there
    cute.arch.griddepcontrol_launch_dependents()  # the next may start
    Parts(mParts, 0, Float32, 120, 1024).combine(cute.ReductionOp.ADD, mOut1, 1003, parts)
    Parts(mParts, 491520, Float32, 120, 1024).combine(
        cute.ReductionOp.ADD, mOut2, 1003, parts, place=1
    )


@cute.jit
def layernorm_backward(
    mDy: cute.Tensor,
    mX: cute.Tensor,
    mWeight: cute.Tensor,
    eps: Float32,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    mOut2: cute.Tensor,
    mParts: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    grid = config.grid_of_groups(mOut0.shape[0], 960)
    layernorm_backward_kernel(mDy, mX, mWeight, eps, mOut0, mParts, tiled_copy).launch(
        grid=grid,
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
        min_blocks_per_mp=blocks,
        preferred_smem_carveout=-1,
    )
    layernorm_backward_combine(mParts, mOut1, mOut2, grid[0]).launch(
        grid=[32, 2, 1],
        block=[512, 1, 1],
        stream=stream,
        use_pdl=True,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (1003,), 8),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (1003,), any_stride=True),
        make_fake_tensor(BFloat16, (1003,), any_stride=True),
        make_fake_tensor(Int8, (983040,), align=16),
    )

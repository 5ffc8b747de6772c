"""norm_softmax: one row of N = 1003.

x bf16, scale f32, eps f32 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from htile.compute import math
from htile.compute.mean import MEAN
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=1003, num_threads=128, threads_per_row=32, cluster_n=1, stage=4, shifted=True
)
blocks = 10  # of an SM, for which registers are spared


@cute.kernel
def norm_softmax_kernel(
    mX: cute.Tensor, scale: Float32, eps: Float32, mOut: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    loader.finish()
    x = math.convert(tXrX.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: mean
    mean0 = ctx.row_reduce(x, MEAN, slot=0)  # norm_softmax.py:11

    # stage 2: sum
    sub0 = x - mean0  # norm_softmax.py:11
    mul0 = math.product(sub0, sub0)  # norm_softmax.py:12
    sum0 = ctx.row_reduce(mul0, cute.ReductionOp.ADD, slot=1)  # norm_softmax.py:12

    # stage 3: max
    div0 = math.div_number(sum0, 1003.0)  # norm_softmax.py:12
    add0 = div0 + eps  # norm_softmax.py:12
    rsqrt0 = math.rsqrt(add0)  # norm_softmax.py:12
    mul1 = scale * rsqrt0  # norm_softmax.py:12
    mul2 = sub0 * mul1  # norm_softmax.py:13
    max0 = ctx.row_reduce(mul2, cute.ReductionOp.MAX, slot=2)  # norm_softmax.py:13

    # stage 4: sum
    sub1 = mul2 - max0  # norm_softmax.py:13
    exp0 = math.exp_bounded(sub1)  # norm_softmax.py:13
    sum1 = ctx.row_reduce(exp0, cute.ReductionOp.ADD, slot=3)  # norm_softmax.py:13

    # output
    div1 = math.div_bounded(exp0, sum1)  # norm_softmax.py:13
    ElementwiseStorer(ctx).store(mOut, div1)


@cute.jit
def norm_softmax(
    mX: cute.Tensor, scale: Float32, eps: Float32, mOut: cute.Tensor, stream: cuda.CUstream
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    norm_softmax_kernel(mX, scale, eps, mOut, tiled_copy).launch(
        grid=config.grid(mOut.shape[0]),
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
        make_fake_tensor(BFloat16, (m, 1003), 1),
        Float32(0),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 1003), 1),
    )

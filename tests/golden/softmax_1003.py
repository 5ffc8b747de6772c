"""softmax: one row of N = 1003.

x bf16 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=1003, num_threads=128, threads_per_row=32, cluster_n=1, stage=2, shifted=True
)
blocks = 10  # of an SM, for which registers are spared


@cute.kernel
def softmax_kernel(mX: cute.Tensor, mOut: cute.Tensor, tiled_copy: cute.TiledCopy):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    loader.finish()
    x = math.convert(tXrX.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: max
    max0 = ctx.row_reduce(x, cute.ReductionOp.MAX, slot=0)  # softmax.py:11

    # stage 2: sum
    sub0 = x - max0  # softmax.py:11
    exp0 = math.exp_bounded(sub0)  # softmax.py:11
    sum0 = ctx.row_reduce(exp0, cute.ReductionOp.ADD, slot=1)  # softmax.py:12

    # output
    div0 = math.div_bounded(exp0, sum0)  # softmax.py:12
    ElementwiseStorer(ctx).store(mOut, div0)


@cute.jit
def softmax(mX: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    softmax_kernel(mX, mOut, tiled_copy).launch(
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
    return (make_fake_tensor(BFloat16, (m, 1003), 1), make_fake_tensor(BFloat16, (m, 1003), 1))

"""log_softmax: one row of N = 1003.

x bf16 -> out0 bf16, out1 f32
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
def log_softmax_kernel(
    mX: cute.Tensor, mOut0: cute.Tensor, mOut1: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    loader.finish()
    x = math.convert(tXrX.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: max
    max0 = ctx.row_reduce(x, cute.ReductionOp.MAX, slot=0)  # log_softmax.py:11

    # stage 2: sum
    abs0 = math.abs(max0)  # log_softmax.py:11
    eq0 = math.eq(abs0, Float32.inf)  # log_softmax.py:11
    where0 = math.where(eq0, 0.0, max0)  # log_softmax.py:11
    sub0 = x - where0  # log_softmax.py:11
    exp0 = math.exp_bounded(sub0)  # log_softmax.py:11
    sum0 = ctx.row_reduce(exp0, cute.ReductionOp.ADD, slot=1)  # log_softmax.py:11

    # output
    log0 = math.log(sum0)  # log_softmax.py:11
    where1 = math.where(eq0, Float32(float("nan")), log0)  # log_softmax.py:12
    sub1 = sub0 - where1  # log_softmax.py:12
    ElementwiseStorer(ctx).store(mOut0, sub1)
    add0 = log0 + where0  # log_softmax.py:11
    ctx.store_row_value(mOut1, add0)


@cute.jit
def log_softmax(mX: cute.Tensor, mOut0: cute.Tensor, mOut1: cute.Tensor, stream: cuda.CUstream):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    log_softmax_kernel(mX, mOut0, mOut1, tiled_copy).launch(
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
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(Float32, (m,), any_stride=True),
    )

"""causal_softmax: one row of N = 4096.

scores bf16, q i64, scale f32 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=4096, num_threads=128, threads_per_row=128, cluster_n=1, stage=2
)
blocks = 10  # of an SM, for which registers are spared
worth = (0, 0)  # bytes of a thread's stack for a second and a third one


@cute.kernel
def causal_softmax_kernel(
    mScores: cute.Tensor,
    mQ: cute.Tensor,
    scale: Float32,
    mOut: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mScores, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    q = ctx.load_row_value(mQ)
    maximum0 = math.maximum(q, Int64(-1))
    minimum0 = math.minimum(maximum0, Int64(4096))
    convert0 = math.convert(minimum0, Int32)
    add0 = convert0 + Int32(1)
    tXrScores = loader.start(mScores, end=add0)
    loader.finish()
    scores = math.convert(tXrScores.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: max
    le0 = math.le(ctx.offsets, ctx.offset_of(convert0))  # causal_softmax.py:11
    mul0 = scores * scale  # causal_softmax.py:12
    where0 = math.where(le0, mul0, -Float32.inf)  # causal_softmax.py:12
    max0 = ctx.row_reduce(where0, cute.ReductionOp.MAX, slot=0)  # causal_softmax.py:12

    # stage 2: sum
    sub0 = where0 - max0  # causal_softmax.py:12
    exp0 = math.exp_bounded(sub0)  # causal_softmax.py:12
    sum0 = ctx.row_reduce(exp0, cute.ReductionOp.ADD, slot=1)  # causal_softmax.py:12

    # output
    div0 = math.div_bounded(exp0, sum0)  # causal_softmax.py:12
    ElementwiseStorer(ctx).store(mOut, div0)


@cute.jit
def causal_softmax(
    mScores: cute.Tensor, mQ: cute.Tensor, scale: Float32, mOut: cute.Tensor, stream: cuda.CUstream
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    causal_softmax_kernel(mScores, mQ, scale, mOut, tiled_copy).launch(
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
        make_fake_tensor(BFloat16, (m, 4096), 8),
        make_fake_tensor(Int64, (m,), any_stride=True),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 4096), 8),
    )

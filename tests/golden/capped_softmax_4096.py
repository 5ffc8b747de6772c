"""capped_softmax: one row of N = 4096.

logits bf16, temperature f32, cap f32 -> probabilities bf16, entropy f32
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=4096, num_threads=128, threads_per_row=128, cluster_n=1, stage=3
)
blocks = 10  # of an SM, for which registers are spared
worth = (0, 0)  # bytes of a thread's stack for a second and a third one


@cute.kernel
def capped_softmax_kernel(
    mLogits: cute.Tensor,
    mTemperature: cute.Tensor,
    cap: Float32,
    mProbabilities: cute.Tensor,
    mEntropy: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mLogits, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrLogits = loader.start(mLogits)
    temperature = ctx.load_row_value(mTemperature)
    loader.finish()
    logits = math.convert(tXrLogits.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: max
    div0 = math.div(logits, cap)  # capped_softmax.py:11
    tanh0 = math.tanh(div0)  # capped_softmax.py:11
    mul0 = cap * tanh0  # capped_softmax.py:11
    div1 = math.div(mul0, temperature)  # capped_softmax.py:11
    max0 = ctx.row_reduce(div1, cute.ReductionOp.MAX, slot=0)  # capped_softmax.py:12

    # stage 2: sum, sum
    sub0 = div1 - max0  # capped_softmax.py:12
    exp0 = math.exp_bounded(sub0)  # capped_softmax.py:13
    mul1 = math.product(exp0, sub0)  # capped_softmax.py:15
    sum0, sum1 = ctx.row_reduce((exp0, mul1), (cute.ReductionOp.ADD, cute.ReductionOp.ADD), slot=1)

    # output
    div2 = math.div_bounded(exp0, sum0)  # capped_softmax.py:16
    ElementwiseStorer(ctx).store(mProbabilities, div2)
    log0 = math.log(sum0)  # capped_softmax.py:15
    div3 = math.div(sum1, sum0)  # capped_softmax.py:15
    sub1 = log0 - div3  # capped_softmax.py:15
    ctx.store_row_value(mEntropy, sub1)


@cute.jit
def capped_softmax(
    mLogits: cute.Tensor,
    mTemperature: cute.Tensor,
    cap: Float32,
    mProbabilities: cute.Tensor,
    mEntropy: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    capped_softmax_kernel(mLogits, mTemperature, cap, mProbabilities, mEntropy, tiled_copy).launch(
        grid=config.grid(mProbabilities.shape[0]),
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
        make_fake_tensor(Float32, (m,), any_stride=True),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 4096), 8),
        make_fake_tensor(Float32, (m,), any_stride=True),
    )

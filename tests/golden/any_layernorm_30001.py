"""any_layernorm: one row of N <= 32768.

x bf16, w bf16, b bf16 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16,
    N=32768,
    num_threads=128,
    threads_per_row=128,
    cluster_n=8,
    stage=2,
    reduction_dtype=Int64,
    shifted=True,
    any_end=True,
)
blocks = 9  # of an SM, for which registers are spared


@cute.kernel
def any_layernorm_kernel(
    mX: cute.Tensor, mW: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    stagedW = ctx.stage_column(mW)
    stagedB = ctx.stage_column(mB)
    tXrX = loader.keep(mX)
    loader.finish()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: mean
    triple0 = ctx.welford_triple()
    for k in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.chunk(k)
        x = math.convert(chunk.read_row(tXrX).load(), Float32)
        triple0 = chunk.accumulate(triple0, x)  # cases.py:135
    mean0, moments0 = ctx.reduce_moments(triple0, slot=0)

    # stage 2: sum
    sum0 = moments0.about(mean0)

    # output
    sW = stagedW.arrived()
    sB = stagedB.arrived()
    keptOut = ElementwiseStorer(ctx).keep(mOut, sW)
    for k in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.chunk(k)
        x = math.convert(chunk.read_row(tXrX).load(), Float32)
        w = math.convert(chunk.read_row(sW).load(), Float32)
        b = math.convert(chunk.read_row(sB).load(), Float32)
        sub0 = x - mean0  # cases.py:135
        length0 = chunk.shape[1]
        convert0 = math.convert(length0, Float32)
        div0 = math.div(sum0, convert0)  # cases.py:135
        add0 = div0 + 1e-05  # cases.py:135
        rsqrt0 = math.rsqrt(add0)  # cases.py:135
        mul0 = sub0 * rsqrt0  # cases.py:135
        add1 = math.fma(mul0, w, b)  # cases.py:135
        keptOut.put(chunk, add1)
    keptOut.store()


@cute.jit
def any_layernorm(
    mX: cute.Tensor, mW: cute.Tensor, mB: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    any_layernorm_kernel(mX, mW, mB, mOut, tiled_copy).launch(
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
    n = cute.sym_int()
    return (
        make_fake_tensor(BFloat16, (m, n), 1),
        make_fake_tensor(BFloat16, (n,), 8),
        make_fake_tensor(BFloat16, (n,), 8),
        make_fake_tensor(BFloat16, (m, n), 1),
    )

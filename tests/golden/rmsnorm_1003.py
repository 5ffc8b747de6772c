"""rmsnorm: one row of N = 1003.

x bf16, weight bf16, eps f32 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=1003, num_threads=128, threads_per_row=32, cluster_n=1, stage=1, shifted=True
)
blocks = 0  # of an SM, as the compiler likes


@cute.kernel
def rmsnorm_kernel(
    mX: cute.Tensor,
    mWeight: cute.Tensor,
    eps: Float32,
    mOut: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    tXrWeight = ctx.load_column(mWeight)
    loader.finish()
    x = math.convert(tXrX.load(), Float32)
    weight = math.convert(tXrWeight.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum
    mul0 = math.product(x, x)  # rmsnorm.py:13
    sum0 = ctx.row_reduce(mul0, cute.ReductionOp.ADD, slot=0)  # rmsnorm.py:13

    # output
    div0 = math.div_number(sum0, 1003.0)  # rmsnorm.py:13
    add0 = div0 + eps  # rmsnorm.py:13
    rsqrt0 = math.rsqrt(add0)  # rmsnorm.py:13
    mul1 = x * rsqrt0  # rmsnorm.py:13
    mul2 = mul1 * weight  # rmsnorm.py:13
    ElementwiseStorer(ctx).store(mOut, mul2)


@cute.jit
def rmsnorm(
    mX: cute.Tensor, mWeight: cute.Tensor, eps: Float32, mOut: cute.Tensor, stream: cuda.CUstream
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    rmsnorm_kernel(mX, mWeight, eps, mOut, tiled_copy).launch(
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
        make_fake_tensor(BFloat16, (1003,), 8),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 1003), 1),
    )

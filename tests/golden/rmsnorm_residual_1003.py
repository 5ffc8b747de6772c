"""rmsnorm: one row of N = 1003.

x bf16, weight bf16, residual bf16, eps f32 -> out0 bf16, out1 bf16
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=1003, num_threads=128, threads_per_row=64, cluster_n=1, stage=1, shifted=True
)


@cute.kernel
def rmsnorm_kernel(
    mX: cute.Tensor,
    mWeight: cute.Tensor,
    mResidual: cute.Tensor,
    eps: Float32,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    tXrResidual = loader.start(mResidual)
    loader.finish()
    x = math.convert(tXrX.load(), Float32)
    residual = math.convert(tXrResidual.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum
    add0 = x + residual  # rmsnorm.py:12
    mul0 = math.product(add0, add0)  # rmsnorm.py:13
    sum0 = ctx.row_reduce(mul0, cute.ReductionOp.ADD, slot=0)  # rmsnorm.py:13

    # output
    weight = math.convert(ctx.load_column(mWeight).load(), Float32)
    div0 = math.div_number(sum0, 1003.0)  # rmsnorm.py:13
    add1 = div0 + eps  # rmsnorm.py:13
    rsqrt0 = math.rsqrt(add1)  # rmsnorm.py:13
    mul1 = add0 * rsqrt0  # rmsnorm.py:13
    mul2 = mul1 * weight  # rmsnorm.py:13
    ElementwiseStorer(ctx).store(mOut0, mul2)
    ElementwiseStorer(ctx).store(mOut1, add0)


@cute.jit
def rmsnorm(
    mX: cute.Tensor,
    mWeight: cute.Tensor,
    mResidual: cute.Tensor,
    eps: Float32,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    rmsnorm_kernel(mX, mWeight, mResidual, eps, mOut0, mOut1, tiled_copy).launch(
        grid=config.grid(mOut0.shape[0]),
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (1003,), 8),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (m, 1003), 1),
    )

"""absnorm: one row of N = 1003.

x bf16, weight bf16, eps f32 -> out0 bf16, out1 f32
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
def absnorm_kernel(
    mX: cute.Tensor,
    mWeight: cute.Tensor,
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
    tXrWeight = ctx.load_column(mWeight)
    loader.finish()
    x = math.convert(tXrX.load(), Float32)
    weight = math.convert(tXrWeight.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum
    abs0 = math.abs(x)  # absnorm.py:11
    sum0 = ctx.row_reduce(abs0, cute.ReductionOp.ADD, slot=0)  # absnorm.py:11

    # output
    div0 = math.div_number(sum0, 1003.0)  # absnorm.py:11
    add0 = div0 + eps  # absnorm.py:11
    div1 = math.div_near(x, add0)  # absnorm.py:12
    mul0 = div1 * weight  # absnorm.py:12
    ElementwiseStorer(ctx).store(mOut0, mul0)
    ctx.store_row_value(mOut1, add0)


@cute.jit
def absnorm(
    mX: cute.Tensor,
    mWeight: cute.Tensor,
    eps: Float32,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    absnorm_kernel(mX, mWeight, eps, mOut0, mOut1, tiled_copy).launch(
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
        make_fake_tensor(BFloat16, (1003,), 8),
        Float32(0),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(Float32, (m,), any_stride=True),
    )

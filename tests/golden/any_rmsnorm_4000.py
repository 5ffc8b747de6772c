"""any_rmsnorm: one row of N <= 4096.

x bf16, r bf16, w bf16 -> out0 bf16, out1 bf16
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=4096, num_threads=256, threads_per_row=256, cluster_n=1, stage=1
)


@cute.kernel
def any_rmsnorm_kernel(
    mX: cute.Tensor,
    mR: cute.Tensor,
    mW: cute.Tensor,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    tXrR = loader.start(mR)
    loader.finish()
    x = math.convert(tXrX.load(), Float32)
    r = math.convert(tXrR.load(), Float32)
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum
    add0 = x + r  # cases.py:139
    mul0 = math.product(add0, add0)  # cases.py:140
    sum0 = ctx.row_reduce(mul0, cute.ReductionOp.ADD, slot=0)  # cases.py:140

    # output
    w = math.convert(ctx.load_column(mW).load(), Float32)
    length0 = ctx.shape[1]  # cases.py:140
    convert0 = math.convert(length0, Float32)  # cases.py:140
    div0 = math.div(sum0, convert0)  # cases.py:140
    add1 = div0 + 1e-06  # cases.py:140
    rsqrt0 = math.rsqrt(add1)  # cases.py:140
    mul1 = add0 * rsqrt0  # cases.py:140
    mul2 = mul1 * w  # cases.py:140
    ElementwiseStorer(ctx).store(mOut0, mul2)
    ElementwiseStorer(ctx).store(mOut1, add0)


@cute.jit
def any_rmsnorm(
    mX: cute.Tensor,
    mR: cute.Tensor,
    mW: cute.Tensor,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    any_rmsnorm_kernel(mX, mR, mW, mOut0, mOut1, tiled_copy).launch(
        grid=config.grid(mOut0.shape[0]),
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    n = cute.sym_int(divisibility=8)
    return (
        make_fake_tensor(BFloat16, (m, n), 8),
        make_fake_tensor(BFloat16, (m, n), 8),
        make_fake_tensor(BFloat16, (n,), 8),
        make_fake_tensor(BFloat16, (m, n), 8),
        make_fake_tensor(BFloat16, (m, n), 8),
    )

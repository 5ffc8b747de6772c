"""scan_products: one row of N = 1003.

x f32 -> out0 i32, out1 f32
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    Float32, N=1003, num_threads=128, threads_per_row=128, cluster_n=1, stage=4, shifted=True
)


@cute.kernel
def scan_products_kernel(
    mX: cute.Tensor, mOut0: cute.Tensor, mOut1: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(4), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    loader.finish()
    x = tXrX.load()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: cumsum, cumprod
    gt0 = math.gt(x, 0.0)  # cases.py:101
    cast0 = math.convert(gt0, Int32)  # cases.py:101
    cumsum0, cumprod0 = ctx.row_scan(
        (cast0, x), (cute.ReductionOp.ADD, cute.ReductionOp.MUL), slot=0
    )  # cases.py:101

    # output
    ElementwiseStorer(ctx).store(mOut0, cumsum0)
    ElementwiseStorer(ctx).store(mOut1, cumprod0)


@cute.jit
def scan_products(mX: cute.Tensor, mOut0: cute.Tensor, mOut1: cute.Tensor, stream: cuda.CUstream):
    tiled_copy = config.make_vector_copy(4).tiled_copy_2d()
    scan_products_kernel(mX, mOut0, mOut1, tiled_copy).launch(
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
        make_fake_tensor(Float32, (m, 1003), 1),
        make_fake_tensor(Int32, (m, 1003), 1),
        make_fake_tensor(Float32, (m, 1003), 1),
    )

"""scan_extremes: one row of N = 1003.

x f32 -> out0 i64, out1 f32
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from htile.compute import math
from htile.compute.log_add import LOGADD
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    Float32, N=1003, num_threads=128, threads_per_row=128, cluster_n=1, stage=12, shifted=True
)


@cute.kernel
def scan_extremes_kernel(
    mX: cute.Tensor, mOut0: cute.Tensor, mOut1: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(2), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    loader.finish()
    x = tXrX.load()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: cummax, logsumexp_from_end
    cummax0, logsumexp_from_end0 = ctx.row_scan(
        (x, x), (cute.ReductionOp.MAX, LOGADD), slot=0, from_end=(False, True)
    )  # cases.py:105

    # stage 2: cummax
    eq0 = math.eq(x, cummax0)  # cases.py:105
    ne0 = math.ne(x, x)  # cases.py:105
    or0 = math.logical_or(eq0, ne0)  # cases.py:105
    index0 = ctx.cols  # cases.py:105
    where0 = math.where(or0, index0, Int32(0))  # cases.py:105
    cummax1 = ctx.row_scan(where0, cute.ReductionOp.MAX, slot=8)  # cases.py:105

    # output
    convert0 = math.convert(cummax1, Int64)  # cases.py:105
    ElementwiseStorer(ctx).store(mOut0, convert0)
    ElementwiseStorer(ctx).store(mOut1, logsumexp_from_end0)


@cute.jit
def scan_extremes(mX: cute.Tensor, mOut0: cute.Tensor, mOut1: cute.Tensor, stream: cuda.CUstream):
    tiled_copy = config.make_vector_copy(2).tiled_copy_2d()
    scan_extremes_kernel(mX, mOut0, mOut1, tiled_copy).launch(
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
        make_fake_tensor(Int64, (m, 1003), 1),
        make_fake_tensor(Float32, (m, 1003), 1),
    )

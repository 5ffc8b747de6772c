"""scan_inverse: one row of N = 32768.

weights f32, share f32 -> out i64
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    Float32,
    N=32768,
    num_threads=512,
    threads_per_row=512,
    cluster_n=4,
    stage=6,
    evict_first_rows=1535,
)


@cute.kernel
def scan_inverse_kernel(
    mWeights: cute.Tensor, mShare: cute.Tensor, mOut: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mWeights, config.tiler_mn(4), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrWeights = loader.start(mWeights)
    share = ctx.load_row_value(mShare)
    loader.finish()
    weights = tXrWeights.load()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum
    sum0 = ctx.row_reduce(weights, cute.ReductionOp.ADD, slot=0)  # cases.py:110

    # stage 2: cumsum
    cumsum0 = ctx.row_scan(weights, cute.ReductionOp.ADD, slot=1)  # cases.py:109

    # stage 3: sum
    mul0 = share * sum0  # cases.py:110
    le0 = math.le(cumsum0, mul0)  # cases.py:110
    convert0 = math.convert(le0, Int32)  # cases.py:110
    sum1 = ctx.row_reduce(convert0, cute.ReductionOp.ADD, slot=5)  # cases.py:110

    # output
    ctx.store_row_value(mOut, sum1)


@cute.jit
def scan_inverse(
    mWeights: cute.Tensor, mShare: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream
):
    tiled_copy = config.make_vector_copy(4).tiled_copy_2d()
    scan_inverse_kernel(mWeights, mShare, mOut, tiled_copy).launch(
        grid=config.grid(mOut.shape[0]),
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (
        make_fake_tensor(Float32, (m, 32768), 4),
        make_fake_tensor(Float32, (m,), any_stride=True),
        make_fake_tensor(Int64, (m,), any_stride=True),
    )

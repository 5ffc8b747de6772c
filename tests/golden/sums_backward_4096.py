"""sums_backward: one row of N = 4096.

d_out f32 -> d_x f32
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    Float32, N=4096, num_threads=512, threads_per_row=512, cluster_n=1, stage=2
)


@cute.kernel
def sums_backward_kernel(mDOut: cute.Tensor, mDX: cute.Tensor, tiled_copy: cute.TiledCopy):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mDOut, config.tiler_mn(4), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrDOut = loader.start(mDOut)
    loader.finish()
    d_out = tXrDOut.load()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum_from_end
    sum_from_end0 = ctx.row_scan(d_out, cute.ReductionOp.ADD, slot=0, from_end=True)  # cases.py:247

    # output
    ElementwiseStorer(ctx).store(mDX, sum_from_end0)


@cute.jit
def sums_backward(mDOut: cute.Tensor, mDX: cute.Tensor, stream: cuda.CUstream):
    tiled_copy = config.make_vector_copy(4).tiled_copy_2d()
    sums_backward_kernel(mDOut, mDX, tiled_copy).launch(
        grid=config.grid(mDX.shape[0]),
        block=config.block,
        cluster=config.cluster,
        stream=stream,
        use_pdl=True,
    )


def fake_arguments():
    """What stands for the tensors when the kernel is compiled."""
    m = cute.sym_int()
    return (make_fake_tensor(Float32, (m, 4096), 4), make_fake_tensor(Float32, (m, 4096), 4))

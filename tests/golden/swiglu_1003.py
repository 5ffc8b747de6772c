"""swiglu: one row of N = 1003.

gate bf16, up bf16 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=1003, num_threads=128, threads_per_row=64, cluster_n=1, stage=0, shifted=True
)


@cute.kernel
def swiglu_kernel(
    mGate: cute.Tensor, mUp: cute.Tensor, mOut: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mGate, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrGate = loader.start(mGate)
    tXrUp = loader.start(mUp)
    loader.finish()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # output
    keptOut = ElementwiseStorer(ctx).keep(mOut, ctx.make_row(mOut.element_type))
    for j in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.chunk(j)
        gate = math.convert(chunk.take_row(tXrGate).load(), Float32)
        up = math.convert(chunk.take_row(tXrUp).load(), Float32)
        sigmoid0 = math.sigmoid_near(gate)  # swiglu.py:12
        mul0 = gate * sigmoid0  # swiglu.py:12
        mul1 = mul0 * up  # swiglu.py:12
        keptOut.put(chunk, mul1)
    keptOut.store()


@cute.jit
def swiglu(mGate: cute.Tensor, mUp: cute.Tensor, mOut: cute.Tensor, stream: cuda.CUstream):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    swiglu_kernel(mGate, mUp, mOut, tiled_copy).launch(
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
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (m, 1003), 1),
        make_fake_tensor(BFloat16, (m, 1003), 1),
    )

"""products_backward: one row of N = 1003.

x f32, d_out f32 -> d_x f32
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32, Int32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    Float32, N=1003, num_threads=128, threads_per_row=64, cluster_n=1, stage=11, shifted=True
)
blocks = 6  # of an SM, for which registers are spared


@cute.kernel
def products_backward_kernel(
    mX: cute.Tensor, mDOut: cute.Tensor, mDX: cute.Tensor, tiled_copy: cute.TiledCopy
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(4), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrX = loader.start(mX)
    tXrDOut = loader.start(mDOut)
    loader.finish()
    x = tXrX.load()
    d_out = tXrDOut.load()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: min
    index0 = ctx.cols  # cases.py:251
    eq0 = math.eq(x, 0.0)  # cases.py:251
    where0 = math.where(eq0, index0, Int32(2147483647))  # cases.py:251
    min0 = ctx.row_reduce(where0, cute.ReductionOp.MIN, slot=0)  # cases.py:251

    # stage 2: min
    maximum0 = math.maximum(min0, Int32(-1))  # cases.py:251
    minimum0 = math.minimum(maximum0, Int32(1003))  # cases.py:251
    eq1 = math.eq(ctx.offsets, ctx.offset_of(minimum0))  # cases.py:251
    where1 = math.where(eq1, 1.0, x)  # cases.py:251
    eq2 = math.eq(where1, 0.0)  # cases.py:251
    where2 = math.where(eq2, index0, Int32(2147483647))  # cases.py:251
    min1 = ctx.row_reduce(where2, cute.ReductionOp.MIN, slot=1)  # cases.py:251

    # stage 3: cumprod
    cumprod0 = ctx.row_scan(where1, cute.ReductionOp.MUL, slot=2)  # cases.py:251

    # stage 4: sum
    lt0 = math.lt(ctx.offsets, ctx.offset_of(minimum0))  # cases.py:251
    mul0 = d_out * cumprod0  # cases.py:251
    maximum1 = math.maximum(min1, Int32(-1))  # cases.py:251
    minimum1 = math.minimum(maximum1, Int32(1003))  # cases.py:251
    lt1 = math.lt(ctx.offsets, ctx.offset_of(minimum1))  # cases.py:251
    where3 = math.where(lt1, mul0, 0.0)  # cases.py:251
    where4 = math.where(lt0, 0.0, where3)  # cases.py:251
    sum0 = ctx.row_reduce(where4, cute.ReductionOp.ADD, slot=6)  # cases.py:251

    # stage 5: sum_from_end
    where5 = math.where(lt0, mul0, 0.0)  # cases.py:251
    sum_from_end0 = ctx.row_scan(where5, cute.ReductionOp.ADD, slot=7, from_end=True)

    # output
    where6 = math.where(eq1, sum0, 0.0)  # cases.py:251
    div0 = math.div(sum_from_end0, x)  # cases.py:251
    where7 = math.where(lt0, div0, where6)  # cases.py:251
    ElementwiseStorer(ctx).store(mDX, where7)


@cute.jit
def products_backward(mX: cute.Tensor, mDOut: cute.Tensor, mDX: cute.Tensor, stream: cuda.CUstream):
    tiled_copy = config.make_vector_copy(4).tiled_copy_2d()
    products_backward_kernel(mX, mDOut, mDX, tiled_copy).launch(
        grid=config.grid(mDX.shape[0]),
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
        make_fake_tensor(Float32, (m, 1003), 1),
        make_fake_tensor(Float32, (m, 1003), 1),
        make_fake_tensor(Float32, (m, 1003), 1),
    )

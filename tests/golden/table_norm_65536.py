"""table_norm: one row of N = 65536.

x bf16, pos i64, table bf16 -> out bf16
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int64

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseLoader, ElementwiseStorer
from htile.utils import make_fake_tensor, table_of

config = ElementwiseTileConfig(
    BFloat16, N=65536, num_threads=128, threads_per_row=128, cluster_n=8, stage=1
)
blocks = 0  # of an SM, as the compiler likes


@cute.kernel
def table_norm_kernel(
    mX: cute.Tensor,
    mPos: cute.Tensor,
    mTable0: cute.Tensor,
    mOut: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mX, config.tiler_mn(8), tiled_copy)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = ElementwiseLoader(ctx)
    sX = loader.keep(mX)
    pos = ctx.load_row_value(mPos)
    loader.finish()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: sum
    sum0 = ctx.partial(cute.ReductionOp.ADD)
    for k in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.chunk(k)
        x = math.convert(chunk.read_row(sX).load(), Float32)
        lookup0 = math.convert(chunk.look_up(mTable0, pos).load(), Float32)  # cases.py:67
        add0 = x + lookup0  # cases.py:67
        mul0 = math.product(add0, add0)  # cases.py:68
        sum0 = chunk.accumulate(sum0, mul0)  # cases.py:68
    sum0 = ctx.reduce_partials(sum0, slot=0)

    # output
    for k in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.chunk(k)
        x = math.convert(chunk.read_row(sX).load(), Float32)
        lookup0 = math.convert(chunk.look_up(mTable0, pos).load(), Float32)  # cases.py:67
        add0 = x + lookup0  # cases.py:67
        div0 = math.div_number(sum0, 65536.0)  # cases.py:68
        add1 = div0 + 1e-06  # cases.py:68
        rsqrt0 = math.rsqrt(add1)  # cases.py:68
        mul1 = add0 * rsqrt0  # cases.py:68
        ElementwiseStorer(chunk).store(mOut, mul1)


@cute.jit
def table_norm(
    mX: cute.Tensor,
    mPos: cute.Tensor,
    mTable: cute.Tensor,
    mOut: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    mTable0 = table_of(mTable, (0, 0), (0, 1), 65536)
    table_norm_kernel(mX, mPos, mTable0, mOut, tiled_copy).launch(
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
        make_fake_tensor(BFloat16, (m, 65536), 8),
        make_fake_tensor(Int64, (m,), any_stride=True),
        make_fake_tensor(BFloat16, (cute.sym_int64(), 65536), 8),
        make_fake_tensor(BFloat16, (m, 65536), 8),
    )

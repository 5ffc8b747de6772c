"""scan_groups: one row of N = 512.

x f32 -> out0 f32, out1 f32, out2 f32
"""

import cuda.bindings.driver as cuda
import cutlass.cute as cute
from cutlass import Float32

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseLoader, ElementwiseStorer
from htile.utils import make_fake_tensor, view_of

config = ElementwiseTileConfig(
    Float32, N=512, num_threads=128, threads_per_row=128, cluster_n=1, stage=18
)
blocks = 6  # of an SM, for which registers are spared
worth = (0, 0)  # bytes of a thread's stack for a second and a third one


@cute.kernel
def scan_groups_kernel(
    mX: cute.Tensor,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    mOut2: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    mX0 = view_of(mX, (0,), (1,), 512)
    mX1 = view_of(mX, (512,), (1,), 512)
    mX2 = view_of(mX, (1024,), (1,), 512)
    mX3 = view_of(mX, (1536,), (1,), 512)
    mX4 = view_of(mX, (2048,), (1,), 512)
    mX5 = view_of(mX, (2560,), (1,), 512)
    mX6 = view_of(mX, (3072,), (1,), 512)
    mX7 = view_of(mX, (3584,), (1,), 512)
    mOut0_0 = view_of(mOut0, (0, 0), (0, 1), 512)
    mOut0_1 = view_of(mOut0, (1, 0), (0, 1), 512)
    mOut0_2 = view_of(mOut0, (2, 0), (0, 1), 512)
    mOut0_3 = view_of(mOut0, (3, 0), (0, 1), 512)
    mOut0_4 = view_of(mOut0, (4, 0), (0, 1), 512)
    mOut0_5 = view_of(mOut0, (5, 0), (0, 1), 512)
    mOut0_6 = view_of(mOut0, (6, 0), (0, 1), 512)
    mOut0_7 = view_of(mOut0, (7, 0), (0, 1), 512)
    mOut1_0 = view_of(mOut1, (0,))
    mOut2_0 = view_of(mOut2, (0, 0), (0, 1), 512)
    mOut2_1 = view_of(mOut2, (1, 0), (0, 1), 512)
    mOut2_2 = view_of(mOut2, (2, 0), (0, 1), 512)
    mOut2_3 = view_of(mOut2, (3, 0), (0, 1), 512)
    mOut2_4 = view_of(mOut2, (4, 0), (0, 1), 512)
    mOut2_5 = view_of(mOut2, (5, 0), (0, 1), 512)
    mOut2_6 = view_of(mOut2, (6, 0), (0, 1), 512)
    mOut2_7 = view_of(mOut2, (7, 0), (0, 1), 512)
    ctx = ElementwiseKernelContext(config)
    ctx.setup(
        mX0,
        config.tiler_mn(4),
        tiled_copy,
        extra_smem_tensors=(Float32, Float32, Float32, Float32, Float32, Float32, Float32,),
    )
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = ElementwiseLoader(ctx)
    tXrX0 = loader.start(mX0)
    tXrX1 = loader.start(mX1)
    tXrX2 = loader.start(mX2)
    tXrX3 = loader.start(mX3)
    tXrX4 = loader.start(mX4)
    tXrX5 = loader.start(mX5)
    tXrX6 = loader.start(mX6)
    tXrX7 = loader.start(mX7)
    loader.finish()
    x0 = tXrX0.load()
    x1 = tXrX1.load()
    x2 = tXrX2.load()
    x3 = tXrX3.load()
    x4 = tXrX4.load()
    x5 = tXrX5.load()
    x6 = tXrX6.load()
    x7 = tXrX7.load()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: max
    maximum0 = math.maximum(x0, x1)  # cases.py:114
    maximum1 = math.maximum(x2, x3)  # cases.py:114
    maximum2 = math.maximum(x4, x5)  # cases.py:114
    maximum3 = math.maximum(x6, x7)  # cases.py:114
    maximum4 = math.maximum(maximum0, maximum1)  # cases.py:114
    maximum5 = math.maximum(maximum2, maximum3)  # cases.py:114
    maximum6 = math.maximum(maximum4, maximum5)  # cases.py:114
    max0 = ctx.row_reduce(maximum6, cute.ReductionOp.MAX, slot=0)  # cases.py:114

    # stage 2: sum
    sub0 = x0 - max0  # cases.py:114
    exp0 = math.exp(sub0)  # cases.py:114
    sub1 = x1 - max0  # cases.py:114
    exp1 = math.exp(sub1)  # cases.py:114
    sub2 = x2 - max0  # cases.py:114
    exp2 = math.exp(sub2)  # cases.py:114
    sub3 = x3 - max0  # cases.py:114
    exp3 = math.exp(sub3)  # cases.py:114
    sub4 = x4 - max0  # cases.py:114
    exp4 = math.exp(sub4)  # cases.py:114
    sub5 = x5 - max0  # cases.py:114
    exp5 = math.exp(sub5)  # cases.py:114
    sub6 = x6 - max0  # cases.py:114
    exp6 = math.exp(sub6)  # cases.py:114
    sub7 = x7 - max0  # cases.py:114
    exp7 = math.exp(sub7)  # cases.py:114
    add0 = exp0 + exp1  # cases.py:114
    add1 = exp2 + exp3  # cases.py:114
    add2 = exp4 + exp5  # cases.py:114
    add3 = exp6 + exp7  # cases.py:114
    add4 = add0 + add1  # cases.py:114
    add5 = add2 + add3  # cases.py:114
    add6 = add4 + add5  # cases.py:114
    sum0 = ctx.row_reduce(add6, cute.ReductionOp.ADD, slot=1)  # cases.py:114

    # stage 3: sum, sum, sum, sum, sum, sum, sum, sum
    div0 = math.div(exp0, sum0)  # cases.py:114
    div1 = math.div(exp1, sum0)  # cases.py:114
    div2 = math.div(exp2, sum0)  # cases.py:114
    div3 = math.div(exp3, sum0)  # cases.py:114
    div4 = math.div(exp4, sum0)  # cases.py:114
    div5 = math.div(exp5, sum0)  # cases.py:114
    div6 = math.div(exp6, sum0)  # cases.py:114
    div7 = math.div(exp7, sum0)  # cases.py:114
    sum1, sum2, sum3, sum4, sum5, sum6, sum7, sum8 = ctx.row_reduce(
        (div0, div1, div2, div3, div4, div5, div6, div7),
        (
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
        ),
        slot=2,
    )  # cases.py:115

    # stage 4: cumsum, cumsum, cumsum, cumsum, cumsum, cumsum, cumsum, cumsum
    cumsum0, cumsum1, cumsum2, cumsum3, cumsum4, cumsum5, cumsum6, cumsum7 = ctx.row_scan(
        (div0, div1, div2, div3, div4, div5, div6, div7),
        (
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
            cute.ReductionOp.ADD,
        ),
        slot=10,
    )  # cases.py:115

    # output
    ElementwiseStorer(ctx).store(mOut0_0, cumsum0)
    ElementwiseStorer(ctx).store(mOut0_1, cumsum1)
    ElementwiseStorer(ctx).store(mOut0_2, cumsum2)
    ElementwiseStorer(ctx).store(mOut0_3, cumsum3)
    ElementwiseStorer(ctx).store(mOut0_4, cumsum4)
    ElementwiseStorer(ctx).store(mOut0_5, cumsum5)
    ElementwiseStorer(ctx).store(mOut0_6, cumsum6)
    ElementwiseStorer(ctx).store(mOut0_7, cumsum7)
    add7 = sum1 + sum2  # cases.py:115
    add8 = add7 + sum3  # cases.py:115
    add9 = add8 + sum4  # cases.py:115
    add10 = add9 + sum5  # cases.py:115
    add11 = add10 + sum6  # cases.py:115
    add12 = add11 + sum7  # cases.py:115
    add13 = add12 + sum8  # cases.py:115
    ctx.store_row_values(
        mOut1_0, (0, 1, 2, 3, 4, 5, 6, 7), (sum1, add7, add8, add9, add10, add11, add12, add13)
    )
    ElementwiseStorer(ctx).store(mOut2_0, div0)
    add14 = div0 + div1  # cases.py:115
    ElementwiseStorer(ctx).store(mOut2_1, add14)
    add15 = add14 + div2  # cases.py:115
    ElementwiseStorer(ctx).store(mOut2_2, add15)
    add16 = add15 + div3  # cases.py:115
    ElementwiseStorer(ctx).store(mOut2_3, add16)
    add17 = add16 + div4  # cases.py:115
    ElementwiseStorer(ctx).store(mOut2_4, add17)
    add18 = add17 + div5  # cases.py:115
    ElementwiseStorer(ctx).store(mOut2_5, add18)
    add19 = add18 + div6  # cases.py:115
    ElementwiseStorer(ctx).store(mOut2_6, add19)
    add20 = add19 + div7  # cases.py:115
    ElementwiseStorer(ctx).store(mOut2_7, add20)


@cute.jit
def scan_groups(
    mX: cute.Tensor,
    mOut0: cute.Tensor,
    mOut1: cute.Tensor,
    mOut2: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(4).tiled_copy_2d()
    scan_groups_kernel(mX, mOut0, mOut1, mOut2, tiled_copy).launch(
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
        make_fake_tensor(Float32, (m, 4096), 4),
        make_fake_tensor(Float32, (m, 8, 512), 4),
        make_fake_tensor(Float32, (m, 8), 1),
        make_fake_tensor(Float32, (m, 8, 512), 4),
    )

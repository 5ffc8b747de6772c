"""cross_entropy: one row of N = 4096.

logits bf16, label i64, z_weight f32, cap f32 -> loss f32, gradient bf16
"""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64

from htile.compute import math
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor

config = ElementwiseTileConfig(
    BFloat16, N=4096, num_threads=128, threads_per_row=128, cluster_n=1, stage=3
)
blocks = 6  # of an SM, for which registers are spared
worth = (0, 0)  # bytes of a thread's stack for a second and a third one


@cute.kernel
def cross_entropy_kernel(
    mLogits: cute.Tensor,
    mLabel: cute.Tensor,
    z_weight: Float32,
    cap: Float32,
    mLoss: cute.Tensor,
    mGradient: cute.Tensor,
    tiled_copy: cute.TiledCopy,
):
    ctx = ElementwiseKernelContext(config)
    ctx.setup(mLogits, config.tiler_mn(8), tiled_copy, shared=False)
    cute.arch.griddepcontrol_wait()  # the kernel before has ended

    loader = GlobalToRegLoader(ctx)
    tXrLogits = loader.start(mLogits)
    label = ctx.load_row_value(mLabel)
    loader.finish()
    cute.arch.griddepcontrol_launch_dependents()  # the next may start

    # stage 1: max, sum
    maximum0 = math.maximum(label, Int64(0))  # cross_entropy.py:22
    minimum0 = math.minimum(maximum0, Int64(4095))  # cross_entropy.py:22
    take0 = math.convert(ctx.load_element(mLogits, minimum0), Float32)  # cross_entropy.py:22
    ge0 = math.ge(label, Int64(0))  # cross_entropy.py:22
    lt0 = math.lt(label, Int64(4096))  # cross_entropy.py:22
    and0 = math.logical_and(ge0, lt0)  # cross_entropy.py:22
    div1 = math.div_shared(take0, cap)  # cross_entropy.py:19
    tanh1 = math.tanh(div1)  # cross_entropy.py:19
    mul1 = cap * tanh1  # cross_entropy.py:20
    where0 = math.where(and0, mul1, Float32(float("nan")))  # cross_entropy.py:22
    abs0 = math.abs(where0)  # cross_entropy.py:22
    lt1 = math.lt(abs0, 1e+30)  # cross_entropy.py:22
    where1 = math.where(lt1, where0, 0.0)  # cross_entropy.py:22
    held_tanh0 = ctx.make_row(Float32)
    max0_tree = ctx.tree(cute.ReductionOp.MAX)
    sum0_tree = ctx.tree(cute.ReductionOp.ADD)
    for j in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.in_tree(j)
        logits = math.convert(chunk.take_row(tXrLogits).load(), Float32)
        div0 = math.div(logits, cap)  # cross_entropy.py:19
        tanh0 = math.tanh(div0)  # cross_entropy.py:19
        chunk.put_row(held_tanh0, tanh0)
        mul0 = cap * tanh0  # cross_entropy.py:20
        chunk.add_to(max0_tree, mul0)  # cross_entropy.py:22
        sub0 = mul0 - where1  # cross_entropy.py:22
        chunk.add_to(sum0_tree, sub0)  # cross_entropy.py:22
    max0, sum0 = ctx.row_reduce(
        (max0_tree, sum0_tree), (cute.ReductionOp.MAX, cute.ReductionOp.ADD), slot=0
    )  # cross_entropy.py:22

    # stage 2: sum
    abs1 = math.abs(max0)  # cross_entropy.py:22
    eq0 = math.eq(abs1, Float32.inf)  # cross_entropy.py:22
    where2 = math.where(eq0, 0.0, max0)  # cross_entropy.py:22
    held_exp0 = ctx.make_row(Float32)
    for j in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.chunk(j)
        tanh0 = chunk.read_row(held_tanh0).load()
        mul0 = cap * tanh0  # cross_entropy.py:20
        sub1 = mul0 - where2  # cross_entropy.py:22
        exp0 = math.exp_bounded(sub1)  # cross_entropy.py:22
        chunk.put_row(held_exp0, exp0)
    exp0 = held_exp0.load()
    sum1 = ctx.row_reduce(exp0, cute.ReductionOp.ADD, slot=2)  # cross_entropy.py:22

    # output
    ne0 = math.ne(label, Int64(-100))  # cross_entropy.py:28
    eq1 = math.eq(label, Int64(-100))  # cross_entropy.py:22
    log0 = math.log(sum1)  # cross_entropy.py:22
    where3 = math.where(eq0, Float32(float("nan")), log0)  # cross_entropy.py:22
    sub2 = where0 - where2  # cross_entropy.py:22
    sub3 = where3 - sub2  # cross_entropy.py:22
    where4 = math.where(eq1, 0.0, sub3)  # cross_entropy.py:22
    mul2 = 0.9 * where4  # cross_entropy.py:22
    sub4 = where1 - where2  # cross_entropy.py:22
    sub5 = where3 - sub4  # cross_entropy.py:22
    mul3 = sum0 * 0.000244140625  # cross_entropy.py:22
    sub6 = sub5 - mul3  # cross_entropy.py:22
    where5 = math.where(eq1, 0.0, sub6)  # cross_entropy.py:22
    mul4 = 0.1 * where5  # cross_entropy.py:22
    add0 = mul2 + mul4  # cross_entropy.py:22
    add1 = log0 + where2  # cross_entropy.py:21
    mul5 = z_weight * add1  # cross_entropy.py:30
    mul6 = mul5 * add1  # cross_entropy.py:30
    add2 = add0 + mul6  # cross_entropy.py:30
    where6 = math.where(ne0, add2, 0.0)  # cross_entropy.py:30
    mul7 = 2.0 * z_weight  # cross_entropy.py:27
    mul8 = mul7 * add1  # cross_entropy.py:27
    add3 = 1.0 + mul8  # cross_entropy.py:27
    maximum1 = math.maximum(label, Int64(-1))
    minimum1 = math.minimum(maximum1, Int64(4096))
    convert0 = math.convert(minimum1, Int32)
    for j in cutlass.range_constexpr(ctx.num_chunks):
        chunk = ctx.chunk(j)
        tanh0 = chunk.read_row(held_tanh0).load()
        mul0 = cap * tanh0  # cross_entropy.py:20
        sub7 = mul0 - add1  # cross_entropy.py:27
        exp1 = math.exp(sub7)  # cross_entropy.py:27
        eq2 = math.eq(chunk.offsets, chunk.offset_of(convert0))  # cross_entropy.py:24
        where7 = math.where(eq2, 0.9000244140625, 2.44140625e-05)  # cross_entropy.py:26
        sub8 = math.fms(exp1, add3, where7)  # cross_entropy.py:27
        sub9 = math.fnma(tanh0, tanh0, 1.0)  # cross_entropy.py:31
        mul9 = sub8 * sub9  # cross_entropy.py:31
        where8 = math.where(ne0, mul9, 0.0)  # cross_entropy.py:31
        ElementwiseStorer(chunk).store(mGradient, where8)
    ctx.store_row_value(mLoss, where6)


@cute.jit
def cross_entropy(
    mLogits: cute.Tensor,
    mLabel: cute.Tensor,
    z_weight: Float32,
    cap: Float32,
    mLoss: cute.Tensor,
    mGradient: cute.Tensor,
    stream: cuda.CUstream,
):
    tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
    cross_entropy_kernel(mLogits, mLabel, z_weight, cap, mLoss, mGradient, tiled_copy).launch(
        grid=config.grid(mLoss.shape[0]),
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
        make_fake_tensor(BFloat16, (m, 4096), 8),
        make_fake_tensor(Int64, (m,), any_stride=True),
        Float32(0),
        Float32(0),
        make_fake_tensor(Float32, (m,), any_stride=True),
        make_fake_tensor(BFloat16, (m, 4096), 8),
    )

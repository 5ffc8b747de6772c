"""One kernel that uses every verb, as emitted kernels do, compiled for four architectures."""

import math
import re

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
from cutlass import BFloat16, Boolean, Float32, Int32, Int64

from htile.config import ElementwiseTileConfig
from htile.dataflow import (
    ElementwiseKernelContext,
    ElementwiseLoader,
    ElementwiseStorer,
    GlobalToRegLoader,
)
from htile.utils import make_fake_tensor
from tests.primitives.device_code import ARCHS, compile_for, stack_frame

ADD, MAX = cute.ReductionOp.ADD, cute.ReductionOp.MAX


def make_verbs(config, vec_size, shared):
    """A fused row function of two rows, a column and a label, with per-row outputs."""
    dtypes = (Float32,) if shared else 0

    @cute.kernel
    def verbs_kernel(mX, mR, mW, mL, mO, mB, mStat, eps: Float32, tiled_copy: cute.TiledCopy):
        ctx = ElementwiseKernelContext(config)
        ctx.setup(mX, config.tiler_mn(vec_size), tiled_copy, dtypes, shared=shared)
        loader = ElementwiseLoader(ctx) if shared else GlobalToRegLoader(ctx)
        storer = ElementwiseStorer(ctx)

        tXrX = loader.start(mX)
        tXrR = loader.start(mR)
        tXrW = ctx.load_column(mW)
        label = ctx.load_row_value(mL)
        loader.finish()
        x = tXrX.load().to(Float32)
        r = tXrR.load()
        w = tXrW.load().to(Float32)

        # Stage 1: the maximum, the sum and the masked pick, behind one barrier.
        pick0 = cute.where(ctx.cols == label.to(Int32), x, 0.0)
        max0, sum0, sum1 = ctx.row_reduce((x, x * r, pick0), (MAX, ADD, ADD))
        sub0 = x - max0
        # Stage 2.
        sum2 = ctx.row_reduce(sub0 * sub0, ADD, slot=3)
        any0 = ctx.row_reduce(x > r, MAX, slot=4)
        mul0 = sub0 * cute.math.rsqrt(sum2 * (1.0 / config.N) + eps, fastmath=True) * w

        storer.store(mO, mul0)
        storer.store(mB, mul0)
        ctx.store_row_value(mStat, sum0 + sum1 + any0.to(Float32))

    @cute.jit
    def verbs(mX, mR, mW, mL, mO, mB, mStat, eps: Float32, stream: cuda.CUstream):
        tiled_copy = config.make_vector_copy(vec_size).tiled_copy_2d()
        verbs_kernel(mX, mR, mW, mL, mO, mB, mStat, eps, tiled_copy).launch(
            grid=config.grid(mX.shape[0]),
            block=config.block,
            cluster=config.cluster,
            stream=stream,
        )

    return verbs


def compile_verbs(N, arch="sm_90a", shared=True, cluster_n=1, copy_bytes=16, vec_size=None):
    """Compile the kernel for fake tensors of dynamic M."""
    config = ElementwiseTileConfig(BFloat16, N, cluster_n=cluster_n, stage=5, copy_bytes=copy_bytes)
    vec_size = vec_size or config.vec_size(Float32)
    M = cute.sym_int()

    def row(dtype):
        return make_fake_tensor(dtype, (M, N), max(1, copy_bytes * 8 // max(dtype.width, 8)))

    def column(dtype):
        return make_fake_tensor(dtype, (N,), max(1, copy_bytes * 8 // dtype.width))

    return compile_for(
        make_verbs(config, vec_size, shared),
        row(BFloat16),
        row(Float32),
        column(BFloat16),
        make_fake_tensor(Int64, (M,)),
        row(BFloat16),
        row(Boolean),
        make_fake_tensor(Float32, (M,)),
        Float32(0),
        arch=arch,
    )


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("N", [1, 48, 1000, 2048, 4096, 4097])
def test_no_stack_frame(N, shared):
    compiled = compile_verbs(N, shared=shared, copy_bytes=math.gcd(16, 2 * N))
    assert stack_frame(compiled.__cubin__) == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_architectures(arch):
    assert stack_frame(compile_verbs(1000, arch).__cubin__) == 0
    assert stack_frame(compile_verbs(4096, arch, shared=False).__cubin__) == 0


def test_stages_share_barriers():
    """Five slots, three stages: three barriers a row, or three transactions of a cluster."""
    ptx = compile_verbs(4096).__ptx__
    numbers = re.findall(r"bar\.sync\s+(\d+)", ptx)
    assert numbers and all(numbers.count(number) == 3 for number in set(numbers))
    assert ptx.count("st.shared.b32") == 5
    ptx = compile_verbs(65536, cluster_n=8).__ptx__
    assert "bar.sync" not in ptx
    assert ptx.count("mbarrier.arrive.expect_tx") == ptx.count("mbarrier.try_wait") == 3
    assert ptx.count("st.async.") == 5
    assert ptx.count("barrier.cluster.wait") == 1
    assert "bar.sync" not in compile_verbs(2048).__ptx__  # a warp a row


def test_row_offsets_are_64_bit():
    ptx = compile_verbs(4096, shared=False).__ptx__
    first_load = ptx[: ptx.index("ld.global")]
    assert re.search(r"m(ad|ul)\.lo\.s64", first_load)
    assert not re.search(r"mul\.lo\.s32|mad\.lo\.s32", ptx)


def test_true_is_stored_as_one():
    """torch's bools are 0 and 1; the DSL's own store of a Boolean vector writes 255."""
    ptx = compile_verbs(7, shared=False, copy_bytes=2).__ptx__
    assert "st.global.b8" in ptx and not re.search(r"selp\.b16\s+%rs\d+, -1,", ptx)

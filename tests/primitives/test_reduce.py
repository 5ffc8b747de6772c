"""Reductions of every dtype and operation compile; sums are trees; identities are right."""

import math

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import pytest
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, const_expr

from htile.compute.reduce import ADD, MAX, MIN, MUL, identity
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, GlobalToRegLoader
from htile.utils import make_fake_tensor
from tests.primitives.device_code import ARCHS, compile_for, depth, stack_frame

OPS = {"add": ADD, "mul": MUL, "max": MAX, "min": MIN}


def compile_reduce(dtypes, ops, N, arch="sm_90a", scalar=False, **options):
    """Compile one tuple reduction of rows of several dtypes to per-row outputs."""
    config = ElementwiseTileConfig(Float32, N, stage=len(ops), **options)
    vec_size = config.vec_size(Int64)

    @cute.kernel
    def reduce_kernel(inputs: tuple, outputs: tuple, tiled_copy: cute.TiledCopy):
        ctx = ElementwiseKernelContext(config)
        ctx.setup(inputs[0], config.tiler_mn(vec_size), tiled_copy, shared=False)
        loader = GlobalToRegLoader(ctx)
        fragments = [loader.start(mX) for mX in inputs]
        loader.finish()
        values = tuple(f.load() for f in fragments)
        if const_expr(scalar):
            values = tuple(ctx.load_row_value(mO) for mO in outputs)
        for mO, value in zip(outputs, ctx.row_reduce(values, ops), strict=True):
            ctx.store_row_value(mO, value)

    @cute.jit
    def reduce(inputs: tuple, outputs: tuple, stream: cuda.CUstream):
        tiled_copy = config.make_vector_copy(vec_size).tiled_copy_2d()
        reduce_kernel(inputs, outputs, tiled_copy).launch(
            grid=config.grid(inputs[0].shape[0]),
            block=config.block,
            cluster=config.cluster,
            stream=stream,
        )

    M = cute.sym_int()
    rows = tuple(make_fake_tensor(d, (M, N), 16 * 8 // max(d.width, 8)) for d in dtypes)
    results = tuple(make_fake_tensor(d, (M,)) for d in dtypes)
    return compile_for(reduce, rows, results, arch=arch)


@pytest.mark.parametrize("N", [96, 1000, 4096, 6000])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [Float32, Int32, Int64, BFloat16])
def test_dtypes(dtype, op, N):
    buffer = Int64 if dtype is Int64 else Float32
    compiled = compile_reduce((dtype,), (OPS[op],), N, reduction_dtype=buffer)
    assert stack_frame(compiled.__cubin__) == 0


@pytest.mark.parametrize("arch", ARCHS)
def test_mixed_tuple(arch):
    dtypes, ops = (Float32, Int32, Int64, Boolean, Boolean), (MAX, MIN, ADD, MAX, MIN)
    every = [{}, {"threads_per_row": 32}, {"threads_per_row": 96}]
    if "9" in arch:
        every += [{"cluster_n": 4}, {"cluster_n": 16, "threads_per_row": 160}]
    for options in every:
        compile_reduce(dtypes, ops, 4096, arch, reduction_dtype=Int64, **options)
        compile_reduce(dtypes, ops, 4000, arch, reduction_dtype=Int64, scalar=True, **options)


def test_max_hands_nan_on():
    ptx = compile_reduce((Float32,), (MAX,), 4096).__ptx__
    assert "max.NaN.f32" in ptx and "max.f32" not in ptx


@pytest.mark.parametrize("N", [4096, 6144, 1000])
def test_sum_is_a_tree(N):
    """A sum is as deep as log2 of the values of a thread, 5 shuffles and 1 exchange of warps."""
    config = ElementwiseTileConfig(Float32, N)
    values = config.tiler_mn(2)[1] // config.threads_per_row
    ptx = compile_reduce((Float32,), (ADD,), N).__ptx__
    assert depth(ptx, "add.f32") <= math.ceil(math.log2(values)) + 1 + 5 + 1


def test_identities():
    assert [identity(op, Float32) for op in (ADD, MUL, MAX, MIN)] == [0, 1, -math.inf, math.inf]
    assert [identity(op, Int32) for op in (ADD, MUL)] == [0, 1]
    assert (identity(MAX, Int32), identity(MIN, Int64)) == (-(2**31), 2**63 - 1)


@pytest.mark.parametrize(
    ("dtype", "op", "message"),
    [(Boolean, ADD, "Boolean vector"), (Int64, ADD, "make it Int64")],
)
def test_refused(dtype, op, message):
    with pytest.raises(Exception, match=message):
        compile_reduce((dtype,), (op,), 4096)

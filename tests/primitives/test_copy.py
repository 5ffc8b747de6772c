"""Copies: which threads hold what never changes, and the access width follows the alignment."""

import cuda.bindings.driver as cuda
import cutlass
import cutlass.cute as cute
import pytest
from cutlass import BFloat16, Boolean, Float32, Int8, Int32, Int64

from htile.config import ElementwiseTileConfig
from htile.copy.vector import copy_atom, fill_oob
from htile.dataflow import (
    ElementwiseKernelContext,
    ElementwiseLoader,
    ElementwiseStorer,
    GlobalToRegLoader,
)
from htile.types.register import VectorRegTile
from htile.utils import make_fake_tensor
from tests.primitives.device_code import ARCHS, accesses, compile_for, stack_frame


def compile_copy(dtype, N, vec_size, copy_bytes, shared, arch="sm_90a"):
    """Compile a copy of rows by one of the loaders."""
    config = ElementwiseTileConfig(dtype, N, cluster_n=1, copy_bytes=copy_bytes)

    @cute.kernel
    def copy_kernel(mX, mO, tiled_copy: cute.TiledCopy):
        ctx = ElementwiseKernelContext(config)
        ctx.setup(mX, config.tiler_mn(vec_size), tiled_copy, shared=shared)
        loader = ElementwiseLoader(ctx) if shared else GlobalToRegLoader(ctx)
        ElementwiseStorer(ctx).store(mO, loader.load(mX).load())

    @cute.jit
    def copy(mX, mO, stream: cuda.CUstream):
        tiled_copy = config.make_vector_copy(vec_size).tiled_copy_2d()
        copy_kernel(mX, mO, tiled_copy).launch(
            grid=config.grid(mX.shape[0]), block=config.block, stream=stream
        )

    M, divisibility = cute.sym_int(), max(1, copy_bytes * 8 // max(dtype.width, 8))
    rows = [make_fake_tensor(dtype, (M, N), divisibility) for _ in range(2)]
    return compile_for(copy, *rows, arch=arch)


@pytest.mark.parametrize("N", [1024, 1000])
@pytest.mark.parametrize(
    ("dtype", "vec_size", "copy_bytes", "width"),
    [
        (BFloat16, 8, 16, 16),
        (BFloat16, 8, 8, 8),
        (BFloat16, 8, 4, 4),
        (BFloat16, 8, 2, 2),
        (BFloat16, 4, 16, 8),
        (Float32, 8, 16, 16),
        (Float32, 8, 4, 4),
        (Int64, 8, 16, 16),
        (Int32, 8, 8, 8),
        (Boolean, 8, 16, 8),
        (Boolean, 8, 1, 1),
        (Int8, 8, 4, 4),
    ],
)
def test_width(dtype, vec_size, copy_bytes, width, N):
    count = 4 * 8 * max(dtype.width, 8) // 8 // width  # 1024 columns are 32 values a thread
    direct = accesses(compile_copy(dtype, N, vec_size, copy_bytes, False).__ptx__)
    assert direct["ld.global", width] == direct["st.global", width] == count
    shared = accesses(compile_copy(dtype, N, vec_size, copy_bytes, True).__ptx__)
    if width >= 4:
        assert shared["cp.async", width] == shared["st.global", width] == count
        assert not any(space == "ld.global" for space, _ in shared)
    else:  # cp.async has nothing narrower than 4 bytes
        assert shared["ld.global", width] == count


def test_async_width_is_checked():
    with pytest.raises(ValueError, match="32, 64 or 128"):
        copy_atom(BFloat16, 16, is_async=True)


@pytest.mark.parametrize("arch", ARCHS)
def test_pieces_of_a_hand_written_kernel(arch):
    """fill_oob, RegTile, load_to_smem_and_regs, partition_dest and store_from_regs together."""
    config = ElementwiseTileConfig(BFloat16, 1000)

    @cute.kernel
    def kernel(mX, mO, tiled_copy: cute.TiledCopy):
        ctx = ElementwiseKernelContext(config)
        ctx.setup(mX, config.tiler_mn(8), tiled_copy)
        tXgO = ctx.partition_dest(ctx.partition_global(mO, config.tiler_mn(8)))
        ctx.load_to_smem_and_regs()
        fill_oob(ctx.tXsX, ctx.tXpX, -BFloat16.inf)
        cute.autovec_copy(ctx.tXsX, ctx.tXrX)
        tile = VectorRegTile(8, config.num_blocks_N(8), BFloat16)
        tile.fill(1.0)
        tile.store(ctx.tXrX.load() * tile.load())
        ctx.store_from_regs(tile.fragment, tXgO)

    @cute.jit
    def host(mX, mO, stream: cuda.CUstream):
        tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
        kernel(mX, mO, tiled_copy).launch(
            grid=config.grid(mX.shape[0]), block=config.block, stream=stream
        )

    M = cute.sym_int()
    rows = [make_fake_tensor(BFloat16, (M, 1000), 8) for _ in range(2)]
    assert stack_frame(compile_for(host, *rows, arch=arch).__cubin__) == 0


def test_verbs_inside_a_dynamic_loop():
    """The context and its verbs can be used in the body of a dynamic `for` and `if`."""
    config = ElementwiseTileConfig(BFloat16, 4096)

    @cute.kernel
    def kernel(mX, mO, mS, count: Int32, tiled_copy: cute.TiledCopy):
        ctx = ElementwiseKernelContext(config)
        ctx.setup(mX, config.tiler_mn(8), tiled_copy, shared=False)
        storer, loader = ElementwiseStorer(ctx), GlobalToRegLoader(ctx)
        acc = ctx.full(0.0)
        for i in cutlass.range(count):
            acc = acc + loader.load(mX).load().to(Float32)
            total = ctx.row_reduce(acc, cute.ReductionOp.ADD)
            cute.arch.barrier()  # before the slot is used again
            if i == 1:
                storer.store(mO, acc * total)
                ctx.store_row_value(mS, total)

    @cute.jit
    def host(mX, mO, mS, count: Int32, stream: cuda.CUstream):
        tiled_copy = config.make_vector_copy(8).tiled_copy_2d()
        kernel(mX, mO, mS, count, tiled_copy).launch(
            grid=config.grid(mX.shape[0]), block=config.block, stream=stream
        )

    M = cute.sym_int()
    rows = [make_fake_tensor(BFloat16, (M, 4096), 8) for _ in range(2)]
    compiled = compile_for(host, *rows, make_fake_tensor(Float32, (M,)), Int32(0))
    assert stack_frame(compiled.__cubin__) == 0

"""Kernels of products: what they are compiled to, and which tile they get."""

import itertools

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.build.compile import build
from htile.lower.emit_products import Tile, emit
from htile.lower.names import kernel_name
from htile.lower.product_tiles import cycles, tiles
from htile.run.products import ProductStep, steps_of
from htile.testing import assert_close
from tests import products
from tests.products import FUNCTIONS, arguments
from tests.test_matrices import request_of, run_steps

SHARED_LIMIT = 227 * 1024  # bytes of shared memory of a thread block of sm_90a
H200 = 132  # multiprocessors


def fused_of(f, n, k, m=4):
    """The first kernel of a function's products."""
    steps = steps_of(request_of(f, arguments(f, m, n, k)))
    step = next(s for s in steps if isinstance(s, ProductStep))
    return step.kernel or step.alone[0]


@pytest.mark.parametrize("f", FUNCTIONS, ids=[f._signature.name for f in FUNCTIONS])
def test_kernels_compile_without_a_stack(f):
    kernels = [k for k in f.inspect(*arguments(f, 4096, 512, 128)).kernels if hasattr(k, "text")]
    assert kernels
    for kernel in kernels:
        assert kernel.resources.stack == 0
        assert kernel.resources.dynamic_shared <= SHARED_LIMIT


@htile.rowwise
def until(x, W: htile.Matrix, length: htile.PerRow):
    z = F.linear(x, W)
    return torch.where(torch.arange(z.shape[-1]) < length, z, 0.0)


@htile.rowwise
def scaled(x, W: htile.Matrix, size: int):
    z = F.linear(x, W).view(-1, size)
    return (z / z.abs().amax(-1, keepdim=True)).view(-1)


@htile.rowwise
def peaks(x, W: htile.Matrix, size: int):
    z = F.linear(x, W).view(-1, size)
    return z.amax(-1, keepdim=True).expand(*z.shape).reshape(-1)


@htile.rowwise
def TileRows(x, W: htile.Matrix):
    return F.linear(x, W)


@htile.rowwise
def transposed(x, W: htile.Matrix):
    return x @ W


X, W = arguments(products.linear, 5, 256, 64)
LENGTHS = torch.randint(0, 256, (5,))


@pytest.mark.parametrize(("f", "args", "kernels"), [
    (until, (X, W, LENGTHS), 1), (scaled, (X, W, 32), 2), (scaled, (X, W, 128), 1),
    (peaks, (X, W, 64), 2), (peaks, (X, W, 128), 1), (TileRows, (X, W), 1),
    (transposed, (X, W.t().contiguous()), 1),
], ids=lambda value: getattr(value, "__name__", None))  # fmt: skip
def test_more_functions_compile(f, args, kernels):
    """Where rows end, groups of a row's own, and functions that are named as what kernels import.

    Only groups of 128 columns are reduced by the kernel of the product.
    """
    found = f.inspect(*args).kernels
    assert len(found) == kernels and found[0].resources.stack == 0
    (result,) = run_steps(f, args)
    assert_close(f, result, *args)


@pytest.mark.parametrize("major", ["k", "mn"])
@pytest.mark.parametrize("f", [products.swiglu, products.project, products.gelu],
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_every_tile_compiles_without_a_stack(f, major):
    """Also where few rows are loaded, and where elements are read one by one."""
    kernel = fused_of(f, 512, 128)
    for k, tile in enumerate(tiles(kernel, major)):
        a_rows = 16 if (tile.rows, tile.cluster) == (64, 1) and k % 4 else 0
        tile = Tile(tile.columns, tile.rows, tile.cluster, 3, a_rows, tile.warp_groups)
        source = emit(kernel, tile, major, in_pairs=not a_rows)
        assert build(source, kernel_name(kernel.graph), "sm_90a").resources.stack == 0


def test_a_tile_has_whole_chunks_of_each_product():
    functions = products.swiglu, products.nll, products.linear
    for f, major in itertools.product(functions, ("k", "mn")):
        kernel = fused_of(f, 1000, 64)
        for tile in tiles(kernel, major):
            columns = tile.columns // len(kernel.operands)
            assert columns % kernel.chunk == 0 and (major == "k" or columns % 64 == 0)


def chosen(m, n=4096, k=4096):
    f = products.linear
    weight = torch.empty(n, k, dtype=torch.bfloat16, device="meta")
    x = torch.empty(m, k, dtype=torch.bfloat16, device="meta")
    (kernel,) = f.inspect(x, weight).kernels
    return kernel.text.tile, fused_of(f, 8, 8)


def test_tiles_follow_from_the_number_of_rows():
    """Few rows are loaded as few, and no thread block of a cluster is idle."""
    for m, box in ((1, 16), (16, 16), (17, 32), (64, 64)):
        tile, _ = chosen(m)
        assert (tile.rows, tile.cluster) == (64, 1) and (tile.a_rows or 64) == box
    for m in (65, 128, 200, 1000, 5000):
        tile, _ = chosen(m)
        assert tile.rows * (tile.cluster - 1) < m and tile.a_rows == 0
    assert chosen(8192)[0] == Tile(256, 128, 2, 4)


def test_more_rows_take_no_less_time():
    kernel = fused_of(products.linear, 4096, 64)
    for tile in tiles(kernel, "k"):
        times = [cycles(kernel, tile, m, H200) for m in (300, 500, 4000, 30000)]
        assert times == sorted(times)

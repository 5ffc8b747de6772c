"""Kernels of products without wgmma: what they are compiled to, which tile they get, and what their
PTX computes."""

import re
from dataclasses import replace

import pytest
import torch
from torch.utils import _pytree as pytree

from htile.build.compile import build
from htile.lower.emission.names import kernel_name
from htile.lower.products import emit_warp as emit_warp_products
from htile.lower.products.fused import Tile
from htile.lower.products.tiles import choose_tile, cycles, tiles
from htile.run.products import calls as running
from htile.run.products import operands
from htile.run.products.kernels import ProductKernels
from htile.testing import assert_close
from tests import products
from tests.lower.test_product_kernels import fused_of
from tests.primitives.ptx_device import launch
from tests.products import BF16, F16, arguments
from tests.test_matrices import request_of, run_steps
from tests.without_wgmma import without_wgmma

ARCHS = ("sm_80", "sm_86", "sm_90a", "sm_100a", "sm_120a")
A100 = 108  # multiprocessors
MAJORS = ("k", "mn")
FUSED = (
    products.linear, products.matmul, products.gelu, products.swiglu, products.packed_swiglu,
    products.nll, products.statistics, products.project, products.norm_linear, products.mlp,
    products.turned, products.bounded,
)  # fmt: skip


def name_of(f):
    return f._signature.name


# What the kernels are compiled to


def check_resources(used, tile, arch):
    assert used.stack == 0, "nothing is spilled"
    assert used.dynamic_shared <= arch.shared_bytes
    if tile.warps == 4:  # two thread blocks share a multiprocessor
        assert 2 * used.registers * used.threads <= arch.registers
        assert 2 * (used.dynamic_shared + 1024) <= arch.shared_bytes + 1024


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", ["gelu", "swiglu", "nll", "project", "norm_linear"])
def test_kernels_compile_without_a_stack(name, arch):
    f, arch = getattr(products, name), without_wgmma(arch)
    for m in (16, 4096) if name == "swiglu" else (4096,):
        kernels = ProductKernels(request_of(f, arguments(f, m, 512, 128)), arch)
        assert not kernels.by_torch
        (kernel,) = (k for k in kernels.kernels if hasattr(k, "text"))
        check_resources(kernel.resources, kernel.text.tile, arch)
        ptx = kernel.artifact.ptx
        assert "mma.sync.aligned.m16n8k16" in ptx and "wgmma" not in ptx and "tensormap" not in ptx
        assert ("griddepcontrol" in ptx) == arch.dependent_launch


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("f", [products.swiglu, products.project], ids=name_of)
def test_every_tile_compiles_without_a_stack(f, major):
    """Also where elements are read one by one."""
    kernel, arch = fused_of(f, 512, 128), without_wgmma("sm_80")
    for k, tile in enumerate(tiles(kernel, major, arch)):
        source = emit_warp_products.emit(kernel, tile, major, in_pairs=k % 2 == 0)
        used = build(source, kernel_name(kernel.graph), "sm_80").resources
        check_resources(used, tile, arch)


# Which tile they get


@pytest.mark.parametrize("name", ARCHS)
def test_tiles_fit_the_architecture(name):
    arch = without_wgmma(name)
    for f in (products.linear, products.swiglu, products.nll):
        for major in MAJORS:
            kernel = fused_of(f, 1000, 64)
            for m in (1, 65, 300, 4096, 30000):
                tile = choose_tile(kernel, major, m, A100, arch)
                columns = tile.columns // len(kernel.operands)
                assert tile.stages >= 3 and tile.warps in (4, 8)
                assert 64 * (tile.rows + tile.columns) * tile.stages <= arch.shared_bytes
                assert tile.rows * tile.columns <= 128 * 32 * tile.warps
                assert columns % kernel.chunk == 0 and (major == "k" or columns % 64 == 0)


def test_tiles_follow_from_the_number_of_rows():
    arch, kernel = without_wgmma("sm_80"), of_size(products.linear, 4096, 4096)
    rows = [choose_tile(kernel, "k", m, A100, arch).rows for m in (1, 64, 200, 8192)]
    assert rows == [64, 64, 128, 128]
    for tile in tiles(kernel, "k", arch):
        times = [cycles(kernel, tile, m, A100) for m in (300, 500, 4000, 30000)]
        assert times == sorted(times)


def of_size(f, n, k):
    """The kernel of a function, as it is for products of n columns over k elements."""
    kernel = fused_of(f, 8, 8)
    operands = (replace(o, product=replace(o.product, k=k)) for o in kernel.operands)
    return replace(kernel, n=n, operands=tuple(operands))


# What their PTX computes


def evaluated(arch="sm_80", tile=None, change=None, **order):
    """How `run_steps` evaluates the kernel of a product: its PTX, in the given order of warps.

    tile: in place of the one that is chosen. change: a function of the PTX.
    """

    def evaluate(kernel, found, rows):
        text = running.text_for(kernel, found, rows, without_wgmma(arch), A100, False)
        columns = [
            operands.columns_of(found[o.product.matrix], o, kernel.n) for o in kernel.operands
        ]
        if text.major != "k":
            columns = [each.t() for each in columns]
        others = [operands.argument(found[i.name], i, kernel.n) for i in kernel.others]
        source, own = text.source, text.tile
        if tile is not None:
            is_paired, own = operands.in_pairs(kernel, others), tile
            source = emit_warp_products.emit(kernel, tile, text.major, is_paired)
        made = {
            o.name: torch.full((rows, operands.width(kernel, o)), torch.nan).to(o.dtype)
            for o in kernel.graph.outputs
        }
        count = -(-rows // own.rows), -(-kernel.n // (own.columns // len(columns)))
        left = found[kernel.operands[0].product.left]
        given = [left, *columns, *others, *made.values(), *count, rows]
        ptx = build(source, text.function, arch).ptx
        ptx = ptx if change is None else change(ptx)
        launch(ptx, (count[0] * count[1], 1), given, is_emitted=True, **order)
        return made

    return evaluate


def results(f, args, **how):
    return run_steps(f, args, computed=evaluated(**how))


def check(f, args, **how):
    found = results(f, args, **how)
    assert_close(f, pytree.tree_unflatten(found, pytree.tree_structure(f(*args))), *args)


def spaced(v):
    """The same elements with NaN beside the lines."""
    if v.ndim < 2:
        return v
    is_turned = v.stride(1) != 1
    lines = v.t() if is_turned else v
    wide = lines.new_full((len(lines), lines.shape[1] + -lines.shape[1] % 8 + 8), torch.nan)
    wide[:, : lines.shape[1]] = lines
    wide = wide[:, : lines.shape[1]]
    return wide.t() if is_turned else wide


def turned(v):
    """A matrix whose other neighbours are contiguous."""
    return v.t().contiguous().t() if v.stride(1) == 1 else v.contiguous()


@pytest.mark.parametrize("f", FUSED, ids=name_of)
def test_functions_of_products(f):
    check(f, arguments(f, 17, 136, 72))


# M, N and K; K has whole pieces of 8 elements
SIZES = ((1, 8, 8), (65, 258, 200), (130, 77, 40), (3, 1003, 24))


@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("f", [products.linear, products.swiglu, products.nll], ids=name_of)
def test_ragged_sizes(f, size):
    args = [spaced(v) for v in arguments(f, *size, F16)]
    check(f, args)


@pytest.mark.parametrize("f", [products.linear, products.swiglu, products.project], ids=name_of)
def test_matrices_that_lie_the_other_way(f):
    """The bits are those of the matrices as they were."""
    args = arguments(f, 33, 136, 104)
    other = [spaced(turned(v)) if v.ndim == 2 and len(v) != 33 else v for v in args]
    check(f, other)
    assert all(a.equal(b) for a, b in zip(results(f, args), results(f, other), strict=True))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a", "sm_120a"])
def test_newer_architectures(arch):
    for f in (products.swiglu, products.nll):
        check(f, arguments(f, 20, 136, 72), arch=arch)


ORDERS = [{"late": True}, {"late": False}, {"late": False, "reverse": True}]


def matches(ptx, pattern):
    return [slice(*match.span()) for match in re.finditer(pattern, ptx)]


def test_every_barrier_and_every_wait_is_needed():
    """Without any of them, some order of warps and copies gives wrong results, or NaN."""
    f, args = products.linear, arguments(products.linear, 64, 64, 264)
    tile = Tile(64, 64, stages=3, warps=4, is_dependent=False)
    for order in ORDERS:
        check(f, args, tile=tile, **order)
    exact = args[0].double() @ args[1].double().T
    for pattern, count in ((r"bar\.sync \t?0;", 2), (r"cp\.async\.wait_group[ \t]*[1-9];", 2)):
        for k in range(count):

            def change(ptx, pattern=pattern, count=count, k=k):
                found = matches(ptx, pattern)
                assert len(found) == count
                return ptx[: found[k].start] + ptx[found[k].stop :]

            errors = [
                (results(f, args, tile=tile, change=change, **order)[0].double() - exact).abs()
                for order in ORDERS
            ]
            assert not all((error < 0.1).all() for error in errors), (pattern, k)


def test_bits_do_not_hang_on_the_tile_or_the_number_of_rows():
    for f in (products.packed_swiglu, products.project):
        args = arguments(f, 70, 136, 72)
        expected = results(f, args)
        kernel, arch = fused_of(f, 136, 72), without_wgmma("sm_80")
        for tile in tiles(kernel, "k" if f is products.packed_swiglu else "mn", arch):
            found = results(f, args, tile=tile)
            assert all(a.equal(b) for a, b in zip(expected, found, strict=True)), tile
        for at, m in ((0, 1), (33, 17)):
            part = [v[at : at + m] if len(v) == 70 else v for v in args]
            found = results(f, part)
            assert all(a[at : at + m].equal(b) for a, b in zip(expected, found, strict=True))


def test_a_product_that_is_stored():
    """Of functions that one kernel does not compute, a kernel stores each product in float32."""
    args = arguments(products.three, 20, 40, 64)
    step = next(s for s in running.steps_of(request_of(products.three, args)) if s.kernel is None)
    found = dict(request_of(products.three, args).given)
    for kernel, product in zip(step.alone, step.products, strict=True):
        (made,) = evaluated()(kernel, found, 20).values()
        exact = found[product.left].double() @ found[product.matrix].double().T
        assert made.dtype is torch.float32 and (made.double() - exact).abs().max() < 1e-5


def test_operands_that_are_no_whole_pieces():
    """cp.async would copy what is behind the end of a row; torch multiplies."""
    kernel = fused_of(products.linear, 40, 64)
    arch = without_wgmma("sm_80")
    for n, k, major, is_taken in (
        (40, 64, "k", True), (41, 64, "k", True), (40, 60, "k", False), (40, 64, "mn", True),
        (41, 64, "mn", False),
    ):  # fmt: skip
        x, weight = spaced(torch.ones(4, k, dtype=BF16)), torch.ones(n, k, dtype=BF16)
        weight = spaced(weight if major == "k" else turned(weight))
        found = {kernel.operands[0].product.left: x, kernel.operands[0].product.matrix: weight}
        sized = replace(kernel, n=n)
        text = running.text_for(sized, found, 4, arch, A100, False)
        assert (text is not None) == is_taken
        assert running.text_for(sized, found, 4, replace(arch, has_wgmma=True), A100, False)

"""Reductions of products in the tile that has all columns of a row."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.build.arch import ARCHS, DEFAULT
from htile.build.compile import build
from htile.lower.emission.names import kernel_name
from htile.lower.products.emit import emit
from htile.lower.products.fused import WHOLE_BYTES, Tile
from htile.lower.products.tiles import choose_tile, tiles
from htile.run.products.calls import RowStep, steps_of
from htile.testing import assert_close
from tests import products
from tests.lower import test_hopper_products as hopper
from tests.lower import test_warp_products as warps
from tests.test_matrices import request_of, run_steps
from tests.whole_rows import (
    WHOLE,
    arguments,
    constant_norm,
    gated_norm,
    norm_after,
    rms_after,
    softmax_until,
)

H200 = 132  # multiprocessors


def name_of(f):
    return f._signature.name


def kernel_of(f, n, k=64):
    (step,) = steps_of(request_of(f, arguments(f, 4, n, k)))
    return step.kernel


def narrowest(f, n):
    """The columns of a tile of all products, as chunks of 32 of each."""
    return -(-n // 32) * 32 * len(kernel_of(f, n).operands)


@pytest.mark.parametrize("f", WHOLE, ids=name_of)
def test_one_kernel_has_rows_that_fit_a_tile(f):
    most = 256 // len(kernel_of(f, 8).operands)
    for n, is_whole in ((8, True), (most, True), (most + 8, False)):
        steps = steps_of(request_of(f, arguments(f, 4, n, 64)))
        assert (len(steps) == 1 and steps[0].kernel is not None) == is_whole or not is_whole
        kernel = steps[0].kernel
        assert (kernel is not None and kernel.is_whole) == is_whole
        if is_whole:
            (shown,) = f.inspect(*arguments(f, 4, n, 64)).kernels
            assert "rows reduced in the tile" in " ".join(shown.plan.layout())


@htile.rowwise
def with_number(x, W: htile.Matrix):
    z = F.linear(x, W)
    return torch.softmax(z, -1), z.amax()


@htile.rowwise
def with_ranks(x, W: htile.Matrix):
    return torch.softmax(F.linear(x, W), -1).topk(4).values


@pytest.mark.parametrize("f", [with_number, with_ranks, products.nll, products.statistics],
                         ids=name_of)  # fmt: skip
def test_numbers_and_ranks_come_of_other_kernels(f):
    args = products.arguments(f, 4, 64, 64)
    for step in steps_of(request_of(f, args)):
        assert isinstance(step, RowStep) or step.kernel is None or not step.kernel.is_whole
    results = run_steps(f, args)
    assert_close(f, torch.utils._pytree.tree_unflatten(
        results, torch.utils._pytree.tree_structure(f(*args))), *args)  # fmt: skip


@pytest.mark.parametrize("n", [8, 120])
@pytest.mark.parametrize("f", WHOLE, ids=name_of)
def test_values_and_bits(f, n):
    """Against float64, and the same in every form of tile and number of rows."""
    args, columns = arguments(f, 140, n, 72), max(narrowest(f, n), 64)
    expected = hopper.check(f, args, Tile(columns, 128, 1, 2))
    forms = [Tile(columns, 64, 2, 3, warp_groups=1)]
    forms += [Tile(columns, 128, 2, 2, in_turns=True)] if columns <= 192 else []
    for tile in forms:
        found = hopper.results(f, args, tile)
        assert all(a.equal(b) for a, b in zip(expected, found, strict=True)), tile
    part = [v[:17] if len(v) == 140 else v for v in args]
    found = hopper.results(f, part, Tile(columns, 64, 1, 2, 32, warp_groups=1))
    assert all(a[:17].equal(b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("f", WHOLE, ids=name_of)
def test_without_wgmma(f):
    for n in (24, 104):
        warps.check(f, arguments(f, 40, n, 40))


def test_a_row_of_equal_elements_is_its_mean():
    """Its norm is 0, not what rounding leaves of a sum (docs/traps.md)."""
    args = arguments(constant_norm, 70, 200, 40)
    (found,) = hopper.results(constant_norm, args, Tile(224, 64, 1, 2, warp_groups=1))
    assert not found.any()


def test_infinities_and_nan_stay_in_their_rows():
    f, args = products.softmax, arguments(products.softmax, 40, 72, 40)
    args[0][3], args[0][5], args[0][7] = torch.inf, torch.nan, 0.0
    (found,) = hopper.results(f, args, Tile(96, 64, 1, 2, warp_groups=1))
    assert found[3].isnan().all() and found[5].isnan().all()
    torch.testing.assert_close(found[7].double(), torch.full((72,), 1 / 72).double(), atol=1e-4,
                               rtol=0)  # fmt: skip
    rest = [i for i in range(40) if i not in (3, 5)]
    assert_close(f, found[rest], args[0][rest], args[1])


@pytest.mark.parametrize("f", WHOLE, ids=name_of)
def test_kernels_compile_without_a_stack(f):
    """The widest tiles, and those of two warpgroups with as many sums as there are registers for.
    """
    for columns in (256, 192):
        kernel = kernel_of(f, columns // len(kernel_of(f, 8).operands), 64)
        for tile in tiles(kernel, "k", DEFAULT):
            if tile.cluster == 1:
                source = emit(kernel, tile, "k", True)
                used = build(source, kernel_name(kernel.graph), "sm_90a").resources
                assert used.stack == 0, tile


@pytest.mark.parametrize("arch", ["sm_80", "sm_120a"])
@pytest.mark.parametrize("f", [norm_after, gated_norm], ids=name_of)
def test_without_wgmma_wide_rows_may_have_two_kernels(f, arch):
    """Where a thread has no registers for them, the product is stored; nothing is spilled."""
    for columns in (128, 256):
        n = columns // len(kernel_of(f, 8).operands)
        kernels = f.inspect(*arguments(f, 300, n, 64), arch=arch).kernels
        assert len(kernels) == (2 if f is norm_after and columns == 256 else 1)
        assert all(kernel.resources.stack == 0 for kernel in kernels)


def test_large_matrices_are_left_to_several_thread_blocks():
    for f, count in ((products.softmax, 1), (gated_norm, 2)):
        assert kernel_of(f, 128, WHOLE_BYTES // 256 // count).is_whole
        (step,) = steps_of(request_of(f, arguments(f, 4, 128, WHOLE_BYTES // 256 // count + 8)))
        assert step.kernel is None


def test_tiles_have_all_columns():
    for f in (products.softmax, norm_after, gated_norm):
        for n in range(8, 129, 8):
            kernel = kernel_of(f, n)
            for major in ("k", "mn"):
                for tile in tiles(kernel, major, DEFAULT):
                    columns = tile.columns // len(kernel.operands)
                    assert n <= columns <= max(n + 31, 64) and columns % 32 == 0
            for name in (80, 90, 120):
                arch = next(a for c, a in ARCHS.items() if c[0] * 10 == name)
                for m in (1, 70, 5000):
                    assert choose_tile(kernel, "k", m, H200, arch) is not None


def test_other_rows_are_loaded_for_each_stage():
    source = emit(kernel_of(norm_after, 64), Tile(64, 128, 2), "k", True)
    assert source.count("rows.prefetch(mResidual_0, in_pairs=True)") == 2
    assert source.count("rows.prefetch(mResidual_0, mWeight_0, mBias_0, in_pairs=True)") == 1
    assert source.index("rows.prefetch") < source.index("ctx.multiply")
    source = emit(kernel_of(rms_after, 64), Tile(64, 128, 2), "k", True)
    assert source.count("rows.prefetch(mWeight_0, in_pairs=True)") == 1
    assert source.count("for chunk") == 2
    assert kernel_of(softmax_until, 64).is_whole

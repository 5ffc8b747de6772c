"""Reductions of products in the tile that has all columns of a row, or in those of a cluster."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.build.arch import ARCHS, DEFAULT
from htile.build.compile import build
from htile.lower.emission.names import kernel_name
from htile.lower.products.emit import emit
from htile.lower.products.fused import SHARED_K, WHOLE_BYTES, Tile
from htile.lower.products.tiles import choose_tile, clusters_of, tiles
from htile.run.products.calls import RowStep, steps_of
from htile.testing import assert_close
from tests import products
from tests.lower import test_hopper_products as hopper
from tests.lower import test_warp_products as warps
from tests.test_matrices import request_of, run_steps
from tests.whole_rows import (
    SHARED,
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
    for n in (8, most):
        assert (kernel_of(f, n).is_whole, kernel_of(f, n).shares) == (True, 1)
        (shown,) = f.inspect(*arguments(f, 4, n, 64)).kernels
        assert "rows reduced in the tile that has" in " ".join(shown.plan.layout())
    kernel = kernel_of(f, most + 8)
    assert (kernel is not None) == (f in SHARED) and (kernel is None or kernel.shares > 1)


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


def shared_tile(f, n, k, rows, **more):
    """A tile of a row of products that several share."""
    kernel = kernel_of(f, n, k)
    assert kernel.shares > 1
    return Tile(kernel.columns * len(kernel.operands), rows, 1, 2, **more)


def test_how_many_tiles_share_a_row():
    """As few as have room for it, if rows are not too long and stored as whole tiles."""
    assert [kernel_of(products.softmax, n).shares for n in (256, 264, 512, 520, 1032, 2048)] == [
        1, 2, 2, 4, 8, 8,
    ]  # fmt: skip
    assert [kernel_of(rms_after, n).shares for n in (264, 512, 1024)] == [4, 4, 8]
    assert [kernel_of(gated_norm, n).shares for n in (136, 512, 1024)] == [2, 4, 8]
    for f, n, k in (
        (products.softmax, 2056, 64), (products.softmax, 999, 64), (rms_after, 1032, 64),
        (norm_after, 512, 64), (products.softmax, 512, SHARED_K + 8),
    ):  # fmt: skip
        assert kernel_of(f, n, k) is None
    assert kernel_of(products.softmax, 512, SHARED_K).shares == 2


@pytest.mark.parametrize("f", SHARED, ids=name_of)
def test_values_and_bits_of_shared_rows(f):
    """Against float64, and the same in all tiles, numbers of rows and orders of what happens."""
    n, k = {products.softmax: 520, gated_norm: 136}.get(f, 264), 72
    args = arguments(f, 140, n, k)
    expected = hopper.check(f, args, shared_tile(f, n, k, 128))
    found = hopper.results(f, args, shared_tile(f, n, k, 64, warp_groups=1), late=False, seed=1)
    assert all(a.equal(b) for a, b in zip(expected, found, strict=True))
    part = [v[:17] if len(v) == 140 else v for v in args]
    few = shared_tile(f, n, k, 64, a_rows=32, warp_groups=1)
    found = hopper.results(f, part, few, seed=2)
    assert all(a[:17].equal(b) for a, b in zip(expected, found, strict=True))
    turned = [v.t().contiguous().t() if v.shape == (n, k) else v for v in args]
    found = hopper.results(f, turned, shared_tile(f, n, k, 128), seed=3)
    assert all(a.equal(b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("f", SHARED, ids=name_of)
def test_shared_rows_have_a_tile_in_both_orders(f):
    """Else a row would have other bits where its matrices lie as (K, N)."""
    for n in range(136, 1033, 56):
        kernel = kernel_of(f, n)
        if kernel is not None and kernel.shares > 1:
            assert tiles(kernel, "k", DEFAULT) and tiles(kernel, "mn", DEFAULT), n


def test_one_of_eight_tiles_may_have_no_columns():
    f, (n, k) = products.softmax, (1032, 40)
    kernel = kernel_of(f, n, k)
    assert kernel.shares == 8 and 7 * kernel.columns >= n
    hopper.check(f, arguments(f, 70, n, k), shared_tile(f, n, k, 128))


def test_a_shared_row_of_equal_elements_is_its_mean():
    args = arguments(constant_norm, 70, 520, 40)
    tile = shared_tile(constant_norm, 520, 40, 64, warp_groups=1)
    (found,) = hopper.results(constant_norm, args, tile)
    assert not found.any()


def test_infinities_and_nan_stay_in_their_shared_rows():
    f, args = products.softmax, arguments(products.softmax, 40, 264, 40)
    args[0][3], args[0][5], args[0][7] = torch.inf, torch.nan, 0.0
    (found,) = hopper.results(f, args, shared_tile(f, 264, 40, 64, warp_groups=1))
    assert found[3].isnan().all() and found[5].isnan().all()
    rest = [i for i in range(40) if i not in (3, 5)]
    assert_close(f, found[rest], args[0][rest], args[1])


def test_exchanges_need_two_buffers(monkeypatch):
    """With one, what a tile has sent is overwritten before all warps of another one have read it.
    """
    f, (n, k) = products.softmax, (264, 40)
    args, tile = arguments(f, 200, n, k), shared_tile(f, n, k, 128)

    def compared(seed):
        (found,) = hopper.results(f, args, tile, clusters=1, late=False, seed=seed)
        assert_close(f, found, *args)

    compared(0)
    text = "exchanges=2,\n"
    monkeypatch.setattr(
        hopper, "emit", lambda *given: emit(*given).replace(text, f"{text}    buffers=1,\n")
    )
    with pytest.raises(AssertionError, match="differ"):
        compared(0)


@pytest.mark.parametrize("f", SHARED, ids=name_of)
def test_kernels_of_shared_rows_compile_without_a_stack(f):
    """With the widest tiles."""
    n = {products.softmax: 2048, softmax_until: 2048}.get(f, 1024)
    kernel = kernel_of(f, n)
    for tile in tiles(kernel, "k", DEFAULT):
        used = build(emit(kernel, tile, "k", True), kernel_name(kernel.graph), "sm_90a").resources
        assert used.stack == 0, tile


@htile.rowwise
def of_two_lengths(x, W: htile.Matrix):
    y = F.linear(x, W)
    return torch.softmax(y, -1), torch.softmax(y[: y.shape[0] // 2], -1)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_a_product_of_rows_of_several_lengths_is_stored_once(arch):
    args = arguments(products.softmax, 300, 1024, 64)
    assert len(of_two_lengths.inspect(*args, arch=arch).kernels) == 2


@pytest.mark.parametrize("arch", ["sm_80", "sm_100a", "sm_120a"])
def test_without_wgmma_shared_rows_have_two_kernels(arch):
    kernels = rms_after.inspect(*arguments(rms_after, 300, 512, 64), arch=arch).kernels
    assert len(kernels) == 2
    (one,) = rms_after.inspect(*arguments(rms_after, 300, 512, 64), arch="sm_90a").kernels
    assert "4 tiles of a cluster share what they load of x" in " ".join(one.plan.layout())
    assert "rows reduced in the 4 tiles that have" in " ".join(one.plan.layout())


def test_clusters_that_run_at_the_same_time():
    """All that an H200 holds: 66 of two thread blocks, 30 of four, 15 of eight."""
    found = [
        clusters_of(kernel_of(products.softmax, n), Tile(256), H200)
        for n in (256, 512, 1024, 2048)
    ]
    assert found == [132, 66, 30, 15]
    assert clusters_of(kernel_of(products.softmax, 2048), Tile(256), 4) == 1

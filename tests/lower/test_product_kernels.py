"""Kernels of products: what they are compiled to, and which tile they get."""

import functools
import itertools
import time
from collections import Counter
from dataclasses import replace
from statistics import geometric_mean

import pytest
import torch
import torch.nn.functional as F

import htile
from benchmarks import product_tiles as product_times
from htile.build.arch import ARCHS, DEFAULT
from htile.build.compile import _build, build
from htile.lower.emission.names import kernel_name
from htile.lower.products.emit import emit
from htile.lower.products.fused import Tile
from htile.lower.products.tiles import choose_tile, cycles, fastest, tiles
from htile.run.products.calls import ProductStep, steps_of, text_for
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


FORMS = [products.swiglu, products.project, products.gelu, products.norm_linear]


@htile.rowwise
def beside_zeros(x, W: htile.Matrix):
    z = F.linear(x, W)
    return torch.where(z > 0, z, torch.zeros_like(z)).logsumexp(-1)


def test_a_constant_row_is_as_wide_as_the_groups_of_columns():
    """The last group goes beyond the row."""
    args = products.arguments(products.linear, 8, 144, 64)
    kernels = beside_zeros.inspect(*args).kernels
    assert len(kernels) == 2 and kernels[0].resources.stack == 0
    (result,) = run_steps(beside_zeros, args)
    assert_close(beside_zeros, result, *args)


MAJORS = "k", "mn"


@functools.cache
def some_tiles_of(f, major):
    """The widest tiles and others of each form, with few rows, and elements read one by one."""
    found = []
    for k, tile in enumerate(products.some_tiles(tiles(fused_of(f, 512, 128), major, DEFAULT))):
        a_rows = 16 if (tile.rows, tile.cluster) == (64, 1) and k % 3 else 0
        found.append(replace(tile, stages=3, a_rows=a_rows))
    return found


def covered(f, major, tile):
    """What need not be compiled once more if a function has this tile."""
    form = tile.rows, tile.in_turns, tile.parts
    alike = [t for t in some_tiles_of(f, major) if (t.rows, t.in_turns, t.parts) == form]
    if tile.columns < max(t.columns for t in alike if t.cluster == tile.cluster):
        return {tile}
    return {tile, (f, form), (f, major, tile.a_rows), (major, form, tile.cluster)}


def sums_of(tile):
    """How many sums a thread has, and what else makes its code long."""
    sums = tile.rows * tile.columns // (1 if tile.in_turns else tile.warp_groups)
    return sums, tile.in_turns, tile.parts, tile.cluster


@functools.cache
def selected():
    """Some of all (function, layout, tile), which `test_tiles_compile_without_a_stack` tells of."""
    every = [(f, major, tile) for f, major in itertools.product(FORMS, MAJORS)
             for tile in some_tiles_of(f, major)]  # fmt: skip
    chosen = [(f, major, max(some_tiles_of(f, major), key=sums_of))
              for f, major in itertools.product(FORMS, MAJORS)]  # fmt: skip
    gains = {each: covered(*each) for each in every}
    left = set().union(*gains.values()).difference(*(gains[each] for each in chosen))
    had = Counter(each[:2] for each in chosen)
    while left:  # the one that covers the most of what is left, where the fewest were chosen
        best = max(every, key=lambda each: (len(gains[each] & left), -had[each[:2]]))
        chosen.append(best)
        had[best[:2]] += 1
        left -= gains[best]
    return chosen


@pytest.mark.parametrize("major", MAJORS)
@pytest.mark.parametrize("f", FORMS, ids=lambda f: f._signature.name)
def test_tiles_compile_without_a_stack(f, major, pytestconfig):
    """Tiles of each form, with few rows, and elements read one by one.

    Their full product with functions and layouts takes minutes: `--full-product` has it. Else each
    function has in each layout the tile with the most sums of a thread, and a tile with few rows.
    It has the widest tile of each form, be it for a cluster or not. Each layout has these for a
    cluster and for none, and each narrower tile is compiled with some function.
    """
    every = pytestconfig.getoption("--full-product")
    found = [each[2] for each in selected() if each[:2] == (f, major)]
    kernel = fused_of(f, 512, 128)
    for tile in some_tiles_of(f, major) if every else found:
        source = emit(kernel, tile, major, in_pairs=not tile.a_rows)
        used = build(source, kernel_name(kernel.graph), "sm_90a").resources
        assert used.stack == 0 and used.dynamic_shared <= SHARED_LIMIT


def test_an_element_at_a_label_is_looked_for_where_it_is():
    """Not all elements are compared with the label, but each group with its columns."""
    for n, end in ((1000, ", Int32(1000))"), (1024, "))")):
        source = emit(fused_of(products.nll, n, 64), Tile(256, 128, 2), "k", True)
        (line,) = [line for line in source.splitlines() if "group_element" in line]
        assert end in line and "math.eq(chunk.offsets" not in source
        assert source.count("group_reduce") == 2


ALONE = 1.2  # seconds that `seconds_of` linear takes where nothing else uses the processor


def seconds_of(f, m, n, k):
    """Of the processor's time, to compile a product's kernel, even if it was compiled before."""
    kernel = f.inspect(*arguments(f, m, n, k)).kernels[0]
    start = time.process_time()
    _build(kernel.lowered.source, kernel.lowered.function, kernel.arch)
    return time.process_time() - start


@pytest.mark.parametrize("m", [1, 4096])
@pytest.mark.parametrize("f", [products.swiglu, products.gelu, products.nll],
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_compile_times(f, m):
    """A kernel takes at most 3 s to compile, once all modules are loaded.

    Another process on the same core makes a second longer, as the time of another kernel shows.
    """
    n = 512 if f is products.nll else 4096
    seconds_of(f, m, n, 128), seconds_of(products.linear, 4096, 4096, 128)  # which load modules
    taken, plain = seconds_of(f, m, n, 256), seconds_of(products.linear, 4096, 4096, 256)
    assert taken / max(1.0, plain / ALONE) < 3


def test_a_tile_has_whole_lines_and_groups():
    """A multiple of 8 columns; whole groups where there are some, and whole swizzled lines."""
    functions = products.swiglu, products.nll, products.linear
    for f, major in itertools.product(functions, ("k", "mn")):
        kernel = fused_of(f, 1000, 64)
        for tile in tiles(kernel, major, DEFAULT):
            columns = tile.columns // tile.parts // len(kernel.operands)
            assert columns % 8 == 0 and columns >= kernel.chunk
            assert f is not products.nll or columns % kernel.chunk == 0
            line = 64 if tile.columns % 64 == 0 else 32
            assert major == "k" or columns % line == 0


@pytest.mark.parametrize("f", [products.linear, products.gelu, products.nll],
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_tiles_fit_in_registers_and_shared_memory(f):
    kernel = fused_of(f, 1000, 64)
    for rows in (16, 1000):
        for tile in tiles(kernel, "k", DEFAULT, rows):
            sums = tile.rows * tile.columns // (128 * (1 if tile.in_turns else tile.warp_groups))
            assert sums <= 192 and tile.stages >= 3
            assert not tile.in_turns or (tile.rows, tile.warp_groups) == (128, 2)
            if f is products.gelu and sums > 128:
                assert tile.in_turns, "nothing hides the loads of the bias"
            assert 128 * tile.stages * (tile.rows + tile.columns) < SHARED_LIMIT


def test_a_kernel_for_no_rows_is_that_for_one():
    args = arguments(products.linear, 4, 256, 64)
    kernel, found = fused_of(products.linear, 256, 64), {"x": args[0], "W": args[1]}
    none, one = (text_for(kernel, found, rows, ARCHS[9, 0], H200, False) for rows in (0, 1))
    assert none == one and none is not None


@pytest.mark.parametrize(("n", "k"), [(1, 64), (64, 1)])
def test_torch_multiplies_a_matrix_of_one_line(n, k):
    """Also where it is a part of a wider one, whose lines begin at multiples of 16 bytes."""
    left, matrix = torch.zeros(4, 64, dtype=torch.bfloat16), torch.zeros(64, 64).bfloat16()
    found = {"x": left[:, :k], "W": matrix[:n, :k]}
    kernel = fused_of(products.linear, n, k)
    assert text_for(kernel, found, 4, ARCHS[9, 0], H200, False) is None


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


def test_tiles_are_cut_where_few_are_left():
    """8192x4096 are 7.75 waves of tiles of 128x256, and 4608x5120 are 5.45 of them."""
    assert chosen(8192)[0].parts == 1
    assert chosen(4608, 5120, 5120)[0].parts == 2


def test_a_cut_takes_no_more_time_where_one_tile_is_left():
    kernel = fused_of(products.linear, 256 * (H200 // 2 + 1), 4096)
    tile = Tile(256, 128, 2)
    times = [cycles(kernel, replace(tile, parts=parts), 256, H200) for parts in (1, 2)]
    assert times == sorted(times, reverse=True) and times[0] > times[1]


def test_the_chosen_tiles_are_fast():
    """At sizes that were timed on an H200, beside the fastest tile of each."""
    found = product_times.regrets(product_times.records_of(product_times.TIMES)).values()
    assert len(found) == 72 and geometric_mean(found) < 1.02 and max(found) < 1.2


def of_size(f, n, k):
    """The kernel of a function, as it is for products of n columns over k elements."""
    kernel = fused_of(f, 256, 64)
    operands = tuple(replace(o, product=replace(o.product, k=k)) for o in kernel.operands)
    return replace(kernel, n=n, operands=operands)


def test_what_follows_a_product_is_hidden_where_it_takes_long():
    """In turns where much is computed or read and waves are full; together where K is long."""

    def turns(f, m, n, k):
        return choose_tile(of_size(f, n, k), "k", m, H200, DEFAULT).in_turns

    full = 128 * 24, 192 * 55  # ten waves of tiles of 128x192
    assert turns(products.gelu, *full, 4096)
    assert not turns(products.linear, 4096, 4096, 4096)
    assert not turns(products.gelu, 4096, 4096, 65536)
    for f in (products.linear, products.gelu):
        kernel = of_size(f, 4096, 4096)
        own, together = (Tile(192, 128, 2, 5, in_turns=each) for each in (True, False))
        saved = [cycles(kernel, together, m, H200) - cycles(kernel, own, m, H200)
                 for m in (2048, 8192)]  # fmt: skip
        assert saved[1] > saved[0]
        if f is products.linear:
            least = saved[1]
    assert saved[1] > least, "gelu gains more than a bare product"


def test_unusual_tiles_are_rare():
    """A function that is called with all kinds of rows has few kernels."""
    kernel = of_size(products.linear, 5120, 4096)
    found = [replace(choose_tile(kernel, "k", m, H200, DEFAULT), stages=0, a_rows=0)
             for m in range(1, 9000, 37)]  # fmt: skip
    assert len(set(found)) <= 24
    usual = [tile for tile in found if tile.columns % 32 == 0 and tile.rows < 256]
    assert len(usual) >= 0.6 * len(found)


def test_unusual_tiles_where_waves_are_full():
    """5016 columns are 33 tiles of 152, which fill three waves with 12 tiles of 256 rows."""
    kernel = of_size(products.linear, 5016, 6144)
    tile = choose_tile(kernel, "k", 3072, H200, DEFAULT)
    assert (tile.rows, tile.columns) == (256, 152)
    usual = [t for t in tiles(kernel, "k", DEFAULT, 3072) if t.columns % 32 == 0]
    known = fastest(kernel, usual, 3072, H200)
    assert cycles(kernel, tile, 3072, H200) < 0.98 * cycles(kernel, known, 3072, H200)


def test_more_rows_take_no_less_time():
    kernel = fused_of(products.linear, 4096, 64)
    for tile in products.some_tiles(tiles(kernel, "k", DEFAULT)):
        times = [cycles(kernel, tile, m, H200) for m in (300, 500, 4000, 30000)]
        assert times == sorted(times)

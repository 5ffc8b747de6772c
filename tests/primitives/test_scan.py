"""Scans of a row: right in every way that a row is laid out, and without a stack on all GPUs.

The primitives' own code runs on numpy arrays, which round as the GPU does (`numpy_device`).
"""

import math

import cuda.bindings.driver as cuda
import cutlass.cute as cute
import numpy as np
import pytest
from cutlass import Float32, Int32, Int64

from htile.compute.log_add import LOGADD
from htile.compute.mean import MEAN
from htile.compute.reduce import ADD, MAX, MIN, MUL
from htile.compute.scan import row_scan
from htile.config import ElementwiseTileConfig
from htile.dataflow import ElementwiseKernelContext, ElementwiseStorer, GlobalToRegLoader
from htile.utils import make_fake_tensor
from tests.primitives.device_code import ARCHS, compile_for, stack_frame
from tests.primitives.numpy_device import Device, Vector

# (elements of a vector, vectors of a thread, threads of a share, shares of a row)
LAYOUTS = [
    *((vec, chunks, 1, 1) for vec, chunks in ((1, 1), (4, 3), (8, 8))),
    *((4, chunks, threads, 1) for threads in (2, 8, 16, 32) for chunks in (1, 2, 7)),
    *((vec, chunks, threads, 1) for threads in (64, 96, 160, 256, 1024) for vec, chunks in
      ((1, 5), (2, 1), (4, 4), (8, 33))),
    *((4, chunks, threads, shares) for threads in (32, 96, 128) for chunks in (1, 3)
      for shares in (2, 4, 16)),
]  # fmt: skip
SCANS = {ADD: np.cumsum, MUL: np.cumprod}
EXTREMES = {MAX: np.maximum.accumulate, MIN: np.minimum.accumulate}


def names(layout):
    return "v{}-c{}-t{}-s{}".format(*layout)


def scanned(rows, op, layout, monkeypatch, from_end=False):
    """Rows through the code of the primitives: as many as a warp has, of padded length.

    A scan from the start shares the exchange.
    """
    vec, chunks, threads, shares = layout
    warps, lanes = max(threads // 32, 1), min(threads, 32)
    device = Device(shares, warps)
    device.install(monkeypatch)
    tiles = rows.reshape(32 // lanes, shares, chunks, warps, lanes, vec)
    mine = tiles.transpose(1, 3, 0, 4, 2, 5)  # shares, warps, rows of a warp, lanes, chunks, vec
    x = Vector(np.ascontiguousarray(mine).reshape(shares, warps, 32, chunks * vec))
    buffer = device if threads > 32 or shares > 1 else None
    both = {"share": device.share, "from_end": (False, from_end)}
    *_, found = row_scan((x, x), (ADD, op), vec, threads, buffer, **both)
    found = found.data.reshape(shares, warps, 32 // lanes, lanes, chunks, vec)
    return found.transpose(2, 0, 4, 1, 3, 5).reshape(rows.shape)


def drawn(layout, dtype, op, seed=0):
    vec, chunks, threads, shares = layout
    rng = np.random.default_rng(seed)
    shape = 32 // min(threads, 32), vec * chunks * threads * shares
    if np.issubdtype(dtype, np.integer):
        return rng.integers(-9, 10, shape).astype(dtype)
    spread = min(0.1, shape[1] ** -0.5)  # products stay near 1
    return (rng.uniform(-1, 1, shape) * (1 if op is ADD else spread) + (op is MUL)).astype(dtype)


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
@pytest.mark.parametrize("op", SCANS, ids=("sum", "product"))
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_scans_of_integers_are_exact(dtype, op, layout, monkeypatch):
    x = drawn(layout, dtype, op)
    expected = SCANS[op](x, axis=1, dtype=dtype)
    assert np.array_equal(scanned(x, op, layout, monkeypatch), expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
@pytest.mark.parametrize("op", EXTREMES, ids=("maximum", "minimum"))
@pytest.mark.parametrize("from_end", [False, True])
def test_running_extremes_are_exact(from_end, op, layout, monkeypatch):
    """Also where an element is NaN, from which on all are, or infinite."""
    for dtype in (np.int32, np.int64, np.float32):
        x = drawn(layout, dtype, ADD)
        if dtype is np.float32:
            x[:, x.shape[1] // 3], x[0, x.shape[1] * 2 // 3] = -np.inf, np.nan
        along = x[:, ::-1] if from_end else x
        expected = EXTREMES[op](along, axis=1)
        expected = expected[:, ::-1] if from_end else expected
        found = scanned(x, op, layout, monkeypatch, from_end)
        assert found.dtype == dtype
        assert np.array_equal(found, expected, equal_nan=dtype is np.float32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
@pytest.mark.parametrize("from_end", [False, True])
def test_scans_of_logarithms(from_end, layout, monkeypatch):
    """As exact as one after the other, or more so, however far apart the elements are."""
    for size in (1, 100):
        x = drawn(layout, np.float32, ADD) * np.float32(size)
        along = (x[:, ::-1] if from_end else x).astype(np.float64)
        expected = np.logaddexp.accumulate(along, axis=1)
        expected = expected[:, ::-1] if from_end else expected
        found = scanned(x, LOGADD, layout, monkeypatch, from_end)
        assert found.dtype == np.float32
        assert (abs(found - expected) <= 2.0**-24 * 40 * np.maximum(abs(expected), 1)).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
def test_scans_of_infinite_logarithms(layout, monkeypatch):
    x = drawn(layout, np.float32, ADD)
    x[0, : x.shape[1] // 2], x[0, x.shape[1] * 3 // 4 :] = -np.inf, np.inf
    expected = np.logaddexp.accumulate(x.astype(np.float64), axis=1)
    found = scanned(x, LOGADD, layout, monkeypatch)
    assert np.allclose(found, expected, rtol=1e-5, atol=1e-5) and not np.isnan(found).any()
    x[0, x.shape[1] // 4] = np.nan
    is_nan = np.isnan(scanned(x, LOGADD, layout, monkeypatch)[0])
    assert np.array_equal(is_nan, np.arange(x.shape[1]) >= x.shape[1] // 4)


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
@pytest.mark.parametrize("op", SCANS, ids=("sum", "product"))
def test_scans_of_floats(op, layout, monkeypatch):
    """As exact as one after the other, or more so."""
    x = drawn(layout, np.float32, op)
    expected = SCANS[op](x, axis=1, dtype=np.float64)
    found = scanned(x, op, layout, monkeypatch)
    assert found.dtype == np.float32
    if op is ADD:
        terms = np.cumsum(abs(x), axis=1, dtype=np.float64)
        assert (abs(found - expected) <= 2.0**-24 * 40 * terms).all()
    else:
        places = np.arange(1, x.shape[1] + 1)
        assert (abs(found / expected - 1) <= 2.0**-24 * places).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
@pytest.mark.parametrize("op", SCANS, ids=("sum", "product"))
def test_scans_from_the_end(op, layout, monkeypatch):
    """They are the scans of the row turned round, to the bit: the threads are turned round too."""
    for dtype in (np.int32, np.int64, np.float32):
        x = drawn(layout, dtype, op)
        turned = np.ascontiguousarray(x[:, ::-1])
        expected = scanned(turned, op, layout, monkeypatch)[:, ::-1]
        found = scanned(x, op, layout, monkeypatch, from_end=True)
        assert found.dtype == dtype and np.array_equal(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
def test_what_lies_before_an_element_does_not_count_from_the_end(layout, monkeypatch):
    """Neither what the row has there nor the other rows of a warp, whatever it is."""
    x = drawn(layout, np.float32, ADD)
    whole = scanned(x, ADD, layout, monkeypatch, from_end=True)
    n = x.shape[1] // 3
    for before in (np.nan, np.inf, 0.0):
        y = x.copy()
        y[:, :n] = before
        y[1::2] = np.nan
        found = scanned(y, ADD, layout, monkeypatch, from_end=True)
        assert np.array_equal(found[::2, n:], whole[::2, n:])
        assert np.isnan(found[1::2]).all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
def test_what_lies_behind_an_element_does_not_count(layout, monkeypatch):
    """Neither padding nor the next row of a warp, whatever it is."""
    x = drawn(layout, np.float32, ADD)
    whole = scanned(x, ADD, layout, monkeypatch)
    n = max(1, x.shape[1] * 2 // 3)
    for beyond in (np.nan, np.inf, 0.0):
        y = x.copy()
        y[:, n:] = beyond
        y[1::2] = np.nan
        found = scanned(y, ADD, layout, monkeypatch)
        assert np.array_equal(found[::2, :n], whole[::2, :n])
        assert np.isnan(found[1::2]).all()


@pytest.mark.parametrize("value", [math.nan, math.inf])
@pytest.mark.parametrize("layout", LAYOUTS, ids=names)
def test_nan_and_infinity_reach_what_comes_after_them(value, layout, monkeypatch):
    x = drawn(layout, np.float32, ADD)
    for at in {0, x.shape[1] // 2, x.shape[1] - 1}:
        y = x.copy()
        y[:, at] = value
        found = scanned(y, ADD, layout, monkeypatch)
        assert np.isfinite(found[:, :at]).all()
        assert np.array_equal(found[:, at:], np.full_like(found[:, at:], value), equal_nan=True)


def compile_scan(dtype, N, op=ADD, arch="sm_90a", vec_size=4, stage=64, from_end=False, **options):
    """Compile the scan of a row."""
    buffer = Int64 if dtype is Int64 else Float32
    config = ElementwiseTileConfig(dtype, N, stage=stage, reduction_dtype=buffer, **options)

    @cute.kernel
    def scan_kernel(mX, mO, tiled_copy: cute.TiledCopy):
        ctx = ElementwiseKernelContext(config)
        ctx.setup(mX, config.tiler_mn(vec_size), tiled_copy, shared=False)
        x = GlobalToRegLoader(ctx).load(mX).load()
        ElementwiseStorer(ctx).store(mO, ctx.row_scan(x, op, from_end=from_end))

    @cute.jit
    def scan(mX, mO, stream: cuda.CUstream):
        tiled_copy = config.make_vector_copy(vec_size).tiled_copy_2d()
        scan_kernel(mX, mO, tiled_copy).launch(
            grid=config.grid(mX.shape[0]),
            block=config.block,
            cluster=config.cluster,
            stream=stream,
        )

    rows = make_fake_tensor(dtype, (cute.sym_int(), N), 16)
    return compile_for(scan, rows, rows, arch=arch)


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", [Float32, Int32, Int64])
def test_scans_compile_without_a_stack(dtype, arch):
    every = [{"threads_per_row": 8}, {"threads_per_row": 32}, {"threads_per_row": 96}]
    every = [{"cluster_n": 1, **options} for options in every]
    if "80" not in arch and "120" not in arch:
        every += [{"cluster_n": 4}, {"cluster_n": 16, "threads_per_row": 160}]
    for options in every:
        N = 4096 if options["cluster_n"] > 1 else 12 * options.get("threads_per_row", 128)
        ops = [(ADD, False), (MUL, False), (ADD, True), (MAX, False), (MIN, True)]
        ops += [(LOGADD, False), (LOGADD, True)] if dtype is Float32 else []
        for op, from_end in ops:
            scan = compile_scan(dtype, N, op, arch, from_end=from_end, **options)
            assert stack_frame(scan.__cubin__) == 0


def test_what_no_scan_takes():
    with pytest.raises(ValueError, match="row_scan takes ADD, MUL, MAX, MIN and LOGADD, not"):
        compile_scan(Float32, 128, MEAN)
    with pytest.raises(ValueError, match="row_scan takes LOGADD of Float32, not of Int32"):
        compile_scan(Int32, 128, LOGADD)
    with pytest.raises(ValueError, match="raise `stage`"):
        compile_scan(Float32, 4096, stage=1, threads_per_row=128, cluster_n=1)
    with pytest.raises(ValueError, match="each of its shares takes a CTA"):
        compile_scan(Float32, 8192, shares=2, cluster_n=2, threads_per_row=128)

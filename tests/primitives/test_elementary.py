"""The square root, logarithms, e ** x - 1, sines: their errors, and every edge, without a GPU.

The functions' own code runs on numpy arrays, whose approximate instructions are off by as much as
their documentation allows (`numpy_device`). What is emitted runs as PTX on the edges
(`ptx_device`). `benchmarks.accuracy` measures all of float32 on a GPU.
"""

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

import htile
from htile.compute import angles
from htile.compute import math as m
from tests.primitives.numpy_device import Device, Vector, lg2_approx, sqrt_approx
from tests.primitives.ptx_device import launch

MOST = 2.0  # ulp, where subnormal results count in units of 2 ** -149
STEP = 1511  # every number so far from the last is tried
# Next to these numbers every one is: where a function changes its way, its sign or its range.
PLACES = (0.0, 2.0**-126, 2.0**-24, 0.125, 0.5, 0.5**0.5, 1.0, 2.0**0.5, 2.0, 2.0**126, 2.0**126.5,
          2.0**127.5, 3.4e38, 0.5 * np.log(2), 1.5 * np.log(2), 17.33, 18.0, 88.37,
          88.722839)  # fmt: skip
SPECIAL = np.float32([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, -1.0, 2**-149, -(2**-149)])
REFERENCE = {
    "sqrt": np.sqrt, "log": np.log, "log2": np.log2, "log10": np.log10, "log1p": np.log1p,
    "expm1": np.expm1,
}  # fmt: skip
ANGLES = {"sin": np.sin, "cos": np.cos}


def beside(places, count):
    """So many numbers on both sides of each place and of its negative."""
    middle = np.float32([*places, *(-place for place in places)]).view(np.int32)
    words = (middle.astype(np.int64)[:, None] + np.arange(-count, count)).ravel()
    return (words & 0xFFFFFFFF).astype(np.uint32).view(np.float32)


def check(name, x, got):
    """Numbers are within MOST ulp of the exact ones; the rest and the signs are the same."""
    with np.errstate(all="ignore"):
        expected = (REFERENCE | ANGLES)[name](x.astype(np.float64))
        rounded = expected.astype(np.float32)
        error = np.abs(got.astype(np.float64) - expected)
        unit = np.spacing(np.abs(rounded)).astype(np.float64)
        beyond = np.isinf(got) & (np.abs(expected) > 2.0**128 * (1 - 2.0**-23))
        right = (error <= MOST * unit) | (got == rounded) | beyond
    right &= np.signbit(got) == np.signbit(rounded)
    right &= np.isfinite(rounded) | (got == rounded)
    right = np.where(np.isnan(rounded), np.isnan(got), right)
    assert right.all(), list(zip(x[~right], got[~right], expected[~right], strict=True))[:5]


def kernel_of(function, x):
    """The kernel of a function of torch for these rows."""
    return htile.rowwise(lambda x: function(x)).inspect(x, arch="sm_90a")


@pytest.mark.parametrize("name", REFERENCE)
def test_errors(name, monkeypatch):
    Device().install(monkeypatch)
    every = np.arange(0, 1 << 32, STEP, dtype=np.uint64).astype(np.uint32).view(np.float32)
    x = np.concatenate([every, beside(PLACES, 1000), SPECIAL])
    with np.errstate(all="ignore"):
        check(name, x, getattr(m, name)(Vector(x)).data)


@pytest.fixture(scope="module")
def usual_angles():
    """Angles that are not large: of every magnitude, and next to multiples of pi / 4."""
    words = np.arange(0, np.float32(angles.LARGEST).view(np.uint32), STEP, dtype=np.uint32)
    random = np.random.default_rng(0).uniform(0, angles.LARGEST, 1 << 20).astype(np.float32)
    multiples = beside(np.arange(1, 134000, 7) * (np.pi / 4), 4)
    size = np.abs(np.concatenate([words.view(np.float32), random, multiples]))
    size = size[size <= angles.LARGEST]
    return np.concatenate([size, -size, np.float32([0.0, -0.0, np.nan])])


@pytest.mark.parametrize("name", ANGLES)
def test_angles(name, usual_angles, monkeypatch):
    """No sine is larger than 1, and a multiple of pi has the sine of what it is off by."""
    Device().install(monkeypatch)
    with np.errstate(all="ignore"):
        got = getattr(m, name)(Vector(usual_angles)).data
    check(name, usual_angles, got)
    assert np.nanmax(np.abs(got)) == 1.0


@pytest.mark.parametrize("name", ["sin", "cos", "log", "log2", "log10"])
def test_bounded_functions_give_the_same_bits(name, usual_angles, monkeypatch):
    Device().install(monkeypatch)
    x = np.concatenate([usual_angles, np.float32([np.inf, -np.inf])])
    if "log" in name:
        words = np.arange(1 << 23, 255 << 23, STEP, dtype=np.uint32)  # from 2 ** -126
        x = np.concatenate([words.view(np.float32), np.float32([np.inf, np.nan])])
    with np.errstate(all="ignore"):
        full, short = (getattr(m, each)(Vector(x)).data for each in (name, f"{name}_bounded"))
    is_nan = np.isnan(full)
    assert np.array_equal(is_nan, np.isnan(short))
    assert np.array_equal(full[~is_nan].view(np.int32), short[~is_nan].view(np.int32))


@pytest.mark.parametrize("name", REFERENCE)
def test_emitted(name):
    """Every place and its neighbours, and what is special, by the machine's instructions."""
    x = np.concatenate([SPECIAL, beside(PLACES, 6)])
    x = torch.from_numpy(np.resize(x, 512)).view(1, 512)
    kernel = kernel_of(getattr(torch, name), x)
    out = torch.empty_like(x)
    blocks = -(-1 // kernel.plan.rows_per_block)
    launch(kernel.ptx, (blocks, 1), [x, out], is_emitted=True)
    check(name, x.numpy()[0], out.numpy()[0])


@pytest.mark.parametrize("function", [torch.remainder, torch.floor_divide])
def test_neighbours_of_large_quotients(function):
    """Every third quotient is beyond 2 ** 20, so all elements go the longer way."""
    random = np.random.default_rng(0)
    a, b = random.uniform(-1e4, 1e4, 512).astype("f"), random.uniform(0.5, 2, 512).astype("f")
    a[::3] *= np.float32(2.0**20)
    rows = [torch.from_numpy(x).view(1, 512) for x in (a, b)]
    kernel = htile.rowwise(lambda x, y: function(x, y)).inspect(*rows, arch="sm_90a")
    out = torch.empty_like(rows[0])
    launch(kernel.ptx, (-(-1 // kernel.plan.rows_per_block), 1), [*rows, out], is_emitted=True)
    exact = function(*(x.double() for x in rows)).numpy()[0].astype("f")
    is_usual = np.abs(a / b) < 2.0**20
    assert 300 < is_usual.sum() < 400
    assert np.array_equal(out.numpy()[0][is_usual], exact[is_usual])


def test_tiny_numbers_are_kept():
    """log(1 + x) and e ** x - 1 of tiny numbers are x, of subnormal ones too."""
    x = beside((2.0**-130, 2.0**-126, 1e-30), 60)
    x = np.concatenate([x, np.arange(-75, 77) * np.float32(2.0**-149)]).astype(np.float32)
    x = torch.from_numpy(np.resize(x, 1024)).view(1, 1024)
    for function in (torch.log1p, torch.expm1):
        kernel = kernel_of(function, x)
        out = torch.empty_like(x)
        launch(kernel.ptx, (1, 1), [x, out], is_emitted=True)
        assert torch.equal(out.view(torch.int32), x.view(torch.int32)), function


def test_the_approximations_are_off_in_the_emulation():
    """So the tests above show that the results do not hang on them."""
    x = np.arange(1, 1 << 16, dtype=np.float32)
    assert (lg2_approx(x) != np.log2(x)).mean() > 0.5
    assert (sqrt_approx(x) != np.sqrt(x)).mean() > 0.3

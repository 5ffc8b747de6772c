"""The short functions for results that are only seen in 16 bits, on numpy arrays without a GPU."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from htile.compute import math as m
from tests.primitives.elementwise import FLOATS, NEAR
from tests.primitives.numpy_device import Device, Vector

MOST = 2.0**-14  # the relative error
SMALLEST = 2.0**-126
REFERENCE = {
    "gelu": lambda x: x * torch.special.erfc(x * -math.sqrt(0.5)) / 2,
    **{name: getattr(torch, name) for name in NEAR if name != "gelu"},
}
FLUSHED = {"sigmoid", "gelu"}  # results below 2 ** -126 of a factor become 0


@pytest.fixture
def on_numpy(monkeypatch):
    Device().install(monkeypatch)

    def run(name, *arrays):
        with np.errstate(all="ignore"):
            return getattr(m, name)(*map(Vector, arrays)).data

    return run


@pytest.mark.parametrize("name", NEAR)
def test_near_functions(on_numpy, name):
    """Every 4001st float32 number, and the edges."""
    words = np.arange(0, 1 << 32, 4001, dtype=np.uint64).astype(np.uint32)
    x = np.concatenate([words.view(np.float32), FLOATS, np.float32([1, -1, 0, -0.0])])
    got = on_numpy(f"{name}_near", x).astype(np.float64)
    with np.errstate(all="ignore"):
        expected = REFERENCE[name](torch.from_numpy(x.astype(np.float64))).numpy()
        expected = np.where(np.abs(expected) >= 2.0**128, np.sign(expected) * math.inf, expected)
        error = np.abs(got - expected)
        floor = 2.0**-119 if name in FLUSHED else 2.0**-148
        right = (error <= MOST * np.abs(expected)) | (error <= floor)
    right |= (got == expected) | (np.isnan(got) & np.isnan(expected))
    bad = ~right
    assert not bad.any(), list(zip(x[bad], got[bad], expected[bad], strict=True))[:10]


@pytest.mark.parametrize("exponent", [1.5, 0.25, 1 / 3, -0.75, -1.5, 63.5, 8, 9, -3, -4, 64])
def test_near_powers(on_numpy, exponent):
    """Every 4001st number, and the edges: of -inf, of zeros of both signs, of results that are
    tiny."""
    words = np.arange(0, 1 << 32, 4001, dtype=np.uint64).astype(np.uint32)
    near_one = np.linspace(0.9, 1.1, 1 << 14).astype(np.float32)
    x = np.concatenate([words.view(np.float32), near_one, -near_one, FLOATS, np.float32([-0.0])])
    with np.errstate(all="ignore"):
        got = m.pow_near(Vector(x), exponent).data.astype(np.float64)
        expected = torch.from_numpy(x.astype(np.float64)).pow(exponent).numpy()
        expected = np.where(np.abs(expected) >= 2.0**128, np.sign(expected) * math.inf, expected)
        error = np.abs(got - expected)
        right = (error <= MOST * np.abs(expected)) | (error <= 2.0**-148)
    right |= (got == expected) | (np.isnan(got) & np.isnan(expected))
    right &= np.isnan(expected) | (np.signbit(got) == np.signbit(expected))
    bad = ~right
    assert not bad.any(), list(zip(x[bad], got[bad], expected[bad], strict=True))[:10]


def test_the_sign_of_zero_is_kept(on_numpy):
    zeros = np.float32([0.0, -0.0])
    for name in ("expm1", "log1p", "tanh", "gelu"):
        assert (np.signbit(on_numpy(f"{name}_near", zeros)) == [False, True]).all(), name

"""Division: what its docstrings promise, bit for bit.

The functions' own code runs on numpy arrays, which round as the GPU does (`numpy_device`). What
IEEE says of a / b is what numpy's own division gives. `test_math` counts instructions.
"""

import numpy as np
import pytest

pytest.importorskip("cutlass")

from htile.compute import division
from htile.compute import math as m
from tests.primitives.numpy_device import TINY, Device, Vector, rcp_approx

EXACT_FROM = np.float32(2.0**-101)  # quotients of this magnitude are rounded to the nearest number
WITHIN_2 = np.float32(2.0**-124)
NEAR = 2.0**-20  # of an ulp: what a quotient may be off before it is rounded
EDGES = [0, 2**-149, 2**-148, 3 * 2**-149, 2**-127, 2**-126 - 2**-149, 2**-126,
         2**-126 + 2**-149, 2**-125, 2**-102, 2**-101, 2**-64, 1 / 3, 0.5 - 2**-25, 0.5, 1 - 2**-24,
         1, 1 + 2**-23, 1.5, 2, 3, 10, 2**24 - 1, 2**64, 2**125, 2**126 - 2**102, 2**126,
         2**126 + 2**103, 2**127, 2**128 - 2**104, np.inf, np.nan]  # fmt: skip
EDGES = np.float32(EDGES)
EDGES = np.concatenate([EDGES, -EDGES])
NUMBERS = [3, 1 / 3, 0.1, 0.7, 10, 255, 448, 1000, 50257, 70001, 2**24 - 1, 1e-6, 1e-12, 1e-20,
           1e-30, 8e-31, 1e20, 1.2e30, 1 - 2**-24, 1 + 2**-23, 0.5 - 2**-25,
           0.25 + 2**-25]  # fmt: skip


@pytest.fixture(autouse=True)
def on_numpy(monkeypatch):
    """Let the functions compute on numpy arrays."""
    Device().install(monkeypatch)


def bits(count, seed):
    """Random bits as float32 numbers: of all magnitudes, subnormal and infinite ones and NaN."""
    words = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return words.view(np.float32)


def numbers_between(low, high, count, seed):
    """Random numbers of either sign, from 2 ** low to 2 ** (high + 1) in magnitude."""
    generator = np.random.default_rng(seed)
    words = generator.integers(0, 1 << 23, count, dtype=np.uint32) | np.uint32(127 << 23)
    magnitude = np.ldexp(words.view(np.float32), generator.integers(low, high + 1, count))
    return np.where(generator.random(count) < 0.5, magnitude, -magnitude).astype(np.float32)


def divided(a, b):
    """a / b of `math.div`."""
    return m.div(Vector(a), Vector(b)).data


def shared(a, b):
    """a / b of `math.div_shared`."""
    return m.div_shared(Vector(a), Vector(b)).data


def check(a, b, got):
    """Quotients of at least EXACT_FROM have IEEE's bits, but for those as near to the next number.

    These are NEAR of an ulp from the middle of two. Smaller quotients are IEEE's number or the
    next, and below WITHIN_2 they are off by less than 2 ulp. NaN, infinities and zeros are as in
    IEEE's division, signs included.
    """
    with np.errstate(all="ignore"):
        right = a / b
        exact = a.astype(np.float64) / b
        unit = np.spacing(np.abs(right)).astype(np.float64)
        is_near = np.abs(np.abs(exact - right) / unit - 0.5) < NEAR
    equal = (got == right) & (np.signbit(got) == np.signbit(right))
    equal |= np.isnan(got) & np.isnan(right)
    small = np.abs(right) < EXACT_FROM
    beside = (np.abs(got.view(np.int32) - right.view(np.int32)) <= 1) & (a != 0)
    with np.errstate(invalid="ignore"):
        beside |= (np.abs(right) < WITHIN_2) & (np.abs(got - exact) < 2 * unit)
    bad = ~(equal | ((small | is_near) & beside))
    wrong = zip(*(np.broadcast_to(x, got.shape)[bad][:5] for x in (a, b, got, right)), strict=True)
    assert not bad.any(), (int(bad.sum()), list(wrong))


@pytest.mark.parametrize("seed", range(3))
def test_of_random_bits(seed):
    a, b = bits((2, 1_000_000), seed)
    for divide in (divided, shared):
        check(a, b, divide(a, b))


# (exponents of the dividends, exponents of the divisors)
RANGES = {
    "small by small": ((-149, -100), (-149, -100)),
    "small by any": ((-149, -100), (-149, 127)),
    "large quotients of small dividends": ((-127, -120), (-70, -20)),
    "any by subnormal": ((-149, 127), (-149, -127)),
    "huge by huge": ((100, 127), (100, 127)),
    "any by huge": ((-149, 127), (124, 127)),
    "quotients near overflow": ((100, 127), (-28, 0)),
    "usual": ((-20, 20), (-20, 20)),
}


@pytest.mark.parametrize("name", RANGES)
def test_of_magnitudes(name):
    a, b = (numbers_between(*r, 250_000, seed) for seed, r in enumerate(RANGES[name]))
    for divide in (divided, shared):
        check(a, b, divide(a, b))


def test_of_every_pair_of_edges():
    a, b = (grid.ravel() for grid in np.meshgrid(EDGES, EDGES))
    for divide in (divided, shared):
        check(a, b, divide(a, b))


def test_by_one_and_by_itself():
    """x / 1 is x and x / x is 1, for all x that are finite: subnormal x too."""
    x = np.concatenate([bits(500_000, 7), numbers_between(-149, -126, 100_000, 8)])
    x = x[np.isfinite(x) & (x != 0)]
    for divide in (divided, shared):
        assert np.array_equal(divide(x, np.ones_like(x)), x)
        assert np.all(divide(x, x) == 1)


def test_near_overflow():
    """A quotient that is 2 ulp from the largest number, or more, is none other than IEEE's."""
    largest = np.nextafter(np.float32(np.inf), np.float32(0))
    b = np.concatenate([numbers_between(-126, -1, 200_000, 17), numbers_between(0, 0, 50_000, 18)])
    b = np.where(np.abs(b) < 1, b, b / 2)
    a = largest * np.abs(b) * (1 - np.arange(b.size, dtype=np.float32) % 64 * np.float32(2.0**-24))
    with np.errstate(over="ignore"):
        is_below = np.abs(a.astype(np.float64) / b) < largest * (1 - 2.0**-22)
    check(a[is_below], b[is_below], divided(a[is_below], b[is_below]))


def test_by_a_divisor_that_the_row_shares():
    """A scalar divisor takes the same steps."""
    a = np.concatenate([EDGES, bits(20_000, 9)])
    for b in EDGES:
        check(a, b, m.div(Vector(a), division.Float32(b)).data)


@pytest.mark.parametrize(
    "a, b",
    [
        (2.4040006633290614e-38, -8.083909518348531e-13),  # what gave a neighbour of the quotient
        (2.9864904471617513e-38, 0.3333333333333333),
    ],
)
def test_of_small_dividends(a, b):
    a, b = np.float32([a]), np.float32([b])
    check(a, b, divided(a, b))
    assert shared(a, b)[0] == (a / b)[0]
    check(a, b, m.div_number(Vector(a), float(b[0])).data)  # it does not scale its dividend


@pytest.mark.parametrize("number", [s * n for n in NUMBERS for s in (1.0, -1.0)])
def test_by_a_number(number):
    a = np.concatenate([EDGES, bits(60_000, 11), numbers_between(-149, -90, 40_000, 12)])
    check(a, np.float32(number), m.div_number(Vector(a), number).data)


@pytest.mark.parametrize("power", [-100, -20, -1, 0, 1, 30, 100])
def test_by_a_power_of_two(power):
    """It is a multiplication, so subnormal quotients are rounded to nearest too."""
    a = np.concatenate([EDGES, bits(20_000, 13)])
    with np.errstate(all="ignore"):
        right = a / np.float32(2.0**power)
    assert np.array_equal(m.div_number(Vector(a), 2.0**power).data, right, equal_nan=True)


def test_div_bounded():
    """It is within 2 ulp for divisors from 2 ** -126 to 2 ** 126, where the quotient is normal."""
    b = numbers_between(-126, 125, 1_000_000, 15)
    a = numbers_between(-126, 127, 1_000_000, 16)
    exact = a.astype(np.float64) / b
    normal = (np.abs(exact) >= TINY) & (np.abs(exact) < 2.0**127)
    got = m.div_bounded(Vector(a), Vector(b)).data
    unit = np.spacing(np.abs(exact[normal].astype(np.float32))).astype(np.float64)
    assert (np.abs(got[normal] - exact[normal]) / unit).max() <= 2.5


@pytest.mark.parametrize("seed", range(2))
def test_div_near(seed):
    """It is within 4 ulp for all operands, and for special ones it is what IEEE gives."""
    grid = [g.ravel() for g in np.meshgrid(EDGES, EDGES)]
    a, b = np.concatenate([bits((2, 1_000_000), 20 + seed), grid], axis=1)
    got = m.div_near(Vector(a), Vector(b)).data
    with np.errstate(all="ignore"):
        exact = a.astype(np.float64) / b
        right = exact.astype(np.float32)
        near = np.abs(got - exact) <= 4 * np.spacing(np.abs(right)).astype(np.float64)
    same = (got == right) & (np.signbit(got) == np.signbit(right)) | np.isnan(got) & np.isnan(right)
    special = ~np.isfinite(right) | (a == 0) | np.isinf(b)
    bad = ~np.where(special, same, near)
    assert not bad.any(), list(zip(a[bad][:5], b[bad][:5], got[bad][:5], right[bad][:5]))  # noqa: B905


def test_reciprocal_of_every_count():
    """It is what IEEE gives, whatever the instruction's approximation was."""
    every = np.concatenate([np.arange(1, 2**21), np.arange(2**24 - 2**16, 2**24)])
    every = every.astype(np.float32)
    got = division.reciprocal(Vector(every)).data
    assert np.array_equal(got, np.float32(1) / every)


def test_the_approximation_is_off_in_the_emulation():
    """So the tests above show that the corrections correct."""
    x = np.arange(1, 2**16, dtype=np.float32)
    assert (rcp_approx(x) != np.float32(1) / x).mean() > 0.3

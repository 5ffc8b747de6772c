"""The algorithms of htile.compute.math on numpy arrays, without a GPU (`numpy_device`)."""

import math

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from htile.compute import exponents
from htile.compute import math as m
from htile.frontend.philox import uniform_of, words
from tests.primitives.elementwise import FLOATS, float_pairs, int_pairs, same, ulps
from tests.primitives.numpy_device import Device, Vector


@pytest.fixture
def on_numpy(monkeypatch):
    """A function that runs one of `htile.compute.math` on numpy arrays."""
    Device().install(monkeypatch)

    def run(name, *arrays, **options):
        with np.errstate(all="ignore"):
            return getattr(m, name)(*map(Vector, arrays), **options).data

    return run


def test_numpy_exp(on_numpy):
    x = np.concatenate([FLOATS, np.linspace(-105, 89, 200001, dtype=np.float32)])
    with np.errstate(over="ignore"):
        expected = np.exp(x.astype(np.float64))
    assert ulps(on_numpy("exp", x), expected).max() < 1.5


def test_numpy_exp_bounded(on_numpy):
    x = np.concatenate([[-0.0, -math.inf, math.nan], np.linspace(-87, 0, 100001)]).astype("f")
    got, expected = on_numpy("exp_bounded", x), np.exp(x.astype(np.float64))
    assert got[0] == 1 and got[1] == 0 and np.isnan(got[2])
    assert (np.abs(got - expected)[3:] <= 2**-23 * expected[3:] * (1 + np.abs(x[3:]))).all()
    assert np.abs(got - expected)[3:].max() < 2**-23


@pytest.mark.parametrize("total", [1.0, 1.5, 1000.0, 2.0**30])
def test_numpy_exp_quotient(on_numpy, total):
    x = np.concatenate([[-math.inf, math.nan], np.linspace(-60, 0, 100001)]).astype("f")
    got = on_numpy("exp_quotient", x, np.full_like(x, total))
    expected = np.exp(x.astype(np.float64)) / total
    assert got[0] == 0 and np.isnan(got[1])
    assert (np.abs(got[2:] / expected[2:] - 1) < 2**-16).all()
    assert np.isnan(on_numpy("exp_quotient", x, np.full_like(x, math.nan))).all()


def test_numpy_log1p_bounded(on_numpy):
    """Every float32 of every 61st, from 0 to 1."""
    words = np.arange(0, 127 << 23, 61, dtype=np.uint32)
    x = np.concatenate([words.view(np.float32), np.float32([0, 1, 2**-149])])
    got = on_numpy("log1p_bounded", x)
    assert ulps(got, np.log1p(x.astype(np.float64))).max() < 1.5
    assert np.isnan(on_numpy("log1p_bounded", np.float32([np.nan]))).all()


@pytest.mark.parametrize("fastmath", [False, True])
def test_numpy_sigmoid(on_numpy, fastmath):
    x = np.concatenate([FLOATS, np.linspace(-87, 87, 100001)]).astype("f")
    with np.errstate(over="ignore"):
        expected = 1 / (1 + np.exp(-x.astype(np.float64)))
    got = on_numpy("sigmoid", x, fastmath=fastmath)
    normal = ~(expected < 4e-38)  # e ** -x overflows below: 0
    assert ulps(got, expected)[normal].max() < (150 if fastmath else 3)
    assert np.abs(got - expected)[~normal].max() < 4e-38
    ends = np.float32([np.inf, -np.inf, np.nan])
    assert same(on_numpy("sigmoid", ends, fastmath=fastmath), np.float32([1, 0, np.nan])).all()


def power(a, b):
    """a ** b as C has it, in float64."""
    with np.errstate(all="ignore"):
        return np.power(a.astype(np.float64), b.astype(np.float64))


def assert_powers(got, a, b):
    """Values to 1.5 ulp, or 2.5 for large exponents, and all signs but those of NaN."""
    expected = power(a, b)
    bad = ~(ulps(got, expected) <= np.where(np.abs(b) <= 100, 1.5, 2.5))
    bad |= (np.signbit(got) != np.signbit(expected)) & ~np.isnan(expected)
    assert not bad.any(), list(zip(a[bad], b[bad], got[bad], expected[bad], strict=True))[:10]


BASES = np.float32([
    0, 1, math.inf, math.nan, 0.5, 1.5, 2, 3, 2**-149, 2**-126, 3.4028235e38, 1 + 2**-23,
    1 - 2**-24, 1e-30, 0.75,
])  # fmt: skip
EXPONENTS = np.float32([
    0, 1, math.inf, math.nan, 0.5, 1.5, 2, 3, 4, 7, 8, 0.1, 255, 1e-20, 2**-149, 3.4028235e38,
    2**23 - 1, 2**23 + 1, 2**24 - 1, 2**24, 2**24 + 2, 2**31, 149, 150, 0.25 + 2**22,
])  # fmt: skip


def test_numpy_pow_at_edges(on_numpy):
    """Every pair, with both signs: the cases of C's pow."""
    both = (np.concatenate([each, -each]) for each in (BASES, EXPONENTS))
    a, b = (each.ravel() for each in np.meshgrid(*both))
    assert_powers(on_numpy("pow", a, b), a, b)


@pytest.mark.parametrize("spread", [149, 30, 1, 0.1, 1e-3])
def test_numpy_pow(on_numpy, spread):
    """Bases from 2 ** -spread to 2 ** spread, and exponents up to where the power is 0 or infinite.

    The base counts for most where the exponent is large, so bases near 1 have their own samples.
    """
    generator = np.random.default_rng(7)
    a = np.exp2(generator.uniform(-spread, min(spread, 128), 1 << 18)).astype(np.float32)
    log = np.log2(a.astype(np.float64))
    b = generator.uniform(-155, 140, a.size) / np.where(np.abs(log) < 2**-24, 1, log)
    b = b.astype(np.float32)
    assert_powers(on_numpy("pow", a, b), a, b)


@pytest.mark.parametrize("base", [10.0, 2, 0.5, 1e-3, 3e38, 1e-45, 1 + 1e-6, 1, 0.0, -2, math.inf])
def test_numpy_pow_of_a_number(on_numpy, base):
    words = np.arange(0, 1 << 32, 40009, dtype=np.uint64).astype(np.uint32)
    near_zero = np.linspace(-150, 130, 100001, dtype=np.float32)
    x = np.concatenate([words.view(np.float32), FLOATS, EXPONENTS, -EXPONENTS, near_zero])
    with np.errstate(all="ignore"):
        got = m.pow(base, Vector(x)).data
    assert_powers(got, np.full_like(x, base), x)


@pytest.mark.parametrize("exponent", [1.75, 2.2, -0.25, 1 / 3, 8, -3, -7, 100.5, 1e-20, -1e30, 0.0])
def test_numpy_pow_by_a_number(on_numpy, exponent):
    words = np.arange(0, 1 << 32, 40009, dtype=np.uint64).astype(np.uint32)
    near_one = np.linspace(0.3, 3, 50001, dtype=np.float32)
    x = np.concatenate([words.view(np.float32), FLOATS, BASES, -BASES, near_one, -near_one])
    with np.errstate(all="ignore"):
        got = m.pow(Vector(x), exponent).data
    assert_powers(got, x, np.full_like(x, exponent))


@pytest.mark.parametrize(
    "name, reference",
    [("floordiv", torch.floor_divide), ("mod", torch.remainder)],
)
def test_numpy_division(on_numpy, name, reference):
    a, b = float_pairs()
    got = on_numpy(name, a, b)
    expected = reference(torch.from_numpy(a), torch.from_numpy(b)).numpy()
    with np.errstate(all="ignore"):  # torch's fmod on vectors overflows beyond, on the CPU only
        known = ~(np.isfinite(a) & (np.abs(a.astype(np.float64) / b) > 2**24))
    bad = known & ~same(got, expected)
    assert not bad.any(), list(zip(a[bad], b[bad], got[bad], expected[bad], strict=True))[:10]
    for dtype in (np.int32, np.int64):
        a, b = int_pairs(dtype)
        expected = reference(torch.from_numpy(a), torch.from_numpy(b)).numpy()
        assert same(on_numpy(name, a, b), expected).all()
    assert on_numpy("floordiv", np.float32([1.0]), np.float32([0.1]))[0] == 9


def test_quotients_near_whole_numbers(on_numpy):
    """Up to 2 ** 21, beside multiples of divisors of every size: exact, as in float64."""
    random = np.random.default_rng(0)
    count = 1 << 19
    b = (random.uniform(1, 2, count) * np.exp2(random.integers(-149, 127, count))).astype("f")
    b *= random.choice(np.float32([-1, 1]), count)
    whole = np.floor(np.exp2(random.uniform(-3, 21, count)))
    with np.errstate(all="ignore"):
        a = (whole * b.astype(np.float64)).astype("f")
        a = (a.view(np.int32) + random.integers(-2, 3, count, dtype=np.int32)).view("f")
        known = np.isfinite(a) & (b != 0)
        a, b = a[known] * random.choice(np.float32([-1, 1]), known.sum()), b[known]
        rest = np.fmod(a, b)  # exact
        expected = np.where((rest != 0) & ((rest < 0) != (b < 0)), rest + b, rest)
        assert same(on_numpy("mod", a, b), expected).all()
        quotient = np.floor_divide(a.astype(np.float64), b.astype(np.float64))
        assert same(on_numpy("floordiv", a, b), quotient.astype("f")).all()


@pytest.mark.parametrize("b", [3.0, -0.25, 1e-3, 7e9, 1e-40, 2.0**-126, 2.0**100, 3e38, math.inf])
def test_a_shared_divisor(on_numpy, b):
    """It gives what the same divisor of each element does, which the tests above check."""
    words = np.arange(0, 1 << 32, 40009, dtype=np.uint64).astype(np.uint32)
    b = np.float32(b)
    with np.errstate(all="ignore"):
        beside = (np.arange(-2000, 2000, dtype=np.float32) * b).view(np.int32)
        beside = np.concatenate([beside + k for k in (-1, 0, 1)]).view(np.float32)
        a = np.concatenate([words.view(np.float32), FLOATS, beside])
        for function in (m.mod, m.floordiv):
            got = function(Vector(a), float(b)).data
            assert same(got, function(Vector(a), Vector(np.full_like(a, b))).data).all(), function


def test_numpy_sign_and_round(on_numpy):
    for name, reference in (("sign", torch.sign), ("round", torch.round)):
        assert same(on_numpy(name, FLOATS), reference(torch.from_numpy(FLOATS)).numpy()).all()
    integers = np.int32([0, 5, -5, 2**31 - 1, -(2**31)])
    assert (on_numpy("sign", integers) == np.sign(integers)).all()


@pytest.mark.parametrize("dtype", (np.int32, np.int64))
def test_numpy_bits(on_numpy, dtype):
    """By every count of bits, and by negative ones and such as are beyond the width."""
    x, _ = int_pairs(dtype)
    info = np.iinfo(dtype)
    counts = np.array([*range(-3, 68), 1000, 2**31 - 1, info.max, info.min], dtype)
    if dtype is np.int64:
        counts = np.append(counts, [2**32 + 1, -(2**32) + 1])
    values, counts = (each.ravel() for each in np.meshgrid(x[:400], counts))
    a, b = torch.from_numpy(values), torch.from_numpy(counts)
    assert same(on_numpy("lshift", values, counts), (a << b).numpy()).all()
    assert same(on_numpy("rshift", values, counts), (a >> b).numpy()).all()
    assert same(on_numpy("invert", x), ~x).all()


# The known answers of Random123 (D. E. Shaw Research), file kat_vectors: counter, key, words.
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0),
     (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)  # fmt: skip


def int64(low, high):
    """Two words as the halves of an int64."""
    return np.uint64(low | high << 32).astype(np.int64)


def test_numpy_philox(on_numpy):
    """The device function gives the known answers, and what torch's arithmetic gives."""
    for counter, key, expected in KNOWN:
        operands = [np.array([x]) for x in (int64(*counter[:2]), int64(*key), int64(*counter[2:]))]
        found = [on_numpy("philox", *operands, word=k)[0] for k in range(4)]
        assert found == [*expected], [hex(x) for x in found]
    generator = np.random.default_rng(3)
    info = np.iinfo(np.int64)
    operands = generator.integers(info.min, info.max, (3, 1000))
    for k, expected in enumerate(words(*map(torch.from_numpy, operands))):
        assert same(on_numpy("philox", *operands, word=k), expected.numpy()).all()


def test_numpy_uniform(on_numpy):
    """All words near both ends, near powers of two and where rounding goes to even."""
    near = np.arange(-600, 600)
    ends = np.concatenate([near + (1 << k) for k in range(33)]) & 0xFFFFFFFF
    word = np.concatenate([ends, np.arange(0, 2**32, 65521), ~ends])
    expected = uniform_of(torch.from_numpy(word)).numpy()
    assert same(on_numpy("uniform", word), expected).all()
    assert expected.min() == 2.0**-33 and expected.max() == 1 - 2.0**-24
    exact = ((word & 0xFFFFFFFF) + 0.5) * 2.0**-32
    assert (np.abs(expected - exact) <= exact * 2.0**-23).all()


def of_every_exponent():
    """Floats of every exponent and both signs, whose mantissas are near the ends and the middle."""
    ends = [0, 1, 2, 3, 0x3FFFFE, 0x3FFFFF, 0x400000, 0x400001, 0x400002, 0x7FFFFE, 0x7FFFFF]
    mantissas = np.array([*ends, *(1 << np.arange(23)), 0x155555, 0x2AAAAA, 0x555555], np.int64)
    bits = (np.arange(512) << 23)[:, None] | mantissas
    return bits.ravel().astype(np.uint32).view(np.float32)


def test_numpy_exponents_of_e8m0(on_numpy):
    """As torch has them, of every exponent and next to every place where the result changes."""
    x = of_every_exponent()
    expected = torch.from_numpy(x).to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
    assert (exponents.nearest_power(Vector(x)).data == expected).all()
    stored = np.arange(256, dtype=np.int32)
    as_torch = torch.arange(256).to(torch.uint8).view(torch.float8_e8m0fnu)
    assert same(exponents.power_of(Vector(stored)).data, as_torch.float().numpy()).all()


def test_numpy_exponent(on_numpy):
    x = of_every_exponent()
    _, exponent = np.frexp(x)
    expected = np.where(np.isfinite(x), exponent, 0).astype(np.int32)
    assert same(on_numpy("exponent", x), expected).all()
    as_torch = torch.frexp(torch.from_numpy(x))
    assert same(as_torch.exponent.numpy(), expected).all()
    assert same(on_numpy("ldexp", x, -expected), as_torch.mantissa.numpy()).all()
    assert (on_numpy("bits", x) == x.view(np.int32)).all()
    assert same(on_numpy("float_of", x.view(np.int32)), x).all()


def test_numpy_ldexp(on_numpy):
    """By every exponent that does not give 0 or infinity for all numbers, and by a few beyond."""
    x = of_every_exponent()[::5]
    counts = [*range(-300, 301), 1000, -1000, 2**31 - 1, -(2**31)]
    for count in counts:
        e = np.full(x.shape, count, np.int32)
        with np.errstate(all="ignore"):
            expected = np.ldexp(x.astype(np.float64), max(-500, min(500, count)))
            expected = expected.astype(np.float32)
        assert same(on_numpy("ldexp", x, e), expected).all(), count


@pytest.mark.parametrize("name", ("floor_log2", "ceil_log2"))
def test_numpy_whole_logarithms(on_numpy, name):
    x = of_every_exponent()
    with np.errstate(all="ignore"):
        expected = np.log2(x.astype(np.float64))
        expected = (np.floor if name == "floor_log2" else np.ceil)(expected).astype(np.float32)
    assert same(on_numpy(name, x), expected).all()

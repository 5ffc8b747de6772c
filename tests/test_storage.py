"""Dtypes of 8 bits: what they hold, what is refused, and what kernels of them compile to."""

import pytest
import torch

import htile
from htile.errors import DtypeError, LoweringError
from htile.testing import assert_close

E4M3, E5M2, I8, U8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8
E8M0 = torch.float8_e8m0fnu
STORED = (E4M3, E5M2, E8M0, I8, U8)
INF, NAN = float("inf"), float("nan")


@htile.rowwise
def stored(x, dtype: htile.Static):
    return x.to(dtype)


@htile.rowwise
def loaded(x):
    return x.float()


@htile.rowwise
def quantized(x, largest: float):
    x = x.float()
    scale = x.abs().amax().clamp(min=1e-12) / largest
    return (x / scale).to(E4M3), scale


@htile.rowwise
def rounded_to_integers(x):
    scale = x.float().abs().amax().clamp(min=1e-12) / 127
    return torch.round(x / scale).to(I8), scale


@htile.rowwise
def normalized(q, scale: htile.PerRow):
    x = q.float() * scale
    return (x * torch.rsqrt((x * x).mean() + 1e-6)).bfloat16()


@pytest.mark.parametrize(
    ("number", "dtype", "becomes"),
    [
        (463.9, E4M3, 448),
        (464.0, E4M3, 448),
        (465.0, E4M3, 448),
        (480.0, E4M3, 448),
        (1e30, E4M3, 448),
        (INF, E4M3, 448),
        (-INF, E4M3, -448),
        (NAN, E4M3, NAN),
        (2.0**-10, E4M3, 0),
        (1.5 * 2.0**-10, E4M3, 2.0**-9),
        (17.0, E4M3, 16),
        (19.0, E4M3, 20),
        (61439.0, E5M2, 57344),
        (61440.0, E5M2, INF),
        (-61440.0, E5M2, -INF),
        (INF, E5M2, INF),
        (NAN, E5M2, NAN),
        (1.49, E8M0, 1),
        (1.5, E8M0, 2),
        (-3.0, E8M0, 4),
        (0.0, E8M0, 2.0**-127),
        (2.0**-127, E8M0, 2.0**-127),
        (2.0**-127 * (1 + 2.0**-22), E8M0, 2.0**-126),
        (2.0**127 * 1.49, E8M0, 2.0**127),
        (2.0**127 * 1.5, E8M0, NAN),
        (INF, E8M0, NAN),
        (NAN, E8M0, NAN),
        (127.9, I8, 127),
        (300.0, I8, 127),
        (-300.0, I8, -128),
        (-1.9, I8, -1),
        (INF, I8, 127),
        (NAN, I8, 0),
        (255.9, U8, 255),
        (-3.0, U8, 0),
        (1e30, U8, 255),
        (NAN, U8, 0),
    ],
)
def test_a_float_becomes(number, dtype, becomes):
    found = stored(torch.full((1, 3), number), dtype)
    assert found.dtype is dtype
    assert torch.equal(found.double(), torch.full((1, 3), becomes).double()) or (
        becomes != becomes and found.float().isnan().all()
    )


@pytest.mark.parametrize("dtype", (I8, U8))
def test_an_integer_keeps_its_lower_bits(dtype):
    x = torch.arange(-400, 400, dtype=torch.int32)[None]
    assert torch.equal(stored(x, dtype), x.to(dtype))


def test_an_integer_saturates_in_float8():
    x = torch.tensor([[-(2**30), -449, 3, 449, 2**30]], dtype=torch.int32)
    assert stored(x, E4M3).float().tolist() == [[-448, -448, 3, 448, 448]]


@pytest.mark.parametrize("dtype", STORED)
def test_every_number_is_loaded(dtype):
    x = torch.arange(256).to(U8).view(1, 256).view(dtype)
    expected, found = x.float(), loaded(x)
    assert torch.equal(found.nan_to_num(nan=1e9), expected.nan_to_num(nan=1e9))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_functions_that_quantize(dtype):
    torch.manual_seed(0)
    x = torch.randn(5, 1000, dtype=dtype)
    q, scale = quantized(x, 448.0)
    assert_close(quantized, (q, scale), x, 448.0)
    assert_close(normalized, normalized(q, scale), q, scale)
    q, scale = rounded_to_integers(x)
    assert (q.float() * scale[:, None] - x.float()).abs().max() <= scale.max() / 2 * 1.02
    assert_close(normalized, normalized(q, scale), q, scale)


def test_returned_as_it_came():
    x = torch.randn(2, 64).to(E4M3)
    same = htile.rowwise(lambda x: x)
    assert same(x).dtype is E4M3 and torch.equal(same(x).float(), x.float())


OPERATIONS = {
    "an addition": lambda q: q + 1,
    "a product": lambda q: q * q,
    "a negation": lambda q: -q,
    "a maximum": lambda q: q.amax(),
    "a choice": lambda q: torch.where(q.float() > 0, q, q),
    "a comparison": lambda q: q == 300,  # torch wraps the number
    "a mask": lambda q: q.any(),
    "a constant": lambda q: torch.zeros_like(q),
    "a clamp": lambda q: q.clamp(-1, 1),
}


@pytest.mark.parametrize("dtype", [E4M3, E5M2, E8M0])
@pytest.mark.parametrize("name", OPERATIONS)
def test_nothing_is_computed_in_floats_of_8_bits(name, dtype):
    """Integers of 8 bits are in tests/frontend/test_eight_bits.py."""
    with pytest.raises(DtypeError, match=str(dtype).removeprefix("torch.")) as found:
        htile.rowwise(OPERATIONS[name])(torch.ones(2, 8).to(dtype))
    assert found.value.loc is not None


def test_integers_of_8_bits_are_promoted_to_floats():
    """As in torch. It promotes no float8."""
    x, scale = torch.randint(-128, 128, (4, 64)).to(I8), torch.rand(4, 64)
    scaled = htile.rowwise(lambda x, scale: x * scale)
    assert torch.equal(scaled(x, scale), x * scale)
    with pytest.raises(DtypeError, match=r"x\.float\(\)"):
        scaled(x.float().to(E4M3), scale)


def test_the_sum_of_integers_of_8_bits():
    x = torch.randint(-128, 128, (4, 1000)).to(I8)
    assert torch.equal(htile.rowwise(lambda x: x.sum())(x), x.sum(-1))


ARCHS = ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a")


@pytest.mark.parametrize("n", (1, 1000, 1001, 40000))
@pytest.mark.parametrize("dtype", STORED)
def test_kernels_compile(dtype, n):
    q, scale = torch.empty(3, n, device="meta").to(dtype), torch.empty(3, device="meta")
    used = normalized.inspect(q, scale, arch="sm_90a").resources
    assert not used.stack
    x = torch.empty(3, n, dtype=torch.bfloat16, device="meta")
    assert not stored.inspect(x, dtype, arch="sm_90a").resources.stack


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", STORED)
def test_every_architecture(dtype, arch):
    x = torch.empty(3, 512, device="meta")
    if dtype in (E4M3, E5M2) and arch == "sm_80":
        with pytest.raises(LoweringError, match=r"sm_80 does not convert float8.*sm_89"):
            stored.inspect(x, dtype, arch=arch)
    else:
        assert not stored.inspect(x, dtype, arch=arch).resources.stack
        assert not loaded.inspect(x.to(dtype), arch=arch).resources.stack


def test_what_becomes_a_power_of_two_is_computed_exactly():
    """A hair below a power, or below the middle of two, would give half of it."""

    @htile.rowwise
    def quotient(x, y, dtype: htile.Static):
        return (x / y).to(dtype)

    x = torch.empty(3, 512, device="meta")
    assert "div_near" in quotient.inspect(x, x, E4M3, arch="sm_90a").source
    assert "math.div(" in quotient.inspect(x, x, E8M0, arch="sm_90a").source

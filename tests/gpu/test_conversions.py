"""Conversions with torch's bits: integers to 16-bit floats, floats to 8 bits and back."""

import pytest
import torch
from torch.utils._pytree import tree_leaves

import htile

from .matrix import BF16, F16, F32, assert_same_bits, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

INTEGERS = (torch.int32, torch.int64)


@htile.rowwise
def to_bfloat16(x):
    return x.to(torch.bfloat16)


@htile.rowwise
def to_float16(x):
    return x.to(torch.float16)


@htile.rowwise
def through_bfloat16(x):
    return x.to(torch.bfloat16).to(torch.float32) * 3


@htile.rowwise
def largest_as_bfloat16(x):
    return x.max().to(torch.bfloat16)


FUNCTIONS = {
    to_bfloat16: lambda x: x.to(BF16),
    to_float16: lambda x: x.to(F16),
    through_bfloat16: lambda x: x.to(BF16).to(F32) * 3,
    largest_as_bfloat16: lambda x: x.amax(-1).to(BF16),
}


def integers(dtype):
    """Integers beside the middle of two bfloat16 numbers, where a second rounding shows.

    From 2 ** 24 on float32 has even numbers only: 2 ** 24 + 2 ** 16 + 1 becomes the middle, and
    that becomes 2 ** 24, which one rounding does not give.
    """
    found = []
    for exponent in range(8, 31 if dtype is torch.int32 else 63):
        step = 2 ** (exponent - 7)
        for place in (2**exponent, 2**exponent + step, 2**exponent + 126 * step):
            for offset in (-3, -2, -1, 0, 1, 2, 3):
                found += [place + step // 2 + offset, -(place + step // 2 + offset)]
    generator = torch.Generator().manual_seed(0)
    limit = torch.iinfo(dtype)
    found = torch.tensor([*found, limit.max, limit.min], dtype=dtype)
    random = torch.randint(limit.min, limit.max, (8192 - found.numel(),), generator=generator,
                           dtype=dtype)  # fmt: skip
    return torch.cat([found, random]).view(32, 256)


STORED = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8)
ROWS = ((512, 128), (64, 1003))  # even rows, and shifted ones


@htile.rowwise
def stored(x, dtype: htile.Static):
    return x.to(dtype)


@htile.rowwise
def loaded(x):
    return x.float()


def floats(dtype, shape, device="cpu"):
    """Numbers of all exponents, infinities and NaN, and those around the ends of the ranges."""
    ends = [448, 464, 465, 480, 57344, 61439, 61440, 61441, 65504, 127.5, 128, 128.5, 255.5, 256]
    ends += [2.0**-k for k in range(8, 20)] + [2.0**31, 2.0**32, float("inf"), float("nan"), 0.0]
    ends = torch.tensor([*ends, *(-end for end in ends)])
    bits = torch.randint(-(2**15), 2**15, (shape[0] * shape[1],), dtype=torch.int16)
    drawn = bits.view(dtype).float() if dtype is not F32 else bits.float() / 64
    drawn[: len(ends)] = ends
    return drawn.to(dtype).view(shape).to(device)


def as_stored(x, dtype):
    """What the documentation says that `x.to(dtype)` is."""
    x = x.float()
    if dtype is not torch.float8_e5m2:
        info = torch.finfo(dtype) if dtype.is_floating_point else torch.iinfo(dtype)
        x = x.clamp(info.min, info.max)
    return (x if dtype.is_floating_point else x.nan_to_num(nan=0.0).trunc()).to(dtype)


def same(a, b):
    """Equal numbers; a NaN has many bit patterns."""
    a, b = a.float(), b.float()
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a.nan_to_num(0.0), b.nan_to_num(0.0))


@htile.rowwise
def by_float32(x, dtype: htile.Static):
    y = x.float()
    return y.to(dtype), (y + 1).to(dtype), x.to(dtype)


@htile.rowwise
def by_parts(x, number: htile.Inner[1], table: htile.Shared, column, at: htile.PerRow):
    """Every way that a view takes: a view of uint8 or bool forgets what its bytes are."""
    left, right = x.chunk(2)
    looked_up = table[at.clamp(0, 2)]
    values = left.float(), right.float(), looked_up.float(), x[0::2].float() + column[1:].float()
    swapped = torch.cat([right, left]), torch.stack([left, right], -1).flatten()
    taken = x[at].float(), number[1].float(), table[at.clamp(0, 2)].float().sum()
    return values, swapped, taken, torch.stack([number[1], number[0]])


PARTS = ((512, 128), (64, 2006))


def parts(dtype, shape, device="cpu"):
    """Arguments of `by_parts`."""
    m, n = shape

    def drawn(*shape):
        drawn = torch.randint(0, 256, shape, dtype=torch.uint8)
        return (drawn > 127 if dtype is torch.bool else drawn.view(dtype)).to(device)

    at = torch.randint(0, 3, (m,)).to(device)
    return drawn(m, n), drawn(m, 2), drawn(3, n // 2), drawn(n // 2 + 1), at


def parts_of_rows(x, number, table, column, at):
    left, right = x.chunk(2, -1)
    looked_up = table[at]
    values = left.float(), right.float(), looked_up.float(), x[:, 0::2].float() + column[1:].float()
    swapped = torch.cat([right, left], -1), torch.stack([left, right], -1).flatten(-2)
    taken = x.float().gather(-1, at[:, None])[:, 0], number[:, 1].float(), looked_up.float().sum(-1)
    return values, swapped, taken, number[:, [1, 0]]


WHOLE = (torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64)


def storage_jobs(arch):
    for shape in ROWS:
        for dtype in STORED:
            for of in WHOLE:
                yield job(by_float32, (torch.empty(shape, dtype=of, device="meta"), dtype), arch)
    for shape in PARTS:
        for dtype in (*STORED, torch.bool):
            yield job(by_parts, tuple(x.to("meta") for x in parts(dtype, shape)), arch)
    for shape in ROWS:
        for dtype in STORED:
            for of in (BF16, F16, F32):
                x = torch.empty(shape, dtype=of, device="meta")
                yield job(stored, (x, dtype), arch)
            yield job(loaded, (torch.empty(shape, dtype=dtype, device="meta"),), arch)


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("of", (BF16, F16, F32), ids=short)
@pytest.mark.parametrize("dtype", STORED, ids=short)
def test_to_8_bits(dtype, of, shape, device):
    torch.manual_seed(0)
    x = floats(of, shape, device)
    found = run(stored, x, dtype)
    assert found.dtype is dtype and same(found, as_stored(x, dtype))


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("dtype", STORED, ids=short)
def test_from_8_bits(dtype, shape, device):
    torch.manual_seed(0)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(dtype)
    assert same(run(loaded, x), x)


def jobs(arch):
    """Every function of every dtype."""
    yield from storage_jobs(arch)
    for f in FUNCTIONS:
        for dtype in INTEGERS:
            yield job(f, (torch.empty(32, 256, dtype=dtype, device="meta"),), arch)


@pytest.mark.parametrize("dtype", INTEGERS, ids=short)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_integers(f, dtype, device):
    x = integers(dtype).to(device)
    assert_same_bits(run(f, x), FUNCTIONS[f](x))


@pytest.mark.parametrize("dtype", INTEGERS, ids=short)
def test_the_integers_show_a_second_rounding(dtype, device):
    """A float64 holds integers below 2 ** 52 exactly, so a rounding of its bits is the only one."""
    x = integers(dtype).to(device)
    x = x[x.double().abs() < 2.0**52]
    once = x.double().view(torch.int64)
    dropped = 52 - 7  # bits of a float64's mantissa that a bfloat16 does not have
    half = (1 << dropped - 1) - 1 + (once >> dropped & 1)  # to even
    once = (once + half >> dropped << dropped).view(torch.float64)
    assert (once != x.to(BF16).double()).sum() > 10


@pytest.mark.parametrize("shape", ROWS, ids=str)
@pytest.mark.parametrize("of", WHOLE, ids=short)
@pytest.mark.parametrize("dtype", STORED, ids=short)
def test_whole_numbers_to_8_bits_by_float32(dtype, of, shape, device):
    """The compiler would join the two conversions."""
    seed("whole", of, shape)
    x = torch.randint(0 if of is torch.uint8 else -120, 120, shape, device=device).to(of)
    found, more, _ = run(by_float32, x, dtype)
    assert same(found.cpu(), as_stored(x.cpu(), dtype))
    assert same(more.cpu(), as_stored(x.cpu().float() + 1, dtype))


@pytest.mark.parametrize("shape", PARTS, ids=str)
@pytest.mark.parametrize("dtype", (*STORED, torch.bool), ids=short)
def test_parts_of_8_bits(dtype, shape, device):
    seed("parts", dtype, shape)
    args = parts(dtype, shape, device)
    found, expected = run(by_parts, *args), parts_of_rows(*(x.cpu() for x in args))
    for out, right in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert out.dtype == right.dtype
        assert same(out.cpu(), right)

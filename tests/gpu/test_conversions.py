"""Conversions and exponents with torch's bits: of integers, of 16-bit floats, and of 8 bits."""

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


E8M0 = torch.float8_e8m0fnu
STORED = (torch.float8_e4m3fn, torch.float8_e5m2, E8M0, torch.int8, torch.uint8)
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
    if dtype not in (torch.float8_e5m2, E8M0):
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


@htile.rowwise
def by_values(x, once: htile.PerRow, number: htile.Scalar, groups: htile.Inner[2]):
    """What a row has once, what a call has once, and a few numbers of each row."""
    total = once.float() + number.float()
    largest = groups.float().amax(-1).to(x.dtype) if x.dtype.is_floating_point else groups[:, 0]
    return x.float() + total, once, once.float() * 2, largest, groups[1, 2], x.flatten()


def values(dtype, shape, device="cpu"):
    """Arguments of `by_values`."""
    x, *_ = parts(dtype, shape, device)
    return x, x[:, 1].contiguous(), x[1, 1].clone(), x[:, :6].reshape(-1, 2, 3)


def values_of_rows(x, once, number, groups):
    total = once.float() + number.float()
    largest = groups.float().amax(-1).to(x.dtype) if x.dtype.is_floating_point else groups[..., 0]
    return x.float() + total[:, None], once, once.float() * 2, largest, groups[:, 1, 2], x


WHOLE = (torch.int8, torch.uint8, torch.bool, torch.int32, torch.int64)


def storage_jobs(arch):
    for shape in ROWS:
        for dtype in STORED:
            for of in WHOLE:
                yield job(by_float32, (torch.empty(shape, dtype=of, device="meta"), dtype), arch)
    for shape in PARTS:
        for dtype in (*STORED, torch.bool):
            yield job(by_parts, tuple(x.to("meta") for x in parts(dtype, shape)), arch)
            yield job(by_values, tuple(x.to("meta") for x in values(dtype, shape)), arch)
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
    assert found.dtype is dtype and same(found.cpu(), as_stored(x.cpu(), dtype))


@pytest.mark.parametrize("shape", ROWS)
@pytest.mark.parametrize("dtype", STORED, ids=short)
def test_from_8_bits(dtype, shape, device):
    torch.manual_seed(0)
    x = torch.randint(0, 256, shape, dtype=torch.uint8, device=device).view(dtype)
    assert same(run(loaded, x).cpu(), x.cpu())


def of_every_exponent(device="cpu"):
    """Floats of every exponent and both signs, whose mantissas are near the ends and the middle."""
    ends = [0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFE, 0x7FFFFF, 0x155555, 0x2AAAAA]
    mantissas = torch.tensor([*ends, *(1 << k for k in range(2, 22)), 0x600000, 0x700000])
    bits = (torch.arange(512) << 23)[:, None] | mantissas
    bits = torch.where(bits >= 2**31, bits - 2**32, bits)
    return bits.int().view(F32).view(64, 256).to(device)


@htile.rowwise
def to_e8m0(x):
    y = x.to(E8M0)
    return y, y.float(), x[0::2].to(E8M0), x[0].to(E8M0), (x * 0.5).to(E8M0)


@htile.rowwise
def whole_logarithms(x):
    low, high = torch.floor(torch.log2(x)), torch.ceil(torch.log2(x))
    return low, high, torch.floor(torch.log2(x.abs().amax()))


@htile.rowwise
def split(x):
    mantissa, exponent = torch.frexp(x)
    return mantissa, exponent, torch.ldexp(mantissa, exponent), torch.frexp(x[1])


@htile.rowwise
def scaled(x, e, once: htile.PerRow):
    return torch.ldexp(x, e), x.ldexp(once), torch.ldexp(x[2], e)


@htile.rowwise
def powers_of_two(e):
    return torch.exp2(e.float()), torch.ldexp(torch.ones_like(e), e)


@htile.rowwise
def by_bits(x):
    bits = x.view(torch.int32)
    return bits, bits & 1, (bits & -0x10000).view(F32), x.amax(-1).view(torch.int32)


def exponents(dtype, device="cpu"):
    """Of columns and of rows: those that take numbers to both ends, and some beyond."""
    far = 2**31 - 1 if dtype is torch.int32 else 2**40
    e = torch.arange(256, dtype=dtype) * 3 - 384
    once = torch.arange(64, dtype=dtype) * 9 - 280
    e[:4] = torch.tensor([far, -far - 1, 0, 150], dtype=dtype)
    once[:4] = torch.tensor([-far - 1, far, 0, -1], dtype=dtype)
    return e.to(device), once.to(device)


def exponent_jobs(arch):
    x = of_every_exponent()
    for f in (to_e8m0, whole_logarithms):
        yield job(f, (x,), arch)
    yield job(by_bits, (x,), arch)
    for of in (F32, BF16, F16):
        yield job(split, (x.to(of),), arch)
        for dtype in INTEGERS:
            yield job(scaled, (x.to(of), *exponents(dtype)), arch)
    yield job(powers_of_two, (torch.arange(-160, 140)[None].int(),), arch)


def test_every_exponent_to_e8m0(device):
    """Halfway, next to it, subnormal numbers, infinities, NaN, and negative numbers."""
    x = of_every_exponent()
    y, again, even, first, halves = run(to_e8m0, x.to(device))
    expected = x.to(E8M0)
    assert_same_bits(y.cpu().view(torch.uint8), expected.view(torch.uint8))
    assert same(again.cpu(), expected)
    assert_same_bits(even.cpu().view(torch.uint8), expected[:, 0::2].contiguous().view(torch.uint8))
    assert_same_bits(first.cpu().view(torch.uint8), expected[:, 0].contiguous().view(torch.uint8))
    assert_same_bits(halves.cpu().view(torch.uint8), (x * 0.5).to(E8M0).view(torch.uint8))


def equal_bits(out, expected):
    """As `assert_same_bits`, and any NaN for NaN."""
    assert torch.equal(out.isnan(), expected.isnan())
    assert_same_bits(torch.where(out.isnan(), 0.0, out), torch.where(out.isnan(), 0.0, expected))


def test_whole_logarithms_are_exact(device):
    x = of_every_exponent()
    low, high, largest = (out.cpu() for out in run(whole_logarithms, x.to(device)))
    exact = x.double().log2()
    equal_bits(low, exact.floor().float())
    equal_bits(high, exact.ceil().float())
    equal_bits(largest, x.double().abs().amax(-1).log2().floor().float())


def test_bits_of_floats(device):
    """Those of NaN and of subnormal numbers too."""
    x = of_every_exponent()
    bits, last, cut, largest = (out.cpu() for out in run(by_bits, x.to(device)))
    expected = x.view(torch.int32)
    assert torch.equal(bits, expected) and torch.equal(last, expected & 1)
    assert torch.equal(cut.view(torch.int32), expected & -0x10000)
    numbers = x.amax(-1)
    same_number = largest == numbers.view(torch.int32)
    assert (same_number | (numbers.isnan() & largest.view(F32).isnan())).all()


@pytest.mark.parametrize("of", (F32, BF16, F16), ids=short)
def test_frexp(of, device):
    x = of_every_exponent().to(of)
    mantissa, exponent, again, (one, its) = run(split, x.to(device))
    expected = torch.frexp(x)
    equal_bits(mantissa.cpu(), expected.mantissa)
    assert torch.equal(exponent.cpu(), expected.exponent) and exponent.dtype is torch.int32
    equal_bits(again.cpu(), x)
    assert torch.equal(its.cpu(), expected.exponent[:, 1]) and same(one.cpu(), mantissa[:, 1].cpu())


@pytest.mark.parametrize("dtype", INTEGERS, ids=short)
@pytest.mark.parametrize("of", (F32, BF16, F16), ids=short)
def test_ldexp(of, dtype, device):
    """One rounding to float32, and one to the dtype of the result."""
    x, (e, once) = of_every_exponent().to(of), exponents(dtype)
    found = run(scaled, x.to(device), e.to(device), once.to(device))

    def right(x, e):
        return (x.double() * torch.exp2(e.double().clamp(-1000, 1000))).float()

    equal_bits(found[0].cpu(), right(x, e).to(of))
    equal_bits(found[1].cpu(), right(x, once[:, None]).to(of))
    assert same(found[2].cpu(), right(x[:, 2:3], e).to(found[2].dtype))


def test_powers_of_two_are_exact(device):
    e = torch.arange(-160, 140, dtype=torch.int32)[None]
    by_exp2, by_ldexp = (found.cpu() for found in run(powers_of_two, e.to(device)))
    exact = torch.exp2(e.double()).float()
    equal_bits(by_ldexp, exact)
    normal = (e >= -126) & (e < 128)  # the GPU finds subnormal powers as squares of roots
    equal_bits(by_exp2[normal], exact[normal])


def jobs(arch):
    """Every function of every dtype."""
    yield from storage_jobs(arch)
    yield from exponent_jobs(arch)
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
    check_8_bits(run(by_parts, *args), parts_of_rows(*(x.cpu() for x in args)))


@pytest.mark.parametrize("shape", PARTS, ids=str)
@pytest.mark.parametrize("dtype", (*STORED, torch.bool), ids=short)
def test_values_of_8_bits(dtype, shape, device):
    seed("values", dtype, shape)
    args = values(dtype, shape, device)
    check_8_bits(run(by_values, *args), values_of_rows(*(x.cpu() for x in args)))


def check_8_bits(found, expected):
    """The same dtypes and numbers, of structures of results."""
    for out, right in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert out.dtype == right.dtype
        assert same(out.cpu(), right)

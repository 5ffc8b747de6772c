"""Conversions that round: integers to the 16-bit floats, with torch's bits."""

import pytest
import torch

import htile

from .matrix import BF16, F16, F32, assert_same_bits, job, run, short

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


def jobs(arch):
    """Every function of every dtype."""
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

"""frexp, ldexp, and the floor and ceiling of log2: exact, and bit for bit what torch gives."""

from __future__ import annotations

import pytest
import torch

import htile
from htile.errors import DtypeError, TraceError
from htile.frontend.ops import Op
from htile.testing import oracle

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16
INF, NAN = float("inf"), float("nan")
EDGES = (0.0, -0.0, INF, -INF, NAN, 2.0**-149, -(2.0**-149), 2.0**-127, 2.0**-126, 3.4e38, -3.4e38)


def floats(dtype=F32):
    """Every power of two, its neighbours, and numbers between."""
    powers = torch.exp2(torch.arange(-149, 128).double()).float()
    above, below = (torch.nextafter(powers, torch.tensor(end)) for end in (INF, 0.0))
    x = torch.cat([powers, above, below, powers * 1.5, -powers, torch.tensor(EDGES)])
    return x.to(dtype)[None]


def same(a, b):
    """Equal bits, NaN being NaN."""
    assert a.dtype is b.dtype and a.shape == b.shape
    torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    return torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


@htile.rowwise
def split(x):
    mantissa, exponent = torch.frexp(x)
    again = x.frexp()
    return mantissa, exponent, torch.ldexp(again.mantissa, again.exponent)


@htile.rowwise
def scaled(x, e):
    return torch.ldexp(x, e), x.ldexp(e[0])


@htile.rowwise
def whole(x):
    return torch.floor(torch.log2(x)), x.log2().ceil(), torch.log2(x)


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
def test_frexp(dtype):
    x = floats(dtype)
    mantissa, exponent, again = split(x)
    expected = torch.frexp(x)
    assert same(mantissa, expected.mantissa) and torch.equal(exponent, expected.exponent)
    assert exponent.dtype is torch.int32 and same(again, x)


@pytest.mark.parametrize("integer", (torch.int32, torch.int64, torch.int8), ids=str)
@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
def test_ldexp(dtype, integer):
    """torch 2.13 rounds the product once; older versions round 2 ** e first."""
    x = floats(dtype)
    counts = torch.tensor([0, 1, -1, 3, 100, -100, 127, -127])
    if integer is not torch.int8:
        counts = torch.cat([counts, torch.tensor([150, -150, 277, -277, 2**31 - 1, -(2**31)])])
    for count in counts.to(integer):
        e = torch.full_like(x, count, dtype=integer)
        exact = x.double() * 2.0 ** max(-1000, min(1000, count.item()))
        for found in scaled(x, e[0]):
            assert same(found, exact.float().to(dtype))
        assert dtype is not F32 or same(scaled(x, e[0])[0], torch.ldexp(x, e))


def test_ldexp_by_int64_beyond_int32():
    x = torch.tensor([[1.0, -1.0, 0.0, NAN]])
    found, _ = scaled(x, torch.tensor([2**40, 2**62, -(2**50), 5]))
    assert same(found, torch.tensor([[INF, -INF, 0.0, NAN]]))


def test_ldexp_of_integers_is_float32():
    f = htile.rowwise(lambda i: torch.ldexp(i, i))
    i = torch.arange(8, dtype=torch.int32)[None]
    assert same(f(i), torch.ldexp(i, i))


def test_whole_logarithms_are_exact():
    """In float32, log2 of the number below 2 ** 100 is 100."""
    x = floats()
    found = whole(x)
    for out, exact in zip(found[:2], oracle(whole, x)[:2], strict=True):
        assert same(out, exact.float())
    assert (found[0] != torch.floor(found[2])).sum() > 100
    twice = htile.rowwise(lambda x: (torch.floor(torch.log2(x)), torch.ceil(torch.log2(x)) + x))
    assert same(twice(x)[0], found[0])


def test_kernels_take_them_from_the_bits():
    kernel = whole.inspect(torch.empty(4, 64, device="meta"), arch="sm_90a")
    assert "math.floor_log2(x)" in kernel.source and "math.ceil_log2(x)" in kernel.source
    assert {Op.FLOOR_LOG2, Op.CEIL_LOG2} <= {node.op for node in kernel.graph}
    alone = htile.rowwise(lambda x: torch.floor(torch.log2(x)).to(BF16))
    source = alone.inspect(torch.empty(4, 64, device="meta"), arch="sm_90a").source
    assert "math.log2" not in source and "near" not in source


@pytest.mark.parametrize("arch", ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_103a", "sm_120a"))
def test_every_architecture(arch):
    for dtype in (F32, BF16):
        x = torch.empty(3, 1000, device="meta", dtype=dtype)
        e = torch.empty(1000, device="meta", dtype=torch.int64)
        for f, args in ((split, (x,)), (scaled, (x, e)), (whole, (x,))):
            assert not f.inspect(*args, arch=arch).resources.stack


def test_mistakes():
    x, i = torch.rand(2, 8), torch.arange(8)
    for error, f, args, text in (
        (DtypeError, lambda i: torch.frexp(i), (i[None],), r"x\.float\(\)"),
        (DtypeError, lambda x: torch.ldexp(x, x), (x,), r"torch\.exp2\(e\)"),
        (DtypeError, lambda x: torch.ldexp(x, x > 0), (x,), r"torch\.exp2\(e\)"),
        (TraceError, lambda x: torch.ldexp(x, 3), (x,), "takes a Tensor"),
        (TraceError, lambda x: x.ldexp(3), (x,), r"2\.0\*\*e"),
    ):
        with pytest.raises(error, match=text) as found:
            htile.rowwise(f)(*args)
        assert found.value.loc is not None

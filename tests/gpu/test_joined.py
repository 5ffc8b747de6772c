"""Several rows as one on the GPU (htile.lower.joining): each call is right after any other."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.testing import assert_close

from .matrix import BF16, F32, assert_same_bits, job, rows_of, run
from .test_out import compile_in_place

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

M = 1024  # so many rows are joined
IN_PLACE = 4  # so many of `ways` are computed in place, too
LENGTHS = (67, BF16), (1002, BF16), (131, F32)


@htile.rowwise
def gated(x, y, scale: float = 0.5):
    return F.silu(x) * y * scale, torch.where(y > 0, x, 0.0).abs()


@htile.rowwise
def computing(x, y):
    return torch.atan2(x, y) + torch.log1p(y * y), torch.asinh(x)


@htile.rowwise
def polynomial(x, y, coefficients: htile.Shared):
    c = coefficients
    return (c[0] * x + c[1]) * y + c[2], x * c[1]


LEADS = (M,), (16, 64), (64 * M,)
GUARD = 1 << 16  # elements behind a result


CASES = [(gated, *each) for each in LENGTHS] + [(computing, 1001, BF16)]
IDS = ["67", "1002", "131 float32", "1001, shifted by themselves"]


def ways(n, dtype, device):
    """Arguments whose rows lie in memory in one way or another. The first three are joined."""

    def drawn(*shape):
        return torch.randn(*shape, n, dtype=dtype, device=device)

    wide = torch.randn(M, n + 1, dtype=dtype, device=device)
    anywhere = torch.randn(M * n + 1, dtype=dtype, device=device)[1:].view(M, n)
    yield drawn(M), drawn(M)
    yield drawn(8 * M), drawn(8 * M)
    yield drawn(16, 64), drawn(16, 64)
    yield drawn(M + 3), drawn(M + 3)
    yield drawn(3, 9), drawn(3, 9)
    yield wide[:, :n], drawn(M)  # apart in memory
    yield drawn(2 * M)[::2], drawn(M)
    yield drawn(16, 128)[:, ::2], drawn(16, 64)
    yield anywhere, drawn(M)
    yield drawn(1).expand(M, n), drawn(M)
    yield drawn(M, 1), drawn(1, 8)


def jobs(arch):
    for f, n, dtype in CASES:
        for args in ways(n, dtype, "cpu"):
            yield job(f, args, arch)
        for args in [*ways(n, dtype, "cpu")][:IN_PLACE]:
            yield compile_in_place(f, args, (0, 1), arch)
        yield job(f, [torch.empty(1, n, dtype=dtype) for _ in range(2)], arch)
    for lead in LEADS:
        rows = [torch.empty(*lead, 67, dtype=BF16) for _ in range(2)]
        yield job(polynomial, [*rows, torch.empty(3)], arch)


@pytest.mark.parametrize(("f", "n", "dtype"), CASES, ids=IDS)
def test_rows_in_any_order_of_calls(f, n, dtype, device):
    torch.manual_seed(n)
    cases = [*ways(n, dtype, device)]
    joined = [f.inspect(*args).plan.target.joined for args in cases]
    assert min(joined[:3]) > 1 == max(joined[3:])
    for args in (*cases, *cases[::-1], cases[1]):  # shortcuts are there the second time
        result = run(f, *args)
        assert_close(f, result, *args)
        if args[0].dim() == 2 and args[0].shape == args[1].shape:
            alone = run(f, *[a[3:4].contiguous() for a in args])
            assert_same_bits(alone, rows_of(result, slice(3, 4)), "a row alone")


@pytest.mark.parametrize(("f", "n", "dtype"), CASES, ids=IDS)
def test_rows_in_place(f, n, dtype, device):
    torch.manual_seed(n)
    for _ in range(2):
        for args in [*ways(n, dtype, device)][:IN_PLACE]:
            expected = run(f, *args)
            outs = tuple(a.clone() for a in args)
            assert f(*outs, out=outs) is outs
            assert_same_bits(outs, expected)


@pytest.mark.parametrize("lead", LEADS, ids=str)
def test_nothing_is_written_behind_the_rows(lead, device):
    """Elements of one vector are read one by one, so the kernel joins the rows itself."""
    n = 67
    torch.manual_seed(n)
    x, y = (torch.randn(*lead, n, dtype=BF16, device=device) for _ in range(2))
    coefficients = torch.randn(3, device=device)
    assert polynomial.inspect(x, y, coefficients).plan.target.joined == 8
    wholes = [torch.full((x.numel() + GUARD,), 7.0, dtype=BF16, device=device) for _ in range(2)]
    outs = tuple(whole[: x.numel()].view(x.shape) for whole in wholes)
    polynomial(x, y, coefficients, out=outs)
    assert_close(polynomial, outs, x, y, coefficients)
    for whole in wholes:
        assert torch.equal(whole[x.numel() :], torch.full_like(whole[x.numel() :], 7.0))

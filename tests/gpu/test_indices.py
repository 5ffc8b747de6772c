"""Indices on a GPU: masks of columns, elements at an index, losses of a class."""

import math

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.testing import assert_close

from .matrix import BF16, F32, assert_same_bits, job, rows_of, run, seed, shifted, short
from .test_out import compile_in_place

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

INF, NAN = math.inf, math.nan
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
SIZES = (1, 7, 128, 1003, 4096, 16384, 300001)  # held and looped rows, even and odd
DTYPES = (BF16, F32)
ROWS = 40


@htile.rowwise
def masks(x, y: htile.PerRow):
    c = torch.arange(x.shape[-1])
    even = c % 2 == 0
    return (
        torch.where(c <= y, x, -INF).softmax(-1), torch.where(c == y, 0.0, x),
        torch.where(even & (c > y), x, -x), (c < y).sum(), torch.where(c < 100, x, 0.0).sum(),
    )  # fmt: skip


@htile.rowwise
def numbers(x, y: htile.PerRow):
    c = torch.arange(x.shape[-1])
    return c * 2 + (x > 0), c - y, (c // 3 == y // 3) & (x == x), c.int() * (x > 0), c.float() + x


@htile.rowwise
def elements(x, w, y: htile.PerRow):
    return x[y], x.gather(-1, y[..., None]), x[-1], x[0] * x, w[y] * x


@htile.rowwise
def picked(x, y: htile.PerRow):
    return x[y], x[-1]


@htile.rowwise
def chosen_of_few(x, y, table: htile.Shared, own: htile.Inner[1]):
    return table[y] * x, own.gather(-1, y), (x.view(-1, 3) * own[y.view(-1, 3)]).sum(-1)


FEW = ((96, 7), (3003, 16), (30000, 33))  # elements of a row, and of the table


def of_few(n, size, device):
    """With indices beyond the table, too."""
    y = torch.randint(size + 1, (ROWS, n), device=device)
    table, own = torch.randn(size, device=device), torch.randn(ROWS, size, device=device)
    return torch.randn(ROWS, n, device=device), y, table, own


OVERWRITTEN = (48, 1024, 20000, 200000)


@htile.rowwise
def less_the_element(x, y: htile.PerRow):
    return x - x[y]


@htile.rowwise
def softmax_less_one(x, y: htile.PerRow):
    return torch.softmax(x, -1) - x[y]


@htile.rowwise
def hot(x, y: htile.PerRow):
    return F.one_hot(y, x.shape[-1]) * x, F.one_hot(y, x.shape[-1]).sum() + (x[y] > 0)


@htile.rowwise
def class_losses(x, w, y: htile.PerRow):
    return (
        F.cross_entropy(x, y), F.cross_entropy(x, y, w, reduction="sum", label_smoothing=0.1),
        F.cross_entropy(x, y, reduction="none", label_smoothing=0.3), F.nll_loss(x, y, w),
    )  # fmt: skip


@htile.rowwise
def shares(x, t, w):
    return F.cross_entropy(x, t, w, label_smoothing=0.1)


@htile.rowwise
def ranks(x, w, label: htile.PerRow):
    p, y = x.softmax(-1), x * w + 0.3
    counts = (p > p[label]).sum(), (p == p[label]).sum(), (y > y[label]).sum(), (y == y[0]).sum()
    return *counts, p.float(), y.float()


def positions(n, device, dtype=I64):
    """Places in the row: both ends, and some between them."""
    y = torch.arange(ROWS, device=device) * 977 % n
    y[0], y[1] = 0, n - 1
    return y.to(dtype)


def row(n, dtype, device):
    return torch.randn(ROWS, n, device=device).mul(4).to(dtype)


def column(n, dtype, device):
    return (torch.rand(n, device=device) + 0.5).to(dtype)


def arguments(f, n, dtype, device):
    """What a function is called with; on `meta` there are no positions to set."""
    is_meta = device == "meta"
    y = torch.empty(ROWS, dtype=I64, device="meta") if is_meta else positions(n, device)
    x, w = row(n, dtype, device), column(n, dtype, device)
    if f is shares:
        t = torch.rand(ROWS, n, device=device).to(dtype)
        return x, t, w
    return (x, w, y) if f in (elements, class_losses, ranks) else (x, y)


def integers(n, dtype, device):
    if dtype is BOOL:
        return torch.rand(ROWS, n, device=device) > 0.5
    limit = torch.iinfo(dtype)
    return torch.randint(limit.min, limit.max, (ROWS, n), dtype=dtype, device=device)


FUNCTIONS = (masks, numbers, elements, hot, class_losses, shares)
WHOLE = (I32, I64, BOOL)
WHOLE_SIZES = (1, 1003, 4096, 300001)
OUTSIDE_SIZES = (7, 1003, 4096, 300001)
MOVED = (2, 4, 8)  # bytes
MOVED_SIZES = (1003, 4096)
ALONE_SIZES = (1003, 300001)


def jobs(arch):
    """Every function of every size and dtype."""
    for n, size in FEW:
        yield job(chosen_of_few, of_few(n, size, "meta"), arch)
    for n in OVERWRITTEN:
        for f in (less_the_element, softmax_less_one):
            args = torch.empty(300, n), torch.zeros(300, dtype=I64)
            yield compile_in_place(f, args, (0,), arch)
    for n in SIZES:
        for dtype in DTYPES:
            for f in (*FUNCTIONS, ranks):
                yield job(f, arguments(f, n, dtype, "meta"), arch)
    for n in WHOLE_SIZES:
        for dtype in WHOLE:
            x = torch.empty(ROWS, n, dtype=dtype, device="meta")
            yield job(picked, (x, torch.empty(ROWS, dtype=I64, device="meta")), arch)
    for n in OUTSIDE_SIZES:
        for dtype in (F32, I64, BOOL):
            x, y = torch.empty(len(OUTSIDE), n, dtype=dtype, device="meta"), outside(n, "meta")
            yield job(picked, (x, y), arch)
    for n in MOVED_SIZES:
        for dtype in DTYPES:
            for f in (masks, numbers):
                x, y = arguments(f, n, dtype, "meta")
                for offset in MOVED:
                    if elements_off := offset // dtype.itemsize:
                        yield job(f, (shifted(x, elements_off), y), arch)
    for n in (8, 1003):
        for dtype in DTYPES:
            x = torch.empty(n, n, dtype=dtype, device="meta")
            yield job(picked, (x, torch.empty(n, dtype=I64, device="meta")), arch)
    for n in ALONE_SIZES:
        for f in (masks, class_losses):
            args = arguments(f, n, F32, "meta")
            yield job(f, args, arch)
            yield job(f, first_rows(args), arch)


def first_rows(args):
    """The first three rows of what a function is called with."""
    return tuple(a[:3] if len(a) == ROWS else a for a in args)


OUTSIDE = (0, 1, -1, -2, 10**9, 2**31, -(2**31) - 1, 2**40, -(2**40), 2**63 - 1, -(2**63))


def outside(n, device):
    """Indices beyond the ends of the row: n + k, and -n - 1 - k."""
    if device == "meta":
        return torch.empty(len(OUTSIDE), dtype=I64, device="meta")
    found = [n + k if 0 <= k < 2 else -n + k if k in (-1, -2) else k for k in OUTSIDE]
    return torch.tensor(found, device=device)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
def test_oracle(f, dtype, n, device):
    seed(f._signature.name, dtype, n)
    args = arguments(f, n, dtype, device)
    assert_close(f, run(f, *args), *args)


@pytest.mark.parametrize("n", WHOLE_SIZES)
@pytest.mark.parametrize("dtype", WHOLE, ids=short)
def test_elements_of_integers(dtype, n, device):
    seed(dtype, n)
    x, y = integers(n, dtype, device), positions(n, device)
    found, last = run(picked, x, y)
    rows = torch.arange(ROWS, device=device)
    assert_same_bits(found, x[rows, y])
    assert_same_bits(last, x[:, -1].contiguous())


@pytest.mark.parametrize("n", OUTSIDE_SIZES)
@pytest.mark.parametrize(("dtype", "nothing"), [(F32, NAN), (I64, 0), (BOOL, False)])
def test_beyond_the_end(dtype, nothing, n, device):
    x, y = torch.ones(len(OUTSIDE), n, device=device).to(dtype), outside(n, device)
    found, last = run(picked, x, y)
    assert last.bool().all()
    expected = torch.full((len(OUTSIDE),), nothing, dtype=dtype, device=device)
    assert found.dtype is dtype
    assert torch.equal(found.double().nan_to_num(7.0), expected.double().nan_to_num(7.0))


@pytest.mark.parametrize("n", (8, 1003))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("other", (0.0, -0.0, INF, -INF, NAN))
@pytest.mark.parametrize("value", (1.5, 0.0, -0.0, INF, -INF, NAN))
def test_only_the_element_shows(value, other, dtype, n, device):
    """At every place of the row, with its sign."""
    x = torch.full((n, n), other, device=device).fill_diagonal_(value).to(dtype)
    found, _ = run(picked, x, torch.arange(n, device=device))
    expected = torch.full((n,), value, device=device)
    assert torch.equal(found.isnan(), expected.isnan())
    if not math.isnan(value):
        assert_same_bits(found, expected)


@pytest.mark.parametrize("n", MOVED_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("f", (masks, numbers), ids=lambda f: f._signature.name)
def test_bits_do_not_depend_on_alignment(f, dtype, n, device):
    seed(f._signature.name, dtype, n)
    x, y = arguments(f, n, dtype, device)
    expected = run(f, x, y)
    for offset in MOVED:
        if elements_off := offset // dtype.itemsize:
            assert_same_bits(run(f, shifted(x, elements_off), y), expected, offset)


@pytest.mark.parametrize("n", ALONE_SIZES)
@pytest.mark.parametrize("f", (masks, class_losses), ids=lambda f: f._signature.name)
def test_bits_depend_on_the_row_alone(f, n, device):
    seed(f._signature.name, n)
    args = arguments(f, n, F32, device)
    expected = run(f, *args)
    assert_same_bits(run(f, *first_rows(args)), rows_of(expected, slice(0, 3)))


@pytest.mark.parametrize("n", OVERWRITTEN)
@pytest.mark.parametrize("f", (less_the_element, softmax_less_one), ids=("map", "softmax"))
def test_elements_are_read_before_the_row_is_overwritten(f, n, device):
    """The element is one of the last that is written, or of the first."""
    seed(n)
    x = torch.randn(300, n, device=device)
    y = torch.where(torch.arange(300, device=device) % 2 == 0, n - 1, 0)
    taken = x.gather(1, y[:, None])
    expected = (torch.softmax(x, -1) if f is softmax_less_one else x) - taken
    for _ in range(3):
        mine = x.clone()
        f(mine, y, out=mine)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("n", "size"), FEW)
def test_each_element_chooses_of_a_short_row(n, size, device):
    seed(n, size)
    args = x, y, table, own = of_few(n, size, device)
    found = run(chosen_of_few, *args)
    beyond = torch.full((ROWS, 1), NAN, device=device)
    taken = torch.cat((own, beyond), 1).gather(1, y)
    assert_same_bits(found[0], torch.cat((table, beyond[0]))[y] * x)
    assert_same_bits(found[1], taken)
    torch.testing.assert_close(
        found[2], (taken * x).view(ROWS, -1, 3).sum(-1), equal_nan=True, rtol=1e-5, atol=1e-5
    )


@pytest.mark.parametrize("n", SIZES[1:])  # a row of one element has no other
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_elements_have_the_bits_of_their_rows(n, dtype):
    x, w, label = arguments(ranks, n, dtype, "cuda")
    above, equal, y_above, y_equal, p, y = ranks(x, w, label)
    own, y_own = p.gather(-1, label[:, None]), y.gather(-1, label[:, None])
    assert torch.equal(above, (p > own).sum(-1)) and torch.equal(equal, (p == own).sum(-1))
    assert torch.equal(y_above, (y > y_own).sum(-1))
    assert torch.equal(y_equal, (y == y[:, :1]).sum(-1))

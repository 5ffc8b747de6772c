"""Where rows lie: leading dimensions, strides, offsets, broadcasts; always bit-equal to a copy."""

import itertools

import pytest
import torch

import htile
from htile.testing import assert_close

from .matrix import BF16, EXAMPLES, F16, F32, assert_same_bits, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

N = 1000
softmax, _ = EXAMPLES["softmax"]


@htile.rowwise
def mixed(x, y, t: htile.PerRow, k, weight):
    """Two rows, one value a row in two ways, a column; a row and two kinds of values come out."""
    z = (x + y) * weight - t
    total = (z * z).mean()
    return z * torch.rsqrt(total + k), total, z.amax(-1, keepdim=True)


@htile.rowwise
def masked(x, keep, valid: htile.PerRow):
    """Masks of the row and one value a row, in and out."""
    y = torch.where(keep & valid, x, 0.0)
    return y, y > 0, ~keep, keep.sum(), (y > 3).any(), valid


def wide(*lead, n=N, extra=0, dtype=F32, device="cuda"):
    """Rows in a matrix that is wider by `extra`."""
    return torch.randn(*lead, n + extra, device=device).to(dtype)[..., :n]


# Layouts of the rows: name -> a function of (n, dtype, device).
LAYOUTS = {
    "1-D": lambda n, dtype, d: wide(n=n, dtype=dtype, device=d),
    "2-D": lambda n, dtype, d: wide(5, n=n, dtype=dtype, device=d),
    "3-D": lambda n, dtype, d: wide(2, 3, n=n, dtype=dtype, device=d),
    "4-D": lambda n, dtype, d: wide(2, 3, 5, n=n, dtype=dtype, device=d),
    "crossed": lambda n, dtype, d: wide(3, 2, n=n, dtype=dtype, device=d).transpose(0, 1),
    "crossed 4-D": lambda n, dtype, d: wide(5, 2, 3, n=n, dtype=dtype, device=d).permute(
        1, 2, 0, 3
    ),
    "sliced": lambda n, dtype, d: wide(4, 5, n=n, dtype=dtype, device=d)[:, :2],
    "every second": lambda n, dtype, d: wide(6, 4, n=n, dtype=dtype, device=d)[::2, 1::2],
    "wide": lambda n, dtype, d: wide(2, 3, n=n, extra=24, dtype=dtype, device=d),
    "16 bytes": lambda n, dtype, d: offset(2, 3, n=n, dtype=dtype, device=d, by=16),
    "8 bytes": lambda n, dtype, d: offset(2, 3, n=n, dtype=dtype, device=d, by=8),
    "4 bytes": lambda n, dtype, d: offset(2, 3, n=n, dtype=dtype, device=d, by=4),
    "2 bytes": lambda n, dtype, d: offset(2, 3, n=n, dtype=dtype, device=d, by=2),
    "first expanded": lambda n, dtype, d: wide(1, 3, n=n, dtype=dtype, device=d).expand(2, 3, n),
    "second expanded": lambda n, dtype, d: wide(2, 1, n=n, dtype=dtype, device=d).expand(2, 3, n),
    "all expanded": lambda n, dtype, d: wide(n=n, dtype=dtype, device=d).expand(2, 3, n),
    "turned": lambda n, dtype, d: wide(2, n, n=3, dtype=dtype, device=d).mT,
    "elements apart": lambda n, dtype, d: wide(2, 3, n=2 * n, dtype=dtype, device=d)[..., ::2],
    "elements expanded": lambda n, dtype, d: wide(2, 3, n=1, dtype=dtype, device=d).expand(2, 3, n),
    "overlapping": lambda n, dtype, d: wide(n=n + 9, dtype=dtype, device=d).as_strided(
        (2, 3, n), (3, 1, 1)
    ),
    "size 1, crossed": lambda n, dtype, d: wide(1, 4, n=n, dtype=dtype, device=d).transpose(0, 1),
    "size 1, odd strides": lambda n, dtype, d: wide(n=n + 9, dtype=dtype, device=d).as_strided(
        (1, 3, 1, n), (7, 0, 3, 1)
    ),
}  # fmt: skip


def offset(*lead, n, dtype, device, by):
    """Rows whose addresses are `by` bytes (at least one element) beyond a multiple of 16."""
    elements = max(1, by // dtype.itemsize)
    step = -(-(n + elements) // 16) * 16
    return wide(*lead, n=step, dtype=dtype, device=device)[..., elements : n + elements]


def jobs(arch):
    """Every layout of every test below, from CPU tensors: those have addresses."""
    for dtype, n in CASES:
        for layout in LAYOUTS:
            x = LAYOUTS[layout](n, dtype, "cpu")
            yield job(softmax, (x,), arch)
            yield job(softmax, (x.reshape(-1, n).contiguous(),), arch)
    for name in PARTNERS:
        for dtypes in MIXES:
            for args in arguments(name, *dtypes, "cpu"):
                yield job(mixed, args, arch)
    for name in MASKS:
        for n in SIZES:
            yield job(masked, masks(name, n, "cpu"), arch)
            yield job(masked.with_plan(loader="direct"), masks(name, n, "cpu"), arch)
    for shape in ((4194305, 512), (2, 2, 512), (2, 512)):
        yield job(softmax, (torch.empty(shape, dtype=F16, device="meta"),), arch)


DTYPES, SIZES = (BF16, F32), (1, 17, N)
CASES = [*itertools.product(DTYPES, SIZES), (BF16, 1003)]  # rows that end inside a vector, too


@pytest.mark.parametrize(("dtype", "n"), CASES, ids=lambda each: str(each).removeprefix("torch."))
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layout(device, layout, dtype, n):
    seed(layout, n)
    x = LAYOUTS[layout](n, dtype, "cuda")
    before = x.clone()
    y = run(softmax, x)
    assert y.shape == x.shape and y.is_contiguous()
    assert_close(softmax, y, x)
    assert_same_bits(y.reshape(-1, n), run(softmax, x.reshape(-1, n).contiguous()), layout)
    assert torch.equal(x, before)


def test_calls_of_all_layouts_in_turn(device):
    """None is given the kernel of another one that was called before."""
    seed("turns")
    xs = [layout(N, BF16, "cuda") for layout in LAYOUTS.values()]
    xs += [x.clone() for x in xs] + [x[:1] for x in xs if x.ndim > 2]
    expected = [softmax(x.reshape(-1, N).contiguous()).view(x.shape) for x in xs]
    for _ in range(3):
        for x, y in zip(xs, expected, strict=True):
            assert_same_bits(softmax(x), y)
            out = torch.empty_like(y)
            assert_same_bits(softmax(x, out=out), y)


def test_addresses_are_what_their_names_say():
    for by in (16, 8, 4, 2):
        address = LAYOUTS[f"{by} bytes"](N, BF16, "cpu").data_ptr()
        assert address & -address == by or by == 16


# ---- operands beside the row ---------------------------------------------------------------------

LEAD = 2, 3
# the shapes of (y, t, k) beside an x of (2, 3, N): of size 1, missing, strided
PARTNERS = {
    "all there": lambda m: (m(2, 3, N), m(2, 3), m(2, 3, 1)),
    "first of size 1": lambda m: (m(1, 3, N), m(1, 3), m(1, 3, 1)),
    "second of size 1": lambda m: (m(2, 1, N), m(2, 1), m(2, 1, 1)),
    "both of size 1": lambda m: (m(1, 1, N), m(1, 1), m(1, 1, 1)),
    "first missing": lambda m: (m(3, N), m(3), m(3, 1)),
    "missing, then of size 1": lambda m: (m(1, N), m(1), m(1, 1)),
    "no dimension": lambda m: (m(1, 3, N), m().squeeze(), m(2, 3, 1)),
    "expanded": lambda m: (
        m(2, 1, N).expand(2, 3, N), m(1, 3).expand(2, 3), m(1, 1, 1).expand(2, 3, 1)
    ),
    "crossed": lambda m: (m(3, 2, N).transpose(0, 1), m(3, 2).t(), m(3, 2, 1).transpose(0, 1)),
    "every second": lambda m: (m(4, 3, N)[::2], m(2, 6)[:, ::2], m(2, 3, 4)[..., 1:2]),
}  # fmt: skip
MIXES = ((F32, F32, F32), (BF16, F32, BF16), (F16, BF16, F32))


def arguments(name, x_dtype, y_dtype, dtype, device):
    """Arguments of `mixed`, and the same as plain matrices."""

    def make(*shape):
        return torch.randn(shape, device=device)

    x, weight = make(*LEAD, N).to(x_dtype), make(N).to(y_dtype)
    y, t, k = PARTNERS[name](make)
    y, t, k = y.to(y_dtype), t.to(dtype), k.to(dtype).abs()
    rows = x.shape[0] * x.shape[1]
    flat = (
        x.reshape(rows, N),
        y.expand(*LEAD, N).reshape(rows, N).clone(),
        t.expand(LEAD).reshape(rows).clone(),
        k.expand(*LEAD, 1).reshape(rows, 1).clone(),
        weight,
    )
    return (x, y, t, k, weight), flat


@pytest.mark.parametrize("dtypes", MIXES, ids=lambda d: "-".join(map(short, d)))
@pytest.mark.parametrize("name", PARTNERS)
def test_operands_that_the_rows_repeat(device, name, dtypes):
    seed(name, dtypes)
    args, flat = arguments(name, *dtypes, "cuda")
    result = run(mixed, *args)
    assert [tuple(r.shape) for r in result] == [(2, 3, N), (2, 3), (2, 3, 1)]
    assert_close(mixed, result, *args)
    expected = run(mixed, *flat)
    for got, want in zip(result, expected, strict=True):
        assert_same_bits(got.reshape(want.shape), want, name)


MASKS = {  # the shapes of keep and valid beside (2, 3, N), or (6, N)
    "2-D": lambda m, n: (m(6, n), m(6)),
    "2-D of size 1": lambda m, n: (m(1, n), m(1)),
    "3-D": lambda m, n: (m(2, 3, n), m(2, 3)),
    "3-D of size 1": lambda m, n: (m(2, 1, n), m(1, 3)),
    "3-D, missing": lambda m, n: (m(1, n), m(3)),
    "3-D, strided": lambda m, n: (m(3, 2, n + 1)[..., 1:].transpose(0, 1), m(3, 2).t()),
}


def masks(name, n, device):
    keep, valid = MASKS[name](lambda *shape: torch.randn(shape, device=device) > -0.5, n)
    return wide(*((6,) if name.startswith("2") else LEAD), n=n, device=device), keep, valid


@pytest.mark.parametrize("loader", [None, "direct"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("name", MASKS)
def test_masks(device, name, n, loader):
    seed(name, n)
    args = masks(name, n, "cuda")
    f = masked if loader is None else masked.with_plan(loader=loader)
    result = run(f, *args)
    assert_close(f, result, *args)
    for mask in (t for t in result if t.dtype is torch.bool):
        assert mask.view(torch.uint8).max() <= 1, "a byte of a bool is 0 or 1"


@pytest.mark.parametrize("lead", [(0,), (0, 3), (2, 0), (2, 0, 5), (0, 0)], ids=str)
def test_no_rows_in_any_dimension(device, lead):
    x = torch.empty(*lead, N, device=device, dtype=BF16)
    t, k = torch.empty(lead, device=device), torch.ones((1,) * len(lead) + (1,), device=device)
    z, total, top = mixed(x, x[..., :1, :], t, k, torch.ones(N, device=device))
    assert (z.shape, total.shape, top.shape) == (x.shape, lead, (*lead, 1))
    torch.cuda.synchronize()


# ---- beyond 2 ** 31 ------------------------------------------------------------------------------


def test_more_than_2_to_the_31_elements_in_short_rows(device):
    m, n = 4194305, 512
    seed("short rows")
    x = torch.empty(m, n, dtype=F16, device=device).normal_()
    assert x.numel() > 2**31
    y = softmax(x)
    border = 2**31 // n
    for rows in (slice(0, 64), slice(border - 64, border + 64), slice(m - 65, m)):
        assert_close(softmax, y[rows], x[rows])
        assert_same_bits(y[rows].contiguous(), softmax(x[rows].contiguous()), rows)
    assert abs(y.sum(-1, dtype=F32) - 1).max() < 0.01, "every row was written"


def test_strides_whose_product_is_more_than_2_to_the_31(device):
    """Few rows, far apart in both leading dimensions."""
    n, step = 512, 2**30 + 256
    memory = torch.zeros(3 * step + n + 8, dtype=F16, device=device)
    x = memory.as_strided((2, 2, n), (2 * step, step, 1))
    assert 2 * step > 2**31 and memory.numel() > 2**31
    seed("far")
    x.copy_(torch.randn(2, 2, n, device=device))
    y = softmax(x)
    assert_close(softmax, y, x.contiguous())
    assert_same_bits(y, softmax(x.contiguous()))
    softmax(x, out=x)
    assert_same_bits(x.contiguous(), y)
    assert memory.count_nonzero() <= 4 * n

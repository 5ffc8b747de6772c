"""Elements by rank on a GPU: indices of extremes, and the k largest or smallest, with many ties."""

import math

import pytest
import torch

import htile
from htile.errors import LoweringError

from .matrix import BF16, F32, assert_same_bits, job, rows_of, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

INF, NAN = math.inf, math.nan
I32 = torch.int32
DTYPES = (BF16, F32, I32)
ROWS = 40
SIZES = (1, 7, 128, 1003, 4096, 16384, 300001)  # held and looped rows, even and odd
TOP_SIZES = (
    (7, 7), (8, 1), (8, 8), (64, 64), (256, 2), (256, 8), (256, 64), (1000, 8), (1003, 3),
    (4096, 8), (4096, 64), (10007, 8), (16384, 4), (300001, 2), (8192, 20), (32000, 50),
    (50257, 33), (151936, 64),
)  # fmt: skip
# Plans of held rows: of some lanes of a warp, of a warp, of several warps, and of a cluster. Warps
# of several look for many ranks together.
PLANNED = (
    (256, 8, (2, 1)), (256, 8, (8, 1)), (256, 8, (32, 1)), (256, 64, (4, 1)), (1000, 8, (32, 1)),
    (1000, 8, (96, 1)), (4096, 8, (64, 1)), (4096, 8, (1024, 1)), (4096, 64, (256, 1)),
    (10007, 8, (256, 4)), (16384, 8, (128, 8)), (16384, 3, (256, 16)), (64, 64, (64, 1)),
    (1000, 20, (64, 1)), (1003, 20, (96, 1)), (8192, 20, (128, 1)), (8192, 20, (512, 1)),
    (8192, 20, (64, 2)), (32000, 50, (128, 4)), (32000, 50, (256, 16)), (32000, 50, (1024, 1)),
    (50257, 33, (160, 4)), (50257, 33, (256, 8)),
)  # fmt: skip
GROUP_SIZES = ((1024, 4), (4096, 4), (8192, 8), (8192, 128))
STORED = (torch.int8, torch.uint8, torch.float8_e5m2, torch.float8_e4m3fn, torch.int32, BF16)
SUMMED, MANY = (1000, 4096, 40000), 700
ANY_LENGTHS = (3100, 4096, 10000, 11111)
TOGETHER = ((1000, 9), (8192, 64), (11008, 20), (50257, 50), (128256, 6))
GROUPED = 512


@htile.rowwise
def extremes(x):
    high, low = x.max(-1), x.min(-1)
    return high.values, high.indices, low.values, low.indices, x.argmax(), x.argmin()


@htile.rowwise
def ranked(x, k: htile.Static):
    largest, smallest = x.topk(k), x.topk(k, largest=False)
    return *largest, *smallest


@htile.rowwise
def grouped(x):
    groups = x.view(8, -1)
    values, indices = groups.topk(2)
    best = values.sum(-1).topk(4).indices
    return values, indices, best, groups.argmax(0)


@htile.rowwise
def router(x):
    weights, experts = x.float().softmax(-1).topk(8)
    return weights / weights.sum(), experts.int()


def arguments(n, dtype, device, rows=ROWS):
    """Values of which many are equal, with both zeros, infinities and NaN."""
    if dtype is I32:
        x = torch.randint(-9, 10, (rows, n), device=device)
        x = torch.where(x == 9, 2**31 - 1, torch.where(x == -9, -(2**31), x))
        return x.to(dtype)
    x = (torch.randn(rows, n, device=device) * 8).round() / 4
    if device == "meta":
        return x.to(dtype)
    x = torch.where(x == 0, torch.where(torch.rand(rows, n, device=device) < 0.5, -0.0, 0.0), x)
    x = torch.where(torch.rand(rows, n, device=device) < 1 / n, INF, x)
    x = torch.where(torch.rand(rows, n, device=device) < 1 / n, -INF, x)
    x = torch.where(torch.rand(rows, n, device=device) < 0.3 / n, NAN, x)
    x[0], x[-1], x[1] = -INF, NAN, INF
    x[2] = torch.where(torch.rand(n, device=device) < 0.5, -INF, math.copysign(NAN, -1))
    return x.to(dtype)


def order(x, descending):
    """The indices in order: of equal elements the first one first, NaN as the largest."""
    keys = x.double()
    keys = torch.where(keys.isnan(), 1e300, keys.clamp(-1e200, 1e200)) + 0.0
    return torch.sort(-keys if descending else keys, dim=-1, stable=True).indices


@htile.rowwise
def of_pieces(x, y):
    found = torch.cat((x, y * 2)).topk(24, largest=False)
    return found.values.exp(), found.indices


@htile.rowwise(dynamic_n=True)
def of_any_length(x):
    return x.topk(20)


@htile.rowwise
def of_groups(x, size: htile.Static):
    return x.view(-1, size).amax(-1).topk(12)


@htile.rowwise
def stored(x, dtype: htile.Static):
    return x.topk(12).values.to(dtype), x.topk(12, largest=False).indices.int()


@htile.rowwise
def beside_sums(x):
    found = x.topk(24)
    kept = torch.where(x >= found.values[-1], x, 0.0)
    return found.values, found.indices, htile.sum_rows(kept)


@htile.rowwise
def gathered(x, y):
    values, indices = x.topk(16)
    return values.softmax(-1), y.gather(-1, indices)


def order_of_all(n, device):
    """Rows of which no two elements are equal, in any order, ascending and descending."""
    x = torch.arange(n, device=device).float() - n / 3
    mixed = torch.stack([x[torch.randperm(n, device=device)] for _ in range(5)])
    one_warp = torch.where(torch.arange(n, device=device) % 1024 < 16, x + n, x)
    return torch.cat((mixed, torch.stack((x, x.flip(0), one_warp, x.abs(), -x.abs()))))


def plans_of(n, k, dtype, arch=None):
    """The functions with the plans of PLANNED that this dtype has: wider elements have others."""
    for size, count, (threads, shares) in PLANNED:
        if (size, count) != (n, k):
            continue
        wanted = dict(form="held", threads_per_row=threads, cluster_n=shares)
        planned = ranked.with_plan(**wanted)
        try:
            planned.inspect(arguments(n, dtype, "meta"), k, arch=arch)
        except LoweringError:
            continue
        yield planned


def jobs(arch):
    for dtype in DTYPES:
        for n in SIZES:
            yield job(extremes, (arguments(n, dtype, "meta"),), arch)
        for n, k in TOP_SIZES:
            yield job(ranked, (arguments(n, dtype, "meta"), k), arch)
        for n, k in sorted({(n, k) for n, k, _ in PLANNED}):
            yield job(ranked, (arguments(n, dtype, "meta"), k), arch)
            for planned in plans_of(n, k, dtype, arch):
                yield job(planned, (arguments(n, dtype, "meta"), k), arch)
    yield job(grouped, (arguments(GROUPED, F32, "meta"),), arch)
    for n, k in TOGETHER:
        yield job(ranked, (torch.empty(10, n, device="meta"), k), arch)
    for n in (1000, 5003):
        yield job(of_pieces, (arguments(n, F32, "meta"),) * 2, arch)
    for n, size in GROUP_SIZES:
        yield job(of_groups, (arguments(n, F32, "meta"), size), arch)
    for dtype in STORED:
        yield job(stored, (arguments(4096, F32, "meta"), dtype), arch)
    for n in SUMMED:
        yield job(beside_sums, (arguments(n, BF16, "meta", MANY),), arch)
    for m in (1, 3, 64):
        yield job(gathered, (arguments(4096, BF16, "meta", m),) * 2, arch)
    for n in ANY_LENGTHS:
        yield job(of_any_length, (arguments(n, BF16, "meta"),), arch)
    for rows in (1, 3, ROWS, 5000):
        yield job(router, (arguments(256, BF16, "meta", rows),), arch)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_extremes(dtype, n, device):
    seed(dtype, n)
    x = arguments(n, dtype, device)
    high, i, low, j, a, b = run(extremes, x)
    assert torch.equal(i, order(x, True)[:, 0]) and torch.equal(a, i)
    assert torch.equal(j, order(-x.double(), True)[:, 0]) and torch.equal(b, j)
    for found, expected in ((high, x.amax(-1)), (low, x.amin(-1))):
        expected = expected.to(found.dtype)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n", "k"), TOP_SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_topk(dtype, n, k, device):
    seed(dtype, n, k)
    x = arguments(n, dtype, device)
    v, i, w, j = run(ranked, x, k)
    for values, indices, descending in ((v, i, True), (w, j, False)):
        expected = order(x, descending)[:, :k]
        assert torch.equal(indices, expected)
        expected = x.gather(1, expected).to(values.dtype)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n", "k"), sorted({(n, k) for n, k, _ in PLANNED}))
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_plans(dtype, n, k, device):
    """All plans give the same bits."""
    seed("plans", dtype, n, k)
    x = arguments(n, dtype, device)
    expected = run(ranked, x, k)
    for planned in plans_of(n, k, dtype):
        assert_same_bits(run(planned, x, k), expected, str(planned))


@pytest.mark.parametrize(("n", "k"), TOGETHER)
def test_rows_in_order(n, k, device):
    """The first elements are anywhere in the row, or all of one warp, which lists too many."""
    seed("order", n, k)
    x = order_of_all(n, device)
    v, i, w, j = run(ranked, x, k)
    for values, indices, largest in ((v, i, True), (w, j, False)):
        expected = order(x, largest)[:, :k]
        assert torch.equal(indices, expected) and torch.equal(values, x.gather(1, expected))


@pytest.mark.parametrize("n", (1000, 5003))
def test_pieces(n, device):
    seed("pieces", n)
    x, y = torch.randn(2, ROWS, n, device=device)
    values, indices = run(of_pieces, x, y)
    expected = torch.cat((x, y * 2), -1).double().topk(24, largest=False)
    assert torch.equal(indices, expected.indices)
    torch.testing.assert_close(values.double(), expected.values.exp(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("n", ANY_LENGTHS)
def test_any_length(n, device):
    seed("any", n)
    x = arguments(n, BF16, device)
    values, indices = of_any_length(x)
    expected = order(x, True)[:, :20]
    assert torch.equal(indices, expected)
    expected = x.gather(1, expected).float()
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("n", "size"), GROUP_SIZES)
def test_ranks_of_groups(n, size, device):
    seed("groups", n, size)
    x = arguments(n, F32, device)
    values, indices = run(of_groups, x, size)
    groups = x.view(ROWS, -1, size).amax(-1)
    assert torch.equal(indices, order(groups, True)[:, :12])
    expected = groups.gather(1, indices)
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", STORED, ids=short)
def test_dtypes_of_results(dtype, device):
    """What is stored side by side is what one element after the other would be."""
    seed("stored", dtype)
    x = torch.randn(ROWS, 4096, device=device) * 200
    if dtype is not torch.int32:  # what is beyond its numbers is not defined
        x[1], x[2, ::3] = 1e30, -1e30
    values, indices = run(stored, x, dtype)
    assert torch.equal(indices.long(), order(x, False)[:, :12])
    expected = torch.vmap(lambda row: row.topk(12).values)(x.cpu())
    expected = htile.rowwise(lambda row: row.to(dtype))(expected)
    assert_same_bits(values.cpu(), expected)


@pytest.mark.parametrize("n", SUMMED)
def test_rows_one_after_the_other(n, device):
    """A thread block works on many rows, of which some list too many candidates and some few."""
    seed("rows", n)
    x = torch.randn(MANY, n, device=device).to(BF16)
    x[::3] = (x[::3] * 2).round()
    x[1::5] = 0.0
    values, indices, total = beside_sums(x)
    expected = order(x, True)[:, :24]
    assert torch.equal(indices, expected)
    assert torch.equal(values, x.gather(1, expected).float())
    kept = torch.where(x >= values[:, -1:].to(BF16), x, 0.0).double().sum(0)
    torch.testing.assert_close(total.double(), kept, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("m", (1, 3, 64))
def test_rows_that_are_not_there(m, device):
    """What threads of a row behind the last one gather is inside of the tensor."""
    seed("last", m)
    x, y = torch.randn(2, m, 4096, device=device).to(BF16)
    shares, found = run(gathered, x, y)
    values = x.float().topk(16).values
    torch.testing.assert_close(shares, values.softmax(-1), rtol=1e-4, atol=1e-6)
    assert torch.equal(found, y.gather(1, order(x, True)[:, :16]).to(found.dtype))


def test_groups(device):
    seed("groups")
    x = torch.rand(ROWS, GROUPED, device=device)
    values, indices, best, along = run(grouped, x)
    expected = x.view(ROWS, 8, -1).topk(2)
    assert torch.equal(values, expected.values) and torch.equal(indices, expected.indices)
    assert torch.equal(best, expected.values.sum(-1).topk(4).indices)
    assert torch.equal(along, x.view(ROWS, 8, -1).argmax(1))


@pytest.mark.parametrize("rows", (1, 3, 5000))
def test_bits_depend_on_the_row_alone(rows, device):
    seed("router")
    x = torch.randn(5000, 256, device=device).to(BF16)
    expected = rows_of(run(router, x), slice(0, rows))
    assert_same_bits(run(router, x[:rows]), expected)
    weights, experts = expected
    exact = x[:rows].double().softmax(-1)
    top = exact.gather(1, experts.long())
    torch.testing.assert_close(weights.double(), top / top.sum(-1, keepdim=True))
    assert (top[:, -1] >= exact.topk(8).values[:, -1] * (1 - 1e-6)).all()

"""Elements by rank on a GPU: every layout of a row, dtype, special number, and batch."""

import math

import pytest
import torch

import htile
from htile.build.arch import arch_named
from htile.errors import UnsupportedError
from htile.lower import enumerate_plans
from htile.testing import assert_close

from .matrix import BF16, F16, F32, assert_same_bits, job, run, seed, shifted, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

I32 = torch.int32
DTYPES = (F32, BF16, F16, I32)
SIZES = (1, 7, 64, 65, 128, 1000, 1003, 4096, 8192)
LONG = (16384, 20001, 65536, 131072)  # in clusters, where the GPU has them
ROWS = 9
BATCHES = (3, 64, 5000)
PLANNED = ((96, F32), (1003, F32), (4096, BF16), (6144, I32), (8192, BF16))
DIVIDED = ((16384, F32), (65536, BF16))
INF, NAN = math.inf, math.nan


@htile.rowwise
def chosen(x, place: htile.PerRow):
    return x.sort().values[place]


@htile.rowwise
def middle(x):
    value, index = x.median(-1)
    return value, index


@htile.rowwise
def spread(x):
    """Two stages, the first of which has three ranks; rows of NaN, and others of some NaN."""
    low, high = x.nanquantile(0.25), x.nanquantile(0.75)
    deviation = (x - x.nanmedian()).abs()
    return high - low, deviation.nanmedian(), x.quantile(0.9)


@htile.rowwise
def sparse(x):
    return torch.where(x >= x.topk(50).values[-1], x, 0)


@htile.rowwise
def ends(x):
    """The first and the last of a sorted row."""
    order = x.argsort()
    return order[:3], order[-5:], x.sort(descending=True).values[-5:]


def rows(m, n, dtype, device="meta"):
    """Rows of which many elements are equal, and some are infinite or zeros of either sign."""
    if dtype is I32:
        x = torch.randint(-(2**31), 2**31, (m, n), device=device)
        return torch.where(x % 3 == 0, x % 50, x).to(I32)
    x = torch.randn(m, n, device=device)
    x = torch.where(x > 2.5, INF, torch.where(x < -2.5, -INF, x))
    return torch.where(x.abs() < 0.05, x * 0.0, torch.where(x.abs() < 0.3, x.round(), x)).to(dtype)


def with_nan(x):
    """The same with NaN, of either sign, in places; the last row has nothing else."""
    x = x.clone()
    x[:, 3::7], x[:, 5::11], x[-1] = NAN, -NAN, NAN
    return x


def places(m, n, device="meta"):
    """The first and the last element, from either end, some between, and one beyond the row."""
    found = torch.arange(m, device=device) * 7919 % n
    some = torch.tensor([0, n - 1, -1, -n, n // 2, n], device=device)[:m]
    found[: len(some)] = some
    return found


def planned(n, dtype, arch):
    """The function with one plan for each way that a row is divided."""
    kernel = chosen.inspect(rows(ROWS, n, dtype), places(ROWS, n), arch=arch)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    ways = {plan.numerics: plan for plan in plans}
    return [chosen.with_plan(**plan.properties()) for plan in ways.values()]


def is_held(n, dtype, arch):
    """Whether a plan holds the rows; long ones need clusters, and are refused without."""
    try:
        chosen.inspect(rows(ROWS, n, dtype), places(ROWS, n), arch=arch)
    except UnsupportedError as error:
        assert "does not hold them in registers" in error.message
        assert n in LONG and arch_named(arch).max_cluster == 1
        return False
    return True


def jobs(arch):
    for n in SIZES + LONG:
        for dtype in DTYPES:
            if is_held(n, dtype, arch):
                yield job(chosen, (rows(ROWS, n, dtype), places(ROWS, n)), arch)
                yield job(middle, (rows(ROWS, n, dtype),), arch)
                if n > 64:
                    yield job(sparse, (rows(ROWS, n, dtype),), arch)
            if n > 64:
                yield job(ends, (rows(ROWS, n, dtype),), arch)
        if is_held(n, F32, arch):
            yield job(spread, (rows(ROWS, n, F32),), arch)
    for n in (7, 65, 1003, 4096, 8192):
        for dtype in (F32, BF16):
            off = shifted(rows(ROWS, n, dtype, "cpu"), 1)
            yield job(chosen, (off, places(ROWS, n, "cpu")), arch)
        for m in (1, ROWS, *BATCHES):
            yield job(chosen, (rows(m, n, F32), places(m, n)), arch)
    for n, dtype in PLANNED + DIVIDED:
        for f in planned(n, dtype, arch) if is_held(n, dtype, arch) else ():
            yield job(f, (rows(ROWS, n, dtype), places(ROWS, n)), arch)


def ordered(x):
    """The rows in ascending order, NaN last; zeros are one.

    torch sorts NaN with a sign to the front of long rows on a GPU.
    """
    x = x.double() + 0.0
    return torch.where(x.isnan(), NAN, x).sort(-1).values


def assert_chosen(result, x, place):
    n = x.shape[-1]
    counted = torch.where(place < 0, place + n, place)
    expected = ordered(x).gather(-1, counted.clamp(max=n - 1)[:, None])[:, 0]
    expected[counted >= n] = 0.0 if x.dtype is I32 else NAN
    torch.testing.assert_close(result.double(), expected, rtol=0, atol=0, equal_nan=True)


def skips(n, dtype, arch, f, *args):
    """Whether the rows are too long for this GPU, which the function says."""
    if is_held(n, dtype, arch):
        return False
    with pytest.raises(UnsupportedError, match="does not hold them in registers"):
        f(*args)
    return True


@pytest.mark.parametrize("n", SIZES + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_every_rank(dtype, n, device, arch):
    seed("ranks", dtype, n)
    x, place = rows(ROWS, n, dtype, device), places(ROWS, n, device)
    if skips(n, dtype, arch, chosen, x, place):
        return
    assert_chosen(run(chosen, x, place), x, place)
    if dtype is not I32:
        x = with_nan(x)
        assert_chosen(run(chosen, x, place), x, place)


@pytest.mark.parametrize("n", SIZES + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_medians_have_the_index_of_the_first(dtype, n, device, arch):
    seed("medians", dtype, n)
    x = rows(ROWS, n, dtype, device)
    if skips(n, dtype, arch, middle, x):
        return
    for given in (x,) if dtype is I32 else (x, with_nan(x)):
        value, index = run(middle, given)
        expected = ordered(given)[:, (n - 1) // 2]
        expected[given.isnan().any(-1)] = NAN
        torch.testing.assert_close(value.double(), expected, rtol=0, atol=0, equal_nan=True)
        same = (given.double() == expected[:, None]) | (given.isnan() & expected[:, None].isnan())
        assert torch.equal(index, same.int().argmax(-1))


@pytest.mark.parametrize("n", SIZES + LONG)
def test_several_ranks_and_stages(n, device, arch):
    seed("spread", n)
    x = torch.randn(ROWS, n, device=device)
    if skips(n, F32, arch, spread, x):
        return
    assert_close(spread, run(spread, x), x)
    x[2, n // 2 :] = NAN
    x[-1] = NAN
    width, deviation, high = run(spread, x)
    quarters = torch.tensor([0.25, 0.75], device=device).double()
    low, up = torch.stack([row.nanquantile(quarters) for row in x.double()], -1)
    torch.testing.assert_close(width.double(), up - low, rtol=1e-5, atol=1e-6, equal_nan=True)
    exact = (x - x.nanmedian(-1, True).values).abs().nanmedian(-1).values
    torch.testing.assert_close(deviation, exact, rtol=0, atol=0, equal_nan=True)
    expected = torch.stack([row.quantile(0.9) for row in x.double()])
    torch.testing.assert_close(high.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("n", [n for n in SIZES + LONG if n > 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_thresholds(dtype, n, device, arch):
    seed("thresholds", dtype, n)
    x = rows(ROWS, n, dtype, device)
    if skips(n, dtype, arch, sparse, x):
        return
    least = ordered(x)[:, -50, None]
    expected = torch.where(x.double() >= least, x, torch.zeros_like(x))
    assert torch.equal(run(sparse, x).double(), expected.double())


@pytest.mark.parametrize("n", [n for n in SIZES + LONG if n > 64])
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_ends_of_a_sorted_row(dtype, n, device):
    """Equal elements keep their order, at both ends."""
    seed("ends", dtype, n)
    x = rows(ROWS, n, dtype, device)
    for given in (x,) if dtype is I32 else (x, with_nan(x)):
        first, last, smallest = run(ends, given)
        known = torch.where(given.isnan(), NAN, given.double() + 0.0)  # NaN of one sign
        order = known.sort(dim=-1, stable=True).indices
        assert torch.equal(first, order[:, :3]) and torch.equal(last, order[:, -5:])
        expected = ordered(given)[:, :5].flip(-1)
        torch.testing.assert_close(smallest.double(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", (7, 65, 1003, 4096, 8192))
@pytest.mark.parametrize("dtype", (F32, BF16), ids=short)
def test_rows_that_are_not_aligned(dtype, n, device):
    seed("shifted", dtype, n)
    x, place = shifted(rows(ROWS, n, dtype, device), 1), places(ROWS, n, device)
    assert_chosen(run(chosen, x, place), x, place)


@pytest.mark.parametrize(("n", "dtype"), PLANNED + DIVIDED, ids=short)
def test_every_way_that_a_row_is_divided(n, dtype, device, arch):
    seed("plans", n, dtype)
    x, place = rows(ROWS, n, dtype, device), places(ROWS, n, device)
    if skips(n, dtype, arch, chosen, x, place):
        return
    functions = planned(n, dtype, arch)
    assert len(functions) > (3 if arch_named(arch).max_cluster > 1 else 1)
    for f in functions:
        assert_chosen(run(f, x, place), x, place)


@pytest.mark.parametrize("n", (7, 65, 1003, 4096, 8192))
def test_bits_depend_on_the_row_alone(n, device):
    """Alone, first, last, and in the middle of batches of several sizes."""
    seed("bits", n)
    row, place = rows(1, n, F32, device), torch.tensor([n // 3], device=device)
    alone = run(chosen, row, place)
    for m in (ROWS, *BATCHES):
        x, each = rows(m, n, F32, device), places(m, n, device)
        for k in {0, m // 2, m - 1}:
            x[k], each[k] = row[0], place[0]
            assert_same_bits(run(chosen, x, each)[k : k + 1], alone, (m, k))

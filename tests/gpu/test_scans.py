"""Cumulative sums and products on a GPU: every layout of a row, dtype, and batch."""

import math

import pytest
import torch

import htile
from htile.build.arch import arch_named
from htile.errors import UnsupportedError
from htile.lower import enumerate_plans
from htile.testing import assert_close, float32_errors
from tests.generated.movements import program

from .matrix import BF16, F32, assert_same_bits, job, run, seed, shifted, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

I32, I64, BOOL = torch.int32, torch.int64, torch.bool
DTYPES = (F32, BF16, I32, BOOL)
SIZES = (1, 7, 8, 64, 256, 1000, 1003, 4096, 8192)
LONG = (16384, 20001, 65536, 131072)  # in clusters, where the GPU has them
ROWS = 5
BATCHES = (3, 64, 5000)
SEEDS = range(60)
# Each row in other ways: 1 to 32 lanes of a warp, several warps, and warps that are no power of
# two. The plans of these have every number of threads that there is.
PLANNED = ((7, F32), (96, F32), (256, BF16), (1003, F32), (4096, I32), (6144, F32), (8192, BF16))
DIVIDED = ((16384, F32), (20001, BF16), (65536, I32))
OF_LOGARITHMS = ((96, F32), (1003, F32), (8192, BF16), (20001, BF16))


@htile.rowwise
def summed(x):
    return x.cumsum(-1)


@htile.rowwise
def multiplied(x):
    return x.cumprod(-1)


@htile.rowwise
def running(x):
    return *x.cummax(-1), *x.cummin(-1)


@htile.rowwise
def logarithms(x):
    return x.logcumsumexp(-1), x.flip(-1).logcumsumexp(-1).flip(-1)


@htile.rowwise
def several(x):
    """Two scans of one stage and of several dtypes, reductions beside them, and a scan of scans."""
    total, up_to = x.sum(), x.cumsum(-1)
    count = (x > 0).cumsum(-1)
    share = up_to / total
    return share, count, torch.where(share < 0.5, x, 0.0).cumsum(-1), (share < 0.5).sum()


@htile.rowwise
def inverse(weights, share: htile.PerRow):
    up_to = weights.cumsum(-1)
    return (up_to <= share * up_to[-1]).sum()


@htile.rowwise
def grouped(x):
    groups = x.view(4, -1)
    first, second = x.cumsum(-1).chunk(2)
    return groups.cumsum(-1), groups.cumsum(0), groups.sum(-1).cumsum(-1), second - first


def rows(m, n, dtype, device="meta"):
    """Rows whose sums stay small; integers and masks exactly."""
    if dtype is BOOL:
        return torch.rand(m, n, device=device) < 0.5
    if dtype is I32:
        return torch.randint(-(2**30), 2**30, (m, n), device=device).to(I32)
    return torch.randn(m, n, device=device).to(dtype)


def factors(m, n, dtype, device="meta"):
    """Rows whose products neither overflow nor vanish; integers whose products wrap."""
    if dtype is BOOL:
        return torch.rand(m, n, device=device) < 1 - 1 / n
    if dtype is I32:
        return torch.randint(0, 50, (m, n), device=device).to(I32) * 2 - 49
    # Of products a few units in the last place from 1 more are rounded down than up.
    return torch.exp2(torch.randn(m, n, device=device) * 0.05).to(dtype)


def positive(m, n, device="meta"):
    return torch.rand(m, n, device=device) + 0.25


def shares(m, device="cpu"):
    return (torch.arange(m, device=device) % 32 + 0.5) / 32


def planned(f, n, dtype, arch):
    """The function with one plan for each way that a row is divided."""
    kernel = f.inspect(rows(ROWS, n, dtype), arch=arch)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    ways = {plan.numerics: plan for plan in plans}
    return [f.with_plan(**plan.properties()) for plan in ways.values()]


def spread(m, n, dtype, device="meta"):
    """Rows of elements that are equal, near and far apart, some of them infinite."""
    x = torch.randn(m, n, device=device) * 30
    x[1] = torch.round(x[1] / 30)
    x[2] = torch.where(x[2] < 0, -torch.inf, x[2])
    x[3] = -100.0 + torch.arange(n, device=device) * (200 / n)
    return x.to(dtype)


def random_case(number, device="meta", filled=False):
    p = program(number, "all", scans=True)
    return p, p.function(), p.arguments(device, (7,), filled)


def jobs(arch):
    for dtype in DTYPES:
        for n in SIZES + LONG:
            for f, x in ((summed, rows(ROWS, n, dtype)), (multiplied, factors(ROWS, n, dtype))):
                if is_held(f, x, arch):
                    yield job(f, (x,), arch)
    for dtype in (F32, BF16):
        for n in SIZES + LONG:
            for f in (running, logarithms):
                if is_held(f, spread(ROWS, n, dtype), arch):
                    yield job(f, (spread(ROWS, n, dtype),), arch)
    for n, dtype in OF_LOGARITHMS:
        x = spread(ROWS, n, dtype)
        for f in planned(logarithms, n, dtype, arch) if is_held(logarithms, x, arch) else ():
            yield job(f, (x,), arch)
    for n in (7, 64, 1003, 4096, 8192):
        yield job(several, (positive(ROWS, n),), arch)
        for dtype in (F32, BF16):
            yield job(summed, (shifted(rows(ROWS, n, dtype, "cpu"), 1),), arch)
        for m in (1, ROWS, *BATCHES):
            yield job(summed, (rows(m, n, F32),), arch)
            yield job(inverse, (positive(m, n, "cpu"), shares(m)), arch)
    for n in (16, 256, 4096):
        yield job(grouped, (rows(ROWS, n, F32),), arch)
    for n, dtype in PLANNED + DIVIDED:
        x = rows(ROWS, n, dtype)
        for f in planned(summed, n, dtype, arch) if is_held(summed, x, arch) else ():
            yield job(f, (x,), arch)
    for number in SEEDS:
        try:
            _, f, args = random_case(number)
            yield job(f, args, arch)
        except UnsupportedError:
            continue  # the test says so


def is_held(f, x, arch):
    """Whether a plan holds the rows; long ones need clusters, and are refused without."""
    try:
        f.inspect(x.to("meta"), arch=arch)
    except UnsupportedError as error:
        assert "does not hold them in registers" in error.message
        assert x.shape[-1] in LONG and arch_named(arch).max_cluster == 1
        return False
    return True


def is_refused(f, x, arch):
    """Whether no plan holds the rows. A call says so then."""
    if is_held(f, x, arch):
        return False
    with pytest.raises(UnsupportedError, match="does not hold them in registers"):
        f(x)
    return True


@pytest.mark.parametrize("n", SIZES + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_sums(dtype, n, device, arch):
    seed("sums", dtype, n)
    x = rows(ROWS, n, dtype, device)
    if is_refused(summed, x, arch):
        return
    result = run(summed, x)
    assert_close(summed, result, x)
    if not dtype.is_floating_point:
        assert result.dtype is I64 and torch.equal(result, x.cumsum(-1))


@pytest.mark.parametrize("n", SIZES + LONG)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_products(dtype, n, device, arch):
    seed("products", dtype, n)
    x = factors(ROWS, n, dtype, device)
    if is_refused(multiplied, x, arch):
        return
    result = run(multiplied, x)
    if not dtype.is_floating_point:
        assert result.dtype is I64 and torch.equal(result, x.cumprod(-1))
        return
    places = torch.arange(1, n + 1, device=device).double()
    bound = 2.0**-24 * (8 + 6 * places.sqrt()) + (0 if dtype is F32 else 2.0**-8)
    assert ((result.double() / x.double().cumprod(-1) - 1).abs() <= bound).all()


@pytest.mark.parametrize("n", SIZES + LONG)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=short)
def test_running_maxima_and_minima(dtype, n, device, arch):
    """With their indices, which are those of the last of equal elements; and NaN."""
    seed("running", dtype, n)
    x = spread(ROWS, n, dtype, device)
    if is_refused(running, x, arch):
        return
    x[4, n // 2] = torch.nan
    right = (*x.cummax(-1), *x.cummin(-1))
    for result, exact in zip(run(running, x), right, strict=True):
        assert result.dtype is exact.dtype
        assert torch.allclose(result, exact, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("n", SIZES + LONG)
@pytest.mark.parametrize("dtype", (F32, BF16), ids=short)
def test_logarithms_of_cumulative_sums(dtype, n, device, arch):
    seed("logarithms", dtype, n)
    x = spread(ROWS, n, dtype, device)
    if is_refused(logarithms, x, arch):
        return
    x[4, n // 2] = torch.nan
    assert_logarithms(run(logarithms, x), x)


def assert_logarithms(results, x):
    """Assert that they are right to some ulp of the results or of 1."""
    exact = x.double().logcumsumexp(-1), x.double().flip(-1).logcumsumexp(-1).flip(-1)
    tolerance = 40 * 2.0**-24 + (0 if x.dtype is F32 else 2.0**-8)
    for result, right in zip(results, exact, strict=True):
        kind = {"rtol": tolerance, "atol": tolerance, "equal_nan": True}
        torch.testing.assert_close(result.double(), right, **kind)


@pytest.mark.parametrize(("n", "dtype"), OF_LOGARITHMS, ids=short)
def test_every_way_that_a_row_of_logarithms_is_divided(n, dtype, device, arch):
    seed("ways of logarithms", n, dtype)
    x = spread(ROWS, n, dtype, device)
    if is_refused(logarithms, x, arch):
        return
    functions = planned(logarithms, n, dtype, arch)
    assert len(functions) > 1
    for f in functions:
        assert_logarithms(run(f, x), x)


@pytest.mark.parametrize(("n", "dtype"), PLANNED + DIVIDED, ids=short)
def test_every_way_that_a_row_is_divided(n, dtype, device, arch):
    seed("plans", n, dtype)
    x = rows(ROWS, n, dtype, device)
    if is_refused(summed, x, arch):
        return
    errors = float32_errors(summed, rows(64, n, dtype, device))
    functions = planned(summed, n, dtype, arch)
    assert len(functions) > (3 if arch_named(arch).max_cluster > 1 else 1)
    for f in functions:
        result = run(f, x)
        assert_close(f, result, x, torch_errors=errors)
        assert_same_bits(run(f, x), result, "the same again")


@pytest.mark.parametrize("n", (7, 64, 1003, 4096, 8192))
def test_several_scans(n, device):
    seed("several", n)
    x = positive(ROWS, n, device)
    share, count, part, number = run(several, x)
    exact = x.double().cumsum(-1) / x.double().sum(-1, keepdim=True)
    torch.testing.assert_close(share.double(), exact, rtol=1e-5, atol=1e-6)
    assert torch.equal(count, (x > 0).cumsum(-1))
    kept = torch.where(share < 0.5, x, 0.0)
    torch.testing.assert_close(part.double(), kept.double().cumsum(-1), rtol=1e-5, atol=1e-6)
    assert torch.equal(number, (share < 0.5).sum(-1))


@pytest.mark.parametrize("n", (7, 64, 1003, 4096, 8192))
def test_nan_and_infinity(n, device):
    """They reach what comes after them in their row, and no other row."""
    seed("special", n)
    x = torch.randn(ROWS, n, device=device)
    places = [0, n // 3, n // 2, n - 1]
    for row, value, place in zip(range(1, ROWS), (math.nan, math.inf, -math.inf, math.nan), places,
                                 strict=True):  # fmt: skip
        x[row, place] = value
    x[3, n // 4] = math.inf  # and -inf behind it, or in its place
    result, expected = run(summed, x), x.double().cumsum(-1)
    assert torch.equal(result.isnan(), expected.isnan())
    assert torch.equal(result.isinf(), expected.isinf())
    finite = expected.isfinite()
    torch.testing.assert_close(result.double()[finite], expected[finite], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("n", (7, 64, 1003, 4096, 8192))
def test_bits_depend_on_the_row_alone(n, device):
    """Alone, first, last, and in the middle of batches of several sizes and alignments."""
    seed("bits", n)
    row = torch.randn(1, n, device=device)
    alone = run(summed, row)
    for m in (ROWS, *BATCHES):
        x = torch.randn(m, n, device=device)
        for place in {0, m // 2, m - 1}:
            x[place] = row[0]
            assert_same_bits(run(summed, x)[place : place + 1], alone, (m, place))
    for dtype in (F32, BF16):
        x = rows(ROWS, n, dtype, device)
        assert_same_bits(run(summed, shifted(x, 1)), run(summed, x), "at another alignment")


@pytest.mark.parametrize("m", (1, ROWS, *BATCHES))
@pytest.mark.parametrize("n", (7, 64, 1003, 4096, 8192))
def test_inverse(n, m, device):
    """Of whole numbers, so that every sum is exact."""
    seed("inverse", n, m)
    weights = torch.randint(0, 8, (m, n), device=device).float()
    weights[:, 0] += 1
    share = shares(m, device)
    up_to = weights.double().cumsum(-1)
    target = up_to[:, -1:].float() * share[:, None]
    assert torch.equal(run(inverse, weights, share), (up_to <= target.double()).sum(-1))


@pytest.mark.parametrize("n", (16, 256, 4096))
def test_groups_and_parts(n, device):
    seed("groups", n)
    x = rows(ROWS, n, F32, device)
    assert_close(grouped, run(grouped, x), x)


@pytest.mark.parametrize("number", SEEDS)
def test_random_functions(number, device):
    p, f, args = random_case(number, device, filled=True)
    try:
        result = run(f, *args)
    except UnsupportedError:
        return
    try:
        assert_close(f, result, *args)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None

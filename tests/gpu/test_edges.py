"""Values at the edge: NaN and infinities in every place, large offsets, zeros, overflow."""

import math

import pytest
import torch

import htile
from htile.testing import _compare, _largest, assert_close, oracle

from .matrix import BF16, EXAMPLES, F32, job, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

INF, NAN = math.inf, math.nan
SIZES, DTYPES = (17, 1000, 4096, 8191), (BF16, F32)


@htile.rowwise
def extremes(x):
    return x.max(), x.min(), x.sum(), x.abs().max(), (x > 0).any(), (x == x).all()


@htile.rowwise
def layernorm(x):
    return torch.nn.functional.layer_norm(x, x.shape)


@htile.rowwise
def rmsnorm(x):
    return torch.nn.functional.rms_norm(x, x.shape, eps=1e-6)


@htile.rowwise
def product(x):
    return x.prod()


FUNCTIONS = {
    "softmax": EXAMPLES["softmax"][0],
    "log_softmax": EXAMPLES["log_softmax"][0],
    "layernorm": layernorm,
    "rmsnorm": rmsnorm,
    "extremes": extremes,
    "product": product,
}


def jobs(arch):
    """Every function at every size."""
    for f in FUNCTIONS.values():
        for n in SIZES:
            for dtype in DTYPES:
                for m in (7, n):
                    yield job(f, (torch.empty(m, n, dtype=dtype, device="meta"),), arch)


def swept(value, background):
    """A row for every column, in which only that column is `value`."""

    def make(n, device):
        x = background(n, n, device)
        return x.fill_diagonal_(value)

    return make


def constant(value):
    return lambda m, n, device: torch.full((m, n), value, device=device)


def normal(m, n, device):
    return torch.randn(m, n, device=device)


def with_last(value, other, background=normal):
    """Rows with `value` in the first column and `other` in the last, and the other way round."""

    def make(n, device):
        x = background(2, n, device)
        x[0, 0] = x[1, -1] = value
        x[0, -1] = x[1, 0] = other
        return x

    return make


SPECIAL = {  # where NaN and infinities decide
    "NaN in one column": swept(NAN, normal),
    "NaN beside -inf": swept(NAN, constant(-INF)),
    "NaN beside +inf": swept(NAN, constant(INF)),
    "+inf in one column": swept(INF, normal),
    "-inf in one column": swept(-INF, normal),
    "one column beside -inf": swept(2.5, constant(-INF)),
    "one column beside +inf": swept(2.5, constant(INF)),
    "all -inf": lambda n, device: constant(-INF)(5, n, device),
    "all +inf": lambda n, device: constant(INF)(5, n, device),
    "all NaN": lambda n, device: constant(NAN)(5, n, device),
    "+inf and -inf": with_last(INF, -INF),
    "NaN and +inf": with_last(NAN, INF),
}
FINITE = {
    "below -5e4": lambda n, device: normal(9, n, device) - 6e4,
    "offset 1e4": lambda n, device: normal(9, n, device) + 1e4,
    "offset 1e6": lambda n, device: normal(9, n, device) + 1e6,
    "offset -1e6": lambda n, device: normal(9, n, device) - 1e6,
    "zeros": lambda n, device: constant(0.0)(5, n, device),
    "negative zeros": lambda n, device: constant(-0.0)(5, n, device),
    "ones": lambda n, device: constant(1.0)(5, n, device),
    "negative": lambda n, device: -normal(9, n, device).abs() - 1,
    "one large column": swept(80.0, normal),
    "one small column": swept(-80.0, normal),
    "tiny": lambda n, device: normal(9, n, device) * 1e-18,
}

# layernorm far from 0 is limited by the mean, a float32: test_variance_of_a_large_mean
FAR = ("below -5e4", "offset 1e4", "offset 1e6", "offset -1e6")
EDGES = [
    (name, case)
    for name in FUNCTIONS
    for case in (*SPECIAL, *FINITE)
    if name != "product" and not (name == "layernorm" and case in FAR)
]


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("name", "case"), EDGES)
def test_edge(device, name, case, dtype, n):
    seed(case, n)
    x = {**SPECIAL, **FINITE}[case](n, device).to(dtype)
    assert_close(FUNCTIONS[name], run(FUNCTIONS[name], x), x)


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_product(device, dtype, n):
    seed(n)
    x = torch.randn(n + 4, n, device=device).mul(0.1).exp()  # its product stays in range
    x[n, 0], x[n + 1, -1], x[n + 2, n // 2] = 0.0, -1.0, -INF
    x[n + 3, 0], x[n + 3, -1] = 0.0, INF
    x[:n] *= -1.0 + 2.0 * (torch.rand(n, n, device=device) > 0.5)
    x[: n // 2].fill_diagonal_(NAN)
    x = x.to(dtype)
    result, exact, torch32 = run(product, x), oracle(product, x), x.float().prod(-1)
    assert exact[: n // 2].isnan().all() and exact[n:].isfinite().sum() == 2 and exact[n] == 0
    # one value a row: each is measured by its own magnitude, so by its logarithm
    finite = exact.isfinite() & (exact != 0)
    assert finite.sum() >= n // 2
    assert torch.equal(result[~finite].nan_to_num(7.0), exact[~finite].float().nan_to_num(7.0))
    scale = exact[finite].abs()
    error32 = _largest((torch32[finite].double() - exact[finite]).abs() / scale)
    _compare("product", result[finite] / scale, exact[finite] / scale, error32)


@pytest.mark.parametrize("n", SIZES)
def test_squares_that_overflow(device, n):
    """The square of 1e25 is infinite in float32, so rmsnorm gives 0, and not NaN."""
    seed(n)
    x = torch.randn(9, n, device=device) * 1e25
    assert (x.square().sum(-1) == INF).all()
    assert (run(rmsnorm, x) == 0).all()


@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
def test_variance_of_a_large_mean(device, dtype, n):
    """E[x^2] - mean^2 has no digit left here; two passes have."""
    seed(n)
    x = (torch.randn(64, n, device=device) + 1e4).to(dtype)
    result, exact = run(layernorm, x), oracle(layernorm, x)
    # the mean is a float32: an error of its last place moves a row by that, in units of spread
    spread = x.double().var(-1, correction=0).add(1e-5).sqrt().min()
    bound = 8 * torch.finfo(F32).eps * 1e4 / spread + 2 * torch.finfo(dtype).eps * exact.abs().max()
    assert (result.double() - exact).abs().max() <= bound
    if dtype is F32 and n >= 1000:
        assert bound < 0.1
        naive = (x * x).mean(-1) - x.mean(-1) ** 2
        assert (naive.double() - x.double().var(-1)).abs().max() > 0.1

"""Elements of long rows by their rank: kthvalue, median, quantile, and single ones of sort."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

import htile
from htile.errors import DtypeError, HTileError, ShapeError, TraceError, UnsupportedError
from htile.frontend.ops import Op
from htile.testing import assert_close

INF, NAN = math.inf, math.nan
BF16, F16, F32, F64 = torch.bfloat16, torch.float16, torch.float32, torch.float64
I32 = torch.int32
DTYPES = (F32, BF16, F16, I32)


def random(*shape, dtype=F32, seed=0, with_nan=True):
    """Many elements are equal, and some are infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-60, 61, shape, generator=generator)
    if dtype is I32:
        return torch.where(x == 60, 2**31 - 1, torch.where(x == -60, -(2**31), x)).to(I32)
    x = x.float() / 16
    x = torch.where(x == 3.75, INF, torch.where(x == -3.75, -INF, x))
    if with_nan:
        x[torch.rand(shape, generator=generator) < 0.02] = NAN
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return x.to(dtype)


def ordered(x):
    """The rows in ascending order, by numpy, which puts NaN last."""
    return np.sort(x.double().numpy(), axis=-1)


def same(found, expected):
    np.testing.assert_array_equal(found.double().numpy(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 2, 7, 64, 65, 200, 1003))
def test_kthvalue_is_the_element_of_that_rank(n, dtype):
    x = random(9, n, dtype=dtype, seed=n)
    f = htile.rowwise(lambda x, k: x.kthvalue(k))
    for k in sorted({1, 2, n // 3, n // 2, n - 1, n} & {*range(1, n + 1)}):
        value, place = htile.rowwise(lambda x, k=k: x.kthvalue(k))(x)
        same(value, ordered(x)[:, k - 1])
        same(x.gather(-1, place[:, None])[:, 0], ordered(x)[:, k - 1])
        kept, at = htile.rowwise(lambda x, k=k: torch.kthvalue(x, k, 0, keepdim=True))(x)
        assert kept.shape == at.shape == (9, 1)
        same(kept[:, 0], ordered(x)[:, k - 1])
    with pytest.raises(HTileError, match="k"):
        f(x, torch.ones(9))


@pytest.mark.parametrize("n", (2, 7, 64, 65, 333, 1000))
def test_of_equal_elements_the_first_has_the_index(n):
    value, place = htile.rowwise(lambda x: x.median(-1))(torch.zeros(3, n))
    assert not value.any() and not place.any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 2, 7, 64, 65, 200, 1003))
def test_medians(n, dtype):
    x = random(9, n, dtype=dtype, seed=n)
    whole, nans = htile.rowwise(lambda x: (x.median(), x.nanmedian()))(x)
    same(whole, x.median(-1).values.double().numpy() + 0)
    same(nans, x.nanmedian(-1).values.double().numpy() + 0)
    value, place = htile.rowwise(lambda x: torch.median(x, -1))(x)
    same(value, whole.double().numpy())
    same(x.gather(-1, place[:, None])[:, 0], whole.double().numpy())


@pytest.mark.parametrize("n", (1, 2, 64, 65, 333, 1000))
def test_rows_of_nan_have_no_median(n):
    x = torch.full((2, n), NAN)
    x[1, n // 2] = 3.0
    f = htile.rowwise(lambda x: (x.median(), x.nanmedian(), x.nanquantile(0.3), x.quantile(0.0)))
    median, nanmedian, nanquantile, quantile = f(x)
    same(nanmedian, [NAN, 3.0])
    same(nanquantile, [NAN, 3.0])
    expected = [NAN, 3.0 if n == 1 else NAN]
    same(median, expected)
    same(quantile, expected)


SHARES = (0.0, 0.1, 0.25, 0.5, 0.77, 0.999, 1.0)


def quantile(q, way):
    """The function of one share, which is a number that the trace knows."""
    return htile.rowwise(lambda x: x.quantile(q, interpolation=way))


@pytest.mark.parametrize("way", ("linear", "lower", "higher", "midpoint", "nearest"))
@pytest.mark.parametrize("n", (1, 2, 7, 64, 65, 333, 1000))
def test_quantiles_are_those_of_float64(n, way):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(9, n, generator=generator)
    holes = torch.where(torch.rand(9, n, generator=generator) < 0.2, NAN, x)
    kinds = dict(rtol=1e-6, atol=1e-6, equal_nan=True)
    for q in SHARES:
        for given in (x, holes):
            found = quantile(q, way)(given)
            expected = given.double().quantile(q, -1, interpolation=way)
            torch.testing.assert_close(found.double(), expected, **kinds)


@pytest.mark.parametrize("n", (65, 333, 1000))
def test_quantiles_of_what_is_not_nan(n):
    generator = torch.Generator().manual_seed(n)
    x = torch.randn(9, n, generator=generator)
    x = torch.where(torch.rand(9, n, generator=generator) < 0.2, NAN, x)
    x[3] = NAN

    @htile.rowwise
    def f(x, q: htile.PerRow):
        return x.nanquantile(q)

    for q in SHARES:
        found = f(x, torch.full((9,), q))
        expected = x.double().nanquantile(q, -1)
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("way", ("linear", "lower", "higher", "midpoint", "nearest"))
@pytest.mark.parametrize("n", (1, 5, 33, 100, 101))
def test_quantiles_of_infinities_are_those_of_torch(n, way):
    """Torch interpolates between an element and itself, too, which of infinities gives NaN."""
    x = torch.full((4, n), INF)
    x[0, : 3 * n // 5] = x[1] = -INF
    x[2, : n // 2] = 1.0
    x[3, n // 3 :] = NAN
    for q in (0.0, 0.25, 0.5, 0.9, 1.0):
        f = htile.rowwise(lambda x, q=q: (x.quantile(q, interpolation=way),
                                          x.nanquantile(q, interpolation=way)))  # fmt: skip
        whole, nans = f(x)
        same(whole, x.quantile(q, -1, interpolation=way).numpy())
        same(nans, x.nanquantile(q, -1, interpolation=way).numpy())


def test_quantiles_of_a_share_of_each_row_and_of_one_value_are_those_of_torch():
    x, q = torch.full((3, 101), -INF), torch.tensor([0.5, 0.125, 1.0])
    x[:, 50:] = 2.0

    @htile.rowwise
    def f(x, q: htile.PerRow):
        return x.quantile(q), x.amin().quantile(0.5), x.amin().quantile(0.5, interpolation="lower")

    shares, linear, lower = f(x, q)
    same(shares, [2.0, NAN, 2.0])
    same(linear, [NAN] * 3)
    same(lower, [-INF] * 3)


def test_several_quantiles_at_once():
    x = torch.randn(5, 400)
    found = htile.rowwise(lambda x: x.quantile(torch.tensor([0.2, 0.5, 0.9])))(x)
    shares = torch.tensor([0.2, 0.5, 0.9], dtype=F64)
    torch.testing.assert_close(found.double(), x.double().quantile(shares, -1).T, rtol=1e-5, atol=0)
    kept = htile.rowwise(lambda x: x.quantile(torch.tensor([0.2, 0.5]), -1, keepdim=True))(x)
    assert kept.shape == (5, 2, 1)


def test_a_share_of_each_row():
    x, q = torch.randn(7, 333), torch.rand(7)

    @htile.rowwise
    def f(x, q: htile.PerRow):
        return x.quantile(q)

    pairs = zip(x.double(), q.double(), strict=True)
    expected = torch.stack([row.quantile(each) for row, each in pairs])
    torch.testing.assert_close(f(x, q).double(), expected, rtol=1e-4, atol=1e-5)
    same(f(x, torch.full((7,), 1.5)), np.full(7, NAN))


@pytest.mark.parametrize("n", (20, 64, 65, 333))
def test_a_rank_of_each_row(n):
    x = random(6, n, seed=n)
    places = torch.tensor([0, n - 1, -1, -n, n // 2, n])

    @htile.rowwise
    def f(x, place: htile.PerRow):
        return x.sort().values[place], x.sort(descending=True).values[place]

    up, down = f(x, places)
    rising = ordered(x)
    for m, place in enumerate(places[:5].tolist()):
        np.testing.assert_array_equal(up[m].item(), rising[m][place])
        np.testing.assert_array_equal(down[m].item(), rising[m][::-1][place])
    assert up[5].isnan() and down[5].isnan()  # there is no such element


@pytest.mark.parametrize("n", (20, 64, 65, 333))
def test_a_rank_of_each_row_in_a_vector_that_all_share(n):
    @htile.rowwise
    def f(x, w, k: htile.PerRow, q: htile.PerRow):
        at = w.sort().values[k]
        return at, w.quantile(q), x - at, x > w.quantile(x.sigmoid().mean())

    x, w = torch.randn(4, 30), torch.randn(n)
    k, q = torch.tensor([0, n - 1, n // 2, 3]), torch.rand(4)
    at, quantile, moved, above = f(x, w, k, q)
    assert torch.equal(at, w.sort().values[k] + 0) and torch.equal(moved, x - at[:, None])
    exact = w.double().quantile(q.double())
    torch.testing.assert_close(quantile.double(), exact, rtol=1e-5, atol=1e-6)
    bound = torch.quantile(w.double(), x.double().sigmoid().mean(-1))
    assert torch.equal(above, x > bound[:, None])


def test_a_rank_of_each_row_of_integers_beyond_the_row_gives_zero():
    @htile.rowwise
    def f(x, place: htile.PerRow):
        return x.sort().values[place]

    x = random(3, 100, dtype=I32)
    assert f(x, torch.tensor([100, 5000, -101])).tolist() == [0, 0, 0]


PARTS = {
    "first": (lambda s: s[:5], 200), "last": (lambda s: s[-5:], 200), "next": (lambda s: s[1], 200),
    "the last one": (lambda s: s[-1], 65), "of the first": (lambda s: s[3:20:4], 65),
    "of the last": (lambda s: s[-60:-2:7], 1000),
}  # fmt: skip


@pytest.mark.parametrize("descending", (False, True))
@pytest.mark.parametrize("dtype", (F32, BF16, I32, torch.int64), ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_parts_of_a_long_sort(name, dtype, descending):
    """Equal elements keep their order, so indices are torch's of a stable sort."""
    part, n = PARTS[name]
    x = torch.randint(-9, 9, (5, n), generator=torch.Generator().manual_seed(n)).to(dtype)
    if dtype is torch.int64:
        x *= 2**40
    elif dtype.is_floating_point:
        x[1, ::9], x[2] = NAN, 0.0

    @htile.rowwise
    def f(x):
        found = torch.sort(x, stable=True, descending=descending)
        return part(found.values), part(found.indices), part(x.argsort(descending=descending))

    values, indices, again = f(x)
    expected = [torch.sort(row, stable=True, descending=descending) for row in x]
    exact = torch.stack([part(e.values) for e in expected]).to(values.dtype)
    torch.testing.assert_close(values, exact, rtol=0, atol=0, equal_nan=True)
    right = torch.stack([part(e.indices) for e in expected])
    assert torch.equal(indices, right) and torch.equal(again, right)


def test_gradients_of_parts_of_a_long_sort():
    """Also of equal elements, and through the indices."""
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(1))
    x[3] = x[3].round()

    def f(x):
        found = torch.sort(x, stable=True)
        return found.values[-5:] * torch.arange(5), x[found.indices[-7:]].cumsum(0)

    weights = torch.randn(4, 5), torch.randn(4, 7)
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    rows = [torch.stack(each) for each in zip(*map(f, exact), strict=True)]
    for results in (htile.rowwise(f)(leaf), rows):
        sum([(result * w).sum() for result, w in zip(results, weights, strict=True)]).backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


def test_a_copy_of_a_long_sort_that_is_made_without_gradients_has_none():
    """Although the same elements are known with theirs."""

    def f(x):
        values = torch.sort(x, stable=True).values
        first = values[:3]
        with torch.no_grad():
            copied, inside = values.clone(), values[:3]
        return first * copied[:3] + inside

    x = torch.randn(2, 100, generator=torch.Generator().manual_seed(1))
    leaf, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    htile.rowwise(f)(leaf).sum().backward()
    torch.stack([*map(f, exact)]).sum().backward()
    torch.testing.assert_close(leaf.grad.double(), exact.grad, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("n", (1, 7, 31, 64))
def test_a_sort_of_an_order_counts_the_elements_before_each(n):
    x = torch.randn(5, n, generator=torch.Generator().manual_seed(n))
    x[1], x[2, ::3] = x[1].round(), NAN

    def f(x):
        order = torch.argsort(x, stable=True)
        places = torch.argsort(torch.argsort(x, stable=True, descending=True))
        return torch.argsort(order), places, torch.argsort(order, descending=True)

    expected = [torch.stack(each) for each in zip(*map(f, x), strict=True)]
    assert all(map(torch.equal, htile.rowwise(f)(x), expected))


@pytest.mark.parametrize("axes", [(0, 0), (1, 1), (0, 1)])
def test_a_sort_of_an_order_along_an_axis(axes):
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(1)).round()

    def f(x):
        order = torch.argsort(x.view(4, 8), dim=axes[0], stable=True)
        return torch.argsort(order, dim=axes[1], stable=True)

    assert torch.equal(htile.rowwise(f)(x), torch.stack([*map(f, x)]))


@pytest.mark.parametrize("dtype", (torch.int8, I32, F32), ids=str)
def test_an_order_in_another_dtype_has_the_same_places(dtype):
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(1))
    f = htile.rowwise(lambda x: x.argsort().to(dtype).argsort())
    assert torch.equal(f(x), x.argsort().argsort())
    with pytest.raises(DtypeError, match="of bool"):
        htile.rowwise(lambda x: x.argsort().bool().argsort())(x)


def test_the_first_of_a_row_in_order_are_sorted_again():
    x = torch.randn(5, 20, generator=torch.Generator().manual_seed(1))
    f = htile.rowwise(lambda x: x.topk(5).indices.argsort())
    assert torch.equal(f(x), x.topk(5).indices.argsort())


def test_an_order_that_is_sorted_makes_a_short_kernel():
    f = htile.rowwise(lambda x: x.argsort().argsort())
    kernel = f.inspect(torch.empty(4, 64, device="meta"), arch="sm_90a")
    assert len(kernel.source.splitlines()) < 100


CASES = {
    "a mask": lambda x: torch.where(x >= x.topk(100).values[-1], x, 0.0),
    "a mask, as a part": lambda x: x * (x >= x.topk(100).values[-1:]),
    "the first of many": lambda x: x.topk(500).values[:5],
    "the smallest of many": lambda x: x.topk(100).values.min() + x.topk(99).values.max(),
    "of the smallest": lambda x: x.topk(70, largest=False).values[69],
    "their extremes": lambda x: (x.sort().values.amax(), x.sort().values.amin()),
    "all of a few, and one": lambda x: (x.topk(40).values, x.topk(40).values[-1]),
    "one of a few, and all": lambda x: (x.topk(40).values[7], x.topk(40).indices.sum()),
    "of what is computed": lambda x: (x * 2 - 1).exp().median(),
    "twice": lambda x: (x - x.median()).abs().median(),
    "in heads": lambda x: x.view(4, -1).median(-1).values,
    "over heads": lambda x: x.view(4, -1).kthvalue(2, 0).values.sum(),
    "of all heads": lambda x: x.view(4, -1).median(),
    "of a part": lambda x: x[:300].median() + x[300:].median(),
    "of parts": lambda x: torch.cat((x[:300], x)).median(),
    "of pairs": lambda x: x[::2].median() - x[1::2].quantile(0.3),
    "of groups": lambda x: x.view(-1, 8).median(-1).values.sum(),
    "of a turned row": lambda x: x.flip(-1).kthvalue(321).values,
    "of a moved row": lambda x: x.roll(3, -1).kthvalue(321).values,
    "of a scan": lambda x: x.cumsum(-1).median(),
    "of equal elements": lambda x: (x.sum() * torch.ones(800)).median(),
    "of the column": lambda x: torch.arange(x.shape[-1]).float().median() * x,
    "few in order": lambda x: torch.msort(x[:20]),
    "a whole sort, unused": lambda x: (x, x.sort())[0],
}


@pytest.mark.parametrize("name", CASES)
def test_cases(name):
    f = htile.rowwise(CASES[name])
    x = torch.randn(5, 800, generator=torch.Generator().manual_seed(3))
    assert_close(f, f(x), x)


@pytest.mark.parametrize("name", ("the smallest of many", "their extremes"))
def test_a_least_of_many_is_nan_if_any_is(name):
    f, x = htile.rowwise(CASES[name]), torch.randn(2, 800)
    x[0, 5] = NAN
    assert_close(f, f(x), x)


GRADIENTS = {
    "kthvalue": lambda x: x.kthvalue(70).values * x.sum(),
    "median": lambda x: (x - x.median()).square(),
    "median of dim": lambda x: x.median(-1).values.exp() * x,
    "nanmedian": lambda x: x.nanmedian() * x,
    "quantile": lambda x: x.quantile(0.3).sin() * x,
    "threshold": lambda x: torch.where(x >= x.topk(90).values[-1], x, 0.0).square().sum(),
    "value of a threshold": lambda x: (x - x.topk(90).values[-1]).sigmoid(),
    "deviation": lambda x: ((x - x.median()).abs().median() + 1).log() * x,
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_those_of_float64(name):
    function = GRADIENTS[name]
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(5))
    own, exact = x.clone().requires_grad_(), x.double().requires_grad_()
    found = htile.rowwise(function)(own)
    expected = torch.stack([function(row) for row in exact])
    g = torch.randn(found.shape, generator=torch.Generator().manual_seed(6))
    found.backward(g)
    expected.backward(g.double())
    torch.testing.assert_close(own.grad.double(), exact.grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", GRADIENTS)
def test_tangents_are_those_of_float64(name):
    function = GRADIENTS[name]
    generator = torch.Generator().manual_seed(7)
    x, t = torch.randn(2, 4, 200, generator=generator)
    _, found = torch.func.jvp(htile.rowwise(function), (x,), (t,))
    pairs = zip(x.double(), t.double(), strict=True)
    rows = [torch.func.jvp(function, (a,), (b,))[1] for a, b in pairs]
    torch.testing.assert_close(found.double(), torch.stack(rows), rtol=1e-5, atol=1e-5)


def test_the_gradient_is_that_of_the_element_with_the_index():
    x = torch.zeros(1, 200).requires_grad_()
    value, place = htile.rowwise(lambda x: x.median(-1))(x)
    value.sum().backward()
    assert x.grad.nonzero().tolist() == [[0, place.item()]]


@pytest.mark.parametrize(
    ("f", "error", "says"),
    [
        (lambda x: x.topk(100).values, UnsupportedError, "at most 64 are found at once"),
        (lambda x: x.sort().values, UnsupportedError, "values[k - 1]"),
        (lambda x: x.argsort(), UnsupportedError, "at most 64"),
        (lambda x: x.argsort()[100:110], UnsupportedError, "The first or last few"),
        (lambda x: x.topk(100).values[-3:], UnsupportedError, "The first few can be taken"),
        (lambda x: x.topk(65).indices, UnsupportedError, "at most 64"),
        (lambda x: x.kthvalue(0), ShapeError, "from 1 to 800"),
        (lambda x: x.kthvalue(801), ShapeError, "from 1 to 800"),
        (lambda x: x.kthvalue(x.sum()), ShapeError, "from 1 to 800"),
        (lambda x: x.kthvalue(3, 1), ShapeError, "a row has one axis"),
        (lambda x: x.long().median(), DtypeError, "median of int64"),
        (lambda x: (x > 0).median(), DtypeError, "median of bool"),
        (lambda x: x.bfloat16().quantile(0.5), DtypeError, "write x.float()"),
        (lambda x: x.quantile(1.5), TraceError, "from 0 to 1"),
        (lambda x: x.quantile(0.5, interpolation="cubic"), TraceError, "linear"),
        (lambda x: x.quantile("0.5"), TraceError, "a number from 0 to 1"),
        (lambda x: x.quantile(x.view(4, -1)), ShapeError, "a number or a vector"),
        (lambda x: x.to(torch.float8_e4m3fn).median(), DtypeError, "convert it first"),
    ],
)  # fmt: skip
def test_mistakes(f, error, says):
    with pytest.raises(error) as caught:
        htile.rowwise(f)(torch.randn(2, 800))
    assert says in str(caught.value) and "test_order_statistics.py" in str(caught.value)


def test_rows_that_registers_do_not_hold_are_refused():
    f = htile.rowwise(lambda x: x.median())
    with pytest.raises(UnsupportedError, match="an element by its rank in rows of 1000000"):
        f.inspect(torch.empty(2, 1000000), arch="sm_90a")


def test_ranks_of_one_stage_share_their_exchanges():
    f = htile.rowwise(lambda x: (x.kthvalue(100).values, x.kthvalue(300).values))
    kernel = f.inspect(torch.empty(64, 4096, dtype=BF16), arch="sm_90a")
    assert sum(node.op is Op.KTHVALUE for node in kernel.graph) == 2
    assert kernel.source.count("ctx.kthvalue(") == 1
    assert "zero_bits=16" in kernel.source
    assert kernel.plan.slots == 2 * 16

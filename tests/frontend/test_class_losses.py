"""`F.nll_loss` and `F.cross_entropy` of one row, held against torch and against the oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.ops import Op
from htile.lower.reductions import by_stage
from htile.testing import assert_close, ulp
from tests.gradients import check

INF, NAN = math.inf, math.nan
F32, F64 = torch.float32, torch.float64
REDUCTIONS = ("none", "sum", "mean")
SMOOTHED = (0.0, 0.1, 1.0)


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(result, exact, single):
    """Each row's loss by the bound of `assert_close`; NaN and infinities where float64 has them.

    single: torch's own result in float32.
    """
    rounded = exact.to(result.dtype)
    special = ~rounded.isfinite()
    torch.testing.assert_close(result[special], rounded[special], rtol=0, atol=0, equal_nan=True)
    errors = ((result.double() - exact).abs(), (single.double() - exact).abs())
    error, error32 = (e[~special].amax().item() if (~special).any() else 0.0 for e in errors)
    largest = exact[~special].abs().amax() if (~special).any() else torch.tensor(1.0)
    assert error <= 2 * error32 + 2 * ulp(largest, result.dtype).item()


def by_row(loss, *args):
    """torch's loss of each row, in float64 and in float32."""

    def apply(dtype):
        given = [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                 for a in args]  # fmt: skip
        m = given[0].shape[0]
        rows = [tuple(a[k] if a.ndim and a.shape[0] == m else a for a in given) for k in range(m)]
        return torch.stack([loss(*row) for row in rows])

    return apply(F64), apply(F32)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_nll_loss(reduction, weighted):
    n, y = 11, torch.tensor([0, 10, 5, -100, 3, 7])
    x, w = random(6, n).log_softmax(-1), random(n, seed=1).abs()

    @htile.rowwise
    def f(x, y: htile.PerRow, w):
        return F.nll_loss(x, y, weight=w if weighted else None, reduction=reduction)

    assert_close(f, f(x, y, w), x, y, w)
    loss = lambda x, y: F.nll_loss(x, y, w.to(x.dtype) if weighted else None, reduction=reduction)  # noqa: E731
    close(f(x, y, w), *by_row(loss, x, y))


def cases():
    return itertools.product(REDUCTIONS, (False, True), SMOOTHED)


@pytest.mark.parametrize("n", [1, 2, 11, 1000])
@pytest.mark.parametrize(("reduction", "weighted", "smoothing"), cases())
def test_cross_entropy(reduction, weighted, smoothing, n):
    """Of labels, among them one that is ignored, and of logits of every size."""
    y = torch.tensor([0, n - 1, n // 2, -100, 0, n // 3, n - 1, 0])
    x, w = random(8, n, scale=3.0), random(n, seed=1).abs() + 0.1
    x[4], x[6] = x[4] * 30, x[6] + 40

    @htile.rowwise
    def f(x, y: htile.PerRow, w):
        return F.cross_entropy(
            x, y, w if weighted else None, reduction=reduction, label_smoothing=smoothing
        )

    def loss(x, y):
        return F.cross_entropy(
            x, y, w.to(x.dtype) if weighted else None, reduction=reduction,
            label_smoothing=smoothing,
        )  # fmt: skip

    close(f(x, y, w), *by_row(loss, x, y))
    if not (smoothing and reduction == "mean"):  # torch's masked_select does not go with vmap
        assert_close(f, f(x, y, w), x, y, w)


@pytest.mark.parametrize(("reduction", "weighted", "smoothing"), cases())
def test_cross_entropy_of_shares(reduction, weighted, smoothing):
    x, t, w = random(9, 13, scale=3.0), random(9, 13, seed=2).softmax(-1), random(13, seed=1).abs()

    @htile.rowwise
    def f(x, t, w):
        return F.cross_entropy(
            x, t, w if weighted else None, reduction=reduction, label_smoothing=smoothing
        )

    assert_close(f, f(x, t, w), x, t, w)


@pytest.mark.parametrize(("reduction", "weighted", "smoothing"), cases())
def test_a_batch_of_one(reduction, weighted, smoothing):
    """As code has it that calls the loss with x[None] and y[None]."""
    y, x, w = torch.tensor([0, 12, -100, 4]), random(4, 13), random(13, seed=1).abs()

    @htile.rowwise
    def f(x, y: htile.PerRow, w):
        weight, more = w if weighted else None, {"label_smoothing": smoothing}
        first = F.cross_entropy(x[None], y[None], weight, reduction=reduction, **more)
        second = F.nll_loss(x.unsqueeze(0), y.unsqueeze(0), weight, reduction=reduction)
        shares = F.cross_entropy(x[None], w[None], weight, reduction=reduction, **more)
        return first, second, shares

    found = f(x, y, w)
    for k in range(4):
        expected = f._fn(x[k], y[k], w)
        for mine, theirs in zip(found, expected, strict=True):
            assert mine[k].shape == theirs.shape
            torch.testing.assert_close(mine[k], theirs, equal_nan=True)


@pytest.mark.parametrize("smoothing", SMOOTHED)
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_special_logits(reduction, smoothing):
    """A class that is impossible, one that is certain, all impossible, and NaN anywhere."""
    n, y = 5, torch.tensor([1, 1, 1, 1, 1, 1, 1, 1])
    x = random(8, n)
    x[0, 2] = -INF
    x[1, 1] = -INF
    x[2, 1] = INF
    x[3, 3] = INF
    x[4] = -INF
    x[5, 1] = NAN
    x[6, 4] = NAN
    x[7] = torch.tensor([-INF, 2.0, -INF, -INF, -INF])
    f = htile.rowwise(lambda x, y: F.cross_entropy(
        x, y[..., 0], reduction=reduction, label_smoothing=smoothing))  # fmt: skip
    loss = lambda x, y: F.cross_entropy(x, y, reduction=reduction, label_smoothing=smoothing)  # noqa: E731
    close(f(x, y[:, None]), *by_row(loss, x, y))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_special_shares(reduction):
    """0 times an infinite logarithm is NaN, as in torch."""
    x, t = random(4, 5), random(4, 5, seed=1).softmax(-1)
    x[0, 2], x[1, 2], x[2, 2] = -INF, INF, NAN
    t[0, 2] = 0.0
    t[3, 1] = 0.0
    f = htile.rowwise(lambda x, t: F.cross_entropy(x, t, reduction=reduction))
    assert_close(f, f(x, t), x, t)


@pytest.mark.parametrize("ignored", [-100, -1, 2, 10**12])
@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_ignored_classes(reduction, ignored):
    """One that is a class too is ignored all the same."""
    y = torch.tensor([ignored, 0, 4, ignored])
    x = random(4, 5)

    @htile.rowwise
    def f(x, y: htile.PerRow):
        return (
            F.cross_entropy(x, y, ignore_index=ignored, reduction=reduction),
            F.nll_loss(x, y, ignore_index=ignored, reduction=reduction),
            F.cross_entropy(x, y, None, None, ignored, None, reduction, 0.2),
        )

    for got, loss in zip(f(x, y), (
        lambda x, y: F.cross_entropy(x, y, ignore_index=ignored, reduction=reduction),
        lambda x, y: F.nll_loss(x, y, ignore_index=ignored, reduction=reduction),
        lambda x, y: F.cross_entropy(x, y, ignore_index=ignored, reduction=reduction,
                                     label_smoothing=0.2),
    ), strict=True):  # fmt: skip
        close(got, *by_row(loss, x, y))


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_class_beyond_the_end_gives_nan(reduction):
    """torch raises there. A negative class does not count from the end."""
    y, x, w = torch.tensor([5, -1, 10**12, -(2**63)]), random(4, 5), torch.ones(5)

    @htile.rowwise
    def f(x, y: htile.PerRow, w):
        return (
            F.cross_entropy(x, y, reduction=reduction), F.nll_loss(x, y, reduction=reduction),
            F.cross_entropy(x, y, w, label_smoothing=0.5, reduction=reduction),
        )  # fmt: skip

    for result in f(x, y, w):
        assert result.isnan().all()


def test_a_weight_of_zero():
    x, y, w = random(2, 3), torch.tensor([1, 0]), torch.tensor([2.0, 0.0, 1.0])

    @htile.rowwise
    def f(x, y: htile.PerRow, w):
        return F.nll_loss(x, y, w), F.nll_loss(x, y, w, reduction="sum")

    assert_close(f, f(x, y, w), x, y, w)
    assert f(x, y, w)[0].isnan().tolist() == [True, False]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_logits_of_16_bits(dtype):
    x, y = random(64, 300, scale=4.0).to(dtype), torch.arange(64) * 5 % 300

    @htile.rowwise
    def f(x, y: htile.PerRow):
        return F.cross_entropy(x, y), F.cross_entropy(x.float(), y, reduction="none")

    assert_close(f, f(x, y), x, y)
    assert f(x, y)[1].dtype is F32


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_it_takes_two_stages_and_one_loop(weighted, smoothing):
    """With z-loss too: everything but the sum of exponentials is in the first stage."""

    @htile.rowwise
    def f(x, y: htile.PerRow, w):
        weight = w if weighted else None
        lse = torch.logsumexp(x, -1)
        return F.cross_entropy(x, y, weight, label_smoothing=smoothing) + 1e-4 * lse * lse

    x, y, w = (torch.empty(s, device="meta") for s in ((4, 1 << 20), (4,), (1 << 20,)))
    plan = f.inspect(x, y.long(), w, arch="sm_90a").plan
    assert len(by_stage(plan.graph)) == 2 and len(plan.sweeps.loops) == 1


FEW_SCORES = {
    "of the largest": lambda x: F.cross_entropy(x.topk(3).values, torch.tensor(0)),
    "of numbers of the row": lambda x: F.cross_entropy(
        torch.stack((x[0], x.amax(), x.mean())), torch.tensor(1), label_smoothing=0.1),
    "of one beside others": lambda x: F.cross_entropy(
        torch.cat((x[:1], x[5:9])), torch.tensor(0), reduction="sum"),
    "of shares": lambda x: F.cross_entropy(
        torch.stack((x[0], x[1])), torch.stack((x[2], 1 - x[2]))),
    "of logarithms": lambda x: F.nll_loss(
        torch.stack((x[0], x[1])).log_softmax(-1), torch.tensor(1)),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_SCORES)
def test_losses_of_a_few_computed_scores(name):
    f = htile.rowwise(FEW_SCORES[name])
    torch.manual_seed(0)
    x = torch.rand(4, 20)
    expected = torch.stack([FEW_SCORES[name](row.double()) for row in x])
    torch.testing.assert_close(f(x).double(), expected, rtol=1e-5, atol=1e-6)
    check(f, x, tolerance=1e-7)


@pytest.mark.parametrize("offset", [0.0, 100.0, 1e4, -1e6, 1e6])
@pytest.mark.parametrize("weighted", [False, True])
def test_no_digits_are_lost_where_all_logits_are_large(offset, weighted):
    """Of shares and with smoothing the loss has sums over all classes; their gradients too."""
    x = torch.randn(9, 11, generator=torch.Generator().manual_seed(3)) + offset
    t, w, y = random(9, 11, seed=2).softmax(-1), random(11, seed=1).abs() + 0.1, torch.arange(9)

    def shares(x, t, w):
        return F.cross_entropy(x, t, w.to(x.dtype) if weighted else None)

    def smoothed(x, y: htile.PerRow, w):
        return F.cross_entropy(x, y, w.to(x.dtype) if weighted else None, label_smoothing=0.2)

    for f, target in ((shares, t), (smoothed, y)):
        given, exact = x.clone().requires_grad_(), x.double().requires_grad_()
        found = htile.rowwise(f)(given, target, w)
        wide = target.double() if target.is_floating_point() else target
        pairs = zip(exact, wide, strict=True)
        right = torch.stack([f(row, each, w.double()) for row, each in pairs])
        torch.testing.assert_close(found.double(), right, rtol=2e-6, atol=1e-6)
        (ours,) = torch.autograd.grad(found.sum(), given)
        (theirs,) = torch.autograd.grad(right.sum(), exact)
        torch.testing.assert_close(ours.double(), theirs, rtol=2e-6, atol=1e-6)


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("n", [49, 1000, 8192])
def test_gradients_do_not_ask_for_the_maximum(n, weighted):
    """The losses are the same below any number, so no element is compared with the maximum."""

    def shares(x, t, w):
        return F.cross_entropy(x, t, w if weighted else None)

    def smoothed(x, y: htile.PerRow, w):
        return F.cross_entropy(x, y, w if weighted else None, label_smoothing=0.2, reduction="sum")

    def even(x, t, w):
        below = x - x.amax()
        return torch.log(torch.exp(below).sum()) - below.sum() * (1 / n)

    rows = torch.empty(4, n, device="meta", requires_grad=True)
    labels = torch.empty(4, dtype=torch.int64, device="meta")
    for f, target in ((shares, rows.detach()), (smoothed, labels), (even, rows.detach())):
        w = torch.empty(n, device="meta")
        graph = htile.rowwise(f).inspect(rows, target, w, arch="sm_90a").backward.graph
        elements = [node for node in graph if node.value.spread and node.op is Op.EQ]
        of_x = [node for node in elements if node.value.dtype is torch.bool
                and graph[node.inputs[0]].op is not Op.INDEX]  # fmt: skip
        assert not of_x


@pytest.mark.parametrize("masked", [-1e4, -1e9, torch.finfo(F32).min, -INF])
@pytest.mark.parametrize("weights", [None, (0.0, 1.0, 2.0, 0.5), (1.0, 1.0, 2.0, 0.5)])
def test_smoothing_where_the_score_of_the_class_is_masked(masked, weights):
    """The loss is large, or it is that of the other classes if this one has no weight."""
    x, y = torch.tensor([[masked, -2.0, 0.5, 3.0]]), torch.tensor([0])

    @htile.rowwise
    def f(x, y: htile.PerRow):
        w = None if weights is None else torch.tensor(weights)
        return F.cross_entropy(x, y, w, reduction="sum", label_smoothing=0.1)

    w = None if weights is None else torch.tensor(weights)
    exact = F.cross_entropy(x[0], y[0], w, reduction="sum", label_smoothing=0.1)
    torch.testing.assert_close(f(x, y)[0], exact, rtol=1e-6, atol=0, equal_nan=True)

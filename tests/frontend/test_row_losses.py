"""Losses of margins, distances and variances, against torch's own of each row and the oracle."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import DtypeError, HTileError, ShapeError, TraceError
from htile.testing import assert_close
from tests.frontend.test_class_losses import by_row, close, random
from tests.gradients import check, check_second, check_tangents

NAN = math.nan
F32 = torch.float32
M, N = 7, 37
REDUCTIONS = ("none", "sum", "mean")
SIGNS = random(M, N, seed=3).sign()
SIGN = torch.tensor([1.0, -1.0, 1.0, -1.0, -1.0, 1.0, 0.0])
CLASS = torch.tensor([0, 36, 5, 17, 3, 3, 11])
VARIANCES = random(M, N, seed=4).square() + 1e-7

# name: (loss, the arguments of all rows); of a sign, a variance or a class of each row too
LOSSES = {
    "gaussian_nll_loss, float": (
        lambda x, y, **r: F.gaussian_nll_loss(x, y, 0.7, **r), "xy"),
    "gaussian_nll_loss, small": (
        lambda x, y, **r: F.gaussian_nll_loss(x, y, 0.0, True, 1e-3, **r), "xy"),
    "gaussian_nll_loss, full": (
        lambda x, y, v, **r: F.gaussian_nll_loss(x, y, v, full=True, eps=1e-3, **r), "xyv"),
    "gaussian_nll_loss": (lambda x, y, v, **r: F.gaussian_nll_loss(x, y, v, **r), "xyv"),
    "gaussian_nll_loss, a row": (
        lambda x, y, s, **r: F.gaussian_nll_loss(x, y, s.abs() + 0.5, **r), "xys"),
    "cosine_embedding_loss": (lambda x, y, s, **r: F.cosine_embedding_loss(x, y, s, **r), "xys"),
    "cosine_embedding_loss, margin": (
        lambda x, y, s, **r: F.cosine_embedding_loss(x, 0.5 * x + y, s, margin=0.3, **r), "xys"),
    "margin_ranking_loss": (lambda x, y, t, **r: F.margin_ranking_loss(x, y, t, **r), "xyt"),
    "margin_ranking_loss, margin": (
        lambda x, y, t, **r: F.margin_ranking_loss(x, y, t, 0.4, **r), "xyt"),
    "margin_ranking_loss, numbers": (
        lambda x, y, s, **r: F.margin_ranking_loss(x.sum(), y.sum(), s, 0.4, **r), "xys"),
    "hinge_embedding_loss": (lambda x, t, **r: F.hinge_embedding_loss(x, t, **r), "xt"),
    "hinge_embedding_loss, margin": (
        lambda x, y, **r: F.hinge_embedding_loss(x, y.round(), margin=0.2, **r), "xy"),
    "triplet_margin_loss": (lambda x, y, z, **r: F.triplet_margin_loss(x, y, z, **r), "xyz"),
    "triplet_margin_loss, swap": (
        lambda x, y, z, **r: F.triplet_margin_loss(x, y, z, 2.5, 3, 1e-3, True, **r), "xyz"),
    "triplet_margin_loss, 1": (
        lambda x, y, z, **r: F.triplet_margin_loss(x, y, z, 9, p=1, **r), "xyz"),
    "multi_margin_loss": (lambda x, c, **r: F.multi_margin_loss(x, c, **r), "xc"),
    "multi_margin_loss, squares": (
        lambda x, c, **r: F.multi_margin_loss(x, c, p=2, margin=0.3, **r), "xc"),
    "multi_margin_loss, weight": (
        lambda x, c, w, **r: F.multi_margin_loss(x, c, weight=w, **r), "xcw"),
    "multi_margin_loss, a batch of one": (
        lambda x, c, **r: F.multi_margin_loss(x[None], c[None], **r), "xc"),
    "multi_margin_loss, a few rows": (lambda x, c, w, **r: F.multi_margin_loss(
        x[:36].view(3, 12), torch.stack((c % 12, c % 5, c % 7)), p=2, weight=w[:12], **r), "xcw"),
    "multilabel_soft_margin_loss": (
        lambda x, t, **r: F.multilabel_soft_margin_loss(x, (t + 1) / 2, **r), "xt"),
    "multilabel_soft_margin_loss, weight": (
        lambda x, y, w, **r: F.multilabel_soft_margin_loss(x * 30, y.abs(), w, **r), "xyw"),
}  # fmt: skip
BY_ROW_ONLY = {"gaussian_nll_loss, full", "gaussian_nll_loss", "gaussian_nll_loss, a row"}


def values(letters):
    rows = {letter: random(M, N, seed=k) for k, letter in enumerate("xyz")}
    return [
        rows[each] if each in rows else {
            "t": SIGNS, "s": SIGN, "c": CLASS, "v": VARIANCES, "w": random(N, seed=5).abs() + 0.1,
        }[each]
        for each in letters
    ]  # fmt: skip


def rowwise(name, how):
    """The loss with a reduction, as a row-wise function of its arguments."""
    loss, letters = LOSSES[name]
    if letters == "xys":
        def f(x, y, s: htile.PerRow):
            return loss(x, y, s, reduction=how)
    elif letters == "xc":
        def f(x, c: htile.PerRow):
            return loss(x, c, reduction=how)
    elif letters == "xcw":
        def f(x, c: htile.PerRow, w):
            return loss(x, c, w, reduction=how)
    elif len(letters) == 2:
        def f(x, y):
            return loss(x, y, reduction=how)
    else:
        def f(x, y, z):
            return loss(x, y, z, reduction=how)
    return htile.rowwise(f)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize("name", LOSSES)
def test_values(name, reduction):
    """Those of torch's loss of each row, and of all rows under torch.vmap."""
    f, args = rowwise(name, reduction), values(LOSSES[name][1])
    loss = LOSSES[name][0]
    result = f(*args)
    exact, single = by_row(lambda *row: loss(*row, reduction=reduction), *args)
    assert result.shape == exact.shape
    close(result, exact, single)
    if name not in BY_ROW_ONLY:  # of a variance torch asks whether any is negative
        assert_close(f, result, *args)


@pytest.mark.parametrize("name", LOSSES)
def test_16_bits(name):
    """They are computed in float32."""
    f, args = rowwise(name, "mean"), values(LOSSES[name][1])
    args = [a.bfloat16() if a.dtype is F32 else a for a in args]
    result = f(*args)
    exact, _ = by_row(lambda *row: LOSSES[name][0](*row, reduction="mean"), *args)
    torch.testing.assert_close(result, exact.to(result.dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", [name for name in LOSSES if name not in BY_ROW_ONLY])
def test_derivatives(name):
    f, args = rowwise(name, "mean"), values(LOSSES[name][1])
    check(f, *args, wrt=("x",) if "multi_margin" in name else None)
    if "multi_margin" not in name:  # of which torch has no second derivative, and no tangent
        check_second(f, *args)
        check_tangents(f, *args)


OF_A_NUMBER = {
    "margin_ranking_loss": lambda x, y, z, a: F.margin_ranking_loss(x, y, z, margin=a),
    "hinge_embedding_loss": lambda x, y, z, a: F.hinge_embedding_loss(x, z.sign(), margin=a),
    "triplet_margin_loss": lambda x, y, z, a: F.triplet_margin_loss(x, y, z, margin=a, swap=True),
    "smooth_l1_loss": lambda x, y, z, a: F.smooth_l1_loss(x, y, beta=a) + z.sum(-1) * 0,
    "huber_loss": lambda x, y, z, a: F.huber_loss(x, y, delta=a) + z.sum(-1) * 0,
    "celu": lambda x, y, z, a: (F.celu(x, a) * y + F.elu(z, a)).sum(-1),
}


@pytest.mark.parametrize("number", [0.25, 1.0, 3])
@pytest.mark.parametrize("name", OF_A_NUMBER)
def test_a_number_may_be_an_argument(name, number):
    """It is one kernel for all numbers."""
    loss, (x, y, z) = OF_A_NUMBER[name], values("xyz")

    @htile.rowwise
    def f(x, y, z, a: float):
        return loss(x, y, z, a)

    found = f(x, y, z, number)
    assert_close(f, found, x, y, z, number)
    exact, single = by_row(lambda x, y, z: loss(x, y, z, number), x, y, z)
    close(found, exact, single)
    check(f, x, y, z, number)


def test_the_slope_of_a_beta_of_0_is_torchs():
    f = htile.rowwise(lambda x, y, beta: F.smooth_l1_loss(x, y, beta=beta))
    x = torch.tensor([[1.0, 2.0, 0.5, 0.5]], requires_grad=True)
    y = torch.tensor([[1.0, 1.0, 0.5, 2.0]])
    for beta in (0.0, 0.25):
        found = torch.autograd.grad(f(x, y, beta).sum(), x)[0]
        (exact,) = torch.autograd.grad(F.smooth_l1_loss(x, y, beta=beta), x)
        torch.testing.assert_close(found, exact)


def test_gradients_of_variances():
    """torch clamps them beside autograd: the slope goes on below eps."""
    x, y, v = values("xyv")
    v[:, ::3] = 1e-4
    f = htile.rowwise(lambda x, y, v: F.gaussian_nll_loss(x, y, v, eps=1e-3, reduction="sum"))
    given = [a.clone().requires_grad_() for a in (x, y, v)]
    f(*given).sum().backward()
    exact = [a.double().requires_grad_() for a in (x, y, v)]
    F.gaussian_nll_loss(*exact, eps=1e-3, reduction="sum").backward()
    for found, right in zip(given, exact, strict=True):
        torch.testing.assert_close(found.grad, right.grad.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_edges_of_margins():
    """At the corner of a hinge the slope is torch's, of NaN the value too."""
    x = torch.tensor([[1.0, 0.0, 2.0, -1.0, NAN, 1.0], [0.0, 1.0, 0.5, 1.0, 0.25, 3.0]])
    y = torch.tensor([[1.0, 1.0, 0.0, -2.0, 1.0, NAN], [0.0, 0.0, 0.0, 0.0, 0.0, 0.0]])
    t = torch.tensor([[1.0, -1.0, 1.0, -1.0, 1.0, -1.0]] * 2)
    ranking = htile.rowwise(lambda x, y, t: F.margin_ranking_loss(x, y, t, 1.0))
    check(ranking, x, y, t, wrt=("x", "y"))  # torch's of t is 0 times NaN
    check(htile.rowwise(lambda x, t: F.hinge_embedding_loss(x, t, 1.0)), x, t)

    @htile.rowwise
    def classes(x, c: htile.PerRow):
        return F.multi_margin_loss(x, c), F.multi_margin_loss(x, c, p=2)

    for c in itertools.product((0, 4, 5), (0, 1, 2)):
        c = torch.tensor(c)
        check(classes, x, c)
        for result, p in zip(classes(x, c), (1, 2), strict=True):
            close(result, *by_row(lambda x, c, p=p: F.multi_margin_loss(x, c, p=p), x, c))


def test_what_torch_raises_for_values_is_nan():
    @htile.rowwise
    def f(x, c: htile.PerRow):
        losses = F.gaussian_nll_loss(x, x, x - 1.0, reduction="none")
        return F.multi_margin_loss(x, c), losses.isnan()

    x = torch.tensor([[0.5, 1.0, 2.0]] * 4)
    loss, is_nan = f(x, torch.tensor([-1, 3, 0, 2]))
    assert loss.isnan().tolist() == [True, True, False, False]
    assert is_nan.tolist() == [[True, False, False]] * 4


def test_groups_of_a_row():
    """Of axes inside the function a sample is what torch takes for one."""
    @htile.rowwise
    def f(x, y, t):
        a, b = x.view(6, 4), y.view(6, 4)
        return (
            F.cosine_embedding_loss(a, b, t[:6].sign(), reduction="none"),
            F.cosine_embedding_loss(a, b, t[:6].sign()),
            F.triplet_margin_loss(a, b, a * b, reduction="none"),
            F.triplet_margin_loss(a, b, a * b, reduction="sum"),
            F.multilabel_soft_margin_loss(a, b.abs(), reduction="none"),
            F.multilabel_soft_margin_loss(a, b.abs()),
            F.hinge_embedding_loss(a, b.sign()), F.margin_ranking_loss(a, b, b.sign()),
        )  # fmt: skip

    args = [random(M, 24, seed=k) for k in range(3)]
    for result in f(*args), f(*args[:2], args[2].sign()):
        assert [r.shape[1:] for r in result[:3]] == [(6,), (), (6,)]
    assert_close(f, f(*args), *args)
    gaussian = htile.rowwise(lambda x, y, t: F.gaussian_nll_loss(
        x.view(6, 4), y.view(6, 4), t[:6].abs() + 0.1, reduction="none").view(-1))  # fmt: skip
    given = zip(*(a.double() for a in args), strict=True)
    exact = torch.stack([gaussian._fn(*row) for row in given])
    torch.testing.assert_close(gaussian(*args), exact.float(), rtol=1e-5, atol=1e-5)


def test_rows_of_any_length():
    f = htile.rowwise(lambda x, y: (F.hinge_embedding_loss(x, y.sign()),
                                    F.multilabel_soft_margin_loss(x, y.abs())), dynamic_n=True)
    x, y = values("xy")
    assert_close(f, f(x, y), x, y)


TAKEN_BY_TORCH = ("an old parameter", "a margin")
WRONG = {
    "reduction": (lambda x, y: F.margin_ranking_loss(x, y, y, reduction="max"), TraceError,
                  "expected 'none', 'mean' or 'sum'"),
    "an old parameter": (lambda x, y: F.hinge_embedding_loss(x, y, size_average=False), TraceError,
                         "hinge_embedding_loss(size_average=, reduce=) is old"),
    "a margin": (lambda x, y: F.hinge_embedding_loss(x, y, x.sum()), TraceError,
                 "hinge_embedding_loss(margin=...) of a symbolic value: write a Python number"),
    "shapes": (lambda x, y: F.margin_ranking_loss(x, y, y.sum()), ShapeError,
               "(4,), (4,), (): they have as many dimensions"),
    "a number": (lambda x, y: F.margin_ranking_loss(x, 1.0, y), TraceError, "torch.full_like"),
    "a row of targets": (lambda x, y: F.cosine_embedding_loss(x, y, y), ShapeError,
                         "a target of shape ()"),
    "no row": (lambda x, y: F.cosine_embedding_loss(x, y.sum(), y.sum()), ShapeError,
               "as many dimensions"),
    "no margin": (lambda x, y: F.triplet_margin_loss(x, y, y, margin=0), TraceError,
                  "expected a number above 0"),
    "triplets": (lambda x, y: F.triplet_margin_loss(x, y, y.sum()), ShapeError, "(4,), (4,), ()"),
    "a power": (lambda x, y: F.multi_margin_loss(x, y[0].long(), p=3), TraceError,
                "multi_margin_loss(p=3): expected 1 or 2"),
    "classes": (lambda x, y: F.multi_margin_loss(x, y), ShapeError, "is one int64 a row"),
    "weights": (lambda x, y: F.multi_margin_loss(x, y[0].long(), weight=y.sum()), ShapeError,
                "a weight for each class"),
    "integers": (lambda x, y: F.multilabel_soft_margin_loss(x.int(), y), DtypeError, "x.float()"),
    "a negative variance": (lambda x, y: F.gaussian_nll_loss(x, y, -1.0), TraceError, "var=-1.0"),
    "an integer": (lambda x, y: F.gaussian_nll_loss(x, y, 1), TraceError, "expected a tensor, or"),
    "variances": (lambda x, y: F.gaussian_nll_loss(x, y, y[:3]), ShapeError,
                  "a variance of shape (3,) and an input of shape (4,)"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_errors(name):
    body, kind, message = WRONG[name]
    f = htile.rowwise(lambda x, y: body(x, y))
    with pytest.raises(HTileError) as caught:
        f(torch.ones(2, 4), torch.ones(2, 4))
    assert type(caught.value) is kind and message in str(caught.value), str(caught.value)
    if name not in TAKEN_BY_TORCH:
        with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError)):
            body(torch.ones(4), torch.ones(4))


@pytest.mark.parametrize("name", LOSSES)
def test_kernels_compile(name):
    used = rowwise(name, "mean").inspect(*values(LOSSES[name][1]), arch="sm_90a").resources
    assert used.stack == 0

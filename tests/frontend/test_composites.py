"""Every composite against float64 torch, over its whole domain: the bound of DESIGN section 6.

A row holds values of one size, so a row's bound is that of its own magnitude: twice the error of
torch's float32 evaluation of the row, plus two units in the last place of its largest result.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.functions import FUNCTIONS
from htile.testing import assert_close, ulp

INF, NAN = math.inf, math.nan
SIZES = [s * 10.0**e for e in (*range(-44, 39, 3), -1, 0, 1, 2, 38) for s in (1, -1)]
CLOSE = (
    0.25,
    0.414,
    0.5,
    0.7,
    0.9,
    0.99,
    1.0,
    1.001,
    1.57,
    2.414,
    3.14,
    5,
    9,
    20,
    39,
    41,
    88,
    89,
    104,
)
NEAR = [s * c for c in CLOSE for s in (1, -1)]
SPECIAL = [0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, 3.4e38, -3.4e38, 1e-45]
WIDE = 64  # elements of a row


def bands(*centres):
    """A row of values about each centre, and one of each special value."""
    generator = torch.Generator().manual_seed(0)
    around = 1 + 0.05 * (2 * torch.rand(WIDE, generator=generator) - 1)
    rows = torch.tensor(centres, dtype=torch.float64)[:, None] * around
    return torch.cat([rows.float(), torch.tensor(SPECIAL)[:, None].expand(-1, WIDE)])


def every(*limits):
    low, high = limits or (-INF, INF)
    return bands(*(c for c in (*SIZES, *NEAR) if low <= c <= high))


def pairs(first=(), second=()):
    """Every value of a few sizes with every other one."""
    sizes = [1e-30, -1e-3, 0.3, 1.0, -2.5, 40.0, 1e19, -1e30]
    a, b = bands(*(first or sizes)), bands(*(second or sizes)).flip(-1)
    both = [(x, y) for x, y in itertools.product(a, b)]
    return torch.stack([x for x, _ in both]), torch.stack([y for _, y in both])


def random(*shape, seed=0, scale=1.0):
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


REALS = (
    "asinh atan sinh cosh atanh asin acos arcsinh arctan arccosh arctanh arcsin arccos acosh sinc "
    "deg2rad rad2deg frac isposinf isneginf signbit logit isfinite"
)
ACTIVATIONS = (
    "selu celu hardshrink softshrink tanhshrink elu softsign silu mish softplus logsigmoid "
    "hardswish hardsigmoid relu6 leaky_relu"
)
OF_TWO = "atan2 arctan2 fmod logaddexp logaddexp2 copysign hypot fmax fmin isclose xlogy heaviside"
SPECIAL_FUNCTIONS = "erfc erfcx log_ndtr erfinv ndtri digamma psi i0 i0e i1 i1e"
UNARY = {
    **{name: (getattr(torch.special, name), every()) for name in SPECIAL_FUNCTIONS.split()},
    # Near the zero at -2.457 the error is that of two terms, as test_special.py has it.
    "lgamma": (torch.lgamma, bands(*(c for c in (*SIZES, *NEAR) if c != -2.414))),
    **{name: (getattr(torch, name), every()) for name in REALS.split()},
    "tan": (torch.tan, bands(*(c for c in (*SIZES, *NEAR) if abs(c) < 1e6))),
    "entr": (torch.special.entr, every()),
    "logit, eps": (lambda x: torch.logit(x, eps=1e-3), every(-2, 2)),
    "nan_to_num, given": (lambda x: x.nan_to_num(1.0, 2.0, -3.0), every()),
    **{name: (getattr(F, name), every(-1e18, INF)) for name in ACTIVATIONS.split()},
    "celu, alpha": (lambda x: F.celu(x, 0.7), every()),
    "shrinks": (lambda x: F.hardshrink(x, 0.25) + F.softshrink(x, 2.0), every()),
    "threshold": (lambda x: F.threshold(x, 0.3, -7.0), every()),
    "prelu": (lambda x: F.prelu(x, torch.full((1,), 0.3, dtype=x.dtype)), every()),
    "dropout of nothing": (lambda x: F.dropout(x, 0.3, False) + F.dropout(x, p=0.0), every()),
}  # fmt: skip
BINARY = {
    **{name: (getattr(torch, name), pairs()) for name in OF_TWO.split()},
    "xlog1py": (lambda x, y: torch.special.xlog1py(x, y.where(y.abs() > 1e-38, 0.0)), pairs()),
    "xlogy, number": (lambda x, y: torch.xlogy(2.0, x) * torch.xlogy(y.sign(), 3), pairs()),
    "fmod, number": (lambda x, y: x.fmod(0.7) + y.fmod(-3), pairs()),
    "copysign, number": (lambda x, y: x.copysign(-0.0), pairs()),
    "isclose, given": (lambda x, y: x.isclose(y, 0.5, 1.0, equal_nan=True), pairs()),
    "float_power": (torch.float_power, pairs((0.3, 1.0, 2.0, 9.0), (0.5, -2.0, 3.0))),
}  # fmt: skip
EITHER_ZERO = (F.relu6, torch.fmax, torch.fmin)  # of -0.0 and 0.0 they may give either
LABELS = (random(40, WIDE, seed=1) > 0).float()
SHARES = torch.softmax(random(40, WIDE, seed=2), -1)
LOSSES = {
    "mse_loss": (F.mse_loss, random(40, WIDE), {}),
    "l1_loss": (F.l1_loss, random(40, WIDE), {}),
    "smooth_l1_loss": (F.smooth_l1_loss, random(40, WIDE), {"beta": 0.3}),
    "smooth_l1_loss, 0": (F.smooth_l1_loss, random(40, WIDE), {"beta": 0.0}),
    "huber_loss": (F.huber_loss, random(40, WIDE, scale=3), {"delta": 0.7}),
    "kl_div": (F.kl_div, torch.log_softmax(random(40, WIDE), -1), {}),
    "kl_div, log": (F.kl_div, torch.log_softmax(random(40, WIDE), -1), {"log_target": True}),
    "binary_cross_entropy": (F.binary_cross_entropy, random(40, WIDE).sigmoid(), {}),
    "binary_cross_entropy, 0 and 1": (F.binary_cross_entropy, LABELS.flip(-1), {}),
    "binary_cross_entropy_with_logits": (
        F.binary_cross_entropy_with_logits, random(40, WIDE, scale=30), {}),
}  # fmt: skip
ROWS = {
    "cosine_similarity": lambda x, y: F.cosine_similarity(x, y, dim=-1),
    "cosine_similarity, overflow": lambda x, y: F.cosine_similarity(x * 1e18, y * 1e-18, dim=0),
    "softmin": lambda x, y: F.softmin(x, dim=-1),
    "nansum": lambda x, y: (torch.where(x > 0, x, NAN).nansum(), y.nansum(-1, True)),
    "nanmean": lambda x, y: (torch.where(x > 0, x, NAN).nanmean(), y.nanmean(-1, True)),
    "cov": lambda x, y: (torch.stack((x, y, x + y)).cov(), torch.cov(x), y.cov(correction=0)),
    "cov, far from 0": lambda x, y: torch.stack((x + 100, y - 30)).cov(),
    "corrcoef": lambda x, y: (torch.stack((x, y, x - y)).corrcoef(), torch.corrcoef(x)),
    "corrcoef of equals": lambda x, y: torch.stack((x, 2 * x, -x)).corrcoef(),
    "native_layer_norm": lambda x, y: torch.native_layer_norm(x, x.shape, y, None, 1e-5)[0],
    "native_layer_norm, moments": lambda x, y: torch.native_layer_norm(x, (WIDE,), y, x, 1e-3)[1:],
}


def check(f, *args):
    """Each row's largest error against its own bound; zeros have the sign of torch's."""
    exact, single = f(*(a.double() for a in args)), f(*args)
    rowwise = htile.rowwise((lambda a: f(a)) if len(args) == 1 else (lambda a, b: f(a, b)))
    result = rowwise(*args)
    if not exact.is_floating_point():
        assert torch.equal(result, exact)
        return
    rounded = exact.float()
    special = ~rounded.isfinite()
    torch.testing.assert_close(result[special], rounded[special], rtol=0, atol=0, equal_nan=True)
    if f not in EITHER_ZERO:
        zero = exact == 0
        assert torch.equal(result[zero].signbit(), exact[zero].signbit()), "the sign of a zero"
    special |= ~single.isfinite()  # torch's float32 overflows
    error, error32 = ((r.double() - exact).abs().where(~special, 0.0) for r in (result, single))
    magnitude = exact.abs().where(~special, 0.0).amax(-1)
    bound = 2 * error32.amax(-1) + 2 * ulp(magnitude, torch.float32)
    ratio = error.amax(-1) / bound
    worst = ratio.argmax()
    assert ratio[worst] <= 1, (ratio[worst].item(), [a[worst, :4] for a in args], result[worst, :4])


@pytest.mark.parametrize("name", UNARY)
def test_unary(name):
    f, x = UNARY[name]
    check(f, x)


@pytest.mark.parametrize("name", BINARY)
def test_binary(name):
    f, (x, y) = BINARY[name]
    check(f, x, y)


@pytest.mark.filterwarnings("ignore:reduction")
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
@pytest.mark.parametrize("name", LOSSES)
def test_losses(name, reduction):
    loss, x, more = LOSSES[name]
    target = LABELS
    if loss is F.kl_div:
        target = SHARES.log() if more else SHARES
    loss = functools.partial(loss, reduction=reduction, **more)
    f = htile.rowwise(lambda x, t: loss(x, t))
    assert_close(f, f(x, target), x, target)


def test_losses_with_weights():
    x, t, w = random(9, WIDE), LABELS[:9], random(9, WIDE, seed=4).abs()

    @htile.rowwise
    def f(x, t, w):
        return (
            F.mse_loss(x, t, weight=w), F.huber_loss(x, t, weight=w), F.l1_loss(x, t, weight=w),
            F.l1_loss(x, t, weight=w, reduction="none"),
            F.binary_cross_entropy(x.sigmoid(), t, weight=w),
            F.binary_cross_entropy_with_logits(x, t, weight=w, pos_weight=w + 1),
            F.kl_div(x, t, reduction="batchmean"),
        )  # fmt: skip

    assert_close(f, f(x, t, w), x, t, w)
    l1, each = f(x, t, w)[2:4]
    torch.testing.assert_close(each, (x - t).abs() * w)
    torch.testing.assert_close(l1, each.sum(-1) / w.sum(-1))


@pytest.mark.parametrize("name", ROWS)
def test_rows(name):
    body = ROWS[name]
    f, x, y = htile.rowwise(lambda x, y: body(x, y)), random(40, WIDE), random(40, WIDE, seed=1)
    assert_close(f, f(x, y), x, y)


def test_nan_to_num_gives_the_limits_of_the_dtype():
    x = torch.tensor([[NAN, INF, -INF, 1.5]])
    f = htile.rowwise(lambda x: (x.nan_to_num(), torch.nan_to_num(x.half(), posinf=2.0)))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        given = x.to(dtype)
        own, half = f(given)
        assert torch.equal(own, given.nan_to_num()) and own.dtype is dtype
        assert torch.equal(half, given.half().nan_to_num(posinf=2.0))


@pytest.mark.parametrize("decimals", [-400, -39, -38, -3, -1, 0, 1, 5, 38, 39, 400])
def test_decimals(decimals):
    """They are torch's own to the bit, also where 10 to that power is infinite in float32."""
    x = torch.cat([random(3, WIDE), random(3, WIDE, scale=1e4), random(3, WIDE, scale=1e-3)])
    f = htile.rowwise(lambda x: (x.round(decimals=decimals), torch.round(x, decimals=decimals)))
    for result in f(x):
        torch.testing.assert_close(result, x.round(decimals=decimals), rtol=0, atol=0,
                                   equal_nan=True)  # fmt: skip


def test_integers():
    i, j = torch.arange(-8, 8).expand(2, 16), torch.tensor([3, -3])[:, None].expand(2, 16)

    @htile.rowwise
    def f(i, j):
        return (i.fmod(j), torch.fmod(i, 5), torch.fmax(i, j), i.fmin(j), i.isclose(j), i.signbit(),
                torch.heaviside(i, j), i.isposinf(), torch.nan_to_num(i), i.nansum())  # fmt: skip

    results, expected = f(i, j), torch.vmap(f._fn)(i, j)
    for got, want in zip(results, expected, strict=True):
        assert got.dtype is want.dtype and torch.equal(got, want)
    reals = htile.rowwise(lambda i, j: (i.sinh(), i.atan(), torch.deg2rad(i), i.sinc(), j.asinh()))
    assert_close(reals, reals(i, j), i, j)


MODULES = "composites", "special", "statistics", "indices", "losses"


def test_every_composite_is_tested():
    """They occur here, or in the test of what their modules and test_trace have."""
    names = ("composites", "special", "trace", "indices", "exponents", "class_losses",
             "row_losses", "order_statistics")
    files = [Path(__file__).with_name(f"test_{name}.py") for name in names]
    words = set(re.findall(r"\w+", " ".join(file.read_text("utf-8") for file in files)))
    for spelling, function in FUNCTIONS.values():
        if function.__module__.endswith(MODULES):
            assert spelling.rsplit(".", 1)[-1] in words, spelling

"""Functions of torch that draw numbers in training, where they draw none: `training=False`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import TraceError, UnsupportedError
from htile.testing import assert_close
from tests.gradients import check

UNDRAWN = {
    "dropout": lambda x: F.dropout(x, 0.5, False),
    "dropout of no share": lambda x: F.dropout(x, 0),
    "torch.dropout": lambda x: torch.dropout(x, 0.5, False),
    "dropout1d": lambda x: F.dropout1d(x[None], training=False)[0],
    "dropout2d": lambda x: F.dropout2d(x.view(2, 2, 2, 2), training=False).flatten(),
    "dropout3d": lambda x: F.dropout3d(x.view(1, 2, 2, 2, 2), training=False).flatten(),
    "alpha_dropout": lambda x: F.alpha_dropout(x),
    "torch.alpha_dropout": lambda x: torch.alpha_dropout(x, 0.5, False),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3),
    "rrelu": lambda x: F.rrelu(x),
    "rrelu of one slope": lambda x: F.rrelu(x, 0.25, 0.5, training=False),
    "torch.rrelu": lambda x: torch.rrelu(x, 0.1, 0.2, False),
    "feature_dropout": lambda x: torch.feature_dropout(x[None], 0.5, False)[0],
    "feature_dropout of no share": lambda x: torch.feature_dropout(x[None], 0.0, train=True)[0],
    "dropout of all": lambda x: F.dropout(x, 1.0),
    "torch.dropout of all": lambda x: torch.dropout(x, p=1, train=True),
    "dropout1d of all": lambda x: F.dropout1d(x[None], p=1.0)[0],
    "feature_dropout of all": lambda x: torch.feature_dropout(x[None], 1.0, True)[0],
    "alpha_dropout of all": lambda x: F.alpha_dropout(x, 1.0, True),
    "feature_alpha_dropout of all": lambda x: F.feature_alpha_dropout(x[None], 1.0, True)[0],
    "rrelu of equal slopes": lambda x: F.rrelu(x, 0.3, 0.3, training=True),
    "rrelu of equal slopes, undrawn": lambda x: F.rrelu(x, 0.1, 0.1),
    "in place": lambda x: (F.rrelu(x, inplace=True), x)[1],
    "in place of all": lambda x: (F.dropout(x, 1.0, inplace=True), x)[1],
}


@pytest.mark.parametrize("name", UNDRAWN)
def test_they_are_torchs(name):
    f = htile.rowwise(UNDRAWN[name])
    x = torch.randn(4, 16)
    x[0, :4] = torch.tensor([0.0, -0.0, float("nan"), float("inf")])
    rows = torch.stack([UNDRAWN[name](row.clone()) for row in x])
    torch.testing.assert_close(f(x), rows, equal_nan=True)
    assert torch.equal(f(x).signbit(), rows.signbit())
    if "rrelu" in name or "in place" in name or " of all" in name:  # torch.vmap knows nothing of it
        return
    assert_close(f, f(x[1:]), x[1:])
    check(f, x[1:])


def test_the_gradient_of_rrelu():
    f = htile.rowwise(lambda x: F.rrelu(x, 0.25, 0.75) * x.sum())
    x = torch.randn(3, 8, requires_grad=True)
    found = torch.autograd.grad(f(x).sum(), x)[0]
    expected = torch.autograd.grad((F.leaky_relu(x, 0.5) * x.sum(-1, True)).sum(), x)[0]
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_they_keep_the_dtype(dtype):
    f = htile.rowwise(lambda x: (F.rrelu(x), F.alpha_dropout(x)))
    x = torch.randn(4, 16).to(dtype)
    for found, expected in zip(f(x), (F.rrelu(x), x), strict=True):
        assert found.dtype is dtype
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("draw", [
    lambda x: F.dropout(x), lambda x: F.alpha_dropout(x, training=True),
    lambda x: F.rrelu(x, training=True), lambda x: F.feature_alpha_dropout(x, 0.5, True),
])  # fmt: skip
def test_what_draws_is_refused(draw):
    with pytest.raises(UnsupportedError, match=r"htile\.dropout"):
        htile.rowwise(draw)(torch.randn(2, 8))


@pytest.mark.parametrize("call", [
    lambda x: F.dropout(x, 1.5, training=False), lambda x: F.dropout(x, -0.5, training=True),
    lambda x: F.dropout(x, float("nan"), training=False), lambda x: torch.dropout(x, 2, False),
    lambda x: F.dropout1d(x[None], 1.5, training=False), lambda x: F.alpha_dropout(x, 1.5),
    lambda x: torch.feature_dropout(x[None], 1.5, False), lambda x: F.rrelu(x, 0.5, 0.2),
    lambda x: F.rrelu(x, 0.5, 0.2, training=True), lambda x: F.rrelu(x, 0.1, float("inf")),
    lambda x: F.rrelu(x, float("nan")),
])  # fmt: skip
def test_what_torch_refuses_is_refused(call):
    with pytest.raises((RuntimeError, ValueError)):
        call(torch.randn(8))
    with pytest.raises(TraceError, match=r"from 0 to 1|they are finite") as caught:
        htile.rowwise(call)(torch.randn(2, 8))
    assert caught.value.loc is not None and caught.value.loc.file == __file__


def test_numbers_that_are_given_at_run_time():
    """They are not known while tracing: they choose nothing, and are not compared."""
    f = htile.rowwise(lambda x, p, training: F.dropout(x, p, training) + F.rrelu(x, p, 0.5))
    x = torch.randn(2, 8)
    torch.testing.assert_close(f(x, 0.25, False), x + F.leaky_relu(x, 0.375))
    with pytest.raises(UnsupportedError, match=r"htile\.dropout"):
        f(x, 0.25, True)

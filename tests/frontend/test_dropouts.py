"""Functions of torch that draw numbers in training, where they draw none: `training=False`."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import UnsupportedError
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
    "in place": lambda x: (F.rrelu(x, inplace=True), x)[1],
}


@pytest.mark.parametrize("name", UNDRAWN)
def test_they_are_torchs(name):
    f = htile.rowwise(UNDRAWN[name])
    x = torch.randn(4, 16)
    x[0, :3] = torch.tensor([0.0, -0.0, float("nan")])
    rows = torch.stack([UNDRAWN[name](row.clone()) for row in x])
    torch.testing.assert_close(f(x), rows, equal_nan=True)
    if "rrelu" in name or name == "in place":  # of which torch.vmap knows nothing
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

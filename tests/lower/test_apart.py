"""Rows that differ by some elements in one kernel: parts of a row, and rows that are joined longer.

What a few elements are apart of the others is stored, or reduced, by itself; and a row that goes
into a longer one is computed in the columns of that.
"""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import UnsupportedError
from htile.frontend.derive import derive
from htile.frontend.reference import evaluate
from htile.lower.passes.simplify import drop_slopes
from htile.lower.passes.ways import place_well
from tests.generated.movements import interpreted
from tests.gradients import called, check, cotangents

M = 3
# Functions, and how long the rows of their arguments are.
FORWARD = {
    "a number before a row": (lambda x: torch.cat((x.sum()[None], x.softmax(-1))), 257),
    "zeros around a row": (lambda x: F.pad(x.softmax(-1), (1, 2)), 257),
    "a part by the sum of all": (lambda x: x[1:] * x.sum(), 257),
    "a part by the mean of all": (lambda x: x[3:-2] - x.mean(), 257),
    "a part by the largest of all": (lambda x: (x[:-1] - x.amax()).exp(), 257),
    "sums that are moved on": (lambda x: x.cumsum(-1).roll(1, -1), 257),
    "what a few elements get": (lambda x: torch.cat((x[:3] + x.sum(), x[3:] * x.amax())), 259),
    "beside a shorter row": (lambda x: torch.cat((x[2:], x[:1])) - x.mean(), 257),
    "the largest beside a shorter row": (lambda x: torch.cat((x[2:], x[:1])) * x.amax(), 257),
    "a part that is moved on": (lambda x: (x[1:].roll(3), x.sum(), (x > 2).any()), 257),
    "the middle beside others": (lambda x: (torch.cat((x[-2:], x[4:-1])), x.sum()), 211),
    "a part of all": (lambda x: x[1:-1].roll(1) * x.softmax(-1)[1:-1], 257),
    "a part of the largest": (
        lambda x: torch.where(x > x.max(), x, x.max()).sum() * torch.cat((x[1:-2], x[:1] * 0.5)), 79
    ),
    "counts of classes beside differences": (
        lambda x: (F.one_hot(torch.where(x > 1, 2, (x > 0).long()), 3).sum(0), x.diff()), 257
    ),
    "sums of columns beside differences": (
        lambda x: (torch.exp(-x[:, None] * torch.arange(4)).sum(0), x[1:] * x[:-1]), 96
    ),
    "sums of columns beside parts of sums": (
        lambda x: ((x[:, None] > torch.linspace(0, 1, 4)).sum(0),
                   x.cumsum(-1)[3:] - x.cumsum(-1)[:-3]), 257
    ),
    "zeros far beyond a row": (lambda x: F.pad(x.softmax(-1), (0, 130)), 257),
}
BACKWARD = {
    "softmax of a part": (lambda x: x[1:].softmax(-1), 257),
    "log softmax of a part": (lambda x: x[:-1].log_softmax(-1), 258),
    "a part in the middle": (lambda x: x[100:201].log_softmax(-1), 509),
    "the first part": (lambda x: x[:100].softmax(-1), 512),
    "a part less its mean": (lambda x: x[1:] - x[1:].mean(), 257),
    "a norm of a part": (lambda x: F.rms_norm(x[:-1], (256,)), 257),
    "a part by the sum of all": (lambda x: x[1:] * x.sum(), 257),
    "differences": (lambda x: x.diff().softmax(-1), 257),
    "differences of a mean": (lambda x: (d := x.diff()).sub(d.mean()) / d.std(), 257),
    "the largest of neighbours": (
        lambda x: torch.maximum(torch.maximum(x[:-2], x[1:-1]), x[2:]), 257
    ),
    "beside a shorter row": (lambda x: torch.cat((x[2:], x[:1])) - x.mean(), 257),
    "sums of columns beside differences": (
        lambda x: (torch.exp(-x[:, None] * torch.arange(4)).sum(0), x.diff()), 257
    ),
    "a number behind a row": (lambda x: torch.cat((x, -x.sum(0, keepdim=True))) * 0.5, 257),
}  # fmt: skip


def rows(n):
    return torch.randn(M, n, generator=torch.Generator().manual_seed(n))


def assert_placed(graph, values, lead, rtol=1e-9):
    """Assert that what is placed of a graph gives the same, and return it."""
    expected = evaluate(graph, values, lead, torch.float64)
    placed = place_well(drop_slopes(graph))
    with np.errstate(all="ignore"):
        found = interpreted(placed, graph, values, lead)
    for one, exact in zip(found, torch.utils._pytree.tree_leaves(expected), strict=True):
        np.testing.assert_allclose(one, exact.numpy(), rtol=rtol, atol=rtol)
    return placed


@pytest.mark.parametrize("name", FORWARD)
def test_results(name):
    function, n = FORWARD[name]
    call = called(htile.rowwise(function), rows(n))
    placed = assert_placed(call.graph, call.values, call.lead)
    assert len(placed.inputs) < 10 and len(placed.outputs) < 10


@pytest.mark.parametrize("name", BACKWARD)
def test_gradients(name):
    function, n = BACKWARD[name]
    f, x = htile.rowwise(function), rows(n)
    call = check(f, x, tolerance=1e-7)
    joint = derive(call.graph, call.wrt, call.outputs)
    given = {f"d_{name}": g for name, g in cotangents(call).items()}
    assert_placed(joint, call.values | given, call.lead, rtol=1e-7)
    kernel = f.inspect(x.clone().requires_grad_(), arch="sm_90a").backward
    assert kernel.resources.stack == 0 and len(kernel.graph) < 150


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_means_of_parts_that_are_infinite(value):
    """A mean of parts is what it is of the whole row, whichever part has the value."""
    functions = (
        lambda x: F.pad(x, (3, 2), value=-math.inf).mean(), lambda x: F.pad(x, (0, 1)).mean(),
        lambda x: torch.cat((x, x[:3])).mean(), lambda x: torch.cat((-x[:2], x)).mean(),
    )  # fmt: skip
    x = torch.zeros(4, 257)
    x[0, 0] = x[1, -1] = x[2, 100] = value
    x[3] = value
    for function in functions:
        call = called(htile.rowwise(function), x)
        expected = torch.stack([function(row.double()) for row in x])
        with np.errstate(all="ignore"):
            (found,) = interpreted(place_well(drop_slopes(call.graph)), call.graph, {"x": x}, (4,))
        np.testing.assert_allclose(found.reshape(4), expected.numpy(), rtol=1e-9)


def test_scans_of_rows_that_are_too_unlike_are_refused():
    def f(x, y):
        return F.pad(x.cumsum(-1), (0, 100)) * y[:357], y.cumsum(-1)

    with pytest.raises(UnsupportedError, match="pieces") as caught:
        htile.rowwise(f)(rows(257), rows(3001))
    assert caught.value.loc is not None


def test_few_elements_are_stored_apart_of_long_rows_only():
    """Short results that do not agree have no columns to be longer than, and are refused or cut."""

    def f(x):
        return torch.cat((x.cumsum(-1)[5:21], x[:48])).roll(3), x[:16].cumsum(-1) * 2

    call = called(htile.rowwise(f), rows(48))
    assert_placed(call.graph, call.values, call.lead)

"""Reductions of rows that are joined with parts of other lengths: each part is reduced alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import htile
from htile.frontend.roles import classify
from htile.frontend.trace import trace
from htile.lower.passes.space import place
from htile.testing import assert_close
from tests.generated.movements import interpreted
from tests.lower.placing import assert_placed_right, placed_and_values


def behind(x, t: htile.PerRow):
    z = torch.cat((x, t[None]))
    return z.sum(), z.amax(), (z - z.amax())[:-1], z.argmax(), (z > 0).any(), z.mean()


def before_and_behind(x, t: htile.PerRow, w):
    z = torch.cat((t[None], x, w[:5]))
    return z.sum(), z.amin(), z.argmin(), (z * torch.arange(len(z))).sum(), z.mean(), z[1:-5]


def between(x, t: htile.PerRow):
    z = torch.cat((x[:10], t[None], x[10:]))
    return z.sum(), (z + z.amax())[11:], z[:20].sum(), z[5:].amax(), (z > 0).all()


def in_turn(x, t: htile.PerRow):
    z = torch.cat((x, t[None]))
    z = torch.cat((t[None] * 2, z, z.sum()[None]))
    return z.sum(), z.amax(), z[2:40].sum()


def every_second(x, t: htile.PerRow):
    z = torch.cat((t[None], x))
    return z[1::2].sum(), z[1::2].amax(), (z[1::2] > 0).any()


def of_stacks(x, t: htile.PerRow):
    z = torch.cat((x.expand(3, -1), t.expand(3, 1)), -1)
    z = z * torch.tensor([1.0, 2.0, 3.0])[:, None]
    return z.sum(-1), z.sum(-1).sum(), z.amax(0).amax()


FUNCTIONS = (behind, before_and_behind, between, in_turn, every_second, of_stacks)


def arguments(f, n):
    """Values whose sums are exact."""
    g = torch.Generator().manual_seed(n)
    x, t, w = (torch.randint(-16, 17, shape, generator=g) / 8 for shape in ((3, n), (3,), (n,)))
    return (x, t, w) if f is before_and_behind else (x, t)


@pytest.mark.parametrize("n", [64, 100, 129, 1000, 4096, 4099])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_placed_graph_is_the_oracle(f, n):
    placed = assert_placed_right(f, arguments(f, n), place, 1e-14)
    assert len(list(placed)) < 200, "no part of the row is written out"


def test_the_mean_of_equal_elements_is_that_element():
    def centered(x, t: htile.PerRow):
        z = torch.cat((x, t[None], x[:3]))
        return (z - z.mean())[:-4]

    x = torch.full((3, 1000), 0.1)
    _, (found,) = placed_and_values(centered, (x, x[:, 0]), place)
    assert not found.any()


@htile.rowwise
def softmax_with_sink(scores, sink: htile.PerRow, scale: float = 1.0):
    return torch.cat((scores * scale, sink[None])).softmax(-1)[:-1]


@pytest.mark.parametrize("n", [64, 1000, 4096, 70000])
def test_a_softmax_with_a_sink(n):
    x, sink = torch.randn(3, n), torch.randn(3)
    assert_close(softmax_with_sink, softmax_with_sink(x, sink, 0.5), x, sink, 0.5)
    kernel = softmax_with_sink.inspect(x, sink, 0.5, arch="sm_90a")
    assert kernel.resources.stack == 0 and kernel.backward.source

    mine = x.clone().requires_grad_(), sink.clone().requires_grad_()
    wide = x.double().requires_grad_(), sink.double().requires_grad_()
    theirs = torch.cat((wide[0] * 0.5, wide[1][:, None]), -1).softmax(-1)[:, :-1]
    cotangent = torch.randn(3, n)
    got = torch.autograd.grad(softmax_with_sink(*mine, 0.5), mine, cotangent)
    want = torch.autograd.grad(theirs, wide, cotangent.double())
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-6)


def two_rows(x, y):
    return torch.cat((x, y[:999])).sum()


def a_scan_and_a_row(x, y):
    return torch.cat((x.cumsum(-1), y[:999])).sum()


@pytest.mark.parametrize("f", [two_rows, a_scan_and_a_row])
def test_two_long_parts_are_one_longer_row(f):
    """Of which the number of the column chooses, and both reach beyond their ends."""
    x, y = torch.randn(3, 4096), torch.randn(3, 4096)
    rowwise = htile.rowwise(f)
    kernel = rowwise.inspect(x, y, arch="sm_90a")
    assert kernel.graph.n == 4096 + 999 and kernel.resources.stack == 0
    named = {"x": x, "y": y}
    call = classify(rowwise._signature, (x, y))
    traced = trace(f, call.specs, call.n)
    with np.errstate(invalid="ignore"):
        (found,) = interpreted(kernel.graph, traced, named, call.lead)
    exact = [f(*rows) for rows in zip(x.double(), y.double(), strict=True)]
    np.testing.assert_allclose(found, torch.stack(exact).numpy(), rtol=1e-9)

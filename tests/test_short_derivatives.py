"""Shortcuts of what is differentiated in other ways: by `@f.backward`, of tables, of any length.

The CPU stands for a GPU. Gradients are held against torch's in float64.
"""


import pytest
import torch
import torch.nn.functional as F

import htile
from tests.on_cpu import watched_passes
from tests.test_short_gradients import row

factor = 2.0


def rounded(x, w):
    return torch.round(x) * w


def straight(x, w, d_out):
    return d_out * w * factor, d_out * torch.round(x)


@htile.rowwise
def embedded(x, pos: htile.PerRow, table: htile.Shared):
    return x * F.embedding(pos, table)


@htile.rowwise(dynamic_n=True)
def any_softmax(x):
    return torch.softmax(x, -1)


@htile.rowwise(dynamic_n=True)
def any_norm(x, w):
    return x * torch.rsqrt((x * x).mean() + 1e-6) * w


@pytest.fixture
def gpu(monkeypatch):
    with watched_passes(monkeypatch, (embedded, any_softmax, any_norm)) as found:
        yield found


def own():
    """A function with a backward pass of its own, which no test shares with another one."""
    f = htile.rowwise(rounded)
    f.backward(straight)
    return f


def expected_of_own(x, w, g, factor):
    x, w, g = (t.detach().double() for t in (x, w, g))
    return g * w * factor, (g * torch.round(x)).sum(0)


def gradients_of(f, args, g):
    leaves = [a for a in args if a.requires_grad]
    return torch.autograd.grad(f(*args), leaves, g)


def check_own(f, factor=2.0, seed=0):
    x, w = row(5, 64, seed=seed), row(64, seed=seed + 1)
    g = torch.randn(5, 64, generator=torch.Generator().manual_seed(seed))
    for found, right in zip(
        gradients_of(f, (x, w), g), expected_of_own(x, w, g, factor), strict=True
    ):
        torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)


def test_a_backward_pass_of_ones_own(gpu, monkeypatch):
    f = own()
    for seed in range(3):
        check_own(f, seed=seed)
    gpu.long.clear()
    check_own(f, seed=7)
    assert gpu.long == [], "both passes take shortcuts"
    assert [name for name, _ in gpu.launched[-2:]] == ["rounded", "rounded_backward"]
    monkeypatch.setitem(globals(), "factor", 3.0)
    check_own(f, 3.0)
    assert "forward" in gpu.long, "what the backward pass captures counts"


@pytest.mark.parametrize("kind", ["itself", "another plan", "a caller"])
def test_a_backward_pass_that_comes_later(gpu, kind):
    """Calls that had shortcuts before see it."""
    base = htile.rowwise(lambda x, w: x * w)
    caller = htile.rowwise(lambda x, w: base(x, w))
    f = {"itself": base, "another plan": base.with_plan(loader="direct"), "a caller": caller}[kind]
    x, w, g = row(5, 64), row(64, seed=1), torch.ones(5, 64)
    for _ in range(3):
        gradients_of(f, (x, w), g)
    gpu.long.clear()
    gradients_of(f, (x, w), g)
    assert gpu.long == []
    base.backward(lambda x, w, d_out: (d_out * 5.0, d_out * 7.0))
    for _ in range(3):
        of_x, of_w = gradients_of(f, (x, w), g)
        assert of_x.unique().tolist() == [5.0] and of_w.unique().tolist() == [35.0]


def test_gradients_of_tables(gpu):
    """The forward pass takes a shortcut; behind the backward kernel torch adds up rows."""
    for seed in range(4):
        x, table = row(6, 64, seed=seed), row(4, 64, seed=seed + 1)
        pos = torch.tensor([0, 3, 3, 1, 0, 3]).roll(seed)
        g = torch.randn(6, 64, generator=torch.Generator().manual_seed(seed))
        gpu.long.clear()
        of_x, of_table = torch.autograd.grad(embedded(x, pos, table), (x, table), g)
        right = torch.zeros(4, 64, dtype=torch.float64)
        right.index_add_(0, pos, (g * x.detach()).double())
        torch.testing.assert_close(of_table.double(), right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(of_x, g * table.detach()[pos])
    assert gpu.long == ["backward"]


@pytest.mark.parametrize("f", [any_softmax, any_norm], ids=lambda f: f._signature.name)
def test_rows_of_any_length(gpu, f):
    """A shortcut of one bucket serves its other lengths."""
    for n in (200, 200, 200, 216, 248, 72, 520, 130, 131):
        x, w = row(5, n, seed=n), row(n, seed=n + 1)
        g = torch.randn(5, n, generator=torch.Generator().manual_seed(n))
        gpu.long.clear()
        args = (x,) if f is any_softmax else (x, w)
        found = gradients_of(f, args, g)
        long = [*gpu.long]
        wide = [a.detach().double().requires_grad_() for a in args]
        if f is any_softmax:
            y = torch.softmax(wide[0], -1)
        else:
            y = wide[0] * torch.rsqrt((wide[0] ** 2).mean(-1, keepdim=True) + 1e-6) * wide[1]
        for each, right in zip(found, torch.autograd.grad(y, wide, g.double()), strict=True):
            assert each.shape == right.shape
            torch.testing.assert_close(each.double(), right, rtol=1e-5, atol=1e-5)
        if n in (216, 248):
            # torch adds up the rows of a weight's gradient, behind the kernel
            assert long == ([] if f is any_softmax else ["backward"])

"""Losses of a few rows that belong together, and elements of small matrices at indices of each."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.errors import ShapeError, UnsupportedError
from tests.lower.cases import kernel_of

M, ROWS, N = 3, 4, 20


def assert_torch(f, *args):
    """Results and gradients are those of torch in float64, row by row."""
    rowwise = htile.rowwise(f)
    is_own = [x.is_floating_point() and x.ndim > 1 for x in args]
    mine = [x.clone().requires_grad_() if own else x for x, own in zip(args, is_own, strict=True)]
    wide = [x.double() if x.is_floating_point() else x for x in args]
    wide = [x.requires_grad_() if own else x for x, own in zip(wide, is_own, strict=True)]
    each = [pytree.tree_leaves(f(*[x[m] if x.ndim > 1 else x for x in wide])) for m in range(M)]
    exact = [torch.stack(results) for results in zip(*each, strict=True)]
    found = pytree.tree_leaves(rowwise(*mine))
    for one, other in zip(found, exact, strict=True):
        assert one.shape == other.shape
        close = {"rtol": 1e-5, "atol": 1e-5, "equal_nan": True}
        torch.testing.assert_close(one.double(), other, **close)
    shares = [torch.randn(each.shape) for each in exact]
    theirs = [each.double() for each in shares]
    slopes = torch.autograd.grad(found, [x for x in mine if x.requires_grad], shares)
    others = torch.autograd.grad(exact, [x for x in wide if x.requires_grad], theirs)
    for one, other in zip(slopes, others, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-5, equal_nan=True)


def arguments():
    g = torch.Generator().manual_seed(0)
    x, shares = torch.randn(M, ROWS, N, generator=g), torch.rand(M, ROWS, N, generator=g)
    y, weight = torch.randint(N, (M, ROWS), generator=g), torch.rand(N, generator=g)
    y[0, 1] = y[1, 0] = y[1, 3] = -100
    y[2] = -100  # the mean of which is NaN
    return x, shares, y, weight


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_of_classes(reduction, smoothing):
    def f(x: htile.Inner[2], y: htile.Inner[1], weight):
        more = {"reduction": reduction, "label_smoothing": smoothing}
        return (
            F.cross_entropy(x, y, **more), F.cross_entropy(x, y, weight, **more),
            F.nll_loss(x, y, reduction=reduction), F.nll_loss(x, y, weight, reduction=reduction),
        )  # fmt: skip

    x, _, y, weight = arguments()
    assert_torch(f, x, y, weight)
    assert kernel_of(f, x, y, weight).resources.stack == 0


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_losses_of_shares(reduction, smoothing):
    def f(x: htile.Inner[2], shares: htile.Inner[2]):
        more = {"reduction": reduction, "label_smoothing": smoothing}
        return F.cross_entropy(x, shares, **more)

    x, shares, *_ = arguments()
    assert_torch(f, x, shares)


def test_elements_of_matrices():
    def f(x: htile.Inner[2], along: htile.Inner[2], across: htile.Inner[2]):
        best = x.topk(2).indices
        return (
            x.gather(-1, along), (x * x).gather(1, along[:3]), torch.gather(x, 0, across),
            x.softmax(-1).gather(-1, best), x.gather(-1, along[:, :1])[:, 0],
        )  # fmt: skip

    g = torch.Generator().manual_seed(1)
    x = torch.randn(M, ROWS, N, generator=g)
    along = torch.randint(N, (M, ROWS, 3), generator=g)
    across = torch.randint(ROWS, (M, 2, N), generator=g)
    assert_torch(f, x, along, across)
    assert kernel_of(f, x, along, across).resources.stack == 0


@pytest.mark.parametrize("each", [1, 3, 8])
@pytest.mark.parametrize("n", [256, 1024, 4096])
def test_elements_of_many_groups(n, each):
    """Beyond eight groups all are compared with their indices at once, so any number is taken."""

    def f(x, y: htile.Inner[2]):
        g = x.view(-1, 32)
        largest = g.abs().argmax(-1, keepdim=True)
        integers = (g * 10).int().gather(-1, y) + (g * 9).to(torch.int8).gather(-1, y).int()
        return (
            g.gather(-1, largest).flatten(), torch.take_along_dim(g, y - 32, -1).flatten(),
            integers.flatten(), (g > 0).gather(-1, y).flatten(),
        )  # fmt: skip

    g = torch.Generator().manual_seed(3)
    x = torch.randn(M, n, generator=g)
    x[:, ::7] = x[:, ::7].sign() * math.inf
    y = torch.randint(32, (M, n // 32, each), generator=g)
    found, groups = htile.rowwise(f)(x, y), x.view(M, -1, 32)
    largest = groups.abs().argmax(-1, keepdim=True)
    whole = groups.where(groups.isfinite(), 0)
    assert torch.equal(found[0], groups.gather(-1, largest).flatten(1))
    assert torch.equal(found[1], groups.gather(-1, y).flatten(1))
    picked, counts = groups.gather(-1, y), whole.gather(-1, y)
    expected = (counts * 10).int() + (counts * 9).to(torch.int8).int()
    is_finite = picked.isfinite().flatten(1)
    assert torch.equal(found[2][is_finite], expected.flatten(1)[is_finite])
    assert torch.equal(found[3], (picked > 0).flatten(1))


@pytest.mark.parametrize("rows", [4, 9, 16])
@pytest.mark.parametrize("value", [-math.inf, math.inf, math.nan])
def test_gradients_of_elements_that_are_not_finite(value, rows):
    """The gradient goes to the element that is taken, as in torch, and the index may be int32."""

    def f(x: htile.Inner[2], y: htile.Inner[2]):
        return x.gather(-1, y)

    x, y = torch.randn(2, rows, 4), torch.ones(2, rows, 1, dtype=torch.int32)
    x[:, 0, 1:3], x[:, 2, 1] = value, value
    mine, wide = (x.clone().requires_grad_() for _ in range(2))
    htile.rowwise(f)(mine, y).sum().backward()
    wide.gather(-1, y.long()).sum().backward()
    assert torch.equal(mine.grad, wide.grad)


@pytest.mark.parametrize("rows", [4, 9, 16])
def test_take_along_dim_of_matrices_repeats_the_other_axis(rows):
    def along_rows(x: htile.Inner[2], y: htile.Inner[2]):
        return torch.take_along_dim(x, y, -1)

    def along_columns(x: htile.Inner[2], y: htile.Inner[2]):
        return torch.take_along_dim(x, y, 0)

    g = torch.Generator().manual_seed(2)
    x = torch.randn(2, rows, 32, generator=g)
    for shape in ((2, 1, 3), (2, rows, 3)):
        y = torch.randint(32, shape, generator=g)
        found = htile.rowwise(along_rows)(x, y)
        assert torch.equal(found, torch.take_along_dim(x, y, -1))
    y = torch.randint(32, (2, rows, 2), generator=g)
    found = htile.rowwise(along_rows)(x[:, :1], y)
    assert torch.equal(found, torch.take_along_dim(x[:, :1], y, -1))
    y = torch.randint(rows, (2, 2, 1), generator=g)
    assert torch.equal(htile.rowwise(along_columns)(x, y), torch.take_along_dim(x, y, 1))
    with pytest.raises(ShapeError, match="the other axis has as many elements, or one"):
        htile.rowwise(along_rows)(x, torch.zeros(2, rows - 1, 1, dtype=torch.int64))


def test_beyond_the_ends_of_many_groups():
    """Beyond, elements are NaN, integers 0, and masks False; only `gather` counts from no end."""
    x, y = torch.randn(2, 512), torch.tensor([-33, -1, 32, 5]).repeat(2, 4)[..., None]

    def f(x, y: htile.Inner[2]):
        g = x.view(-1, 32)
        return (
            g.gather(-1, y).flatten(), torch.take_along_dim(g, y, -1).flatten(),
            g.int().gather(-1, y).flatten(), (g == g).gather(-1, y).flatten(),
        )  # fmt: skip

    gathered, taken, integers, masks = htile.rowwise(f)(x, y)
    assert gathered.view(2, 4, 4).isnan().all(1).tolist() == [[True, True, True, False]] * 2
    assert taken.view(2, 4, 4).isnan().all(1).tolist() == [[True, False, True, False]] * 2
    assert torch.equal(taken.view(2, 4, 4)[..., 1], x.view(2, 4, 4, 32)[..., 1, -1])
    assert torch.equal(integers.view(2, 4, 4)[..., 3], x.view(2, 4, 4, 32)[..., 3, 5].int())
    assert not integers.view(2, 4, 4)[..., :3].any()
    assert masks.view(2, 4, 4).tolist() == [[[False, False, False, True]] * 4] * 2


def test_mistakes():
    x, _, y, _ = arguments()

    def other_targets(x: htile.Inner[2], y: htile.Inner[1]):
        return F.cross_entropy(x, y[:3])

    def more_rows(x: htile.Inner[2], y: htile.Inner[2]):
        return x[:2].gather(-1, y)

    def many(x: htile.Inner[2], y: htile.Inner[2]):
        return x.gather(-1, y)

    with pytest.raises(ShapeError, match="a batch of a few rows with as many targets"):
        htile.rowwise(other_targets)(x, y)
    with pytest.raises(ShapeError, match="no more rows of these"):
        htile.rowwise(more_rows)(x, torch.zeros(M, ROWS, 2, dtype=torch.int64))
    with pytest.raises(UnsupportedError, match="80 indices of a matrix: at most 64"):
        htile.rowwise(many)(x, torch.zeros(M, ROWS, 20, dtype=torch.int64))

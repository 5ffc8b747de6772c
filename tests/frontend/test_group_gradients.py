"""Gradients of values that each group has once and its elements share, and of their sums."""

import itertools

import pytest
import torch

import htile
from tests.gradients import check, check_second, check_tangents

M, N = 3, 64
REDUCED = {
    "mean": lambda t, dim: t.mean(dim),
    "sum": lambda t, dim: t.sum(dim),
    "amax": lambda t, dim: t.amax(dim),
    "std": lambda t, dim: t.std(dim),
    "logsumexp": lambda t, dim: t.logsumexp(dim),
    "norm": lambda t, dim: t.norm(dim=dim),
    "prod": lambda t, dim: (t * 0.1 + 1).prod(dim),
    "a sum of squares": lambda t, dim: t.square().sum(dim),
}
VIEWS = {
    "a row": lambda x: x,
    "groups of 16": lambda x: x.view(-1, 16),
    "4 groups": lambda x: x.view(4, -1),
    "groups of 15": lambda x: x[:60].view(-1, 15),
    "three axes": lambda x: x.view(2, 4, 8),
    "one group": lambda x: x.view(1, -1),
    "groups of one": lambda x: x.view(-1, 1),
}
USES = {
    "subtracted": lambda t, value: t - value,
    "multiplied and added": lambda t, value: t * value + value,
}
EVERY = [*itertools.product(VIEWS, REDUCED, REDUCED, USES)]


def rows(seed=0):
    return torch.randn(M, N, generator=torch.Generator().manual_seed(seed)) * 0.5


def function(view, inner, outer, use, dim=-1):
    """A reduction of what each group's elements become by a value of the group."""

    def f(x):
        t = VIEWS[view](x)
        return REDUCED[outer](USES[use](t, REDUCED[inner](t, -1).unsqueeze(-1)), dim)

    return htile.rowwise(f)


# The standard deviation of a group of one is NaN.
@pytest.mark.parametrize("case", EVERY, ids=" ".join)
def test_gradients(case):
    for dim in (-1, 0):
        check(function(*case, dim), rows(), tolerance=1e-7)


@pytest.mark.parametrize("case", EVERY[::7], ids=" ".join)
def test_tangents_and_second_order(case):
    view, inner, outer, _ = case
    if view != "groups of one" or "std" not in (inner, outer):
        check_tangents(function(*case), rows(), tolerance=1e-7)
        check_second(function(*case), rows(), tolerance=1e-6)


SHAPES = {
    "expanded": lambda x: x.view(-1, 16).sum(-1, keepdim=True).expand(-1, 16).sum(-1),
    "log softmax": lambda x: x.view(-1, 16).log_softmax(-1).mean(-1),
    "softmax": lambda x: (x.view(4, -1).softmax(-1) * x.view(4, -1)).mean(-1),
    "two values": lambda x: (t := x.view(-1, 8)).sub(t.mean(-1, keepdim=True))
    .div(t.std(-1, keepdim=True)).abs().sum(-1),
    "a value of all groups": lambda x: (x.view(-1, 16) - x.view(-1, 16).amax(0)).mean(-1),
    "a value of the row": lambda x: (x.view(-1, 16) - x.mean()).square().mean(-1),
    "divergence": lambda x: torch.nn.functional.kl_div(
        x.view(-1, 16).log_softmax(-1), x.view(-1, 16).detach().softmax(-1), reduction="none"
    ).sum(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_other_functions(name):
    f = htile.rowwise(SHAPES[name])
    check(f, rows(), tolerance=1e-7)
    check_second(f, rows(), tolerance=1e-6)


BESIDE = {
    "other groups' means": lambda x, u: ((x := x.view(4, 1, 16)) - x.mean(-1)) * u[..., None],
    "a mean in another shape": lambda x, u: ((x := x.view(4, 1, 16)) - x.mean(-1).view(1, 4, 1))
    * u[..., None],
    "a sum over a number": lambda x, u: ((x := x.view(4, 1, 16)) - x.sum(-1).div(16).view(1, 4, 1))
    * u[..., None],
    "its own mean": lambda x, u: ((x := x.view(4, 1, 16)) - x.mean(-1, keepdim=True))
    * u[..., None],
    "turned round": lambda x, u: ((x := x.view(4, 4, 4)) - x.mean(-1).t()[..., None])
    * u[..., None],
}  # fmt: skip


@pytest.mark.parametrize("name", BESIDE)
def test_a_mean_that_stands_beside_elements_of_other_groups(name):
    """The sum of what is left is not 0 then."""
    function = BESIDE[name]

    @htile.rowwise
    def f(x, u: htile.Inner[2]):
        return function(x, u).sum(-1)

    x, u = rows(), torch.randn(M, 4, 4, generator=torch.Generator().manual_seed(1))
    check(f, x, u, tolerance=1e-7)
    check_second(f, x, u, tolerance=1e-6)


def test_axes_inside():
    @htile.rowwise
    def f(x: htile.Inner[2]):
        return x.log_softmax(-1).mean(-1)

    check(f, rows().view(M, 4, 16))


PARTS = {
    "the first half": lambda x: x.view(-1, 16).softmax(-1).flatten()[:256],
    "the second half": lambda x: x.view(-1, 16).softmax(-1).flatten()[256:],
    "both halves": lambda x: x.view(-1, 16).softmax(-1).flatten().chunk(2),
    "some groups": lambda x: x.view(-1, 16).softmax(-1)[:8],
    "of a norm": lambda x: torch.nn.functional.rms_norm(x.view(-1, 16), (16,)).flatten()[:128],
    "a difference": lambda x: (x.view(-1, 16) - x.view(-1, 16).amax(-1)[:, None]).flatten()[:128],
    "of a sort": lambda x: x.view(-1, 16).sort(-1).values.flatten()[:128],
    "of pairs": lambda x: x[:32].view(-1, 2).sort(-1).values.exp()[2:],
    "a sum of parts": lambda x: x.view(-1, 4).softmax(-1)[0:2].flatten().cumsum(-1),
}


@pytest.mark.parametrize("name", PARTS)
def test_parts_of_groups_train(name):
    """In training the forward kernel has the numerics of an inference, so its bits."""
    f, x = htile.rowwise(PARTS[name]), torch.randn(M, 512)
    check(f, x, tolerance=1e-7)
    training = f.inspect(x.clone().requires_grad_(), arch="sm_90a").training
    usual = f.inspect(x, arch="sm_90a").plan.numerics
    assert training.forward.plan.numerics == usual and training.backward.plan is not None

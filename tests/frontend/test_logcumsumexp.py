"""The derivatives of logcumsumexp.

torch 2.13 has wrong tangents of `logcumsumexp`. So tangents are compared with those of a logsumexp
of what comes before each element. Its gradients are right, and so is what is derived of them.
"""

import pytest
import torch

import htile
from htile.errors import GradientError
from tests.gradients import check, check_second

M = 5
inf = float("inf")


def rows(n=24, size=1.0, seed=0):
    return torch.randn(M, n, generator=torch.Generator().manual_seed(seed)) * size


def listnet(x):
    """The log likelihood of an order: of each element, to be the first of those from it on."""
    return (x - x.flip(-1).logcumsumexp(-1).flip(-1)).sum()


SHAPES = {
    "a row": lambda x: x.logcumsumexp(-1),
    "from the end": lambda x: x.flip(-1).logcumsumexp(-1).flip(-1),
    "a loss": listnet,
    "the first axis": lambda x: x.view(4, 6).logcumsumexp(0),
    "groups": lambda x: (y := x.view(4, 6).logcumsumexp(1)) * y,
    "parts": lambda x: (x[:12] * x[12:]).logcumsumexp(-1)[3:7],
    "of what is computed": lambda x: torch.where(x > 0, x, 0.5 * x).logcumsumexp(-1) * x,
    "twice": lambda x: (x * x.logcumsumexp(-1)).logcumsumexp(-1),
}


@pytest.mark.parametrize("name", SHAPES)
def test_gradients(name):
    f, x = htile.rowwise(SHAPES[name]), rows()
    check(f, x)
    check_second(f, x)


def test_short_rows():
    f = htile.rowwise(lambda x: x.logcumsumexp(-1))
    for n in (1, 2, 3):
        check(f, rows(n))
    for n in (2, 3):
        check_second(f, rows(n))


def test_a_gradient_of_elements_that_are_far_apart():
    """exp(-y) would be infinite for the first elements, and exp(x) for the last."""
    x = torch.tensor([[-1e3, -200, 0, 1e3, -1e3, 999, -inf]])
    check(htile.rowwise(lambda x: x.logcumsumexp(-1)), x)


def upto(x):
    """The same by a logsumexp for each element."""
    is_before = torch.ones(x.shape[-1], x.shape[-1], dtype=torch.bool).tril()
    return torch.where(is_before, x[..., None, :], -inf).logsumexp(-1)


TANGENTS = {
    "a row": (lambda x: x.logcumsumexp(-1), upto),
    "from the end": (
        lambda x: x.flip(-1).logcumsumexp(-1).flip(-1), lambda x: upto(x.flip(-1)).flip(-1)
    ),
    "of the first axis": (
        lambda x: x.view(4, 6).logcumsumexp(0), lambda x: upto(x.view(-1, 4, 6).mT).mT
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TANGENTS)
def test_tangents(name):
    function, right = TANGENTS[name]
    x, t = rows(size=5.0), rows(seed=1)
    found = torch.func.jvp(htile.rowwise(function), (x,), (t,))
    expected = torch.func.jvp(right, (x.double(),), (t.double(),))
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


ORDERS = {
    "forward over reverse": torch.func.hessian,
    "forward over forward": lambda f: torch.func.jacfwd(torch.func.jacfwd(f)),
    "reverse over forward": lambda f: torch.func.jacrev(torch.func.jacfwd(f)),
    "forward over reverse over reverse": lambda f: torch.func.jacfwd(
        torch.func.jacrev(torch.func.grad(f))
    ),
    "forward over forward over reverse": lambda f: torch.func.jacfwd(torch.func.hessian(f)),
}


def weights(n):
    """Of both signs, and 0: each sign has a scan of its own, in which other terms count."""
    return torch.arange(n, dtype=torch.float64).mul(2.0).cos().mul(4).round() / 2


@pytest.mark.parametrize("n", [1, 2, 3, 7])
@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", ["a row", "from the end"])
def test_derivatives_of_derivatives(name, order, n):
    """No term may count in a scan of a derivative, which is minus infinity there."""
    function, right = TANGENTS[name]
    f, w = htile.rowwise(function), weights(n)
    for weight in (torch.ones(n).double(), -w, w):
        found = ORDERS[order](lambda x, w=weight: (f(x) * w.float()).sum())(rows(n)[:1])
        exact = ORDERS[order](lambda x, w=weight: (right(x) * w).sum())(rows(n)[:1].double())
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize(
    "row", [[0, -inf, 1, 2], [-1e3, -200, 0, 10, -1e3, 9, -inf], [3, -inf, -inf, -inf, 3]]
)
def test_derivatives_of_derivatives_of_elements_that_are_far_apart(row):
    x = torch.tensor([row], dtype=torch.float32)
    f = htile.rowwise(lambda x: x.logcumsumexp(-1))
    exact = torch.func.hessian(lambda x: upto(x).sum())(x.double())
    assert exact.isfinite().all()
    for order in ("forward over reverse", "forward over forward", "reverse over forward"):
        found = ORDERS[order](lambda x: f(x).sum())(x)
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=2e-6)


def test_tangents_of_elements_before_which_none_counts():
    """The first results are minus infinity. torch has NaN there, where the tangent is 0."""
    x, t = torch.tensor([[-inf, -inf, 0, 1]]), torch.tensor([[1.0, -2, 3, 0]])
    f = htile.rowwise(lambda x: x.logcumsumexp(-1))
    found = torch.func.jvp(f, (x,), (t,))[1]
    (exact,) = torch.func.jvp(upto, (x[:, 2:].double(),), (t[:, 2:].double(),))[1:]
    torch.testing.assert_close(found[:, 2:].double(), exact, rtol=1e-5, atol=1e-5)
    assert found[:, :2].tolist() == [[0, 0]]


@pytest.mark.parametrize("call", [lambda x: x.cummax(-1), lambda x: x.flip(-1).cummin(-1)])
def test_running_extremes_have_no_gradient_and_say_so(call):
    f = htile.rowwise(lambda x: x - call(x).values.amax())
    with pytest.raises(GradientError, match=r"x.detach\(\).cumm(ax|in)\(dim\)") as caught:
        f(rows().requires_grad_()).sum().backward()
    assert "call(x)" in caught.value.loc.text or "lambda" in caught.value.loc.text
    with pytest.raises(GradientError, match=r"x.detach\(\).cumm(ax|in)\(dim\)"):
        torch.func.jvp(f, (rows(),), (rows(seed=1),))
    detached = htile.rowwise(lambda x: x * x.detach().cummax(-1).values)
    check(detached, rows())

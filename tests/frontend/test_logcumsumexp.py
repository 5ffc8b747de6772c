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

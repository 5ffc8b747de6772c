"""What may be the left operand of a product: unchanged 16-bit elements, and numbers of the row."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import DtypeError, UnsupportedError
from htile.testing import assert_close
from tests.products import BF16, F16
from tests.test_matrices import run_steps
from tests.test_product_gradients import leaves

K, N, M = 64, 40, 6


def stopped(x):
    with torch.no_grad():
        return x.view(8, 8).flatten()


# What a row is of x, y, the row of a table and a number; how many kernels it takes.
UNCHANGED = {
    "detached": (lambda x, y, t, s: x.detach(), 2),
    "without gradients": (lambda x, y, t, s: stopped(x), 2),
    "joined parts": (lambda x, y, t, s: torch.cat((x.chunk(2)[0], y[32:])), 2),
    "turned": (lambda x, y, t, s: x.view(8, 8).T.flatten(), 2),
    "rolled": (lambda x, y, t, s: x.roll(3), 2),
    "of a table": (lambda x, y, t, s: t, 2),
    "rounded parts": (lambda x, y, t, s: torch.cat(((x * y).to(BF16)[32:], x[32:])), 2),
    "the argument": (lambda x, y, t, s: x.view(8, 8).flatten(), 1),
}
SCALED = {
    "divided": (lambda x, y, t, s: x / x.norm(), 2),
    "multiplied and divided": (lambda x, y, t, s: x * s / x.norm(), 2),
    "normalized": (lambda x, y, t, s: F.normalize(x, dim=-1), 2),
    "by a constant": (lambda x, y, t, s: x / 3, 1),
    "a part": (lambda x, y, t, s: torch.cat((x[32:], y[32:])) / s, 2),
}
CASES = UNCHANGED | SCALED


def function(name):
    of = CASES[name][0]

    @htile.rowwise
    def f(x, y, W: htile.Matrix, table: htile.Shared, at: htile.PerRow, s: htile.PerRow):
        return F.linear(of(x, y, table[at], s), W)

    return f


def arguments(dtype=BF16):
    made = torch.Generator().manual_seed(0)
    x, y, W, table = (torch.randn(shape, generator=made).to(dtype)
                      for shape in ((M, K), (M, K), (N, K), (9, K)))  # fmt: skip
    at = torch.randint(9, (M,), generator=made)
    return x, y, W / 8, table, at, torch.rand(M, generator=made) + 0.5


@pytest.mark.parametrize("name", CASES)
def test_the_result_is_the_same(name):
    f, args = function(name), arguments()
    assert_close(f, f(*args), *args)
    assert_close(f, run_steps(f, args)[0], *args)
    assert len(f.inspect(*args, arch="sm_90a").kernels) == CASES[name][1]


@pytest.mark.parametrize("name", ["divided", "multiplied and divided", "normalized", "a part"])
def test_gradients_of_divided_rows(name):
    """Of what the function depends on."""
    args = arguments()
    f, of = function(name), CASES[name][0]
    ours = leaves(args)
    (f(*ours).float() ** 2).sum().backward()
    wide = [v.detach().double().requires_grad_() if v.is_floating_point() else v for v in args]
    x, y, W, table, at, s = wide
    rows = torch.vmap(of)(x, y, table[at], s)
    (F.linear(rows, W) ** 2).sum().backward()
    for a, b in zip(ours, wide, strict=True):
        if b.is_floating_point() and b.grad is not None:
            assert (a.grad.double() - b.grad).norm() <= 0.02 * b.grad.norm()


def test_what_is_detached_has_no_gradient():
    x, _, W, *_ = leaves(arguments())
    detached(x, W).float().sum().backward()
    assert x.grad is None or not x.grad.any()
    assert torch.allclose(W.grad.float(), x.detach().float().sum(0).expand(N, K), 0.01, 0.01)


@htile.rowwise
def detached(x, W: htile.Matrix):
    return F.linear(x.detach(), W)


def test_rows_that_are_zero_or_infinite():
    """A norm of 0 or infinity gives what torch gives for the row that is divided first."""
    f = function("divided")
    x, *others = arguments()
    x[0], x[1, 3] = 0.0, float("inf")
    found, (stored,) = f(x, *others), run_steps(f, (x, *others))
    for each in (found, stored):
        assert each[:2].isnan().all() and each[2:].isfinite().all()


REFUSED = [
    (lambda x, y: 1 / x, UnsupportedError, "round it, x.to(torch.bfloat16)"),
    (lambda x, y: x / y, UnsupportedError, "multiply and divide after the product"),
    (lambda x, y: torch.cat((x, y.float()))[:K], UnsupportedError, "computed in float32"),
    (lambda x, y: x.to(F16).detach(), DtypeError, "x.to(torch.bfloat16), or pass W in"),
]


@pytest.mark.parametrize(("of", "kind", "words"), REFUSED)
def test_what_is_refused(of, kind, words):
    @htile.rowwise
    def f(x, y, W: htile.Matrix):
        return F.linear(of(x, y), W)

    with pytest.raises(kind) as caught:
        f(*arguments()[:3])
    assert words in str(caught.value)

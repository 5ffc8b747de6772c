"""Derivatives have digits where the value, or its approximation, is almost a constant."""

import pytest
import torch
import torch.nn.functional as F

import htile

# Relative errors; float64 has the derivatives of torch's own functions of these numbers.
BOUND = 1e-6
SMALL = (1e-6, 1e-5, 1e-4, 1e-3, -1e-5, -0.2, 0.4, 0.45, 0.7)
FAR_BELOW = (-10.0, -14.0, -18.0, -30.0, -1.0)
# For each function: where, and how many derivatives are compared.
FUNCTIONS = {
    "elu": (F.elu, FAR_BELOW, 3),
    "selu": (F.selu, FAR_BELOW, 3),
    "celu": (lambda x: F.celu(x, 2.0), FAR_BELOW, 3),
    "cosh": (lambda x: x.cosh(), SMALL, 2),
    "sinh": (lambda x: x.sinh(), SMALL, 3),
    "log_cosh": (lambda x: x.cosh().log(), SMALL, 2),
    "atan": (lambda x: x.atan(), (*SMALL, 3.0, 1e3, -50.0), 3),
    "asin": (lambda x: x.asin(), SMALL, 3),
    "acos": (lambda x: x.acos(), SMALL, 3),
    "asinh": (lambda x: x.asinh(), (*SMALL, 30.0), 2),
    "atanh": (lambda x: x.atanh(), SMALL, 3),
    "angle": (lambda x: torch.atan2(x, 2 + x), SMALL, 2),
}


def worst(found, exact):
    """The largest relative error."""
    return ((found.double() - exact).abs() / exact.abs()).max()


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivatives(name):
    function, points, order = FUNCTIONS[name]
    x = torch.tensor([points], requires_grad=True)
    exact = x.detach().double().requires_grad_()
    ours, right = htile.rowwise(lambda x: function(x))(x), function(exact)
    for _ in range(order):
        (ours,) = torch.autograd.grad(ours.sum(), x, create_graph=True)
        (right,) = torch.autograd.grad(right.sum(), exact, create_graph=True)
        assert worst(ours, right) <= BOUND


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("target", [0.0, 0.3, 1.0])
def test_cross_entropy_of_logits(target, weighted):
    """Many negatives with small logits are usual. All three arguments have gradients."""

    @htile.rowwise
    def f(x, t, w):
        return F.binary_cross_entropy_with_logits(
            x, t, pos_weight=w if weighted else None, reduction="none"
        )

    x = torch.tensor([[-40.0, -18, -16, -12, -8, -0.5, 0, 0.5, 8, 12, 16, 18, 40]])
    t, w = torch.full_like(x, target), torch.full(x.shape[1:], 2.5)
    args = [v.requires_grad_() for v in (x, t, w)]
    found = torch.autograd.grad(f(*args).sum(), args, allow_unused=not weighted)
    x, t, w = (v.detach().double() for v in args)
    w = w if weighted else torch.ones_like(w)
    no, yes = F.softplus(x, threshold=100), F.softplus(-x, threshold=100)
    exact = (1 - t) * x.sigmoid() - w * t * (-x).sigmoid(), w * yes - no, (t * yes)[0]
    assert worst(found[0], exact[0].where(exact[0] != 0, 1)) <= BOUND
    torch.testing.assert_close(found[1].double(), exact[1], rtol=BOUND, atol=1e-6)
    if weighted:
        torch.testing.assert_close(found[2].double(), exact[2], rtol=BOUND, atol=0)
    torch.testing.assert_close(
        f(*args).double(), (1 - t) * no + w * t * yes, rtol=BOUND, atol=0, check_dtype=False
    )

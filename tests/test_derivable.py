"""Backward graphs of functions that compute something more than once, or share a softmax.

Each is compared with torch's autograd in float64, at rows of several magnitudes, and its kernel has
no more reductions and instructions than what a person would write down.
"""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.frontend.ops import REDUCTIONS, Op
from htile.lower.passes.derivable import derivable
from tests.gradients import check_second
from tests.training import assert_gradients

BF16 = torch.bfloat16


def entropy(x):
    p = x.softmax(-1)
    return -(p * x.log_softmax(-1)).sum(-1)


def entropy_of_shares(x):
    p = x.softmax(-1)
    return -(p * p.log()).sum(-1)


def entropy_by_logsumexp(x):
    return x.logsumexp(-1) - (x.softmax(-1) * x).sum(-1)


def entropy_of_groups(x):
    groups = x.unflatten(-1, (4, -1))
    return -(groups.softmax(-1) * groups.log_softmax(-1)).sum(-1)


def expectation(x):
    return (x.softmax(-1) * x).sum(-1)


def divergence(x, y):
    return F.kl_div(x.log_softmax(-1), y.softmax(-1), reduction="none").sum(-1)


def jensen_shannon(x, y):
    p, q = x.softmax(-1), y.softmax(-1)
    middle = ((p + q) / 2).log()
    return (p * (p.log() - middle) + q * (q.log() - middle)).sum(-1) / 2


def softmax_by_hand(x):
    e = (x - x.amax(-1, keepdim=True)).exp()
    return e / e.sum(-1, keepdim=True)


def softmax_off_by_one(x):
    peak = x.amax(-1, keepdim=True).clamp(min=0)
    e = (x - peak).exp()
    return e / ((-peak).exp() + e.sum(-1, keepdim=True))


def entropy_of_entropies(x):
    p = x.softmax(-1)
    q = (p * p.log()).softmax(-1)
    return -(q * q.log()).sum(-1)


def capped(x):
    return (30 * torch.tanh(x / 30)).softmax(-1)


def kurtosis(x):
    centred = x - x.mean(-1, keepdim=True)
    variance = (centred**2).mean(-1)
    return (centred**4).mean(-1) / (variance**2 + 1e-6)


def roots(x):
    return (x.abs() ** 1.5).sum(-1) + ((x * x + 1) ** -0.5).sum(-1)


CASES = {  # name: (function, rows that it takes, reductions, instructions for an element at most)
    "entropy": (entropy, 1, 0, 12),
    "entropy of shares": (entropy_of_shares, 1, 0, 20),
    "entropy by logsumexp": (entropy_by_logsumexp, 1, 0, 12),
    "entropy of groups": (entropy_of_groups, 1, 0, 20),
    "expectation": (expectation, 1, 0, 12),
    "divergence": (divergence, 2, 1, 28),
    "jensen shannon": (jensen_shannon, 2, 2, 120),
    "by hand": (softmax_by_hand, 1, 1, 6),
    "off by one": (softmax_off_by_one, 1, 1, 6),
    "entropies": (entropy_of_entropies, 1, 2, 90),
    "capped": (capped, 1, 1, 30),
    "kurtosis": (kurtosis, 1, 1, 10),
    "roots": (roots, 1, 0, 30),
}  # fmt: skip


def arguments(count, n=1024, m=16, dtype=BF16, device="meta", scale=1.0):
    return [
        torch.randn(m, n, generator=torch.Generator().manual_seed(seed)).mul(scale).to(dtype)
        .to(device).requires_grad_()
        for seed in range(count)
    ]  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_backward_kernels_are_short(name):
    function, count, reductions, instructions = CASES[name]
    kernel = htile.rowwise(function).inspect(*arguments(count), arch="sm_90a").backward
    found = [node for node in kernel.graph if node.op in REDUCTIONS or node.op is Op.GROUPED]
    assert len(found) == reductions
    assert kernel.plan.sweeps.costs[0] <= instructions


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("name", CASES)
def test_gradients(name, scale):
    function, count, *_ = CASES[name]
    rows = arguments(count, n=100, dtype=torch.float32, device="cpu", scale=scale)
    assert_gradients(htile.rowwise(function), *[row.detach() for row in rows])


@pytest.mark.parametrize("name", CASES)
def test_second_order(name):
    function, count, *_ = CASES[name]
    rows = arguments(count, n=36, m=3, dtype=torch.float32, device="cpu")
    rows = [row.detach() for row in rows]
    check_second(htile.rowwise(function), *rows, tolerance=1e-6)


@pytest.mark.parametrize("n", [64, 4096, 30011, 50256])
@pytest.mark.parametrize("name", CASES)
def test_a_forward_pass_in_training_computes_what_an_inference_does(name, n):
    """The graph that is differentiated is another, but the kernels of both are the same."""
    function, count, *_ = CASES[name]
    n += -n % 4 if "groups" in name else 0
    own = htile.rowwise(function).inspect(*[row.detach() for row in arguments(count, n)])
    trained = htile.rowwise(function).inspect(*arguments(count, n)).training.forward
    kinds = [sorted(str((node.op, node.arg)) for node in kernel.graph) for kernel in (own, trained)]
    assert kinds[0] == kinds[1]
    assert own.plan.numerics == trained.plan.numerics


def test_rows_whose_shares_are_zero_have_finite_gradients():
    """p * log(p) is 0 where p is, and so is its slope, where torch has NaN."""
    x = torch.tensor([[0.0, 300.0, 299.0, -300.0]], requires_grad=True)
    htile.rowwise(entropy_of_shares)(x).sum().backward()
    exact = x.detach().double()
    p = exact.softmax(-1)
    logarithm = exact.log_softmax(-1)
    slope = p * ((-p * logarithm).sum(-1, keepdim=True) * -1 - logarithm)
    torch.testing.assert_close(x.grad.double(), slope, rtol=1e-5, atol=1e-7)


def test_a_row_of_nan_or_infinities_has_a_gradient_of_nan():
    x = torch.zeros(3, 8)
    x[0, 3], x[1, 2], x[2] = torch.nan, torch.inf, -torch.inf
    for function in (entropy, entropy_by_logsumexp, expectation, softmax_by_hand):
        row = x.clone().requires_grad_()
        y = htile.rowwise(function)(row)
        y.backward(torch.ones_like(y))
        assert row.grad.isnan().all(), function


def test_an_argument_that_nothing_reads_changes_no_kernel():
    def with_another(x, y):
        return entropy(x)

    kernels = [htile.rowwise(f).inspect(*arguments(count), arch="sm_90a")
               for f, count in ((entropy, 1), (with_another, 2))]  # fmt: skip
    for of in (lambda k: k.backward, lambda k: k.training.forward):
        one, other = (str(of(kernel).plan).partition("\n")[2] for kernel in kernels)
        assert one == other


def test_a_total_that_is_infinite_gives_nan_as_in_torch():
    """Only of a softmax, whose total is finite, is the share over itself 1."""

    def shares(x, y):
        return torch.xlogy(p := x.exp() / y.exp().sum(-1, keepdim=True), p)

    made = [torch.tensor([[2.0, 0, 1, 2]]), torch.tensor([[300.0, 0, 1, 2]])]
    for given in (made, made[::-1]):
        rows = [row.clone().requires_grad_() for row in given]
        exact = [row.clone().requires_grad_() for row in given]
        htile.rowwise(shares)(*rows).sum().backward()
        torch.vmap(shares)(*exact).sum().backward()
        for row, right in zip(rows, exact, strict=True):
            assert torch.equal(row.grad.isnan(), right.grad.isnan())


def test_only_an_exponential_of_its_own_group_is_taken_for_a_share():
    """In a square of groups, `g - g.amax(-1)` subtracts what belongs to another row."""

    def functions_of(kernel):
        return {line.split("= ")[1].split("(")[0]
                for line in str(kernel.plan).splitlines() if "= exp" in line}  # fmt: skip

    def total(x, keepdim):
        g = x.view(8, 8)
        return (g - g.amax(-1, keepdim=keepdim)).exp().sum(-1)

    for keepdim, expected in ((True, {"exp_bounded"}), (False, {"exp"})):
        f = htile.rowwise(lambda x, keepdim=keepdim: total(x, keepdim))
        assert functions_of(f.inspect(*arguments(1, n=64)).backward) == expected


def test_equal_steps_are_one_and_arguments_stay():
    def twice(x, y):
        return (x - x.mean(-1, keepdim=True)) * (x.mean(-1, keepdim=True) + y)

    traced = htile.rowwise(twice).inspect(*arguments(2)).lowered.traced
    found = derivable(traced)
    assert [i.name for i in found.inputs] == ["x", "y"]
    assert sum(node.op is Op.MEAN for node in traced) == 2
    assert sum(node.op is Op.MEAN for node in found) == 1

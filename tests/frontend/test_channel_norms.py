"""Norms over channels, against torch's own of each row in float64, and the oracle."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.testing import assert_close
from tests.frontend.test_class_losses import by_row, close, random
from tests.gradients import check, check_second, check_tangents

M, N = 5, 96
WEIGHT, BIAS = random(N, seed=1), random(N, seed=2)

NORMS = {
    "groups of a row": lambda x, w, b: F.group_norm(x[None], 4)[0],
    "a weight": lambda x, w, b: F.group_norm(x[None], 6, w, b)[0],
    "one group": lambda x, w, b: F.group_norm(x[None], 1, w, eps=0.1)[0],
    "positions": lambda x, w, b: F.group_norm(x.view(1, 12, 8), 4, w[:12], b[:12]).view(-1),
    "positions of two axes": lambda x, w, b: F.group_norm(x.view(1, 6, 4, 4), 2, b[:6]).flatten(),
    "a batch": lambda x, w, b: F.group_norm(x.view(3, 4, 8), 2, bias=b[:4]).view(-1),
    "torch.group_norm": lambda x, w, b: torch.group_norm(x.view(1, 12, 8), 3).view(-1),
    "instances": lambda x, w, b: F.instance_norm(x.view(1, 12, 8)).view(-1),
    "instances, a weight": lambda x, w, b: F.instance_norm(
        x.view(2, 6, 8), weight=w[:6], bias=b[:6], eps=1e-3).view(-1),
    "instances, statistics": lambda x, w, b: F.instance_norm(
        x.view(1, 12, 8), b[:12], w[:12].abs(), w[:12], use_input_stats=False).view(-1),
    "a batch norm": lambda x, w, b: F.batch_norm(x[None], b, w.abs(), w, b)[0],
    "a batch norm of positions": lambda x, w, b: F.batch_norm(
        x.view(1, 12, 8), b[:12], w[:12].abs(), None, w[:12], eps=0.1).view(-1),
}  # fmt: skip


@pytest.mark.parametrize("name", NORMS)
def test_values(name):
    f, x = htile.rowwise(NORMS[name]), random(M, N)
    result = f(x, WEIGHT, BIAS)
    close(result, *by_row(NORMS[name], x, WEIGHT, BIAS))
    assert_close(f, result, x, WEIGHT, BIAS)


@pytest.mark.parametrize("name", NORMS)
def test_derivatives(name):
    """Torch takes no derivative of running statistics, nor a second one of a few of these."""
    f, args = htile.rowwise(NORMS[name]), (random(M, N), WEIGHT, BIAS)
    if "statistics" not in name and "batch norm" not in name:
        check(f, *args)
        check_second(f, *args)
        check_tangents(f, *args)
        return
    given = [args[0].clone().requires_grad_(), *args[1:]]
    f(*given).square().sum().backward()
    exact = [args[0].double().requires_grad_(), *(a.double() for a in args[1:])]
    torch.stack([NORMS[name](x, *exact[1:]) for x in exact[0]]).square().sum().backward()
    torch.testing.assert_close(given[0].grad, exact[0].grad.float(), rtol=1e-4, atol=1e-4)


def test_a_kernel():
    """One kernel, without a stack, forward and backward: groups of 128 are those of a warp."""
    @htile.rowwise
    def f(x, w: htile.Shared, b: htile.Shared):
        return F.silu(F.group_norm(x.view(1, 32, 128), 32, w, b)).view(-1)

    x, w, b = (torch.empty(*shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
               for shape in ((64, 4096), (32,), (32,)))  # fmt: skip
    kernel = f.inspect(x, w, b, arch="sm_90a")
    assert not kernel.resources.stack
    assert not kernel.backward.resources.stack
    given = [random(4, 4096), random(32, seed=1), random(32, seed=2)]
    assert_close(f, f(*given), *given)


@pytest.mark.parametrize("norm", [
    lambda x: F.group_norm(x[None], 4)[0], lambda x: F.batch_norm(x[None], x, x)[0],
])  # fmt: skip
def test_rows_of_any_length(norm):
    """They have no other shapes."""
    with pytest.raises(htile.UnsupportedError, match="leave dynamic_n out"):
        htile.rowwise(norm, dynamic_n=True)(random(M, 100))

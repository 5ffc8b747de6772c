"""Repeated calls of `htile::run`, on a GPU that torch on the CPU stands for."""

from types import SimpleNamespace

import pytest
import torch
from torch.autograd import forward_ad

import htile
from benchmarks.idle import idle_gpu
from htile.errors import GradientError, TraceError
from htile.run.operations import ops
from htile.testing import assert_close
from tests.on_cpu import computing
from tests.training import assert_gradients

RUN = torch.ops.htile.run.default
gain = 2.0


def scaled(x, w, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).mean() + eps) * w * gain


X, W = torch.randn(5, 64), torch.randn(64)


@pytest.fixture
def gpu(monkeypatch):
    """A function, torch's name of its graph, and how many calls of operations were no shortcuts."""
    found = SimpleNamespace(f=htile.rowwise(scaled), launched=[], long=0)
    values_of = ops.values_of

    def counted(*args):
        found.long += 1
        return values_of(*args)

    monkeypatch.setattr(ops, "values_of", counted)
    torch._dynamo.reset()
    with idle_gpu(computing(found.launched)):
        found.compiled = torch.compile(found.f, backend="aot_eager", fullgraph=True)
        before = {*ops.NAMED}
        for _ in range(2):
            assert_close(found.f, found.compiled(X, W), X, W)
        (found.name,) = [n for n in ops.NAMED if n not in before and n.startswith("scaled/")]
        found.long = 0
        yield found
    torch._dynamo.reset()


def run(gpu, x=X, w=W, eps=1e-6):
    (y,) = RUN(gpu.name, [x, w], [eps], [*x.shape[:-1]])
    assert_close(gpu.f, y, x, w, eps)


def test_other_rows_and_numbers(gpu):
    for m in (5, 9, 1):
        run(gpu, torch.randn(m, 64), W, 0.5)
    assert gpu.long <= 1, "the first one, if the compiled call is of another kind"
    gpu.long = 0
    for m in (5, 9, 1):
        run(gpu, torch.randn(m, 64), W, 0.25)
    assert gpu.long == 0


def test_other_tensors_go_the_long_way(gpu):
    run(gpu), run(gpu)
    gpu.long = 0
    moved = torch.empty(5 * 64 + 1)[1:].view(5, 64).copy_(X)
    for k, x in enumerate((moved, X.t().contiguous().t(), torch.randn(2048, 64)), 1):
        run(gpu, x)
        assert gpu.long == k
    run(gpu)
    assert gpu.long == 3


def test_what_is_refused_is_refused_again(gpu):
    run(gpu), run(gpu)
    launched = len(gpu.launched)
    with pytest.raises(GradientError):
        run(gpu, X.clone().requires_grad_())
    with forward_ad.dual_level(), pytest.raises(GradientError):
        run(gpu, forward_ad.make_dual(X, torch.ones_like(X)))
    assert len(gpu.launched) == launched
    run(gpu)
    assert len(gpu.launched) == launched + 1


def test_a_captured_value_that_changes(gpu, monkeypatch):
    run(gpu), run(gpu)
    monkeypatch.setitem(globals(), "gain", 3.0)
    with pytest.raises(TraceError, match="has changed since"):
        run(gpu)


def test_both_passes_of_a_compiled_function(gpu):
    for _ in range(3):
        x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
        y, g = gpu.compiled(x, w), torch.randn(5, 64)
        found = torch.autograd.grad(y, (x, w), g)
        right = torch.autograd.grad(gpu.f(x, w), (x, w), g)
        torch.testing.assert_close(found, right)
        long, gpu.long = gpu.long, 0
    assert long == 0
    assert_gradients(gpu.f, X, W)

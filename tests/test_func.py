"""torch.func of row-wise functions: gradients, one for each sample, Jacobians, second order.

They are held against torch's own functions in float64.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_map

import htile
from htile import UnsupportedError

M, N, B = 5, 8, 3


@htile.rowwise
def softmax(x):
    return torch.softmax(x, -1)


@htile.rowwise
def rmsnorm(x, weight, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).mean() + eps) * weight


@htile.rowwise
def added(x, y):
    return x * y.exp()


@htile.rowwise
def loss(x, target: htile.PerRow):
    return torch.logsumexp(x, -1) - x[target]


of_any_length = htile.rowwise(lambda x: torch.softmax(x, -1), dynamic_n=True)


def plain_softmax(x):
    return torch.softmax(x, -1)


def plain_rmsnorm(x, weight, eps=1e-6):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + eps) * weight


def plain_loss(x, target):
    return F.cross_entropy(x, target, reduction="none")


def row(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def total(function):
    """A number that depends on each result in another way."""
    return lambda *given: (function(*given).sin() + 1).square().sum()


def check(make, ours, right, *tensors):
    """Assert that a transform of our function gives what it gives of torch's in float64."""
    wide = [t.double() if t.is_floating_point() else t for t in tensors]
    found, exact = make(ours)(*tensors), make(right)(*wide)
    found, exact = (tree_map(torch.Tensor.double, each) for each in (found, exact))
    torch.testing.assert_close(found, exact, rtol=1e-4, atol=1e-5)


OF_BOTH = {
    "grad": (lambda f: grad(total(f), (0, 1)), row(M, N)),
    "the gradient of a weight alone": (lambda f: grad(total(f), 1), row(M, N)),
    "vjp": (lambda f: lambda x, w: vjp(f, x, w)[1](x + 1), row(M, N)),
    "jacrev": (lambda f: jacrev(f, (0, 1)), row(M, N)),
    "one for each sample": (lambda f: vmap(grad(total(f), (0, 1)), (0, None)), row(B, M, N)),
    "samples of one row": (lambda f: vmap(grad(total(f), (0, 1)), (0, None)), row(B, N)),
    "samples in the last dimension": (
        lambda f: vmap(grad(total(f), (0, 1)), (2, None), 1), row(M, N, B)
    ),
    "of a batch": (lambda f: grad(total(vmap(f, (0, None))), (0, 1)), row(B, M, N)),
    "of batches": (
        lambda f: vmap(vmap(grad(total(f), (0, 1)), (0, None)), (0, None)), row(2, B, M, N)
    ),
    "second order": (lambda f: grad(total(grad(total(f))), (0, 1)), row(M, N)),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_BOTH)
def test_gradients_of_rows_and_of_what_they_share(name):
    make, x = OF_BOTH[name]
    check(make, rmsnorm, plain_rmsnorm, x, row(N, seed=1))


@pytest.mark.parametrize("make", [
    lambda f: grad(total(f)), lambda f: vmap(grad(total(f))), lambda f: jacrev(jacrev(total(f))),
    lambda f: grad(total(grad(total(f)))), lambda f: vmap(jacrev(f)),
])  # fmt: skip
def test_gradients_of_rows(make):
    check(make, softmax, plain_softmax, row(M, N))


COMPILED = OF_BOTH | {
    "jvp": (lambda f: lambda x, w: jvp(f, (x, w), (x + 1, w * 2)), row(M, N)),
    "jacfwd": (lambda f: jacfwd(f), row(M, N)),  # torch 2.11 compiles it of one argument only
    "hessian": (lambda f: hessian(total(f), 1), row(M, N)),
    "the tangent of a gradient": (
        lambda f: lambda x, w: jvp(lambda x: grad(total(f), 1)(x, w), (x,), (x + 1,)), row(M, N)
    ),
    "vmap": (lambda f: vmap(f, (0, None)), row(B, M, N)),
    "vmap of vmap": (lambda f: vmap(vmap(f, (0, None)), (1, None)), row(B, 2, M, N)),
    "a weight of each sample": (
        lambda f: lambda x, w: vmap(grad(total(f), (0, 1)))(x, torch.stack([w, w + 1, w + 2])),
        row(B, M, N),
    ),
}  # fmt: skip


@pytest.mark.parametrize("backend", ("eager", "aot_eager"))
@pytest.mark.parametrize("name", COMPILED)
def test_transforms_in_a_compiled_graph(name, backend):
    """In one graph, which has the operations of forward and backward passes."""
    make, x = COMPILED[name]
    torch.compiler.reset()

    def compiled(f):
        is_ours = f is rmsnorm
        return torch.compile(make(f), fullgraph=True, backend=backend) if is_ours else make(f)

    check(compiled, rmsnorm, plain_rmsnorm, x, row(N, seed=1))


def test_autograd_of_a_compiled_graph_with_transforms():
    def outer(f):
        inner = lambda x, w: grad(total(f), 1)(x, w).sin().sum()  # noqa: E731
        if f is rmsnorm:
            inner = torch.compile(inner, fullgraph=True, backend="aot_eager", dynamic=True)

        def run(x, w):
            x, w = (t.clone().requires_grad_() for t in (x, w))
            return torch.autograd.grad(inner(x, w), (x, w))

        return run

    torch.compiler.reset()
    run = outer(rmsnorm)
    for m in (M, M + 4):
        check(lambda f: run if f is rmsnorm else outer(f), rmsnorm, plain_rmsnorm, row(m, N),
              row(N, seed=1))  # fmt: skip


SCALE = 2.0


def test_captured_values_of_a_compiled_graph_with_transforms(monkeypatch):
    f = htile.rowwise(lambda x: x * SCALE)
    run = grad(lambda x: f(x).sum())
    run = torch.compile(run, fullgraph=True, backend="aot_eager")
    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        assert torch.equal(run(row(M, N)), torch.full((M, N), scale))


def test_what_compiled_transforms_refuse():
    x = row(M, N)
    table = torch.compile(grad(lambda x: of_any_length(x).sum()), fullgraph=True, backend="eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"dynamic_n=True in torch\.compile"):
        table(x)
    written = torch.compile(grad(lambda x: softmax(x, out=torch.empty(M, N)).sum()), fullgraph=True,
                            backend="eager")  # fmt: skip
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"out= inside torch\.func"):
        written(x)


def test_a_weight_of_each_sample():
    """What the rows of a call share may differ from sample to sample: it becomes a row of them."""
    x, w = row(B, M, N), row(B, N, seed=1)
    for make in (lambda f: vmap(grad(total(f), (0, 1))), lambda f: vmap(jacrev(f, (0, 1)))):
        check(make, rmsnorm, plain_rmsnorm, x, w)
    check(lambda f: vmap(grad(total(f), (0, 1)), (None, 1)), rmsnorm, plain_rmsnorm, x[0], w.T)

    def scaled(x, s):
        return torch.softmax(x * s, -1)

    check(lambda f: vmap(grad(total(f), (0, 1))), htile.rowwise(scaled), scaled, x, w[:, 0])
    for dim, number in ((None, w[0, 0]), (0, w[:, 0])):  # samples of one row and a number
        make = lambda f, dim=dim: vmap(grad(total(f), (0, 1)), (0, dim))  # noqa: E731
        check(make, htile.rowwise(scaled), scaled, x[:, 0], number)
    check(lambda f: lambda x, w: grad(lambda x, w: total(lambda x, w: vmap(grad(total(f)))(x, w))(
        x, w), (0, 1))(x, w), rmsnorm, plain_rmsnorm, x, w)  # fmt: skip


def test_losses_of_samples():
    targets = torch.arange(B * M).view(B, M) % N
    for make in (grad, lambda f: vmap(grad(f))):
        for reduce in (torch.sum, torch.mean):
            check(lambda f, m=make, r=reduce: m(lambda x, t: r(f(x, t))), loss, plain_loss,
                  row(B, M, N) if make is not grad else row(M, N),
                  targets if make is not grad else targets[0])  # fmt: skip


def test_rows_that_repeat():
    check(lambda f: grad(total(f), (0, 1)), added, lambda x, y: x * y.exp(), row(M, N), row(1, N))


def test_autograd_outside_of_a_transform():
    for make in (lambda f: vmap(f, (0, None)), lambda f: lambda x, w: grad(total(f))(x[0], w)):
        def outer(f, make=make):
            def run(x, w):
                x, w = (t.clone().requires_grad_() for t in (x, w))
                return torch.autograd.grad(make(f)(x, w).sin().sum(), (x, w))

            return run

        check(outer, rmsnorm, plain_rmsnorm, row(B, M, N), row(N, seed=1))


@pytest.mark.parametrize("which", (0, 1))
def test_a_pullback_is_differentiated_for_what_it_closes_over(which):
    """It runs when the transform that made it has ended, which wraps what it has kept."""

    def pulled(f):
        def run(*given):
            def of_one(t):
                return f(*given[:which], t, *given[which + 1 :])

            y, pull = vjp(of_one, given[which])
            return pull(y.cos() + given[0])[0]

        return run

    def outer(f):
        def run(*given):
            given = [t.clone().requires_grad_() for t in given]
            return torch.autograd.grad(pulled(f)(*given).sin().sum(), given)

        return run

    for make in (outer, lambda f: grad(total(pulled(f)), (0, 1))):
        check(make, rmsnorm, plain_rmsnorm, row(M, N), row(N, seed=1))
        check(make, added, lambda x, y: x * y.exp(), row(M, N), row(M, N, seed=1))


def test_transforms_of_one_argument_in_a_batch_of_another():
    x, w = row(B, M, N), row(N, seed=1)
    for make in (
        lambda f: vmap(lambda x, w: vjp(lambda w: f(x, w), w)[1](x.sin())[0], (0, None)),
        lambda f: vmap(lambda x, w: jacrev(f, 1)(x, w), (0, None)),
        lambda f: vmap(lambda x, w: jvp(lambda w: f(x, w), (w,), (w.cos(),))[1], (0, None)),
        lambda f: grad(total(lambda x, w: vmap(lambda x: grad(total(f), 1)(x, w))(x)), (0, 1)),
    ):
        check(make, rmsnorm, plain_rmsnorm, x, w)


def test_a_module_as_a_function():
    class Norm(torch.nn.Module):
        def __init__(self, norm):
            super().__init__()
            self.weight, self.norm = torch.nn.Parameter(row(N, seed=1)), norm

        def forward(self, x):
            return self.norm(x, self.weight)

    def of(norm):
        module = Norm(norm)

        def run(x):
            given = {"weight": module.weight.detach().to(x.dtype)}
            return grad(lambda given: total(lambda x: functional_call(module, given, x))(x))(given)

        return run

    check(of, rmsnorm, plain_rmsnorm, row(M, N))


def test_gradients_have_the_dtypes_of_arguments_and_integers_none():
    found = grad(total(lambda x, w: rmsnorm(x, w).float()), (0, 1))(row(M, N).bfloat16(), row(N))
    assert [each.dtype for each in found] == [torch.bfloat16, torch.float32]
    double = htile.rowwise(lambda x: x * 2)
    assert not grad(lambda x: double(x.int()).sum() + x.sum() * 0)(row(M, N)).any()


def test_sums_over_rows_of_each_sample_are_differentiated_again():
    weight = row(N, seed=1)

    def make(f):
        def run(x):
            w = weight.to(x.dtype, copy=True).requires_grad_()
            found = vmap(grad(lambda x: total(f)(x, w)))(x)
            return torch.autograd.grad(found.sin().sum(), w)

        return run

    check(make, rmsnorm, plain_rmsnorm, row(B, M, N))
    check(lambda f: vmap(jacrev(jacrev(total(f), 1), (0, 1)), (0, None)), rmsnorm, plain_rmsnorm,
          row(B, 2, N), weight)  # fmt: skip


def test_out_is_refused():
    with pytest.raises(UnsupportedError, match=r"softmax: out= inside torch\.func"):
        grad(lambda x: softmax(x, out=torch.empty(M, N)).sum())(row(M, N))

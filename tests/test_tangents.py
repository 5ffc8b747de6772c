"""Tangents of row-wise functions, in torch.func and by dual numbers, beside torch's in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad
from torch.func import grad, hessian, jacfwd, jacrev, jvp, linearize, vjp, vmap
from torch.utils._pytree import tree_map

import htile
from htile import GradientError, UnsupportedError
from htile.build.arch import DEFAULT
from htile.frontend.roles import classify
from htile.frontend.trace import trace
from htile.run.differentiation.gradients import part_named
from htile.run.differentiation.tangents import tangents_of
from htile.run.runner import Runner
from htile.run.vmap import batched, mapped_and_shared
from tests.frontend import test_derive as derivatives
from tests.test_func import (
    B,
    M,
    N,
    added,
    check,
    loss,
    plain_loss,
    plain_rmsnorm,
    plain_softmax,
    rmsnorm,
    row,
    softmax,
    total,
)


def pushed(count=1):
    """A transform: the results and their tangents, for tangents of the first `count` arguments."""

    def make(f):
        def run(*args):
            primals, rest = args[:count], args[count : len(args) - count]
            return jvp(lambda *x: f(*x, *rest), primals, args[len(args) - count :])

        return run

    return make


@htile.rowwise
def layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape, weight, bias)


def plain_layer_norm(x, weight, bias):
    return F.layer_norm(x, x.shape[-1:], weight, bias)


@htile.rowwise
def several(x, s, t: htile.PerRow):
    y = x * s
    return {"row": y.sin(), "sum": (y * t).sum(), "kept": y.amax(keepdim=True), "place": x.argmax()}


def plain_several(x, s, t):
    y = x * s
    return {"row": y.sin(), "sum": (y * t[..., None]).sum(-1), "kept": y.amax(-1, keepdim=True),
            "place": x.argmax(-1)}  # fmt: skip


@htile.rowwise
def summed(x, weight):
    y = torch.tanh(x * weight)
    return y, htile.sum_rows(y * y), htile.sum_rows((y * x).sum())


def plain_summed(x, weight):
    y = torch.tanh(x * weight)
    return y, (y * y).sum(0), (y * x).sum()


@htile.rowwise
def groups(x):
    parts = torch.softmax(x.view(2, 4), -1)
    return torch.cat((parts[1].cumsum(-1), parts[0].roll(1))), x[::2].exp().sum()


def plain_groups(x):
    parts = torch.softmax(x.unflatten(-1, (2, 4)), -1)
    both = parts[..., 1, :].cumsum(-1), parts[..., 0, :].roll(1, -1)
    return torch.cat(both, -1), x[..., ::2].exp().sum(-1)


@htile.rowwise
def scaled(x, count):
    return x * count + (x > 0)


def plain_scaled(x, count):
    return x * count + (x > 0)


@htile.rowwise
def largest(x):
    return x.amax(), x.max(-1).values, torch.maximum(x, 1 - x), F.relu(x - 1)


def plain_largest(x):
    return x.amax(-1), x.max(-1).values, torch.maximum(x, 1 - x), F.relu(x - 1)


multiplied = htile.rowwise(lambda x: x.cumprod(-1))
LABELS = torch.arange(M) % N
TIES = torch.tensor([[1.0, 3.0, 3.0, 0.5, 0.0, 3.0], [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]])
ZEROS = row(M, N) * (row(M, N, seed=3) > -0.8)
PUSHED = {
    "softmax": (softmax, plain_softmax, 1, row(M, N)),
    "rmsnorm": (rmsnorm, plain_rmsnorm, 2, row(M, N), row(N, seed=1)),
    "the row of a norm alone": (rmsnorm, plain_rmsnorm, 1, row(M, N), row(N, seed=1)),
    "a weight alone": (
        lambda w, x: rmsnorm(x, w), lambda w, x: plain_rmsnorm(x, w), 1, row(N), row(M, N, seed=1)
    ),
    "layer norm": (layer_norm, plain_layer_norm, 3, row(M, N), row(N, seed=1), row(N, seed=2)),
    "a loss": (loss, plain_loss, 1, row(M, N), LABELS),
    "several results": (
        several, plain_several, 3, row(M, N), torch.tensor(0.7), row(M, seed=1)
    ),
    "a scalar alone": (
        lambda s, x, t: several(x, s, t), lambda s, x, t: plain_several(x, s, t), 1,
        torch.tensor(0.7), row(M, N), row(M, seed=1),
    ),
    "a value of each row alone": (
        lambda t, x, s: several(x, s, t), lambda t, x, s: plain_several(x, s, t), 1,
        row(M, seed=1), row(M, N), torch.tensor(0.7),
    ),
    "sums over rows": (summed, plain_summed, 2, row(M, N), row(N, seed=1)),
    "sums over rows, of a weight": (
        lambda w, x: summed(x, w), lambda w, x: plain_summed(x, w), 1, row(N), row(M, N, seed=1)
    ),
    "groups": (groups, plain_groups, 1, row(M, N)),
    "integers": (scaled, plain_scaled, 1, row(M, N), torch.arange(M * N).view(M, N)),
    "cumulative products": (multiplied, lambda x: x.cumprod(-1), 1, ZEROS),
    "ties": (largest, plain_largest, 1, TIES),
    "rows that repeat": (added, lambda x, y: x * y.exp(), 2, row(M, N), row(1, N, seed=1)),
    "one row": (softmax, plain_softmax, 1, row(N)),
    "many dimensions": (rmsnorm, plain_rmsnorm, 2, row(2, 3, M, N), row(N, seed=1)),
    "no rows": (rmsnorm, plain_rmsnorm, 2, row(0, N), row(N, seed=1)),
}  # fmt: skip


def tangents_for(args, count):
    return [row(*arg.shape, seed=10 + k) for k, arg in enumerate(args[:count])]


@pytest.mark.parametrize("name", PUSHED)
def test_jvp(name):
    ours, right, count, *args = PUSHED[name]
    check(pushed(count), ours, right, *args, *tangents_for(args, count))


def unpacked(result):
    """A result and its tangent, or zeros where it has none."""
    primal, tangent = forward_ad.unpack_dual(result)
    return primal, torch.zeros_like(primal) if tangent is None else tangent


@pytest.mark.parametrize("name", PUSHED)
def test_dual_numbers(name):
    ours, right, count, *args = PUSHED[name]

    def make(f):
        def run(*args):
            args, given = args[: len(args) - count], args[len(args) - count :]
            with forward_ad.dual_level():
                both = zip(args, given, strict=False)
                found = f(*(forward_ad.make_dual(*each) for each in both), *args[count:])
                return tree_map(unpacked, found)

        return run

    check(make, ours, right, *args, *tangents_for(args, count))


def test_tangents_lie_anyhow():
    x, t = row(M, N), row(N, M, seed=1).T
    for each in (t, torch.ones(()).expand(M, N), t[:, :1].expand(M, N)):
        check(pushed(), softmax, plain_softmax, x, each)


def test_tangents_have_the_dtype_of_what_they_belong_to():
    x, w = row(M, N).bfloat16(), row(N, seed=1)
    y, t = jvp(rmsnorm, (x, w), (x, w))
    assert y.dtype is t.dtype is torch.bfloat16 and y.shape == t.shape
    right = jvp(plain_rmsnorm, (x.double(), w.double()), (x.double(), w.double()))[1]
    torch.testing.assert_close(t.double(), right, rtol=0.01, atol=0.01)


OF_BOTH = {
    "jacfwd": lambda f: jacfwd(f, (0, 1)),
    "jacfwd of a weight": lambda f: jacfwd(f, 1),
    "hessian": lambda f: hessian(total(f), (0, 1)),
    "hessian by jacfwd of jacfwd": lambda f: jacfwd(jacfwd(total(f), (0, 1)), (0, 1)),
    "jacrev of jacfwd": lambda f: jacrev(jacfwd(total(f), 0), 0),
    "jvp of grad": lambda f: lambda x, w: jvp(grad(total(f), (0, 1)), (x, w), (w + x, w)),
    "grad of jvp": lambda f: grad(
        lambda x, w: total(lambda x, w: jvp(f, (x, w), (x.sin(), w.cos()))[1])(x, w), (0, 1)
    ),
    "jvp of jvp": lambda f: lambda x, w: jvp(
        lambda x, w: jvp(f, (x, w), (x.sin(), w))[1], (x, w), (x * 2, w.cos())
    ),
    "jvp of vjp": lambda f: lambda x, w: jvp(lambda x: vjp(f, x, w)[1](x.sin()), (x,), (x + 1,)),
    "linearize": lambda f: lambda x, w: linearize(f, x, w)[1](x + 1, w + 1),
}


@pytest.mark.parametrize("name", OF_BOTH)
def test_transforms(name):
    check(OF_BOTH[name], rmsnorm, plain_rmsnorm, row(3, N), row(N, seed=1))


OF_BATCHES = {
    "vmap of jvp": lambda f: vmap(lambda x, w: jvp(f, (x, w), (x.sin(), w)), (0, None)),
    "samples in the last dimension": lambda f: vmap(
        lambda x, w: jvp(lambda x: f(x, w), (x,), (x.sin(),))[1], (2, None), 1
    ),
    "jvp of vmap": lambda f: lambda x, w: jvp(vmap(f, (0, None)), (x, w), (x.sin(), w)),
    "jacfwd of each": lambda f: vmap(jacfwd(f, (0, 1)), (0, None)),
    "hessian of each": lambda f: vmap(hessian(total(f), (0, 1)), (0, None)),
    "hessian of all": lambda f: hessian(total(vmap(f, (0, None))), 1),
}


@pytest.mark.parametrize("name", OF_BATCHES)
def test_batches(name):
    x = row(B, 2, N) if "last" not in name else row(2, N, B)
    check(OF_BATCHES[name], rmsnorm, plain_rmsnorm, x, row(N, seed=1))


def test_a_jacobian_forward_is_the_one_backward():
    x = row(3, N)
    for f in (softmax, lambda x: groups(x)[0]):
        torch.testing.assert_close(jacfwd(f)(x), jacrev(f)(x))
    def floating(*args):
        return {name: y for name, y in several(*args).items() if name != "place"}

    args = x, torch.tensor(0.7), row(3)
    found, right = jacfwd(floating, (0, 1, 2))(*args), jacrev(floating, (0, 1, 2))(*args)
    torch.testing.assert_close(found, right)


def test_hessians_of_losses_and_sums_over_rows():
    x, w = row(3, N), row(N, seed=1)
    check(lambda f: hessian(lambda x: f(x, LABELS[:3]).sum()), loss, plain_loss, x)
    check(lambda f: hessian(lambda x, w: f(x, w)[1].sin().sum(), (0, 1)),
          summed, plain_summed, x, w)  # fmt: skip


def test_without_gradients_and_in_batches_of_dual_numbers():
    x, t, w = row(B, M, N), row(B, M, N, seed=1), row(N, seed=2)
    right = jvp(plain_rmsnorm, (x.double(), w.double()), (t.double(), w.double()))[1].float()
    for of in (rmsnorm, vmap(rmsnorm, (0, None))):
        with torch.no_grad(), forward_ad.dual_level():
            y = of(forward_ad.make_dual(x, t), forward_ad.make_dual(w, w))
            torch.testing.assert_close(forward_ad.unpack_dual(y).tangent, right)
        with torch.no_grad():
            torch.testing.assert_close(jvp(of, (x, w), (t, w))[1], right)


def test_tangents_of_tables():
    @htile.rowwise
    def looked_up(x, table: htile.Shared, index: htile.PerRow):
        return x * table[index].exp()

    check(pushed(2), lambda x, table, i: looked_up(x, table, i),
          lambda x, table, i: x * table[i].exp(), row(M, N), row(3, N, seed=1),
          torch.arange(M) % 3, row(M, N, seed=2), row(3, N, seed=3))  # fmt: skip


def test_gradients_and_tangents_of_dual_numbers():
    """Forward over reverse, and reverse over forward."""

    def make(f):
        def run(x, w, t):
            x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
            with forward_ad.dual_level():
                y = f(forward_ad.make_dual(x, t), w)
                tangent = forward_ad.unpack_dual(y).tangent
                over_forward = torch.autograd.grad(tangent.sin().sum(), (x, w), retain_graph=True)
                found = torch.autograd.grad(y.sin().sum(), (x, w), create_graph=True)
                over_reverse = [forward_ad.unpack_dual(g).tangent for g in found]
                cotangent = forward_ad.make_dual(torch.ones_like(t), t)
                of_cotangent = forward_ad.unpack_dual(
                    torch.autograd.grad(f(x, w), x, cotangent)[0]
                ).tangent
            return [*over_forward, *(g.detach() for g in over_reverse), of_cotangent]

        return run

    check(make, rmsnorm, plain_rmsnorm, row(M, N), row(N, seed=1), row(M, N, seed=2))


def test_a_result_may_have_a_gradient_or_a_tangent():
    def function(x, w):
        return x * 2, x.detach() * w

    def make(f):
        def run(x, w):
            w = w.clone().requires_grad_()
            with forward_ad.dual_level():
                both = f(forward_ad.make_dual(x, x.sin()), w)
                (first, tangent), (second, none) = map(unpacked, both)
                of_weight = torch.autograd.grad((first + second).sum(), w)
            return tangent, none.detach(), of_weight

        return run

    check(make, htile.rowwise(function), function, row(M, N), row(N, seed=1))


def test_ties_and_third_order():
    """A backward pass reads the maximum that the forward pass kept, with its tangent."""
    x = torch.tensor([[1.0, 3.0, 3.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
    summed = htile.rowwise(lambda x: torch.logsumexp(x, -1))
    for make in (lambda f: hessian(total(f)), lambda f: jacfwd(hessian(total(f)))):
        check(make, summed, lambda x: torch.logsumexp(x, -1), x)
        check(make, softmax, plain_softmax, x)


def test_no_tangents_where_none_is_due():
    x, t = row(M, N), row(M, N, seed=1)
    places = htile.rowwise(lambda x: (x.argmax(), x.detach() * 2 + x.floor()))
    found, tangents = jvp(places, (x,), (t,))
    right, zeros = jvp(lambda x: (x.argmax(-1), x.detach() * 2 + x.floor()), (x,), (t,))
    torch.testing.assert_close(found, right)
    torch.testing.assert_close(tangents, zeros)
    with forward_ad.dual_level():
        assert not any(forward_ad.unpack_dual(y).tangent is not None and y.any()
                       for y in softmax(x)[None] * 0)  # fmt: skip


def test_rounded_results_have_rounded_tangents():
    quantize = htile.rowwise(lambda x, scale: (x / scale).to(torch.float8_e4m3fn))
    x, t, scale = row(M, N), row(M, N, seed=1), torch.tensor(0.1)
    found = jvp(lambda x: quantize(x, scale), (x,), (t,))[1]
    right = jvp(lambda x: (x / scale).to(torch.float8_e4m3fn), (x,), (t,))[1]
    assert found.dtype is torch.float8_e4m3fn
    torch.testing.assert_close(found.float(), right.float())
    wide = htile.rowwise(lambda x, scale: x.float() * scale)
    x, t = x.to(found.dtype), t.to(found.dtype)
    torch.testing.assert_close(
        jvp(lambda x: wide(x, scale), (x,), (t,))[1], t.float() * scale
    )


def test_one_call_of_a_kernel_gives_the_tangents(monkeypatch):
    computed, names = Runner.computed, []

    def counted(self, *args):
        names.append(self.graph.name)
        return computed(self, *args)

    monkeypatch.setattr(Runner, "computed", counted)
    jvp(rmsnorm, (row(M, N), row(N)), (row(M, N), row(N)))
    assert names == ["rmsnorm", "rmsnorm_tangents"]


# ---- its kernels ---------------------------------------------------------------------------------


def pushed_runner(f, args):
    """A call's runner, that of its tangents for all floating arguments, its arguments, the rows."""
    args = f._signature.bind(args, {})
    call = classify(f._signature, args)
    graph = trace(f._fn, call.specs, call.n)
    run = Runner(graph, call.specs, False, {})
    both = zip(run.parameters.names, args, strict=True)
    tensors = [(name, arg) for name, arg in both if isinstance(arg, torch.Tensor)]
    made = tangents_of(run, tuple(name for name, arg in tensors if arg.is_floating_point()))
    lists = args, args
    return run, made.run, tuple(lists[number][k] for number, k in made.sources), call.lead


@pytest.mark.parametrize("name", derivatives.SHAPES)
def test_kernels_can_be_made(name):
    """Also of tangents of a batch, of which all rows of a sample share some."""
    f = htile.rowwise(derivatives.SHAPES[name])
    args = tuple(derivatives._argument(p, k) for k, p in enumerate(f._signature.names))
    _, run, values, lead = pushed_runner(f, args)
    assert f"{f._signature.name}_tangents" in run.kernel(values, lead, DEFAULT).source
    dims = tuple(0 if name.startswith("t_") else None for name in run.parameters.names)
    if shared := mapped_and_shared(run, dims):
        values = tuple(v[None] if dim == 0 else v for v, dim in zip(values, dims, strict=True))
        values, run = batched(run, 1, dims, values, lead), run.unshared(shared)
        assert run.kernel(values, (1, *lead), DEFAULT).source


def test_the_graphs_of_tangents_are_found_by_their_names():
    """So a process finds them whose program comes of a cache of torch."""
    run, made, *_ = pushed_runner(rmsnorm, (row(M, N), row(N)))
    whole, _, part = made.name.rpartition("|")
    assert whole == run.name and part_named(run, part) is made
    samples = made.unshared(("t_weight",))
    assert part_named(made, samples.name.rpartition("|")[2]) is samples


# ---- what is refused -----------------------------------------------------------------------------


def test_what_has_no_tangents_says_so():
    x = row(M, N)
    with pytest.raises(GradientError, match="out is a max over all rows"):
        jvp(htile.rowwise(lambda x: htile.max_rows(x)), (x,), (x,))
    anyhow = htile.rowwise(softmax.__wrapped__, dynamic_n=True)
    with pytest.raises(GradientError, match="dynamic_n=True"):
        jvp(anyhow, (x,), (x,))
    with pytest.raises(GradientError, match=r"softmax: .* write torch\.func\.jacfwd"):
        torch.autograd.functional.jacobian(softmax, x, strategy="forward-mode", vectorize=True)
    with forward_ad.dual_level(), pytest.raises(GradientError, match="dynamic_n=True"):
        anyhow(forward_ad.make_dual(x, x))


def test_tables_of_each_sample_are_refused():
    @htile.rowwise
    def looked_up(x, table: htile.Shared, index: htile.PerRow):
        return x * table[index]

    x, index = row(M, N), torch.arange(M) % 3
    with pytest.raises(UnsupportedError, match="vmap maps over table, which all rows"):
        vmap(lambda table: jvp(lambda x: looked_up(x, table, index), (x,), (x,)))(row(B, 3, N))


def test_out_is_refused():
    x = row(M, N).bfloat16()
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="softmax: out= inside"):
        softmax(forward_ad.make_dual(x, x), out=torch.empty_like(x))
    with forward_ad.dual_level(), pytest.raises(GradientError, match="out carries a forward-mode"):
        softmax(x, out=forward_ad.make_dual(torch.empty_like(x), x))


def test_what_is_computed_without_gradients_has_no_tangent():
    """Inside a row-wise function; torch's forward mode carries the tangent on."""

    def f(x):
        with torch.no_grad():
            scale = torch.exp(x)
        return x * scale

    x, direction = torch.randn(3, 8), torch.randn(3, 8)
    found = jvp(htile.rowwise(f), (x,), (direction,))[1]
    torch.testing.assert_close(found, direction * x.exp())
    torch.testing.assert_close(jvp(f, (x,), (direction,))[1], direction * x.exp() * (1 + x))

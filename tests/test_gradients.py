"""Calls whose results autograd differentiates, on the CPU, where torch evaluates the graphs."""

from __future__ import annotations

import importlib
import pathlib

import pytest
import torch
import torch.nn.functional as F

import htile
from examples.gallery import NAMES, variants
from htile.errors import GradientError, UnsupportedError
from htile.frontend.ops import REDUCTIONS
from htile.lower.patterns import count_short_functions
from tests.training import assert_gradients, cotangents_of, expected, gradients, leaves_of

EXAMPLES = sorted(
    path.stem
    for path in pathlib.Path("examples").glob("*.py")
    if not path.stem.startswith(("_", "char", "handwritten", "run"))
)
BF16, F32 = torch.bfloat16, torch.float32
TIED = {"l2_wrap"}  # x.max() shares a gradient among equal elements; under vmap torch's does not


@htile.rowwise
def softmax(x):
    return torch.softmax(x, -1)


@htile.rowwise
def rmsnorm(x, weight, eps: float = 1e-6):
    return x * torch.rsqrt((x * x).mean() + eps) * weight


@htile.rowwise
def layernorm(x, weight, bias):
    return F.layer_norm(x, x.shape, weight, bias)


@htile.rowwise
def log_softmax(x):
    return torch.log_softmax(x, -1)


@htile.rowwise
def swiglu(gate, up):
    return F.silu(gate) * up


@htile.rowwise
def residual_norm(x, residual, weight):
    s = x + residual
    return s * torch.rsqrt((s * s).mean() + 1e-6) * weight, s


@htile.rowwise
def nll(logits, label: htile.PerRow):
    return F.cross_entropy(logits, label)


@htile.rowwise
def scaled(x, scale: htile.PerRow, factor: htile.Scalar):
    return torch.tanh(x) * scale * factor


@htile.rowwise
def many(x):
    return {"y": x.exp(), "total": x.sum(), "largest": x.argmax(), "mask": x > 0}


def row(*shape, dtype=F32, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made).to(dtype).requires_grad_()


def kept_by(f):
    """The names of what the backward passes of the last kind of call of `f` read."""
    (run,) = f._differentiable._runners.values()
    derivative = [*run.derivatives.values()][-1]
    results = [derivative.forward.graph.outputs[k].name for k in derivative.kept_results]
    return [run.specs[k].name for k in derivative.kept_arguments], results


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_examples(name, dtype):
    module = importlib.import_module(f"examples.{name}")
    torch.manual_seed(0)
    assert_gradients(getattr(module, name), *module.arguments(40, 96, dtype, "cpu"))


@pytest.mark.parametrize("name", sorted({*NAMES} - TIED))
def test_gallery(name):
    module = importlib.import_module(f"examples.gallery.{name}")
    size = getattr(module, "SMALL", (64,))[0]
    torch.manual_seed(0)
    f, args = getattr(module, name), module.arguments(20, size, F32, "cpu")
    assert_gradients(f, *args, *without_default(f, args, variants(name)[0]))


def without_default(f, args, variant):
    """The values of a variant for the parameters behind these that have none."""
    parameters = f._signature.parameters[len(args) :]
    return [variant[p.name] for p in parameters if p.default is p.empty]


ANY_LENGTH = {
    f.__name__: htile.rowwise(f.__wrapped__, dynamic_n=True)
    for f in (softmax, log_softmax, rmsnorm, layernorm, swiglu, residual_norm, nll)
}


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("n", (1, 2, 3, 64, 65, 100, 128, 1000, 1024))
@pytest.mark.parametrize("name", ANY_LENGTH)
def test_rows_of_any_length(name, n, dtype):
    f = ANY_LENGTH[name]
    rows = [row(5, n, dtype=dtype, seed=k) for k in (1, 2)]
    columns = [row(n, dtype=dtype, seed=k) for k in (3, 4)]
    args = {
        "rmsnorm": (rows[0], columns[0]), "layernorm": (rows[0], *columns), "swiglu": rows,
        "residual_norm": (*rows, columns[0]), "nll": (rows[0], torch.arange(5) % n),
    }.get(name, rows[:1])  # fmt: skip
    assert_gradients(f, *args)
    with torch.no_grad():
        plain = torch.utils._pytree.tree_leaves(f(*args))
    assert all(map(torch.equal, torch.utils._pytree.tree_leaves(f(*args)), plain))


def test_second_order_of_rows_of_any_length():
    args = row(4, 100), row(100, seed=1)

    def second(f):
        first = torch.autograd.grad(f(*args).pow(3).sum(), args, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), args)

    for got, right in zip(second(ANY_LENGTH["rmsnorm"]), second(rmsnorm), strict=True):
        torch.testing.assert_close(got, right)


def test_one_derivative_serves_a_bucket(monkeypatch):
    from htile.run.differentiation import derivatives as module

    made, derive = [], module.derive
    monkeypatch.setattr(module, "derive", lambda *args: made.append(args) or derive(*args))
    f = htile.rowwise(rmsnorm.__wrapped__, dynamic_n=True)
    for n in (66, 100, 128, 66):
        f(row(4, n), row(n)).sum().backward()
    assert len(made) == 2 * 2  # rows are whole vectors or not


def test_deviations_beside_another_axis():
    assert_gradients(square_deviations, row(5, 64))


def test_one_value_a_row_and_a_device_scalar():
    assert_gradients(scaled, row(3, 5, 8), row(3, 5, seed=1), torch.tensor(0.7))
    assert_gradients(scaled, row(3, 5, 8), row(3, 5, seed=1), torch.tensor([0.7]))


def test_rows_that_repeat_get_the_sum_over_their_repetitions():
    for shape in ((1, 8), (8,), (3, 1, 8)):
        assert_gradients(swiglu, row(3, 5, 8, dtype=BF16), row(*shape, dtype=BF16, seed=1))


def test_rows_of_one_element_and_no_rows():
    assert_gradients(rmsnorm, row(4, 1), row(1, seed=1))
    x, w = row(0, 8), row(8)
    rmsnorm(x, w).sum().backward()
    assert x.grad.shape == (0, 8) and torch.equal(w.grad, torch.zeros(8))


def test_integers_and_masks_among_the_results():
    x = row(4, 8)
    found = many(x)
    assert [name for name, t in found.items() if t.requires_grad] == ["y", "total"]
    assert_gradients(many, x)


@pytest.mark.parametrize("name", (
    "rmsnorm_casting", "layernorm_saved", "group_norm", "gated_rmsnorm", "dyt", "polynorm",
    "modulated_norm",
))  # fmt: skip
def test_backward_kernels_compile_at_the_sizes_of_models(name):
    """Those that docs/language.md lists."""
    module = importlib.import_module(f"examples.gallery.{name}")
    args = module.arguments(*module.SIZE, BF16, "meta")
    kernel = getattr(module, name).inspect(*args, arch="sm_90a").backward
    assert kernel.resources.registers


# ---- which gradients are asked for ---------------------------------------------------------------


def test_only_what_requires_grad_has_a_gradient():
    x, w = row(4, 8), row(8, seed=1)
    y = rmsnorm(x.detach(), w)
    y.sum().backward()
    assert x.grad is None and w.grad is not None
    assert not rmsnorm(x.detach(), w.detach()).requires_grad
    with torch.no_grad():
        assert not rmsnorm(x, w).requires_grad
    with torch.inference_mode():
        assert rmsnorm(x, w).is_inference()


def test_each_result_alone_and_all_together():
    args = row(4, 8), row(4, 8, seed=1), row(8, seed=2)
    for chosen in ((0,), (1,), (0, 1)):
        made, leaves = leaves_of(args)
        results = residual_norm(*made)
        given = cotangents_of(results)
        outs = [results[k] for k in chosen]
        found = gradients(outs, leaves, [given[k] for k in chosen])
        zeros = [g if k in chosen else torch.zeros_like(g) for k, g in enumerate(given)]
        right = expected(residual_norm, torch.float64, args, results, zeros)
        for got, exact in zip(found, right, strict=True):
            wanted = torch.zeros_like(exact) if got is None else got.double()
            torch.testing.assert_close(wanted, exact, rtol=1e-5, atol=1e-6)


def test_a_result_that_nobody_differentiates_adds_no_nan():
    """A cotangent of zeros times an infinite slope would be NaN."""

    @htile.rowwise
    def roots(x):
        return x * 2, x.sqrt()

    x = torch.zeros(3, 4, requires_grad=True)
    doubled, _ = roots(x)
    doubled.sum().backward()
    assert torch.equal(x.grad, torch.full((3, 4), 2.0))


def test_a_result_of_which_what_follows_has_no_gradient():
    """autograd then runs its backward pass without any cotangent."""
    two = htile.rowwise(lambda y, k: (y * 2, k * 3))
    x, k = row(4, 8), row(4, 8, seed=1)
    two(softmax(x), k)[1].sum().backward()
    assert x.grad is None and torch.equal(k.grad, torch.full((4, 8), 3.0))


ZERO = {
    "a difference": lambda x, k: (x - x).sum() + k - k,
    "a product": lambda x, k: (x * 0.0, x.exp() * k),
    "a maximum less itself": lambda x, k: (x * k).amax() - (x * k).amax(),
    "one result of several": lambda x, k: (x.sin() + (k - k), torch.lerp(k, k, 0.3)),
}


@pytest.mark.parametrize("name", ZERO)
def test_gradients_that_are_found_to_be_zero_are_zeros(name):
    """As they are in torch, alone and beside others."""
    f, args = htile.rowwise(ZERO[name]), (row(4, 8), row(4, 1, seed=1))
    assert_gradients(f, *args)
    for k in range(len(torch.utils._pytree.tree_leaves(f(*args)))):
        found, right = (torch.utils._pytree.tree_leaves(of(*args))[k]
                        for of in (f, torch.vmap(ZERO[name])))  # fmt: skip
        found, right = (torch.autograd.grad(each.sum(), args, allow_unused=True)
                        for each in (found, right))  # fmt: skip
        for got, exact in zip(found, right, strict=True):
            assert (got is None) == (exact is None)
            assert got is None or torch.allclose(got, exact)


OF_NO_ROW = {
    "a value of each row": lambda x, t: t * 2,
    "beside a sum that is kept": lambda x, t: x.sum() * t.exp(),
    "a zero": lambda x, t: (x * 0.0).sum() + (t - t),
    "of values of rows alone": lambda x, t: t.sin() * t,
}


@pytest.mark.parametrize("lead", ((5,), (2, 5)), ids=str)
@pytest.mark.parametrize("name", OF_NO_ROW)
def test_backward_kernels_that_read_no_row(name, lead):
    """They take their shape from a value of each row, also of one that repeats or lies anyhow."""
    body = OF_NO_ROW[name]

    @htile.rowwise
    def f(x, t: htile.PerRow):
        return body(x, t)

    x = torch.randn(*lead, 8)
    for t in (row(*lead), row(*lead, 2)[..., 1], row(1, *lead[1:]), row(*lead, dtype=BF16)):
        assert_gradients(f, x, t)
        t = t.detach().requires_grad_()
        assert torch.autograd.grad(f(x, t).sum(), t)[0].shape == t.shape
        assert f.inspect(x, t).backward.resources.stack == 0
        tangent = torch.func.jvp(lambda t: f(x, t), (t,), (t,))[1]
        assert tangent.shape == lead


def test_a_row_whose_elements_are_written_one_by_one():
    """Beside an index of more elements: no row is so long, and no piece of a result is a row."""

    @htile.rowwise
    def f(x):
        k = (torch.arange(100) * 0).sum() % x.shape[-1]
        return torch.where(torch.arange(100) > x.shape[-1], x[k], 0.0).amax()

    assert_gradients(f, row(4, 7))


def test_a_graph_that_is_retained_gives_the_same_twice():
    x, w = row(4, 8), row(8, seed=1)
    y = rmsnorm(x, w)
    first = torch.autograd.grad(y.sum(), (x, w), retain_graph=True)
    again = torch.autograd.grad(y.sum(), (x, w))
    assert all(map(torch.equal, first, again))


def test_expanded_and_transposed_cotangents():
    x, w = row(6, 6), row(6, seed=1)
    g = torch.randn(6, 6)
    for given in (torch.ones(()).expand(6, 6), g.t(), g[:, :1].expand(6, 6)):
        found = torch.autograd.grad(rmsnorm(x, w), (x, w), given)
        right = torch.autograd.grad(rmsnorm(x, w), (x, w), given.contiguous())
        assert all(map(torch.equal, found, right))


def test_what_is_written_to_before_the_backward_pass_is_an_error():
    x, w = row(4, 8), row(8, seed=1)
    shifted = x * 1
    y = rmsnorm(shifted, w)
    shifted.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


@pytest.mark.parametrize("mode", (torch.no_grad, torch.inference_mode))
def test_what_is_computed_without_gradients_has_none(mode):
    """Whether the function was called under `torch.no_grad()` before or not."""

    @htile.rowwise
    def f(x):
        with mode():
            largest = x.abs().amax()
        return x / largest

    x = row(3, 4)
    right = (1 / x.detach().abs().amax(-1, keepdim=True)).expand(3, 4)
    with torch.no_grad():
        f(x)
    for _ in range(2):
        torch.testing.assert_close(torch.autograd.grad(f(x).sum(), x)[0], right)


WHOLE = {
    "clone": lambda x: x.clone(), "to": lambda x: x.to(x.device, copy=True),
    "expand": lambda x: x.expand(8), "cat": lambda x: torch.cat([x]),
    "split": lambda x: x.split(8)[0], "squeeze": lambda x: x.squeeze(),
    "view": lambda x: x.view(8), "reshape": lambda x: x.reshape(8), "ravel": lambda x: x.ravel(),
    "view_as": lambda x: x.view_as(x), "unflatten": lambda x: x.unflatten(0, (8,)),
    "slice": lambda x: x[:], "ellipsis": lambda x: x[...], "narrow": lambda x: x.narrow(0, 0, 8),
    "a transpose, copied": lambda x: x.view(2, 4).t().contiguous().view(8),
}  # fmt: skip


@pytest.mark.parametrize("name", WHOLE)
def test_a_copy_and_a_whole_part_without_gradients_have_none(name):
    whole = WHOLE[name]

    @htile.rowwise
    def f(x):
        with torch.no_grad():
            y = whole(x)
        return x * y

    assert_gradients(f, row(3, 8))


ITSELF = {
    "float": lambda x: x.float(), "to its dtype": lambda x: x.to(x.dtype),
    "to its device": lambda x: x.to(x.device), "type_as": lambda x: x.type_as(x),
    "contiguous": lambda x: x.contiguous(), "flatten": lambda x: x.flatten(),
    "positive": lambda x: +x, "dropout": lambda x: F.dropout(x, 0.5, training=False),
}  # fmt: skip


@pytest.mark.parametrize("name", ITSELF)
def test_what_torch_gives_itself_back_for_keeps_its_gradient(name):
    """Autograd has nothing to record then, under `torch.no_grad()` as elsewhere."""
    itself, x = ITSELF[name], row(3, 8)

    def f(x):
        with torch.no_grad():
            y = itself(x)
        return x * y

    (right,) = torch.autograd.grad(torch.vmap(f)(x).sum(), x)
    assert torch.equal(right, 2 * x)
    assert torch.equal(torch.autograd.grad(htile.rowwise(f)(x).sum(), x)[0], right)


def test_a_value_that_changes_without_gradients_keeps_its_own():
    """As in torch, where `+=` under no_grad does not tell autograd of the change."""

    @htile.rowwise
    def f(x, w):
        y, z = x * 2, torch.zeros_like(x)
        with torch.no_grad():
            y += w * x
            z += x
            t = x.exp()
            t *= x
        return y * x + z * w + t * x

    assert_gradients(f, row(3, 8), row(8, seed=1))
    plain = htile.rowwise(lambda x, w: x * 2 + w)
    changing = htile.rowwise(lambda x, w: _changed(x, w))
    meta = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    kinds = [[node.op for node in g.inspect(*meta).graph.nodes] for g in (changing, plain)]
    assert kinds[0] == kinds[1]


def _changed(x, w):
    y = x * 2
    with torch.no_grad():
        y += w
    return y


def test_what_is_detached_has_none():
    """Neither a result, nor a gradient that is differentiated again."""

    @htile.rowwise
    def f(x, w):
        return x.detach() * 2, (x.detach() * w).sum()

    x, w = row(3, 4), row(4, seed=1)
    doubled, total = f(x, w)
    assert not doubled.requires_grad and total.requires_grad
    assert not htile.rowwise(lambda x: (x.detach() * 2).sum())(x).requires_grad
    (of_w,) = torch.autograd.grad(total.sum(), w, create_graph=True)
    torch.testing.assert_close(of_w, x.detach().sum(0))
    assert not of_w.requires_grad


# ---- second order --------------------------------------------------------------------------------


@htile.rowwise
def normed(x, w):
    return x * torch.rsqrt((x * x).mean() + 1e-6) * w.exp()


def exact_norm(x, w):
    return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * w.exp()


@pytest.mark.parametrize("names", ["w", "x", "xw"])
def test_a_statistic_that_does_not_depend_on_what_requires_grad(names):
    """It is a constant of a gradient that is differentiated again."""
    given, found = {"x": row(3, 8), "w": row(8, seed=1)}, []
    for dtype in (torch.float32, torch.float64):
        args = {n: t.detach().to(dtype).requires_grad_(n in names) for n, t in given.items()}
        wrt = [args[n] for n in names]
        y = normed(*args.values()) if dtype is torch.float32 else exact_norm(*args.values())
        first = torch.autograd.grad(y.square().sum(), wrt, create_graph=True)
        found.append(torch.autograd.grad(sum(g.sin().sum() for g in first), wrt))
    for mine, exact in zip(*found, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@htile.rowwise
def square_deviations(x):
    """A mean that stands beside the other axis is no deviation from it."""
    t = x.view(8, 8)
    return ((t - t.mean(-1)) * t.exp().mean(-1, keepdim=True)).sum()


@htile.rowwise
def largest_two(x):
    return x.topk(2)[0].exp().sum() + (x * x).sum()


@htile.rowwise
def sorted_cubes(x):
    return x.sort(-1)[0] ** 3


@htile.rowwise
def logsumexp(x):
    return x.logsumexp(-1)


TWICE = {
    "square_deviations": (square_deviations, lambda: (row(3, 64),)),
    "largest_two": (largest_two, lambda: (row(3, 6),)),
    "sorted_cubes": (sorted_cubes, lambda: (row(3, 6),)),
    "logsumexp": (logsumexp, lambda: (row(3, 6),)),
    "softmax": (softmax, lambda: (row(3, 6),)),
    "log_softmax": (log_softmax, lambda: (row(3, 6),)),
    "rmsnorm": (rmsnorm, lambda: (row(3, 6), row(6, seed=1))),
    "layernorm": (layernorm, lambda: (row(3, 6), row(6, seed=1), row(6, seed=2))),
    "swiglu": (swiglu, lambda: (row(3, 6), row(3, 6, seed=1))),
    "residual_norm": (residual_norm, lambda: (row(3, 6), row(3, 6, seed=1), row(6, seed=2))),
}


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients(name):
    f, arguments = TWICE[name]
    args = arguments()

    def second(call, dtype):
        leaves = [a.detach().to(dtype).requires_grad_() for a in args]
        results = call(leaves)
        outs = torch.utils._pytree.tree_leaves(results)
        given = [g.to(dtype).requires_grad_() for g in cotangents_of(f(*args))]
        first = torch.autograd.grad(outs, leaves, given, create_graph=True)
        total = sum((g * g).sum() for g in first)
        return torch.autograd.grad(total, [*leaves, *given], materialize_grads=True)

    from htile.frontend.roles import classify
    from tests.training import over_rows

    call = classify(f._signature, f._signature.bind(args, {}))
    found = second(lambda leaves: f(*leaves), F32)
    right = second(lambda leaves: over_rows(f, call, tuple(leaves)), torch.float64)
    for got, exact in zip(found, right, strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)


# ---- what is kept --------------------------------------------------------------------------------


@pytest.mark.parametrize("f, args, arguments, results", [
    (softmax, (row(4, 64, dtype=BF16),), [], ["out"]),
    (log_softmax, (row(4, 64, dtype=BF16),), ["x"], ["max0", "sum0"]),
    (rmsnorm, (row(4, 64, dtype=BF16), row(64)), ["x", "weight"], ["rsqrt0"]),
    (layernorm, (row(4, 64), row(64), row(64)), ["x", "weight", "bias"], ["mean0", "rsqrt0"]),
    (swiglu, (row(4, 64), row(4, 64)), ["gate", "up"], []),
    (nll, (row(4, 64), torch.tensor([0, 1, 2, 3])), ["logits", "label"], ["max0", "sum0"]),
], ids=("softmax", "log_softmax", "rmsnorm", "layernorm", "swiglu", "nll"))  # fmt: skip
def test_what_is_kept(f, args, arguments, results):
    """The rows with the fewest bytes, and what a reduction gave; never another row."""
    fresh = htile.rowwise(f.__wrapped__)
    fresh(*args)
    assert kept_by(fresh) == (arguments, results)


@pytest.mark.parametrize("f, count", [(softmax, 1), (rmsnorm, 1), (layernorm, 2), (swiglu, 0)])
def test_no_reduction_of_the_forward_pass_is_repeated(f, count):
    """The backward kernel reads all that is kept, and reduces only what it has of its own."""
    x, w = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    args = {softmax: (x,), swiglu: (x, x.clone())}.get(f, (x, w, w.clone()))
    kernel = f.inspect(*args[: len(f._signature.names)] if f is not rmsnorm else (x, w))
    reductions = [node for node in kernel.backward.graph if node.op in REDUCTIONS]
    assert len(reductions) == count
    fresh = htile.rowwise(f.__wrapped__)
    fresh(*(torch.ones(a.shape, requires_grad=True) for a in args[: 2 if f is rmsnorm else 3]))
    arguments, results = kept_by(fresh)
    assert {*kernel.saved} == {*arguments, *results} - ({"bias"} if f is layernorm else set())


SHORT = {
    "silu": lambda x: F.rms_norm(F.silu(x), (x.shape[-1],)),
    "tanh": lambda x: F.normalize(torch.tanh(x), dim=-1),
    "sigmoid": lambda x: torch.sigmoid(x) / torch.sigmoid(x).sum(),
    "softplus": lambda x: x * F.softplus(x).mean(),
    "exponentials": lambda x: torch.softmax(torch.cat((x, x)), -1),
}


@pytest.mark.parametrize("name", SHORT)
def test_training_takes_the_functions_of_an_inference(name):
    """A statistic in float32 would show the errors of short functions, so none of them is kept."""
    f = htile.rowwise(SHORT[name])
    x = row(4, 100).bfloat16().requires_grad_()
    f(x)
    assert kept_by(f) == (["x"], [])
    assert count_short_functions(f.inspect(x.detach().to("meta"), arch="sm_90a").graph)
    assert_gradients(f, row(40, 100))


def test_a_maximum_of_computed_values_is_found_again():
    """Else no value might be equal to it: kernels may compute them with other last bits."""

    @htile.rowwise
    def scaled(x, w):
        y = torch.sin(x) * w
        return y / y.abs().amax()

    x, w = torch.empty(4, 64, device="meta"), torch.empty(64, device="meta")
    assert not any(name.startswith("max") for name in scaled.inspect(x, w).saved)
    assert_gradients(scaled, row(40, 64), row(64, seed=1))


def test_a_norm_with_a_residual_keeps_the_sum_in_place_of_both_terms():
    """It is a result, and one row is fewer bytes than two. In bfloat16 it is rounded."""
    fresh = htile.rowwise(residual_norm.__wrapped__)
    fresh(row(4, 64), row(4, 64), row(64))
    assert kept_by(fresh) == (["weight"], ["out1", "rsqrt0"])


@pytest.mark.parametrize("function", (torch.logsumexp, torch.softmax, torch.log_softmax))
def test_rows_of_one_element_are_differentiated_twice(function):
    """They are kept as rows, and not as statistics of them, of which a maximum is not found."""
    f, x = htile.rowwise(lambda x: function(x, -1)), row(3, 1)
    (first,) = torch.autograd.grad(f(x).square().sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(first.sin().sum(), x)
    wide = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(function(wide, -1).square().sum(), wide, create_graph=True)
    (right,) = torch.autograd.grad(first.sin().sum(), wide)
    torch.testing.assert_close(second.double(), right, rtol=1e-5, atol=1e-5)


# ---- where it is refused, and where torch calls it -----------------------------------------------


def test_results_that_are_written_are_refused():
    x = row(4, 8)
    with pytest.raises(GradientError, match=r"softmax: out= with arguments that require grad"):
        softmax(x, out=torch.empty(4, 8))
    for out in ((), [], {}):
        with pytest.raises(GradientError, match=r"softmax: out= with arguments that require grad"):
            softmax(x, out=out)
    with torch.no_grad():
        softmax(x, out=torch.empty(4, 8))


def test_torch_func_of_rows_of_any_length_is_refused():
    f = ANY_LENGTH["softmax"]
    for make in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f))):
        with pytest.raises(GradientError, match=r"softmax: torch\.func .* \(dynamic_n=True\)"):
            make(lambda x: f(x).sum())(torch.randn(4, 8))


def test_functionalize_is_refused_by_name():
    with pytest.raises(UnsupportedError, match=r"torch\.func\.functionalize"):
        torch.func.functionalize(softmax)(torch.randn(4, 8))


def test_vectorized_jacobians_are_refused_by_name():
    with pytest.raises(GradientError, match="vectorize=False"):
        torch.autograd.functional.jacobian(softmax, torch.randn(2, 3), vectorize=True)
    x = torch.randn(2, 3)
    found = torch.autograd.functional.jacobian(softmax, x)
    right = torch.autograd.functional.jacobian(lambda x: torch.softmax(x, -1), x)
    torch.testing.assert_close(found, right)


def test_many_cotangents_at_once_are_refused_with_what_takes_their_place():
    x, cotangents = torch.randn(2, 3), torch.randn(5, 2, 3)
    leaf = x.clone().requires_grad_()
    with pytest.raises(GradientError, match=r"is_grads_batched=True.*torch\.func\.jacrev, or"):
        torch.autograd.grad(softmax(leaf), leaf, cotangents, is_grads_batched=True)
    _, pull = torch.func.vjp(softmax, x)
    right = torch.autograd.grad(leaf.softmax(-1), leaf, cotangents, is_grads_batched=True)
    torch.testing.assert_close(torch.vmap(pull)(cotangents), right)


def test_the_kernel_that_is_shown_is_the_one_that_trains():
    @htile.rowwise
    def f(x):
        with torch.no_grad():
            largest = x.abs().amax()
        return x / largest * x

    x = torch.empty(4, 64, device="meta")
    shown = str(f.inspect(x).backward.graph)
    with torch.no_grad():
        assert str(f.inspect(x).backward.graph) == shown


def test_the_kernels_of_what_has_no_gradient_are_refused_with_its_line():
    shown = htile.rowwise(lambda x: x.argmax()).inspect(torch.empty(4, 64, device="meta"))
    with pytest.raises(GradientError, match="has no floating result") as raised:
        _ = shown.backward
    assert "x.argmax()" in raised.value.loc.text


def test_checkpoints_and_hooks():
    x, w = row(4, 8), row(8, seed=1)
    plain = torch.autograd.grad(rmsnorm(x, w).sum(), (x, w))
    y = torch.utils.checkpoint.checkpoint(rmsnorm, x, w, use_reentrant=False)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, w)), plain))
    with torch.autograd.graph.save_on_cpu():
        y = rmsnorm(x, w)
    assert all(map(torch.equal, torch.autograd.grad(y.sum(), (x, w)), plain))


def test_a_module_trains():
    class Norm(torch.nn.Module):
        def __init__(self, n):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(n))

        def forward(self, x):
            return rmsnorm(x, self.weight)

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), Norm(8), torch.nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x = torch.randn(64, 8)
    label, losses = x[:, :3].argmax(-1), []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nll(model(x), label).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.3 * losses[0]


def test_vmap_of_a_call_has_gradients():
    x, w = row(3, 4, 8), row(8, seed=1)
    found = torch.autograd.grad(torch.vmap(rmsnorm, in_dims=(0, None))(x, w).sum(), (x, w))
    right = torch.autograd.grad(rmsnorm(x, w).sum(), (x, w))
    for got, exact in zip(found, right, strict=True):
        torch.testing.assert_close(got, exact)


def test_a_kind_of_call_is_prepared_once(monkeypatch):
    from htile.run.differentiation import derivatives as module

    made = []
    monkeypatch.setattr(module, "derive", lambda *args: made.append(args) or derive(*args))
    derive = importlib.import_module("htile.frontend.derive").derive
    f = htile.rowwise(rmsnorm.__wrapped__)
    for m in (4, 4, 9):
        f(row(m, 8), row(8)).sum().backward()
    assert len(made) == 2  # to find what is kept, and for the cotangents that there are


@pytest.mark.parametrize("which", [1, 2])
def test_the_statistics_of_a_layer_norm_have_gradients(which):
    """Torch has none for them."""

    def norm(x):
        return torch.native_layer_norm(x, (8,), None, None, 1e-5)[which]

    def plain(x):
        mean, variance = x.mean(-1, keepdim=True), x.var(-1, unbiased=False, keepdim=True)
        return mean if which == 1 else (variance + 1e-5).rsqrt()

    x = torch.randn(3, 8, requires_grad=True)
    assert not norm(x).requires_grad
    found = torch.autograd.grad(htile.rowwise(norm)(x).sum(), x)
    right = torch.autograd.grad(plain(x).sum(), x)
    torch.testing.assert_close(found, right)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8])
def test_results_of_8_bits(dtype):
    """Of those in float8 the gradient is torch's, and integers have none."""

    def f(x):
        return (x * x).to(dtype)

    x = torch.randn(3, 8, requires_grad=True)
    found, right = htile.rowwise(f)(x), f(x)
    assert found.requires_grad == right.requires_grad == dtype.is_floating_point
    if found.requires_grad:
        weights = torch.ones(3, 8).to(dtype)
        gradients = [torch.autograd.grad(y, x, weights) for y in (found, right)]
        torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("n", (8, 64))
def test_a_routers_loss(n):
    """The backward pass reads the keys of the forward pass, whose experts are one-hot."""

    @htile.rowwise
    def auxiliary(logits):
        p = logits.softmax(-1)
        _, experts = p.topk(2)
        counts = F.one_hot(experts, logits.shape[-1]).float().sum(0)
        return (counts * p).sum() * logits.shape[-1]

    assert_gradients(auxiliary, row(5, n))
    assert auxiliary.inspect(row(5, n), arch="sm_90a").backward.source

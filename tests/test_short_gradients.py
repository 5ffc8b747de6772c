"""Repeated calls that are differentiated: their shortcuts, on a GPU that the CPU stands for.

Each kernel computes what it means, so gradients are those of float64 whichever way a call goes.
"""

import gc
import sys
import threading
import weakref
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import htile
from benchmarks.idle import idle_gpu
from examples.layernorm import layernorm
from examples.rmsnorm import rmsnorm
from examples.softmax import softmax
from htile.errors import GradientError
from htile.run.differentiation import autograd
from htile.run.shortcuts import text as short_text
from tests.on_cpu import computing, watched_passes
from tests.training import assert_gradients, cotangents_of, expected

F32, BF16 = torch.float32, torch.bfloat16
gain = 2.0


@htile.rowwise
def swiglu(gate, up):
    return F.silu(gate) * up


@htile.rowwise
def residual_norm(x, residual, weight, eps: float = 1e-6):
    s = x + residual
    return {"y": F.rms_norm(s, s.shape, weight, eps), "s": s}


@htile.rowwise
def nll(logits, label: htile.PerRow):
    return logits.logsumexp(-1) - logits[label]


@htile.rowwise
def scaled(x, w, eps: float = 0.0):
    return x * x * w * gain + eps * x


@htile.rowwise
def with_parts(x, w):
    """A result without a gradient among those that have one."""
    y = torch.softmax(x * w, -1)
    return y, x.argmax(-1), (y * x).sum()


@htile.rowwise
def doubled(x):
    """Its backward pass keeps nothing."""
    return x * 2.0


FUNCTIONS = softmax, rmsnorm, layernorm, swiglu, residual_norm, nll, scaled, with_parts, doubled


class Other(torch.Tensor):
    """A subclass that nobody supports."""


def row(*shape, seed=0, dtype=F32):
    made = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=made).to(dtype).requires_grad_()


def arguments(name, m=5, n=64, seed=0):
    x, w = row(m, n, seed=seed), row(n, seed=seed + 1)
    return {
        "softmax": (softmax, (x,)),
        "rmsnorm": (rmsnorm, (x, w)),
        "layernorm": (layernorm, (x, w, row(n, seed=seed + 2))),
        "swiglu": (swiglu, (x, row(m, n, seed=seed + 3))),
        "residual_norm": (residual_norm, (x, row(m, n, seed=seed + 3), w)),
        "nll": (nll, (x, torch.arange(m) % n)),
        "scaled": (scaled, (x, w)),
        "with_parts": (with_parts, (x, w)),
        "doubled": (doubled, (x,)),
    }[name]


NAMES = [f._signature.name for f in FUNCTIONS]


@pytest.fixture
def gpu(monkeypatch):
    with watched_passes(monkeypatch, FUNCTIONS) as found:
        yield found


def leaves_of(args):
    return [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]


def outs_of(results):
    leaves = torch.utils._pytree.tree_leaves(results)
    return [t for t in leaves if t.requires_grad]


def both(f, args, **options):
    """Gradients of all results."""
    results = f(*args)
    return torch.autograd.grad(
        outs_of(results), leaves_of(args), cotangents_of(results), allow_unused=True, **options
    )


def warm(gpu, f, args):
    """Have calls like this one take shortcuts."""
    for _ in range(2):
        both(f, args)
    assert gpu.long[2:] == [], "the second one is short in both directions"
    gpu.long.clear(), gpu.launched.clear()


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_repeated_calls(gpu, name):
    """They are those of float64 for other numbers of rows and other values, too."""
    warm(gpu, *arguments(name))
    for seed, m in enumerate((5, 9, 1, 5, 60)):
        f, args = arguments(name, m=m, seed=seed)
        assert_gradients(f, *args)
    assert gpu.long == [] and len(gpu.launched) == 10


@pytest.mark.parametrize("lead", [(2, 3), (3, 2), (2, 1, 4), ()], ids=str)
def test_leading_dimensions(gpu, lead):
    x, w = row(*lead, 64), row(64, seed=1)
    f = softmax if lead == () else rmsnorm
    args = (x,) if lead == () else (x, w)
    warm(gpu, f, args)
    assert_gradients(f, *args)
    more = {(2, 3): [(5, 1), (1, 1), (4, 4)], (3, 2): [(7, 3)], (2, 1, 4): [(1, 2, 3)], (): []}
    for other in more[lead]:
        assert_gradients(f, row(*other, 64), w)
    assert gpu.long == [] and len(gpu.launched) == 2 + 2 * len(more[lead])


def test_numbers_are_those_of_the_call(gpu):
    f, args = arguments("scaled")
    warm(gpu, f, args)
    for eps in (0.5, 2.0):
        results = scaled(*args, eps)
        (of_x,) = torch.autograd.grad(results.sum(), args[:1])
        x, w = (a.detach() for a in args)
        torch.testing.assert_close(of_x, 2 * x * w * gain + eps)
    assert gpu.long == ["backward"]  # of a cotangent that is expanded, which is another kind


def called(call) -> list[str]:
    """The names of the functions of Python and C that a call calls."""
    names = []

    def profile(frame, event, arg):
        if event in ("call", "c_call"):
            names.append(frame.f_code.co_name if event == "call" else arg.__name__)

    sys.setprofile(profile)
    call()
    sys.setprofile(None)
    return names[1:-1]  # without `call` itself and the end of the profile


def test_a_warm_pass_is_little_python():
    """Each direction makes exactly these calls: of Python, of torch, and of the kernel."""
    empty, g = "_empty_strided_cpu", torch.randn(5, 64)
    layernorm._forget()
    with idle_gpu(lambda kernel: lambda *arguments: None):
        x, w, b = args = arguments("layernorm")[1]
        for _ in range(3):
            both(layernorm, args)
        forward = called(lambda: layernorm(x, w, b))
        y = layernorm(x, w, b)
        run = torch.autograd.Variable._execution_engine.run_backward
        given = ((y,), (g,), False, False, args, True)
        backward = called(lambda: run(*given, accumulate_grad=False))
    layernorm._forget()
    assert forward == [
        "__call__", "is_dynamo_compiling", "_shortcut", "check", "is_grad_enabled",
        "_len_torch_dispatch_stack", *(empty,) * 3, "<lambda>", "apply", "forward",
        "save_for_backward",
    ]  # fmt: skip
    assert backward == [
        "run_backward", "backward", "_shortcut", "check", "is_grad_enabled",
        "_len_torch_dispatch_stack", *(empty,) * 4, "<lambda>",
    ]  # fmt: skip


# ---- what each shortcut refuses ------------------------------------------------------------------

X, W = row(5, 64), row(64, seed=1)


def moved(x):
    """The same values at an address that is no multiple of 16 bytes."""
    made = torch.empty(x.numel() + 1)[1:].view(x.shape)
    return made.copy_(x.detach()).requires_grad_()


def under(mode, call):
    with mode:
        return call()


class Watching(TorchDispatchMode):
    """It sees operations, and changes none."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def dual():
    with forward_ad.dual_level():
        return rmsnorm(forward_ad.make_dual(X, torch.ones_like(X)), W)


FORWARD = {
    "dtype": lambda: rmsnorm(row(5, 64, dtype=BF16), W),
    "dtype of a column": lambda: rmsnorm(X, row(64, dtype=BF16)),
    "N": lambda: rmsnorm(row(5, 32), row(32)),
    "rank": lambda: rmsnorm(row(5, 2, 64), W),
    "many rows": lambda: rmsnorm(row(2048, 64), W),
    "strides": lambda: rmsnorm(row(64, 5).t(), W),
    "alignment": lambda: rmsnorm(moved(X), W),
    "nothing requires grad": lambda: rmsnorm(X.detach(), W.detach()),
    "only x requires grad": lambda: rmsnorm(X, W.detach()),
    "only the weight requires grad": lambda: rmsnorm(X.detach(), W),
    "no_grad": lambda: under(torch.no_grad(), lambda: rmsnorm(X, W)),
    "inference_mode": lambda: under(torch.inference_mode(), lambda: rmsnorm(X, W)),
    "autocast": lambda: under(torch.autocast("cpu", BF16), lambda: rmsnorm(X, W)),
    "a mode": lambda: under(Watching(), lambda: rmsnorm(X, W)),
    "a subclass": lambda: rmsnorm(X.detach().as_subclass(Other).requires_grad_(), W),
    "a Parameter": lambda: rmsnorm(X, torch.nn.Parameter(W.detach())),
    "another device": lambda: rmsnorm(X.detach().to("meta").requires_grad_(), W),
    "tangents": dual,
    "grad": lambda: torch.func.grad(lambda x: rmsnorm(x, W).sum())(X),
    "vmap": lambda: torch.vmap(lambda x: rmsnorm(x, W))(row(3, 5, 64)),
    "a number of another type": lambda: rmsnorm(X, W, None, torch.tensor(1e-6)),
    "another structure": lambda: rmsnorm(X, W, X.detach().clone()),
}


@pytest.mark.parametrize("name", FORWARD)
def test_other_calls_go_the_long_way(gpu, name):
    warm(gpu, rmsnorm, (X, W))
    try:
        FORWARD[name]()
    except htile.HTileError:
        assert name in ("a subclass", "another device")
    assert gpu.long[:1] == ["forward"]
    gpu.long.clear()
    assert_gradients(rmsnorm, X, W)
    assert gpu.long == [], "the shortcut is there still"


def test_one_tensor_as_two_arguments_goes_the_long_way(gpu):
    f, args = arguments("swiglu")
    warm(gpu, f, args)
    both(f, (args[0], args[0]))
    assert gpu.long[0] == "forward"


def test_a_captured_value_that_changes(gpu, monkeypatch):
    f, args = arguments("scaled")
    warm(gpu, f, args)
    monkeypatch.setitem(globals(), "gain", 3.0)
    assert_gradients(f, *args)
    assert gpu.long == ["forward", "backward"], "traced again"
    assert_gradients(f, *args)
    monkeypatch.setitem(globals(), "gain", 2.0)
    assert_gradients(f, *args)
    assert len(gpu.long) == 2, "both are known"


def cotangent(kind):
    g = torch.randn(5, 64)
    return {
        "expanded rows": lambda: torch.randn(64).expand(5, 64),
        "expanded": lambda: torch.randn(()).expand(5, 64),
        "transposed": lambda: torch.randn(64, 5).t(),
        "misaligned": lambda: moved(g).detach(),
        "every second column": lambda: torch.randn(5, 128)[:, ::2],
        "negated": lambda: torch._neg_view(g),
        "that requires grad": lambda: g.requires_grad_(),
        "that is an argument": lambda: X,
    }[kind]()


IN_SHORT = ("expanded rows",)  # what the kernel takes as it is
REPEATED = ("expanded", "transposed", "every second column", "that requires grad")


@pytest.mark.parametrize("kind", [
    "expanded rows", "expanded", "transposed", "misaligned", "every second column", "negated",
    "that requires grad", "that is an argument",
])  # fmt: skip
def test_cotangents_that_lie_otherwise(gpu, kind):
    """Some have a shortcut of their own from then on, which copies them first."""
    warm(gpu, rmsnorm, (X, W))
    for k in range(3):
        g = cotangent(kind)
        found = torch.autograd.grad(rmsnorm(X, W), (X, W), g)
        right = expected(rmsnorm, torch.float64, (X, W), rmsnorm(X, W), [g.detach().resolve_neg()])
        for got, exact in zip(found, right, strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-5)
        long = 0 if kind in IN_SHORT else 1 if kind in REPEATED else k + 1
        assert gpu.long == ["backward"] * long
    before = len(gpu.long)
    assert_gradients(rmsnorm, X, W)
    assert len(gpu.long) == before, "no other kind has gone"


@pytest.mark.parametrize("first", [(0,), (2,), (0, 2)], ids=str)
def test_cotangents_that_are_missing(gpu, first):
    """Each set of them has a shortcut of its own."""
    f, args = arguments("with_parts")
    known = set()
    for picked in (first, (0, 2), (2,), (0,), (2,), (0, 2)):
        results = f(*args)
        outs = [results[k] for k in picked]
        given = cotangents_of(outs)
        found = torch.autograd.grad(outs, args, given, allow_unused=True)
        alone = lambda x, w: tuple(with_parts._fn(x, w)[k] for k in picked)  # noqa: E731, B023
        wide = [a.detach().double().requires_grad_() for a in args]
        exact = torch.vmap(alone, (0, None))(*wide)
        right = torch.autograd.grad(exact, wide, [g.double() for g in given])
        for got, want in zip(found, right, strict=True):
            torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-5)
        known.add(picked)
        assert gpu.long.count("backward") == len(known)


def test_gradients_that_are_differentiated_again(gpu):
    """That goes the long way, and gives torch's; the next usual call is short."""
    for name in ("softmax", "rmsnorm", "layernorm", "swiglu", "residual_norm"):
        f, args = arguments(name)
        warm(gpu, f, args)

        def second(call, leaves, outs):
            results = [*torch.utils._pytree.tree_leaves(call(*leaves))]
            given = [g.to(r.dtype) for g, r in zip(cotangents_of(outs), results, strict=True)]
            first = torch.autograd.grad(results, leaves, given, create_graph=True)
            total = sum((g * g).sum() for g in first)
            return torch.autograd.grad(total, leaves, materialize_grads=True)

        outs = f(*args)
        found = second(f, args, outs)
        wide = [a.detach().double().requires_grad_() for a in args]
        dims = tuple(0 if a.ndim == 2 else None for a in args)
        right = second(torch.vmap(f._fn, dims), wide, outs)
        for got, exact in zip(found, right, strict=True):
            torch.testing.assert_close(got.double(), exact, rtol=1e-4, atol=1e-4)
        assert gpu.long[0] == "backward" and "forward" not in gpu.long
        gpu.long.clear()
        assert_gradients(f, *args)
        assert gpu.long == []


def test_modes_that_choose_what_is_kept_see_operations(gpu):
    """Such as those of a selective checkpoint. Guards on dispatch keys do not see them."""
    seen, run = [], torch.ops.htile.run.default

    def policy(context, op, *args, **kwargs):
        seen.append(op)
        return CheckpointPolicy.PREFER_RECOMPUTE

    warm(gpu, rmsnorm, (X, W))
    contexts = partial(create_selective_checkpoint_contexts, policy)
    (right,) = torch.autograd.grad(rmsnorm(X, W).sin().sum(), X)
    gpu.long.clear()
    y = checkpoint(lambda x: rmsnorm(x, W).sin(), X, use_reentrant=False, context_fn=contexts)
    assert seen.count(run) == 1 and gpu.long == ["forward"]
    (found,) = torch.autograd.grad(y.sum(), X)
    torch.testing.assert_close(found, right)
    y, before = rmsnorm(X, W), seen.count(run)
    gpu.long.clear()
    with contexts()[0]:
        torch.autograd.grad(y, (X, W), torch.randn(5, 64))
    assert seen.count(run) == before + 1 and gpu.long == ["backward"]


def test_a_call_in_fake_mode_is_no_launch(gpu):
    warm(gpu, rmsnorm, (X, W))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert type(rmsnorm(X, W)) is FakeTensor
    assert gpu.long == ["forward"] and gpu.launched == []


def test_vectorized_jacobians_are_refused(gpu):
    warm(gpu, softmax, (X,))
    y = softmax(X)
    with pytest.raises(GradientError, match=r"is_grads_batched=True.*jacrev"):
        torch.autograd.grad(y, X, torch.randn(3, 5, 64), is_grads_batched=True)


PACKED = {
    "other strides": lambda t: torch.stack((t, t), -1)[..., 0] if t.ndim == 2 else t,
    "misaligned": lambda t: moved(t).detach() if t.ndim == 2 else t,
    "another dtype": lambda t: t.double(),
    "a subclass": lambda t: t.detach().as_subclass(Other),
}


@pytest.mark.parametrize("kind", PACKED)
def test_what_hooks_give_back_of_what_was_kept(gpu, kind):
    """They may move it, so the backward shortcut looks at it again."""
    warm(gpu, rmsnorm, (X, W))
    hooks = torch.autograd.graph.saved_tensors_hooks
    with hooks(lambda t: t.detach().clone(), lambda t: t):
        y = rmsnorm(X, W)
    g = torch.randn(5, 64)
    right = torch.autograd.grad(y, (X, W), g)
    assert gpu.long == [], "the same strides and dtypes are the same kind"
    with hooks(lambda t: t.detach().clone(), PACKED[kind]):
        y = rmsnorm(X, W)
    try:
        found = torch.autograd.grad(y, (X, W), g)
    except (htile.HTileError, TypeError):
        assert kind == "another dtype"
    else:
        assert kind != "another dtype"
        torch.testing.assert_close(found, right)
    assert gpu.long == ["backward"]


def test_hooks_see_each_kept_tensor_once(gpu):
    """As checkpoints want it, which compute the forward pass again for it."""
    warm(gpu, layernorm, arguments("layernorm")[1])
    seen = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: seen.append(t) or t):
        y = layernorm(*arguments("layernorm")[1])
    y.sum().backward()
    assert len(seen) == 5 and gpu.long == ["backward"]


def test_what_is_written_to_before_the_backward_pass_is_an_error(gpu):
    weight = W.detach().clone().requires_grad_()
    for f, args, change in (
        (rmsnorm, (X * 1, W), lambda args, y: args[0].mul_(2)),
        (rmsnorm, (X, weight), lambda args, y: args[1].mul_(2)),
        (softmax, (X * 1,), lambda args, y: y.mul_(2)),
    ):
        warm(gpu, f, args)
        y = f(*args)
        g = torch.ones_like(y)
        with torch.no_grad():
            change(args, y)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(g)
        assert gpu.long == []


def test_a_graph_that_is_retained_gives_the_same_twice(gpu):
    warm(gpu, layernorm, arguments("layernorm")[1])
    args = arguments("layernorm")[1]
    y, g = layernorm(*args), torch.randn(5, 64)
    first = torch.autograd.grad(y, args, g, retain_graph=True)
    second = torch.autograd.grad(y, args, g)
    assert all(a.equal(b) for a, b in zip(first, second, strict=True)) and gpu.long == []
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(y, args, g)


def test_hooks_of_tensors_and_nodes(gpu):
    warm(gpu, rmsnorm, (X, W))
    leaf, seen = X.detach().clone().requires_grad_(), []
    leaf.register_hook(lambda g: seen.append("leaf") or 2 * g)
    y = rmsnorm(leaf, W)
    y.register_hook(lambda g: seen.append("result") or 3 * g)
    y.grad_fn.register_prehook(lambda g: seen.append("before"))
    y.grad_fn.register_hook(lambda found, given: seen.append("after"))
    g = torch.randn(5, 64)
    (found,) = torch.autograd.grad(y, leaf, g)
    (right,) = torch.autograd.grad(rmsnorm(X, W), X, g)
    torch.testing.assert_close(found, 6 * right)
    assert seen == ["result", "before", "after", "leaf"] and gpu.long == []


def test_checkpoints(gpu):
    """Those of torch, and one that chooses by operations, which is a mode."""
    warm(gpu, rmsnorm, (X, W))
    (right,) = torch.autograd.grad(rmsnorm(X, W).sin().sum(), X)
    gpu.long.clear()
    for _ in range(2):
        y = checkpoint(lambda x: rmsnorm(x, W).sin(), X, use_reentrant=False)
        (found,) = torch.autograd.grad(y.sum(), X)
        torch.testing.assert_close(found, right)
    assert gpu.long == []


def test_only_what_requires_grad_has_a_gradient(gpu):
    for args in ((X, W.detach()), (X.detach(), W)):
        for _ in range(2):
            results = rmsnorm(*args)
            found = torch.autograd.grad(results, leaves_of(args), torch.ones(5, 64))
            assert len(found) == 1
        assert len(gpu.long) == 2
        gpu.long.clear()
    wide = X.detach().double().requires_grad_(), W.detach().double()
    exact = F.rms_norm(wide[0], (64,), wide[1], 1e-6)
    (right,) = torch.autograd.grad(exact.sum(), wide[0])
    (got,) = torch.autograd.grad(rmsnorm(X, W.detach()), X, torch.ones(5, 64))
    torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-5)


def test_a_refusal_goes_the_long_way_and_a_failing_launch_raises(gpu, monkeypatch):
    from htile.run import launch

    def load(kernel):
        def host(*given):
            raise ValueError(f"Cannot launch {kernel.name}")

        return host

    monkeypatch.setattr(launch, "load", load)
    with pytest.raises(ValueError, match="Cannot launch rmsnorm"):
        rmsnorm(X, W)
    assert not rmsnorm._returning


@pytest.mark.parametrize("count", [1, 2])
def test_results_on_another_gpu_are_none(gpu, monkeypatch, count):
    """Where there are several GPUs both shortcuts look at which one the results are on."""
    asked = []

    def is_elsewhere(name, device, miss):
        asked.append(name)
        return [f"if {name}.get_device() != {-1 if count == 1 else 0}:", *miss]

    monkeypatch.setattr(short_text, "is_elsewhere", is_elsewhere)
    both(rmsnorm, (X, W)), both(rmsnorm, (X, W))
    assert gpu.long == ["forward", "backward"] * count and len(asked) >= 2


def test_without_what_torch_keeps_to_itself(monkeypatch):
    """The public way of torch makes the node where the private one is gone."""
    monkeypatch.delattr(torch._C, "_FunctionBase")
    assert autograd.quick(autograd._Launched) == autograd._Launched.apply


@pytest.mark.parametrize("name", NAMES)
def test_the_public_way(monkeypatch, name):
    monkeypatch.setattr("htile.run.differentiation.gradients.ENTRY", autograd._Launched.apply)
    node = autograd._Launched._backward_cls
    monkeypatch.delattr(node, "apply")
    f, args = arguments(name)
    f._forget()
    with idle_gpu(computing([])):
        for _ in range(3):
            assert_gradients(f, *args)
        assert f._returning
    f._forget()


@pytest.mark.parametrize("name", NAMES)
def test_nothing_keeps_tensors_alive(gpu, name):
    f, args = arguments(name)
    for _ in range(3):
        results = f(*args)
        found = torch.autograd.grad(
            outs_of(results), leaves_of(args), cotangents_of(results), allow_unused=True
        )
    gpu.launched.clear()
    alive = [weakref.ref(t) for t in (*args, *torch.utils._pytree.tree_leaves(results), *found)
             if isinstance(t, torch.Tensor)]  # fmt: skip
    del args, results, found
    gc.collect()  # of what refused a launch, a traceback may hold the arguments
    assert not any(each() is not None for each in alive)


def test_two_threads(gpu):
    warm(gpu, layernorm, arguments("layernorm")[1])
    failed = []

    def work(seed):
        try:
            for k in range(20):
                f, args = arguments("layernorm", m=1 + (k + seed) % 7, seed=seed)
                assert_gradients(f, *args)
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(2)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert not failed and gpu.long == []

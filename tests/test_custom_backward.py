"""A backward pass that the user has written: `@f.backward`.

Gradients are held against torch's in float64, of the formula or of a torch.autograd.Function.
"""

import gc
import linecache
import math
import types
import weakref

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import (
    ArgumentError,
    GradientError,
    HTileError,
    Location,
    TraceError,
    UnsupportedError,
)
from tests.test_gradients import kept_by, row

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16


@htile.rowwise
def softmax(x):
    e = torch.exp(x - x.max())
    return e / e.sum()


@softmax.backward
def softmax_backward(out, d_out):
    return out * (d_out - (out * d_out).sum())


@htile.rowwise
def rmsnorm(x, weight, residual=None, eps: float = 1e-6):
    if residual is not None:
        x = x + residual
    scale = torch.rsqrt((x * x).mean() + eps)
    return {"y": x * scale * weight, "sum": x, "scale": scale}


@rmsnorm.backward
def rmsnorm_backward(sum, scale, weight, d_y, d_sum, d_scale, residual):
    scaled, g = sum * scale, d_y * weight
    d_x = (g - scaled * ((g * scaled).mean() + d_scale * scale / sum.shape[-1])) * scale + d_sum
    return (d_x, d_y * scaled) if residual is None else (d_x, d_y * scaled, d_x)


def plain_rmsnorm(x, weight, residual=None, eps=1e-6):
    x = x if residual is None else x + residual
    scale = torch.rsqrt((x * x).mean(-1, keepdim=True) + eps)
    return {"y": x * scale * weight, "sum": x, "scale": scale[..., 0]}


@htile.rowwise
def rounded(x):
    return torch.round(x)


@rounded.backward
def rounded_backward(d_out):
    return d_out


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, g):
        return g


def assert_equal_gradients(ours, right, args, names, second=True):
    """Of the results of these names; float64 is what is right."""
    made = torch.Generator().manual_seed(7)
    shapes = [args[0].shape[: -1 if name == "scale" else None] for name in names]
    given = [torch.randn(shape, dtype=F64, generator=made) for shape in shapes]

    def passes(f, dtype):
        leaves = [a.detach().to(dtype).requires_grad_() for a in args]
        results = f(*leaves)
        results = [results[name] for name in names] if isinstance(results, dict) else [results]
        cotangents = [g.to(dtype).requires_grad_() for g in given]
        first = torch.autograd.grad(results, leaves, cotangents, create_graph=True)
        found = [*results, *first]
        if second:
            total = sum((g * g).sum() for g in first)
            found += torch.autograd.grad(total, [*leaves, *cotangents])
        return found

    for got, exact in zip(passes(ours, F32), passes(right, F64), strict=True):
        torch.testing.assert_close(got.double(), exact, rtol=1e-5, atol=1e-5)


# ---- gradients -----------------------------------------------------------------------------------


def test_a_softmax():
    assert_equal_gradients(softmax, lambda x: torch.softmax(x, -1), (row(5, 7),), ["out"])


@pytest.mark.parametrize("names", [("y",), ("sum",), ("y", "sum", "scale")])
@pytest.mark.parametrize("count", [2, 3])
def test_several_results_and_arguments(count, names):
    """A weight is summed over the rows. What has no gradient given is 0 for the backward pass."""
    args = row(4, 9), row(9, seed=1), row(4, 9, seed=2)
    if names == ("sum",):  # of which the weight has none
        args, weight = args[::2][:count], torch.ones(9)
        ours = lambda x, *more: rmsnorm(x, weight.to(x), *more)  # noqa: E731
        right = lambda x, *more: plain_rmsnorm(x, weight.to(x), *more)  # noqa: E731
        assert_equal_gradients(ours, right, args[: count - 1], names, second=False)
        return
    assert_equal_gradients(rmsnorm, plain_rmsnorm, args[:count], names)


def test_a_result_that_is_detached_has_no_gradient():
    @htile.rowwise
    def scaled(x):
        largest = x.abs().amax().detach()
        return x / largest, largest

    @scaled.backward
    def backward(out1, d_out0):
        return d_out0 / out1

    x = row(4, 9)
    y, largest = scaled(x)
    assert y.requires_grad and not largest.requires_grad
    (found,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(found, (1 / largest)[:, None].expand(4, 9))


def test_what_is_derived_otherwise_is_not():
    """The user's gradient counts, whatever the function computes."""
    x = row(3, 5)
    assert torch.equal(torch.autograd.grad(rounded(x * 3).sum(), x)[0], torch.full((3, 5), 3.0))


def test_a_function_that_another_one_calls():
    @htile.rowwise
    def quantized(x, weight):
        return rounded(x * weight) * weight + softmax(x)

    def plain(x, weight):
        return Rounded.apply(x * weight) * weight + torch.softmax(x, -1)

    assert_equal_gradients(quantized, plain, (row(4, 6), row(6, seed=1)), ["out"])


@pytest.mark.parametrize(
    "dtype",
    [torch.int64, torch.int32, torch.bool, torch.int8, torch.uint8, torch.float8_e4m3fn],
    ids=str,
)
def test_it_reads_an_element_of_what_another_function_computes(dtype):
    """The argument is no tensor in memory there, so nothing is loaded at the index."""

    @htile.rowwise
    def at(x, t, place: htile.PerRow):
        return x[place] * t[place].float()

    @at.backward
    def backward(x, t, place, d_out):
        is_here = torch.arange(x.shape[-1]) == place
        return torch.where(is_here, d_out * t[place].float() + 0 * x[place], 0.0)

    @htile.rowwise
    def of_computed(x, t, place: htile.PerRow):
        return at(x.sin(), t == 1 if dtype is torch.bool else (t + 1).to(dtype), place)

    place = torch.tensor([0, 3, 8, 3])
    t = torch.randint(3, (4, 9), generator=torch.Generator().manual_seed(2))

    def plain(x):
        wide = (t == 1 if dtype is torch.bool else (t + 1).to(dtype)).double()
        chosen = wide.gather(1, place[:, None])
        return (x.sin().gather(1, place[:, None]) * chosen)[:, 0]

    x = row(4, 9)
    ours, right = of_computed(x, t, place), plain(x.double())
    torch.testing.assert_close(ours.double(), right)
    found = [torch.autograd.grad(out.sum(), x)[0] for out in (ours, right)]
    torch.testing.assert_close(*found)
    assert (found[0] != 0).any()


def test_two_calls_in_one_function_and_one_in_a_backward_pass():
    @htile.rowwise
    def twice(x, y):
        return softmax(softmax(x) * y)

    def plain(x, y):
        return torch.softmax(torch.softmax(x, -1) * y, -1)

    assert_equal_gradients(twice, plain, (row(4, 6), row(4, 6, seed=1)), ["out"])

    @htile.rowwise
    def f(x):
        return x.exp()

    @f.backward
    def of_f(x, d_out):
        return d_out * (softmax(x) + rounded(x))

    class Plain(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            return g * (torch.softmax(x, -1) + Rounded.apply(x))

    assert_equal_gradients(f, Plain.apply, (row(4, 6),), ["out"])


def test_numbers_none_and_values_of_a_row():
    @htile.rowwise
    def f(x, bias: htile.PerRow, gain: htile.Scalar, label: htile.PerRow):
        return x * 2 + bias, label + 1

    @f.backward
    def backward(d_out0, label):
        return 2.5, (d_out0 * label).sum(), d_out0.sum(-1, keepdim=True)

    x, bias, gain = row(3, 4), row(3), torch.tensor(1.0, requires_grad=True)
    label, g = torch.tensor([1, 2, 3]), torch.randn(3, 4)
    found = torch.autograd.grad(f(x, bias, gain, label)[0], (x, bias, gain), g)
    torch.testing.assert_close(found[0], torch.full((3, 4), 2.5))
    torch.testing.assert_close(found[1], g.sum(-1) * label)
    torch.testing.assert_close(found[2], g.sum())

    @f.backward
    def none(d_out0):
        return d_out0, None, 0

    y = f(x, bias, gain, label)[0]
    found = torch.autograd.grad(y, (x, bias, gain), g, allow_unused=True)
    assert torch.equal(found[0], g) and found[1] is found[2] is None


def test_values_of_other_shapes_and_sums_over_rows():
    @htile.rowwise
    def f(x: htile.Inner[2], table: htile.Shared, scale: float = 2.0):
        return x * table * scale, htile.sum_rows(x)

    @f.backward
    def backward(x, table, scale, d_out0, d_out1):
        return d_out0 * table * scale + d_out1, (d_out0 * x).sum(0, keepdim=True) * scale

    def plain(x, table):
        return x * table * 2, x.sum(0)

    args = row(5, 3, 4), row(1, 4, seed=1)
    given = torch.randn(5, 3, 4), torch.randn(3, 4)
    found, right = (torch.autograd.grad(g(*args), args, given) for g in (f, plain))
    for got, exact in zip(found, right, strict=True):
        torch.testing.assert_close(got, exact)


@pytest.mark.parametrize("shape", [(1,), (1, 1)], ids=str)
def test_the_gradient_of_one_element_is_a_number_of_the_row(shape):
    @htile.rowwise
    def f(x, w: htile.Shared):
        return x * w.view(())

    @f.backward
    def backward(x, w, d_out):
        return d_out * w.view(()), (d_out * x).sum()

    x, w, g = row(5, 3), row(*shape, seed=1), torch.randn(5, 3)
    found = torch.autograd.grad(f(x, w), (x, w), g)
    torch.testing.assert_close(found[0], g * w.view(()))
    torch.testing.assert_close(found[1], (g * x).sum().view(shape))


def test_a_gradient_of_one_axis_less_has_the_elements_of_its_argument():
    @htile.rowwise
    def f(x, table: htile.Shared):
        return x * table[0]

    @f.backward
    def backward(x, table, d_out):
        return d_out * table[0], d_out * x

    x, table, g = row(5, 4), row(1, 4, seed=1), torch.randn(5, 4)
    found = torch.autograd.grad(f(x, table), (x, table), g)
    torch.testing.assert_close(found[1], (g * x).sum(0, keepdim=True))


def test_a_name_of_an_argument_is_the_argument():
    @htile.rowwise
    def f(x, out, d_out):
        return x * out + d_out

    @f.backward
    def backward(x, out, d_out, out_, d_out_):
        return d_out_ * out, d_out_ * x, d_out_ + 0 * out_ * d_out

    args = row(2, 3), row(2, 3, seed=1), row(2, 3, seed=2)
    assert_equal_gradients(f, lambda x, out, d_out: x * out + d_out, args, ["out"], second=False)


def test_a_constant_of_the_backward_pass_may_have_a_default():
    @htile.rowwise
    def f(x):
        return x

    @f.backward
    def backward(d_out, most: float = 0.5):
        return d_out.clamp(-most, most)

    x, g = row(4, 8), torch.randn(4, 8)
    assert torch.equal(torch.autograd.grad(f(x), x, g)[0], g.clamp(-0.5, 0.5))


# ---- bits, what is kept, what is shown -----------------------------------------------------------


def test_results_keep_their_bits_and_their_kernel():
    plain = htile.rowwise(softmax.__wrapped__)
    for dtype in (F32, BF16):
        x = torch.randn(6, 33).to(dtype)
        assert torch.equal(softmax(x.requires_grad_()), plain(x.detach()))
    meta = torch.empty(6, 4096, device="meta", dtype=BF16)
    assert softmax.inspect(meta).source == plain.inspect(meta).source


@pytest.mark.parametrize("dtype", [F32, BF16])
def test_the_parameters_say_what_is_kept(dtype):
    """In bfloat16 HTile itself would keep the argument of a log softmax, not the rounded result."""

    @htile.rowwise
    def log_softmax(x):
        return torch.log_softmax(x, -1)

    @log_softmax.backward
    def backward(out, d_out):
        return d_out - out.exp() * d_out.sum()

    log_softmax(row(4, 64, dtype=dtype))
    assert kept_by(log_softmax) == ([], ["out"])
    kernel = log_softmax.inspect(torch.empty(4, 64, device="meta", dtype=dtype))
    assert kernel.saved == ("out",)
    assert [i.name for i in kernel.backward.graph.inputs] == ["out", "d_out"]

    @log_softmax.backward
    def of_the_argument(x, d_out):
        return d_out - torch.softmax(x, -1) * d_out.sum()

    log_softmax(row(4, 64, dtype=dtype))
    assert kept_by(log_softmax) == (["x"], [])


def test_nothing_is_kept_for_gradients_that_nobody_asks_for():
    kernel = rmsnorm.inspect(*(torch.empty(s, device="meta") for s in ((4, 64), (64,))))
    assert {*kernel.saved} == {"sum", "scale", "weight"}
    x = row(4, 64)
    y = rmsnorm(x, torch.ones(64))["y"]
    (found,) = torch.autograd.grad(y.sum(), x)
    right = torch.autograd.grad(plain_rmsnorm(x, torch.ones(64))["y"].sum(), x)
    torch.testing.assert_close(found, right[0])


# ---- torch ---------------------------------------------------------------------------------------


def test_tangents_are_transposed():
    x, t = torch.randn(3, 5), torch.randn(3, 5)
    found = torch.func.jvp(softmax, (x,), (t,))[1]
    torch.testing.assert_close(found, torch.func.jvp(lambda x: x.softmax(-1), (x,), (t,))[1])
    weight, residual = torch.rand(5), torch.randn(3, 5)
    args, tangents = (x, weight, residual), (t, torch.randn(5), torch.randn(3, 5))
    for keep in ((0,), (1,), (0, 1, 2)):
        given = tuple(t if k in keep else torch.zeros_like(t) for k, t in enumerate(tangents))
        found = torch.func.jvp(rmsnorm, args, given)[1]
        right = torch.func.jvp(plain_rmsnorm, args, given)[1]
        for name in ("y", "sum"):
            torch.testing.assert_close(found[name], right[name])
    assert torch.equal(torch.func.jvp(rounded, (x,), (t,))[1], t)


def test_a_backward_pass_that_is_not_linear_has_no_tangents():
    @htile.rowwise
    def f(x):
        return x * 2

    @f.backward
    def clipped(d_out):
        return d_out.clamp(-1, 1)

    with pytest.raises(GradientError, match="clipped is not linear in d_out"):
        torch.func.jvp(f, (torch.randn(3, 4),), (torch.randn(3, 4),))


def test_gradients_of_each_sample():
    x, weight = torch.randn(4, 3, 5), torch.rand(4, 5)

    def loss(weight, x):
        return rmsnorm(x, weight)["y"].square().sum()

    def plain(weight, x):
        return plain_rmsnorm(x, weight)["y"].square().sum()

    found, right = (torch.vmap(torch.func.grad(f, (0, 1)))(weight, x) for f in (loss, plain))
    for got, exact in zip(found, right, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dynamic", [False, True])
def test_torch_compile(dynamic):
    @htile.rowwise
    def quantized(x, weight):
        return rounded(x * 3) * weight

    def step(x, weight):
        return softmax(quantized(x, weight)).square().sum() + rmsnorm(x, weight)["y"].sum()

    torch.compiler.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for m in (3, 5):
        args = row(m, 8), row(8, seed=1)
        found, right = (torch.autograd.grad(f(*args), args) for f in (compiled, step))
        assert all(map(torch.equal, found, right))


def test_the_name_in_a_graph_tells_backward_passes_apart():
    def named(scale):
        @htile.rowwise
        def f(x):
            return x * 2

        @f.backward
        def backward(d_out):
            return d_out * scale

        torch.compiler.reset()
        x = row(3, 4)
        run = torch.compile(lambda x: f(x).sum(), fullgraph=True, backend="aot_eager")
        found = torch.autograd.grad(run(x), x)[0]
        assert torch.equal(found, torch.full((3, 4), scale))
        from htile.run.operations.roots import _ROOTS

        return next(name for name, root in _ROOTS.items() if root.function is f)

    names = [named(scale).partition("~")[0] for scale in (2.0, 3.0, 2.0)]
    assert names[0] != names[1] and names[0] == names[2]


SCALE = 2.0


def test_captured_values_of_the_backward_pass_count(monkeypatch):
    @htile.rowwise
    def f(x):
        return x.sin()

    @f.backward
    def backward(d_out):
        return d_out * SCALE

    @htile.rowwise
    def outer(x):
        return f(x) + 1

    x = row(3, 4)
    for scale in (2.0, 3.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        for g in (f, outer):
            found = torch.autograd.grad(g(x).sum(), x)[0]
            assert torch.equal(found, torch.full((3, 4), scale))


def test_another_backward_pass_takes_the_place_of_the_first():
    @htile.rowwise
    def f(x):
        return x.sin()

    @htile.rowwise
    def outer(x):
        return f(x)

    planned, x = f.with_plan(num_threads=128), row(3, 4)

    def gradient(g):
        return torch.autograd.grad(g(x).sum(), x)[0]

    for g in (f, outer, planned):
        torch.testing.assert_close(gradient(g), x.cos())

    @f.backward
    def first(d_out):
        return d_out * 2

    for g in (f, outer, planned):
        assert torch.equal(gradient(g), torch.full((3, 4), 2.0))

    @f.backward
    def second(d_out):
        return d_out * 3

    assert isinstance(second, types.FunctionType)
    for g in (f, outer, planned):
        assert torch.equal(gradient(g), torch.full((3, 4), 3.0))


def test_without_gradients_it_is_not_traced():
    @htile.rowwise
    def f(x):
        return x * 2

    @f.backward
    def backward(d_out):
        raise AssertionError("it is traced")

    x = torch.randn(2, 3)
    assert torch.equal(f(x), x * 2)
    with pytest.raises(AssertionError, match="it is traced"):
        f(x.requires_grad_())


def test_gradients_stop_where_the_user_says_so():
    @htile.rowwise
    def f(x, y):
        with torch.no_grad():
            kept = softmax(x)
        return kept * y

    x, y = row(3, 4), row(3, 4, seed=1)
    of_x, of_y = torch.autograd.grad(f(x, y).sum(), (x, y), allow_unused=True)
    assert of_x is None
    torch.testing.assert_close(of_y, torch.softmax(x, -1))

    @htile.rowwise
    def g(x):
        return x * 2

    @g.backward
    def stops(x, d_out):
        with torch.no_grad():
            scale = x * 3
        return d_out * scale

    (first,) = torch.autograd.grad(g(x).sum(), x, create_graph=True)
    assert torch.equal(first, x * 3) and not first.requires_grad


def test_it_keeps_no_tensor():
    f = htile.rowwise(softmax.__wrapped__)
    f.backward(softmax_backward)
    x = row(4, 8)
    f(x).sum().backward()
    ref = weakref.ref(x)
    del x
    gc.collect()
    assert ref() is None


# ---- what is refused -----------------------------------------------------------------------------


FORWARD = "return x * weight, x.sum().detach(), x > 0"


def wrong(body, forward=FORWARD, parameters="x, weight, eps: float = 1.0"):
    """The error of a call, of functions in a file of their own."""
    text = f"def f({parameters}):\n    {forward}\ndef backward{body}"
    linecache.cache["wrong.py"] = len(text), None, text.splitlines(True), "wrong.py"
    names = {"torch": torch, "htile": htile, "F": F, "math": math}
    exec(compile(text, "wrong.py", "exec"), names)
    f = htile.rowwise(names["f"])
    f.backward(names["backward"])
    shape = (3, 4) if "Matrix" not in parameters else (4, 4)
    args = row(*shape), row(*shape) if "Matrix" in parameters else row(4)
    args = [a.bfloat16() for a in args] if "Matrix" in parameters else args
    with pytest.raises(HTileError) as info:
        f(*args)[0].sum().backward()
    assert info.value.loc is not None and info.value.loc.file == "wrong.py", info.value
    return type(info.value).__name__, info.value.message


KNOWN = (
    "backward has the parameter {}, which is not known: it may have x, weight, eps, out0, out1, "
    "out2 and the gradients d_out0, d_out1, d_out2"
)
TWO = (
    "backward returns {}, and f has 2 gradients here: of x, weight, in this order, None where "
    "there is none"
)


@pytest.mark.parametrize("body, kind, message", [
    ("(y, d_out0): return y", "TraceError", KNOWN.format("y")),
    ("(d_out0, d_x): return d_x", "TraceError",
     KNOWN.format("d_x") + "; it returns the gradient of x"),
    ("(d_out): return d_out", "TraceError", KNOWN.format("d_out")),
    ("(d_out2): return d_out2", "TraceError",
     "out2 is bool, which has no gradient: take d_out2 out of its parameters"),
    ("(d_out1): return d_out1", "TraceError",
     "out0 has a gradient, which backward does not take: give it the parameter d_out0, or return "
     "out0.detach(), which is a constant in gradients of second order"),
    ("(d_out0): return d_out0", "TraceError", TWO.format("1 gradient")),
    ("(d_out0): return d_out0, None, None", "TraceError", TWO.format("3 gradients")),
    ("(d_out0, x): return x > 0, None", "DtypeError",
     "backward returns bool as the gradient of x: return floating values"),
    ("(d_out0, x): return (x > 0).sum(), None", "DtypeError",
     "backward returns int64 as the gradient of x: return floating values"),
    ("(d_out0): return None, d_out0.view(2, 2)", "ShapeError",
     "backward returns a value of shape (2, 2) as the gradient of weight, which has the shape (4,) "
     "for one row: return a value of this shape; HTile sums it over the rows"),
    ("(d_out0): return d_out0, d_out0.sum()", "ShapeError",
     "backward returns a value of shape () as the gradient of weight, which has the shape (4,) "
     "for one row: return a value of this shape; HTile sums it over the rows"),
    ("(d_out0): return d_out0.sum(), None", "ShapeError",
     "backward returns a value of shape () as the gradient of x, which has the shape (4,) "
     "for one row: return a value of this shape; HTile sums it over the rows"),
    ("(d_out0): return d_out0, htile.sum_rows(d_out0)", "TraceError",
     "backward returns a result over all rows as the gradient of weight: return what one row adds "
     "to it, and HTile sums that over the rows"),
    ("(d_out0): return 'x', None", "TraceError",
     "backward returns a str as the gradient of x: return a value of the row, a number or None"),
    ("(d_out0): return math.exp(d_out0), None", "TraceError",
     "math.exp takes Python numbers only: write torch.exp(x), and of a number s that is given at "
     "run time torch.exp(torch.tensor(s)), or make it static (s: htile.Static)"),
    ("(d_out0):\n    if d_out0.sum() > 0:\n        return 1", "TraceError",
     "the truth of a symbolic value is not known while tracing, so `if`, `while`, `and`, `or`, "
     "`not`, `in` and the built-in max and min cannot read it: write torch.where(condition, a, b), "
     "`&` `|` `~`, torch.maximum or torch.minimum, or make it a static argument (htile.Static)"),
])  # fmt: skip
def test_what_does_not_fit(body, kind, message):
    assert wrong(body) == (kind, message)


@pytest.mark.parametrize("parameters", ["", "x, out", "d_x, x", "d_out"])
def test_one_that_takes_no_gradient_is_refused_where_it_is_defined(parameters):
    f = htile.rowwise(lambda x, d_x, d_out: x * d_x + d_out)
    names = {}
    exec(f"def backward({parameters}): return None", names)
    with pytest.raises(TraceError, match=r"takes no gradient .* the parameter d_out_") as caught:
        f.backward(names["backward"])
    assert caught.value.loc is not None
    x = row(3, 4)
    assert torch.equal(f(x, x, x), x * x + x)  # it has none


LINES = {  # of a backward pass, from its first decorator on, and the one that is blamed
    "an operation": ("def backward(x, d_out):", "    y = d_out[9]", "    return y", 1),
    "a result": ("def backward(x, d_out):", "    y = d_out.sum()", "    return y", 2),
    "a result of several lines": (
        "def backward(x, d_out):", "    return (", "        d_out,", "        d_out)", 1,
    ),
    "one of two results": (
        "def backward(x, d_out):", "    if d_out.ndim == 1:", "        return d_out[:1]",
        "    return d_out", 0,
    ),
    "a parameter": ("def backward(", "        x, unknown, d_out):", "    return d_out", 0),
    "below decorators": (
        "@same(", "    1)", "@same(2)", "def backward(unknown, d_out):", "    return d_out", 3,
    ),
    "a lambda": ("backward = same(3)(", "    lambda x, d_out: d_out[:2])", 1),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_errors_name_a_line_of_the_backward_pass(name):
    *lines, at = LINES[name]
    text = "\n".join(lines)
    linecache.cache["blamed.py"] = len(text), None, text.splitlines(True), "blamed.py"
    names = {"same": lambda number: lambda fn: fn}
    exec(compile(text, "blamed.py", "exec"), names)
    f = htile.rowwise(lambda x: x * 2)
    f.backward(names["backward"])
    with pytest.raises(HTileError) as info:
        f(row(3, 4)).sum().backward()
    assert info.value.loc == Location("blamed.py", at + 1), info.value


def test_a_backward_pass_without_tangents_is_named_by_its_def():
    f = htile.rowwise(lambda x: x * 2)

    @f.backward
    def squared(d_out):
        return d_out * d_out

    with pytest.raises(GradientError) as info:
        torch.func.jvp(f, (torch.randn(3, 4),), (torch.randn(3, 4),))
    assert info.value.loc.text == "def squared(d_out):"


def test_other_things_that_do_not_fit():
    assert wrong("(d_out0): return d_out0, None", "x += 1; return x * weight, x")[1] == (
        "f changes an argument in place, which its backward pass may read: write x = x + 1 for "
        "x += 1"
    )
    assert wrong("(out0, d_out0): return out0, None", "return htile.sum_rows(x), x") == (
        "UnsupportedError",
        "out0 is a result over all rows, which the backward pass of one row does not know: take "
        "out0 out of its parameters",
    )
    assert wrong("(d_out0): return d_out0, None", "return F.linear(x, weight), x",
                 "x, weight: htile.Matrix") == (
        "UnsupportedError",
        "the gradient of weight, a matrix that rows are multiplied by, is no row: leave the "
        "backward pass of f to HTile, or write a torch.autograd.Function",
    )  # fmt: skip
    with pytest.raises(GradientError, match="out0 of f has no derivative for x and weight"):
        f = htile.rowwise(lambda x, weight: (x * weight, x.detach()))
        f.__wrapped__.__name__ = f._signature.name = "f"
        f.backward(lambda d_out0: (None, 0.0))
        f(row(3, 4), row(4))
    with pytest.raises(ArgumentError, match="expected a plain Python function, got int 3"):
        softmax.backward(3)
    with pytest.raises(UnsupportedError, match=r"parameter \*args is not supported"):
        softmax.backward(lambda *args: args)

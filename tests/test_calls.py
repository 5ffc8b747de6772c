"""Ways to call and to carry around a row-wise function: methods, copies, pickles, threads."""

import copy
import functools
import inspect
import pickle
import re
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import htile
from examples.softmax import softmax
from htile.errors import ArgumentError, LoweringError, TraceError, UnsupportedError
from htile.lower import enumerate_plans
from htile.testing import assert_close

M, N = 3, 16


@htile.rowwise
def scaled(x, a: float = 2.0, *, b: float = 0.5, mode: str = "plain"):
    """One line."""
    y = x * a + b
    return y.abs() if mode == "abs" else y


@htile.rowwise(fastmath=True)
def fast(x):
    return torch.tanh(x)


FORCED = scaled.with_plan(loader="shared")


@htile.rowwise
def optional(x, weight=None, residual=None):
    x = x if residual is None else x + residual
    return x if weight is None else x * weight


@htile.rowwise
def outer(x, a: float = 3.0):
    return scaled(x, a, b=1.0) - scaled(x).max()


def rows(m=M):
    return torch.randn(m, N)


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize("use", [scaled, FORCED])
def test_keywords_and_defaults(use):
    x = rows()
    for args, kwargs in (
        ((x,), {}),
        ((x, 3.0), {}),
        ((x,), {"a": 3}),
        ((), {"a": -1.0, "x": x}),
        ((x, torch.tensor(4.0)), {"b": torch.tensor([2.0])}),
        ((x,), {"mode": "abs", "b": -3.0}),
    ):
        assert_close(use, use(*args, **kwargs), *args, **kwargs)


def test_none_is_an_argument_like_any_other():
    x, w, h = rows(), torch.randn(N), rows()
    for args in ((x,), (x, w), (x, None, h), (x, w, h), (x, None, None)):
        assert_close(optional, optional(*args), *args)
    assert torch.equal(optional(x, residual=h), x + h)


def test_one_row_alone():
    x, w, h = rows(), torch.randn(N), rows()
    assert torch.equal(optional(x[0], w, h[0]), optional(x, w, h)[0])
    assert torch.equal(optional(x[0], residual=h[0], weight=w[:1]), optional(x, w[:1], h)[0])
    assert optional.inspect(x[0], w, h[0]).resources.stack == 0, "it compiles"


def test_functions_of_functions():
    x = rows()
    assert_close(outer, outer(x), x)
    assert_close(outer, outer(x, 5.0), x, 5.0)
    torch.testing.assert_close(outer(x), x * 3 + 1 - (x * 2 + 0.5).amax(-1, keepdim=True))
    assert len(outer.inspect(x).graph.inputs) == 2, "one kernel of both"


def test_integers_beyond_64_bits_are_refused():
    x = rows()
    assert_close(scaled, scaled(x, 2**62), x, float(2**62))
    for value in (2**63, -(2**64), 10**400):
        with pytest.raises(ArgumentError, match="scaled: a is an int of more than 64 bits"):
            scaled(x, value)


def test_numbers_and_device_scalars_share_a_trace():
    before = len(scaled._specializations._known)
    for a in (1.5, -2.0, 7, 0.0):
        scaled(torch.randn(M, 24), a)
    assert len(scaled._specializations._known) == before + 1
    for a in (torch.tensor(1.5), torch.tensor(2.0)):
        scaled(torch.randn(M, 24), a)
    assert len(scaled._specializations._known) == before + 2


@htile.rowwise
def masked(x, keep, valid: htile.PerRow):
    return torch.where(keep & valid, x, 0.0), keep.any(), ~keep


@pytest.mark.parametrize("loader", ["shared", "direct"])
@pytest.mark.parametrize("keep", [(6, N), (1, N), (2, 3, N), (2, 1, N)], ids=str)
def test_masks_of_every_rank_compile(keep, loader):
    lead = (2, 3) if len(keep) == 3 else (6,)
    args = [torch.empty(*lead, N), torch.empty(keep) > 0, torch.empty(lead) > 0]
    kernel = masked.with_plan(loader=loader).inspect(*args)
    assert kernel.resources.stack == 0
    assert_close(masked, masked(*args), *args)


# ---- methods -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Norm:
    eps: float = 1e-6
    power: int = 2

    @htile.rowwise
    def plain(self, x, weight=None):
        """A method."""
        y = x * torch.rsqrt((x**self.power).mean() + self.eps)
        return y if weight is None else y * weight

    @htile.rowwise
    def annotated(self: htile.Static, x):
        return x / (x.abs().max() + self.eps)

    @staticmethod
    @htile.rowwise
    def double(x):
        return x * 2

    @classmethod
    @htile.rowwise
    def of_class(cls, x):
        return x + cls.__name__.count("N")


class Mutable:
    def __init__(self, scale):
        self.scale = scale

    @htile.rowwise
    def plain(self, x):
        return x * self.scale

    @htile.rowwise
    def annotated(self: htile.Static, x):
        return x * self.scale


class Module(torch.nn.Module):
    @htile.rowwise
    def forward(self, x):
        return x * 2


def test_methods_of_frozen_dataclasses():
    x, w = rows(), torch.randn(N)
    for norm in (Norm(), Norm(0.5), Norm(0.5), Norm(power=4)):
        expected = x * torch.rsqrt((x**norm.power).mean(-1, keepdim=True) + norm.eps)
        torch.testing.assert_close(norm.plain(x), expected)
        torch.testing.assert_close(norm.plain(x, weight=w), expected * w)
        assert torch.equal(Norm.plain(norm, x), norm.plain(x))
        assert norm.annotated(x).abs().max() <= 1
    known = len(Norm.plain._specializations._known)
    assert known == 6, "each value of self, with weight and without"
    assert torch.equal(Norm.double(x), x * 2) and torch.equal(Norm().double(x), x * 2)
    assert torch.equal(Norm.of_class(x), x + 1) and torch.equal(Norm().of_class(x), x + 1)


@pytest.mark.parametrize("owner", [Mutable(2.0), Module()], ids=lambda o: type(o).__name__)
def test_methods_of_what_may_change_are_refused(owner):
    """Its attributes would be fixed in the first kernel, and a change never seen."""
    kind = type(owner).__name__
    methods = (owner.plain, owner.annotated) if kind == "Mutable" else (owner.forward,)
    for method in methods:
        with pytest.raises(ArgumentError, match=f"self is static.*{kind}.*pass a frozen dataclass"):
            method(rows())


def test_a_static_that_may_change_is_refused():
    @htile.rowwise
    def f(x, s: htile.Static):
        return x + 1

    x = rows()
    for value in (object(), Mutable(1), (1, Mutable(2)), torch.Generator()):
        with pytest.raises(ArgumentError, match="pass a frozen dataclass"):
            f(x, value)
    for value in ((1, 2.0), Norm(), torch.float32, int, math_of_one, torch, len):
        assert torch.equal(f(x, value), x + 1)


def math_of_one(x):
    return x


def test_bound_methods_keep_their_names():
    method = Norm().plain
    assert (method.__name__, method.__doc__, method.__self__) == ("plain", "A method.", Norm())
    assert method.__func__ is Norm.plain and method.inspect  # the attributes of the function
    assert list(inspect.signature(method).parameters) == ["x", "weight"]


def test_what_is_done_with_a_method_takes_its_object_first():
    norm, x, w = Norm(0.5), rows(), torch.randn(N)
    assert Norm.plain.inspect(norm, x, w).plan.graph.n == N
    planned = Norm.plain.with_plan(threads_per_row=32)
    assert torch.equal(planned(norm, x, w), norm.plain(x, w))
    assert assert_close(norm.plain, norm.plain(x, w), x, w) <= 1
    with pytest.raises(ArgumentError, match="tune and with_plan of a method take self first"):
        norm.annotated.inspect(x)


# ---- the object ----------------------------------------------------------------------------------


def test_the_attributes_of_the_function():
    assert scaled.__name__ == scaled.__qualname__ == "scaled" and scaled.__module__ == __name__
    assert scaled.__doc__ == "One line." and scaled.__wrapped__.__code__.co_name == "scaled"
    assert inspect.signature(scaled).parameters["b"].kind is inspect.Parameter.KEYWORD_ONLY
    assert scaled.__annotations__["a"] is float
    assert Norm.plain.__qualname__ == "Norm.plain"


def test_what_wraps_it_is_transparent():
    @functools.wraps(scaled)
    def wrapper(*args, **kwargs):
        return scaled(*args, **kwargs)

    x = rows()
    assert torch.equal(wrapper(x, b=2.0), x * 2 + 2) and wrapper.__wrapped__ is scaled
    partial = functools.partial(scaled, a=4.0)
    assert torch.equal(partial(x), x * 4 + 0.5)
    assert torch.equal(next(map(scaled, [x])), scaled(x))


def test_what_is_no_function_is_refused():
    for thing in (torch.exp, scaled, functools.partial(torch.exp), Norm, 3, staticmethod(len)):
        with pytest.raises(ArgumentError, match="expected a plain Python function, got"):
            htile.rowwise(thing)


@pytest.mark.parametrize("f", [scaled, fast, FORCED, Norm.plain])
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy], ids=["copy", "deepcopy"])
def test_copies_are_the_function_itself(f, duplicate):
    assert duplicate(f) is f
    assert duplicate([f])[0] is f


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_pickles_of_functions_that_have_a_name(protocol):
    for f in (scaled, fast, Norm.plain, Norm.double):
        if "." in f.__qualname__ and protocol < 4:
            continue  # no protocol before 4 has dotted names
        assert pickle.loads(pickle.dumps(f, protocol)) is f
    forced = pickle.loads(pickle.dumps(FORCED, protocol))
    x = torch.empty(M, N, device="meta")
    assert forced.inspect(x).source == FORCED.inspect(x).source != scaled.inspect(x).source
    twice = pickle.loads(pickle.dumps(FORCED.with_plan(num_threads=64), protocol))
    assert twice.inspect(x).plan.placement.loader == "shared"
    assert twice.inspect(x).plan.placement.num_threads == 64


plain = math_of_one
renamed = htile.rowwise(plain)


def test_pickles_of_what_has_no_name_raise_what_pickle_raises_of_functions():
    def local(x):
        return x

    unnamed = (htile.rowwise(lambda x: x), htile.rowwise(local), renamed)
    for f in (*unnamed, *(f.with_plan(loader="direct") for f in unnamed)):
        with pytest.raises((pickle.PicklingError, AttributeError), match=r"pickle|local|not found"):
            pickle.dumps(f)


def test_pickles_go_to_another_process():
    code = "import pickle, sys; f = pickle.load(sys.stdin.buffer); print(f, f._wanted)"
    root = Path(htile.__file__).parent.parent
    pickled = pickle.dumps(softmax.with_plan(num_threads=256))
    run = subprocess.run([sys.executable, "-c", code], input=pickled, capture_output=True, cwd=root)
    assert run.returncode == 0, run.stderr.decode()
    assert run.stdout.decode().strip() == "<htile.rowwise softmax> {'num_threads': 256}"


def test_a_plan_that_there_is_not_says_what_there_is():
    x = torch.empty(M, N, device="meta")
    with pytest.raises(LoweringError, match=r"scaled: no plan has \{'num_threads': 7\} at N = 16"):
        scaled.with_plan(num_threads=7).inspect(x)
    with pytest.raises(LoweringError, match="a plan has no 'threads'; it has vec_size, thread"):
        scaled.with_plan(threads=7)
    assert scaled.with_plan(**scaled.inspect(x).plan.properties()).inspect(x).source


def values_of(plans, name, **given):
    """Values of a property among the plans that have the given ones, as a message lists them."""
    found = {
        has[name]
        for plan in plans
        for has in [plan.properties()]
        if given.items() <= has.items()
    }
    return " or ".join(map(repr, sorted(found)))


def test_properties_that_do_not_go_together_are_named():
    x = torch.empty(M, 32768, device="meta", dtype=torch.bfloat16)
    kernel = softmax.inspect(x)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    threads = {"threads_per_row": 512, "num_threads": 256}
    advice = (
        "with num_threads=256, threads_per_row can be "
        f"{values_of(plans, 'threads_per_row', num_threads=256)}; with threads_per_row=512, "
        f"num_threads can be {values_of(plans, 'num_threads', threads_per_row=512)}"
    )
    for wanted in (threads, {"loader": "direct", **threads}):
        with pytest.raises(LoweringError) as caught:
            softmax.with_plan(**wanted).inspect(x)
        start = f"softmax: no plan has {wanted} at N = 32768 on sm_90a: "
        assert str(caught.value) == start + advice
    with pytest.raises(LoweringError) as caught:  # one that can not be met at all comes first
        softmax.with_plan(cluster_n=5, **threads).inspect(x)
    assert str(caught.value).endswith(f"sm_90a: cluster_n can be {values_of(plans, 'cluster_n')}")


@pytest.mark.parametrize("fastmath", [False, True])
def test_fastmath_and_plan_are_those_of_the_outermost_function(fastmath):
    """Functions called inside become part of its kernel."""
    exact = htile.rowwise(fast._fn)
    x = torch.empty(M, 4096, device="meta")

    def calling(inner):
        return htile.rowwise(lambda x: inner(x) + 1, fastmath=fastmath).inspect(x)

    kernels = {f: calling(f) for f in (fast, exact, fast.with_plan(num_threads=1024))}
    for kernel in kernels.values():
        assert ("fastmath=True" in kernel.source) == fastmath
        assert kernel.plan.placement == kernels[exact].plan.placement
    assert "fastmath=True" in fast.inspect(x).source
    assert "fastmath=True" not in exact.inspect(x).source


def test_a_function_can_call_itself_no_more_than_python_lets_it():
    @htile.rowwise
    def power(x, k: int):
        return x if k == 0 else x * power(x, k - 1)

    x = rows()
    torch.testing.assert_close(power(x, 3), x**4)


# ---- guards --------------------------------------------------------------------------------------

GAIN = 2.0


def gained(x):
    return x * GAIN


def test_a_global_that_changes_is_seen_through_helpers(monkeypatch):
    f, x = htile.rowwise(lambda x: gained(x) + 1), rows()
    for gain in (2.0, 3.0, 2.0, -0.0):
        monkeypatch.setitem(globals(), "GAIN", gain)
        assert torch.equal(f(x), x * gain + 1)
    monkeypatch.setitem(globals(), "GAIN", [1.0])
    with pytest.raises(TraceError, match="gained captures 'GAIN', a mutable list"):
        f(x)
    monkeypatch.setitem(globals(), "GAIN", 2.0)
    assert torch.equal(f(x), x * 2 + 1), "the function works again"


def test_an_error_while_tracing_leaves_the_function_usable():
    @htile.rowwise
    def f(x, broken: bool):
        return x.bincount() if broken else x * 2

    x = rows()
    for _ in range(2):
        with pytest.raises(htile.UnsupportedError, match=re.escape("x.bincount is not supported")):
            f(x, True)
        assert torch.equal(f(x, False), x * 2)


def test_many_threads_many_shapes():
    f = htile.rowwise(lambda x, a: x * a - x.max())
    results, barrier = [], threading.Barrier(8)

    def work(k):
        barrier.wait()
        for n in range(1, 20):
            x = torch.full((2, n), float(k))
            results.append(torch.equal(f(x, 2.0), x))

    threads = [threading.Thread(target=work, args=(k,)) for k in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * (8 * 19)


# ---- tracers of torch ----------------------------------------------------------------------------


class Weighted(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(8))

    def forward(self, x):
        return weighted(x, self.weight)


@htile.rowwise
def weighted(x, weight):
    return x * weight


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("tracer", ["torch.fx.symbolic_trace", "torch.jit.trace"])
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace")
def test_tracers_that_see_no_call(tracer, grad):
    module, x = Weighted(), torch.randn(4, 8)
    with torch.set_grad_enabled(grad), pytest.raises(UnsupportedError) as caught:
        if tracer == "torch.jit.trace":
            torch.jit.trace(module, (x,))
        else:
            torch.fx.symbolic_trace(module)
    assert f"weighted: {tracer} cannot record" in caught.value.message
    assert "torch.export.export(module, args)" in caught.value.message
    program = torch.export.export(module, (x,))
    assert torch.equal(program.module()(x), x * module.weight)
    assert torch.equal(module(x), x * module.weight), "nothing is left of the attempt"

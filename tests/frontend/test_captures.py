"""What a function takes from outside is guarded by type and bits, or refused by name."""

from __future__ import annotations

import enum
import functools
import math
import sys
import types
from dataclasses import dataclass, field

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import TraceError
from htile.frontend.captures import Captures, freeze
from htile.run.rowwise import rowwise

VALUE = None


class Mode(enum.IntEnum):
    A = 1
    B = 2


@dataclass(frozen=True)
class Config:
    eps: float
    shape: tuple = ()

    def scaled(self, x):
        return x * VALUE

    @property
    def twice(self):
        return self.eps * VALUE


@dataclass
class Mutable:
    eps: float = 1.0


class Space:
    EPS = 1.0
    TABLE = (1, 2)

    @staticmethod
    def helper(x):
        return x * VALUE


@pytest.fixture(autouse=True)
def reset():
    globals().update(VALUE=None)
    yield
    globals().update(VALUE=None)


def rebind(value):
    globals()["VALUE"] = value


def uses_global(x):
    return x * VALUE


def nested_use(x):
    return [(lambda: VALUE)() for _ in range(2)]


def helper(x, scale=1.0):
    return x * VALUE * scale


def uses_helper(x):
    return helper(helper(x))


def even(x, k):
    return x if k == 0 else odd(x, k - 1)


def odd(x, k):
    return VALUE if k == 0 else even(x, k - 1)


def uses_decorated(x):
    return functools.reduce(lambda a, b: a, [partial(x)])


partial = functools.partial(helper, scale=2.0)


def uses_config_method(x):
    return CONFIG.scaled(x) * CONFIG.twice


CONFIG = Config(1.0)


def uses_class(x):
    return Space.helper(x) * Space.EPS


user = types.ModuleType("user_settings")
user.EPS = 1e-6
user.inner = types.ModuleType("user_settings.inner")
user.inner.SCALE = 2.0
user.TABLE = [1]
user.max = torch.ones(1)


def uses_module(x):
    return x.max() + user.EPS * user.inner.SCALE


def uses_mutable_of_module(x):
    return user.TABLE[0]


def uses_modules_only(x):
    return torch.exp(F.silu(x)) * math.pi


@pytest.mark.parametrize("fn", [uses_global, nested_use, uses_helper, even, uses_decorated])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0, False),
        (1, 2),
        ("a", "b"),
        (None, 0),
        (torch.float32, torch.bfloat16),
        ((1, 2), (1, 2.0)),
        ((1,), ((1,),)),
        (Config(1.0), Config(1)),
        (Config(1.0, (1,)), Config(1.0, (True,))),
        (Mode.A, Mode.B),
        (Mode.A, 1),
        (math.exp, math.sin),
        (F.silu, F.relu),
        (np.float32(1), np.float64(1)),
        (frozenset({1}), frozenset({1.0})),
        (slice(1), slice(2)),
        (torch.finfo(torch.float16), torch.finfo(torch.bfloat16)),
        (lambda x: x + 1, lambda x: x + 2),
        (torch, math),
        (Config, Space),
        (functools.partial(math.pow, 1), functools.partial(math.pow, 1.0)),
        (complex(1, 0.0), complex(1, -0.0)),
    ],
)
def test_values_are_told_apart(fn, a, b):
    captures = Captures(fn)
    rebind(a)
    first = captures.fingerprint()
    hash(first)
    assert captures.fingerprint() is first
    rebind(b)
    second = captures.fingerprint()
    assert second != first
    rebind(a)
    assert captures.fingerprint() is first, "an old value comes back as the same object"


def test_nan_is_itself():
    captures = Captures(uses_global)
    rebind(float("nan"))
    first = captures.fingerprint()
    rebind(float("nan"))
    assert captures.fingerprint() is first


def test_closure_cell():
    scale = 1.0

    def fn(x):
        return x * scale

    captures = Captures(fn)
    first = captures.fingerprint()
    scale = 2.0
    second = captures.fingerprint()
    assert second != first
    del scale  # an empty cell
    assert captures.fingerprint() != second
    scale = 1.0
    assert captures.fingerprint() is first


def test_two_closures_of_one_code():
    def make(scale):
        return lambda x: x * scale

    one, again, two = (Captures(make(s)).fingerprint() for s in (1.0, 1.0, 2.0))
    assert one == again != two


def test_helper_rebound_and_its_defaults(monkeypatch):
    rebind(1.0)
    captures = Captures(uses_helper)
    first = captures.fingerprint()
    monkeypatch.setattr(helper, "__defaults__", (2.0,))
    second = captures.fingerprint()
    assert second != first
    monkeypatch.setitem(globals(), "helper", lambda x: x)
    assert captures.fingerprint() not in (first, second)
    monkeypatch.undo()
    assert captures.fingerprint() is first


def test_a_global_that_hides_a_builtin(monkeypatch):
    def fn(x):
        return abs(x)

    captures = Captures(fn)
    first = captures.fingerprint()
    monkeypatch.setitem(globals(), "abs", torch.exp)
    assert captures.fingerprint() != first


def test_attributes_of_modules(monkeypatch):
    captures = Captures(uses_module)  # user.max, a tensor, is not `x.max`
    first = captures.fingerprint()
    monkeypatch.setattr(user, "EPS", 1e-5)
    second = captures.fingerprint()
    monkeypatch.setattr(user.inner, "SCALE", 2)
    third = captures.fingerprint()
    assert len({first, second, third}) == 3
    monkeypatch.undo()
    assert captures.fingerprint() is first


def test_attributes_of_classes(monkeypatch):
    rebind(1.0)
    captures = Captures(uses_class)
    first = captures.fingerprint()
    monkeypatch.setattr(Space, "EPS", 2.0)
    second = captures.fingerprint()
    rebind(2.0)
    third = captures.fingerprint()
    assert len({first, second, third}) == 3


def test_methods_of_frozen_dataclasses():
    rebind(1.0)
    captures = Captures(uses_config_method)
    first = captures.fingerprint()
    rebind(2.0)
    assert captures.fingerprint() != first


def test_what_is_torchs_is_not_looked_into():
    assert len(Captures(uses_modules_only).fingerprint()) == 3


def test_functions_of_numpy_that_share_a_name_with_an_attribute_of_a_tensor():
    def root(x):
        return x * np.sqrt(x.shape[-1]) + np.prod(x.shape)

    assert torch.equal(rowwise(root)(torch.ones(2, 4)), torch.full((2, 4), 6.0))


def test_an_unchanged_fingerprint_calls_no_function_of_python():
    globals().update(VALUE=2.0)
    captures, calls = Captures(uses_helper), []
    first = captures.fingerprint()
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, arg: calls.append(frame) if event == "call" else None)
    try:
        again = captures.fingerprint()
    finally:
        sys.setprofile(before)
    assert again is first
    assert [frame.f_code.co_name for frame in calls] == ["fingerprint"]


def test_no_captures():
    assert Captures(lambda x: x + 1).fingerprint() == ()


def test_a_function_that_calls_itself():
    def fn(x):
        return fn(x)

    assert hash(Captures(fn).fingerprint())


def test_another_decorated_function():
    class Decorated:
        __module__ = "htile.run.rowwise"

        def __init__(self, fn):
            self.__wrapped__ = fn

    rebind(Decorated(helper))
    captures = Captures(uses_global)
    first = captures.fingerprint()
    rebind(Decorated(uses_modules_only))
    assert captures.fingerprint() != first


def test_modules_of_torch_without_parameters():
    """An activation is followed: its settings, a new forward, and hooks, which are refused."""
    act, norm = torch.nn.Softplus(beta=2.0), torch.nn.LayerNorm(8, elementwise_affine=False)

    @htile.rowwise
    def f(x):
        return act(norm(x))

    x = torch.linspace(-3, 3, 32).view(4, 8)

    def assert_right():
        torch.testing.assert_close(f(x), act(norm(x.double())).float())

    assert_right()
    first = Captures(f._fn).fingerprint()
    assert Captures(f._fn).fingerprint() == first
    act.beta = 0.5
    assert_right()
    norm.eps = 3.0
    assert_right()
    assert Captures(f._fn).fingerprint() != first
    handle = act.register_forward_hook(lambda module, args, result: 2 * result)
    with pytest.raises(TraceError, match="captures 'act', a mutable Softplus"):
        f(x)
    handle.remove()
    assert_right()
    act.forward = lambda x: 3 * x
    assert_right()
    del act.forward
    assert_right()
    norm.weight = torch.nn.Parameter(torch.ones(8))
    with pytest.raises(TraceError, match="captures 'norm', a mutable LayerNorm"):
        f(x)


def test_a_module_as_a_static_argument():
    @htile.rowwise
    def f(x, act: htile.Static = torch.nn.GELU()):  # noqa: B008
        return act(x)

    x = torch.linspace(-3, 3, 32).view(4, 8)
    for act in torch.nn.GELU(), torch.nn.GELU("tanh"), torch.nn.ReLU(), torch.nn.Hardtanh(-2, 2):
        torch.testing.assert_close(f(x, act), act(x.double()).float())
    torch.testing.assert_close(f(x), torch.nn.GELU()(x.double()).float())


# ---------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("fn", [uses_global, nested_use, uses_helper, uses_decorated])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.ones(3), "captures 'VALUE', a tensor.*pass it as an argument"),
        (torch.nn.Parameter(torch.ones(3)), "a tensor.*pass it as an argument"),
        ((1, torch.ones(3)), "captures 'VALUE', which holds a tensor"),
        ([1], "captures 'VALUE', a mutable list.*capture a tuple"),
        ({}, "a mutable dict.*tuple of pairs"),
        (set(), "a mutable set.*frozenset"),
        (([1],), "captures 'VALUE', which holds a mutable list"),
        (Config(1.0, ([],)), "captures 'VALUE', which holds a mutable list"),
        (np.ones(3), "a mutable ndarray"),
        (Mutable(), "a mutable Mutable.*frozen dataclass"),
        (torch.nn.Linear(2, 2), "a mutable Linear.*parameters as arguments"),
        (torch.nn.Sequential(torch.nn.SiLU()), "a mutable Sequential.*parameters as arguments"),
        (torch.nn.PReLU(), "parameters as arguments, and call F.prelu"),
        (torch.nn.LayerNorm(3), "parameters as arguments, and call F.layer_norm"),
        ((torch.nn.PReLU(),), "which holds a mutable PReLU.*parameters as arguments"),
        ([].append, "mutable"),
        (Mutable().__repr__, "captures 'VALUE.__self__', a mutable Mutable"),
        (functools.partial(math.pow, [1]), "captures 'VALUE', which holds a mutable list"),
    ],
)
def test_refused(fn, value, words):
    rebind(value)
    named = helper if fn in (uses_helper, uses_decorated) else fn
    with pytest.raises(TraceError, match=words) as error:
        Captures(fn).fingerprint()
    assert error.value.message.startswith(f"{named.__name__} captures")
    assert error.value.loc.file == __file__
    assert error.value.loc.line == named.__code__.co_firstlineno


def test_refused_after_it_was_accepted():
    captures = Captures(uses_global)
    rebind(1)
    captures.fingerprint()
    rebind([1])
    with pytest.raises(TraceError, match="mutable list"):
        captures.fingerprint()
    rebind(1)
    captures.fingerprint()


def test_mutable_attribute_of_a_module():
    with pytest.raises(TraceError, match=r"captures 'user\.TABLE', a mutable list"):
        Captures(uses_mutable_of_module).fingerprint()


def test_mutable_default_of_a_helper():
    def inner(x, table=[]):  # noqa: B006
        return x

    with pytest.raises(TraceError, match="inner captures 'a default', a mutable list"):
        Captures(lambda x: inner(x)).fingerprint()


# ------------------------------------------------------------------------------------ freeze


def test_freeze_a_function_with_its_captures():
    rebind(1)
    one = freeze(uses_global)
    rebind(2)
    assert freeze(uses_global) != one
    assert hash(one)


def test_freeze_takes_what_is_hashable():
    @dataclass(frozen=True)
    class Local:
        a: int = 1
        b: object = field(default_factory=lambda: Mutable)

    assert freeze(Local()) == freeze(Local())
    assert freeze((1, Mode.A)) != freeze((1, 1))
    for value in (object(), Mutable(), [1], (1, Mutable()), Mutable().__repr__):
        with pytest.raises(TypeError, match="a mutable"):
            freeze(value)


class Sevenfold(torch.autograd.Function):
    """Its forward pass returns what it is given, so no operation says that it is there."""

    @staticmethod
    def forward(ctx, x):
        return x.contiguous()

    @staticmethod
    def backward(ctx, g):
        return 7 * g


applied = Sevenfold.apply
library = types.ModuleType("library")
library.Sevenfold = Sevenfold


def of_a_helper(x):
    return applied(x)


CUSTOM = {
    "by its name": lambda x: x + Sevenfold.apply(x),
    "by its method": lambda x: x + applied(x),
    "of a helper": lambda x: x + of_a_helper(x),
    "of a module": lambda x: x + library.Sevenfold.apply(x),
}


@pytest.mark.parametrize("name", CUSTOM)
def test_a_gradient_of_ones_own_that_would_be_lost_is_refused(name):
    f, x = htile.rowwise(CUSTOM[name]), torch.ones(2, 4)
    with torch.no_grad():
        assert torch.equal(f(x), 2 * x)
        assert torch.equal(f(x), 2 * x)
    with pytest.raises(TraceError, match=r"a torch\.autograd\.Function, .* with @f\.backward"):
        f(x.requires_grad_())
    with torch.no_grad():
        assert torch.equal(f(x), 2 * x)

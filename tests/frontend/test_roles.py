"""Roles come from rank and annotation, never from sizes that happen to agree."""

from __future__ import annotations

import enum
import functools
import math
import re
import sys
import typing
from dataclasses import dataclass, replace
from typing import Annotated, Optional

import numpy as np
import pytest
import torch

from htile import rowwise
from htile.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from htile.frontend.annotations import Inner, Matrix, PerRow, Scalar, Shared, Static
from htile.frontend.graph import Role
from htile.frontend.roles import Signature, Spec, classify
from htile.frontend.trace import trace

if typing.TYPE_CHECKING:
    from nowhere import Missing

ROW, COLUMN, PER_ROW = Role.ROW, Role.COLUMN, Role.PER_ROW
SCALAR, DEVICE_SCALAR, STATIC = Role.SCALAR, Role.DEVICE_SCALAR, Role.STATIC


def call(fn, *args, **kwargs):
    signature = Signature(fn)
    return classify(signature, signature.bind(args, kwargs))


def t(*shape, dtype=torch.float32):
    return torch.empty(shape, dtype=dtype, device="meta")


def two(x, y):
    pass


def labelled(x, labels: PerRow):
    pass


def scaled(x, s: Scalar):
    pass


def static(x, s: Static):
    pass


def with_float(x, s: float):
    pass


# ------------------------------------------------------------------------------------ tables


@pytest.mark.parametrize(
    ("x", "y", "n", "lead", "roles", "inners"),
    [
        ((5, 4), (5, 4), 4, (5,), (ROW, ROW), ((4,), (4,))),
        ((5, 4), (4,), 4, (5,), (ROW, COLUMN), ((4,), (4,))),
        ((4,), (5, 4), 4, (5,), (COLUMN, ROW), ((4,), (4,))),
        ((5, 4), (5, 1), 4, (5,), (ROW, PER_ROW), ((4,), (1,))),
        ((5, 1), (5, 4), 4, (5,), (PER_ROW, ROW), ((1,), (4,))),
        ((5, 4), (1, 4), 4, (5,), (ROW, ROW), ((4,), (4,))),
        ((1, 4), (5, 1), 4, (5,), (ROW, PER_ROW), ((4,), (1,))),
        ((5, 4), (1,), 4, (5,), (ROW, DEVICE_SCALAR), ((4,), (1,))),
        ((5, 4), (), 4, (5,), (ROW, DEVICE_SCALAR), ((4,), ())),
        ((2, 3, 4), (3, 4), 4, (2, 3), (ROW, ROW), ((4,), (4,))),
        ((2, 3, 4), (3, 1), 4, (2, 3), (ROW, PER_ROW), ((4,), (1,))),
        ((2, 1, 4), (1, 3, 4), 4, (2, 3), (ROW, ROW), ((4,), (4,))),
        # M == N
        ((4, 4), (4,), 4, (4,), (ROW, COLUMN), ((4,), (4,))),
        ((4, 4), (4, 1), 4, (4,), (ROW, PER_ROW), ((4,), (1,))),
        ((4, 4), (1, 4), 4, (4,), (ROW, ROW), ((4,), (4,))),
        # M == 1
        ((1, 4), (4,), 4, (1,), (ROW, COLUMN), ((4,), (4,))),
        ((1, 4), (1, 1), 4, (1,), (ROW, PER_ROW), ((4,), (1,))),
        ((1, 4), (1,), 4, (1,), (ROW, DEVICE_SCALAR), ((4,), (1,))),
        ((1, 1), (1,), 1, (1,), (ROW, COLUMN), ((1,), (1,))),
        # N == 1
        ((5, 1), (5, 1), 1, (5,), (ROW, ROW), ((1,), (1,))),
        ((5, 1), (1,), 1, (5,), (ROW, COLUMN), ((1,), (1,))),
        ((5, 1), (1, 1), 1, (5,), (ROW, ROW), ((1,), (1,))),
        # B == S == N
        ((4, 4, 4), (4,), 4, (4, 4), (ROW, COLUMN), ((4,), (4,))),
        ((4, 4, 4), (4, 4), 4, (4, 4), (ROW, ROW), ((4,), (4,))),
        ((4, 4, 4), (4, 1), 4, (4, 4), (ROW, PER_ROW), ((4,), (1,))),
        ((4, 4, 4), (4, 4, 1), 4, (4, 4), (ROW, PER_ROW), ((4,), (1,))),
        # M == 0
        ((0, 4), (4,), 4, (0,), (ROW, COLUMN), ((4,), (4,))),
        ((0, 4), (0, 1), 4, (0,), (ROW, PER_ROW), ((4,), (1,))),
        # one dimension, and a 0-d tensor
        ((4,), (), 4, (), (ROW, DEVICE_SCALAR), ((4,), ())),
        # one row alone
        ((4,), (4,), 4, (), (ROW, ROW), ((4,), (4,))),
        ((4,), (1,), 4, (), (ROW, PER_ROW), ((4,), (1,))),
        ((1,), (1,), 1, (), (ROW, ROW), ((1,), (1,))),
    ],
)
def test_tensors_without_annotation(x, y, n, lead, roles, inners):
    got = call(two, t(*x), t(*y))
    assert (got.n, got.lead) == (n, lead)
    assert tuple(s.role for s in got.specs) == roles
    assert tuple(s.inner for s in got.specs) == inners


@pytest.mark.parametrize(
    ("x", "labels", "lead"),
    [
        ((5, 4), (5,), (5,)),
        ((4, 4), (4,), (4,)),
        ((1, 4), (1,), (1,)),
        ((5, 1), (5,), (5,)),
        ((1, 1), (1,), (1,)),
        ((5, 4), (1,), (5,)),
        ((5, 4), (), (5,)),
        ((2, 3, 4), (2, 3), (2, 3)),
        ((2, 3, 4), (3,), (2, 3)),
        ((2, 3, 4), (2, 1), (2, 3)),
        ((4, 4, 4), (4, 4), (4, 4)),
        ((0, 4), (0,), (0,)),
        ((4,), (), ()),
    ],
)
def test_annotated_per_row(x, labels, lead):
    got = call(labelled, t(*x), t(*labels, dtype=torch.int64))
    assert got.lead == lead
    assert got.specs[1] == Spec("labels", PER_ROW, torch.int64)


@pytest.mark.parametrize("lead", [(5,), (1,), (0,), (2, 3)])
def test_values_per_row_make_rows_of_a_vector(lead):
    got = call(labelled, t(4), t(*lead, dtype=torch.int64))
    assert (got.n, got.lead) == (4, lead)
    assert got.specs[0] == Spec("x", Role.COLUMN, torch.float32, (4,))
    with pytest.raises(ShapeError, match=r"no elements \(N = 0\), got x \(0,\)"):
        call(labelled, t(0), t(*lead, dtype=torch.int64))


@pytest.mark.parametrize(
    "decorate",
    [torch.no_grad(), torch.no_grad, torch.enable_grad(), torch.inference_mode(), torch.compile,
     torch.autocast("cpu", torch.bfloat16), torch.compiler.disable, torch.vmap],
)  # fmt: skip
def test_a_function_that_torch_wraps_is_refused_at_its_own_line(decorate):
    def mine(x):
        return x.exp()

    for wrapped in (decorate(mine), decorate(decorate(mine))):
        with pytest.raises(ArgumentError, match=r"mine is wrapped by torch.*no_grad\(\):") as error:
            rowwise(wrapped)
        assert error.value.loc.file == __file__ and "def mine(x):" in error.value.loc.text


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
def test_a_nested_tensor_as_the_message_says(layout):
    rows = torch.nested.nested_tensor([torch.randn(2, 8), torch.randn(3, 8)], layout=layout)
    f = rowwise(lambda x: x.exp())
    with pytest.raises(UnsupportedError, match=r"for instance x\.to_padded_tensor\(0\.0\)"):
        f(rows)
    padded = rows.to_padded_tensor(0.0)
    torch.testing.assert_close(f(padded), padded.exp())


def test_a_function_inside_no_grad_as_the_message_says():
    def mine(x):
        with torch.no_grad():
            return x.exp()

    x = torch.randn(3, 8, requires_grad=True)
    y = rowwise(mine)(x)
    assert torch.equal(y, x.exp()) and not y.requires_grad
    assert rowwise(torch.nn.functional.silu)(x).requires_grad  # a function of torch itself


@pytest.mark.parametrize("wrapped", [math.sqrt, torch.exp, functools.partial(two, y=2.0)])
def test_annotations_where_a_builtin_or_a_partial_is_wrapped(wrapped):
    @functools.wraps(wrapped, assigned=())
    def f(x, s: Static = 2.0):
        return x * s

    outer = functools.wraps(f)(lambda *args: f(*args))
    for fn in (f, outer):
        got = call(fn, t(5, 4))
        assert got.specs[1] == Spec("s", STATIC, value=2.0)
        assert trace(fn, got.specs, got.n).n == 4


def test_arguments_by_position_are_bound_as_they_are():
    args = t(5, 4), t(5, 4)
    assert Signature(two).bind(args, {}) is args
    assert Signature(two).bind(args[:1], {"y": args[1]}) == args


def test_the_only_tensor_is_a_row():
    def f(x, eps=1e-6):
        pass

    got = call(f, t(7))
    assert (got.n, got.lead) == (7, ())
    assert got.specs == (Spec("x", ROW, torch.float32, (7,)), Spec("eps", SCALAR, torch.float32))


@pytest.mark.parametrize(
    ("fn", "value", "spec"),
    [
        (two, 1.5, (SCALAR, torch.float32, (), None)),
        (two, 2, (STATIC, None, (), 2)),
        (two, True, (STATIC, None, (), True)),
        (two, "tanh", (STATIC, None, (), "tanh")),
        (two, None, (STATIC, None, (), None)),
        (two, torch.bfloat16, (STATIC, None, (), torch.bfloat16)),
        (with_float, 2, (SCALAR, torch.float32, (), None)),
        (with_float, 2.0, (SCALAR, torch.float32, (), None)),
        (with_float, True, (STATIC, None, (), True)),
        (with_float, None, (STATIC, None, (), None)),
        (with_float, torch.tensor(1.0), (DEVICE_SCALAR, torch.float32, (), None)),
        (scaled, 2, (SCALAR, torch.float32, (), None)),
        (scaled, torch.ones(1), (DEVICE_SCALAR, torch.float32, (1,), None)),
        (scaled, torch.tensor(3), (DEVICE_SCALAR, torch.int64, (), None)),
        (static, 2.0, (STATIC, None, (), 2.0)),
        (static, (1, "a"), (STATIC, None, (), (1, "a"))),
        (static, torch.exp, (STATIC, None, (), torch.exp)),
    ],
)
def test_numbers_and_static_values(fn, value, spec):
    got = call(fn, t(5, 4), value).specs[1]
    assert (got.role, got.dtype, got.inner, got.value) == spec


def test_scalar_annotation_decides_at_n_1():
    assert call(scaled, t(5, 1), t(1)).specs[1].role is DEVICE_SCALAR


def test_defaults():
    def f(x, w, residual=None, eps: float = 1, flag=False, k=1, scale=2.0):
        pass

    got = call(f, t(5, 4), t(4), scale=3)
    assert [s.role for s in got.specs] == [ROW, COLUMN, STATIC, SCALAR, STATIC, STATIC, SCALAR]
    got = call(f, t(5, 4), t(4), t(5, 4, dtype=torch.bfloat16))
    assert got.specs[2] == Spec("residual", ROW, torch.bfloat16, (4,))


def test_parameter_is_a_tensor():
    got = call(two, torch.ones(2, 4), torch.nn.Parameter(torch.ones(4)))
    assert got.specs[1].role is COLUMN


# ------------------------------------------------------------------------------- annotations


def test_annotations_in_text_unions_and_annotated():
    Local = PerRow

    def f(
        a: Optional[PerRow],  # noqa: UP045
        b: PerRow | None,
        c: Annotated[torch.Tensor, PerRow],
        d: Missing,
        e: Missing | float,
        f: htile.Static,  # noqa: F821
        g: Annotated[float, "Static things"],
        h: Local,
        i: float | None = None,
        j: list[float] = (),
        k: int | float = 1,
        m: float | Static = 1,
        n: PerRow() = None,  # an instance is what its class is
        o: Annotated[torch.Tensor, Shared()] = None,
        p: Matrix() = None,
        q: 3.0 = None,
    ):
        return Local

    kinds = Signature(f).kinds
    assert kinds == (
        *(PerRow, PerRow, PerRow, None, float, Static),
        *(float, PerRow, float, None, float, Static),
        *(PerRow, Shared, Matrix, None),
    )


def test_a_name_defined_after_the_function():
    space = {"torch": torch}
    exec("from __future__ import annotations\ndef f(x, y: Later): pass", space)
    signature = Signature(space["f"])
    space["Later"] = PerRow
    assert signature.kinds == (None, PerRow)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("htile.Perrow", "htile has no Perrow, which an annotation names ('htile.Perrow'): write "
                         "htile.PerRow"),
        ("htile.Column", "htile has no Column"),
        ("htile.Statics | None", "write htile.Static"),
        ("htile.inner[2]", "('htile.inner[2]'): write htile.Inner"),
    ],
)
def test_text_that_names_what_htile_does_not_have_is_refused(text, words):
    space = {"htile": sys.modules["htile"]}
    exec(f"from __future__ import annotations\ndef f(x, y: {text}): pass", space)
    with pytest.raises(ArgumentError, match=re.escape(words)):
        Signature(space["f"]).kinds  # noqa: B018


@pytest.mark.parametrize("text", ["Scaler", "np.matrix", "torch.Tensr", "Float[Tensor, 'n']"])
def test_text_that_means_nothing_here_is_no_annotation(text):
    space = {"torch": torch}
    exec(f"from __future__ import annotations\ndef f(x, y: {text!r}): pass", space)
    assert Signature(space["f"]).kinds == (None, None)


# -------------------------------------------------------------------------------------- bind


def test_bind():
    def f(a, /, b, c=3, *, d=4):
        return a, b, c, d

    s = Signature(f)
    assert s.bind((1, 2), {}) == (1, 2, 3, 4)
    assert s.bind((1,), {"b": 5}) == (1, 5, 3, 4)
    assert s.bind((1, 2, 9), {"d": 0}) == (1, 2, 9, 0)
    assert s.invoke((1, 2, 3, 0)) == (1, 2, 3, 0)


@pytest.mark.parametrize(
    ("args", "kwargs", "words"),
    [
        ((), {}, "needs 'a', 'b'"),
        ((1,), {}, "needs 'b'"),
        ((1, 2, 3, 4), {}, "takes 3 positional arguments, got 4"),
        ((1, 2), {"e": 1}, r"no keyword argument 'e'; its parameters are \(a, /, b, c, \*, d\)$"),
        ((1, 2), {"b": 1}, "'b' twice"),
        ((1, 2), {"a": 1}, "no keyword argument 'a'"),
    ],
)
def test_wrong_calls(args, kwargs, words):
    def f(a, /, b, c=3, *, d=4):
        pass

    with pytest.raises(ArgumentError, match=words) as error:
        Signature(f).bind(args, kwargs)
    assert error.value.message.startswith("f ")


def test_what_is_no_plain_function():
    for thing, words in (
        (torch.exp, r"write `def f\(x\): ...`"),
        (torch.nn.ReLU(), "its forward as a function of a row that takes its parameters"),
        (functools.partial(two, y=1.0), r"`def f\(x\): return part\(x\)`"),
    ):
        with pytest.raises(ArgumentError, match=f"expected a plain Python function.*{words}"):
            Signature(thing)
    with pytest.raises(UnsupportedError, match=r"\*xs is not supported"):
        Signature(lambda *xs: None)
    with pytest.raises(UnsupportedError, match=r"\*\*k is not supported"):
        Signature(lambda x, **k: None)


def test_inner_without_its_number():
    for annotation in (Inner, "Inner", Inner | None):

        def f(x):
            return x

        f.__annotations__["x"] = annotation
        with pytest.raises(ArgumentError, match=r"x is annotated htile\.Inner, .*\.Inner\[2\]"):
            call(f, t(5, 4, 3))


# ------------------------------------------------------------------------------------ errors


class Subclass(torch.Tensor):
    pass


class Mode(enum.Enum):
    A = 1


@pytest.mark.parametrize(
    ("fn", "args", "error", "words"),
    [
        (two, (t(5, 4), t(6, 4)), ShapeError, r"leading dim.*x \(5, 4\), y \(6, 4\)"),
        (two, (t(5, 4), t(6, 1)), ShapeError, r"leading dim.*y \(6, 1\)"),
        (two, (t(5, 0), t(5, 0)), ShapeError, "no elements"),
        (two, (t(4), t(4, dtype=torch.half)), ArgumentError, r"x \(4,\), y \(4,\) .*x\[None\]"),
        (two, (t(), 1.0), ArgumentError, "two: expected a row argument.*no tensor"),
        (two, (1.0, 2), ArgumentError, "two: expected a row argument.*no tensor"),
        (labelled, (t(5, 4), t(4)), ShapeError, r"labels .*PerRow.*shape \(5,\).*got \(4,\)"),
        (labelled, (t(5, 4), t(5, 1)), ShapeError, r"labels\.squeeze\(-1\)"),
        (labelled, (t(5, 4), t(5, 4)), ShapeError, "labels is annotated htile.PerRow"),
        (labelled, (t(1, 4), t(5)), ShapeError, r"leading shape \(1,\)"),
        (labelled, (t(1, 4), t(5, 5)), ShapeError, r"leading shape \(1,\)"),
        (labelled, (1, t(4)), ArgumentError, "expected a row argument"),
        (scaled, (t(5, 4), t(5)), ShapeError, r"s is annotated htile.Scalar.*got \(5,\)"),
        (scaled, (t(5, 4), t(1, 1)), ShapeError, "s is annotated htile.Scalar"),
        (static, (t(5, 4), t(4)), ArgumentError, "s is annotated htile.Static but got a tensor"),
        (static, (t(5, 4), [1]), ArgumentError, "s is static, .*a mutable list; .*: pass a tuple"),
        (two, (t(5, 4), [1]), ArgumentError, r"two: y: expected .*got list; pass torch.tensor"),
        (two, (t(5, 4), [t(5, 4)]), ArgumentError, "got list; pass each tensor as an argument"),
        (two, (t(5, 4), (t(5, 4),)), ArgumentError, "got tuple; pass each tensor as an argument"),
        (two, (t(5, 4), t(3, 4)), ShapeError, "by htile.Matrix, a table htile.Shared"),
        (two, (t(5, 4), {}), ArgumentError, "got dict; pass each entry"),
        (two, (t(5, 4), (1,)), ArgumentError, "got tuple; .*y: htile.Static"),
        (two, (t(5, 4), Mode.A), ArgumentError, "got Mode; .*htile.Static"),
        (two, (t(5, 4), 1j), ArgumentError, "got complex"),
        (two, (t(5, 4), np.float64(1)), ArgumentError, r"got float64; .*y\.item\(\)"),
        (two, (t(5, 4), np.ones(4)), ArgumentError, r"got ndarray; pass torch.from_numpy\(y\)"),
        (two, (t(5, 4), t(4).as_subclass(Subclass)), UnsupportedError, "two: y is a Subclass"),
        (two, (t(5, 4), torch.eye(4).to_sparse()), UnsupportedError, "y has layout.*to_dense"),
        (two, (t(5, 4), t(4, dtype=torch.float64)), DtypeError, r"two: y: .*float64.*\.float\(\)"),
        (two, (t(5, 4), t(dtype=torch.float64)), DtypeError, "two: y: .*float64"),
        (two, (t(5, 4, dtype=torch.complex64), 1), DtypeError, "two: x: .*complex64"),
        (two, (t(5, 4), t(4, dtype=torch.int16)), DtypeError, "two: y: .*int16"),
    ],
)
def test_errors(fn, args, error, words):
    with pytest.raises(error, match=words):
        call(fn, *args)


# -------------------------------------------------------------------------------------- Spec


@dataclass(frozen=True)
class Config:
    eps: float


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (1, True),
        (1, 1.0),
        (0.0, -0.0),
        (0, False),
        ((1,), (True,)),
        (Config(1), Config(1.0)),
        (lambda x: x + 1, lambda x: x + 2),
    ],
)
def test_static_values_are_told_apart(a, b):
    assert Spec("k", STATIC, value=a) != Spec("k", STATIC, value=b)
    assert Spec("k", STATIC, value=a) == Spec("k", STATIC, value=a)


def test_spec_is_a_key():
    nan = float("nan")
    assert Spec("k", STATIC, value=nan) == Spec("k", STATIC, value=float("nan"))
    assert len({Spec("k", STATIC, value=1), Spec("k", STATIC, value=1)}) == 1
    assert replace(Spec("k", STATIC, value=1), value=True) == Spec("k", STATIC, value=True)

"""Every kind of mistake, with its words and its line; and docs/errors.md, made of them.

    python -m tests.test_errors --write docs/errors.md

Each case is code that raises. The page shows the code and the whole message; a test asserts that
it is up to date, so every word of a message is under test.
"""

from __future__ import annotations

import argparse
import linecache
import re
import textwrap
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import pytest
import torch

import htile
from htile import errors
from htile.run import rowwise as jit

PAGE = Path(__file__).parent.parent / "docs" / "errors.md"
FILE = "example.py"

HEAD = """\
# Errors

Every error that HTile raises is an `htile.HTileError`, of one class for each kind of mistake. Its
message says what was expected, what came, and what to do; where a line of yours is to blame, it
ends with that line. This page is made by `python -m tests.test_errors --write docs/errors.md`,
from code that the tests run: each block of code below raises exactly the message under it. It has
examples of each kind of mistake, but not every message. One that is not here says by itself what to
write instead.
"""

BEGIN = """\
Each example begins with

```python
import math
import numpy as np
import torch
import torch.nn.functional as F
import htile

x = torch.randn(4, 8)
```
"""

PRELUDE = BEGIN[BEGIN.index("import math") : BEGIN.rindex("```")]


@dataclass(frozen=True)
class Case:
    """Code that raises `kind`, blaming the line with the text `line` (None: none of them).

    elsewhere: what is pretended where the code needs a machine that this one is not.
    """

    title: str
    code: str
    kind: str
    line: str | None = None
    elsewhere: str = ""


@dataclass(frozen=True)
class Section:
    """One kind of mistake, and what to do about it."""

    title: str
    advice: str
    cases: tuple[Case, ...]


def row(body: str, parameters: str = "x", call: str = "f(x)") -> str:
    """The code of a function with this body, and of a call of it."""
    lines = textwrap.indent(body, "    ")
    return f"@htile.rowwise\ndef f({parameters}):\n{lines}\n\n{call}"


def traced(title: str, body: str, line: str | None = None, kind="TraceError", **more) -> Case:
    """A mistake inside the function; by default its only line is to blame."""
    return Case(title, row(body, **more), kind, line or body)


def any_length(body: str, parameters: str = "x", call: str = "f(x)") -> str:
    """The code of a function of rows of any length."""
    return row(body, parameters, call).replace("rowwise", "rowwise(dynamic_n=True)", 1)


def of_any(title: str, body: str, line: str | None = None, kind="UnsupportedError") -> Case:
    """A mistake inside such a function."""
    return Case(title, any_length(body), kind, line or body)


def called(title: str, call: str, kind: str = "ArgumentError", parameters: str = "x", **more):
    """A mistake of a call, of which no line is told: the traceback ends there."""
    names = ", ".join(p.split(":")[0].strip() for p in parameters.split(","))
    body = "return " + " + ".join(names.split(", "))
    return Case(title, row(body, parameters, call), kind, **more)


def backward(
    title: str, parameters: str, result: str, kind="TraceError", forward="x * 2", blames="def"
) -> Case:
    """A backward pass of one's own that does not fit."""
    own = f"@f.backward\ndef backward({parameters}):\n    return {result}"
    lines = {"def": f"def backward({parameters}):", "return": f"return {result}"}
    code = row(f"return {forward}", call=f"{own}\n\nf(x.requires_grad_())")
    return Case(title, code, kind, lines[blames])


def written(title: str, call: str, kind: str = "ArgumentError") -> Case:
    """A hazard of `out=`."""
    body, parameters = "return x * 2", "x"
    if "two results" in title:
        body = "return x * 2, x.sum()"
    elif "w=" in call:
        body, parameters = "return x * w", "x, w"
    elif " t=" in call:
        body, parameters = "return x * t", "x, t: htile.PerRow"
    return Case(title, row(body, parameters, call), kind)


CLASSES = {"parameters": "x, y: htile.PerRow", "call": "f(x, torch.tensor([0, 1, 2, 3]))"}
PAIRS = "a, b = x[0::2], x[1::2]\nreturn torch.stack((-b, a), -1).flatten()"
TABLE = {
    "parameters": "x, pos: htile.PerRow, table: htile.Shared",
    "call": "f(x, torch.tensor([0, 1, 2, 3]), torch.ones(5, 8))",
}
SECTIONS = (
    Section(
        "An operation that HTile does not have",
        "Write it with elementwise functions and reductions; the message names the way where there "
        "is one.",
        (
            traced("A torch function", "return torch.bincount(x)", kind="UnsupportedError"),
            traced("A method", "return x.mode()", kind="UnsupportedError"),
            traced("A name that is misspelt", "return x.sofmax(-1)", kind="UnsupportedError"),
            traced("Too many elements by rank", "return x.topk(65).values", kind="UnsupportedError",
                   call="f(torch.ones(4, 100))"),
            traced("Elements that a mask chooses", "return x[x > 0]", kind="UnsupportedError"),
            traced("Parts that have no common length", "return x[:, :100].cumsum(-1), x[:, 100:]",
                   kind="UnsupportedError", parameters="x: htile.Inner[2]",
                   call="f(torch.ones(4, 2, 4093))"),
            traced("Too many parts", "return torch.stack(x.unbind())", kind="UnsupportedError",
                   call="f(torch.ones(4, 100))"),
            traced("Every second cumulative sum", "return x.cumsum(-1)[::2]",
                   kind="UnsupportedError"),
            traced("One cumulative sum", "return x.cumprod(-1)[99]", kind="UnsupportedError",
                   call="f(torch.ones(4, 1000))"),
            traced("Ends that change places", "return torch.roll(x, -1, -1)",
                   kind="UnsupportedError", parameters="x: htile.Inner[2]",
                   call="f(torch.ones(4, 2, 66, dtype=torch.uint8))"),
            traced("Two lengths", "return x + x[1:]", kind="ShapeError"),
            traced("A product that does not fit", "return x.view(2, 4) @ x", kind="ShapeError"),
            traced("A product of large matrices", "return x @ w", kind="UnsupportedError",
                   parameters="x, w: htile.Inner[2]",
                   call="f(torch.ones(4, 128), torch.ones(128, 128))"),
            traced("An operation of matrices", "return torch.linalg.det(x[:4].view(2, 2))",
                   kind="UnsupportedError"),
            traced("A letter for a leading dimension", "return torch.einsum('bi,i->b', x, w)",
                   kind="ShapeError", parameters="x, w", call="f(x, torch.ones(8))"),
            traced("A random number", "return F.dropout(x, 0.1)", kind="UnsupportedError"),
            traced("A draw in place", "return x.uniform_()"),
            traced("A row assigned at a mask", "x[x > 0] = y\nreturn x", "x[x > 0] = y",
                   kind="UnsupportedError", parameters="x, y", call="f(x, x)"),
            traced("A row assigned at an index of each row", "x[i] = y\nreturn x", "x[i] = y",
                   kind="ShapeError", parameters="x, y, i: htile.PerRow",
                   call="f(x, x, torch.ones(4, dtype=torch.int64))"),
            traced("A part of another shape", "x[:3] = x[:4]\nreturn x", "x[:3] = x[:4]",
                   kind="ShapeError"),
            traced("A part with a step", "x[10:20:2] += 1\nreturn x", "x[10:20:2] += 1",
                   kind="UnsupportedError", call="f(torch.ones(4, 64))"),
            traced("`out=` of torch", "return torch.add(x, x, out=x)"),
        ),
    ),
    Section(
        "A branch on data",
        "The function runs once, for no row in particular, so Python cannot decide by what a row "
        "holds. Compute both and choose with `torch.where`; arguments that Python may branch on "
        "are static: bool, int, str, None, or annotated `htile.Static`.",
        (
            traced("`if`", "if x.sum() > 0:\n    return x\nreturn -x", "if x.sum() > 0:"),
            traced("`while`", "while x.max() > 1:\n    x = x / 2\nreturn x", "while x.max() > 1:"),
            traced("`and`", "return x if x.min() > 0 and x.max() < 1 else -x"),
            traced("The built-in `max`", "return max(x, 0.0)"),
            traced("The built-in `min`", "return min(x, 1.0)"),
        ),
    ),
    Section(
        "A row as a Python number or list",
        "A symbolic row has a shape and a dtype, and no values.",
        (
            traced("Iteration", "total = 0.0\nfor value in x:\n    total += value\nreturn total",
                   "for value in x:", call="f(torch.ones(4, 100))"),
            traced("`sum`", "return x - sum(x)", call="f(torch.ones(4, 100))"),
            traced("`float`", "return x - float(x.max())"),
            traced("`int`", "return x * int(x.max())"),
            traced("`.item()`", "return x - x.max().item()", kind="UnsupportedError"),
            traced("`math`", "return math.exp(x)"),
            traced("`math` of a scalar", "return x * math.sqrt(s)", parameters="x, s: float",
                   call="f(x, 2.0)"),
        ),
    ),
    Section(
        "numpy",
        "numpy computes on the CPU, at once. Inside the function use torch's functions; outside, "
        "make tensors of arrays.",
        (
            traced("A function of numpy", "return np.exp(x)"),
            traced("An array of numpy", "return np.ones(8) * x"),
            called("An array as an argument", "f(x.numpy())"),
            called("A number of numpy", "f(x, np.float32(2.0))", parameters="x, s: float"),
        ),
    ),
    Section(
        "Tensors of torch where only symbolic ones may be",
        "A kernel fixes what it captures. A number, a string, a tuple or a frozen dataclass may be "
        "captured and is looked at again in every call; a tensor is passed as an argument.",
        (
            Case("A captured tensor", "weight = torch.ones(8)\n\n"
                 + row("return x * weight"), "TraceError", "@htile.rowwise"),
            Case("A captured list", "powers = [1, 2]\n\n" + row("return x ** powers[1]"),
                 "TraceError", "@htile.rowwise"),
            Case("What may change unseen", "import os\n\n"
                 + row("return x * float(os.environ.get('SCALE', 1))"), "TraceError",
                 "@htile.rowwise"),
            traced("A tensor that an in-place operator may have changed",
                   "y = x.float()\ny += 1\nreturn y * x", "return y * x"),
            traced("A tensor made inside", "return x * torch.kaiser_window(8)"),
            traced("Python's types", 'return x + "1"'),
        ),
    ),
    Section(
        "Shapes inside the row",
        "Inside the function a row argument has the shape `(N,)`, so `-1` is its only axis.",
        (
            traced("An axis that a row has not", "return x.sum(dim=1)", kind="ShapeError"),
            traced("`F.normalize`, whose default is axis 1", "return F.normalize(x)",
                   kind="ShapeError"),
            traced("The leading dimensions", "b, n = x.shape\nreturn x / n", "b, n = x.shape",
                   "ShapeError"),
            traced("A shape that is not the row's", "return F.layer_norm(x, (4,))",
                   kind="ShapeError"),
            traced("A part without elements", "return x[4:4]", kind="ShapeError"),
        ),
    ),
    Section(
        "Shapes of arguments",
        "A tensor of two or more dimensions is a row argument; one of one dimension is shared by "
        "all rows; one value a row is of the shape `(*lead, 1)`, or annotated `htile.PerRow`.",
        (
            traced("Two lengths of rows", "return x + y", kind="ShapeError", parameters="x, y",
                   call="f(x, torch.ones(4, 9))"),
            called("Leading dimensions that do not fit", "f(x, torch.ones(3, 8))", "ShapeError",
                   "x, y"),
            called("A vector that is a column", "f(x, torch.ones(8, 1))", "ShapeError", "x, w"),
            traced("A weight that is a column",
                   "return F.rms_norm(x, x.shape, w)", kind="ShapeError",
                   parameters="x, w: htile.Shared", call="f(x, torch.ones(8, 1))"),
            traced("A weight that is one number of each row",
                   "return F.rms_norm(x, x.shape, w)", kind="ShapeError",
                   parameters="x, w", call="f(x, torch.ones(4, 1))"),
            traced("One value a row without an annotation", "return x + t", kind="ShapeError",
                   parameters="x, t", call="f(x, torch.ones(4))"),
            traced("Neither N nor the number of rows", "return x * w", kind="ShapeError",
                   parameters="x, w", call="f(x, torch.ones(5))"),
            called("`htile.Inner` of too few dimensions", "f(torch.ones(8))", "ShapeError",
                   "x: htile.Inner[2]"),
            called("`htile.Shared` of too many dimensions", "f(x, torch.ones(2, 2, 2, 8))",
                   "ShapeError", "x, w: htile.Shared"),
            called("`htile.Shared` without elements", "f(x, torch.ones(0, 8))", "ShapeError",
                   "x, w: htile.Shared"),
            called("`htile.PerRow` that do not fit, without rows",
                   "f(torch.ones(4), torch.ones(3), torch.ones(8))", "ShapeError",
                   "t: htile.PerRow, s: htile.PerRow, w: htile.Shared"),
            called("`htile.PerRow` of another shape", "f(x, torch.ones(5))", "ShapeError",
                   "x, t: htile.PerRow"),
            called("`htile.PerRow` with an axis too many", "f(x, torch.ones(4, 1))", "ShapeError",
                   "x, t: htile.PerRow"),
            called("`htile.Scalar` of more than one", "f(x, torch.ones(2))", "ShapeError",
                   "x, s: htile.Scalar"),
            called("Rows without elements", "f(torch.ones(4, 0))", "ShapeError"),
            called("No row", "f(2.0)"),
            called("Vectors of two dtypes", "f(x[0], x[1].half())", parameters="x, y"),
        ),
    ),
    Section(
        "Dtypes",
        "HTile computes in float32, int32, int64 and bool. bfloat16 and float16 are computed in "
        "float32, and floats of 8 bits are converted only.",
        (
            called("float64", "f(x.double())", "DtypeError"),
            called("16-bit integers", "f(x.to(torch.int16))", "DtypeError"),
            traced("A number beyond 8 bits", "return x.clamp(max=300)", kind="DtypeError",
                   call="f(x.to(torch.int8))"),
            traced("A product in float8", "return x * x", kind="DtypeError",
                   call="f(x.to(torch.float8_e4m3fn))"),
            traced("A constant in 8 bits", "return torch.zeros_like(x, dtype=torch.float8_e5m2)",
                   kind="DtypeError"),
            traced("float64 inside", "return x.to(torch.float64)", kind="DtypeError"),
            traced("The bits of a float", "return x & 1", kind="DtypeError"),
            traced("`frexp` of integers", "return torch.frexp(x).exponent", kind="DtypeError",
                   call="f(x.long())"),
            traced("`ldexp` by floats", "return torch.ldexp(x, x)", kind="DtypeError"),
            traced("`ldexp` by a number", "return x.ldexp(3)"),
            traced("A mean of integers", "return x.mean()", kind="DtypeError", call="f(x.long())"),
            traced("A minus of masks", "return (x > 0) - (x > 1)", kind="DtypeError"),
        ),
    ),
    Section(
        "Indices",
        "An index is one integer a row, `y: htile.PerRow`, a few of them, or a Python number. A "
        "choice that varies along the row is a mask, made of `torch.arange(x.shape[-1])`.",
        (
            traced("Too many indices of a row", "return x.cumsum(-1)[x.long()]",
                   kind="UnsupportedError", call="f(torch.ones(4, 100))"),
            traced("A mask as an index", "return x[x > 0]", kind="UnsupportedError"),
            traced("An index that is no integer", "return x[x.sum()]", kind="DtypeError"),
            traced("A number beyond the end", "return x[8]", kind="ShapeError"),
            traced("An index of a row's own matrix", "return x[pos]", kind="UnsupportedError",
                   parameters="x: htile.Inner[2], pos: htile.PerRow",
                   call="f(torch.ones(4, 65, 8), torch.tensor([0, 1, 1, 0]))"),
            traced("An index of a table that was computed", "return x + (table * 2)[pos]",
                   kind="UnsupportedError", **TABLE),
            traced("An index across the rows of a table", "return x[:4] + table.view(-1, 4)[pos]",
                   kind="UnsupportedError", **TABLE),
            traced("Several indices at once", "return x + table[x[:2].long(), x[:2].long()].sum()",
                   kind="UnsupportedError", **TABLE),
            traced("More indices than are written out", "return table[ids].sum(0)",
                   kind="UnsupportedError", parameters="ids: htile.Inner[1], table: htile.Shared",
                   call="f(torch.zeros(4, 65, dtype=torch.long), torch.ones(5, 8))"),
            traced("Two indices of a table", "return x * table[pos, pos]", kind="UnsupportedError",
                   parameters="x, pos: htile.PerRow, table: htile.Shared",
                   call="f(x, torch.tensor([0, 1, 2, 1]), torch.ones(3, 3, 8))"),
            traced("`index_select` along a row", "return x.index_select(0, pos)",
                   kind="ShapeError", **TABLE),
            traced("`index_select` by one number", "return x + table.index_select(0, pos)",
                   kind="ShapeError", **TABLE),
            traced("`F.embedding` of a vector", "return x * F.embedding(pos, x)",
                   kind="ShapeError", **TABLE),
            traced("`F.embedding` that changes the table",
                   "return x + F.embedding(pos, table, max_norm=1.0)", kind="UnsupportedError",
                   **TABLE),
            traced("`gather` of a value per row", "return x.sum().gather(-1, y)",
                   kind="ShapeError", **CLASSES),
            traced("Indices without an axis", "return torch.take_along_dim(x, y, -1)",
                   kind="ShapeError", **CLASSES),
            traced("Classes that are not those of the row", "return x * F.one_hot(y, 4)",
                   kind="ShapeError", **CLASSES),
            traced("Classes of int32", "return F.cross_entropy(x, y.int())", kind="DtypeError",
                   **CLASSES),
            traced("Classes that are no integers", "return F.cross_entropy(x, x.sum())",
                   kind="DtypeError"),
            traced("A class with an axis", "return F.nll_loss(x, y[..., None])",
                   kind="ShapeError", **CLASSES),
            traced("The scores of a class alone", "return F.nll_loss(x.sum(), y)",
                   kind="ShapeError", **CLASSES),
            traced("A weight that is not one a class", "return F.nll_loss(x, y, weight=x.sum())",
                   kind="ShapeError", **CLASSES),
            traced("A class to ignore among shares",
                   "return F.cross_entropy(x, x.exp(), ignore_index=0)"),
            traced("Labels smoothed by more than all",
                   "return F.cross_entropy(x, y, label_smoothing=1.5)", **CLASSES),
            traced("`size_average` of a class", "return F.nll_loss(x, y, size_average=True)",
                   **CLASSES),
            traced("A reduction that there is not",
                   'return F.cross_entropy(x, y, reduction="max")', **CLASSES),
            traced("The name of a device", 'return x * torch.ones(x.shape[-1], device="cpu")'),
            traced("A factory in 8 bits",
                   "return x * torch.ones(x.shape[-1], dtype=torch.float8_e5m2)",
                   kind="DtypeError"),
        ),
    ),
    Section(
        "Arguments of a call",
        "",
        (
            called("Missing", "f(x)", parameters="x, w"),
            called("Too many", "f(x, 1.0)"),
            called("Unknown", "f(x, colour=1.0)"),
            called("Twice", "f(x, x=x)"),
            called("A list", "f(x, [1.0, 2.0])", parameters="x, w"),
            called("A static list", "f(x, [1, 2])", parameters="x, s: htile.Static"),
            called("A static tensor", "f(x, torch.ones(8))", parameters="x, s: htile.Static"),
            called("An object that may change", "f(x, object())", parameters="x, s: htile.Static"),
            Case("A method of an ordinary object", "class Norm:\n    def __init__(self, eps):\n"
                 "        self.eps = eps\n\n    @htile.rowwise\n    def plain(self, x):\n"
                 "        return x / (x.max() + self.eps)\n\nNorm(1e-6).plain(x)", "ArgumentError"),
            called("A number of more than 64 bits", "f(x, 2**70)", parameters="x, s: float"),
            Case("`*args`", "@htile.rowwise\ndef f(*rows):\n    return rows[0]", "UnsupportedError",
                 "@htile.rowwise"),
            Case("What is no function", "htile.rowwise(torch.nn.ReLU())", "ArgumentError"),
        ),
    ),
    Section(
        "Tensors that are not plain",
        "",
        (
            called("Two devices", 'f(x, x.to("meta"))', parameters="x, y"),
            called("A subclass", "class Mine(torch.Tensor):\n    pass\n\nf(x.as_subclass(Mine))",
                   "UnsupportedError"),
            called("Sparse", "f(x.to_sparse())", "UnsupportedError"),
            called("Nested", "f(torch.nested.nested_tensor([x, x]))", "UnsupportedError"),
            called("`functionalize`", "torch.func.functionalize(f)(x)", "UnsupportedError"),
        ),
    ),
    Section(
        "Gradients",
        "Results have gradients, but for those below.",
        (
            called("`out=` with an argument that requires grad",
                   "f(x.requires_grad_(), out=torch.empty(4, 8))", "GradientError"),
            Case("A maximum over rows", row(
                "return htile.max_rows(x * 2)", call="f(x.requires_grad_())"
            ), "GradientError", "return htile.max_rows(x * 2)"),
            Case("A `torch.autograd.Function`", textwrap.dedent("""\
                class Round(torch.autograd.Function):
                    @staticmethod
                    def forward(ctx, x):
                        return x.round()

                    @staticmethod
                    def backward(ctx, gradient):
                        return gradient

                """) + row("return x * Round.apply(x)"), "TraceError", "@htile.rowwise"),
            traced("`x.requires_grad`", "return x * 2 if x.requires_grad else x",
                   kind="UnsupportedError"),
        ),
    ),
    Section(
        "A backward pass of one's own",
        "Its parameters are those of the function, its results and their gradients. It returns a "
        "gradient for each tensor.",
        (
            backward("A parameter that is not known", "y, d_out", "d_out * y"),
            backward("Too many gradients", "x, d_out", "d_out, d_out * x", blames="return"),
            backward("A gradient of another shape", "d_out", "d_out[:4]", "ShapeError",
                     blames="return"),
            backward("A gradient that is a mask", "d_out", "d_out > 0", "DtypeError",
                     blames="return"),
            backward("A gradient that is summed already", "d_out", "htile.sum_rows(d_out)",
                     blames="return"),
            backward("A result whose gradient is not taken", "d_out0", "d_out0",
                     forward="x * 2, x.sum()"),
            backward("A gradient of a mask", "d_out0, d_out1", "d_out0", forward="x * 2, x > 0"),
        ),
    ),
    Section(
        "What is returned",
        "Return tensors that are computed of the rows: one, or a tuple, list or dict of them.",
        (
            Case("Nothing", row("y = x * 2"), "TraceError", "@htile.rowwise"),
            Case("A number", row("return x, 1.0"), "TraceError", "@htile.rowwise"),
            Case("A foreign object", row("return {'y': x, 'info': object()}"), "TraceError",
                 "@htile.rowwise"),
            Case("A tensor that was captured", row("return x, torch.kaiser_window(8)"),
                 "TraceError", "@htile.rowwise"),
            Case("An empty tuple", row("return ()"), "TraceError", "@htile.rowwise"),
            traced("What depends on no row", "return x, w * 2", parameters="x, w",
                   call="f(x, torch.ones(8))"),
        ),
    ),
    Section(
        "`out=`",
        "A result may replace a row argument exactly; it may share no other memory with any "
        "argument or result.",
        (
            written("Another structure", "f(x, out=(torch.empty(4, 8),))"),
            written("One tensor for two results", "f(x, out=torch.empty(4, 8))"),
            written("No tensor", "f(x, out=x.numpy())"),
            written("Another shape", "f(x, out=torch.empty(4, 9))", "ShapeError"),
            written("Another dtype", "f(x, out=torch.empty(4, 8).half())", "DtypeError"),
            Case("A dtype that a conversion inside has decided", row(
                "p = torch.softmax(x, -1)\nreturn p - (x > 0).float()",
                call="x = x.bfloat16()\nf(x, out=x)"),
                "DtypeError", "return p - (x > 0).float()"),
            written("Another device", 'f(x, out=torch.empty(4, 8, device="meta"))'),
            written("Elements apart", "f(x, out=torch.empty(8, 4).t())"),
            written("Expanded", "f(x, out=torch.empty(1, 8).expand(4, 8))"),
            written("What requires grad", "f(x, out=torch.empty(4, 8, requires_grad=True))"),
            written("Part of an argument",
                    "wide = torch.ones(4, 9)\nf(wide[:, 1:], out=wide[:, :8])"),
            written("A column", "y = torch.empty(4, 8)\nf(x, w=y[0], out=y)"),
            written("One value a row", "y = torch.empty(4, 8)\nf(x, t=y[:, 0], out=y)"),
            written("One memory for two results", "y = torch.empty(4, 8)\nf(x, out=(y, y[:, 0]))"),
            Case("Parts that move, in place", row(
                "return torch.cat((x[2:6], x[4:]))", call="f(x, out=x)"), "ArgumentError"),
            Case("An element at an index that comes of a reduction, in place", row(
                "return x - x[(x > 0).sum() % x.shape[-1]]", call="f(x, out=x)"), "ArgumentError"),
            Case("Pairs that are not aligned", row(
                PAIRS, call="wide = torch.empty(4, 10)\nf(x, out=wide[:, 1:9])"), "ArgumentError"),
            Case("Pairs that are not aligned, in place", row(
                PAIRS, call="y = torch.ones(4, 9)[:, :8]\nf(y, out=y)"), "ArgumentError"),
            Case("Inside another function", row("return x * 2", call="@htile.rowwise\ndef g(x):\n"
                 "    return f(x, out=x)\n\ng(x)"), "TraceError", "return f(x, out=x)"),
        ),
    ),
    Section(
        "Rows of any length",
        "In a function of rows of any length, `@htile.rowwise(dynamic_n=True)`, the length is no "
        "number while the function is traced, and only whole rows have one.",
        (
            of_any("A part of a row", "return x[1:]"),
            of_any("Groups", "return x.view(2, -1).sum(-1)"),
            of_any("Rows that are joined", "return torch.cat((x, x))"),
            of_any("A row of rows", "return (x[None] * x[:, None]).sum(-1)"),
            of_any("Sorted", "return x.sort().values"),
            of_any("A size that is a number", "return F.layer_norm(x, (8,))"),
            of_any("Columns that do not begin at 0", "return x * torch.arange(1, x.shape[-1] + 1)"),
            of_any("A loop over the columns",
                   "for k in range(x.shape[-1]):\n    x = x * k\nreturn x",
                   "for k in range(x.shape[-1]):", "TraceError"),
            of_any("A branch on the length", "if x.shape[-1] > 4:\n    x = x * 2\nreturn x",
                   "if x.shape[-1] > 4:", "TraceError"),
            of_any("`len`", "return x / len(x)", kind="TraceError"),
            of_any("math of the length", "return x / math.sqrt(x.shape[-1])", kind="TraceError"),
            Case("Two lengths of rows of any length", any_length("return x + y.sum()", "x, y",
                 "f(x, x[:, :4])"), "UnsupportedError"),
            Case("A table beside rows of any length", any_length(
                 "return x + w.sum()", "x, w: htile.Shared", "f(x, x[0])"), "UnsupportedError"),
            Case("A stack of rows of any length", any_length(
                 "return x.sum()", "x: htile.Inner[2]", "f(x[None])"), "UnsupportedError"),
            Case("Fewer elements than topk takes", any_length("return x.topk(9).values"),
                 "ShapeError"),
            Case("An element that there is not", any_length("return x - x[9]"), "ShapeError"),
        ),
    ),
    Section(
        "Sums over rows",
        "`htile.sum_rows` and `htile.max_rows` reduce over all rows of a call. No row knows the "
        "result, so it can only be returned.",
        (
            traced("A result that a row reads", "return x / htile.sum_rows(x)"),
            traced("A maximum that a row reads", "largest = htile.max_rows(x)\nreturn x - largest",
                   "return x - largest"),
            traced("A sum of what all rows share", "return x, htile.sum_rows(2 * w)",
                   parameters="x, w", call="f(x, x[0])"),
            traced("A maximum of a mask", "return htile.max_rows(x > 0)", kind="DtypeError"),
            traced("A sum in another kind of dtype", "return htile.sum_rows(x).to(torch.int32)",
                   kind="DtypeError"),
            of_any("Of rows of any length", "return htile.sum_rows(x)"),
            Case("A maximum of no rows", row("return htile.max_rows(x)", call="f(x[:0])"),
                 "ArgumentError"),
            Case("In `torch.vmap`", row("return htile.sum_rows(x)", call="torch.vmap(f)(x[None])"),
                 "UnsupportedError"),
            Case("Of a long row", row(
                "return htile.sum_rows(2 * x)",
                call='f.inspect(torch.empty(4, 2**20, device="meta"), arch="sm_90a")'),
                "UnsupportedError", "return htile.sum_rows(2 * x)"),
            Case("Of rows that each argument repeats", row(
                "return htile.sum_rows(x * y)", "x, y", "f.inspect(torch.ones(1, 4, 8), "
                "torch.ones(3, 1, 8))"), "UnsupportedError", "return htile.sum_rows(x * y)"),
        ),
    ),
    Section(
        "What no kernel can do",
        "",
        (
            Case("A plan that there is not", row(
                "return x * 2", call="f.with_plan(num_threads=7).inspect(x)"), "LoweringError"),
            Case("A row of 2^31 elements", row(
                "return x * 2",
                call='f.inspect(torch.empty(4, 2**31, device="meta"))'), "LoweringError"),
            Case("A cumulative sum of a long row", row(
                "return x.cumsum(-1)",
                call='f.inspect(torch.empty(4, 2**20, device="meta"), arch="sm_90a")'),
                "UnsupportedError", "return x.cumsum(-1)"),
            Case("An architecture that HTile does not know", row(
                "return x * 2", call='f.inspect(x, arch="sm_75")'), "CompileError"),
            Case("The cost on another architecture", row(
                "return x * 2", call='f.inspect(x, arch="sm_80").cost()'), "UnsupportedError"),
            Case("A GPU that HTile does not know", row("return x * 2", call="f(x.cuda())"),
                 "CompileError", elsewhere="old GPU"),
            Case("No CuTe-DSL", row("return x * 2", call="f.inspect(x).ptx"), "CompileError",
                 elsewhere="no CuTe-DSL"),
            called("Tuning without a GPU", "f.tune(x)"),
            Case("The first call inside a capture", row(
                "return x * 2",
                call="x = x.cuda()\nwith torch.cuda.graph(torch.cuda.CUDAGraph()):\n    y = f(x)",
            ), "ArgumentError", elsewhere="capture"),
        ),
    ),
)  # fmt: skip


# ---- running a case ------------------------------------------------------------------------------


@contextmanager
def pretended(what: str) -> Iterator[None]:
    """A machine that has an old GPU, or no CuTe-DSL, or captures a CUDA graph."""
    with ExitStack() as stack:

        def patch(*args, **kwargs):
            stack.enter_context(mock.patch.object(*args, **kwargs))

        if what == "no CuTe-DSL":
            stack.enter_context(mock.patch.dict("sys.modules", cutlass=None))
        elif what:
            capability = (7, 5) if what == "old GPU" else (9, 0)
            patch(torch.cuda, "get_device_capability", lambda device: capability)
            patch(torch.cuda, "is_current_stream_capturing", lambda: what == "capture")
            patch(torch.cuda, "graph", lambda graph: ExitStack())
            patch(torch.cuda, "CUDAGraph", lambda: None)
            patch(torch.Tensor, "cuda", lambda tensor: tensor)
            patch(jit, "device_of", lambda signature, values: torch.device("cuda"))
        yield


def raised(case: Case) -> errors.HTileError:
    """The error that a case raises, its code read from a file called example.py."""
    code = case.code + "\n"
    linecache.cache[FILE] = (len(code), None, code.splitlines(True), FILE)
    names: dict[str, object] = {"__name__": "example"}
    exec(PRELUDE, names)
    torch.manual_seed(0)
    with pretended(case.elsewhere), pytest.raises(htile.HTileError) as caught:
        exec(compile(code, FILE, "exec"), names)
    return caught.value


def message(error: errors.HTileError) -> str:
    """The text of an error, the same on every machine."""
    halted = "import of cutlass halted; None in sys.modules"
    return str(error).replace(halted, "No module named 'cutlass'")


def contents() -> str:
    """A line for each section: what it is about, and the classes of its errors."""
    lines = []
    for section in SECTIONS:
        anchor = re.sub(r"[^\w\- ]", "", section.title).lower().replace(" ", "-")
        kinds = ", ".join(f"`{kind}`" for kind in sorted({case.kind for case in section.cases}))
        lines.append(f"- [{section.title}](#{anchor}): {kinds}\n")
    return "".join(lines)


def page() -> str:
    """docs/errors.md."""
    parts = [HEAD, contents(), BEGIN]
    for section in SECTIONS:
        parts.append(f"## {section.title}\n")
        if section.advice:
            parts.append(textwrap.fill(section.advice, 100) + "\n")
        for case in section.cases:
            error = raised(case)
            parts.append(f"**{case.title}**: `{case.kind}`\n")
            parts.append(f"```python\n{case.code}\n```\n")
            text = [
                wrapped
                for line in message(error).splitlines()
                for wrapped in textwrap.wrap(line, 100, subsequent_indent="  ", initial_indent="",
                                             break_on_hyphens=False, drop_whitespace=True)
            ]  # fmt: skip
            parts.append("\n".join(["```text", *text, "```"]) + "\n")
    return "\n".join(parts)


# ---- tests ---------------------------------------------------------------------------------------

CASES = [case for section in SECTIONS for case in section.cases]
FOREIGN = ("mlir", "tvm", "cuda error", "aten::", "cudnn", "dlpack", "nonetype: none")


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.title)
def test_class_and_line(case):
    error = raised(case)
    assert type(error) is getattr(errors, case.kind), error
    assert (error.loc and error.loc.text) == case.line, error
    if case.line is not None:
        assert error.loc.file == FILE
        assert case.code.splitlines()[error.loc.line - 1].strip() == case.line
        assert str(error).endswith(f"\n  {FILE}:{error.loc.line}: {case.line}")
    text = str(error).lower()
    assert not any(word in text for word in FOREIGN), error
    assert len(error.message) > 30 and not error.message.endswith((".", "\n")), error


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_the_page_is_up_to_date():
    written = PAGE.read_text(encoding="utf-8")
    assert written == page(), "run python -m tests.test_errors --write docs/errors.md"


def test_every_class_has_a_case():
    classes = {name for name in vars(errors) if name.endswith("Error")} - {"HTileError"}
    assert {case.kind for case in CASES} == classes
    assert len({case.title for case in CASES}) == len(CASES)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Make docs/errors.md.")
    parser.add_argument("--write", type=Path, required=True, metavar="FILE")
    parser.parse_args().write.write_text(page(), encoding="utf-8", newline="\n")

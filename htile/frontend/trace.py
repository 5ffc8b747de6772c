"""From a user's function and the specs of its arguments to a `Graph`.

The function runs once, with a symbolic tensor for each argument that is not static. What torch or
Python refuses before HTile sees it is told again here, with the user's line.
"""

from __future__ import annotations

import re
import traceback
import types
from collections.abc import Iterable
from math import prod
from typing import NoReturn

import torch
from torch.utils import _pytree as pytree

from ..errors import HTileError, Location, ShapeError, TraceError
from . import in_place as in_place
from . import losses as losses  # fill the table, as what they import does
from . import matrices as matrices
from . import parts as parts
from . import products as products
from . import ranks as ranks
from . import scans as scans
from . import tables as tables
from .captures import check_static, line_of
from .dtypes import DTYPES
from .dynamic import refuse_parts
from .factories import Factories
from .graph import Builder, Graph, Output, Role, returned_dtype
from .hints import REFERENCE, advice
from .libraries import internal
from .ops import Value, Varies, compute_dtype
from .over_rows import OverRows
from .promotion import NO_OPERAND
from .roles import Signature, Spec, written
from .tensor import FUNCTIONS, Tensor, is_real

_VARIES = {
    Role.ROW: Varies.ROW, Role.PER_ROW: Varies.ROW, Role.COLUMN: Varies.SHARED,
    Role.MATRIX: Varies.SHARED,
}  # fmt: skip


def trace(
    fn: types.FunctionType, specs: Iterable[Spec], n: int, multiple: int | None = None
) -> Graph:
    """The graph of `fn` for a row of `n` elements; `specs` say what each parameter is.

    multiple: of rows of up to `n` elements, as for `Graph`.

    A parameter without a spec keeps its default. Raises an HTileError with the user's line.
    """
    signature, specs, loc = Signature(fn), tuple(specs), line_of(written(fn))
    check_static(fn, {spec.name: spec.value for spec in specs if spec.role is Role.STATIC})
    builder = Builder(re.sub(r"[^\w<>]", "_", fn.__name__), n, multiple)
    builder.records = torch.is_grad_enabled()
    values = dict(zip(signature.names, signature.defaults, strict=True))
    values |= {spec.name: _argument(builder, spec) for spec in specs}
    try:
        with Factories(builder):
            result = signature.invoke(tuple(values.values()))
    except (TypeError, RuntimeError, ValueError, IndexError, AttributeError) as error:
        _retell(error)
        raise
    except TraceError as error:
        _name_the_absent(error, [name for name, value in values.items() if value is None])
        raise
    leaves, structure = pytree.tree_flatten_with_path(result)
    if not leaves:
        raise TraceError(f"{builder.name} returns no tensor: return what it computes", loc)
    names = _names([path for path, _ in leaves])
    named = zip(names, leaves, strict=True)
    outputs = [_output(builder, loc, name, leaf) for name, (_, leaf) in named]
    graph = builder.finish(outputs, structure)
    if Role.MATRIX in [spec.role for spec in specs]:
        matrices.check_uses(graph)
    if multiple is not None:
        refuse_parts(graph)
    return graph


def _argument(builder: Builder, spec: Spec) -> object:
    if spec.role is Role.STATIC:
        return spec.value
    varies, spread = _VARIES.get(spec.role, Varies.SCALAR), spec.role in (Role.ROW, Role.COLUMN)
    value = Value(tuple(spec.inner), varies, compute_dtype(spec.dtype), spread=spread)
    return Tensor(builder, builder.add_input(spec.name, spec.role, spec.dtype, value))


def _names(paths: list[tuple]) -> list[str]:
    """`out` for a single result, keys and fields where there are any, else `out0`, `out1`..."""
    if paths == [()]:
        return ["out"]
    names = []
    for i, path in enumerate(paths):
        keys = [getattr(k, "key", getattr(k, "name", None)) for k in path]
        named = all(isinstance(k, str) for k in keys) and "_".join(keys).isidentifier()
        name = "_".join(keys) if named else f"out{i}"
        while name in names:
            name += "_"
        names.append(name)
    return names


def _output(builder: Builder, loc: Location, name: str, leaf: object) -> Output:
    if is_real(leaf):
        remedy = "pass it as an argument, or return it outside"
        raise TraceError(f"{builder.name} returns a real tensor as {name}: {remedy}", loc)
    if not isinstance(leaf, Tensor) or leaf._builder is not builder:
        what = "None" if leaf is None else f"a {type(leaf).__name__}"
        remedy = "return only tensors that are computed from the arguments"
        raise TraceError(f"{builder.name} returns {what} as {name}: {remedy}", loc)
    is_over = isinstance(leaf, OverRows)  # its node is what one row adds
    node = builder[leaf._node if is_over else leaf._current(loc)]
    value = node.value
    if value.varies is not Varies.ROW:
        what = f"the output {name} of {builder.name} does not depend on any row"
        remedy = "compute it outside the function, or combine it with a row"
        raise TraceError(f"{what}: {remedy}", node.loc or loc)
    is_row = value.spread or prod(value.inner) > 1
    if is_over:
        return Output(name, node.id, leaf.dtype, value.inner, is_row, over=leaf._over)
    return Output(name, node.id, returned_dtype(builder, value), value.inner, is_row)


def _name_the_absent(error: HTileError, absent: list[str]) -> None:
    """Say which argument is the None that was computed with, if the user's line names one."""
    words = set(re.findall(r"\w+", error.loc.text)) if error.loc else ()
    named = [name for name in absent if name in words]
    if named and error.message == NO_OPERAND.format("NoneType"):
        given = f"the argument {named[0]} is None; write `if {named[0]} is not None:` before it"
        raise TraceError(f"{error.message}: {given}", error.loc) from None


# torch checks some arguments before it asks __torch_function__; its errors are told again

_ARGUMENT = re.compile(r"(\w+)\(\): argument '(\w+)' .*must be (.+), not (\w+)")
_COMBINATION = re.compile(r"(\w+)\(\) received an invalid combination of arguments")
_LISTED = re.compile(r"expected Tensor as element (\d+) in argument 0, but got (\w+)")
_SIGNATURE = re.compile(r"^(\w+)\(\) (?:takes|got|missing) ")
_REFUSED = re.compile(r"'Tensor' (object|and)|and 'Tensor'|must be real number, not Tensor")
_NAME = re.compile(r"module '(torch(?:\.\w+)*)' has no attribute '(\w+)'")
_MODULES = {"torch", "torch.nn", "torch.nn.functional", "torch.special", "torch.linalg"}
_SHAPE = re.compile(r"not enough values to unpack|tuple index out of range")


def _retell(error: Exception) -> None:
    """Raise an HTileError for what torch, numpy or Python refused to do with a symbolic tensor."""
    stack = list(traceback.walk_tb(error.__traceback__))
    users = [(frame, line) for frame, line in stack if not internal(frame.f_code.co_filename)]
    if not users:
        return
    frame, line = users[-1]
    text, loc = str(error), Location(frame.f_code.co_filename, line)

    def tell(message: str, kind: type[HTileError] = TraceError) -> NoReturn:
        raise kind(message, loc) from None

    if _SHAPE.match(text):
        held = "|".join(name for name, v in frame.f_locals.items() if isinstance(v, torch.Size))
        uses = rf"\b({held or '(?!)'})\[(?!(-1|0)\])|(?<!=)= *({held or '(?!)'})\s*(#|$)"
        if re.search(rf"\.(shape|size\(\))|{uses}", loc.text):
            tell("inside the function a row has the shape (N,), without the leading dimensions: "
                 "write n = x.shape[-1]", ShapeError)  # fmt: skip
    if match := _ARGUMENT.search(text):
        name, argument, expected, kind = match.groups()
        remedy = f": {_instead(name)}" if expected == "Tensor" else ""
        tell(f"torch.{name} takes a {expected} as {argument!r}, not a {kind}{remedy}")
    if match := _COMBINATION.search(text):
        tell(f"torch.{match[1]} does not take these arguments: {_instead(match[1])}")
    if match := _LISTED.search(text):
        remedy = "write torch.full_like(x, value) for a number"
        tell(f"torch joins tensors, and element {match[1]} of the list is a {match[2]}: {remedy}")
    if "Invalid device string: 'x.device'" in text:
        tell("torch.device(x.device) inside the function: the kernel runs where its inputs are")
    if re.search("not support ufuncs|unsupported operand.*numpy", text):
        tell("numpy cannot compute with a symbolic value: write the torch function (torch.exp)")
    if match := _NAME.match(text):
        tell(f"{match[1]} has no {match[2]}; {_elsewhere(*match.groups())}")
    if frame is not stack[-1][0]:
        return
    if (match := _SIGNATURE.match(text)) and re.search(rf"\b(torch|F)\.{match[1]}\(", loc.text):
        tell(f"torch.{match[1]} does not take these arguments")
    if _REFUSED.search(text):
        tell(f"this cannot be done with a symbolic value: {text.splitlines()[0]}")


def _elsewhere(module: str, name: str) -> str:
    """What to write for a name that a module of torch lacks: its spelling in another module."""
    if module not in _MODULES:
        return REFERENCE
    dtypes = [str(dtype) for dtype, of in DTYPES.items() if of.computed]
    known = {s: s.rpartition(".")[2] for s in (*dtypes, *(s for s, _ in FUNCTIONS.values()))}
    found = sorted(spelling for spelling, last in known.items() if last == name)
    return f"write {' or '.join(found)}" if found else advice(name, known.values())


def _instead(name: str) -> str:
    clamp = {"maximum": "min", "max": "min", "minimum": "max", "min": "max"}.get(name)
    if clamp:
        name = {"max": "maximum", "min": "minimum"}.get(name, name)
        return f"write torch.{name}(x, torch.full_like(x, 0.0)) or x.clamp({clamp}=0.0)"
    return f"write torch.full_like(x, value) for a number in torch.{name}"

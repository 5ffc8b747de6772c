"""A repeated call as a function of its own: a few checks, the outputs, the launch.

`shortcut` writes it for one launch, in Python, with the user's parameters. The compiled host
function checks dtypes, shapes, strides, alignment and devices itself, so that here only those are
looked at that tell launches apart cheaply, and what no kernel sees: the type of an argument,
gradients, negation, captured values, transforms.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from .frontend.captures import Captures
from .frontend.graph import Graph
from .frontend.roles import Call, Signature, Static

MISS = object()  # what a shortcut returns for a call that is not one of its own
TENSORS = frozenset({torch.Tensor, torch.nn.Parameter})


def shortcut(
    signature: Signature,
    captures: Captures,
    call: Call,
    values: tuple,
    graph: Graph,
    kernel: Callable,
    rows: tuple[int, int],
) -> Callable | None:
    """The function for calls like this one, which takes what the user's takes; None for no such.

    rows: from and below how many rows the kernel is the one to run.
    """
    names = signature.names
    tensors = [n for n, v in zip(names, values, strict=True) if isinstance(v, torch.Tensor)]
    shape = (*call.lead, call.n)
    like = next((n for n in tensors if values[names.index(n)].shape == shape), None)
    if like is None or not set(tensors) <= {i.name for i in graph.inputs}:
        return None
    if any(name.startswith("_") for name in names):
        return None  # may be a name of the scope
    model = values[names.index(like)]
    scope: dict[str, object] = {
        "_ad": forward_ad, "_captured": captures.fingerprint(), "_captures": captures.fingerprint,
        "_dtype": model.dtype, "_empty_like": torch.empty_like, "_grad": torch.is_grad_enabled,
        "_kernel": kernel, "_MISS": MISS, "_mismatch": (TypeError, ValueError), "_float": float,
        "_TENSORS": TENSORS, "_type": type,
        "_transforms": torch._C._functorch.peek_interpreter_stack,
    }  # fmt: skip
    guards = []
    for k, (name, kind, value) in enumerate(zip(names, signature.kinds, values, strict=True)):
        if name in tensors:
            continue
        if type(value) is float and kind is not Static:
            guards.append(f"_type({name}) is _float")
        elif isinstance(value, bool | int | str | torch.dtype | None) and kind in (None, Static):
            scope[f"_static{k}"] = value
            scope[f"_type{k}"] = type(value)
            guards.append(f"_type({name}) is _type{k} and {name} == _static{k}")
        else:
            return None
    guards += [
        f"_type({like}) in _TENSORS and {like}.dtype is _dtype and {like}.shape[-1] == {call.n}",
        f"{rows[0] * call.n} <= {like}.numel() < {rows[1] * call.n}",
        f"{like}.get_device() == {model.get_device()} and {like}.is_contiguous()",
        *(f"_type({n}) in _TENSORS" for n in tensors if n != like),
        *(f"not {n}.is_neg()" for n in tensors),
        f"not (_grad() and ({' or '.join(f'{n}.requires_grad' for n in tensors)}))",
        "_captures() is _captured and _ad._current_level < 0 and _transforms() is None",
    ]
    lines, results = [], []
    for k, output in enumerate(graph.outputs):
        results.append(f"_out{k}")
        scope[f"_dtype{k}"] = output.dtype
        of = "" if output.dtype is model.dtype else f", dtype=_dtype{k}"
        made = f"_empty_like({like}{of})"
        if not output.is_row:
            inner = "".join(f"{size}, " for size in output.inner)
            made = f"{like}.new_empty((*{like}.shape[:-1], {inner}), dtype=_dtype{k})"
        lines.append(f"    _out{k} = {made}")
    arguments = ", ".join([*(i.name for i in graph.inputs), *results])
    scope["_structure"], scope["_unflatten"] = graph.structure, pytree.tree_unflatten
    returned = f"_unflatten([{', '.join(results)}], _structure)"
    if graph.structure == pytree.tree_structure(0):
        returned = results[0]
    elif graph.structure == pytree.tree_structure((0,) * len(results)):
        returned = f"({', '.join(results)},)"
    text = "\n".join(
        [
            f"def _shortcut{_parameters(signature, scope)}:",
            f"    if not ({' and '.join(guards)}):",
            "        return _MISS",
            *lines,
            "    try:",
            f"        _kernel({arguments})",
            "    except _mismatch:  # what the host function checks",
            "        return _MISS",
            f"    return {returned}",
        ]
    )
    exec(compile(text, f"<htile shortcut of {signature.name}>", "exec"), scope)
    return scope["_shortcut"]


def _parameters(signature: Signature, scope: dict[str, object]) -> str:
    """The user's parameters as text; their defaults go to `scope`."""
    parameters = []
    for k, parameter in enumerate(signature.parameters):
        if parameter.default is not inspect.Parameter.empty:
            scope[f"_default{k}"] = parameter.default
            parameter = parameter.replace(default=_Name(f"_default{k}"))
        parameters.append(parameter.replace(annotation=inspect.Parameter.empty))
    return str(inspect.Signature(parameters))


class _Name(str):
    """Text that is its own `repr`."""

    __repr__ = str.__str__

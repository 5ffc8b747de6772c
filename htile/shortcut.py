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
from .frontend.graph import Graph, Output
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
    given = dict(zip(signature.names, values, strict=True))
    tensors = [name for name, value in given.items() if isinstance(value, torch.Tensor)]
    shape = (*call.lead, call.n)
    like = next((name for name in tensors if given[name].shape == shape), None)
    if like is None or not set(tensors) <= {i.name for i in graph.inputs}:
        return None
    if any(name.startswith("_") for name in given):
        return None  # may be a name of the scope
    scope: dict[str, object] = {
        "_ad": forward_ad, "_captured": captures.fingerprint(), "_captures": captures.fingerprint,
        "_dtype": given[like].dtype, "_empty_like": torch.empty_like, "_float": float,
        "_grad": torch.is_grad_enabled, "_kernel": kernel, "_MISS": MISS,
        "_mismatch": (TypeError, ValueError), "_TENSORS": TENSORS, "_type": type,
        "_transforms": torch._C._functorch.peek_interpreter_stack,
    }  # fmt: skip
    others = _guards_of_others(signature, given, scope)
    if others is None:
        return None
    sizes = call.n, rows[0] * call.n, rows[1] * call.n
    guards = others + _guards_of_tensors(tensors, like, given[like].get_device(), sizes)
    made = [_allocation(k, output, like, given[like].dtype, scope) for k, output in
            enumerate(graph.outputs)]  # fmt: skip
    results = [f"_out{k}" for k in range(len(made))]
    text = "\n".join(
        [
            f"def _shortcut{_parameters(signature, scope)}:",
            f"    if not ({' and '.join(guards)}):",
            "        return _MISS",
            *(f"    {name} = {new}" for name, new in zip(results, made, strict=True)),
            "    try:",
            f"        _kernel({', '.join([*(i.name for i in graph.inputs), *results])})",
            "    except _mismatch:  # what the host function checks",
            "        return _MISS",
            f"    return {_returned(results, graph.structure, scope)}",
        ]
    )
    exec(compile(text, f"<htile shortcut of {signature.name}>", "exec"), scope)
    return scope["_shortcut"]


def _guards_of_others(
    signature: Signature, given: dict[str, object], scope: dict[str, object]
) -> list[str] | None:
    """What must hold of arguments that are no tensors; None where that is not told cheaply."""
    guards = []
    for k, (kind, (name, value)) in enumerate(zip(signature.kinds, given.items(), strict=True)):
        if isinstance(value, torch.Tensor):
            continue
        if type(value) is float and kind is not Static:
            guards.append(f"_type({name}) is _float")
        elif isinstance(value, bool | int | str | torch.dtype | None) and kind in (None, Static):
            scope[f"_static{k}"] = value
            scope[f"_type{k}"] = type(value)
            guards.append(f"_type({name}) is _type{k} and {name} == _static{k}")
        else:
            return None
    return guards


def _guards_of_tensors(
    tensors: list[str], like: str, device: int, sizes: tuple[int, int, int]
) -> list[str]:
    """What must hold of the tensors; sizes: N of `like`, and from and below how many elements."""
    n, least, beyond = sizes
    return [
        f"_type({like}) in _TENSORS and {like}.dtype is _dtype and {like}.shape[-1] == {n}",
        f"{least} <= {like}.numel() < {beyond}",
        f"{like}.get_device() == {device} and {like}.is_contiguous()",
        *(f"_type({n}) in _TENSORS" for n in tensors if n != like),
        *(f"not {n}.is_neg()" for n in tensors),
        f"not (_grad() and ({' or '.join(f'{n}.requires_grad' for n in tensors)}))",
        "_captures() is _captured and _ad._current_level < 0 and _transforms() is None",
    ]


def _allocation(
    k: int, output: Output, like: str, dtype: torch.dtype, scope: dict[str, object]
) -> str:
    """The k-th output, contiguous as `like` is."""
    scope[f"_dtype{k}"] = output.dtype
    if not output.is_row:
        inner = "".join(f"{size}, " for size in output.inner)
        return f"{like}.new_empty((*{like}.shape[:-1], {inner}), dtype=_dtype{k})"
    return f"_empty_like({like})" if output.dtype is dtype else (
        f"_empty_like({like}, dtype=_dtype{k})"
    )  # fmt: skip


def _returned(results: list[str], structure: object, scope: dict[str, object]) -> str:
    """The user's structure of the outputs."""
    if structure == pytree.tree_structure(0):
        return results[0]
    if structure == pytree.tree_structure((0,) * len(results)):
        return f"({', '.join(results)},)"
    scope["_structure"], scope["_unflatten"] = structure, pytree.tree_unflatten
    return f"_unflatten([{', '.join(results)}], _structure)"


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

"""A repeated call as a function of its own: a few checks, the outputs, the launch.

`shortcut` writes it for one launch, in Python, with the user's parameters. One call of torch's own
`TensorGuards` compares all tensors and the modes of torch with those of the first call: types,
dtypes, devices, N, `requires_grad`, dispatch keys (negation, transforms, inference). What else
tells launches apart, sizes of rows, strides, alignment, the compiled host function checks itself.

A shortcut of fixed sizes compares those as well, and has them for its outputs.
"""

from __future__ import annotations

import builtins
import inspect
from collections.abc import Callable

import torch
from torch.autograd import forward_ad
from torch.utils import _pytree as pytree

from ..frontend.captures import Captures
from ..frontend.graph import Graph
from ..frontend.roles import Call, Signature, Spec, Static

MISS = object()  # what a shortcut returns for a call that is not one of its own

# What the host function and the conversion of a tensor refuse with. A launch that fails counts as
# refused too: the long way launches again, and raises.
REFUSED = (TypeError, ValueError, RuntimeError, BufferError)


def shortcut(
    signature: Signature,
    captures: Captures,
    call: Call,
    values: tuple,
    graph: Graph,
    kernel: Callable,
    rows: tuple[int, int],
    missed: Callable[[], None] | None = None,
) -> Callable | None:
    """The function for calls like this one, which takes what the user's takes; None for no such.

    It raises TypeError for arguments that the user's would not take, and NameError or ValueError
    where a captured name or cell is gone.

    rows: from and below how many rows the kernel is the one to run.
    missed: if given, the function is for the sizes of this call, and calls `missed` for others.
    """
    given = dict(zip(signature.names, values, strict=True))
    tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
    shape = (*call.lead, call.n)
    like = next((name for name, tensor in tensors.items() if tensor.shape == shape), None)
    if like is None or not set(tensors) <= {i.name for i in graph.inputs}:
        return None
    if any(name.startswith("_") for name in given):
        return None  # may be a name of the scope
    scope: dict[str, object] = {
        "_empty": allocator(tensors[like].device), "_kernel": kernel, "_MISS": MISS,
        "_refused": REFUSED,
    }  # fmt: skip
    others = _guards_of_others(signature, given, scope)
    if others is None:
        return None
    guards = [
        *others,
        *_guards_of_tensors(call, tensors, missed is not None, scope),
        *_guards_of_captures(captures, given, scope),
    ]
    sizes, lead, miss = [], [*map(str, call.lead)], ["    return _MISS"]
    if missed is None:
        sizes = lead = [f"_m{k}" for k in range(len(call.lead))]
    else:
        scope["_missed"], miss = missed, ["    _missed()", *miss]
    results = [f"_out{k}" for k in range(len(graph.outputs))]
    scope |= {f"_dtype{k}": output.dtype for k, output in enumerate(graph.outputs)}
    lines = [
        f"if not ({' and '.join(guards)}):",
        *miss,
        *([f"_shape = {like}.shape"] if sizes else []),
        *(f"{size} = _shape[{k}]" for k, size in enumerate(sizes)),
        *([f"if not {rows[0]} <= {' * '.join(sizes)} < {rows[1]}:", "    return _MISS"]
          if sizes else []),
        *(f"_out{k} = _empty({_layout([*lead, *map(str, output.inner)])}, _dtype{k})"
          for k, output in enumerate(graph.outputs)),
        *_is_elsewhere(results[0], tensors[like].device, miss),
        "try:",
        f"    _kernel({', '.join([*(i.name for i in graph.inputs), *results])})",
        "except _refused:",
        *miss,
        f"return {_returned(results, graph.structure, scope)}",
    ]  # fmt: skip
    return _defined(signature, lines, scope, captures.fn.__globals__)


def allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], torch.Tensor]:
    """The quickest function from sizes, strides and dtype to a tensor of this device.

    On the current GPU that is what Inductor calls, without torch's dispatcher. Where another GPU is
    the current one later, it makes tensors there: see `_is_elsewhere`.
    """
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        return torch._C._dynamo.guards._empty_strided_cuda

    def empty(sizes, strides, dtype):
        return torch.empty_strided(sizes, strides, dtype=dtype, device=device)

    return empty


def _is_elsewhere(name: str, device: torch.device, miss: list[str]) -> list[str]:
    """Lines that leave where an output was made on another GPU; none where there is one GPU."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return []
    return [f"if {name}.get_device() != {device.index}:", *miss]


def _guards_of_others(
    signature: Signature, given: dict[str, object], scope: dict[str, object]
) -> list[str] | None:
    """What must hold of arguments that are no tensors; None where that is not told cheaply."""
    scope |= {"_float": float, "_type": type}
    guards = []
    for k, (kind, (name, value)) in enumerate(zip(signature.kinds, given.items(), strict=True)):
        if isinstance(value, torch.Tensor):
            continue
        if type(value) is float and kind is not Static:
            guards.append(f"_type({name}) is _float")
        elif value is None or (isinstance(value, bool) and kind in (None, Static)):
            guards.append(f"{name} is {value}")
        elif isinstance(value, int | str | torch.dtype) and kind in (None, Static):
            scope[f"_static{k}"] = value
            scope[f"_type{k}"] = type(value)
            guards.append(f"_type({name}) is _type{k} and {name} == _static{k}")
        else:
            return None
    return guards


def _guards_of_tensors(
    call: Call, tensors: dict[str, torch.Tensor], of_sizes: bool, scope: dict[str, object]
) -> list[str]:
    """What must hold of the tensors, and of gradients and transforms."""
    specs = {spec.name: spec for spec in call.specs}
    sizes = [
        [*t.shape] if of_sizes else _fixed(specs[name], t, call.lead) for name, t in tensors.items()
    ]
    scope["_same"] = torch._C._dynamo.guards.TensorGuards(
        *tensors.values(),
        dynamic_dims_sizes=sizes,
        dynamic_dims_strides=[[*[None] * (t.ndim - 1), *t.stride()[-1:]] for t in tensors.values()],
    ).check
    scope["_ad"] = forward_ad
    guards = [f"_same({', '.join(tensors)})", "_ad._current_level < 0"]
    if any(tensor.requires_grad for tensor in tensors.values()):
        scope["_grad"] = torch.is_grad_enabled
        guards.append("not _grad()")
    return guards


def _fixed(spec: Spec, tensor: torch.Tensor, lead: tuple[int, ...]) -> list[int | None]:
    """The sizes of a tensor; None for each that the rows have too, and may change with them."""
    own = tensor.ndim - len(spec.inner)
    pairs = zip(tensor.shape[:own], lead[len(lead) - own :], strict=True)
    return [*(None if size == n else size for size, n in pairs), *tensor.shape[own:]]


def _guards_of_captures(
    captures: Captures, given: dict[str, object], scope: dict[str, object]
) -> list[str]:
    """That nothing captured has changed: the shortcut sees the same globals as the function."""
    watched, captured = captures.watched()
    scope |= {"_captured": captured, "_captures": captures.fingerprint}
    globals_ = captures.fn.__globals__
    reads = []
    for k, (read, where, seen) in enumerate(watched):
        own = getattr(read, "__self__", None) is globals_
        if own and where not in given and not where.startswith("_"):
            hidden = where not in globals_  # a builtin, until a global hides it
            scope[f"_seen_{where}"] = getattr(builtins, where) if hidden else seen
            reads.append(f"{where} is _seen_{where}")
        else:
            scope |= {f"_read{k}": read, f"_where{k}": where, f"_seen{k}": seen}
            reads.append(f"_read{k}(_where{k}) is _seen{k}")
    same = " and ".join(dict.fromkeys(reads))
    return [f"({same} or _captures() is _captured)"] if same else []


def _layout(sizes: list[str]) -> str:
    """Sizes and strides of a contiguous tensor; Python multiplies numbers when it compiles."""
    strides = [" * ".join(sizes[k + 1 :]) or "1" for k in range(len(sizes))]
    return ", ".join(f"({''.join(f'{text}, ' for text in texts)})" for texts in (sizes, strides))


def _returned(results: list[str], structure: object, scope: dict[str, object]) -> str:
    """The user's structure of the outputs."""
    if structure == pytree.tree_structure(0):
        return results[0]
    if structure == pytree.tree_structure((0,) * len(results)):
        return f"({', '.join(results)},)"
    scope["_structure"], scope["_unflatten"] = structure, pytree.tree_unflatten
    return f"_unflatten([{', '.join(results)}], _structure)"


def _defined(
    signature: Signature, lines: list[str], scope: dict[str, object], globals_: dict
) -> Callable:
    """The function of these lines, with the names of `scope` beside the user's globals."""
    parameters = _parameters(signature, scope)
    text = [f"def _make({', '.join(scope)}):", f"    def _shortcut{parameters}:"]
    text += [f"        {line}" for line in lines]
    text += ["    return _shortcut"]
    made: dict[str, Callable] = {}
    name = f"<htile shortcut of {signature.name}>"
    exec(compile("\n".join(text), name, "exec"), globals_, made)
    return made["_make"](**scope)


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

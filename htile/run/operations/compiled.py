"""Calls that torch compiles or exports.

`call` is read by Dynamo, the part of torch.compile that reads Python, so it is written in what
Dynamo follows. It asks `_asked` and `_planned`, which Dynamo runs as they are, for what it then
takes as constants: with them the function is traced for the kinds of arguments that come, as in
any call. What remains in torch's graph is one operation; see `roots.py`.

Dynamo traces anew where one of the values that it told them is another one: a dtype, N, a static
argument, or a captured value that is a number, a string or the like. The operation itself sees the
changes of all others, and refuses.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch.autograd import forward_ad
from torch.compiler import assume_constant_result, is_exporting
from torch.utils import _pytree as pytree

from ...errors import ArgumentError, GradientError, HTileError, UnsupportedError
from ...frontend.annotations import MOST_AXES, Inner, Matrix, PerRow, Shared, Static
from ...frontend.captures import Captures, closure
from ...frontend.graph import Role
from ...frontend.roles import Signature, classify, refuse_subclass, stands_in
from ..operands import is_dtensor, without_modes
from .known import FUNCTIONS
from .roots import CALL, RUN_, call_distributed, call_transformed, root_of

if TYPE_CHECKING:
    from ..rowwise import Rowwise

ATOMS = (bool, str, type(None), torch.dtype, tuple)  # with int and float: what Dynamo can tell
GUARDED = (bool, int, float, str, type(None), torch.dtype)  # captured values that Dynamo watches
STATIC = -1  # in place of a number of dimensions
DEFAULT = -1  # in place of the place of a value
RESULT = "result"  # the kind of what is no structure
TENSOR = 5  # the length of what is told of a tensor
STAND_IN = 2  # the size of leading dimensions where a call is planned without them


def call(function: Rowwise, args: tuple, kwargs: dict):
    """A call inside torch.compile: a graph break where it is refused."""
    is_taken, found = _recorded(function, args, kwargs)
    return found if is_taken else _call_of_htile_rowwise(function, args, kwargs)


def call_recorded(function: Rowwise, args: tuple, kwargs: dict):
    """A call while torch records operations, as torch.export does. Raises what refuses it."""
    is_taken, found = _recorded(function, args, kwargs)
    if not is_taken:
        raise _REFUSALS.pop(function._number)
    return found


@torch._disable_dynamo  # `torch.compiler.disable` would import torch._dynamo too, for a second
def _call_of_htile_rowwise(function: Rowwise, args: tuple, kwargs: dict):
    """A graph break for torch.compile, which shows the reason with `fullgraph=True`."""
    return function(*args, **kwargs)


_call_of_htile_rowwise._torchdynamo_disable = True  # and `_refuse` says why


def _recorded(function: Rowwise, args: tuple, kwargs: dict) -> tuple[bool, object]:
    """Whether the call can be one operation of torch's graph, and its results."""
    number, named = function._number, dict(kwargs)
    asked = _asked(number, len(args), tuple(named))
    if asked is None:
        return False, None
    has_out, is_transformed, dimensions = asked
    out = named.pop("out") if has_out else None
    values = [*args, *named.values()]
    told = tuple([_told(value, count) for value, count in zip(values, dimensions, strict=True)])
    captured = ()
    if function._reads is not None:
        captured = tuple([_told(value, STATIC) for value in function._reads()])
    outs = None if out is None else _told_all(out)
    planned = _planned(number, len(args), tuple(named), told, outs, captured)
    if planned is None:
        return False, None
    name, places, numbers, model, are_distributed = planned
    tensors = [values[k] for k in places]
    counted = [default if k == DEFAULT else float(values[k]) for k, default in numbers]
    if are_distributed:
        return True, _built(model, call_distributed(name, tensors, counted))
    if is_transformed:
        return True, _built(model, call_transformed(name, tensors, counted))
    if out is None:
        return True, _built(model, CALL(name, tensors, counted))
    RUN_(name, tensors, counted, _leaves(model, out))
    return True, out


def _told(value: object, count: int) -> tuple:
    """What tells a value from others that need another trace, in constants.

    count: how many of a tensor's last dimensions belong to a row; STATIC for a static value.
    """
    if isinstance(value, torch.Tensor):
        first = max(0, value.ndim - count)
        inner = [operator.index(value.shape[k]) for k in range(first, value.ndim)]
        return (type(value), value.dtype, value.ndim, tuple(inner), value.requires_grad)
    if type(value) is float:
        return (float, value.hex() if count == STATIC else None)
    if type(value) is int:
        return (int, operator.index(value))
    return (None, value) if type(value) in ATOMS else (object, type(value).__name__)


def _told_all(out: object) -> tuple:
    """The structure of what is given as `out=`, as `_model` tells it."""
    if isinstance(out, torch.Tensor):
        return (RESULT, out.requires_grad)
    if type(out) is dict:
        return ("dict", tuple([(key, _told_all(each)) for key, each in out.items()]))
    if isinstance(out, (tuple, list)):
        return (type(out).__name__, tuple([_told_all(each) for each in out]))
    return ("other", 0)


def _built(model: tuple, found: list):
    """The results in the user's structure."""
    kind, parts = model
    if kind == RESULT:
        return found[parts]
    if kind == "dict":
        return {key: _built(part, found) for key, part in parts}
    built = [_built(part, found) for part in parts]
    if kind == "list":
        return built
    return tuple(built) if kind == "tuple" else _NAMED_TUPLES[kind](*built)


def _leaves(model: tuple, out: object) -> list:
    """The tensors of `out=`, which has the structure `model`, in the order of the results."""
    kind, parts = model
    if kind == RESULT:
        return [out]
    leaves = []
    for k, part in enumerate(parts):
        if kind == "dict":
            leaves = leaves + _leaves(part[1], out[part[0]])
        else:
            leaves = leaves + _leaves(part, out[k])
    return leaves


@assume_constant_result
def _asked(number: str, count: int, named: tuple[str, ...]) -> tuple[bool, bool, tuple] | None:
    """Whether there is `out=`, whether torch.func works on the call, and for each value but `out`
    what `_told` is to tell; None if refused.

    count: how many arguments are given by position. named: the names of the others.
    """
    function = FUNCTIONS[number]
    signature = function._signature
    has_out = "out" in named and "out" not in signature.names
    named = tuple(name for name in named if not has_out or name != "out")
    try:
        is_transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if is_transformed and has_out:
            raise UnsupportedError(
                f"{signature.name}: out= inside torch.func or with tangents; return the result"
            )
        if is_transformed and not is_exporting():
            torch.compiler.allow_in_graph(call_transformed)
        elif is_transformed or forward_ad._current_level >= 0:
            raise UnsupportedError(
                f"{signature.name}: torch.func inside torch.export, and forward_ad inside "
                "torch.compile or torch.export are not supported yet; compile or export what they "
                "are applied to, or call it outside"
            )
        places = _places(signature, count, named)
        function._reads = function._reads or _reader(function._captures)
    except HTileError as error:
        return _refuse(function, error)
    kinds = dict(zip(signature.names, signature.kinds, strict=True))
    asked = {place: _dimensions(kinds[name]) for name, place in places.items()}
    return has_out, is_transformed, tuple(asked[k] for k in range(count + len(named)))


def _dimensions(kind: type | None) -> int:
    """How many of the last dimensions of a tensor belong to a row, as the annotation says."""
    if kind is Static:
        return STATIC
    if isinstance(kind, type) and issubclass(kind, Inner):
        return kind.rank
    return {PerRow: 0, Matrix: 2, Shared: MOST_AXES}.get(kind, 1)


def _places(signature: Signature, count: int, named: tuple[str, ...]) -> dict[str, int]:
    """For each parameter that is given the place of its value. Raises ArgumentError."""
    given = [[place] for place in range(count + len(named))]
    bound = signature.bind(tuple(given[:count]), dict(zip(named, given[count:], strict=True)))
    both = zip(signature.names, bound, strict=True)
    return {name: value[0] for name, value in both if any(value is each for each in given)}


@assume_constant_result
def _planned(
    number: str, count: int, named: tuple[str, ...], told: tuple, outs: tuple | None,
    captured: tuple,
) -> tuple | None:  # fmt: skip
    """The operation for a call of which this was told; None if it is refused.

    It is the name of the graph, the places of tensors, those of numbers, each with its default, and
    the structure of the results. captured: unused; Dynamo guards what it tells.
    """
    function = FUNCTIONS[number]
    try:
        with without_modes():
            return _operation(function, _places(function._signature, count, named), told, outs)
    except HTileError as error:
        return _refuse(function, error)


def _operation(function: Rowwise, places: dict[str, int], told: tuple, outs: tuple | None) -> tuple:
    """What `_planned` gives. Raises the HTileError that refuses it."""
    signature = function._signature
    if function._dynamic_n:
        raise UnsupportedError(
            f"{signature.name}: dynamic_n=True in torch.compile or torch.export is not supported "
            "yet; leave it out, and each N has a kernel"
        )
    if outs is not None and any(len(each) == TENSOR and each[-1] for each in told):
        if torch.is_grad_enabled():
            raise GradientError(
                f"{signature.name}: out= with arguments that require grad; return the result, or "
                "call it under torch.no_grad()"
            )
    values = [
        _stand_in(signature.name, name, told[places[name]]) if name in places else default
        for name, default in zip(signature.names, signature.defaults, strict=True)
    ]
    captured = function._captures.fingerprint()
    request, _ = function._request(classify(signature, tuple(values)), captured, tuple(values))
    structure = request.specialization.traced.structure
    count = structure.num_leaves
    model = _model(signature.name, pytree.tree_unflatten(range(count), structure))
    if outs is not None:
        _check_structure(signature.name, model, outs)
    root = root_of(function, request, captured, is_exporting())
    if torch.is_grad_enabled():
        tensors = {name: told[k] for name, k in places.items() if len(told[k]) == TENSOR}
        wrt = tuple(spec.name for spec in root.runner.specs if tensors.get(spec.name, (False,))[-1])
        leaves = {i.name for i in root.runner.graph.inputs}
        if wrt and leaves.issuperset(wrt):
            root.refuse_no_derivative(wrt)
    tensors, numbers = [], []
    for spec, value in zip(root.runner.specs, values, strict=True):
        if spec.role is Role.SCALAR:
            numbers.append((places.get(spec.name, DEFAULT), float(value)))
        elif spec.role is not Role.STATIC:
            if spec.name not in places:
                raise UnsupportedError(
                    f"{signature.name}: the default of {spec.name} is a tensor, which "
                    "torch.compile does not see; pass it as an argument"
                )
            tensors.append(places[spec.name])
    are_distributed = any(is_dtensor(each[0]) for each in told)
    if are_distributed and outs is not None:
        raise UnsupportedError(f"{signature.name}: out= with DTensors; return the result")
    if are_distributed:
        torch.compiler.allow_in_graph(call_distributed)
    return root.runner.name, tuple(tensors), tuple(numbers), model, are_distributed


def _stand_in(function: str, name: str, told: tuple) -> object:
    """A value like the one of which this was told."""
    kind, *rest = told
    if kind is float:
        return 1.0 if rest[0] is None else float.fromhex(rest[0])
    if kind in (int, None):
        return rest[0]
    if kind is object:
        raise UnsupportedError(
            f"{function}: {name} is a {rest[0]}, which torch.compile can not tell from others; "
            "pass a number, a string, a dtype or a tuple of them"
        )
    if not stands_in(kind) and not is_dtensor(kind):
        refuse_subclass(function, name, kind)
    dtype, ndim, inner, _ = rest
    shape = (*(STAND_IN,) * (ndim - len(inner)), *inner)
    return torch.empty(shape, dtype=dtype, device="meta")


def _model(function: str, results: object) -> tuple:
    """The structure of the results as nested tuples: (kind, parts), of indices in the end."""
    kind = type(results)
    if kind is int:
        return (RESULT, results)
    if kind is dict:
        return ("dict", tuple((key, _model(function, part)) for key, part in results.items()))
    if hasattr(kind, "_fields") or kind in (tuple, list):
        name = kind.__name__
        while _NAMED_TUPLES.setdefault(name, kind) is not kind:  # another one has this name
            name += "'"
        return (name, tuple(_model(function, part) for part in results))
    raise UnsupportedError(
        f"{function} returns a {kind.__name__}, which a compiled graph does not; return a tensor, "
        "or tuples, lists and dicts of them"
    )


def _check_structure(function: str, model: tuple, outs: tuple) -> None:
    """Raise ArgumentError if `out=` has another structure than the results, or requires grad."""
    (kind, parts), (given, inside) = model, outs
    if kind == given == RESULT:
        if inside and torch.is_grad_enabled():
            raise ArgumentError(
                f"{function}: a tensor of out= requires grad, and writing to it would not be "
                "recorded; pass a tensor that does not, or call under torch.no_grad()"
            )
        return
    is_dict = kind == given == "dict"
    if is_dict:
        named, order = dict(inside), [key for key, _ in parts]
        parts = [part for _, part in parts]
        inside = [named[key] for key in order] if {*named} == {*order} else []
    if kind.rstrip("'") != given or len(parts) != len(inside):
        raise ArgumentError(f"{function}: out= must have the structure that the function returns")
    for part, each in zip(parts, inside, strict=True):
        _check_structure(function, part, each)


# Those that functions return, by name. Of several with one name, or with that of a structure, all
# but the first have "'" behind it.
_NAMED_TUPLES: dict[str, type] = dict(tuple=tuple, list=list, dict=dict, result=type)
_REFUSALS: dict[str, HTileError] = {}  # by the number of the function, until it is raised


def _refuse(function: Rowwise, error: HTileError) -> None:
    """Keep the reason for the one who asked: torch shows it, or `call_recorded` raises it."""
    _REFUSALS[function._number] = error
    _call_of_htile_rowwise._torchdynamo_disable_msg = str(error)


def _reader(captures: Captures) -> Callable[[], tuple] | None:
    """A function that returns what is captured by name, as far as Dynamo watches such values.

    It has the closure and the globals of the user's function, so Dynamo sees where they come from.
    """
    fn, cells, names = captures.fn, closure(captures.fn), {}
    for read, where, seen in captures.watched()[0]:
        if type(seen) not in GUARDED:
            continue
        if getattr(read, "__self__", None) is fn.__globals__ and where in fn.__globals__:
            names[where] = None
    held = {name: value for name, value in cells.items() if type(value) in GUARDED}
    names = [name for name in names if name.isidentifier() and name not in held]
    if not names and not held:
        return None
    inner = f"    def _reads():\n        return ({''.join(f'{n}, ' for n in (*held, *names))})"
    text = f"def _make({', '.join(held)}):\n{inner}\n    return _reads"
    made = {}
    exec(compile(text, f"<htile reads of {fn.__name__}>", "exec"), made)
    code = next(c for c in made["_make"].__code__.co_consts if isinstance(c, types.CodeType))
    of = dict(zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True))
    held = tuple(of[name] for name in code.co_freevars)
    return types.FunctionType(code, fn.__globals__, "_reads", None, held)

"""`fuse`: the leaf modules of any model whose own forward a kernel can compute, found and replaced.

A module is replaced if its forward traces as a function of rows, and if that agrees with the
forward itself on random rows: results and gradients, in each dtype, for batches of one to three
leading dimensions. So nothing is known here of any model or library.
"""

from __future__ import annotations

import types
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch.compiler import is_compiling

from ..errors import ArgumentError, HTileError, TraceError, an
from ..frontend.captures import freeze
from ..frontend.dtypes import dtype_name
from ..frontend.graph import Graph
from ..frontend.ops import Op
from ..frontend.roles import Signature, classify
from ..frontend.trace import trace
from .agreement import USER_ERRORS, agreeing_dtypes, first_line
from .guards import PLAIN, fits
from .stand_in import PLACES, Forward, forward_of

LENGTH = 64  # of the rows that a module without parameters is tried with
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_COMPUTES_NOTHING = {Op.INPUT, Op.CONST, Op.STOP, Op.RESHAPE, Op.EXPAND, Op.CAST, Op.CONVERT}


@dataclass(frozen=True)
class Report:
    """What `fuse` did with each leaf module, by the module's name in the model.

    fused: the class of each module that is a kernel now, and the dtypes of its rows.
    left: why each of the others is as it was.
    """

    fused: dict[str, str]
    left: dict[str, str]
    _replaced: list[tuple[torch.nn.Module, types.MethodType]] = field(repr=False)

    def undo(self) -> None:
        """Give all modules their own forward back. Those replaced again since stay as they are."""
        for module, forward in self._replaced:
            if vars(module).get("forward") is forward:
                del vars(module)["forward"]

    def __str__(self) -> str:
        found = [f"fused {name or 'the model'}: {what}" for name, what in self.fused.items()]
        left = [f"left {name or 'the model'}: {why}" for name, why in self.left.items()]
        return "\n".join([*found, *left])


def fuse(model: torch.nn.Module) -> Report:
    """Replace the forward of each leaf module of a model that a kernel can compute.

    A leaf is a module without modules of its own. Its forward is traced as a function of rows that
    takes its parameters and buffers as arguments, so they stay where they are: `state_dict`,
    optimizers, hooks, `deepcopy` and `train()` go on as before. It is replaced in this instance
    alone, and only if it agrees with the module in float32 and in its own dtype, forward and
    backward. The comparison takes place on the CPU, and draws from no global generator.

        report = htile.nn.fuse(model)
        print(report)                     # what is fused, and why the others are left
        report.undo()

    A fused module calls its own forward for what it was not compared in: other dtypes and ranks,
    arguments by name, attributes that have changed since, and where `htile.nn.guards.fits` says so
    (`torch.compile`, `torch.func`, autocast in 16 bits). The kernel computes in float32, and so
    rounds less often than a forward in 16 bits does.

    Left as they are: what has no kernel of rows, such as Linear and Embedding, whose weights are
    matrices; what adds up over the batch or draws, such as BatchNorm and Dropout; what stores
    something; modules with hooks, which may change what they compute with; modules in float64. Do
    not pass a fused model to `torch.nn.DataParallel`: its replicas would share one module's
    parameters.

    Raises ArgumentError for what is no module.
    """
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(
            f"htile.nn.fuse: expected a torch.nn.Module, got {an(type(model).__name__)}; of a "
            "function itself, write @htile.rowwise"
        )
    report, known = Report({}, {}, []), {}
    for name, module in model.named_modules():
        if next(module.children(), None) is not None:
            continue
        found = _refusal(module) or _fused(module, known)
        if isinstance(found, str):
            report.left[name] = found + _instead_of(type(module))
            continue
        kind, dtypes = type(module).__name__, dict.fromkeys(each[0] for each in found.dtypes)
        report.fused[name] = f"{kind}, for rows in {', '.join(map(dtype_name, dtypes))}"
        replacement = types.MethodType(found.function, module)
        vars(module)["forward"] = replacement  # as a method it is that of the copy in a deepcopy
        report._replaced.append((module, replacement))
    return report


@dataclass(frozen=True)
class Fused:
    """A forward that is a kernel.

    dtypes: for which dtypes of the inputs and tensors it is.
    """

    dtypes: tuple[tuple[torch.dtype, ...], ...]
    function: types.FunctionType


def _refusal(module: torch.nn.Module) -> str | None:
    """Why a module is left without a trial."""
    kind = type(module)
    if "forward" in vars(module):
        return "its forward has been replaced already"
    if not isinstance(kind.forward, types.FunctionType):
        return "its forward is no plain Python function"
    if kind.forward is torch.nn.Module.forward:
        return "it has no forward"
    if kind.__module__.startswith(f"{__package__}."):
        return "it is a module of htile.nn, which has its kernel"
    if any(getattr(module, name, None) for name in HOOKS):
        return "it has hooks, which may change what it computes with"
    for place in PLACES:
        for name, tensor in vars(module)[place].items():
            if tensor is None:
                continue
            if type(tensor) not in PLAIN:
                return f"its {name} is {an(type(tensor).__name__)}"
            if tensor.ndim > 1:
                return (
                    f"its {name} has the shape {tuple(tensor.shape)}; rows share vectors, and no "
                    "matrices"
                )
    return None


def _instead_of(kind: type[torch.nn.Module]) -> str:
    """What to use in place of a module of torch that is left, if `htile.nn` has a class for it."""
    own = [each for each in kind.__subclasses__() if each.__module__ == f"{__package__}.modules"]
    same = [each.__name__ for each in own if each.__name__ == kind.__name__]
    return f"; use htile.nn.{same[0]}" if same else ""


def _fused(module: torch.nn.Module, known: dict) -> Fused | str:
    """The kernel of a module, or why there is none. Modules that compute the same share one."""
    held = vars(module)
    shapes = {(p, n): tuple(t.shape) for p in PLACES for n, t in held[p].items() if t is not None}
    lengths = {shape[0] for shape in shapes.values() if shape and shape[0] > 1}
    if len(lengths) > 1:
        return f"its parameters have several lengths: {', '.join(map(str, sorted(lengths)))}"
    length = lengths.pop() if lengths else None
    try:
        forward, graph = forward_of(module, lambda f: _traced(f, [*shapes], held, length or LENGTH))
    except HTileError as error:
        return error.message
    except USER_ERRORS as error:
        return f"its forward refuses a row: {first_line(error)}"
    if {node.op for node in graph.nodes} <= _COMPUTES_NOTHING:
        return "it computes nothing"
    dtypes = tuple(held[place][name].dtype for place, name in shapes)
    attributes = tuple((name, freeze(value)) for name, value in forward.attributes)
    key = forward.kind, attributes, tuple(shapes.items()), forward.absent, dtypes
    if key not in known:
        known[key] = _tried(forward, tuple(shapes.values()), dtypes, length)
    return known[key]


def _traced(function: types.FunctionType, places: list, held: dict, length: int) -> Graph:
    signature = Signature(function)
    inputs = len(signature.names) - len(places)
    if not inputs:
        raise TraceError("its forward has no argument that has to be given")
    rows = [torch.empty(2, 3, length, device="meta") for _ in range(inputs)]
    tensors = [torch.empty_like(held[place][name], device="meta") for place, name in places]
    call = classify(signature, (*rows, *tensors))
    return trace(function, call.specs, call.n)


def _tried(
    forward: Forward, shapes: tuple, dtypes: tuple[torch.dtype, ...], length: int | None
) -> Fused | str:
    row = forward.rowwise()
    found = agreeing_dtypes(forward, row, shapes, dtypes, length or LENGTH)
    if isinstance(found, str):
        return found
    return Fused(found, _replacement(forward, row, shapes, frozenset(found), length))


def _replacement(
    forward: Forward, row: Callable, shapes: tuple, dtypes: frozenset, length: int | None
) -> types.FunctionType:
    """The forward of a fused module.

    length: that of rows, if the module's parameters determine it.
    """
    count, own = len(forward.inputs), forward.kind.forward

    def takes(inputs: tuple, tensors: list) -> bool:
        if len(inputs) != count or not fits(*inputs, *tensors):
            return False
        shape = getattr(inputs[0], "shape", ())
        if len(shape) < 2 or (length is not None and shape[-1] != length):
            return False
        if any(each is None or each.shape != shape for each in inputs):
            return False
        if any(t is None or t.shape != s for t, s in zip(tensors, shapes, strict=True)):
            return False
        return (*(each.dtype for each in inputs), *(each.dtype for each in tensors)) in dtypes

    def forward_of_rows(self, *args, **kwargs):
        if not kwargs and not is_compiling():
            tensors = forward.values_of(self)
            if forward.holds_for(self):
                found = row._taken(*args, *tensors)  # of tensors that are as some that it took
                if found is not None:
                    return found
                if takes(args, tensors):
                    return row(*args, *tensors)
        return own(self, *args, **kwargs)

    # Pickled, a method is its name and its object: a pickled model is one that is not fused.
    forward_of_rows.__name__ = "forward"
    return forward_of_rows

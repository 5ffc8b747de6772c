"""`out=`: results that are written to the caller's tensors, and what is refused there."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, DtypeError, ShapeError
from ..frontend.graph import Graph, Output, Role, View
from ..frontend.ops import Op
from ..frontend.roles import Signature
from ..lower.work import is_late
from .launch import Request
from .memory import are_same, overlaps_itself, share_memory
from .operands import refuse_tangent, splits_bundles


def in_order(out: object, given: pytree.TreeSpec, structure: pytree.TreeSpec) -> object:
    """`out`, which has the structure `given`, with the keys of its dicts in another's order.

    It is `out` itself where no such order makes it a `structure`.
    """
    if given == structure:
        return out
    try:
        leaves = structure.flatten_up_to(out)
    except ValueError:
        return out  # `check_out` says what is wrong
    ordered = pytree.tree_unflatten(leaves, structure)
    return ordered if pytree.tree_structure(ordered) == structure else out


def check_out(request: Request, out: object, device: torch.device) -> None:
    """Raise if structure, type, shape, dtype, device or layout of `out` is wrong.

    Raise as well if a result is an argument that all rows share, because other rows read it.
    """
    function, graph = request.signature.name, request.specialization.traced
    placed = request.specialization.graph
    leaves, structure = pytree.tree_flatten(out)
    if structure != graph.structure:
        names = ", ".join(result.name for result in graph.outputs)
        raise ArgumentError(
            f"{function}: out= must have the structure that the function returns "
            f"({len(graph.outputs)} results: {names}), got {_kind(out)}"
        )
    shapes = request.specialization.shapes(request.call.lead, request.call.length)
    for leaf, result, (shape, dtype) in zip(leaves, graph.outputs, shapes, strict=True):
        what = f"{function}: out= for {result.name}"
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise ArgumentError(f"{what} must be a tensor, got {type(leaf).__name__}")
        if leaf.layout is not torch.strided:
            raise ArgumentError(f"{what} must be a dense tensor, got layout {leaf.layout}")
        if tuple(leaf.shape) != shape:
            raise ShapeError(f"{what} must have shape {shape}, got {tuple(leaf.shape)}")
        if leaf.dtype != dtype:
            raise _of_another_dtype(f"{what} must be {dtype}, got {leaf.dtype}", graph, result)
        if leaf.device != device:
            raise ArgumentError(f"{what} must be on {device}, got {leaf.device}")
        if leaf.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{what} requires grad, and writing to it would not be recorded; pass "
                "a tensor that does not, or call under torch.no_grad()"
            )
        refuse_tangent(function, "out", leaf)
        if leaf.is_neg():
            raise ArgumentError(f"{what} is a negated view; pass out.resolve_neg()")
        if result.is_row and leaf.shape[-1] > 1 and leaf.stride(-1) != 1:
            raise ArgumentError(
                f"{what}: the elements of a row must be neighbours in memory, got a last stride of "
                f"{leaf.stride(-1)}"
            )
        if splits_bundles([o for o in placed.outputs if o.name == result.name], leaf):
            raise ArgumentError(
                f"{what}: its elements are written in pairs, fours or eights, which must be "
                "aligned as a whole; pass a tensor that begins at a multiple of 16 bytes, with "
                "such strides"
            )
        if overlaps_itself(leaf):
            raise ArgumentError(
                f"{what} has more than one element at the same address (strides {leaf.stride()}), "
                "as an expanded tensor has; pass a tensor of its own memory"
            )
    for k, name in request.aliases:
        if request.specs[name].role not in (Role.ROW, Role.PER_ROW):
            raise _overlap(function, name)
        if _crosses(placed, name, graph.outputs[k]):
            raise ArgumentError(
                f"{function}: out= for {graph.outputs[k].name} is {name}, and elements of it would "
                "be overwritten before they are read; pass a tensor of its own"
            )


def find_aliases(signature: Signature, values: tuple, outs: tuple) -> tuple[tuple[int, str], ...]:
    """Which of `outs` is exactly which argument: the same address, shape, strides and dtype.

    Raises ArgumentError for tensors that share memory in any other way. What in `outs` is no
    tensor is left to `check_out`.
    """
    if not all(isinstance(out, torch.Tensor) for out in outs):
        return ()
    aliases = []
    for k, out in enumerate(outs):
        if any(share_memory(out, other) for other in outs[:k]):
            raise ArgumentError(f"{signature.name}: two tensors of out= share memory")
        for name, value in zip(signature.names, values, strict=True):
            if isinstance(value, torch.Tensor) and share_memory(out, value):
                if not are_same(out, value):
                    raise _overlap(signature.name, name)
                aliases.append((k, name))
    return tuple(aliases)


def _crosses(placed: Graph, name: str, result: Output) -> bool:
    """Whether a thread may write elements of the argument before others have read them.

    It may in three cases: a piece of the result lies where a piece of the argument has other
    columns, each column reads an element at an index of its own, or an element is read at an index
    that comes from a reduction. Other elements at indices are read before anything is written
    (`htile.lower.steps.Fence`).
    """
    leaves = {i.id: i for i in placed.inputs if i.name == name}
    if any(node.op is Op.GATHER and node.inputs[0] in leaves for node in placed):
        return True
    takes = [node for node in placed if node.op is Op.TAKE and node.inputs[0] in leaves]
    if any(is_late(placed, take) for take in takes):
        return True
    whole = View((placed.n,), (0,), (1,))
    before = (Role.TAKEN, Role.PER_ROW)
    read = [i.view or whole for i in leaves.values() if i.role not in before]
    written = [o.view or whole for o in placed.outputs if o.name == result.name]
    return any(a.shape == b.shape and a.meets(b, placed.n) for a in read for b in written)


def _of_another_dtype(message: str, graph: Graph, result: Output) -> DtypeError:
    """The error, with the line of the cast in the function that decided the dtype, if any."""
    todo, seen = [result.id], set()
    while todo:
        node = graph[todo.pop(0)]  # the nearest one first
        if node.op is Op.CAST and node.arg is result.dtype:
            declared = f"a conversion to {result.dtype} inside the function"
            remedy = "convert the result back, y.to(x.dtype); for a mask write torch.where(m, a, b)"
            return DtypeError(f"{message}: {declared} makes it so; {remedy}", node.loc)
        todo += [i for i in node.inputs if i not in seen]
        seen |= set(node.inputs)
    return DtypeError(message)


def _overlap(function: str, name: str) -> ArgumentError:
    return ArgumentError(
        f"{function}: out= shares memory with {name}, but is not exactly an argument that differs "
        "from row to row (the same address, shape and strides); pass a tensor of its own"
    )


def _kind(out: object) -> str:
    if isinstance(out, dict):
        return f"a dict of {', '.join(map(repr, out))}"
    return f"a {type(out).__name__}" + (f" of {len(out)}" if isinstance(out, tuple | list) else "")

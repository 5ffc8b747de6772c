"""`out=`: results written into the caller's tensors, and the ways in which that can go wrong."""

from __future__ import annotations

import torch
from torch.utils import _pytree as pytree

from ..errors import ArgumentError, DtypeError, ShapeError
from ..frontend.graph import Graph, Role
from ..frontend.roles import Call, Signature


def in_order(out: object, given: pytree.TreeSpec, structure: pytree.TreeSpec) -> object:
    """`out`, which has the structure `given`, with the keys of its dicts in another's order.

    `out` itself where that makes it no `structure`.
    """
    if given == structure:
        return out
    try:
        leaves = structure.flatten_up_to(out)
    except ValueError:
        return out  # `check_out` says what is wrong
    ordered = pytree.tree_unflatten(leaves, structure)
    return ordered if pytree.tree_structure(ordered) == structure else out


def check_out(function: str, graph: Graph, call: Call, out: object, device: torch.device) -> None:
    """Structure, type, shape, dtype, device and layout of `out`; raises if any is wrong."""
    leaves, structure = pytree.tree_flatten(out)
    if structure != graph.structure:
        names = ", ".join(o.name for o in graph.outputs)
        raise ArgumentError(
            f"{function}: out= must have the structure that the function returns "
            f"({len(graph.outputs)} results: {names}), got {_kinds(out)}"
        )
    for leaf, output in zip(leaves, graph.outputs, strict=True):
        what = f"{function}: out= for {output.name}"
        if type(leaf) not in (torch.Tensor, torch.nn.Parameter):
            raise ArgumentError(f"{what} must be a tensor, got {type(leaf).__name__}")
        if leaf.layout is not torch.strided:
            raise ArgumentError(f"{what} must be a dense tensor, got layout {leaf.layout}")
        shape = (*call.lead, *output.inner)
        if tuple(leaf.shape) != shape:
            raise ShapeError(f"{what} must have shape {shape}, got {tuple(leaf.shape)}")
        if leaf.dtype != output.dtype:
            raise DtypeError(f"{what} must be {output.dtype}, got {leaf.dtype}")
        if leaf.device != device:
            raise ArgumentError(f"{what} must be on {device}, got {leaf.device}")
        if leaf.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(
                f"{what} requires grad, and writing to it would not be recorded; pass "
                "a tensor that does not, or call under torch.no_grad()"
            )
        if leaf.is_neg():
            raise ArgumentError(f"{what} is a negated view; pass out.resolve_neg()")
        if output.is_row and leaf.shape[-1] > 1 and leaf.stride(-1) != 1:
            raise ArgumentError(
                f"{what}: the elements of a row must be neighbours in memory, got a last stride of "
                f"{leaf.stride(-1)}"
            )
        if overlaps_itself(leaf):
            raise ArgumentError(
                f"{what} has more than one element at the same address (strides {leaf.stride()}), "
                "as an expanded tensor has; pass a tensor of its own memory"
            )


def find_aliases(signature: Signature, values: tuple, outs: tuple) -> tuple[tuple[int, str], ...]:
    """Which of `outs` is exactly which argument: the same address, shape, strides and dtype.

    Raises ArgumentError for memory that is written and used otherwise in any other way.
    """
    aliases = []
    for k, out in enumerate(outs):
        for other in outs[:k]:
            if share_memory(out, other):
                raise ArgumentError(f"{signature.name}: two tensors of out= share memory")
        for name, value in zip(signature.names, values, strict=True):
            if not isinstance(value, torch.Tensor) or not share_memory(out, value):
                continue
            if _layout(out) != _layout(value):
                raise ArgumentError(_shared_memory(signature.name, name))
            aliases.append((k, name))
    return tuple(aliases)


def check_aliases(function: str, call: Call, aliases: tuple[tuple[int, str], ...]) -> None:
    """Refuse what is read by other threads than the one that writes it: all but row arguments."""
    rows = {spec.name for spec in call.specs if spec.role is Role.ROW}
    for _, name in aliases:
        if name not in rows:
            raise ArgumentError(_shared_memory(function, name))


def _shared_memory(function: str, name: str) -> str:
    return (
        f"{function}: out= shares memory with {name}, but is not exactly a row argument (the same "
        "address, shape and strides); pass a tensor of its own"
    )


def copy_into(out: object, result: object) -> object:
    """Write results, which share no memory with `out`, into it; returns `out`."""
    for target, value in zip(pytree.tree_leaves(out), pytree.tree_leaves(result), strict=True):
        target.detach().copy_(value)
    return out


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether two elements of a tensor may have one address."""
    reach = 1
    dims = [(abs(st), size) for st, size in zip(tensor.stride(), tensor.shape, strict=True)]
    for stride, size in sorted(d for d in dims if d[1] > 1):
        if stride < reach:
            return True
        reach = stride * (size - 1) + reach
    return False


def share_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors have a byte in common.

    Exact for ranges, and for column slices of one matrix; otherwise it may say yes too often.
    """
    if not (_has_memory(a) and _has_memory(b)):
        return False  # refused elsewhere
    if a.numel() == 0 or b.numel() == 0 or a.device != b.device or a.device.type == "meta":
        return False
    (a0, a1), (b0, b1) = _range(a), _range(b)
    if a1 <= b0 or b1 <= a0:
        return False
    if a.ndim and a.ndim == b.ndim and a.shape[:-1] == b.shape[:-1] and _steps(a) == _steps(b):
        steps = [abs(s) for s, n in zip(_steps(a), a.shape[:-1], strict=True) if n > 1]
        widths = [t.shape[-1] * t.element_size() for t in (a, b)]
        least = min(steps, default=0)
        if least and _is_dense(a) and _is_dense(b) and all(s % least == 0 for s in steps):
            offset = (b.data_ptr() - a.data_ptr()) % least
            if widths[0] <= offset and offset + widths[1] <= least:
                return False
    return True


def _has_memory(tensor: torch.Tensor) -> bool:
    """Whether it has addresses: no sparse or nested tensor, none inside torch.func."""
    if tensor.layout is not torch.strided or tensor.is_nested:
        return False
    return torch._C._has_storage(tensor)


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """The first byte of a tensor, and the one after its last."""
    size = tensor.element_size()
    steps = [s * (n - 1) * size for s, n in zip(tensor.stride(), tensor.shape, strict=True)]
    start = tensor.data_ptr()
    return start + sum(s for s in steps if s < 0), start + sum(s for s in steps if s > 0) + size


def _layout(tensor: torch.Tensor) -> tuple:
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


def _steps(tensor: torch.Tensor) -> tuple[int, ...]:
    return tuple(s * tensor.element_size() for s in tensor.stride()[:-1])


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.shape[-1] == 1 or tensor.stride(-1) == 1


def _kinds(out: object) -> str:
    if isinstance(out, (tuple, list)):
        return f"a {type(out).__name__} of {len(out)}"
    if isinstance(out, dict):
        return f"a dict of {', '.join(map(repr, out))}"
    return f"a {type(out).__name__}"

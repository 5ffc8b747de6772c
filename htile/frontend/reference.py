"""Evaluates a Graph with torch, at the same rounding points as the kernel: HTile without a GPU.

Only the forms of a plan are not followed: what a kernel rounds once, by fma, torch rounds twice.

`EVALUATE` is the table from each operation to its torch function. A value is held as a tensor of
the rows' leading dimensions (each of full size or 1) and one last axis of the elements of its
`inner` shape, so that torch's broadcasting is that of the row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from .graph import Graph, Input, Role
from .ops import Op, broadcast_shapes

Rule = Callable[[tuple[Tensor, ...], object, torch.dtype], Tensor]


def _call(function: Callable[..., Tensor]) -> Rule:
    """The rule of an elementwise torch function."""
    return lambda values, arg, dtype: function(*values)


def _divide(function: Callable[..., Tensor]) -> Rule:
    """Of integers: torch on the CPU raises for a zero divisor, a kernel gives any value."""

    def rule(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
        a, b = values
        if not b.is_floating_point() and b.device.type != "meta" and (b == 0).any():
            raise ArgumentError(f"{function.__name__} of integers by zero")
        return function(a, b)

    return rule


def _reduce(function: Callable[..., Tensor]) -> Rule:
    """The rule of a reduction over the last axis."""
    return lambda values, arg, dtype: function(*values, dim=-1, keepdim=True)


def _accumulate(function: Callable[..., Tensor]) -> Rule:
    """The same for sum and prod, which would widen int32 by themselves."""
    return lambda values, arg, dtype: function(*values, dim=-1, keepdim=True, dtype=values[0].dtype)


def _convert(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    """Round to the dtype `arg`, and go on in what it is computed in."""
    (value,) = values
    if not arg.is_floating_point:
        return value.to(arg)
    return (value if arg is torch.float32 else value.to(arg)).to(dtype)


def _reshape(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    return values[0]  # `inner` is flattened anyway


# The leaves INPUT and CONST have no rule: `evaluate` gives their values.
EVALUATE: dict[Op, Rule] = {
    Op.NEG: _call(torch.neg),
    Op.ABS: _call(torch.abs),
    Op.SIGN: _call(torch.sign),
    Op.SQRT: _call(torch.sqrt),
    Op.RSQRT: _call(torch.rsqrt),
    Op.EXP: _call(torch.exp),
    Op.EXP2: _call(torch.exp2),
    Op.EXPM1: _call(torch.expm1),
    Op.LOG: _call(torch.log),
    Op.LOG2: _call(torch.log2),
    Op.LOG10: _call(torch.log10),
    Op.LOG1P: _call(torch.log1p),
    Op.SIN: _call(torch.sin),
    Op.COS: _call(torch.cos),
    Op.TANH: _call(torch.tanh),
    Op.SIGMOID: _call(torch.sigmoid),
    Op.ERF: _call(torch.erf),
    Op.FLOOR: _call(torch.floor),
    Op.CEIL: _call(torch.ceil),
    Op.ROUND: _call(torch.round),
    Op.TRUNC: _call(torch.trunc),
    Op.NOT: _call(torch.logical_not),
    Op.CAST: _convert,
    Op.CONVERT: _convert,
    Op.RESHAPE: _reshape,
    Op.ADD: _call(torch.add),
    Op.SUB: _call(torch.sub),
    Op.MUL: _call(torch.mul),
    Op.DIV: _call(torch.div),
    Op.FLOORDIV: _divide(torch.floor_divide),
    Op.MOD: _divide(torch.remainder),
    Op.POW: _call(torch.pow),
    Op.MAXIMUM: _call(torch.maximum),
    Op.MINIMUM: _call(torch.minimum),
    Op.EQ: _call(torch.eq),
    Op.NE: _call(torch.ne),
    Op.LT: _call(torch.lt),
    Op.LE: _call(torch.le),
    Op.GT: _call(torch.gt),
    Op.GE: _call(torch.ge),
    Op.AND: _call(torch.logical_and),
    Op.OR: _call(torch.logical_or),
    Op.XOR: _call(torch.logical_xor),
    Op.WHERE: _call(torch.where),
    Op.SUM: _accumulate(torch.sum),
    Op.PROD: _accumulate(torch.prod),
    Op.MAX: _reduce(torch.amax),
    Op.MIN: _reduce(torch.amin),
    Op.ANY: _reduce(torch.any),
    Op.ALL: _reduce(torch.all),
}


def evaluate(
    graph: Graph,
    tensors: Mapping[str, Tensor | float],
    dtype: torch.dtype = torch.float32,
    lead: tuple[int, ...] | None = None,
) -> object:
    """What the graph's function returns for these arguments, in the function's own structure.

    dtype: what floating values are computed in. Where it is not float32, floating outputs have it
        too, so that a test sees them before their last rounding.
    lead: the rows' leading shape; from the graph's inputs by default, which is not enough where an
        argument that decides it is not used.

    Outputs are contiguous and share no memory with inputs or each other.
    """
    if lead is None:
        lead = _lead(graph, tensors)
    device = _device(tensors)
    inputs = {i.id: i for i in graph.inputs}
    last_use = {i: node.id for node in graph for i in node.inputs}
    outputs = {out.id for out in graph.outputs}
    values: dict[int, Tensor] = {}
    for node in graph:
        if node.op is Op.INPUT:
            leaf = inputs[node.id]
            value = _input(leaf, tensors[leaf.name], node.value.inner, len(lead), dtype, device)
        elif node.op is Op.CONST:
            of = dtype if node.value.dtype.is_floating_point else node.value.dtype
            value = _number(node.arg, len(lead), of, device)
        else:
            value = EVALUATE[node.op](tuple(values[i] for i in node.inputs), node.arg, dtype)
        values[node.id] = value.expand(*value.shape[:-1], math.prod(node.value.inner))
        for i in set(node.inputs) - outputs:
            if last_use[i] == node.id:
                del values[i]
    results = []
    for out in graph.outputs:
        inner = (graph.n,) if out.is_row else out.inner
        keep = dtype is not torch.float32 and out.dtype.is_floating_point
        result = torch.empty(
            (*lead, math.prod(inner)), dtype=dtype if keep else out.dtype, device=device
        )
        results.append(result.copy_(values[out.id]).reshape((*lead, *inner)))
    return pytree.tree_unflatten(results, graph.structure)


def _device(tensors: Mapping[str, Tensor | float]) -> torch.device | str:
    """That of the argument of most dimensions: a row."""
    found = [t for t in tensors.values() if isinstance(t, Tensor)]
    return max(found, key=Tensor.dim).device if found else "cpu"


def _number(number: float, dims: int, dtype: torch.dtype, device) -> Tensor:
    return torch.tensor(number, dtype=dtype, device=device).reshape((1,) * (dims + 1))


def _leading(leaf: Input, tensor: Tensor, inner: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(tensor.shape[: tensor.dim() - len(inner)])


def _lead(graph: Graph, tensors: Mapping[str, Tensor | float]) -> tuple[int, ...]:
    """The broadcast leading shape of the row and per-row inputs."""
    shapes = (
        _leading(i, tensors[i.name], graph[i.id].value.inner)
        for i in graph.inputs
        if i.role in (Role.ROW, Role.PER_ROW)
    )
    lead = broadcast_shapes(*shapes)
    assert lead is not None, "classify has refused shapes that do not broadcast"
    return lead


def _input(leaf, tensor, inner, dims: int, dtype: torch.dtype, device) -> Tensor:
    """An argument as `dims` leading dimensions and one last axis, in what it is computed in."""
    if not isinstance(tensor, Tensor):
        return _number(tensor, dims, dtype, device)
    lead = _leading(leaf, tensor, inner) if leaf.role in (Role.ROW, Role.PER_ROW) else ()
    value = tensor.reshape((*(1,) * (dims - len(lead)), *lead, math.prod(inner)))
    return value.to(dtype) if value.is_floating_point() else value

"""Evaluates a Graph with torch, at the same rounding points as the kernel: HTile without a GPU.

The forms of a plan are not followed: where a kernel rounds a product and a sum once, by fma, torch
rounds twice.

`EVALUATE` is the table from each operation to its torch function. A value is held as a tensor of
the rows' leading dimensions (each of full size or 1) and one last axis of the elements of its
`inner` shape, so that torch's broadcasting is that of the row.

A row's bits depend on the row alone. torch's own sums depend on the layout, on the number of rows
and on the number of threads, so rows are summed as halving trees here. Some elementwise functions
of torch have two kernels that differ in the last bit or in the sign of a zero, one for elements
that are neighbours in memory; here always the same one decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from .graph import Graph, Input, Role
from .ops import COMPARISONS, Op, broadcast_shapes

Rule = Callable[[tuple[Tensor, ...], object, torch.dtype], Tensor]


def _call(function: Callable[..., Tensor]) -> Rule:
    """The rule of an elementwise function of torch."""
    return lambda values, arg, dtype: function(*values)


def _apart(function: Callable[..., Tensor]) -> Rule:
    """The rule of one that torch computes with other bits where elements are neighbours.

    Every second element of a buffer has no neighbour.
    """

    def rule(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
        if not dtype.is_floating_point or not values[0].is_floating_point():
            return function(*values)
        values = torch.broadcast_tensors(*values)
        return function(*(torch.stack((v, v), -1)[..., 0] for v in values))

    return rule


def _divide(rule: Rule) -> Rule:
    """Of integers: torch on the CPU raises for a zero divisor, a kernel gives any value."""

    def checked(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
        b = values[1]
        if not b.is_floating_point() and b.device.type != "meta" and (b == 0).any():
            raise ArgumentError("a division (//, %) of integers by zero")
        return rule(values, arg, dtype)

    return checked


def _sigmoid(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    return torch.neg(*values).exp_().add_(1).reciprocal_()


def _pairwise(function: Callable[..., Tensor], join: Callable[..., Tensor]) -> Rule:
    """The rule of maximum and minimum. Of two zeros torch gives either, so their signs are joined:
    it gives the other one for swapped operands."""

    def rule(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
        a, b = values
        if not a.is_floating_point():
            return function(a, b)
        bits = torch.int32 if dtype is torch.float32 else torch.int64
        return join(function(a, b).view(bits), function(b, a).view(bits)).view(dtype)

    return rule


def _extreme(function: Callable[..., Tensor], is_negative: bool) -> Rule:
    """The rule of a row's maximum and minimum; a zero has the sign that `_pairwise` would give."""

    def rule(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
        (x,) = values
        result = function(x, dim=-1, keepdim=True)
        if x.is_floating_point() and x.device.type != "meta" and (result == 0).any():
            found = ((x == 0) & (x.signbit() == is_negative)).any(-1, keepdim=True)
            zero = torch.where(found == is_negative, -0.0, 0.0).to(dtype)
            result = torch.where(result == 0, zero, result)
        return result

    return rule


def _halved(x: Tensor, combine: Callable[..., Tensor]) -> Tensor:
    """The two halves of a row combined; an odd element stays."""
    half = x.shape[-1] // 2
    pairs = combine(x[..., :half], x[..., half : 2 * half])
    return torch.cat([pairs, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else pairs


def _sum(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    """A row's sum: of floating values in float64, for `evaluate` to round.

    Three times the row is halved as it is, then in float64. So sums of equal elements are exact:
    float32 holds 8 times any element.
    """
    (x,) = values
    if not x.is_floating_point():
        return torch.sum(x, -1, keepdim=True, dtype=x.dtype)
    whole = x.shape[-1] // 8 * 8
    eighth = x[..., :whole]
    for _ in range(3):
        eighth = _halved(eighth, torch.add)
    return _folded(torch.cat([eighth.double(), x[..., whole:].double()], -1), torch.add)


def _mean(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    """A row's mean in float64. Of equal elements it is that element, as torch's is."""
    (x,) = values
    return _sum(values, arg, dtype) / x.shape[-1]


def _product(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    (x,) = values
    if not x.is_floating_point():
        return torch.prod(x, -1, keepdim=True, dtype=x.dtype)
    return _folded(x.double(), torch.mul)


def _folded(x: Tensor, combine: Callable[..., Tensor]) -> Tensor:
    while x.shape[-1] > 1:
        x = _halved(x, combine)
    return x


def _quantified(function: Callable[..., Tensor]) -> Rule:
    return lambda values, arg, dtype: function(*values, dim=-1, keepdim=True)


def _convert(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    """Round to the dtype `arg`, and go on in what it is computed in."""
    (value,) = values
    if not arg.is_floating_point:
        return value.to(arg)
    return (value if arg is torch.float32 else value.to(arg)).to(dtype)


_NAMESAKES = (  # operations whose function of torch has their name
    Op.NEG, Op.ABS, Op.SIGN, Op.SQRT, Op.RSQRT, Op.EXP, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10,
    Op.LOG1P, Op.SIN, Op.COS, Op.TANH, Op.ERF, Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC, Op.ADD,
    Op.SUB, Op.MUL, Op.DIV, Op.WHERE, *COMPARISONS,
)  # fmt: skip
# The leaves INPUT and CONST have no rule: `evaluate` gives their values.
EVALUATE: dict[Op, Rule] = {
    **{op: _call(getattr(torch, op.value)) for op in _NAMESAKES},
    Op.EXP2: _apart(torch.exp2),
    Op.POW: _apart(torch.pow),
    Op.SIGMOID: _sigmoid,
    Op.FLOORDIV: _divide(_call(torch.floor_divide)),
    Op.MOD: _divide(_apart(torch.remainder)),
    Op.MAXIMUM: _pairwise(torch.maximum, torch.bitwise_and),
    Op.MINIMUM: _pairwise(torch.minimum, torch.bitwise_or),
    Op.NOT: _call(torch.logical_not),
    Op.AND: _call(torch.logical_and),
    Op.OR: _call(torch.logical_or),
    Op.XOR: _call(torch.logical_xor),
    Op.CAST: _convert,
    Op.CONVERT: _convert,
    Op.RESHAPE: lambda values, arg, dtype: values[0],  # `inner` is flattened anyway
    Op.SUM: _sum,
    Op.MEAN: _mean,
    Op.PROD: _product,
    Op.MAX: _extreme(torch.amax, is_negative=False),
    Op.MIN: _extreme(torch.amin, is_negative=True),
    Op.ANY: _quantified(torch.any),
    Op.ALL: _quantified(torch.all),
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
        if value.is_floating_point() and value.dtype is not dtype:
            value = value.to(dtype)  # sums, means and products are rounded once
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

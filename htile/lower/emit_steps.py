"""Prints one step: what a thread does with its elements of a row, or of a chunk of it."""

from __future__ import annotations

import torch

from ..frontend.graph import Input
from ..frontend.ops import Op
from .expressions import CUTLASS_TYPES, EMIT
from .names import Names
from .reductions import Reduce
from .steps import Compute, Home, Load, Reload, Step, Store
from .text import INDENT, located, wrapped_call, wrapped_expression
from .work import made_by_exchange


def print_step(names: Names, step: Step, ctx: str = "ctx", indent: str = INDENT) -> list[str]:
    """The lines of a step; `ctx` is the name of the context whose elements it works on."""
    is_prefetched = ctx == "chunk" and names.plan.placement.prefetch > 0

    def from_global(i: Input, verb: str) -> str:
        return names.fragments[i] if is_prefetched else f"{ctx}.{verb}({names.tensors[i]})"

    match step:
        case Load(i):
            return assign(names, i, f"{from_global(i, 'load_column')}.load()", indent)
        case Reload(inputs, home):
            lines = []
            for i in inputs:
                read = from_global(i, "load_row")
                if home is Home.SHARED:
                    read = f"{ctx}.read_row({names.fragments[i]})"
                lines += assign(names, i, f"{read}.load()", indent)
            return lines
        case Compute(id, function, inputs):
            node = names.plan.graph[id]
            if node.op is Op.RESHAPE:
                return []
            expression = EMIT[node.op](node, tuple(map(names.operand, inputs)), function)
            return located(wrapped_expression(f"{indent}{names.values[id]} = ", expression), node)
        case Store(output):
            tensor, value = names.tensors[output], names.operand(output.id)
            if output.is_row:
                return [f"{indent}ElementwiseStorer({ctx}).store({tensor}, {value})"]
            return [f"{indent}{ctx}.store_row_value({tensor}, {value})"]
    raise AssertionError(f"{step} is not printed")


def reduce_held(names: Names, step: Reduce) -> list[str]:
    """The reductions of a stage of a row that is held."""
    graph = names.plan.graph
    made = made_by_exchange(graph, step)
    results = ", ".join(names.values[id] for id in made)
    first = graph[step.results[0]]
    if step.is_pair:
        verb = "online_logsumexp" if step.parts[0].finite else "online_softmax"
        x = names.operand(step.operands(graph)[0])
        return located([f"    {results} = ctx.{verb}({x}, slot={step.slot})"], first)
    values = ", ".join(reduced(names, id) for id in step.operands(graph))
    ops = ", ".join(part.kind.combine for part in step.parts)
    if len(made) > 1:
        values, ops = f"({values})", f"({ops})"
    args = [values, ops, f"slot={step.slot}"]
    return located(wrapped_call(f"    {results} = ctx.row_reduce(", args, ")"), first)


def reduced(names: Names, id: int) -> str:
    """An operand of a reduction; a number gets its type, which the reduction asks for."""
    node = names.plan.graph[id]
    text = names.operand(id)
    return f"{CUTLASS_TYPES[node.value.dtype]}({text})" if node.op is Op.CONST else text


def assign(names: Names, i: Input, expression: str, indent: str = INDENT) -> list[str]:
    """An input as the kernel computes with it."""
    start = f"{indent}{names.values[i.id]} = "
    if i.dtype is torch.bool:  # Int8 after a view
        return wrapped_call(f"{start}math.convert(", [expression, "Boolean"], ")")
    if i.dtype.is_floating_point and i.dtype is not torch.float32:
        return wrapped_call(f"{start}math.convert(", [expression, "Float32"], ")")
    return [start + expression]

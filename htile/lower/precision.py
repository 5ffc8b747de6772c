"""How exactly a value has to be computed, by what is seen of it in the results.

Where only 16-bit results come of a value, and each step to them keeps its relative error small, a
shorter device function is exact enough: those of `htile.compute.near`.
"""

from __future__ import annotations

import torch

from ..frontend.graph import Graph, Node
from ..frontend.ops import Op

# Operations that have such a device function.
NEAR_OPS = frozenset({
    Op.DIV, Op.SQRT, Op.EXP, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10, Op.LOG1P, Op.SIGMOID, Op.TANH,
})  # fmt: skip
NARROW = (torch.bfloat16, torch.float16)
# Operations whose result has about the relative error of its operands, whatever they are.
KEEPING = frozenset({
    Op.MUL, Op.DIV, Op.NEG, Op.ABS, Op.SQRT, Op.RSQRT, Op.WHERE, Op.RESHAPE, Op.MAXIMUM, Op.MINIMUM,
    Op.MAX, Op.MIN,
})  # fmt: skip
# Those of which it is so where nothing cancels: all terms have one sign.
ADDING = frozenset({Op.ADD, Op.SUB, Op.SUM, Op.MEAN})
NOT_NEGATIVE = frozenset({Op.EXP, Op.EXP2, Op.SIGMOID, Op.ABS, Op.SQRT, Op.RSQRT})
ODD = frozenset({
    Op.EXPM1, Op.LOG1P, Op.TANH, Op.ERF, Op.SIGN, Op.RESHAPE, Op.CAST, Op.CONVERT, Op.SUM, Op.MEAN,
    Op.MAX, Op.MIN, Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC,
})  # fmt: skip


def seen_in_16_bits(graph: Graph) -> frozenset[int]:
    """The nodes of which only 16-bit results come, by steps that keep relative errors small."""
    widest: dict[int, int] = {}
    for output in graph.outputs:
        widest[output.id] = max(widest.get(output.id, 0), output.dtype.itemsize)
    found: set[int] = set()
    signs = _signs(graph)
    for node in reversed(list(graph)):
        readers = [graph[id] for id in graph.users(node.id)]
        keeps = all(r.id in found and _keeps_error(graph, r, node, signs) for r in readers)
        if keeps and widest.get(node.id, 0) <= 2:
            found.add(node.id)
    return frozenset(found)


def _keeps_error(graph: Graph, reader: Node, node: Node, signs: dict[int, int]) -> bool:
    """Whether the reader's relative error is about that of the node."""
    if reader.op is Op.WHERE:
        return reader.inputs[0] != node.id
    if reader.op is Op.CAST:  # a rounding that something reads again would show the error
        return reader.value.stored in NARROW and not graph.users(reader.id)
    if reader.op is Op.LOG1P:
        return signs[node.id] == 1
    if reader.op in ADDING:
        return all(signs[i] != 0 for i in reader.inputs) and signs[reader.id] != 0
    return reader.op in KEEPING


def _signs(graph: Graph) -> dict[int, int]:
    """For each node: 1 if no element is negative, -1 if none is positive, 0 if that is unknown."""
    found: dict[int, int] = {}
    for node in graph:
        found[node.id] = _sign(node, [found[i] for i in node.inputs])
    return found


def _sign(node: Node, operands: list[int]) -> int:
    op = node.op
    if op is Op.CONST:
        return -1 if node.arg < 0 else 1
    if op in NOT_NEGATIVE:
        return 1
    if op in (Op.MUL, Op.DIV):
        a, b = operands
        return 1 if op is Op.MUL and len(set(node.inputs)) == 1 else a * b
    if op is Op.NEG:
        return -operands[0]
    if op in (Op.ADD, Op.SUB):
        a, b = operands
        return a if a == (b if op is Op.ADD else -b) else 0
    if op is Op.WHERE:
        a, b = operands[1:]
        return a if a == b else 0
    if op is Op.MAXIMUM:
        return 1 if 1 in operands else min(operands, key=abs)
    if op is Op.MINIMUM:
        return -1 if -1 in operands else min(operands, key=abs)
    return operands[0] if op in ODD else 0

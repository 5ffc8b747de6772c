"""How exactly a value has to be computed, by what is seen of it in the results.

If a value leads only to 16-bit results, and each step on the way keeps its relative error small,
then a shorter device function is exact enough: one of `htile.compute.near`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..frontend.dtypes import FLOAT8_BY_INSTRUCTION
from ..frontend.graph import Graph, Node
from ..frontend.ops import Op

# Operations that have such a device function.
NEAR_OPS = frozenset({
    Op.DIV, Op.EXP, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10, Op.LOG1P, Op.POW, Op.SIGMOID, Op.TANH,
})  # fmt: skip
# In float8_e8m0fnu a small error would show: a value that is barely 2 ** (k + 1) becomes 2 ** k.
NARROW = frozenset({torch.bfloat16, torch.float16}) | FLOAT8_BY_INSTRUCTION
# Operations whose result has about the relative error of its operands, whatever they are.
KEEPING = frozenset({
    Op.MUL, Op.DIV, Op.NEG, Op.ABS, Op.SQRT, Op.RSQRT, Op.WHERE, Op.RESHAPE, Op.MAXIMUM, Op.MINIMUM,
    Op.MAX, Op.MIN, Op.LDEXP,
})  # fmt: skip
# Operations with that error if nothing cancels, because all terms have one sign.
ADDING = frozenset({Op.ADD, Op.SUB, Op.SUM, Op.MEAN})
NOT_NEGATIVE = frozenset({
    Op.EXP, Op.EXP2, Op.SIGMOID, Op.ABS, Op.SQRT, Op.RSQRT, Op.UNIFORM, Op.EXPONENTIAL,
})  # fmt: skip
# Operations whose result has no negative element if their operand has none, and no positive one if
# their operand has none.
OF_OPERANDS_SIGN = frozenset({
    Op.EXPM1, Op.LOG1P, Op.TANH, Op.ERF, Op.SIGN, Op.RESHAPE, Op.CAST, Op.CONVERT, Op.SUM, Op.MEAN,
    Op.MAX, Op.MIN, Op.LDEXP, Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC,
})  # fmt: skip

# Operations of floats whose result has the sign that `_sign` gives it, also where operands are
# infinite or -0.0. A comparison of NaN, which they may give, does not hold.
SURE = frozenset({
    Op.CONST, Op.EXP, Op.EXP2, Op.SIGMOID, Op.ABS, Op.SQRT, Op.UNIFORM, Op.EXPONENTIAL, Op.EXPM1,
    Op.LOG1P, Op.TANH, Op.ERF, Op.RESHAPE, Op.CAST, Op.CONVERT, Op.SUM, Op.NEG, Op.ADD, Op.SUB,
    Op.MUL, Op.WHERE, Op.MAXIMUM, Op.MINIMUM,
})  # fmt: skip

SUMMED_BYTES = 4  # of a term of a sum over rows, whatever the sum is stored in


def seen_in_16_bits(graph: Graph) -> frozenset[int]:
    """The nodes that lead only to results of 16 bits or fewer, by steps that keep relative errors
    small."""
    widest: dict[int, int] = {}
    for output in graph.outputs:
        size = output.dtype.itemsize if output.over is None else SUMMED_BYTES
        widest[output.id] = max(widest.get(output.id, 0), size)
    found: set[int] = set()
    signs = signs_of(graph)
    for node in reversed(list(graph)):
        readers = [graph[id] for id in graph.users(node.id)]
        keeps = all(r.id in found and _keeps_error(graph, r, node, signs) for r in readers)
        is_bundle = node.op is Op.BUNDLE and node.arg in NARROW
        if keeps and (widest.get(node.id, 0) <= 2 or is_bundle):
            found.add(node.id)
    return frozenset(found)


def _keeps_error(graph: Graph, reader: Node, node: Node, signs: dict[int, Sign]) -> bool:
    """Whether the reader's relative error is about that of the node."""
    if reader.op is Op.WHERE:
        return reader.inputs[0] != node.id
    if reader.op is Op.CAST:  # a rounding that something reads again would show the error
        return reader.value.stored in NARROW and not graph.users(reader.id)
    if reader.op is Op.BUNDLE:
        return reader.arg in NARROW
    if reader.op is Op.LOG1P:
        return signs[node.id].not_negative
    if reader.op in ADDING:
        return signs[reader.id].is_known
    return reader.op in KEEPING


class Sign(NamedTuple):
    """Whether no element is negative, and whether none is positive. Zeros have both."""

    not_negative: bool
    not_positive: bool

    @property
    def is_known(self) -> bool:
        return self.not_negative or self.not_positive


UNKNOWN = Sign(False, False)


def signs_of(graph: Graph, surely: bool = False) -> dict[int, Sign]:
    """What is known of the sign of each node's elements.

    surely: of every number. Otherwise a quotient by -0.0 may have another sign, and so may integers
        that wrap, and the largest element of a row without elements.
    """
    found: dict[int, Sign] = {}
    for node in graph:
        is_known = not surely or _is_sure(graph, node)
        sign = _sign(node, [found[i] for i in node.inputs]) if is_known else UNKNOWN
        found[node.id] = sign
    return found


def _is_sure(graph: Graph, node: Node) -> bool:
    """Whether what `_sign` says of a node holds for every number, once it does for its operands."""
    if node.op is Op.DIV:
        divisor = graph[node.inputs[1]]
        return divisor.op is Op.CONST and divisor.arg != 0
    return node.value.dtype.is_floating_point and node.op in SURE


def _sign(node: Node, operands: list[Sign]) -> Sign:
    op = node.op
    if op is Op.CONST:
        return Sign(node.arg >= 0, node.arg <= 0)
    if op in NOT_NEGATIVE:
        return Sign(True, False)
    if op in OF_OPERANDS_SIGN:
        return operands[0]
    up, down = [s.not_negative for s in operands], [s.not_positive for s in operands]
    if op in (Op.NEG, Op.SUB):  # the last operand's sign is turned
        up[-1], down[-1] = down[-1], up[-1]
    if op in (Op.NEG, Op.ADD, Op.SUB):
        return Sign(all(up), all(down))
    if op is Op.MUL and len(set(node.inputs)) == 1:
        return Sign(True, False)
    if op is Op.POW:
        return Sign(operands[0].not_negative, False)
    if op in (Op.MUL, Op.DIV):
        return Sign(all(up) or all(down), (up[0] and down[1]) or (down[0] and up[1]))
    if op is Op.WHERE:
        return Sign(all(up[1:]), all(down[1:]))
    if op is Op.MAXIMUM:
        return Sign(any(up), all(down))
    if op is Op.MINIMUM:
        return Sign(all(up), any(down))
    return UNKNOWN

"""What operations cost: instructions of a thread for an element, as counted in SASS for sm_90a."""

from __future__ import annotations

from ..frontend.graph import Graph
from ..frontend.ops import Op
from .patterns import Function
from .reductions import MOMENTS, SOFTMAX, Part
from .steps import Compute

# An operation that is not here costs one instruction.
OF_OP = {
    Op.SQRT: 8, Op.RSQRT: 4, Op.EXP: 8, Op.EXP2: 4, Op.EXPM1: 18, Op.LOG: 16, Op.LOG2: 16,
    Op.LOG10: 18, Op.LOG1P: 24, Op.SIN: 24, Op.COS: 24, Op.TANH: 20, Op.SIGMOID: 10, Op.ERF: 20,
    Op.DIV: 19, Op.FLOORDIV: 98, Op.MOD: 67, Op.POW: 80,
}  # fmt: skip
OF_FUNCTION = {Function.BOUNDED: 2, Function.QUOTIENT: 2, Function.NUMBER: 5, Function.FAST: 2}
OF_SHARED_DIVISOR = 6  # a division by what the row has once
OF_CARRIED = {SOFTMAX: 6, MOMENTS: 6}  # any other reduction takes one instruction an element


def instructions(graph: Graph, computes: tuple[Compute, ...], parts: tuple[Part, ...]) -> int:
    """Instructions for each element of a sweep; what is computed once a row is not counted."""
    count = sum(OF_CARRIED.get(part.kind, 1) for part in parts)
    for step in computes:
        node = graph[step.id]
        if not node.value.spread:
            continue
        if step.function in OF_FUNCTION:
            count += OF_FUNCTION[step.function]
        elif node.op is Op.DIV and not graph[step.inputs[1]].value.spread:
            count += OF_SHARED_DIVISOR
        else:
            count += OF_OP.get(node.op, 1)
    return count

"""Positions that are converted to float32 are computed in float32.

The units that convert integers are those of exponentials: a conversion takes as long as 8
additions. A context has the number of each column in float32, by one addition (`float_cols`). So
a * column + b of whole numbers a and b takes two instructions. It is exact if no term is beyond
2 ** 24.
"""

from __future__ import annotations

import torch

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import Op, Value, Varies
from ..patterns import MOST_COLUMNS, is_float_of
from .rewrite import rewrite

EXACT_INTEGERS = 2**24  # up to which float32 has every whole number
FLOAT, INT32 = torch.float32, torch.int32


def columns_in_float(graph: Graph) -> Graph:
    """The graph with a * float(column) + b in place of float(a * column + b)."""

    def convert(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if not is_float_of(graph, node):
            return None
        number = graph[node.inputs[0]]
        terms = None if number.op is Op.INDEX else _terms(graph, number)
        if terms is None or not _are_exact(graph, *terms):
            return None
        times, plus = (
            new.add_const(float(term), Value((), Varies.SCALAR, FLOAT), node.loc) for term in terms
        )
        index = new.add_index(graph.n, INT32, node.loc)
        column = new.add(Op.CONVERT, (index,), FLOAT, node.loc)
        product = column if terms[0] == 1 else new.add(Op.MUL, (column, times), loc=node.loc)
        return product if terms[1] == 0 else new.add(Op.ADD, (product, plus), loc=node.loc)

    return rewrite(graph, convert)


def _terms(graph: Graph, node: Node) -> tuple[int, int] | None:
    """(a, b), if the node is a * column + b in int32, else None."""
    if node.op is Op.INDEX:
        return (1, 0) if node.value.dtype is INT32 else None
    if node.op is Op.CONST:
        return 0, node.arg
    if node.op not in (Op.NEG, Op.ADD, Op.SUB, Op.MUL) or node.value.dtype is not INT32:
        return None
    operands = [_terms(graph, operand) for operand in graph.operands(node)]
    if None in operands:
        return None
    (a, b), (times, plus) = operands[0], operands[-1]
    match node.op:
        case Op.NEG:
            return -a, -b
        case Op.ADD:
            return a + times, b + plus
        case Op.SUB:
            return a - times, b - plus
    if a and times:
        return None  # the square of a column
    return a * plus + times * b, b * plus


def _are_exact(graph: Graph, times: int, plus: int) -> bool:
    """Whether float32 has all columns exactly, their multiples and the sums."""
    largest = abs(times) * (graph.n - 1) + abs(plus)
    return times != 0 and graph.n <= MOST_COLUMNS and largest <= EXACT_INTEGERS

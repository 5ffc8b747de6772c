"""Several rows joined into one, for functions that compute each element by itself.

Where a row is no multiple of 16 bytes long, its vectors are short, or single elements. But where
nothing depends on a row or on a column, rows that follow each other in memory may as well be one
row: eight rows of 67 elements are one of 536, which is whole vectors of 8 elements. So a kernel for
such a function takes as many rows together as make vectors whole.

It does so for many rows only. Few rows wait for memory, and are faster with more threads. Shifted
rows (`vectors.is_shifted`) have long vectors anyway, so they stay as they are if they wait for
memory. If they wait for instructions, joining them saves those that shift.
"""

from __future__ import annotations

from dataclasses import replace
from math import gcd

from ..frontend.dynamic import ACCESS_BYTES
from ..frontend.graph import Graph, Role, verify
from ..frontend.ops import ELEMENTWISE, Op
from .reductions import VERY_LONG_N
from .vectors import vector_size
from .work import Work

# Shifted rows are joined where an element takes INSTRUCTIONS for each byte that moves, or more, and
# where the joined row has LONGEST elements or fewer. Chosen on five functions of bfloat16 at eight
# odd lengths from 611 to 70001 (one H200, 2026-11-30). Joined, the two of 6 and 11 instructions a
# byte take 0.77 to 0.93 of the time up to 15017 elements, and those of 2.3 to 4.3 take 0.88 to
# 1.03. Rows of 27011 take 0.93 to 1.03, and those of 70001 take 1.18 to 1.64.
INSTRUCTIONS, LONGEST = 4, 131072
OF_ALL = (Role.SCALAR, Role.DEVICE_SCALAR)  # what is the same in each row and column


def rows_together(graph: Graph) -> int:
    """How many rows of a placed graph are joined into one if there are many rows; 1 for none.

    It is the least number that makes whole vectors of the greatest length. It is 1 if the joined
    row would be very long.
    """
    if graph.multiple is not None or graph.n == 1 or not _is_of_elements(graph):
        return 1
    vec = vector_size(joined(graph, ACCESS_BYTES))  # of rows that any vector divides
    rows = vec // gcd(graph.n, vec)
    is_shifted = rows > 1 and vector_size(graph) >= vec
    if is_shifted and not _waits_for_instructions(graph):
        return 1
    return rows if rows * graph.n <= (LONGEST if is_shifted else VERY_LONG_N) else 1


def _waits_for_instructions(graph: Graph) -> bool:
    """Whether computing an element takes far longer than moving it."""
    rows = [i for i in graph.inputs if i.role is Role.ROW]
    moved = sum([each.dtype.itemsize for each in (*rows, *graph.outputs)])
    return Work(graph).held.costs[0] >= INSTRUCTIONS * moved


def joined(graph: Graph, rows: int) -> Graph:
    """The graph of rows that are so many times as long."""
    whole = (graph.n * rows,)
    nodes = tuple(
        replace(node, value=replace(node.value, inner=whole)) if node.value.spread else node
        for node in graph
    )
    outputs = tuple(replace(output, inner=whole) for output in graph.outputs)
    found = replace(graph, n=graph.n * rows, nodes=nodes, outputs=outputs)
    verify(found)
    return found


def _is_of_elements(graph: Graph) -> bool:
    """Whether each element of a result depends only on the elements at its place in the rows."""
    inputs = [i.role in OF_ALL or (i.role is Role.ROW and i.view is None) for i in graph.inputs]
    outputs = [o.is_row and o.over is None and o.view is None for o in graph.outputs]
    nodes = [node.op in ELEMENTWISE or node.op in (Op.INPUT, Op.CONST) for node in graph]
    ends = [i.end is None for i in graph.inputs]
    return all(inputs + outputs + nodes + ends) and any(i.role is Role.ROW for i in graph.inputs)

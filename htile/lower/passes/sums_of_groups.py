"""Sums over rows of what is a sum over groups of a row already: all groups are added up at the end.

The gradient of a weight that the heads of a row share is such a sum. Each group of the row would be
a piece of its own, so that the pieces can be added up. If the elements of the whole row are added
up over rows instead, the kernel that combines the parts adds up the groups too.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from ...frontend.graph import Builder, Graph, Node, Output
from ...frontend.ops import Op
from .rewrite import rewrite


def of_whole_rows(graph: Graph) -> Graph:
    """The graph whose sums over rows and groups are of whole rows (`Output.groups`).

    Such a result has the shape of the row until `with_own_shapes` gives it its own. The graph
    itself is returned if no sum is of groups.
    """
    groups = {k: _groups(graph, output) for k, output in enumerate(graph.outputs)}
    if graph.multiple is not None or not any(groups.values()):
        return graph

    def widened(new: Builder, found: list[Output]) -> list[Output]:
        return [_widened(new, output, groups[k]) for k, output in enumerate(found)]

    return rewrite(rewrite(graph, outputs=widened))  # The second one leaves out the sums.


def with_own_shapes(placed: Graph, graph: Graph) -> Graph | None:
    """A placed graph whose results have the shapes that they have in `graph`.

    None if a sum of groups is not of one whole row.
    """
    outputs, own = [], {output.name: output.inner for output in graph.outputs}
    for output in placed.outputs:
        if output.groups > 1:
            if output.view is not None or not output.is_row:
                return None
            output = replace(output, inner=own[output.name])
        outputs.append(output)
    return replace(placed, outputs=tuple(outputs))


def _groups(graph: Graph, output: Output) -> int:
    """How many groups a sum over rows adds up first; 0 if it is no sum of groups."""
    node = _summed(graph, output)
    if output.over is not Op.SUM or node.op is not Op.SUM:
        return 0
    value = graph[node.inputs[0]].value
    is_first = len(value.inner) == 2 and node.arg == -2
    return value.inner[0] if is_first and value.dtype is torch.float32 and value.spread else 0


def _summed(graph: Graph | Builder, output: Output) -> Node:
    """What is added up over rows, before a cast to the dtype that it has already."""
    node = graph[output.id]
    while node.op is Op.CAST and node.arg is graph[node.inputs[0]].value.dtype:
        node = graph[node.inputs[0]]
    return node


def _widened(new: Builder, output: Output, groups: int) -> Output:
    if not groups:
        return output
    node = _summed(new, output)
    (row,) = node.inputs
    n = prod(new[row].value.inner)
    while new[row].op is Op.RESHAPE:
        (row,) = new[row].inputs
    if new[row].value.inner != (n,):
        row = new.add(Op.RESHAPE, (row,), (n,), node.loc)
    return replace(output, id=row, inner=(n,), groups=groups)

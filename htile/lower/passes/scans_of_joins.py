"""A scan behind a start becomes the scan of what is joined to the start.

`torch.cat((torch.ones(1), x.cumprod(-1)))` is `torch.cat((torch.ones(1), x)).cumprod(-1)`, and so
are parts from the start on. Of the latter a kernel has whole rows: the column's number chooses what
is joined, and that is scanned. Gradients have far fewer nodes of the former, so that is what a
trace has (htile.frontend.scans). The latter has faster kernels, if nothing else reads the scan.
"""

from __future__ import annotations

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import Op
from ...frontend.scans import NOTHING
from .rewrite import rewrite


def scans_of_joins(graph: Graph) -> Graph:
    """The graph without scans behind a start of constants; itself if there are none."""
    if NOTHING.keys().isdisjoint([node.op for node in graph]):
        return graph
    found = []

    def rule(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is not Op.CAT or len(node.inputs) != 2 or len(node.value.inner) > 1:
            return None
        start, rest = (graph[i] for i in node.inputs)
        scan = graph[rest.inputs[0]] if _is_beginning(rest) else rest
        if start.op is not Op.CONST or start.arg != NOTHING.get(scan.op):
            return None
        of_scan = {node.id if scan is rest else rest.id}
        if {*graph.readers[scan.id]} != of_scan or {*graph.readers[rest.id]} != {node.id}:
            return None
        found.append(node)
        last = new[inputs[1]]
        (operand,) = new[last.inputs[0]].inputs if scan is not rest else last.inputs
        if scan is not rest:
            operand = new.add(Op.SLICE, (operand,), rest.arg, rest.loc)
        joined = new.add(Op.CAT, (inputs[0], operand), node.arg, node.loc)
        return new.add(scan.op, (joined,), scan.arg, scan.loc)

    changed = rewrite(graph, rule)
    return rewrite(changed) if found else graph  # without the scans that nobody reads now


def _is_beginning(node: Node) -> bool:
    """Whether it is the first elements of a row."""
    return node.op is Op.SLICE and node.arg[1:3] == (0, 1)

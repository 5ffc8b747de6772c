"""A traced graph before and after it is differentiated.

A derivative is taken of the nodes that there are, and it reads their results. So it gains more from
equal nodes that are one than the function itself does. `derivable` makes them one in four steps.
Parts of what is put together become parts of what they come from. Equal nodes are merged. A
log_softmax takes the exponentials of a softmax (`one_total`). The logarithm of a share becomes the
exponent less the logarithm of the total, which is derived without a division.

A backward kernel reads the maximum and the total of a softmax, and does not compute them. So it can
not see how large its exponentials are. `with_known` marks these.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from ...frontend.algebra import meets_its_own
from ...frontend.graph import Builder, Graph, Node, Output
from ...frontend.known import Known
from ...frontend.ops import REDUCTIONS, Op
from ...frontend.slopes import Slope
from ..patterns import is_bounded_exponential, is_exponential, is_part_of_sum
from .one_total import share_totals
from .parts_of_joins import keys_apart, parts_apart
from .rewrite import rewrite
from .shares import logarithm_of_share
from .simplify import merge_common_subexpressions


def derivable(graph: Graph) -> Graph:
    """The graph with fewer nodes, to differentiate it. It has the same arguments and results.

    A graph that calls functions whose backward pass is the user's own is returned itself.
    """
    ops = {node.op for node in graph}
    if Op.CUSTOM in ops:
        return graph
    # Passes keep what is returned. So all arguments are, also those that nothing reads.
    arguments = [
        Output(i.name, i.id, i.dtype, graph[i.id].value.inner, False) for i in graph.inputs
    ]
    found = replace(graph, outputs=(*graph.outputs, *arguments))
    found = merge_common_subexpressions(parts_apart(keys_apart(found)))
    if ops >= {Op.EXP, Op.LOG, Op.SUM}:
        found = merge_common_subexpressions(_with_differences(found))
        found = merge_common_subexpressions(share_totals(found, Slope.LAST))
    return replace(found, outputs=found.outputs[: len(graph.outputs)], least=graph.least)


def _with_differences(graph: Graph) -> Graph:
    """The graph with the logarithms of shares as differences, if all of them may be.

    Lowering decides by the other logarithms whether one may be. With some of them gone it would
    decide otherwise, and a forward pass in training would have other bits than an inference.

    Where the exponential is 0 the difference stands for its limit, and its slope counts too.
    """
    refused = []

    def differ(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is not Op.LOG or not is_part_of_sum(graph, graph[node.inputs[0]]):
            return None
        found = logarithm_of_share(graph, node, new, inputs)
        if found is None:
            refused.append(node)
            return None
        choice, logarithm = new[found].inputs
        slope = new.add(Op.WHERE, new[choice].inputs, Slope.LAST, node.loc)
        return new.add(Op.SUB, (slope, logarithm), loc=node.loc)

    found = rewrite(graph, differ)
    return graph if refused else found


def with_known(joint: Graph) -> Graph:
    """The joint graph, with the shares of softmaxes and their exponentials marked as such."""

    def known(node: Node) -> Node:
        is_marked = is_bounded_exponential(joint, node) or is_part_of_sum(joint, node)
        is_marked = is_marked and all([_meets_its_own(joint, i) for i in _subtrahends(joint, node)])
        return replace(node, arg=Known.SHARE) if is_marked else node

    if Op.EXP not in {node.op for node in joint}:
        return joint
    return replace(joint, nodes=tuple([known(node) for node in joint]))


def _subtrahends(graph: Graph, node: Node) -> list[int]:
    """The nodes in whose shape a share or its exponential meets what is reduced."""
    found = [] if node.op is Op.EXP else [node.inputs[1]]
    exponential = node if node.op is Op.EXP else graph[node.inputs[0]]
    exponent = graph[exponential.inputs[0]]
    found.append(exponent.inputs[1])
    if not is_exponential(graph, exponential):  # a log_softmax, of a difference
        found.append(graph[exponent.inputs[0]].inputs[1])
    return found


def _meets_its_own(graph: Graph, id: int) -> bool:
    """Whether a value of each row, or of each group, meets the elements that it belongs to."""
    inner = graph[id].value.inner
    reduced = [node for node in _behind(graph, id) if node.op in REDUCTIONS]
    return all([meets_its_own(node, inner) for node in reduced]) if reduced else prod(inner) == 1


def _behind(graph: Graph, id: int) -> list[Node]:
    """The nodes that lead to a value, up to reductions."""
    found, todo = [], [id]
    while todo:
        node = graph[todo.pop()]
        found.append(node)
        todo += () if node.op in REDUCTIONS else node.inputs
    return found

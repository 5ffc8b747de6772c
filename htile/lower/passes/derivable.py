"""A traced graph before and after it is differentiated.

Before that it gets one node for what it computes more than once.

A derivative is taken of the nodes that there are. It reads all their results, so it gains more
from common ones than the function itself. Three steps find them: equal nodes are merged, a
log_softmax takes the exponentials of a softmax (`one_total`), and the logarithm of a share is the
exponent less the logarithm of the total, which needs no division to be derived.

Afterwards exponentials and shares are marked whose range the backward kernel does not see.
"""

from __future__ import annotations

from dataclasses import replace

from ...frontend.graph import Builder, Graph, Node
from ...frontend.known import Known
from ...frontend.ops import Op
from ...frontend.slopes import Slope
from ..patterns import is_bounded_exponential, is_part_of_sum
from .one_total import share_totals
from .rewrite import rewrite
from .shares import logarithm_of_share
from .simplify import merge_common_subexpressions


def derivable(graph: Graph) -> Graph:
    """The graph with fewer nodes, which gives the same results, to differentiate it.

    A kernel of it has the numerics of one of the graph itself. The arguments stay, in their order.
    A graph whose arguments are not all read, or that has calls whose backward pass is the user's
    own, is returned itself.
    """
    ops = {node.op for node in graph}
    if Op.CUSTOM in ops:
        return graph
    found = merge_common_subexpressions(graph)
    if ops >= {Op.EXP, Op.LOG, Op.SUM}:
        found = merge_common_subexpressions(rewrite(found, _logarithms(found)))
        found = merge_common_subexpressions(share_totals(found, Slope.LAST))
    is_whole = [i.name for i in found.inputs] == [i.name for i in graph.inputs]
    return replace(found, least=graph.least) if is_whole else graph


def _logarithms(graph: Graph):
    """The rule that takes the logarithm of a share as a difference, of a graph that is merged.

    Where the exponential is 0 the difference stands for its limit, and its slope counts too.
    """

    def differ(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is not Op.LOG or not is_part_of_sum(graph, graph[node.inputs[0]]):
            return None
        found = logarithm_of_share(graph, node, new, inputs)
        if found is None:
            return None
        choice, logarithm = new[found].inputs
        slope = new.add(Op.WHERE, new[choice].inputs, Slope.LAST, node.loc)
        return new.add(Op.SUB, (slope, logarithm), loc=node.loc)

    return differ


def with_known(joint: Graph) -> Graph:
    """The joint graph, with the shares of softmaxes and their exponentials marked as such."""

    def known(node: Node) -> Node:
        is_share = is_bounded_exponential(joint, node) or is_part_of_sum(joint, node)
        return replace(node, arg=Known.SHARE) if is_share else node

    if Op.EXP not in {node.op for node in joint}:
        return joint
    return replace(joint, nodes=tuple([known(node) for node in joint]))

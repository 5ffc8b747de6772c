"""What a part of a graph is by its shape: an operand whose range makes a shorter form as exact, a
product that is an fma with what is added to it, a sum that can be gathered before what it is
relative to is known, a row that needs no select."""

from __future__ import annotations

from math import inf

import torch

from ..frontend.graph import Graph, Node, Role
from ..frontend.ops import Op
from .plan import Ahead, ColumnLoop, Form, Online

FAST_OPS = frozenset({Op.TANH, Op.LOG, Op.LOG2, Op.LOG10, Op.SIN, Op.COS})


def choose_form(
    graph: Graph, node: Node, fastmath: bool, again: bool = False
) -> tuple[Form, tuple[int, ...]]:
    """The device function for a node, a short one where the operands' range allows it, and what it
    takes: the node's inputs, or in place of some what they are made of.

    again: exponentials whose sum is known are computed again.
    """
    share = _share_of_exponentials(graph, node) if again else None
    if share is not None:
        return Form.SHARE, share
    product = _added_product(graph, node)
    if product is not None:
        form = Form.FMS if product == node.inputs[0] else Form.FNMA
        rest = (i for i in node.inputs if i != product)
        return Form.FMA if node.op is Op.ADD else form, (*graph[product].inputs, *rest)
    return _form(graph, node, fastmath), node.inputs


def _form(graph: Graph, node: Node, fastmath: bool) -> Form:
    """Of the node's own inputs."""
    if node.op is Op.EXP and _is_below_zero(graph, graph[node.inputs[0]]):
        return Form.BOUNDED
    if node.op is Op.DIV and _is_share(graph, *graph.operands(node)):
        return Form.BOUNDED
    if node.op is Op.DIV and _is_plain_number(graph[node.inputs[1]]):
        return Form.NUMBER
    if _is_read_once(graph, node) and graph[graph.readers[node.id][0]].op is Op.SUM:
        return Form.FACTORS
    return Form.FAST if fastmath and node.op in FAST_OPS else Form.EXACT


def _share_of_exponentials(graph: Graph, node: Node) -> tuple[int, int] | None:
    """What the exponential is of and the sum, if the node is e / sum(e), e = exp(x - max(x)), and
    is returned in 16 bits and else not read."""
    if node.op is not Op.DIV or not _is_share(graph, *graph.operands(node)):
        return None
    returned = [output for output in graph.outputs if output.id == node.id]
    if len(returned) < len(graph.readers[node.id]) or any(o.dtype.itemsize > 2 for o in returned):
        return None
    exponential, total = graph.operands(node)
    return exponential.inputs[0], total.id


def _added_product(graph: Graph, node: Node) -> int | None:
    """The operand of an addition or subtraction that is a product nobody else reads: an fma.

    One that others read is rounded, for all of them: exp(x * w - max(x * w)) is 1 at the maximum.
    So is one that another product is added to: x * c - max(x) * c is 0 there, x * x - y * y where
    x is y.
    """
    if node.op not in (Op.ADD, Op.SUB):
        return None
    products = [i for i in node.inputs if _is_product(graph, graph[i])]
    alone = len(products) == 1 and _is_read_once(graph, graph[products[0]])
    return products[0] if alone else None


def _is_product(graph: Graph, node: Node) -> bool:
    """Or the largest or smallest of some, or minus one."""
    while node.op in (Op.RESHAPE, Op.NEG, Op.MAX, Op.MIN):
        node = graph[node.inputs[0]]
    return node.op is Op.MUL


def _is_read_once(graph: Graph, node: Node) -> bool:
    """Is it a product of floats, one an element, that one node alone reads?"""
    if node.op is not Op.MUL or node.value.dtype is not torch.float32 or not node.value.spread:
        return False
    readers = graph.readers[node.id]
    return len(readers) == 1 and readers != (node.id,)


def gathered_online(graph: Graph, node: Node) -> Ahead | None:
    """The sum of exp(x - max(x)), or of the squares of x - sum(x) / n."""
    if node.op is not Op.SUM:
        return None
    (operand,) = graph.operands(node)
    if operand.op is Op.EXP:
        (shifted,) = graph.operands(operand)
        peak = _subtracted_maximum(graph, shifted)
        return None if peak is None else Ahead(Online.SOFTMAX, peak.id, shifted.inputs[1])
    if operand.op is not Op.MUL or len({*operand.inputs}) > 1:
        return None
    deviation = graph[operand.inputs[0]]
    if deviation.op is not Op.SUB:
        return None
    x, mean = graph.operands(deviation)
    ratio = strip(graph, mean)
    if ratio.op is not Op.DIV or graph[ratio.inputs[1]].op is not Op.CONST:
        return None
    total = strip(graph, graph[ratio.inputs[0]])
    if total.op is not Op.SUM or total.inputs != (x.id,):
        return None
    return Ahead(Online.WELFORD, total.id, mean.id)


def padding(graph: Graph, loop: ColumnLoop) -> float:
    """What a row is to hold behind its end where a loop reads it from global memory, and reduces
    it and nothing else: the identity, so that no select is needed. 0 elsewhere."""
    if loop.reduce is None or len(loop.steps) > 1 or len(loop.reduce.gathered) > 1:
        return 0.0
    ((_, operand, monoid),) = loop.reduce.gathered
    rows = [i for i in loop.reads if i.role is Role.ROW]
    if [i.id for i in rows] != [operand] or not rows[0].dtype.is_floating_point:
        return 0.0
    return monoid.identity


def _is_below_zero(graph: Graph, node: Node) -> bool:
    """x - max(x): exp of it is at most 1, so an error that grows with |x| is never seen."""
    return _subtracted_maximum(graph, node) is not None


def _subtracted_maximum(graph: Graph, node: Node) -> Node | None:
    """max(x) if the node is x - max(x)."""
    if node.op is not Op.SUB:
        return None
    x, m = graph.operands(node)
    m = strip(graph, m)
    if m.op is Op.WHERE:  # logsumexp takes 0 for an infinite maximum
        condition, zero, peak = (strip(graph, operand) for operand in graph.operands(m))
        if not (_is_number(zero, 0.0) and _is_infinite(graph, condition, peak)):
            return None
        m = peak
    return m if m.op is Op.MAX and m.inputs == (x.id,) else None


def _is_number(node: Node, number: float) -> bool:
    return node.op is Op.CONST and node.arg == number


def _is_infinite(graph: Graph, condition: Node, x: Node) -> bool:
    """abs(x) == inf"""
    if condition.op is not Op.EQ:
        return False
    magnitude, limit = (strip(graph, operand) for operand in graph.operands(condition))
    if magnitude.op is not Op.ABS or not _is_number(limit, inf):
        return False
    return strip(graph, graph[magnitude.inputs[0]]).id == x.id


def _is_plain_number(node: Node) -> bool:
    """A constant whose reciprocal is neither huge nor tiny."""
    return node.op is Op.CONST and 2.0**-100 <= abs(node.arg) <= 2.0**100


def _is_share(graph: Graph, part: Node, whole: Node) -> bool:
    """e / sum(e) with e = exp(x - max(x)): the sum is in [1, N], so rcp.approx loses nothing."""
    whole = strip(graph, whole)
    return (
        whole.op is Op.SUM
        and whole.inputs == (part.id,)
        and part.op is Op.EXP
        and _is_below_zero(graph, graph[part.inputs[0]])
    )


def strip(graph: Graph, node: Node) -> Node:
    while node.op is Op.RESHAPE:
        node = graph[node.inputs[0]]
    return node

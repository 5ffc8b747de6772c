"""One sum of exponentials for the softmax, the log_softmax and the logsumexp of the same elements.

softmax sums exp(x - max(x)). logsumexp and log_softmax subtract 0 where the maximum is infinite,
because logsumexp is infinite there and not NaN. A function that has both would exponentiate twice.
So the sum of the second kind is taken from the first: with m = max(x) it is exp(m) where m is
infinite, and the same elsewhere. Its logarithm is m there. A log_softmax is NaN where m is
infinite, so it needs no choice.
"""

from __future__ import annotations

from math import inf

import torch

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import Op, Value, Varies
from ...frontend.slopes import Slope
from ..patterns import peak_of_total, strip, total_of
from .rewrite import rewrite


def share_totals(graph: Graph, slope: Slope | None = None) -> Graph:
    """Take the sums of exponentials of logsumexp and log_softmax from those of a softmax.

    slope: what the choice between the logarithm of a total and an infinite maximum gets as its
        `arg`, in a graph that is differentiated later.

    A graph that does not have both is returned itself. The nodes of the softmax are added once
    more where they are needed, so common subexpressions have to be merged afterwards.
    """
    if Op.WHERE not in [node.op for node in graph]:
        return graph  # at once, because most functions have no logsumexp
    peaks = {node.id: peak for node in graph if (peak := peak_of_total(graph, node)) is not None}
    exponents = {id: graph[graph[graph[id].inputs[0]].inputs[0]] for id in peaks}
    guarded = {id for id, exponent in exponents.items() if _is_guarded(graph, exponent)}
    plain = {peak.id: exponents[id] for id, peak in peaks.items() if id not in guarded}
    guarded = {id for id in guarded if peaks[id].id in plain}
    if not guarded:
        return graph

    def unguarded(new: Builder, exponent: int, total: int) -> int:
        """x - max(x), as the softmax has it."""
        x, subtrahend = new[exponent].inputs
        peak = strip(new, new[strip(new, new[subtrahend]).inputs[2]]).id
        subtracted = graph[plain[peaks[total].id].inputs[1]]
        if subtracted.op is Op.RESHAPE:
            peak = new.add(Op.RESHAPE, (peak,), subtracted.arg, subtracted.loc)
        return new.add(Op.SUB, (x, peak), loc=new[exponent].loc)

    def reshaped(new: Builder, id: int, node: Node) -> int:
        """A value in the shape of a node of the graph."""
        inner = node.value.inner
        is_so = new[id].value.inner == inner
        return id if is_so else new.add(Op.RESHAPE, (id,), inner, node.loc)

    def share(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.id in guarded:
            exponent = unguarded(new, new[inputs[0]].inputs[0], node.id)
            exponential = new.add(Op.EXP, (exponent,), loc=node.loc)
            total = new.add(node.op, (exponential,), node.arg, node.loc)
            peak = strip(new, new[new[exponent].inputs[1]]).id
            limit = new.add_const(inf, Value((), Varies.SCALAR, torch.float32))
            at_limit = new.add(Op.EQ, (new.add(Op.ABS, (peak,), loc=node.loc), limit), loc=node.loc)
            infinite = new.add(Op.EXP, (peak,), loc=node.loc)
            return new.add(Op.WHERE, (at_limit, infinite, total), loc=node.loc)
        if node.op is Op.WHERE and _total_of_log_softmax(graph, node) in guarded:
            return reshaped(new, strip(new, new[inputs[2]]).inputs[2], node)
        if node.op is Op.LOG and strip(graph, graph[node.inputs[0]]).id in guarded:
            at_limit, infinite, total = strip(new, new[inputs[0]]).inputs
            logarithm = new.add(Op.LOG, (total,), loc=node.loc)
            operands = at_limit, new[infinite].inputs[0], logarithm
            return reshaped(new, new.add(Op.WHERE, operands, slope, node.loc), node)
        if node.op is Op.SUB:
            total = _total_of_log_softmax(graph, graph[node.inputs[1]])
            if total in guarded and node.inputs[0] == exponents[total].id:
                exponent = unguarded(new, inputs[0], total)
                return new.add(Op.SUB, (exponent, inputs[1]), loc=node.loc)
        return None

    return rewrite(graph, share)


def _is_guarded(graph: Graph, exponent: Node) -> bool:
    """Whether x - max(x) subtracts 0 in place of an infinite maximum."""
    return strip(graph, graph[exponent.inputs[1]]).op is Op.WHERE


def _total_of_log_softmax(graph: Graph, node: Node) -> int | None:
    """The sum whose logarithm a log_softmax subtracts, with NaN where the maximum is infinite."""
    is_chosen = strip(graph, node).op is Op.WHERE
    total = total_of(graph, node, in_groups=True) if is_chosen else None
    return None if total is None else total.id

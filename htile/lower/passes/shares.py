"""Forms of a softmax that cost fewer instructions or fewer loops over the row.

A softmax has the shares p = E / s of exponentials E = exp(e), with e = x - max(x) and s = sum(E).
Its logarithm is e - log(s), which takes one logarithm a row (`logarithm_of_share`).

An expectation sums p * a. Taken literally, the sum waits for s and needs a loop of its own. As
sum(E * a) / s it is taken in the loop that sums E (`gather_shares`). So is sum(p * p). Entropies
and divergences sum p * (e - log(s)). As the shares add up to 1, that is sum(E * e) / s - log(s).

The largest share is 1 / s, and is where the largest exponential is.
"""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import torch

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import COLLECTIVES, Op, Value, Varies
from ..patterns import ancestors, is_part_of_sum, strip, subtracted, total_of
from .rewrite import rewrite

MOST_TIMES = 1e6  # that a term is multiplied by, so that no product of an exponent is infinite
LEAST_EXPONENT = -745.0  # of an exponential that is not 0 in float64
LN2_HIGH = 0.693145751953125  # of 16 bits: its product with an exponent of float32 is exact
LN2_LOW = 1.4286068202862268e-06  # log(2) less that


def logarithm_of_share(
    graph: Graph, node: Node, new: Builder, inputs: tuple[int, ...]
) -> int | None:
    """log(exp(e) / total), of e up to 0, as e - log(total), where that is as exact.

    It is -inf where the exponential is 0 even in float64, as torch's is there.

    It is not as exact where another logarithm is taken of what is made of the share, and one is
    subtracted from the other, as log(p) - log(p + q) in a Jensen-Shannon divergence. The difference
    may be small, but e - log(total) is rounded. So log(total) is subtracted last, in two parts.
    """
    if node.op is Op.SUB:
        logarithm, other = graph.operands(node)
        if logarithm.op is not Op.LOG or other.op is not Op.LOG or not other.value.spread:
            return None
        share = graph[logarithm.inputs[0]]
        if not is_part_of_sum(graph, share) or not _has_other_logarithm(graph, share, logarithm):
            return None
        exponent, total = _exponent_and_total(new, *new[inputs[0]].inputs, node)
        difference = new.add(Op.SUB, (exponent, inputs[1]), loc=node.loc)
        for part in _logarithm_in_parts(new, total, node):
            difference = new.add(Op.SUB, (difference, part), loc=node.loc)
        return difference
    share = graph[node.inputs[0]]
    if not is_part_of_sum(graph, share) or _has_other_logarithm(graph, share, node):
        return None
    exponent, total = _exponent_and_total(new, *inputs, node)
    return new.add(Op.SUB, (exponent, new.add(Op.LOG, (total,), loc=node.loc)), loc=node.loc)


def _exponent_and_total(new: Builder, share: int, node: Node) -> tuple[int, int]:
    """What is subtracted in the logarithm of a share."""
    exponential, total = new[share].inputs
    (exponent,) = new[exponential].inputs
    least, minus_inf = (_number(new, number) for number in (LEAST_EXPONENT, -inf))
    is_zero = new.add(Op.LT, (exponent, least), loc=node.loc)
    return new.add(Op.WHERE, (is_zero, minus_inf, exponent), loc=node.loc), total


def _logarithm_in_parts(new: Builder, total: int, node: Node) -> tuple[int, int]:
    """Two numbers whose sum is log(total): one without an error, and one of at most about 1."""
    exponent = new.add(Op.EXPONENT, (total,), loc=node.loc)
    fraction = new.add(Op.LDEXP, (total, new.add(Op.NEG, (exponent,))), loc=node.loc)
    count = new.add(Op.CONVERT, (exponent,), torch.float32, node.loc)
    high = new.add(Op.MUL, (count, _number(new, LN2_HIGH)), loc=node.loc)
    low = new.add(Op.MUL, (count, _number(new, LN2_LOW)), loc=node.loc)
    return high, new.add(Op.ADD, (low, new.add(Op.LOG, (fraction,), loc=node.loc)), loc=node.loc)


def _number(new: Builder, number: float) -> int:
    return new.add_const(number, Value((), Varies.SCALAR, torch.float32))


def _has_other_logarithm(graph: Graph, share: Node, logarithm: Node) -> bool:
    """Whether a logarithm other than this one is taken of elements that are made of the share."""
    found, queue = {share.id}, [share.id]
    while queue:
        for id in graph.users(queue.pop()):
            reader = graph[id]
            if id in found or id == logarithm.id or reader.op in COLLECTIVES:
                continue
            if reader.op in (Op.LOG, Op.LOG1P, Op.LOG2, Op.LOG10):
                return True
            found.add(id)
            queue.append(id)
    return False


class _Term(NamedTuple):
    """What a share is multiplied by: an element, or the logarithm of a softmax's total."""

    id: int
    times: float = 1.0
    divisor: int | None = None  # the total of the share whose exponential it is
    is_zero: bool = False  # where the share that it multiplies is 0, whatever it is there


def gather_shares(graph: Graph) -> Graph:
    """Take sums and maxima of a softmax's shares in the loop that sums its exponentials.

    A graph that has none is returned itself.
    """
    sums = {node.id: found for node in graph if (found := _sum_of_shares(graph, node))}
    maxima = {node.id: found for node in graph if (found := _maximum_of_shares(graph, node))}
    if not sums and not maxima:
        return graph
    ids: dict[int, int] = {}

    def gather(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        ids.update(zip(node.inputs, inputs, strict=True))
        if node.id in sums:
            return _gathered(new, graph, node, *sums[node.id], ids)
        if node.id in maxima:
            return _largest(new, graph, node, maxima[node.id], ids)
        return None

    return rewrite(graph, gather)


def _sum_of_shares(graph: Graph, node: Node) -> tuple[_Share, list[_Term]] | None:
    """The share and what it is multiplied by, if the node is such a sum."""
    if node.op is not Op.SUM or node.arg is not None:
        return None
    operand = graph[node.inputs[0]]
    share = _share_below(graph, operand)
    if share is None or not _is_row(graph, operand) or _stands_for_share(graph, operand, share):
        return None
    terms = _terms(graph, operand, share) or []
    is_uniform = len({term.divisor for term in terms}) == 1
    has_elements = any([graph[term.id].value.spread for term in terms])
    return (share, terms) if is_uniform and has_elements else None


def _stands_for_share(graph: Graph, operand: Node, share: _Share) -> bool:
    """Whether later nodes read the operand, and not the share itself.

    A thread then keeps the operand alone behind the exchange of s. Gathered, it would keep what all
    factors are computed of, for an exchange less.
    """
    within = ancestors(graph, [operand])
    is_read = len(set(graph.readers[operand.id])) > 1
    return is_read and within.issuperset(graph.readers[share.id])


def _maximum_of_shares(graph: Graph, node: Node) -> _Share | None:
    """The share, if the node is the largest of a softmax's or the column's number of that."""
    if node.op is Op.KEY_INDEX:
        largest = graph[node.inputs[0]]
        if largest.op is not Op.MAX:  # a backward pass reads the key of the forward pass
            return None
        key = graph[largest.inputs[0]]
        is_alone = key.op is Op.KEY and graph.users(key.id) == [largest.id]
        if not is_alone or key.arg or graph[key.inputs[1]].op is not Op.INDEX:
            return None
        operand = graph[key.inputs[0]]
    else:
        largest, operand = node, graph[node.inputs[0]] if node.inputs else node
    if largest.op is not Op.MAX or largest.arg is not None or not _is_row(graph, operand):
        return None
    if not is_part_of_sum(graph, operand):
        return None
    exponent = graph[graph[operand.inputs[0]].inputs[0]]
    return _as_share(graph, operand) if is_plain(graph, exponent) else None


def _is_row(graph: Graph, node: Node) -> bool:
    """Whether it has one float32 for each column."""
    value = node.value
    return value.spread and value.inner == (graph.n,) and value.dtype is torch.float32


class _Share(NamedTuple):
    """exp(e) / s, or exp(e - log(s)), by the ids of its nodes."""

    id: int
    exponential: int
    total: int
    later: frozenset[int]  # the nodes that wait for the total


def _share_below(graph: Graph, node: Node) -> _Share | None:
    """The first share that is a factor below sums, differences and choices."""
    while True:
        if node.op in (Op.NEG, Op.ADD, Op.SUB):
            node = graph[node.inputs[0]]
        elif node.op is Op.WHERE:
            node = graph[node.inputs[2]]
        elif node.op is Op.MUL:
            factors = [graph[i] for i in node.inputs]
            factors = [graph[f.inputs[0]] if f.op is Op.NEG else f for f in factors]
            shares = [share for f in factors if (share := _as_share(graph, f)) is not None]
            return shares[0] if shares else None
        else:
            return None


def _as_share(graph: Graph, node: Node) -> _Share | None:
    if is_part_of_sum(graph, node):
        exponential, total = node.inputs
        return _share(graph, node, exponential, strip(graph, graph[total]).id)
    if node.op is not Op.EXP or graph[node.inputs[0]].op is not Op.SUB:
        return None
    exponent, logarithm = graph.operands(graph[node.inputs[0]])
    total = total_of(graph, logarithm)
    if total is None or graph[total.inputs[0]].inputs != (exponent.id,):
        return None
    return _share(graph, node, total.inputs[0], total.id)


def _share(graph: Graph, node: Node, exponential: int, total: int) -> _Share:
    later = {total}
    later.update(n.id for n in graph if not later.isdisjoint(n.inputs))
    return _Share(node.id, exponential, total, frozenset(later))


def is_exponent(graph: Graph, node: Node) -> bool:
    """Whether it is x - max(x)."""
    return node.value.spread and subtracted(graph, node, Op.MAX) is not None


def is_plain(graph: Graph, exponent: Node) -> bool:
    """Whether it is x - max(x), also where that is infinite. Then all shares are NaN at once."""
    return strip(graph, graph[exponent.inputs[1]]).op is Op.MAX


def _terms(graph: Graph, node: Node, share: _Share) -> list[_Term] | None:
    """What the share is multiplied by in each term of the node; None if it is anything else."""
    operands = graph.operands(node)
    if node.op is Op.NEG:
        return _times(-1.0, _terms(graph, operands[0], share))
    if node.op in (Op.ADD, Op.SUB):
        left, right = (_terms(graph, operand, share) for operand in operands)
        right = _times(-1.0 if node.op is Op.SUB else 1.0, right)
        return None if left is None or right is None else left + right
    if node.op is Op.WHERE:
        return _chosen(graph, node, share)
    if node.op is not Op.MUL:
        return None
    for one, other in (operands, operands[::-1]):
        if one.id == share.id:
            return _factors(graph, other, share)
        if one.op is Op.NEG and one.inputs[0] == share.id:
            return _times(-1.0, _factors(graph, other, share))
    return None


def _chosen(graph: Graph, node: Node, share: _Share) -> list[_Term] | None:
    """The terms of a choice that a share decides, as those of xlogy and entr do.

    It is 0 where the share is, and a share is never negative. Where the share is NaN, so is s.
    """
    condition, value, rest = graph.operands(node)
    terms = _terms(graph, rest, share)
    if terms is None or value.op is not Op.CONST or condition.inputs[:1] != (share.id,):
        return None
    limit = graph[condition.inputs[1]] if len(condition.inputs) == 2 else condition
    if condition.op is Op.NE and limit.id == share.id and value.arg != value.arg:
        return terms
    if limit.op is not Op.CONST or limit.arg != 0.0:
        return None
    if condition.op is Op.LT:
        return terms
    is_guard = condition.op is Op.EQ and value.arg == 0.0
    return [term._replace(is_zero=True) for term in terms] if is_guard else None


def _factors(graph: Graph, node: Node, share: _Share) -> list[_Term] | None:
    """What the node adds up of elements that do not wait for the total, and of logarithms of
    totals; None for anything else.

    A sum of elements alone stays whole, because they may cancel.
    """
    found = _parts_of_factor(graph, node, share)
    is_there = node.value.spread and node.id not in share.later
    has_none = found and all(graph[t.id].value.spread and t.divisor is None for t in found)
    return [_Term(node.id)] if is_there and has_none else found


def _parts_of_factor(graph: Graph, node: Node, share: _Share) -> list[_Term] | None:
    """The same, of which a sum of elements is taken apart."""
    if not node.value.spread:
        return [_Term(node.id)] if total_of(graph, node) is not None else None
    if (other := _as_share(graph, node)) is not None:
        return [_Term(other.exponential, divisor=other.total)]
    if node.op in (Op.ADD, Op.SUB, Op.NEG) and not is_exponent(graph, node):
        found = [_factors(graph, operand, share) for operand in graph.operands(node)]
        if None not in found:
            found[-1] = found[-1] if node.op is Op.ADD else _times(-1.0, found[-1])
            return [term for terms in found for term in terms]
    if node.op is Op.MUL:
        for number, other in (graph.operands(node), graph.operands(node)[::-1]):
            if number.op is Op.CONST and abs(number.arg) <= MOST_TIMES:
                return _times(number.arg, _factors(graph, other, share))
    return None if node.id in share.later else [_Term(node.id)]


def _is_cut_exponent(graph: Graph, node: Node) -> bool:
    """Whether it is an exponent, or -inf where that is below the least."""
    if node.op is not Op.WHERE:
        return False
    condition, low, exponent = graph.operands(node)
    if low.arg != -inf or condition.op is not Op.LT or condition.inputs[0] != exponent.id:
        return False
    return graph[condition.inputs[1]].arg == LEAST_EXPONENT and is_exponent(graph, exponent)


def _times(number: float, terms: list[_Term] | None) -> list[_Term] | None:
    return terms and [term._replace(times=number * term.times) for term in terms]


def _largest(new: Builder, graph: Graph, node: Node, share: _Share, ids: dict[int, int]) -> int:
    """The largest share, or the column's number of the largest exponential, in the new graph.

    Where s is NaN all shares are, and torch finds the first.
    """
    total = ids[share.total]
    if node.op is Op.MAX:
        one = _number(new, 1.0)
        return new.add(Op.DIV, (one, total), loc=node.loc)
    key = graph[graph[node.inputs[0]].inputs[0]]
    keys = new.add(Op.KEY, (ids[share.exponential], ids[key.inputs[1]]), key.arg, node.loc)
    index = new.add(Op.KEY_INDEX, (new.add(Op.MAX, (keys,), loc=node.loc),), node.arg, node.loc)
    first = new.add_const(0, Value((), Varies.SCALAR, node.value.dtype))
    is_nan = new.add(Op.NE, (total, total), loc=node.loc)
    return new.add(Op.WHERE, (is_nan, first, index), loc=node.loc)


def _gathered(
    new: Builder, graph: Graph, node: Node, share: _Share, terms: list[_Term], ids: dict[int, int]
) -> int:
    """sum(E * a) / s + c, in the new graph, for the node that sums the terms."""

    def add(op: Op, *inputs: int) -> int:
        return new.add(op, inputs, loc=node.loc)

    def added(terms: list[tuple[float, int]]) -> int:
        result = None
        for times, id in sorted(terms, key=lambda each: each[0] < 0):
            size = abs(times)
            id = id if size == 1 else add(Op.MUL, id, _number(new, size))
            if result is None:
                result = id if times > 0 else add(Op.NEG, id)
            else:
                result = add(Op.ADD if times > 0 else Op.SUB, result, id)
        return result

    (own,) = graph[share.exponential].inputs
    exponential, total = ids[share.exponential], ids[share.total]
    plain, guarded, values, may_be_large = [], [], [], False
    for term in terms:
        factor = graph[term.id]
        each = term.times, ids[term.id]
        is_own = term.id == own or (_is_cut_exponent(graph, factor) and factor.inputs[2] == own)
        if not factor.value.spread:
            values.append(each)
        elif is_own and term.is_zero:  # E is 0 below the least exponent, and so is the product
            plain.append((term.times, add(Op.MAXIMUM, ids[own], _number(new, LEAST_EXPONENT))))
        else:
            (guarded if term.is_zero else plain).append(each)
            may_be_large |= not is_own and term.divisor is None
    # E * e is between -0.4 and 0, and E * E at most 1. The sum of other products, of which each may
    # be as large as float32 goes, stays finite if they are scaled.
    scale = 2.0 ** -new.n.bit_length()
    weight = add(Op.MUL, exponential, _number(new, scale)) if may_be_large else exponential
    products = [(1.0, add(Op.MUL, weight, added(plain)))] if plain else []
    if guarded:
        product = add(Op.MUL, weight, added(guarded))
        is_zero = add(Op.EQ, exponential, _number(new, 0.0))
        products.append((1.0, add(Op.WHERE, is_zero, _number(new, 0.0), product)))
    mean = add(Op.DIV, add(Op.SUM, added(products)), total)
    if may_be_large:
        mean = add(Op.MUL, mean, _number(new, 1 / scale))
    if terms[0].divisor is not None:
        mean = add(Op.DIV, mean, ids[terms[0].divisor])
    return added([(1.0, mean), *_joined_logarithms(new, values, node)])


def _joined_logarithms(
    new: Builder, values: list[tuple[float, int]], node: Node
) -> list[tuple[float, int]]:
    """The logarithms of totals and what each is multiplied by, with log(a) - log(b) as log(a / b).

    The logarithms of a divergence are about 10 for long rows, and so are their errors, while their
    difference is often small. No quotient overflows that the difference does not, because a total
    is 0, NaN, infinite or between 1 and the number of elements.
    """
    for i, (times, first) in enumerate(values):
        for j, (other_times, second) in enumerate(values):
            if times == -other_times > 0 and new[first].value == new[second].value:
                rest = [value for k, value in enumerate(values) if k not in (i, j)]
                quotient = times, _logarithm_of_quotient(new, first, second, node)
                return [quotient, *_joined_logarithms(new, rest, node)]
    return values


def _logarithm_of_quotient(new: Builder, first: int, second: int, node: Node) -> int:
    """log(a / b) of what are log(a) and log(b), with NaN where one of them has it."""
    totals, choices = [], []
    for id in (first, second):
        logarithm = strip(new, new[id])
        if logarithm.op is Op.WHERE:  # NaN where the maximum is infinite
            choices.append(logarithm.inputs[:2])
            logarithm = strip(new, new[logarithm.inputs[2]])
        totals.append(logarithm.inputs[0])
    result = new.add(Op.LOG, (new.add(Op.DIV, tuple(totals), loc=node.loc),), loc=node.loc)
    for is_infinite, nan in choices:
        result = new.add(Op.WHERE, (is_infinite, nan, result), loc=node.loc)
    return result

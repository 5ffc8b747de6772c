"""Sums that are taken before the row's maximum is known: sum(exp(x - max(x)) * a), and others.

A softmax waits for its maximum m, and sums of its exponentials would wait for a second exchange. So
a thread sums relative to the maximum of its own elements. One exchange brings all maxima and sums,
and then each sum is moved from the thread's maxima to those of the row.

Such a sum has terms P * (s * x + a). P is a number times a product of exponentials exp(x_j - m_j),
each with another maximum. s * x stands for a weighted sum of exponents x_j - m_j. From maxima m to
maxima n the sum moves as

    sum(n) = (sum(m) + s * (m - n) * sum of P) * exp(m_j - n_j) * ...

Entropies and divergences have such exponents. Then P has one exponential, whose plain sum has to be
there too. For a softmax alone, see M. Milakov and N. Gimelshein, Online normalizer calculation for
softmax (2018), section 3.1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ..compute.moves import Move
from ..frontend.graph import Graph, Node
from ..frontend.ops import Op
from .patterns import subtracted

LEAST = -104.0  # the exponent of an exponential that is not 0 in float32
MOST_POWERS = 16  # the exponentials of a term, each of which a sum is multiplied by as it moves


class Following(NamedTuple):
    """Some maxima, and the sums that follow them.

    maxima: the nodes of the maxima.
    references: for each, the node that exponents subtract, as the row has it after its exchange.
    moves: how each sum moves.
    """

    maxima: tuple[int, ...]
    references: tuple[int, ...]
    moves: tuple[Move, ...]


class _Term(NamedTuple):
    """factor * (the exponentials of `powers`) * (the exponents with `slopes`, and elements).

    powers: the maxima of these exponentials, in order. One may be there more than once.
    is_plain: whether there are neither exponents nor elements.
    cut: maxima whose exponents are no less than a number. Their exponentials have to be among the
        powers in the end.
    """

    powers: tuple[int, ...] = ()
    slopes: tuple[tuple[int, float], ...] = ()
    factor: float = 1.0
    is_plain: bool = False
    cut: frozenset[int] = frozenset()


def following(graph: Graph, first: Sequence[int], sums: Sequence[int]) -> Following | None:
    """How these sums follow maxima; None if they do not, or need more than the maxima.

    first: all reductions of one stage. Maxima that no sum needs are left out.
    sums: all reductions of the next stage.
    """
    maxima = [id for id in first if graph[id].op is Op.MAX]
    terms = _Terms(graph, maxima, first)
    found = [terms.of_sum(id) for id in sums]
    if None in found or all(each.is_plain and len(each.powers) == 1 for each in found):
        return None
    used = [id for id in maxima if id in terms.references]
    if any(len(terms.references[id]) > 1 for id in used):
        return None
    place = {id: k for k, id in enumerate(used)}
    plain = {t.powers: k for k, t in enumerate(found) if t.is_plain and t.factor == 1.0}
    moves = []
    for each in found:
        powers = tuple([place[id] for id in each.powers])
        if not each.slopes:
            moves.append(Move(powers))
            continue
        if each.powers not in plain:
            return None
        of = {place[id]: number for id, number in each.slopes}
        slopes = tuple(of.get(k, 0.0) for k in range(len(used)))
        moves.append(Move(powers, slopes, plain[each.powers]))
    references = tuple(next(iter(terms.references[id])) for id in used)
    return Following(tuple(used), references, tuple(moves))


class _Terms:
    """Reads the terms of sums.

    references: for each maximum that is needed, the nodes that exponents subtract in its place.
    later: the reductions of the first stage, and all that waits for them.
    """

    def __init__(self, graph: Graph, maxima: Sequence[int], first: Sequence[int]):
        self.graph, self.maxima = graph, set(maxima)
        self.references: dict[int, set[int]] = {}
        self._found: dict[int, _Term | None] = {}  # each node's, because many may read it
        self.later: set[int] = set(first)
        for node in graph:
            if not self.later.isdisjoint(node.inputs):
                self.later.add(node.id)

    def of_sum(self, id: int) -> _Term | None:
        """The term of a sum over the row, if that follows maxima."""
        node = self.graph[id]
        if node.op is not Op.SUM or node.arg is not None:
            return None
        term = self._of(self.graph[node.inputs[0]])
        return term if term is not None and term.powers and term.cut <= {*term.powers} else None

    def _of(self, node: Node) -> _Term | None:
        if node.id not in self._found:
            self._found[node.id] = self._read(node)
        return self._found[node.id]

    def _read(self, node: Node) -> _Term | None:
        operands = self.graph.operands(node)
        if node.op is Op.CONST:
            return _Term(factor=float(node.arg), is_plain=True)
        if node.id not in self.later:
            return _Term()
        if node.op is Op.EXP:
            exponent = self._exponent(operands[0])
            return None if exponent is None else _Term((exponent,), is_plain=True)
        if (exponent := self._exponent(node)) is not None:
            return _Term(slopes=((exponent, 1.0),))
        if self._is_cut(node):
            exponent = self._exponent(operands[0])
            return _Term(slopes=((exponent, 1.0),), cut=frozenset([exponent]))
        if node.op is Op.NEG:
            return _scaled(self._of(operands[0]), -1.0)
        if node.op in (Op.ADD, Op.SUB):
            one, other = map(self._of, operands)
            return _added(one, _scaled(other, -1.0 if node.op is Op.SUB else 1.0))
        if node.op is Op.DIV and operands[1].op is Op.CONST and operands[1].arg:
            return _scaled(self._of(operands[0]), 1 / operands[1].arg)
        if node.op is Op.MUL:
            return self._product(*operands)
        return None

    def _exponent(self, node: Node) -> int | None:
        """The maximum of x, by its id, if the node is x minus it and sums follow it."""
        peak = subtracted(self.graph, node, Op.MAX)
        if peak is None or peak.id not in self.maxima or peak.arg is not None:
            return None
        self.references.setdefault(peak.id, set()).add(node.inputs[1])
        return peak.id

    def _product(self, a: Node, b: Node) -> _Term | None:
        one, other = self._of(a), self._of(b)
        if one is None or other is None:
            return None
        powers, cut = tuple(sorted(one.powers + other.powers)), one.cut | other.cut
        if len(powers) > MOST_POWERS:
            return None
        for weight, rest in ((one, other), (other, one)):
            if weight.is_plain and not (weight.powers and rest.powers and rest.slopes):
                return _scaled(rest, weight.factor)._replace(powers=powers, cut=cut)
        return None if one.slopes or other.slopes else _Term(powers, cut=cut)

    def _is_cut(self, node: Node) -> bool:
        """Whether it is an exponent, or a number where that is larger.

        Multiplied by the exponential, the two differ only where the exponential is 0.
        """
        if node.op is not Op.MAXIMUM:
            return False
        exponent, number = self.graph.operands(node)
        is_least = number.op is Op.CONST and number.arg <= LEAST
        return is_least and self._exponent(exponent) is not None


def _scaled(term: _Term | None, number: float) -> _Term | None:
    if term is None:
        return None
    slopes = tuple((id, slope * number) for id, slope in term.slopes)
    return term._replace(slopes=slopes, factor=term.factor * number)


def _added(one: _Term | None, other: _Term | None) -> _Term | None:
    """The sum of two terms, which have the same exponentials."""
    if one is None or other is None or one.powers != other.powers:
        return None
    slopes: dict[int, float] = {}
    for id, number in one.slopes + other.slopes:
        slopes[id] = slopes.get(id, 0.0) + number
    return _Term(one.powers, tuple(slopes.items()), cut=one.cut | other.cut)

"""What is computed of each element by its rank, such as gradients of `topk`, without what follows.

`topk` traces to a chain of reductions (`htile.lower.ranks`). No two elements have the same key, so
one element alone has the key that a link finds. That is what a derivative asks: which element of
those that the link was asked of is it? Whether it was among them needs no comparison, because its
key says so. And as each element has one rank, a sum over ranks of what each gives to its element
is a choice among them.
"""

from __future__ import annotations

from typing import NamedTuple

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import Op
from ..patterns import strip
from ..ranks import KINDS, Chain, chains
from .rewrite import rewrite


def choose_by_rank(graph: Graph) -> Graph:
    """The graph in which elements are chosen by their rank without what is known of ranks."""
    found = chains(graph)
    if not found:
        return graph
    return rewrite(rewrite(graph, _Rule(graph, found)))  # then without what nobody reads any more


class _Ranks(NamedTuple):
    """Some ranks of the elements of a piece of a row, of which each has one at most.

    keys: the node of the piece's keys. chain: the first link of the chain. links: the ranks.
    """

    keys: int
    chain: int
    links: frozenset[int]

    def with_others(self, other: _Ranks) -> _Ranks | None:
        """These ranks and others of the same elements; None where an element may have two."""
        if (self.keys, self.chain) != (other.keys, other.chain) or self.links & other.links:
            return None
        return self._replace(links=self.links | other.links)


class _Rule:
    """The rule of the rewriting.

    asked: from a row of keys, all or masked as `where(keys < link, keys, lowest)`, to the link that
        is asked of it. masks: the same from the mask alone.
    hits: from a node of the new graph that says which element has a rank, to the rank.
    choices: from a row of the new graph that is 0 but for elements of some ranks, to these.
    """

    def __init__(self, graph: Graph, found: list[Chain]):
        self.graph = graph
        self.asked: dict[int, _Ranks] = {}
        self.masks: dict[int, _Ranks] = {}
        for chain in found:
            for link in chain.results:
                self._add(link, chain.results[0])
        self.hits: dict[int, _Ranks] = {}
        self.choices: dict[int, _Ranks] = {}

    def _add(self, link: int, first: int) -> None:
        todo = [self.graph[self.graph[link].inputs[0]]]
        while todo:
            node = todo.pop()
            if node.op is KINDS[self.graph[link].op][0]:
                todo += self.graph.operands(node)
            elif node.op is Op.WHERE:
                mask, keys, _ = node.inputs
                self.asked[node.id] = self.masks[mask] = _Ranks(keys, first, frozenset({link}))
            else:
                self.asked[node.id] = _Ranks(node.id, first, frozenset({link}))

    def __call__(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is Op.EQ:
            return self._hit(new, node, inputs)
        if node.op is Op.WHERE:
            return self._chosen(new, node, inputs)
        return self._summed(new, node, inputs) if node.op is Op.ADD else None

    def _hit(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        """Which element has the key that a link found: asked of all keys, not of those left."""
        for k in (0, 1):
            rank, other = self.asked.get(node.inputs[k]), self.graph[node.inputs[1 - k]]
            if rank is not None and strip(self.graph, other).id in rank.links:
                row = new[inputs[k]]
                keys = row.inputs[1] if row.op is Op.WHERE else inputs[k]
                hit = new.add(Op.EQ, (keys, inputs[1 - k]), None, node.loc)
                self.hits[hit] = rank
                return hit
        return None

    def _chosen(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        """A number for the element of a rank and 0 for others; also behind the mask of its link."""
        mask, value, rest = inputs
        if not _is_zero(new[rest]):
            return None
        if mask in self.hits:
            chosen = new.add(Op.WHERE, inputs, None, node.loc)
            self.choices[chosen] = self.hits[mask]
            return chosen
        rank = self.masks.get(node.inputs[0])
        return value if rank is not None and self.choices.get(value) == rank else None

    def _summed(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        """The sum of two choices among ranks that no element has both of, as one choice."""
        first, second = (self.choices.get(i) for i in inputs)
        both = first.with_others(second) if first and second else None
        lone = next((k for k in (1, 0) if both and len(self.choices[inputs[k]].links) == 1), None)
        if both is None or lone is None:
            return None
        hit, value, _ = new[inputs[lone]].inputs
        chosen = new.add(Op.WHERE, (hit, value, inputs[1 - lone]), None, node.loc)
        self.choices[chosen] = both
        return chosen


def _is_zero(node: Node) -> bool:
    return node.op is Op.CONST and node.arg == 0

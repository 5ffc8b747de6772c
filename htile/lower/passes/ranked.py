"""What is computed of each element by its rank, such as gradients of `topk`, without what follows.

`topk` traces to a chain of reductions (`htile.lower.ranks`). No two elements have the same key, so
one element alone has the key that a link finds. That is what a derivative asks: which element of
those that the link was asked of is it? Whether it was among them needs no comparison, because its
key says so. And as each element has one rank, a sum over ranks of what each gives to its element
is a choice among them.
"""

from __future__ import annotations

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import Op
from ..patterns import strip
from ..ranks import KINDS, Chain, chains
from .rewrite import rewrite


def choose_by_rank(graph: Graph) -> Graph:
    """The graph in which elements are chosen by their rank without what is known of ranks."""
    found = chains(graph)
    return rewrite(graph, _Rule(graph, found)) if found else graph


class _Rule:
    """The rule of the rewriting.

    links: from a row of keys, all or masked as `where(keys < link, keys, lowest)`, to the link that
        is asked of it. masks: the same from the mask alone.
    hits: from a node of the new graph that says which element has a rank, to the link.
    choices: from a row of the new graph that is 0 but for elements of some ranks, to these.
    """

    def __init__(self, graph: Graph, found: list[Chain]):
        self.graph = graph
        self.links: dict[int, int] = {}
        self.masks: dict[int, int] = {}
        for chain in found:
            for link in chain.results:
                self._add(link)
        self.hits: dict[int, int] = {}
        self.choices: dict[int, frozenset[int]] = {}

    def _add(self, link: int) -> None:
        todo = [self.graph[self.graph[link].inputs[0]]]
        while todo:
            node = todo.pop()
            if node.op is KINDS[self.graph[link].op][0]:
                todo += self.graph.operands(node)
                continue
            self.links[node.id] = link
            if node.op is Op.WHERE:
                self.masks[node.inputs[0]] = link

    def __call__(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is Op.EQ:
            return self._hit(new, node, inputs)
        if node.op is Op.WHERE:
            return self._chosen(new, node, inputs)
        return self._summed(new, node, inputs) if node.op is Op.ADD else None

    def _hit(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        """Which element has the key that a link found: asked of all keys, not of those left."""
        for k in (0, 1):
            link = self.links.get(node.inputs[k])
            if link is not None and strip(self.graph, self.graph[node.inputs[1 - k]]).id == link:
                asked = new[inputs[k]]
                keys = asked.inputs[1] if asked.op is Op.WHERE else inputs[k]
                hit = new.add(Op.EQ, (keys, inputs[1 - k]), None, node.loc)
                self.hits[hit] = link
                return hit
        return None

    def _chosen(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        """A number for the element of a rank and 0 for others; also behind the mask of its link."""
        mask, value, rest = inputs
        if not _is_zero(new[rest]):
            return None
        if mask in self.hits:
            chosen = new.add(Op.WHERE, inputs, None, node.loc)
            self.choices[chosen] = frozenset({self.hits[mask]})
            return chosen
        link = self.masks.get(node.inputs[0])
        return value if link is not None and self.choices.get(value) == {link} else None

    def _summed(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        """The sum of two choices that have no rank in common, as one choice."""
        first, second = (self.choices.get(i, frozenset()) for i in inputs)
        if not first or not second or first & second:
            return None
        if len(second) > 1:
            first, second, inputs = second, first, inputs[::-1]
        if len(second) > 1:
            return None
        hit, value, _ = new[inputs[1]].inputs
        chosen = new.add(Op.WHERE, (hit, value, inputs[0]), None, node.loc)
        self.choices[chosen] = first | second
        return chosen


def _is_zero(node: Node) -> bool:
    return node.op is Op.CONST and node.arg == 0

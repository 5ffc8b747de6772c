"""The largest shares of a softmax, found by the elements that they are the shares of.

exp(x - m) / s grows with x, and so does its logarithm. So the largest shares are where the largest
elements are. Keys of elements need not wait for s, and those of 16-bit elements and their columns
have 32 bits and not 64. The shares are computed of what was found, once a row.

That is done where it was measured to be faster: for keys of 32 bits, and where warps do not look
for ranks together. There the elements would take registers from the keys for as long as that lasts.

Elements of which the shares are equal by rounding are ranked by themselves, and not by their
columns.
"""

from __future__ import annotations

from typing import NamedTuple

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import Op, Value, Varies
from ..patterns import is_part_of_sum, strip, total_of
from ..ranks import FEW_OF_CLUSTER, FEW_RANKS, Chain, chains, least_zero_bits
from .rewrite import rewrite
from .shares import is_exponent, is_plain

# A warp has rows of at most so many elements, and looks for any number of ranks alone. Rows of more
# than LONGEST_OF_BLOCK may be divided over a cluster, which looks for FEW_OF_CLUSTER without that.
LONGEST_OF_WARP, LONGEST_OF_BLOCK = 256, 8192
Steps = tuple[tuple[Op, int | None], ...]  # operations, each with the id of a value of the row


class _Ranked(NamedTuple):
    """A chain of ranks of shares, the elements, and what makes a share of an element."""

    chain: Chain
    element: int
    steps: Steps


def rank_elements(graph: Graph) -> Graph:
    """Rank elements in place of their shares. A graph without such ranks is returned itself."""
    found = [ranked for chain in chains(graph) if (ranked := _ranked(graph, chain))]
    if not found:
        return graph
    of_key = {ranked.chain.keys[0]: ranked for ranked in found}
    places = {id: (each, k) for each in found for k, id in enumerate(each.chain.results)}
    ids: dict[int, int] = {}

    def rank(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        ids.update(zip(node.inputs, inputs, strict=True))
        if node.id in of_key:
            element = ids[of_key[node.id].element]
            return new.add(node.op, (element, inputs[1]), node.arg, node.loc)
        if node.op not in (Op.KEY_VALUE, Op.KEY_INDEX) or node.inputs[0] not in places:
            return None
        ranked, place = places[node.inputs[0]]
        share = new.add(Op.KEY_VALUE, inputs, graph[ranked.element].value.dtype, node.loc)
        for op, other in ranked.steps:
            share = new.add(op, (share,) if other is None else (share, ids[other]), loc=node.loc)
        if node.op is Op.KEY_VALUE:
            return share
        # Where one share is NaN all are, and torch takes them in the order of their columns.
        is_nan = new.add(Op.NE, (share, share), loc=node.loc)
        index = new.add(node.op, inputs, node.arg, node.loc)
        first = new.add_const(place, Value((), Varies.SCALAR, node.value.dtype))
        return new.add(Op.WHERE, (is_nan, first, index), loc=node.loc)

    return rewrite(graph, rank)


def _ranked(graph: Graph, chain: Chain) -> _Ranked | None:
    """The chain, if it ranks shares that nothing else reads, and elements are ranked faster."""
    if chain.smaller or len(chain.keys) > 1 or chain.group > 1:
        return None
    most = FEW_RANKS if graph.n <= LONGEST_OF_BLOCK else FEW_OF_CLUSTER
    if graph.n > LONGEST_OF_WARP and len(chain.results) > most:
        return None
    key = graph[chain.keys[0]]
    share = graph[key.inputs[0]]
    if graph.readers[share.id] != (key.id,) or not _is_alone(graph, chain):
        return None
    found = _steps(graph, share)
    is_short = found and graph.n <= 1 << least_zero_bits(graph, [found[0]])
    return _Ranked(chain, *found) if is_short else None


def _is_alone(graph: Graph, chain: Chain) -> bool:
    """Whether nothing but the chain reads its keys and what it finds of them.

    What else reads a key compares it with keys of other rows, which are not made of elements.
    """
    (key,) = chain.keys
    inside, queue = set(), [key, *chain.results]
    while queue:
        for id in graph.users(queue.pop()):
            reader = graph[id]
            if reader.op in (Op.KEY_VALUE, Op.KEY_INDEX):
                if reader.inputs[0] not in chain.results:
                    return False
            elif reader.op in (Op.LT, Op.WHERE):
                if id not in inside:
                    queue.append(id)
                inside.add(id)
            elif id not in chain.results:
                return False
    # Its comparisons have the key first, and its choices second, behind a comparison.
    return all(graph[id].inputs[graph[id].op is Op.WHERE] == key for id in inside)


def _steps(graph: Graph, share: Node) -> tuple[int, Steps] | None:
    """The element, and what makes its share of it, or the logarithm of its share."""
    after: Steps = ()
    if is_part_of_sum(graph, share):
        exponential, total = share.inputs
        (exponent,) = graph.operands(graph[exponential])
        after = ((Op.EXP, None), (Op.DIV, total))
        all_are_nan = is_plain(graph, exponent)
    else:
        if share.op is Op.EXP:
            after, share = ((Op.EXP, None),), graph[share.inputs[0]]
        if share.op is not Op.SUB or total_of(graph, graph[share.inputs[1]]) is None:
            return None
        exponent, after = graph[share.inputs[0]], ((Op.SUB, share.inputs[1]), *after)
        is_guarded = strip(graph, graph[share.inputs[1]]).op is Op.WHERE
        all_are_nan = is_guarded or is_plain(graph, exponent)
    if not is_exponent(graph, exponent) or not all_are_nan:
        return None
    element, largest = exponent.inputs
    return element, ((Op.SUB, largest), *after)

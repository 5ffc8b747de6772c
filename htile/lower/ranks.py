"""Reductions that find one rank of a row after the other, which a held row finds all at once.

`topk` traces to a chain: the largest key, the largest of the keys below that, and so on. Each link
depends on the one before, so a row that is worked on in loops has a loop for each. The threads of a
row that is held find all links in one stage (`htile.compute.ranks`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from ..frontend.dtypes import FLOAT8
from ..frontend.graph import Graph, Node
from ..frontend.ops import Op
from .patterns import strip

LOWEST, HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max
# For a maximum and for a minimum: what joins pieces of the row, what tells which keys are left, and
# what stands for the others.
KINDS = {Op.MAX: (Op.MAXIMUM, Op.LT, LOWEST), Op.MIN: (Op.MINIMUM, Op.GT, HIGHEST)}
# The lowest bits of a float32 that are zero, if it is exactly of such a dtype.
ZERO_BITS = {torch.bfloat16: 16, torch.float16: 13, **dict.fromkeys(FLOAT8, 13)}
WARP, BITS = 32, 32  # lanes; of an element and of an index
ALIGNED = 96  # bytes that the beginnings of lists may take
MOST_MOVED = 1024  # keys that a thread moves up in all rounds
MOST_SORTED = 16  # A thread has about so many elements.
MOST_BITS = 16  # of an index beside an element
# A thread lists candidates if all of this holds: it has LEAST_LISTED keys or more (twice as many if
# keys have 32 bits), LISTED_RANKS has the number of ranks, and LISTING_LANES lanes or more work on
# its row.
LEAST_LISTED, LISTED_RANKS, LISTING_LANES = 16, range(3, 33), 8
# Listing takes a thread about LISTING instructions for each key, and LISTS beside.
LISTING, LISTS = 5, 90
# The warps of a row look together for more ranks than FEW_RANKS if one CTA has the row, and for
# more than FEW_OF_CLUSTER if several do. For fewer, each warp looks on its own.
FEW_RANKS, FEW_OF_CLUSTER = 8, 5
# Slots of the exchange buffer, and places for candidates, that this takes: as in
# htile.compute.together, which cannot be imported here, because it needs cutlass.
SLOTS_TOGETHER, LEAST_PLACES = 6, 64
ROWS_TOGETHER = 15  # of a CTA at most, because each has a barrier of its own
# Instructions of a thread that this takes: for each key, for its part of the bound and of the list,
# for each bit of the bound, and for each candidate.
KEY_TOGETHER, TOGETHER, BOUND_BIT, CANDIDATE = 2, 120, 12, 5
KEPT = {Op.NEG, Op.ABS, Op.MAXIMUM, Op.MINIMUM, Op.WHERE, Op.CONVERT, Op.RESHAPE, Op.LOOKUP}


@dataclass(frozen=True, slots=True)
class Chain:
    """Ranks of a row.

    results: the reductions, in order. keys: the nodes of the keys of each piece of the row.
    smaller: whether the smallest comes first.
    index_bits: how many bits an index takes beside an element, if both fit 32 bits; else 0.
    zero_bits: how many of the lowest bits of every element are known to be zero.
    group: how many columns have the same key, because it is of a group of them; else 1.
    """

    results: tuple[int, ...]
    keys: tuple[int, ...]
    smaller: bool
    index_bits: int
    zero_bits: int = 0
    group: int = 1

    def are_together(self, threads_per_row: int, cluster_n: int) -> bool:
        """Whether the warps of a row look for the ranks together: `htile.compute.together`."""
        if cluster_n > 1:
            return self.group == 1 and len(self.results) > FEW_OF_CLUSTER
        return self._are_many and threads_per_row > WARP

    @property
    def _are_many(self) -> bool:
        """Whether warps of any row of several look for them together."""
        return self.group == 1 and len(self.results) > FEW_RANKS

    @property
    def slots(self) -> int:
        """How many slots of the exchange buffer its ranks take."""
        return SLOTS_TOGETHER if self._are_many else len(self.results)

    def lists(self, lanes: int, elements: int) -> bool:
        """Whether a thread of so many elements lists candidates, and sorts no others.

        That is `htile.compute.candidates`. Lanes that work on one row bring them together.
        """
        least = LEAST_LISTED * (2 if self.index_bits else 1)
        is_many = elements * len(self.keys) >= least and lanes >= LISTING_LANES
        return is_many and len(self.results) in LISTED_RANKS and self.group == 1

    def scratch(self, threads: int, threads_per_row: int, cluster_n: int, elements: int) -> int:
        """Bytes of shared memory for keys and candidates of so many threads of a CTA."""
        size, lanes = 4 if self.index_bits else 8, min(threads_per_row, WARP)
        if self.are_together(threads_per_row, cluster_n):
            groups = threads_per_row // WARP * cluster_n
            while groups < 2 * len(self.results):
                groups *= 2
            of_row = 4 * groups + (2 * self._places + len(self.results)) * size + 4
            return threads // threads_per_row * of_row + ALIGNED
        if not self.lists(lanes, elements):
            return 0
        places = max(lanes, 2 << (len(self.results) - 1).bit_length())
        staged = -(-elements * len(self.keys) // 4) * 4 * threads
        return (staged + places * threads // lanes) * size

    @property
    def _places(self) -> int:
        return max(LEAST_PLACES, 4 << (len(self.results) - 1).bit_length())

    @property
    def sorting(self) -> int:
        """About how many instructions a thread takes for each of its elements, if it has many."""
        if self._are_many:
            return KEY_TOGETHER
        is_listed = len(self.results) in LISTED_RANKS and self.group == 1
        return LISTING if is_listed else self._sorting

    @property
    def _sorting(self) -> int:
        """`sorting`, if a thread sorts all of its elements."""
        steps = (min(len(self.results), MOST_SORTED) - 1).bit_length()
        comparisons = steps * (steps + 1) / 4 + 1 + steps / 2  # in runs, and in merges of them
        return round(comparisons * (2 if self.index_bits else 5))

    def rounds(self, threads_per_row: int, cluster_n: int, elements: int) -> int:
        """About how many instructions a thread of so many elements takes beside `sorting`.

        They are those of all rounds of its warp, and if it lists no candidates, more for each
        element.
        """
        count, lanes = len(self.results), min(threads_per_row, WARP)
        if self.are_together(threads_per_row, cluster_n):
            candidates = self._places // 2
            listed = CANDIDATE * candidates * candidates // (2 * threads_per_row)
            own = TOGETHER + count + BOUND_BIT * (BITS - self.zero_bits) + listed
            return own + (KEY_TOGETHER - self.sorting) * elements
        if self.lists(lanes, elements):
            bound = self._rounds(lanes, 1, narrow=True)
            own = bound + LISTS + self._rounds(lanes, max(1, 2 * count // lanes))
            own += (LISTING - self.sorting) * elements
        else:
            own = (self._sorting - self.sorting) * elements + self._rounds(lanes, elements)
        is_several = threads_per_row > WARP or cluster_n > 1
        return own + is_several * self._rounds(WARP, 1)

    def _rounds(self, lanes: int, elements: int, narrow: bool = False) -> int:
        whole, step, words = (4, 2, 1) if self.index_bits or narrow else (8, 6, 2)
        each = whole if lanes == 32 else 2 + step * (lanes.bit_length() - 1)
        count = len(self.results)
        return count * (each + words * min(elements, count // 2))

    def fits(self, threads_per_row: int, cluster_n: int, elements: int) -> bool:
        """Whether the code of all rounds is short enough, for threads with so many elements."""
        count = len(self.results)
        together = self.are_together(threads_per_row, cluster_n)
        return together or count * min(elements, count) <= MOST_MOVED

    def __str__(self) -> str:
        return f"the {len(self.results)} {'smallest' if self.smaller else 'largest'}"


def chains(graph: Graph) -> list[Chain]:
    """The chains of two links or more."""
    links: dict[tuple[int, ...], list[int]] = {}
    for node in graph:
        if node.op not in KINDS or node.value.dtype is not torch.int64:
            continue
        join, _, _ = KINDS[node.op]
        pieces = _pieces(graph, graph[node.inputs[0]], join)
        before = {_before(graph, piece, node.op) for piece in pieces}
        if all(piece.op is Op.KEY and piece.value.spread for piece in pieces):
            indices = [(graph[each.inputs[1]], _group(graph, each)) for each in pieces]
            if not all(_is_distinct(graph, index, group) for index, group in indices):
                continue
            links[node.id] = [node.id]
        elif len(before) == 1 and (link := before.pop()) in links:
            masked = tuple(piece.inputs[1] for piece in pieces)
            (first, *_) = chain = links[link]
            whole = _pieces(graph, graph[graph[first].inputs[0]], join)
            if masked == tuple(piece.id for piece in whole) and chain[-1] == link:
                chain.append(node.id)
                links[node.id] = chain
    found = {id(chain): chain for chain in links.values() if len(chain) > 1}
    return [_chain(graph, results) for results in found.values()]


def _chain(graph: Graph, results: list[int]) -> Chain:
    first = graph[results[0]]
    keys = _pieces(graph, graph[first.inputs[0]], KINDS[first.op][0])
    elements, indices = zip(*(graph.operands(key) for key in keys), strict=True)
    free = least_zero_bits(graph, [element.id for element in elements])
    last = max(_largest(graph, index) for index in indices)
    bits = free if last < 1 << free else 0
    group = min(_group(graph, key) for key in keys)
    ids = tuple(key.id for key in keys)
    return Chain(tuple(results), ids, first.op is Op.MIN, bits, free, group)


def least_zero_bits(graph: Graph, elements: Iterable[int]) -> int:
    """How many of the lowest bits of these values are known to be zero, MOST_BITS at most."""
    return min([MOST_BITS, *(_zero_bits(graph, graph[id]) for id in elements)])


def _group(graph: Graph, key: Node) -> int:
    """How many neighbouring columns have the same key."""
    return graph.group_size if key.id in graph.equal_in_groups else 1


def _pieces(graph: Graph, node: Node, join: Op) -> list[Node]:
    """What is joined to the operand of a reduction, if its row is in pieces."""
    if node.op is not join:
        return [node]
    return [piece for operand in graph.operands(node) for piece in _pieces(graph, operand, join)]


def _before(graph: Graph, piece: Node, op: Op) -> int | None:
    """The link before one of which this is a piece: `where(keys < link, keys, lowest)`."""
    _, compare, beyond = KINDS[op]
    if piece.op is not Op.WHERE:
        return None
    is_left, keys, rest = graph.operands(piece)
    is_rest = is_left.op is compare and rest.op is Op.CONST and rest.arg == beyond
    if not is_rest or is_left.inputs[0] != keys.id:
        return None
    return strip(graph, graph[is_left.inputs[1]]).id


def _is_distinct(graph: Graph, index: Node, group: int) -> bool:
    """Whether an index is known to differ from column to column, or from group to group of them.

    Keys with such indices are not equal.
    """
    if index.op is Op.INDEX or graph.n == 1:
        return group == 1 or graph.n == 1
    varying = [o for o in graph.operands(index) if o.op is not Op.CONST]
    if index.op is Op.RSHIFT and varying[0].op is Op.INDEX:  # the number of the group
        return len(varying) == 1 and 1 << graph[index.inputs[1]].arg == group
    if index.op in (Op.ADD, Op.MUL, Op.CAST, Op.CONVERT, Op.RESHAPE):
        return len(varying) == 1 and _is_distinct(graph, varying[0], group)
    return False


def _largest(graph: Graph, index: Node) -> int:
    """The largest value of an index."""
    if index.op is Op.INDEX:
        return graph.n - 1
    if index.op is Op.CONST:
        return index.arg
    if index.op is Op.RSHIFT:
        first, count = graph.operands(index)
        return _largest(graph, first) >> count.arg if count.op is Op.CONST else HIGHEST
    operands = [_largest(graph, operand) for operand in graph.operands(index)]
    if index.op is Op.ADD:
        return sum(operands)
    if index.op is Op.MUL:
        return operands[0] * operands[1]
    return operands[0] if index.op in (Op.CAST, Op.CONVERT, Op.RESHAPE) else HIGHEST


def _zero_bits(graph: Graph, x: Node) -> int:
    """How many of the lowest bits of each element, a float32, are known to be zero."""
    if x.value.dtype not in (torch.float32, *FLOAT8):
        return 0
    if x.op is Op.CONST:
        bits = int(torch.tensor(x.arg, dtype=torch.float32).view(torch.int32))
        return (bits & -bits).bit_length() - 1 if bits else MOST_BITS
    if x.op is Op.INPUT:
        (dtype,) = (i.dtype for i in graph.inputs if i.id == x.id)
        return ZERO_BITS.get(dtype, 0)
    if x.op is Op.UNBUNDLE:
        return ZERO_BITS.get(x.arg[2], 0)
    if x.op is Op.CAST and x.arg is not torch.float32:
        return ZERO_BITS.get(x.arg, 0)
    if x.op not in KEPT and x.op is not Op.CAST:
        return 0
    operands = graph.operands(x)
    operands = operands[:1] if x.op is Op.LOOKUP else operands[x.op is Op.WHERE :]
    return min(_zero_bits(graph, operand) for operand in operands)

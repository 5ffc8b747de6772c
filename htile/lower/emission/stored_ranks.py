"""Which results are elements by rank as they are, so that threads store them side by side."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...frontend.graph import Graph, Node, Output
from ...frontend.ops import Op
from ..patterns import strip
from ..reductions import Part

if TYPE_CHECKING:
    from ..plan import Plan

# What makes a result of a key, and the dtypes in which it is stored by its conversion alone.
OF_KEY = {
    Op.KEY_INDEX: (torch.int64, torch.int32),
    Op.KEY_VALUE: (torch.float32, torch.bfloat16, torch.float16),
}
CASTS = (Op.CAST, Op.CONVERT)


@dataclass(frozen=True, slots=True)
class StoredRanks:
    """Results that lie side by side: elements, or their indices, from one rank of a chain on.

    part: what finds the ranks. first: the first one's rank. key: the node that makes the first
    result of its key; the others are like it.
    made: all nodes that make results of keys.
    """

    part: Part
    first: int
    count: int
    key: Node
    made: frozenset[int]


def stored_ranks(plan: Plan) -> dict[Output, StoredRanks]:
    """The ranks that results are as they are, by the first of those that lie side by side."""
    if plan.numerics.in_loops or not plan.work.chains:
        return {}
    found = {group[0]: _stored(plan, group) for group in plan.graph.outputs_beside}
    return {output: ranks for output, ranks in found.items() if ranks is not None}


def read_beside(plan: Plan, stored: dict[Output, StoredRanks]) -> frozenset[int]:
    """The nodes that make results of keys for nothing but these stores."""
    if not stored:
        return frozenset()
    made = frozenset().union(*[ranks.made for ranks in stored.values()])
    groups = [group for group in plan.graph.outputs_beside if group[0] not in stored]
    kept = {output.id for group in groups for output in group}
    kept |= {i for node in plan.graph if node.id not in made for i in node.inputs}
    while more := {i for id in kept & made for i in plan.graph[id].inputs} - kept:
        kept |= more
    return made - kept


def _stored(plan: Plan, outputs: Sequence[Output]) -> StoredRanks | None:
    if len(outputs) < 2:
        return None
    places = [output.view.start[-1] for output in outputs]
    keys = [_of_key(plan.graph, output) for output in outputs]
    if any(key is None or key.op is not keys[0].op or key.arg != keys[0].arg for key in keys):
        return None
    ranks = {id: (part, k) for part in _together(plan) for k, id in enumerate(part.results)}
    found = [ranks.get(strip(plan.graph, plan.graph[key.inputs[0]]).id) for key in keys]
    part, first = found[0] or (None, 0)
    count = len(outputs)
    is_in_order = found == [(part, k) for k in range(first, first + count)]
    is_side_by_side = places == [*range(places[0], places[0] + count)]
    if not (is_in_order and is_side_by_side):
        return None
    made = frozenset([id for output in outputs for id in _made(plan.graph, output)])
    return StoredRanks(part, first, count, keys[0], made)


def _together(plan: Plan) -> Iterator[Part]:
    """The parts whose ranks all warps of a row find together."""
    row = plan.numerics.threads_per_row, plan.numerics.cluster_n
    for reduce in plan.sweeps.reduces:
        for part in dict.fromkeys(reduce.parts):
            if part.chain is not None and part.chain.are_together(*row):
                yield part


def _of_key(graph: Graph, output: Output) -> Node | None:
    """The node that makes a result of a key, if nothing but its storage converts it then."""
    node = strip(graph, graph[output.id])
    if node.op in OF_KEY:
        return node
    if node.op not in CASTS or node.arg is not output.dtype:
        return None
    key = strip(graph, graph[node.inputs[0]])
    is_plain = key.value.dtype in (torch.int64, torch.float32)
    return key if is_plain and node.arg in OF_KEY.get(key.op, ()) else None


def _made(graph: Graph, output: Output) -> Iterator[int]:
    """The nodes from a result to what makes it of a key."""
    node = graph[output.id]
    while node.op not in OF_KEY:
        yield node.id
        node = graph[node.inputs[0]]
    yield node.id

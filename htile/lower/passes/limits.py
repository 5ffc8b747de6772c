"""Which columns of a row are read, and which of a table's row, where `torch.where` says so.

Under `torch.where(columns < length, f(x), y)` nothing depends on the elements of x from `length`
on. If that holds for all that reads x, the kernel does not load them. The condition may compare the
column's number with an integer that a row has before anything is loaded of it, combine such masks
by `&`, `|` and `~`, or be a mask of each row, which reads all of it or nothing.

Rows of tables are limited on both sides, by constants: `torch.where(columns < 16, table[i],
table[j])` loads 16 columns of the first row and all others of the second one.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ...frontend.graph import Builder, Graph, Node, Output, Role
from ...frontend.ops import COLLECTIVES, REDUCTIONS, Op, Value, Varies
from ..patterns import ancestors, strip
from .rewrite import rewrite

INT32 = torch.int32
LARGEST = 2**31 - 1  # of them
# For a comparison of a column with an end: what is added to the end so that columns below it are
# those for which it holds; and for which it does not hold.
HOLDS = {Op.LT: 0, Op.LE: 1, Op.EQ: 1}
FAILS = {Op.GE: 0, Op.GT: 1, Op.NE: 1}
# Like all reductions, these read elements whatever is wanted of their result.
READ_WHOLE = frozenset({
    Op.TAKE, Op.GATHER, Op.LOOKUP, Op.GROUPED, Op.SUM_FROM_END, Op.KTHVALUE,
})  # fmt: skip
# An integer of each row and what is added to it; or a mask of each row, and for which of its values
# the row is read.
End = tuple[int, int | bool]
Span = tuple[int, int]  # of columns: the first one, and the one behind the last


def limit_loads(graph: Graph) -> Graph:
    """The graph whose inputs say where their rows may end (`Input.end`); itself if none does."""
    if Op.WHERE not in {node.op for node in graph.nodes}:
        return graph
    graph = _limit_lookups(graph)
    ends = _ends(graph)
    # What reaches beyond the ends of a row is loaded whole.
    inside = [i for i in graph.inputs if i.there(graph.n) is None]
    rows = {i.id for i in inside if i.role is Role.ROW and ends[i.id]}
    if not rows:
        return graph

    def with_ends(new: Builder, outputs: list[Output]) -> list[Output]:
        made: dict[object, int] = {}
        for k, i in enumerate(new.inputs):
            if i.id in rows:
                new.inputs[k] = replace(i, end=_end(new, ends[i.id], made))
        return outputs

    limited = rewrite(graph, outputs=with_ends)
    assert limited.nodes[: len(graph)] == graph.nodes, "ends are told by numbers of nodes"
    return limited


def _ends(graph: Graph) -> list[frozenset[End]]:
    """For each node the ends from which on no element of it is read."""
    outputs = {output.id for output in graph.outputs}
    found: list[frozenset[End]] = [frozenset()] * len(graph)
    for node in reversed(graph.nodes):
        if node.id in outputs or not node.value.spread:
            continue
        readers = [graph[id] for id in graph.users(node.id)]
        uses = [_of_use(graph, node, reader, found[reader.id]) for reader in readers]
        found[node.id] = frozenset.intersection(*uses) if uses else frozenset()
    return found


def _of_use(graph: Graph, node: Node, reader: Node, after: frozenset[End]) -> frozenset[End]:
    """The ends of what one node reads; `after` are those of its result."""
    if reader.op in REDUCTIONS or reader.op in READ_WHOLE:
        return frozenset()
    if reader.op is not Op.WHERE or node.id == reader.inputs[0]:
        return after
    condition, chosen, other = reader.inputs
    if chosen == other:
        return after
    return after | _bounds(graph, graph[condition], holds=node.id == chosen)


def _bounds(graph: Graph, condition: Node, holds: bool) -> frozenset[End]:
    """The ends of the columns for which a condition holds, or does not hold."""
    if condition.op is Op.NOT:
        return _bounds(graph, graph[condition.inputs[0]], not holds)
    if condition.op is (Op.AND if holds else Op.OR):
        return frozenset().union(*(_bounds(graph, o, holds) for o in graph.operands(condition)))
    if not condition.value.spread:
        is_known = condition.op is not Op.CONST and _is_known_early(graph, condition)
        return frozenset({(condition.id, holds)}) if is_known else frozenset()
    more = (HOLDS if holds else FAILS).get(condition.op)
    if more is None:
        return frozenset()
    column, end = graph.operands(condition)
    column, first = _column(graph, column)
    fits = column.op is Op.INDEX and column.value.dtype is end.value.dtype is INT32
    if not fits or end.value.spread or end.op is Op.CONST or not _is_known_early(graph, end):
        return frozenset()
    return frozenset({(end.id, more - first)})


def _column(graph: Graph, node: Node) -> tuple[Node, int]:
    """The number of a column, and what is added to it in a part of the row."""
    if node.op is not Op.ADD or graph[node.inputs[1]].op is not Op.CONST:
        return node, 0
    first = graph[node.inputs[1]].arg
    if node.value.dtype is INT32 and not -LARGEST <= first <= LARGEST - graph.n:
        return node, 0  # the sum may be beyond the largest integer, and go on from the smallest
    return graph[node.inputs[0]], first


def _is_known_early(graph: Graph, node: Node) -> bool:
    """Whether a value of each row comes of no row and no element of one."""
    made = [graph[id] for id in ancestors(graph, [node])]
    roles = {i.id: i.role for i in graph.inputs}
    return not any(
        each.value.spread or each.op in COLLECTIVES or each.op in (Op.TAKE, Op.GATHER, Op.LOOKUP)
        or roles.get(each.id) in (Role.ROW, Role.COLUMN)
        for each in made
    )  # fmt: skip


def _limit_lookups(graph: Graph) -> Graph:
    """The graph whose lookups say which of their columns are read; itself if all read all."""
    lookups = [node.id for node in graph if node.op is Op.LOOKUP and node.value.spread]
    if not lookups:
        return graph
    spans = _spans(graph)
    limited = {id: spans[id] for id in lookups if spans[id] != (0, graph.n)}
    if not limited:
        return graph

    def limit(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.id not in limited:
            return None
        return new.add(Op.LOOKUP, inputs, limited[node.id], node.loc)

    return rewrite(graph, limit)


def _spans(graph: Graph) -> list[Span]:
    """For each node the columns that are read of it: the first one, and the one behind the last."""
    outputs = {output.id for output in graph.outputs}
    found: list[Span] = [(0, 0)] * len(graph)
    for node in reversed(graph.nodes):
        spans = [(0, graph.n)] if node.id in outputs else []
        for reader in (graph[id] for id in graph.users(node.id)):
            spans.append(_span_of_use(graph, node, reader, found[reader.id]))
        found[node.id] = _around(spans)
    return found


def _span_of_use(graph: Graph, node: Node, reader: Node, after: Span) -> Span:
    """The columns of what one node reads; `after` are those that are read of its result."""
    if reader.op in COLLECTIVES or reader.op in READ_WHOLE or not reader.value.spread:
        return 0, graph.n
    condition, chosen, other = reader.inputs if reader.op is Op.WHERE else (node.id, 0, 0)
    if node.id == condition or chosen == other:
        return after
    return _both(after, _where(graph, graph[condition], holds=node.id == chosen))


def _where(graph: Graph, condition: Node, holds: bool) -> Span:
    """The columns outside of which a condition never holds; or, for not `holds`, always does."""
    every = 0, graph.n
    if condition.op is Op.NOT:
        return _where(graph, graph[condition.inputs[0]], not holds)
    if condition.op in (Op.AND, Op.OR):
        sides = [_where(graph, each, holds) for each in graph.operands(condition)]
        return _both(*sides) if (condition.op is Op.AND) is holds else _around(sides)
    if condition.op not in HOLDS and condition.op not in FAILS:
        return every
    column, number = graph.operands(condition)
    column, first = _column(graph, column)
    if column.op is not Op.INDEX or number.op is not Op.CONST:
        return every
    start = number.arg - first
    end = start + (HOLDS if condition.op in HOLDS else FAILS)[condition.op]
    below = holds is (condition.op in HOLDS)
    if condition.op in (Op.EQ, Op.NE):
        return _both(every, (start, end)) if below else every
    return _both(every, (0, end) if below else (end, graph.n))


def _both(one: Span, other: Span) -> Span:
    """The columns that are in both; (0, 0) if none is."""
    first, end = max(one[0], other[0]), min(one[1], other[1])
    return (first, end) if first < end else (0, 0)


def _around(spans: list[Span]) -> Span:
    """All columns from the first one that is in a span to the last one, those between included."""
    there = [span for span in spans if span[0] < span[1]]
    return (min(a for a, _ in there), max(b for _, b in there)) if there else (0, 0)


def _end(new: Builder, ends: frozenset[End], made: dict[object, int]) -> int:
    """The node of the lowest of some ends."""

    def number(value: int) -> int:
        return new.add_const(value, Value((), Varies.SCALAR, INT32))

    found = None
    for id, more in sorted(ends):
        if (id, more) not in made:
            end = strip(new, new[id]).id
            if isinstance(more, bool):
                read = (number(new.n), number(0)) if more else (number(0), number(new.n))
                end = new.add(Op.WHERE, (end, *read))
            elif more:
                end = new.add(Op.ADD, (end, number(more)))
            made[id, more] = end
        both = found, made[id, more]
        found = made[id, more] if found is None else new.add(Op.MINIMUM, both)
    return found

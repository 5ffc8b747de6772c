"""The cheapest set of nodes that separates sources from sinks: a minimum vertex cut.

It is found by the method of Edmonds and Karp (Journal of the ACM 19, 1972). networkx has it too,
but importing that takes longer than a call may.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping

UNLIMITED = 1 << 60  # the cost of a node that can not be in the cut


def cheapest_cut(
    costs: Mapping[int, int], operands: Mapping[int, Collection[int]],
    sources: Collection[int], sinks: Collection[int],
) -> frozenset[int] | None:  # fmt: skip
    """The nodes that every path from a source to a sink has one of, with the least sum of costs.

    costs: of every node, above 0. operands: for each node those that lead to it.

    Of sets that cost as much it is the one nearest to the sinks. A source or a sink may be in it.
    The result is None where a path has unlimited nodes only.
    """
    # A node is two places, (id, 0) and (id, 1), and what flows from one to the other is limited.
    begin, end = (-1, 0), (-1, 1)
    left: dict[tuple, dict[tuple, int]] = {begin: {}, end: {}}

    def connect(a: tuple, b: tuple, limit: int) -> None:
        left.setdefault(a, {})[b] = limit
        left.setdefault(b, {}).setdefault(a, 0)

    for id, cost in costs.items():
        connect((id, 0), (id, 1), cost)
        for operand in operands.get(id, ()):
            connect((operand, 1), (id, 0), UNLIMITED)
    for id in sources:
        connect(begin, (id, 0), UNLIMITED)
    for id in sinks:
        connect((id, 1), end, UNLIMITED)
    while path := _path(left, begin, end):
        flow = min(left[a][b] for a, b in path)
        if flow >= UNLIMITED // 2:
            return None
        for a, b in path:
            left[a][b] -= flow
            left[b][a] += flow
    behind = _leading_to(left, end)
    return frozenset(id for id in costs if (id, 1) in behind and (id, 0) not in behind)


def _path(left: Mapping[tuple, Mapping], begin: tuple, end: tuple) -> list[tuple[tuple, tuple]]:
    """The shortest path on which something can flow yet, as its edges; none if it is empty."""
    before, todo = {begin: begin}, deque([begin])
    while todo and end not in before:
        a = todo.popleft()
        for b, limit in left[a].items():
            if limit > 0 and b not in before:
                before[b] = a
                todo.append(b)
    path, b = [], end
    while b in before and b != begin:
        path.append((before[b], b))
        b = before[b]
    return path


def _leading_to(left: Mapping[tuple, Mapping], end: tuple) -> set[tuple]:
    """The places from which something can flow to the end yet."""
    found, todo = {end}, [end]
    while todo:
        b = todo.pop()
        for a in left[b]:  # an edge has its opposite
            if left[a].get(b, 0) > 0 and a not in found:
                found.add(a)
                todo.append(a)
    return found

"""Takes parts of what is put together from where they come from.

Ranks are found one after the other and put beside each other, so one of them is a part of many. A
derivative is taken of the nodes that there are. It would give each of the many a gradient, all but
one of them zeros.

A rank is found as a key, an integer that has an element and its index (`Op.KEY`), and elements are
read of the keys that are put together. A kernel that passed keys on to the next would pass on
integers, through which autograd has no gradient. So each key is read by itself.
"""

from __future__ import annotations

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import MOVEMENTS, Op
from .rewrite import rewrite

READS = (Op.KEY_VALUE, Op.KEY_INDEX)


def keys_apart(graph: Graph) -> Graph:
    """The same function, in which no key is moved before it is read."""
    if not any(node.op in READS for node in graph):
        return graph
    known: dict[tuple[Op, object, int], int] = {}

    def read(new: Builder, node: Node, key: int) -> int:
        asked = node.op, node.arg, key
        if asked not in known:
            found = new[key]
            if found.op in MOVEMENTS:
                parts = [read(new, node, i) for i in found.inputs]
                known[asked] = new.add(found.op, parts, found.arg, found.loc)
            else:
                known[asked] = new.add(node.op, (key,), node.arg, node.loc)
        return known[asked]

    def rule(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        return read(new, node, inputs[0]) if node.op in READS else None

    return rewrite(graph, rule)


def parts_apart(graph: Graph) -> Graph:
    """The same function, in which a part of one of several joined values is a part of that one."""
    if Op.CAT not in {node.op for node in graph}:
        return graph
    return rewrite(graph, _of_joined)


def _of_joined(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
    """The part of the joined value that a slice lies in; None if it lies in several."""
    if node.op is not Op.SLICE:
        return None
    axis, first, step, size = node.arg
    whole = inputs[0]
    while (found := _part(new[whole], new, axis, first, first + (size - 1) * step)) is not None:
        whole, begin = found
        first -= begin
    if whole == inputs[0]:
        return None
    if size == new[whole].value.inner[axis]:
        return whole
    return new.add(Op.SLICE, (whole,), (axis, first, step, size), node.loc)


def _part(joined: Node, new: Builder, axis: int, first: int, last: int) -> tuple[int, int] | None:
    """Which of joined values has both of these places of an axis, and where it begins."""
    begin = 0
    for part in joined.inputs if joined.op is Op.CAT and joined.arg == axis else ():
        end = begin + new[part].value.inner[axis]
        if begin <= first and last < end:
            return part, begin
        begin = end
    return None

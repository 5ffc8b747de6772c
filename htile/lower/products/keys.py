"""Reads the elements that keys stand for where these are found, before a function is cut.

A rank is found as a key, an integer that has an element and its index (`Op.KEY`). Keys may be put
beside each other before their elements are read. A kernel that passed keys on to the next would
pass on integers, through which autograd has no gradient. So each key is read by itself, as soon as
it is found, and what is passed on is the element.
"""

from __future__ import annotations

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import MOVEMENTS, Op
from ..passes.rewrite import rewrite

READS = (Op.KEY_VALUE, Op.KEY_INDEX)


def read_where_found(traced: Graph) -> Graph:
    """The same function, in which no key is moved before it is read."""
    if not any(node.op in READS for node in traced):
        return traced
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

    return rewrite(traced, rule)

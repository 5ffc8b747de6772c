"""Rebuilds a graph, node by node, with a rule that may put others in their place."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...frontend.graph import Builder, Graph, Node, Output, Role
from ...frontend.ops import Op
from ..patterns import ancestors

Rule = Callable[[Builder, Node, tuple[int, ...]], "int | None"]
Outputs = Callable[[Builder, list[Output]], list[Output]]


class TooLong(Exception):
    """A new graph would have more nodes than are asked for."""


def rewrite(graph: Graph, rule: Rule | None = None, outputs: Outputs | None = None) -> Graph:
    """Rebuild the graph from the nodes that reach an output, renumbered in order.

    `rule(new, node, inputs)` may return the id of a node that stands for this one, or None to copy
    it; `inputs` are its operands in the new graph. `outputs(new, found)` may return other outputs
    than those of the graph, of which `found` has the new ids.
    """
    live = _live(graph)
    new = Builder(graph.name, graph.n, graph.multiple)
    ids: dict[int, int] = {}
    sources = {i.id: i for i in graph.inputs}
    for node in graph:
        if node.id not in live:
            continue
        inputs = tuple([ids[i] for i in node.inputs])
        replacement = rule(new, node, inputs) if rule is not None else None
        if replacement is not None:
            ids[node.id] = replacement
        elif node.op is Op.INPUT:
            source = sources[node.id]
            given = source.name, source.role, source.dtype, node.value, source.view, source.formula
            ids[node.id] = new.add_input(*given)
        elif node.op is Op.CONST:
            ids[node.id] = new.add_const(node.arg, node.value, node.loc)
        elif node.op is Op.INDEX:
            ids[node.id] = new.add_index(node.arg, node.value.dtype, node.loc)
        else:
            ids[node.id] = new.add(node.op, inputs, node.arg, node.loc)
    found = [replace(out, id=ids[out.id]) for out in graph.outputs]
    return new.finish(outputs(new, found) if outputs else found, graph.structure)


def _live(graph: Graph) -> set[int]:
    """What an output needs, and at least one row, which gives the kernel its shape."""
    live = ancestors(graph, graph.outputs)
    rows = [i.id for i in graph.inputs if i.role is Role.ROW]
    return live if live.intersection(rows) else live | {*rows[:1]}

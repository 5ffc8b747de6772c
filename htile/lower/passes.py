"""Passes over the graph: each takes a graph and returns a new, verified one.

They do what makes a dump true and a plan small: a number for what is one, one node for one value,
and none that nobody reads. All other arithmetic is left to MLIR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..frontend.graph import Builder, Graph, Node, Role
from ..frontend.ops import COMMUTATIVE, REDUCTIONS, Op
from ..frontend.reference import EVALUATE

Rule = Callable[[Builder, Node, tuple[int, ...]], "int | None"]


def rewrite(graph: Graph, rule: Rule | None = None) -> Graph:
    """Rebuild the graph from the nodes that reach an output, renumbered in order.

    `rule(new, node, inputs)` may return the id of a node that stands for this one, or None to copy
    it; `inputs` are its operands in the new graph.
    """
    live = _ancestors(graph)
    new = Builder(graph.name, graph.n)
    ids: dict[int, int] = {}
    sources = {i.id: i for i in graph.inputs}
    for node in graph:
        if node.id not in live:
            continue
        inputs = tuple(ids[i] for i in node.inputs)
        replacement = rule(new, node, inputs) if rule is not None else None
        if replacement is not None:
            ids[node.id] = replacement
        elif node.op is Op.INPUT:
            source = sources[node.id]
            ids[node.id] = new.add_input(source.name, source.role, source.dtype, node.value)
        elif node.op is Op.CONST:
            ids[node.id] = new.add_const(node.arg, node.value, node.loc)
        else:
            ids[node.id] = new.add(node.op, inputs, node.arg, node.loc)
    outputs = (replace(out, id=ids[out.id]) for out in graph.outputs)
    return new.finish(outputs, graph.structure)


def _ancestors(graph: Graph) -> set[int]:
    """What an output needs; and one row, which gives the kernel its shape."""
    live: set[int] = set()
    todo = [out.id for out in graph.outputs]
    rows = [i.id for i in graph.inputs if i.role is Role.ROW]
    while todo:
        id = todo.pop()
        if id not in live:
            live.add(id)
            todo.extend(graph[id].inputs)
    return live if live.intersection(rows) else live | set(rows[:1])


def remove_dead_nodes(graph: Graph) -> Graph:
    """Keep what reaches an output; an argument that nothing reads is no input of the kernel."""
    return rewrite(graph)


def merge_common_subexpressions(graph: Graph) -> Graph:
    """Keep one node of those that compute the same: softmax of x beside logsumexp of x, say.

    exp(x * w - max(w * x)) is 1 at the maximum because the two products are one.
    """
    seen: dict[object, int] = {}

    def merge(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        # repr tells 1, 1.0 and True apart, and 0.0 from -0.0
        operands = tuple(sorted(inputs)) if node.op in COMMUTATIVE else inputs
        key = (node.op, operands, repr(node.arg), node.value if node.op is Op.CONST else None)
        if key not in seen:
            seen[key] = len(seen)  # ids ascend with the nodes that are kept
            return None
        return seen[key]

    return rewrite(graph, merge)


def fold_constants(graph: Graph) -> Graph:
    """Replace what is computed from numbers only by its number, rounded as the kernel rounds."""

    def fold(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        operands = [new[i] for i in inputs]
        if node.op in REDUCTIONS or not operands or any(o.op is not Op.CONST for o in operands):
            return None
        if node.op in (Op.FLOORDIV, Op.MOD) and operands[1].arg == 0:
            return None  # torch raises for integers; the kernel does not
        numbers = tuple(torch.tensor([o.arg], dtype=o.value.dtype, device="cpu") for o in operands)
        result = EVALUATE[node.op](numbers, node.arg, torch.float32)
        return new.add_const(result.item(), node.value, node.loc)

    return rewrite(graph, fold)


PASSES = (fold_constants, remove_dead_nodes, merge_common_subexpressions)


def run_passes(graph: Graph) -> Graph:
    """Apply every pass in order."""
    for apply in PASSES:
        graph = apply(graph)
    return graph

"""Passes over the graph: each takes a graph and returns a new, verified one.

They leave a number for what is one, one node for one value, and no node that nobody reads. All
other arithmetic is left to MLIR.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ..frontend.dtypes import STORAGE
from ..frontend.graph import Builder, Graph, Node, Output, Role
from ..frontend.ops import COMMUTATIVE, REDUCTIONS, Op, Value, Varies
from ..frontend.reference import EVALUATE
from .bundles import bundling
from .narrow import narrowing
from .patterns import ancestors, strip
from .space import place

Rule = Callable[[Builder, Node, tuple[int, ...]], "int | None"]
Outputs = Callable[[Builder, list[Output]], list[Output]]


def rewrite(graph: Graph, rule: Rule | None = None, outputs: Outputs | None = None) -> Graph:
    """Rebuild the graph from the nodes that reach an output, renumbered in order.

    `rule(new, node, inputs)` may return the id of a node that stands for this one, or None to copy
    it; `inputs` are its operands in the new graph. `outputs(new, found)` may return other outputs
    than those of the graph, of which `found` has the new ids.
    """
    live = _live(graph)
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
            given = source.name, source.role, source.dtype, node.value, source.view
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


def merge_common_subexpressions(graph: Graph) -> Graph:
    """Keep one node of those that compute the same.

    So exp(x * w - max(w * x)) is 1 at the maximum, because the two products are one.
    """
    seen: dict[object, int] = {}

    def merge(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is Op.INPUT:
            seen[node.id, "input"] = len(seen)
            return None
        # repr tells 1, 1.0 and True apart, and 0.0 from -0.0
        operands = tuple(sorted(inputs)) if node.op in COMMUTATIVE else inputs
        key = (node.op, operands, repr(node.arg), None if operands else node.value)
        fresh = len(seen)  # ids ascend with the nodes that are kept
        id = seen.setdefault(key, fresh)
        return None if id == fresh else id

    return rewrite(graph, merge)


def fold_constants(graph: Graph) -> Graph:
    """Replace what is computed from numbers only by its number, rounded as the kernel rounds."""

    def fold(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        operands = [new[i] for i in inputs]
        if node.op in REDUCTIONS or not operands or any(o.op is not Op.CONST for o in operands):
            return None
        if node.value.dtype in STORAGE:
            return None  # no kernel writes down a number of 8 bits
        if node.op in (Op.FLOORDIV, Op.MOD) and operands[1].arg == 0:
            return None  # torch raises for integers; the kernel does not
        numbers = tuple(torch.tensor([o.arg], dtype=o.value.dtype, device="cpu") for o in operands)
        result = EVALUATE[node.op](numbers, node.arg, torch.float32)
        return new.add_const(result.item(), node.value, node.loc)

    return rewrite(graph, fold)


def choose_means(graph: Graph) -> Graph:
    """Make a mean MEAN where its operand has other readers, and a sum divided by N elsewhere.

    MEAN of equal elements is exactly that element, so `x - x.mean()` is 0 for them. A sum rounds on
    its way, but costs less where a row is padded. Where nothing else reads the operand, no
    difference is taken that would show the rounding. So the mean of equal elements that is only
    returned may be a unit in the last place off.
    """

    def choose(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        reduction = _averaged(graph, node)
        if reduction is None:
            return None
        is_shared = len(set(graph.readers[reduction.inputs[0]])) > 1
        if is_shared == (node.op is Op.MEAN):
            return None
        if not is_shared:
            total = new.add(Op.SUM, inputs, loc=node.loc)
            number = new.add_const(float(graph.n), Value((), Varies.SCALAR, torch.float32))
            return new.add(Op.DIV, (total, number), loc=node.loc)
        (operand,) = strip(new, new[inputs[0]]).inputs
        mean = new.add(Op.MEAN, (operand,), loc=node.loc)
        inner = node.value.inner
        return new.add(Op.RESHAPE, (mean,), inner, node.loc) if inner else mean

    return rewrite(graph, choose)


def _averaged(graph: Graph, node: Node) -> Node | None:
    """The reduction of a mean, which is the node itself, or a sum that it divides by N."""
    if node.op is Op.MEAN:
        return node
    if node.op is not Op.DIV or graph[node.inputs[1]].arg != graph.n:
        return None
    total = strip(graph, graph[node.inputs[0]])
    return total if total.op is Op.SUM and graph[total.inputs[0]].value.spread else None


def narrow_indices(graph: Graph) -> Graph:
    """Number columns in int32 where that is enough; see `htile.lower.narrow`."""
    rule = narrowing(graph)
    narrowed = rewrite(graph, rule)
    return narrowed if rule is None else merge_common_subexpressions(narrowed)


def bundle_neighbours(graph: Graph) -> Graph:
    """Load and store neighbouring elements together; see `htile.lower.bundles`.

    It is the graph itself where there are none, as in most.
    """
    rule, outputs = bundling(graph)
    return rewrite(graph, rule, outputs) if rule or outputs else graph


PASSES = (
    fold_constants,
    merge_common_subexpressions,
    choose_means,
    merge_common_subexpressions,
    narrow_indices,
)


def run_passes(graph: Graph) -> Graph:
    """The placed graph of a traced one, as kernels are made of it."""
    graph = bundle_neighbours(place(graph))
    for apply in PASSES:
        graph = apply(graph)
    return graph

"""The row kernel between the two products of a gradient: from cotangents to products' gradients.

It is the joint graph of `htile.frontend.derive` for what follows the products in one step. So it
reads a product, if the derivative depends on it, finds reductions of its row again, and keeps
nothing between the passes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary

import torch
from torch.utils import _pytree as pytree

from ...frontend.derive import derive, differentiable
from ...frontend.graph import Builder, Graph, Output
from ...frontend.ops import Op
from ...lower.products.levels import Product
from ..runner import Runner
from ..specialize import spec_of
from .calls import OF_ROWS, ProductStep


@dataclass(frozen=True)
class Gradient:
    """The gradients of a step's graph, in which products are arguments, for some cotangents.

    results: the names of the results that have these cotangents.
    run: the kernel that computes them; None where each of them is a cotangent.
    names: of the arguments whose gradients its results are.
    over_rows: those of them that are sums over all rows.
    same: for other arguments the result whose cotangent is their gradient.
    sources: for each parameter of `run` the result whose cotangent it is, or None for an argument.
    has_tables: whether there are gradients of tables, too, which this does not compute.
    """

    results: tuple[str, ...]
    run: Runner | None
    names: tuple[str, ...]
    over_rows: frozenset[str]
    same: dict[str, str]
    sources: tuple[str | None, ...]
    has_tables: bool = False

    def reads(self, product: Product) -> bool:
        """Whether the product itself is needed, and not only its gradient."""
        return self.run is not None and product.name in self.run.parameters.names

    def has(self, product: Product) -> bool:
        """Whether the product has a gradient."""
        return product.name in self.names or product.name in self.same


_KNOWN: WeakKeyDictionary[Runner, dict[object, Gradient | None]] = WeakKeyDictionary()


def gradient_of(
    step: ProductStep, needed: frozenset[str], cotangents: tuple[str, ...] | None = None
) -> Gradient | None:
    """The gradients of the arguments that need one; None where none of them has any.

    cotangents: the names of the results that have one; None for all that can have one.

    That of a product has the dtype of its operands, which it is multiplied by. What is added up
    from several places, or over rows, is float32.
    """
    known = _KNOWN.setdefault(step.whole.run, {})
    key = needed, cotangents
    if key not in known:
        graph = step.whole.run.graph
        products = [p for p in step.products if p.left in needed or p.matrix in needed]
        added = {p.left for p in products} | {i.name for i in graph.inputs if i.role not in OF_ROWS}
        dtypes = {p.name: p.dtype for p in products}
        dtypes |= {i.name: torch.float32 if i.name in added else i.dtype
                   for i in graph.inputs if i.name in needed}  # fmt: skip
        names = differentiable(graph, dtypes)
        if cotangents is not None:
            names = tuple(name for name in names if name in cotangents)
        known[key] = _derived(step.whole.run, dtypes, added, names) if names else None
    return known[key]


def _derived(
    of: Runner, dtypes: Mapping[str, torch.dtype], added: set[str], results: tuple[str, ...]
) -> Gradient:
    """The gradients of these dtypes, by argument, for the cotangents of `results`.

    added: arguments whose gradients are written to: none of them may be a cotangent.
    """
    joint = derive(of.graph, tuple(dtypes), results)
    if joint.scattered:
        return Gradient(results, None, (), frozenset(), {}, (), has_tables=True)
    both = zip(joint.inputs[len(of.graph.inputs) :], results, strict=True)
    cotangents = {i.id: (i, result) for i, result in both}
    outputs: dict[str, Output] = {}
    same: dict[str, str] = {}
    for output in joint.outputs:
        name = output.name.removeprefix("d_")
        cotangent, result = cotangents.get(output.id, (None, None))
        if cotangent is not None and cotangent.dtype is dtypes[name] and name not in added:
            same[name] = result
        else:
            outputs[name] = replace(output, dtype=dtypes[name])
    over = frozenset(name for name, output in outputs.items() if output.over is not None)
    if not outputs:
        return Gradient(results, None, (), over, same, ())
    graph = _graph_of(joint, [*outputs.values()])
    run = Runner(graph, tuple(spec_of(graph, i) for i in graph.inputs), of.fastmath, {})
    by_name = {i.name: result for i, result in cotangents.values()}
    sources = tuple(by_name.get(name) for name in run.parameters.names)
    return Gradient(results, run, tuple(outputs), over, same, sources)


def _graph_of(joint: Graph, outputs: Sequence[Output]) -> Graph:
    """The graph of these outputs of a joint graph, and of no others."""
    live: set[int] = set()
    todo = [output.id for output in outputs]
    while todo:
        id = todo.pop()
        if id not in live:
            live.add(id)
            todo += joint[id].inputs
    new, ids, inputs = Builder(joint.name, joint.n), {}, {i.id: i for i in joint.inputs}
    for id in sorted(live):
        node = joint[id]
        if node.op is Op.INPUT:
            ids[id] = new.add_input(node.arg, inputs[id].role, inputs[id].dtype, node.value)
        else:
            ids[id] = new.copied(node, [ids[i] for i in node.inputs])
    made = [replace(output, id=ids[output.id]) for output in outputs]
    return new.finish(made, pytree.tree_structure((0,) * len(made)))

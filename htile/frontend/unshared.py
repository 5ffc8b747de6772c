"""A graph in which what all rows shared differs from row to row, as `torch.vmap` maps over it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from ..errors import UnsupportedError
from .graph import Builder, Graph, Role
from .ops import Op, Varies

OF_EACH_ROW = {Role.COLUMN: Role.ROW, Role.DEVICE_SCALAR: Role.PER_ROW}


def unshared(graph: Graph, names: Collection[str]) -> Graph:
    """The graph, with columns of these names as rows, and scalars as one value of each row.

    Its nodes have the ids that they have in `graph`, as traced or derived. Raises UnsupportedError
    for a table that an index chooses from, and for a matrix.
    """
    new, inputs = Builder(graph.name, graph.n), {i.id: i for i in graph.inputs}
    chosen = {node.inputs[0] for node in graph if node.op is Op.LOOKUP}
    for node in graph:
        if node.op is not Op.INPUT:
            new.copied(node, node.inputs)
            continue
        i, value = inputs[node.id], node.value
        role = i.role
        if i.name in names:
            if node.id in chosen or role not in OF_EACH_ROW:
                raise UnsupportedError(
                    f"{graph.name}: torch.vmap maps over {i.name}, which all rows of a call share; "
                    f"call {graph.name} for each element of the batch, or outside torch.vmap"
                )
            role, value = OF_EACH_ROW[role], replace(value, varies=Varies.ROW)
        new.add_input(i.name, role, i.dtype, value)
    return new.finish(graph.outputs, graph.structure)

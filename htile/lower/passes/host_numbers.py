"""Numbers that the host function computes of Python floats, in float64, are inputs of a kernel."""

from __future__ import annotations

from ...frontend.formulas import Formula, formulas
from ...frontend.graph import Builder, Graph, Node
from .rewrite import rewrite


def on_the_host(graph: Graph) -> Graph:
    """The graph whose inputs are such numbers (`Input.formula`); itself if there are none.

    A float of which some are made is itself one of them, because its parameter is wide then.
    """
    found = formulas(graph)
    if not found:
        return graph
    floats = {i.id: (i, Formula()) for i, _ in found.values()}

    def rule(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.id not in found and node.id not in floats:
            return None
        i, formula = found.get(node.id) or floats[node.id]
        return new.add_input(i.name, i.role, i.dtype, node.value, formula=formula)

    return rewrite(rewrite(graph, rule))  # without what nobody reads now

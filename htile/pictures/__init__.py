"""Pictures of a graph and of a plan: DOT and JSON as plain text, SVG through matplotlib.

matplotlib is imported when the first picture is drawn, never before, and so is what draws it: a
call of a kernel needs none of it. The same graph gives the same bytes in every process. Values
have the names of the emitted source where the caller has them (`value_names` of
`htile.lower.emission.names`). Otherwise they are named in the same manner, which is the same where
the source has the order of the user's code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..frontend.graph import Graph
from ..lower.plan import Plan

if TYPE_CHECKING:
    from ..lower.products.plan import ProductPlan

__all__ = ["drawable", "graph_dot", "graph_json", "graph_svg", "plan_svg"]

Names = Mapping[int, str]  # of values, by the ids of their nodes


def drawable() -> bool:
    """Whether matplotlib, which draws the SVG pictures, is installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        if error.name != "matplotlib":
            raise
        return False
    return bool(matplotlib)


def graph_dot(graph: Graph, names: Names | None = None) -> str:
    """The dataflow as DOT text, with a cluster for each stage."""
    from . import dot

    return dot.graph_dot(graph, names)


def graph_json(graph: Graph, names: Names | None = None) -> str:
    """The dataflow as JSON, in the form that `networkx.node_link_graph` reads."""
    from . import node_link

    return node_link.graph_json(graph, names)


def graph_svg(graph: Graph, names: Names | None = None) -> str:
    """The dataflow as SVG, with a band for each stage. Without matplotlib an UnsupportedError."""
    from .flow import draw_graph

    return draw_graph(graph, names).svg()


def plan_svg(plan: Plan | ProductPlan) -> str:
    """A row's or a tile's way through memory as SVG. Without matplotlib an UnsupportedError."""
    if isinstance(plan, Plan):
        from .memory import draw_plan as draw
    else:
        from .products import draw_product_plan as draw

    return draw(plan).svg()


# Notebooks ask an object for its picture by this name. It is given to both classes here, so that
# neither has to know what draws it.
Graph._repr_svg_ = lambda graph: graph_svg(graph) if drawable() else None
Plan._repr_svg_ = lambda plan: plan_svg(plan) if drawable() else None

"""Refuses calls without rows whose result is a maximum over all rows."""

from __future__ import annotations

import math

from ..errors import ArgumentError
from ..frontend.graph import Graph
from ..frontend.ops import Op


def refuse_no_maximum(graph: Graph, lead: tuple[int, ...]) -> None:
    """Raise ArgumentError for a maximum over the rows of a call that has none."""
    if math.prod(lead):
        return
    for output in graph.over_rows:
        if output.over is Op.MAX:
            raise ArgumentError(
                f"{graph.name}: the result {output.name} is a maximum over all rows, and there are "
                f"none (leading shape {lead}); do not call it then"
            )

"""Pieces of which each has one of so many elements of an axis, as one row of bundles.

The pieces `x[0::2]` and `x[1::2]` lie between each other in memory. Loaded one by one, each element
is an access of its own. Here both are parts of one piece, whose elements are pairs: as wide as two,
loaded as any row of elements so wide, and taken apart in registers. Results that are stored so, as
`torch.stack((a, b), -1).flatten()` is, are put together the same way. Of the pieces `x[0::8]` to
`x[7::8]`, four make a bundle of 64 bits, and every second bundle is of the same four.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import torch

from ...frontend.graph import Builder, Graph, Input, Node, Output, Role, View
from ...frontend.ops import WIDE, Op
from .rewrite import Outputs, Rule, rewrite

WIDTHS = 8, 4, 2  # elements of a bundle, the more of them the better


def bundle_neighbours(graph: Graph) -> Graph:
    """The graph with such pieces as bundles; itself where it has none, as most graphs."""
    views = {i.id: _bundle_view(graph, i) for i in graph.inputs}
    views = {id: view for id, view in views.items() if view is not None}
    groups: dict[tuple, list[Output]] = defaultdict(list)
    for output in graph.outputs:
        view = _bundle_view(graph, output)
        if view is not None:
            groups[output.name, view].append(output)
    whole = {key: each for key, each in groups.items() if len(each) == key[1].width}
    if not views and not whole:
        return graph
    return rewrite(graph, _input_rule(graph, views), _outputs(whole))


def _bundle_view(graph: Graph, piece: Input | Output) -> View | None:
    """The piece of bundles that has an input or output; None if it is in none."""
    view, dtype = piece.view, piece.dtype
    is_row = piece.role in (Role.ROW, Role.COLUMN) if isinstance(piece, Input) else piece.is_row
    if isinstance(piece, Output) and piece.over is not None:
        return None  # its elements are added one by one
    if view is None or not view.steps or not is_row or dtype is torch.bool:
        return None
    *outer, step = view.steps
    width = _width(step, dtype)
    if any(outer) or not step or not width:
        return None
    first = view.start[-1] - view.start[-1] % width
    size, far = view.groups or (graph.n, (0,) * len(view.steps))
    end = first + far[-1] * (graph.n // size - 1) + step * (size - 1) + width
    is_beyond = end > view.shape[-1] and isinstance(piece, Output)
    if view.shape[-1] % width or far[-1] % width or is_beyond:
        return None  # a bundle would lie otherwise in the next line, or reach beyond the axis
    start = (*view.start[:-1], first)
    return View(view.shape, start, view.steps, width, dtype, groups=view.groups)


def _width(step: int, dtype: torch.dtype) -> int:
    """How many elements a bundle has, of which each piece has one of every `step`; 0 if none."""
    return next((w for w in WIDTHS if step % w == 0 and w * dtype.itemsize in WIDE), 0)


def _input_rule(graph: Graph, views: dict[int, View]) -> Rule:
    sources = {i.id: i for i in graph.inputs}
    bundles: dict[tuple, int] = {}

    def rule(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        view = views.get(node.id)
        if view is None:
            return None
        source = sources[node.id]
        key = source.name, view
        if key not in bundles:
            wide = WIDE[view.width * source.dtype.itemsize]
            value = replace(node.value, dtype=wide)
            bundles[key] = new.add_input(source.name, source.role, wide, value, view)
        which = source.view.start[-1] - view.start[-1]
        return new.add(Op.UNBUNDLE, (bundles[key],), (which, view.width, source.dtype))

    return rule


def _outputs(groups: dict[tuple, list[Output]]) -> Outputs:
    bundled = {(o.name, o.view): key for key, each in groups.items() for o in each}

    def outputs(new: Builder, found: list[Output]) -> list[Output]:
        waiting: dict[tuple, dict[int, Output]] = defaultdict(dict)
        kept = []
        for output in found:
            key = bundled.get((output.name, output.view))
            if key is None:
                kept.append(output)
                continue
            view = key[1]
            waiting[key][output.view.start[-1] - view.start[-1]] = output
            if len(waiting[key]) == view.width:
                parts = [waiting[key][k].id for k in range(view.width)]
                id = new.add(Op.BUNDLE, parts, output.dtype, new[parts[0]].loc)
                kept.append(replace(output, id=id, dtype=new[id].value.dtype, view=view))
        return kept

    return outputs

"""A graph as DOT text, for Graphviz and whatever else reads it."""

from __future__ import annotations

from collections.abc import Mapping

from ..frontend.graph import Graph
from .model import COLOURS, Box, picture_of
from .names import shorten

LONGEST = 60  # columns of a row of text


def graph_dot(graph: Graph, names: Mapping[int, str] | None = None) -> str:
    """The dataflow as DOT, from top to bottom: the boxes of the picture, a cluster for each stage.

    names: those of the emitted source, by node; without them they are made from the operations.
    """
    picture = picture_of(graph, names)
    lines = [
        f"digraph {_quote(graph.name)} {{",
        f"  graph [labelloc=t, label={_quote(picture.headline)},",
        '         fontname="monospace", fontsize=11, nodesep=0.15, ranksep=0.3];',
        '  node [shape=box, style="filled,rounded", fontname="monospace", fontsize=9];',
        '  edge [color="#77828d", arrowsize=0.6];',
    ]
    for k, band in enumerate(picture.bands):
        lines += [
            f"  subgraph cluster_{k} {{",
            f"    label={_quote(': '.join(filter(None, (band.name, band.what))))};",
            '    style="filled,rounded"; color="#f2f4f6";',
            *(f"    {_node(box)}" for box in picture.boxes if box.stage == band.stage),
            "  }",
        ]
    for edge in picture.edges:
        lines.append(f"  {edge.start} -> {edge.end}{' [penwidth=2]' if edge.wide else ''};")
    return "\n".join([*lines, "}", ""])


def _node(box: Box) -> str:
    fill, border = COLOURS[box.kind]
    rows = [f"× {box.rounds}"] if box.rounds > 1 else []
    rows += [f"{text.left}  {text.right}".rstrip() for text in box.texts]
    label = "".join(_escape(shorten(row, LONGEST)) + r"\l" for row in rows)
    return f'{box.key} [label="{label}", fillcolor="{fill}", color="{border}"];'


def _quote(text: str) -> str:
    return f'"{_escape(shorten(text, 200))}"'


def _escape(text: str) -> str:
    r"""Quotes for DOT, and backslashes, which begin an escape (`\l`, `\N`) in a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"')

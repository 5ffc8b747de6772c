"""A graph as DOT text, for Graphviz and whatever else reads it."""

from __future__ import annotations

from ..frontend.graph import Graph
from .model import COLOURS, Box, picture_of, shorten

LONGEST = 60  # columns of the user's line


def graph_dot(graph: Graph) -> str:
    """The dataflow as DOT: a cluster for each stage, from left to right."""
    picture = picture_of(graph)
    lines = [
        f"digraph {_quote(graph.name)} {{",
        f"  graph [rankdir=LR, labelloc=t, label={_quote(picture.headline)},",
        '         fontname="monospace", fontsize=11, nodesep=0.15, ranksep=0.4];',
        '  node [shape=box, style="filled,rounded", fontname="monospace", fontsize=9];',
        '  edge [color="#77828d", arrowsize=0.6];',
    ]
    for lane, (name, what) in enumerate(picture.lanes):
        label = f"{name}: {what}" if what else name
        lines += [
            f"  subgraph cluster_{lane} {{",
            f'    label={_quote(label)}; style="filled,rounded"; color="#f2f4f6";',
        ]
        lines += [f"    {_node(box)}" for box in picture.boxes if box.lane == lane]
        lines.append("  }")
    wide = {box.key for box in picture.boxes if box.spread}
    for start, end in picture.edges:
        lines.append(f"  {start} -> {end}{' [penwidth=2]' if start in wide else ''};")
    return "\n".join([*lines, "}", ""])


def _node(box: Box) -> str:
    fill, border = COLOURS[box.kind]
    texts = [box.title, box.value, box.where, box.source]
    label = "".join(_escape(shorten(text, LONGEST)) + r"\l" for text in texts if text)
    return f'{box.key} [label="{label}", fillcolor="{fill}", color="{border}"];'


def _quote(text: str) -> str:
    return f'"{_escape(shorten(text, 200))}"'


def _escape(text: str) -> str:
    r"""Quotes for DOT, and backslashes, which begin an escape (`\l`, `\N`) in a label."""
    return text.replace("\\", "\\\\").replace('"', '\\"')

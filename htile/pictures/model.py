"""What a picture of a graph shows: boxes in lanes and the edges between them, as text and numbers.

A constant has no box: it is written into the nodes that read it.
"""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass
from enum import Enum

import torch

from ..frontend.graph import Graph, Node, Role
from ..frontend.ops import REDUCTIONS, Op, dtype_name
from ..lower.reductions import assign_stages


class Kind(Enum):
    """What a box is; decides its colour."""

    ROW = "row"
    COLUMN = "column"
    PER_ROW = "per-row"
    SCALAR = "scalar"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    OUTPUT = "output"


# kind -> (fill, border)
COLOURS = {
    Kind.ROW: ("#cfe3fb", "#1f5fae"),
    Kind.COLUMN: ("#cdeeda", "#1b7a47"),
    Kind.PER_ROW: ("#e6dbf8", "#6a3fb0"),
    Kind.SCALAR: ("#e6e8eb", "#5c6670"),
    Kind.ELEMENTWISE: ("#ffffff", "#77828d"),
    Kind.REDUCTION: ("#fbd5cd", "#b8391f"),
    Kind.OUTPUT: ("#fdebb8", "#a67400"),
}

KIND_OF_ROLE = {
    Role.ROW: Kind.ROW,
    Role.COLUMN: Kind.COLUMN,
    Role.PER_ROW: Kind.PER_ROW,
    Role.SCALAR: Kind.SCALAR,
    Role.DEVICE_SCALAR: Kind.SCALAR,
    Role.STATIC: Kind.SCALAR,
}


@dataclass(frozen=True, slots=True)
class Box:
    """A node (`%3`) or a result (`out`) of the graph; `where` and `source` are the user's line."""

    key: str
    kind: Kind
    lane: int
    title: str
    value: str
    where: str = ""
    source: str = ""
    spread: bool = False


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes in the order of their ids, the keys that each edge joins, the headline of each lane."""

    headline: str
    boxes: tuple[Box, ...]
    edges: tuple[tuple[str, str], ...]
    lanes: tuple[tuple[str, str], ...]


def picture_of(graph: Graph) -> Picture:
    """The boxes of a graph: its stages as lanes, then the lane of what is returned."""
    stage = assign_stages(graph)
    returned = {out.id for out in graph.outputs}
    inputs = {i.id: i for i in graph.inputs}
    last = max(stage.values(), default=0) + 1
    boxes, edges, shown = [], [], set()
    for node in graph:
        if node.op is Op.CONST and node.id not in returned:
            continue
        shown.add(node.id)
        if node.id in inputs:
            leaf = inputs[node.id]
            shape = ",".join(map(str, node.value.inner))
            computed = f"{dtype_name(node.value.dtype)}[{shape}]"
            value = f"{leaf.role.value} {dtype_name(leaf.dtype)} as {computed}"
        else:
            value = str(node.value)
        where, source = (node.loc.short, node.loc.text) if node.loc else ("", "")
        boxes.append(
            Box(
                f"n{node.id}", kind_of(graph, node), stage[node.id], describe(graph, node),
                value, where, source, node.value.spread,
            )
        )  # fmt: skip
        edges += [(f"n{i}", f"n{node.id}") for i in dict.fromkeys(node.inputs) if i in shown]
    for k, out in enumerate(graph.outputs):
        what = "row" if out.is_row else "per-row"
        value = f"{what} {dtype_name(out.dtype)}[{','.join(map(str, out.inner))}]"
        title = f"{out.name} = %{out.id}"
        boxes.append(Box(f"out{k}", Kind.OUTPUT, last, title, value, spread=out.is_row))
        edges.append((f"n{out.id}", f"out{k}"))
    lanes = [("stage 0", "before any reduction")]
    for k in range(1, last):
        ops = [n.op.value for n in graph if stage[n.id] == k and n.op in REDUCTIONS]
        lanes.append((f"stage {k}", f"reduces {', '.join(_counted(ops))}; one barrier"))
    lanes.append(("returned", ""))
    return Picture(
        f"{graph.name}, one row of N = {graph.n}", tuple(boxes), tuple(edges), tuple(lanes)
    )


def _counted(names: list[str]) -> list[str]:
    """`sum`, `2 max`: each name once, in the order of its first place."""
    counts = {name: names.count(name) for name in names}
    return [name if count == 1 else f"{count} {name}" for name, count in counts.items()]


def kind_of(graph: Graph, node: Node) -> Kind:
    """The kind of a node: the role of an input, else what it does."""
    for i in graph.inputs:
        if i.id == node.id:
            return KIND_OF_ROLE[i.role]
    if node.op is Op.CONST:
        return Kind.SCALAR
    return Kind.REDUCTION if node.op in REDUCTIONS else Kind.ELEMENTWISE


def describe(graph: Graph, node: Node) -> str:
    """`%4 = mul %3, 0.5`: the operation, with its constants written in."""
    if node.op in (Op.INPUT, Op.CONST):
        return f"%{node.id} = {node.arg}"
    parts = [operand_text(graph, i) for i in node.inputs]
    if node.arg is not None:
        parts.append(dtype_name(node.arg) if isinstance(node.arg, torch.dtype) else str(node.arg))
    return f"%{node.id} = {node.op.value} {', '.join(parts)}"


def operand_text(graph: Graph, id: int) -> str:
    """An operand as a node's text names it: `%3`, or the constant itself."""
    node = graph[id]
    return str(node.arg) if node.op is Op.CONST else f"%{id}"


def text_width(text: str) -> int:
    """Columns of a monospaced font: wide characters take two, combining ones none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def shorten(text: str, width: int) -> str:
    """The text in at most `width` columns, cut with an ellipsis; one line, printable."""
    text = "".join(c if c.isprintable() else " " for c in text)
    if text_width(text) <= width:
        return text
    while text_width(text) > width - 1:
        text = text[:-1]
    return text.rstrip() + "…"

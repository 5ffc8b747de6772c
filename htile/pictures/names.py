"""What a picture calls the values of a graph, and how it writes their expressions."""

from __future__ import annotations

import textwrap
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from enum import Enum

import torch

from ..frontend.graph import Graph, Node
from ..frontend.ops import Op, Value, dtype_name
from ..lower.emission.names import RESERVED

MOST_NAMES = 8  # rows of names
NAMES_WIDTH = 40  # columns of such a row

INFIX = {
    Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/", Op.FLOORDIV: "//", Op.MOD: "%",
    Op.POW: "**", Op.EQ: "==", Op.NE: "!=", Op.LT: "<", Op.LE: "<=", Op.GT: ">", Op.GE: ">=",
    Op.AND: "&", Op.OR: "|", Op.XOR: "^", Op.LSHIFT: "<<", Op.RSHIFT: ">>",
}  # fmt: skip


def all_names(graph: Graph, known: Mapping[int, str] | None = None) -> dict[int, str]:
    """A name for every node of a graph but its constants.

    `known` has the names of the emitted source. A value that is not in it is named as the source
    names values: the operation and a running number, in the order of ids. A reshaped value has the
    name of its operand, as in the source.
    """
    names = dict(known or {})
    taken = {*RESERVED, *names.values()}
    for leaf in graph.inputs:
        if leaf.id not in names:
            name = leaf.name
            while name in taken:
                name += "_"
            names[leaf.id] = name
            taken.add(name)
    counts: dict[str, int] = {}
    for node in graph:
        if node.op is Op.RESHAPE:
            if (source := strip(graph, node.id)) in names:
                names[node.id] = names[source]
        elif node.op is not Op.CONST and node.id not in names:
            count = counts.get(node.op.value, 0)
            while f"{node.op.value}{count}" in taken:
                count += 1
            names[node.id] = f"{node.op.value}{count}"
            counts[node.op.value] = count + 1
            taken.add(names[node.id])
    return names


def strip(graph: Graph, id: int) -> int:
    """The node that a reshaped value is of, else the node itself."""
    while graph[id].op is Op.RESHAPE:
        (id,) = graph[id].inputs
    return id


def expression(node: Node, operands: Sequence[str]) -> str:
    """What a node computes: `x - max0`, `exp(sub0)`."""
    if node.op in (Op.INPUT, Op.CONST):
        return str(node.arg)
    if node.op is Op.NEG:
        return f"-{operands[0]}"
    if node.op in INFIX:
        left, right = operands
        return f"{left} {INFIX[node.op]} {right}"
    if node.op is Op.GROUPED:
        op, size = node.arg
        return f"{op.value}({operands[0]}) of each {size}"
    arg = dtype_name(node.arg) if isinstance(node.arg, torch.dtype) else node.arg
    arg = arg.value if isinstance(arg, Enum) else arg
    parts = [*operands, *([] if arg is None else [str(arg)])]
    return f"{node.op.value}({', '.join(parts)})"


def type_text(value: Value) -> str:
    """`f32[4096]` of a row, `f32` of one number."""
    shape = ",".join(map(str, value.inner))
    declared = f" as {dtype_name(value.stored)}" if value.stored is not None else ""
    return f"{dtype_name(value.dtype)}{f'[{shape}]' if shape else ''}{declared}"


def span(first: str, last: str) -> str:
    """`0.5 … 47.5`, or the one where both are the same."""
    return first if first == last else f"{first} … {last}"


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


def counted(names: Sequence[str]) -> str:
    """`sum, 2 max`: each name once, with its number, in the order of their first places."""
    counts = Counter(names)
    return ", ".join(name if n == 1 else f"{n} {name}" for name, n in counts.items())


def flowed(names: Sequence[str]) -> list[str]:
    """Names in rows; the first ones and the last where they are very many."""
    rows = textwrap.wrap(", ".join(names), NAMES_WIDTH)
    if len(rows) > MOST_NAMES:
        rows = [*rows[: MOST_NAMES - 1], f"… {names[-1]}: {len(names)} in all"]
    return rows

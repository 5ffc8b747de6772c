"""A graph as JSON, in the node-link form that `networkx.node_link_graph` reads."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum

import torch

from ..frontend.graph import Graph, Node
from ..frontend.ops import dtype_name
from ..lower.reductions import assign_stages
from .model import kind_of
from .names import all_names


def graph_json(graph: Graph, names: Mapping[int, str] | None = None) -> str:
    """The dataflow as JSON: `networkx.node_link_graph(json.loads(text), edges="edges")` reads it.

    A node has all that it has in the graph, its name, its stage and its kind. An edge has the
    positions that it takes among the operands. Numbers that JSON lacks are text: "inf", "-inf",
    "nan". names: those of the emitted source, by node; without them they are made from the
    operations. The name of a constant is null.
    """
    stage, called = assign_stages(graph), all_names(graph, names)
    data = {
        "directed": True,
        "multigraph": False,
        "graph": {
            "name": graph.name,
            "n": graph.n,
            "inputs": [
                {"name": i.name, "role": i.role.value, "dtype": dtype_name(i.dtype), "id": i.id}
                for i in graph.inputs
            ],
            "outputs": [
                {
                    "name": o.name, "id": o.id, "dtype": dtype_name(o.dtype),
                    "inner": list(o.inner), "is_row": o.is_row,
                }
                for o in graph.outputs
            ],
        },
        "nodes": [
            {"id": node.id, "name": called.get(node.id)}
            | _node(node)
            | {"stage": stage[node.id], "kind": kind_of(graph, node).value}
            for node in graph
        ],
        "edges": [
            {
                "source": i,
                "target": node.id,
                "operands": [k for k, other in enumerate(node.inputs) if other == i],
            }
            for i, node in ((n.id, graph[user]) for n in graph for user in graph.users(n.id))
        ],
    }  # fmt: skip
    return json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def _node(node: Node) -> dict[str, object]:
    value, loc = node.value, node.loc
    return {
        "op": node.op.value,
        "inputs": list(node.inputs),
        "arg": _plain(node.arg),
        "inner": list(value.inner),
        "varies": value.varies.value,
        "dtype": dtype_name(value.dtype),
        "stored": None if value.stored is None else dtype_name(value.stored),
        "spread": value.spread,
        "file": loc.file if loc else None,
        "line": loc.line if loc else None,
        "text": loc.text if loc else None,
    }


def _plain(arg: object) -> object:
    """A static argument as JSON has it."""
    if isinstance(arg, torch.dtype):
        return dtype_name(arg)
    if isinstance(arg, Enum):
        return arg.value
    if isinstance(arg, tuple):
        return [_plain(a) for a in arg]
    if isinstance(arg, float) and not math.isfinite(arg):
        return str(arg)
    return arg if arg is None or isinstance(arg, bool | int | float | str) else repr(arg)

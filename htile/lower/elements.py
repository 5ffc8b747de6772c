"""Which values are elements of a row that the kernel computes too.

`p[label]` of a computed row is computed from the element of the input at that index, so that no
thread has to ask another one for it. `p[1:]` is computed from a row that is loaded once more. Both
have to be computed by the same device functions as the row. Otherwise `(p > p[label]).sum()`, the
rank of a label, would count the label itself where the two are rounded differently.

`elements` finds them where the kernel reads all of the row. Elsewhere a value may be an element of
the row or not, as `x[0].exp()` beside `x[1:].exp()`. There `alike` finds what is computed in the
same way, and `functions_of_alike` gives all of it one function.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

import torch

from ..frontend.graph import Graph, Node, Role
from ..frontend.ops import COLLECTIVES, ELEMENTWISE, Op
from .patterns import Function, choose_function, strip

FUSED = (Function.FMA, Function.FMS, Function.FNMA)  # of the factors of a product
# These follow from who reads a value, and nobody compares what they give with another value.
BY_READERS = frozenset({
    Function.FACTORS, Function.GELU, Function.INDEXED, Function.NEAR, Function.QUOTIENT,
    Function.ELEMENT, Function.COLUMNS, Function.FOURS,
})  # fmt: skip
Chosen = tuple[Function, tuple[int, ...]]  # a device function, and the nodes that it takes


def elements(graph: Graph) -> dict[int, Node]:
    """The node of the row, by the id of each value whose elements are some of the row's.

    They are found only if the kernel reads the whole row or column that an argument is. A value
    computed from several arguments is an element only if it takes the same element of each.
    """
    taken = [i for i in graph.inputs if i.role is Role.TAKEN]
    parts = [i for i in graph.inputs if i.view is not None]
    if not taken and not parts:
        return {}
    whole = {i.name: i for i in graph.inputs if i not in taken and i not in parts}
    whole = {name: i for name, i in whole.items() if graph[i.id].value.spread}
    read = [i for i in (*taken, *parts) if i.name in whole and i.dtype is whole[i.name].dtype]
    if not read:
        return {}
    row_of = {i.id: graph[whole[i.name].id] for i in read}
    rows = {_done(graph, node, {}): node for node in reversed(graph.nodes) if node.value.spread}
    views = {i.id: i.view for i in read}
    found: dict[int, Node] = {}
    places: dict[int, object] = {}  # which elements of the row each of them has
    for node in graph:
        if node.op in COLLECTIVES or node.op is Op.GROUPED:
            continue
        if node.op is Op.INPUT:
            row, place = row_of.get(node.id), views.get(node.id)
        elif node.op in (Op.TAKE, Op.GATHER):
            row, place = row_of.get(node.inputs[0]), (views.get(node.inputs[0]), node.inputs[1])
        else:
            operands = [strip(graph, operand) for operand in graph.operands(node)]
            at = {places[operand.id] for operand in operands if operand.id in found}
            others = [operand for operand in operands if operand.id not in found]
            is_one = len(at) == 1 and not any(
                [each.value.spread and each.op is not Op.CONST for each in others]
            )
            row = rows.get(_done(graph, node, found)) if is_one else None
            place = next(iter(at), None)
        if row is not None:
            found[node.id], places[node.id] = row, place
    return found


def _done(graph: Graph, node: Node, elements: Mapping[int, Node]) -> tuple:
    """What a node does with which operands; the row stands for each of its elements."""
    operands = []
    for operand in graph.operands(node):
        operand = strip(graph, operand)
        operand = elements.get(operand.id, operand)
        is_number = operand.op is Op.CONST
        operands.append((repr(operand.arg), operand.value.dtype) if is_number else operand.id)
    return node.op, repr(node.arg), *operands


def alike(graph: Graph) -> list[list[Node]]:
    """Groups of values that are computed in the same way of elements of the same arguments.

    Which elements they are is not asked: one value may be an element of another, or its neighbour.
    """
    if not any([i.role is Role.TAKEN or i.view is not None for i in graph.inputs]):
        return []
    whole = (Role.ROW, Role.COLUMN, Role.TAKEN)
    arguments = {i.id: i.name for i in graph.inputs if i.view is not None or i.role in whole}
    numbers: dict[tuple, int] = {}
    ways: list[int] = []  # for each node the number of the way in which it is computed
    groups: dict[int, list[Node]] = defaultdict(list)
    for node in graph:
        of = [ways[i] for i in node.inputs]
        if node.op in (Op.UNBUNDLE, Op.TAKE, Op.GATHER, Op.RESHAPE):
            ways.append(of[0])
            continue
        if node.op is Op.WHERE and (part := _joined_part(graph, node, ways)) is not None:
            ways.append(ways[part])
            continue
        way: tuple = ("value", node.id)
        if node.id in arguments:
            way = ("argument", arguments[node.id])
        elif node.op is Op.CONST:
            way = ("number", repr(node.arg), node.value.dtype)
        elif node.op in ELEMENTWISE:
            way = (node.op, repr(node.arg), *of)
        ways.append(numbers.setdefault(way, len(numbers)))
        if node.op in ELEMENTWISE and node.value.dtype is torch.float32:
            groups[ways[-1]].append(node)
    return [group for group in groups.values() if len(group) > 1]


def _joined_part(graph: Graph, choice: Node, ways: list[int]) -> int | None:
    """One of the parts that a choice by columns joins, or the one that numbers are beside."""
    _, a, b = choice.inputs
    if ways[a] == ways[b] or graph[b].op is Op.CONST:
        return a
    return b if graph[a].op is Op.CONST else None


def functions_of_alike(
    graph: Graph, group: list[Node], chosen: Mapping[int, Chosen], fastmath: bool
) -> dict[int, Chosen]:
    """The functions of values that are computed alike, where they would not be the same.

    All take the function of the rows among them. They take the exact one if the rows differ, and in
    place of a function for a limited range, because a neighbour may lie beyond it.

    chosen: what each of them would take, by their ids.
    """
    group = [node for node in group if chosen[node.id][0] not in BY_READERS]
    rows = [node for node in group if node.value.spread]
    kinds = {_kind(graph, node, chosen[node.id][0]) for node in group}
    if len(kinds) < 2 or not rows:
        return {}
    of_rows, row = {chosen[each.id][0] for each in rows}, rows[0]
    is_one = len(of_rows) == 1 and Function.BOUNDED not in kinds
    if is_one and (of_rows.isdisjoint(FUSED) or _have_products(graph, group, row)):
        both = fastmath, False
        return {node.id: function_of_element(graph, node, row, *both) for node in group}
    return {node.id: (_exact(graph, node, row), node.inputs) for node in group}


def _have_products(graph: Graph, group: list[Node], row: Node) -> bool:
    """Whether each of these has a product of its own where that row has the one that it fuses."""
    place = next(k for k, id in enumerate(row.inputs) if graph[id].op is Op.MUL)
    return all([strip(graph, graph[node.inputs[place]]).op is Op.MUL for node in group])


def _kind(graph: Graph, node: Node, function: Function) -> Function:
    """The function, where an exact division by a number of the row is one by a shared divisor."""
    is_exact = function is Function.EXACT and node.value.spread
    is_shared = node.op is Op.DIV and not graph[node.inputs[1]].value.spread
    return Function.SHARED if is_exact and is_shared else function


def _exact(graph: Graph, node: Node, row: Node) -> Function:
    """The exact function that gives a value the bits of that row's elements."""
    is_value = node.op is Op.DIV and not node.value.spread
    is_shared = is_value and not graph[row.inputs[1]].value.spread
    return Function.SHARED if is_shared else Function.EXACT


def function_of_element(graph: Graph, node: Node, row: Node, fastmath: bool, near: bool) -> Chosen:
    """The device function for elements of a row that is computed too, and the nodes it takes.

    row: the node of the row.
    near: whether the elements are only seen in 16 bits.
    """
    function, _ = choose_function(graph, row, fastmath, near)
    if function in FUSED:
        factors = next(k for k, id in enumerate(row.inputs) if graph[id].op is Op.MUL)
        rest = [id for k, id in enumerate(node.inputs) if k != factors]
        product = strip(graph, graph[node.inputs[factors]])
        return function, (*product.inputs, *rest)
    if function in (Function.FACTORS, Function.GELU, Function.INDEXED):
        return choose_function(graph, node, fastmath, near)  # by who reads this one
    is_divided = node.op is Op.DIV and function is Function.EXACT and not node.value.spread
    if is_divided and not graph[row.inputs[1]].value.spread:  # as elements by what a row has once
        return Function.SHARED, node.inputs
    return function, node.inputs

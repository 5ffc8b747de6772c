"""Which values are elements of a row that the kernel computes too.

`p[label]` of a computed row is computed from the element of the input at that index, so that no
thread has to ask another one for it. `p[1:]` is computed from a row that is loaded once more. Both
have to be computed by the same device functions as the row. Otherwise `(p > p[label]).sum()`, the
rank of a label, would count the label itself where the two are rounded differently.
"""

from __future__ import annotations

from collections.abc import Mapping

from ..frontend.graph import Graph, Node, Role
from ..frontend.ops import COLLECTIVES, Op
from .patterns import Function, choose_function, strip

FUSED = (Function.FMA, Function.FMS, Function.FNMA)  # of the factors of a product


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


def function_of_element(
    graph: Graph, node: Node, row: Node, fastmath: bool, near: bool
) -> tuple[Function, tuple[int, ...]]:
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

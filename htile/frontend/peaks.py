"""What does not depend on a maximum, although it is computed with it.

Softmax and its kin subtract the maximum of a row, and are the same for any other number there. So
that maximum has no part in their derivative, and its ties need not be counted. The proof: let the
maximum grow by d, and give each node how it changes with that: it grows by k d, by k d times a
value that does not change, or by the factor exp(k d). If no output changes, their derivative with
respect to the maximum is 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from .graph import Graph, Node
from .ops import MOVEMENTS, Op
from .slopes import Slope


class Change(NamedTuple):
    """How a value changes with a maximum.

    is_factor: whether it grows by the factor exp(k d); if not, it grows by k d.
    k: how much; 0 for what does not change.
    times: the node that k d is multiplied by, which does not change; None for 1.
    along: the shape of d in the value: it has size 1 where d is the same along an axis, and no
        such sizes before others.
    """

    is_factor: bool
    k: float
    along: tuple[int, ...] = ()
    times: int | None = None


STILL = Change(False, 0.0)
# Less of k than this is taken for 0: Python's numbers are rounded, as in n * (1 / n) - 1.
ROUNDED = 1e-12


def independent_peaks(graph: Graph, outputs: Iterable[int]) -> frozenset[int]:
    """The maxima and minima of floats that none of the outputs depends on, as if they were given.

    The larger or smaller of two values that a row has once is one of them: max(x).clamp(min=0).

    Where a maximum is infinite, the outputs may depend on it.
    """
    outputs = tuple(outputs)
    peaks = [n.id for n in graph if _is_extreme(n) and n.value.dtype.is_floating_point]
    return frozenset(id for id in peaks if _is_independent(graph, id, outputs))


def _is_extreme(node: Node) -> bool:
    """Whether it is the largest or smallest of a row, or of two values that a row has once."""
    return node.op in (Op.MAX, Op.MIN) or (
        node.op in (Op.MAXIMUM, Op.MINIMUM) and not node.value.spread
    )


def _is_independent(graph: Graph, peak: int, outputs: tuple[int, ...]) -> bool:
    # Nodes that do not change have no entry, and those whose change is not known have None.
    own = Change(False, 1.0, _stripped(graph[peak].value.inner))
    changes: dict[int, Change | None] = {peak: own}
    for node in graph.nodes[peak + 1 :]:
        if changes.keys().isdisjoint(node.inputs):
            continue
        change = _change(graph, node, peak, changes)
        if change is None or change.k:
            changes[node.id] = change
    return not any(id in changes for id in outputs)


def _change(
    graph: Graph, node: Node, peak: int, changes: dict[int, Change | None]
) -> Change | None:
    """How a node changes that reads one that does; None if that is not known."""
    op, inputs = node.op, node.inputs
    if op is Op.EQ and _is_infinite(graph, node, peak):
        return STILL
    if op in (Op.EQ, Op.NE) and inputs[0] == inputs[1]:  # whether it is NaN
        return STILL
    if op is Op.WHERE and inputs[0] not in changes:
        if _is_of_infinite(graph, graph[inputs[0]], peak):  # what stands for an infinite maximum
            return changes.get(inputs[2], STILL)
    if op is Op.WHERE and node.arg is Slope.LAST:
        last = changes.get(inputs[2], STILL)
        return None if last is None or last.is_factor else last
    own = [changes.get(i, STILL) for i in inputs]
    if None in own:
        return None
    first = own[0]
    moved = [c for c in own if c.k]
    along = moved[0].along
    if any(c.along != along for c in moved):
        return None
    if op in (Op.NEG, Op.CAST, Op.CONVERT):
        if op is not Op.NEG and not node.value.dtype.is_floating_point:
            return None
        return first._replace(k=-first.k) if op is Op.NEG and not first.is_factor else first
    if op in (Op.ADD, Op.SUB):
        if first == own[1]:
            return STILL if op is Op.SUB and not first.is_factor else _doubled(first)
        if any(c.is_factor or c.times != moved[0].times for c in moved):
            return None
        k = first.k + own[1].k * (1 if op is Op.ADD else -1)
        is_rounding = abs(k) <= ROUNDED * abs(first.k)
        return STILL if is_rounding else moved[0]._replace(k=k)
    if op is Op.EXP and not first.is_factor and first.times is None:
        return first._replace(is_factor=True)
    if op is Op.LOG and first.is_factor:
        return first._replace(is_factor=False)
    if op in (Op.SQRT, Op.RSQRT) and first.is_factor:
        return first._replace(k=first.k * (0.5 if op is Op.SQRT else -0.5))
    if op in (Op.MUL, Op.DIV):
        if all(c.is_factor for c in moved):
            return Change(True, first.k + own[1].k * (1 if op is Op.MUL else -1), along)
        return _scaled(graph, node, own)
    if op is Op.WHERE and not own[0].k:
        return own[1] if own[1] == own[2] else None
    if op in MOVEMENTS:
        return _moved(graph, node, own) if first.times is None else None
    if op in (Op.SUM, Op.MEAN) and not first.is_factor:
        return _added_up(graph, node, first)
    if op in (Op.SUM, Op.MEAN) or (op in (Op.MAX, Op.MIN) and not first.is_factor):
        return _reduced(node, first) if first.times is None else None
    if op in (Op.CUMSUM, Op.SUM_FROM_END) and first.is_factor:
        return first if _size_of(first.along, node.arg or -1) == 1 else None
    return None


def _doubled(change: Change) -> Change:
    """How the sum of two values changes that both change so, or the difference of two factors."""
    return change if change.is_factor else change._replace(k=2 * change.k)


def _scaled(graph: Graph, node: Node, own: list[Change]) -> Change | None:
    """Of a product with what does not change, or a quotient by a constant."""
    for value, number in ((0, 1), (1, 0)) if node.op is Op.MUL else ((0, 1),):
        change, other = own[value], graph[node.inputs[number]]
        if own[number].k or change.is_factor:
            continue
        if other.op is Op.CONST:
            k = change.k
            return change._replace(k=k * other.arg if node.op is Op.MUL else k / other.arg)
        if node.op is Op.MUL and change.times is None:
            return change._replace(times=other.id)
    return None


def _added_up(graph: Graph, node: Node, change: Change) -> Change | None:
    """Of a sum or a mean of what grows by k d, or by k d times values whose sum is a node, too."""
    reduced = _reduced(node, change)
    if reduced is None:
        return None
    if change.times is None:
        count = graph[node.inputs[0]].value.inner[node.arg or -1] if node.op is Op.SUM else 1
        return reduced._replace(k=change.k * count)
    value = graph[change.times].value
    if value.inner != graph[node.inputs[0]].value.inner:
        return None
    same = (each.id for each in graph if (each.op, each.inputs, each.arg) == (
        node.op, (change.times,), node.arg))  # fmt: skip
    found = next(same, None)
    return None if found is None else reduced._replace(times=found)


def _moved(graph: Graph, node: Node, own: list[Change]) -> Change | None:
    """Of a movement: of a d that is one number, or where only axes of size 1 come or go."""
    first = own[0]
    if any(c != first for c in own):
        return None
    if not first.along or node.op is Op.EXPAND:
        return first
    old, new = graph[node.inputs[0]].value.inner, node.value.inner
    if node.op is not Op.RESHAPE or [n for n in old if n > 1] != [n for n in new if n > 1]:
        return None
    pairs = zip(_padded(first.along, len(old)), old, strict=True)
    sizes = iter([n for n, size in pairs if size > 1])
    return first._replace(along=_stripped([next(sizes) if n > 1 else 1 for n in new]))


def _reduced(node: Node, change: Change) -> Change | None:
    """Of a reduction along an axis that d is the same along."""
    axis = node.arg or -1
    if _size_of(change.along, axis) != 1:
        return None
    sizes = list(_padded(change.along, -axis))
    del sizes[axis]
    return change._replace(along=_stripped(sizes))


def _size_of(along: tuple[int, ...], axis: int) -> int:
    return along[axis] if len(along) >= -axis else 1


def _padded(along: tuple[int, ...], rank: int) -> tuple[int, ...]:
    return (1,) * (rank - len(along)) + along


def _stripped(sizes: Iterable[int]) -> tuple[int, ...]:
    sizes = tuple(sizes)
    while sizes and sizes[0] == 1:
        sizes = sizes[1:]
    return sizes


def _is_infinite(graph: Graph, node: Node, peak: int) -> bool:
    """Whether a comparison asks if the maximum is infinite."""
    value, number = graph.operands(node)
    if number.op is not Op.CONST or not isinstance(number.arg, float) or not math.isinf(number.arg):
        return False
    value = _without_shape(graph, value)
    value = _without_shape(graph, graph[value.inputs[0]]) if value.op is Op.ABS else value
    return value.id == peak


def _is_of_infinite(graph: Graph, node: Node, peak: int) -> bool:
    node = _without_shape(graph, node)
    return node.op is Op.EQ and _is_infinite(graph, node, peak)


def _without_shape(graph: Graph, node: Node) -> Node:
    while node.op is Op.RESHAPE:
        node = graph[node.inputs[0]]
    return node

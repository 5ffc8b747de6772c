"""Sums over axes in a derivative, taken apart where that leaves fewer reductions.

A reduction costs more than anything else that a kernel does. So factors that a row has once leave a
sum, the sum of `x - mean(x)` is 0, and a sum that the graph has already is not taken again.
"""

from __future__ import annotations

from math import prod

from .algebra import Algebra, others
from .graph import Node
from .ops import Op

_SPREAD_OVER = (Op.MUL, Op.DIV, Op.NEG)  # what a factor is found under


def total(
    algebra: Algebra, a: int, shape: tuple[int, ...], spread: bool, axes: tuple[int, ...]
) -> int:
    """The sum over axes of what `a` stands for, which has this shape; they have size 1 then."""
    for axis in axes:
        if shape[axis] > 1 and not _has_axis(algebra, a, axis, shape):
            return algebra.mul(
                total(algebra, a, shape, spread, tuple(x for x in axes if x != axis)),
                algebra.count(shape[axis], spread and axis == -1),
            )
    own = tuple(axis for axis in axes if _has_axis(algebra, a, axis, shape))
    return _sum(algebra, a, own) if own else a


def _has_axis(algebra: Algebra, a: int, axis: int, shape: tuple[int, ...]) -> bool:
    """Whether a value has an axis of what has this shape, and is not the same along it.

    A row of one element has its axis, although that has size 1.
    """
    v = algebra[a].value
    if len(v.inner) < -axis:
        return False
    return v.inner[axis] > 1 or (axis == -1 and v.spread and shape[axis] == 1)


def _has_any(algebra: Algebra, a: int, axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    return any(_has_axis(algebra, a, axis, shape) for axis in axes)


def _sum(algebra: Algebra, a: int, axes: tuple[int, ...]) -> int:
    if _is_deviation(algebra, a, axes):
        return algebra.number(0.0)
    node, shape = algebra[a], algebra.inner(a)
    if a in algebra.kept:
        return _reduced(algebra, a, axes)
    is_sum = node.op in (Op.ADD, Op.SUB)
    if is_sum and any(_sums_early(algebra, i, axes, shape) for i in node.inputs):
        v = node.value
        first, second = (total(algebra, i, v.inner, v.spread, axes) for i in node.inputs)
        return algebra.add(first, second) if node.op is Op.ADD else algebra.sub(first, second)
    factors, divisors, rest = _factors(algebra, a, axes, shape)
    if not factors and not divisors:
        return _reduced(algebra, a, axes)
    result, divisors = _known_sum(algebra, rest, divisors, axes)
    if result is None:
        product = rest[0]
        for each in rest[1:]:
            product = algebra.mul(product, each)
        if not all(_has_axis(algebra, product, axis, shape) for axis in axes):  # it is a number
            return _reduced(algebra, a, axes)
        result = _sum(algebra, product, axes)
    for each in factors:
        result = algebra.mul(result, each)
    for each in divisors:
        result = algebra.div(result, each)
    return result


def _factors(
    algebra: Algebra, a: int, axes: tuple[int, ...], shape: tuple[int, ...]
) -> tuple[list[int], list[int], list[int]]:
    """The factors and divisors of a product that lack all axes, and its other factors.

    shape: that of what is summed.
    """
    factors, divisors, rest, todo = [], [], [], [a]
    while todo:
        id = todo.pop()
        node = algebra[id]
        if not _has_any(algebra, id, axes, shape):
            factors.append(id)
        elif id in algebra.kept or node.op not in _SPREAD_OVER:
            rest.append(id)
        elif node.op is Op.MUL:
            todo += node.inputs
        elif node.op is Op.NEG:
            factors.append(algebra.number(-1.0))
            todo += node.inputs
        elif not _has_any(algebra, node.inputs[1], axes, shape):
            divisors.append(node.inputs[1])
            todo.append(node.inputs[0])
        else:
            rest.append(id)
    return sorted(factors), sorted(divisors), sorted(rest)


def _known_sum(
    algebra: Algebra, factors: list[int], divisors: list[int], axes: tuple[int, ...]
) -> tuple[int | None, list[int]]:
    """The sum of a product of two that the graph has, and the divisors that are left then.

    The product may be that of one factor and of the other one over a divisor: a softmax's share.
    """
    if len(factors) != 2 or len(axes) != 1:
        return None, divisors
    products = [(algebra.known(Op.MUL, *factors), divisors)]
    for divisor in divisors:
        for factor, other in (factors, factors[::-1]):
            quotient = algebra.known(Op.DIV, factor, divisor)
            if quotient is not None:
                products.append((algebra.known(Op.MUL, quotient, other), others(divisors, divisor)))
    for product, left in products:
        if product is not None:
            axis = axes[0] if len(algebra.inner(product)) > 1 else None
            if algebra.known(Op.SUM, product, arg=axis) is not None:
                return _reduced(algebra, product, axes), left
    return None, divisors


def _sums_early(algebra: Algebra, a: int, axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether the sum of a term is 0, or can begin before all factors of the term are known."""
    if not _has_any(algebra, a, axes, shape):
        return algebra.stages[a] > 0
    factors, divisors, rest = _factors(algebra, a, axes, shape)
    is_zero = len(rest) == 1 and _is_deviation(algebra, rest[0], axes)
    return is_zero or any(algebra.stages[i] > 0 for i in (*factors, *divisors))


def _is_deviation(algebra: Algebra, a: int, axes: tuple[int, ...]) -> bool:
    """Whether it is `x - mean(x)` along these axes, of which the mean has one value each."""
    node = algebra[a]
    if node.op is not Op.SUB or len(axes) != 1:
        return False
    x, average = node.inputs
    shape = algebra.inner(a)
    if _has_axis(algebra, average, axes[0], shape) or not _is_beside(algebra, x, average, axes[0]):
        return False
    average, v = algebra[algebra.unshaped(average)], algebra[x].value
    if average.op is Op.DIV and _has_axis(algebra, x, axes[0], shape):
        if average.inputs[1] != algebra.count(v.inner[axes[0]], v.spread and axes[0] == -1):
            return False
        average = algebra[average.inputs[0]]
        return average.op is Op.SUM and average.inputs == (x,) and _axis(average) == axes[0]
    return average.op is Op.MEAN and average.inputs == (x,) and _axis(average) == axes[0]


def _is_beside(algebra: Algebra, x: int, average: int, axis: int) -> bool:
    """Whether a mean over an axis of x stands beside the elements that it is the mean of.

    In a square, or in its own axes turned round, it may stand beside others.
    """
    kept, own = [*algebra.inner(x)], [*algebra.inner(average)]
    kept[axis] = 1
    for shape in (kept, own):
        while shape and shape[0] == 1:
            del shape[0]
    return kept == own


def _reduced(algebra: Algebra, a: int, axes: tuple[int, ...]) -> int:
    inner = algebra.inner(a)
    kept = tuple(1 if k - len(inner) in axes else size for k, size in enumerate(inner))
    if len(axes) > 1 and axes == tuple(range(-len(axes), 0)) and algebra[a].value.spread:
        # the last axes as one, as htile.frontend.reductions has it
        a = algebra.reshape(a, (*inner[: -len(axes)], prod(inner[-len(axes) :])))
        axes = (-1,)
    for axis in axes:  # those before it are gone, and it counts from the last
        a = algebra.node(Op.SUM, a, arg=axis if len(algebra.inner(a)) > 1 else None)
    while len(kept) > algebra[a].value.spread and kept[0] == 1:  # but for that of a row of one
        kept = kept[1:]
    return algebra.reshape(a, kept)


def _axis(node: Node) -> int:
    return -1 if node.arg is None else node.arg

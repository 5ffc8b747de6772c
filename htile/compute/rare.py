"""Elements for which a function has another, longer way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32

from htile.compute.operands import Vector, make_vector, select


@cute.jit
def unless_rare(
    any_rare: Boolean, usual: cutlass.Constexpr, each: cutlass.Constexpr, *operands: Vector
) -> Vector:
    """The function `usual` of vectors of floats, or if one of a thread's elements is rare, `each`.

    `each` takes one element of each operand after the other, in a loop, so that its code, which is
    long, is there once. It gives the bits of `usual` for elements that are not rare: what an
    element becomes may not depend on its neighbours.
    """
    result = operands[0]
    if any_rare:
        result = _one_by_one(each, operands)
    else:
        result = usual(*operands)
    return result


@cute.jit
def _one_by_one(each: cutlass.Constexpr, operands: tuple[Vector, ...]) -> Vector:
    count = cute.size(operands[0].shape)
    flat = [x.reshape((count,)) for x in operands]  # A vector keeps what indexing it makes here.
    # Results take the places of the first operand, so that both need no more registers than one.
    result, others = flat[0], [[x[k] for k in range(count)] for x in flat[1:]]
    for i in cutlass.range(count, unroll=1):
        numbers = [[result[k] for k in range(count)], *others]
        elements = [cute.full((1,), _element(x, i), Float32) for x in numbers]
        result = _with_element(result, i, each(*elements)[0])
    return result.reshape(operands[0].shape)


def _element(numbers: list[Float32], i: Int32) -> Float32:
    """The number at this place, by selects: an array that has an index is in local memory."""
    found = numbers[0]
    for k, number in enumerate(numbers):
        found = select(i == k, number, found)
    return found


def _with_element(x: Vector, i: Int32, value: Float32) -> Vector:
    """The vector with another element at this place."""
    values = [select(i == k, value, x[k]) for k in range(cute.size(x.shape))]
    return make_vector(values, x.shape, Float32)


def extreme(x: Vector, of_two: Callable) -> Float32:
    """The largest element of a thread if `of_two` is `cute.arch.fmax`, the smallest if fmin."""
    return functools.reduce(of_two, [x[i] for i in range(cute.size(x.shape))])

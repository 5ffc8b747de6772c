"""Elements for which a function has another, longer way."""

from __future__ import annotations

import functools
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32

from htile.compute.operands import Vector


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
    shape = operands[0].shape
    count = cute.size(shape)
    numbers = [_stored(x, count) for x in operands]
    for i in cutlass.range(count, unroll=1):
        elements = [cute.full((1,), x[i], Float32) for x in numbers]
        numbers[0][i] = each(*elements)[0]
    return numbers[0].load().reshape(shape)


def _stored(x: Vector, count: int) -> cute.Tensor:
    """The elements in memory of the thread, of which a loop takes one after the other."""
    stored = cute.make_rmem_tensor(count, Float32)
    stored.store(x.reshape((count,)))
    return stored


def extreme(x: Vector, of_two: Callable) -> Float32:
    """The largest element of a thread if `of_two` is `cute.arch.fmax`, the smallest if fmin."""
    return functools.reduce(of_two, [x[i] for i in range(cute.size(x.shape))])

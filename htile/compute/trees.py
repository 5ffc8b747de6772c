"""The order in which a thread combines its vectors of a held row.

It is a halving tree: vector k is combined with vector k + n / 2, and so on. A vector without a
partner waits for the next step. All vectors may be there at once (`combine_vectors`), or come one
after the other (`VectorTree`). Then they come in the order of `leaves`, so that few have to wait.
Both give the same bits.
"""

from __future__ import annotations

from functools import cache, partial

import cutlass.cute as cute

from htile.compute.operands import Vector
from htile.compute.products import Product
from htile.compute.reduce import combine, combine_terms

Node = int | tuple["Node", "Node"]  # a vector's number, or what is combined


@cache
def _tree(count: int) -> Node:
    nodes: list[Node] = list(range(count))
    while len(nodes) > 1:
        half = len(nodes) // 2
        nodes = [*zip(nodes[:half], nodes[half : 2 * half], strict=True), *nodes[2 * half :]]
    return nodes[0]


@cache
def leaves(count: int) -> tuple[int, ...]:
    """The numbers of so many vectors, in the order in which they are combined."""

    def of(node: Node) -> tuple[int, ...]:
        return (node,) if isinstance(node, int) else of(node[0]) + of(node[1])

    return of(_tree(count))


@cache
def _joins(count: int) -> tuple[int, ...]:
    """After each vector, in the order of `leaves`, how many pairs are complete."""

    def of(node: Node) -> tuple[int, ...]:
        if isinstance(node, int):
            return (0,)
        *others, last = of(node[1])
        return (*of(node[0]), *others, last + 1)

    return of(_tree(count))


class VectorTree:
    """What is combined of vectors that come one after the other.

    dtype: that of the values. Booleans are combined as integers.
    """

    def __init__(self, op: cute.ReductionOp, count: int):
        self.op, self.dtype = op, None
        self._waiting: list[Vector | Product] = []
        self._left = list(_joins(count))

    def take(self, value: Vector | Product, dtype: type) -> None:
        """Add the next vector, whose elements are numbers; `dtype` is that of the value."""
        self.dtype = dtype
        self._waiting.append(value)
        for _ in range(self._left.pop(0)):
            first, second = self._waiting[-2:]
            self._waiting[-2:] = [combine(self.op, first, second)]

    @property
    def total(self) -> Vector | Product:
        """What all vectors are combined to."""
        (total,) = self._waiting
        return total


def combine_vectors(x: Vector | Product, vec_size: int, op: cute.ReductionOp) -> Vector | Product:
    """What a thread's vectors are combined to, of a vector that has all of them.

    Of 2 ** k vectors it is left to `thread_reduce`, which takes them in the same order.
    """
    count = cute.size(x.shape) // vec_size
    if count & (count - 1) == 0:
        return x

    def vector(elements: Vector, k: int) -> Vector:
        return elements.reshape((vec_size, count))[None, k]

    if isinstance(x, Product):
        return combine_terms([x.map(partial(vector, k=k)) for k in range(count)], op)
    return combine_terms([vector(x, k) for k in range(count)], op)

"""Products that are added: every fma that a kernel has is one that its text asks for.

No compiler makes an fma of its own accord (`build/compile.py` tells it not to), because which
product it would pick depends on what else is in the kernel, and so would the bits of a result.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import cutlass.cute as cute
from cutlass import Float32

from htile.compute.operands import Operand, Vector, elementwise


class Product:
    """The product a * b of Float32 numbers, which a sum over the row alone reads.

    The sum adds it by fma, so that the product itself is not rounded. The factors are vectors, or
    scalars and numbers until `map` has made vectors of them.
    """

    dtype = Float32

    def __init__(self, a: Operand, b: Operand):
        self.a, self.b = a, b

    @property
    def shape(self) -> tuple:
        """The shape of both factors."""
        return self.a.shape

    def map(self, function: Callable[[Operand], Vector]) -> Product:
        """The product of what `function` makes of each factor."""
        return Product(function(self.a), function(self.b))

    def reshape(self, shape: tuple) -> Product:
        """The same product, with both factors in another shape."""
        return self.map(lambda factor: factor.reshape(shape))

    def rounded(self) -> Vector:
        """The product as a vector: each element is rounded once."""
        return self.a * self.b

    def plus(self, c: Vector) -> Vector:
        """The sum a * b + c: each element is rounded once."""
        return cute.math.fma(self.a, self.b, c)


def product(a: Operand, b: Operand) -> Product:
    """The product a * b for a sum over the row."""
    return Product(a, b)


@elementwise
def fma(a, b, c):
    """The sum a * b + c, rounded once."""
    return cute.math.fma(a, b, c)


def polynomial(x: Vector, coefficients: Sequence[float]) -> Vector:
    """The polynomial with these coefficients, that of x ** 0 first, by Horner's rule."""
    total = cute.full_like(x, coefficients[-1])
    for coefficient in reversed(coefficients[:-1]):
        total = cute.math.fma(total, x, cute.full_like(x, coefficient))
    return total


@elementwise
def fms(a, b, c):
    """The difference a * b - c, rounded once."""
    return cute.math.fma(a, b, -c)


@elementwise
def fnma(a, b, c):
    """The difference c - a * b, rounded once."""
    return cute.math.fma(-a, b, c)

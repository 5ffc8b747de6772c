"""Products of rows and small matrices, each as sums of products.

Along the columns a product is a reduction. The other axes are written out, so such a matrix has few
rows or few columns: it is no matter of tensor cores. Large ones are arguments that are annotated
htile.Matrix (htile.frontend.matrices).
"""

from __future__ import annotations

from ..errors import ShapeError, UnsupportedError
from .functions import implements
from .matrices import is_matrix, multiplied
from .parts import MOST_PARTS, stack
from .promotion import alike, floating
from .reductions import sum
from .shapes import unsqueeze
from .tensor import Tensor, fail

SIZES = {"matmul": ((1, 2), (1, 2)), "mm": ((2,), (2,)), "mv": ((2,), (1,)), "dot": ((1,), (1,))}

KINDS = {1: "a row", 2: "a small matrix"}


def product(a: object, b: object, what: str) -> Tensor:
    """The product of rows and matrices, each with as many axes as `what` takes."""
    if isinstance(b, Tensor) and is_matrix(b):
        return multiplied(a, b, what)
    shapes = [tuple(x._sizes) if isinstance(x, Tensor) else x for x in (a, b)]
    told = f"{what} of values of shapes {shapes[0]} and {shapes[1]}"
    for x, counts in zip((a, b), SIZES[what], strict=True):
        if not isinstance(x, Tensor) or x.ndim not in counts:
            each = " or ".join(KINDS[count] for count in counts)
            fail(ShapeError, f"{told}: expected {each}; a batch is leading dimensions, or one "
                 "matrix after the other in x.unbind()")  # fmt: skip
    if a._sizes[-1] != b._sizes[0]:
        fail(ShapeError, f"{told}: the last axis of the first must be as long as the first "
             "axis of the second")  # fmt: skip
    *written, _ = sorted((*a._sizes, *b._sizes[1:]))
    if max(written, default=1) > MOST_PARTS:
        fail(UnsupportedError, f"{told}: all axes but the longest are written out, at most "
             f"{MOST_PARTS} elements of each; call torch.matmul outside the function")  # fmt: skip
    alike(what, floating(a, what), floating(b, what))
    if b.ndim == 1:
        return sum(a * b, -1)
    if b._sizes[1] <= MOST_PARTS < b._sizes[0]:  # the long axis is that of the columns
        return stack([sum(a * b[:, k], -1) for k in range(b._sizes[1])], -1)
    return sum(unsqueeze(a, -1) * b, -2)


@implements("matmul")
def matmul(input, other):
    """input @ other, of rows and small matrices of floats."""
    return product(input, other, "matmul")


@implements("mm")
def mm(input, mat2):
    """The product of two small matrices of floats."""
    return product(input, mat2, "mm")


@implements("mv")
def mv(input, vec):
    """The product of a small matrix and a row of floats."""
    return product(input, vec, "mv")


@implements("dot")
def dot(input, tensor):
    """The sum of the products of two rows of floats."""
    return product(input, tensor, "dot")


_matmul = vars(Tensor)["matmul"]
Tensor.__matmul__ = _matmul
Tensor.__rmatmul__ = lambda self, other: _matmul(other, self)

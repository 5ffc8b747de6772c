"""Products of rows and small matrices, each as sums of products.

Along the columns a product is a reduction. The other axes are written out, so such a matrix has few
rows or few columns: it is no matter of tensor cores. Large ones are arguments that are annotated
htile.Matrix (htile.frontend.matrices).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .functions import formulas, implements
from .matrices import is_matrix, multiplied, refuse_left
from .ops import AxisOfRow, Op
from .parts import MOST_PARTS
from .promotion import alike, floating
from .reductions import sum
from .shapes import axis_of, permute, unsqueeze
from .tensor import FUNCTIONS, Tensor, fail, node

SIZES = {
    "matmul": ((1, 2), (1, 2)), "mm": ((2,), (2,)), "mv": ((2,), (1,)),
    **dict.fromkeys(("dot", "inner", "vdot"), ((1,), (1,))),
}  # fmt: skip

KINDS = {1: "a row", 2: "a small matrix"}


def product(a: object, b: object, what: str) -> Tensor:
    """The product of rows and matrices, each with as many axes as `what` takes."""
    if isinstance(b, Tensor) and is_matrix(b):
        return multiplied(a, b, what)
    refuse_left(a, b, what)
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
        columns = [unsqueeze(sum(a * b[:, k], -1), -1) for k in range(b._sizes[1])]
        is_row = a._value.spread or b._value.spread  # as the sum below is one, of fewer elements
        return node(Op.CAT, *columns, arg=AxisOfRow(-1) if is_row else -1)
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


def _dot_of_rows(what: str) -> Callable:
    def function(input, other):
        return product(input, other, what)

    return function


@implements("outer", "ger")
def outer(input, vec2):
    """input[:, None] * vec2, of two rows or parts of rows."""
    if input.ndim != 1 or vec2.ndim != 1:
        shapes = f"{tuple(input._sizes)} and {tuple(vec2._sizes)}"
        fail(ShapeError, f"outer of values of shapes {shapes}: it takes one axis of each, write "
             "a[..., None] * b")  # fmt: skip
    return unsqueeze(input, -1) * vec2


def einsum(equation, *operands):
    """The sums of products that the letters of the axes say, as in "k,kn->n"; of floats."""
    terms, letters, told = _terms(equation, operands)
    sizes: dict[str, int] = {}
    for term, x in zip(terms, operands, strict=True):
        for letter, size in zip(term, floating(x, "einsum")._sizes, strict=True):
            if sizes.setdefault(letter, size) != size:
                fail(ShapeError, f"{told}: {letter} has {sizes[letter]} and {size} elements")
    order = sorted(sizes, key=lambda letter: sizes[letter])  # the longest axis is the last
    if any(sizes[letter] > MOST_PARTS for letter in order[:-1]):
        fail(UnsupportedError, f"{told}: all axes but the longest are written out, at most "
             f"{MOST_PARTS} elements of each; call torch.einsum outside the function")  # fmt: skip
    alike("einsum", *operands)
    total = None
    for term, x in zip(terms, operands, strict=True):
        x = permute(x, [term.index(letter) for letter in order if letter in term])
        for place, letter in enumerate(order):
            x = x if letter in term else unsqueeze(x, place)
        total = x if total is None else total * x
    summed = [place for place, letter in enumerate(order) if letter not in letters]
    total = sum(total, tuple(summed)) if summed else total
    left = [letter for letter in order if letter in letters]
    return permute(total, [left.index(letter) for letter in letters])


def _terms(equation: object, operands: tuple) -> tuple[list[str], str, str]:
    """The letters of each operand, those of the result, and a beginning for messages."""
    told = f"einsum({equation!r})"
    text = equation.replace(" ", "").replace("...", "") if isinstance(equation, str) else ""
    left, arrow, right = text.partition("->")
    terms, letters = left.split(","), left.replace(",", "")
    once = "".join(sorted(letter for letter in set(letters) if letters.count(letter) == 1))
    right = right if arrow else once
    if not (letters + right).isalpha() and letters + right:
        fail(TraceError, f'{told}: expected letters of axes, such as "k,kn->n"')
    shapes = [tuple(x._sizes) if isinstance(x, Tensor) else x for x in operands]
    if [len(term) for term in terms] != [len(s) if isinstance(s, tuple) else s for s in shapes]:
        fail(ShapeError, f"{told} of values of shapes {', '.join(map(str, shapes))}: there is a "
             "letter for each axis of each; the leading dimensions are left out")  # fmt: skip
    repeats = [term for term in (*terms, right) if len(set(term)) < len(term)]
    if repeats or not set(right) <= set(letters):
        fail(UnsupportedError, f"{told}: a letter stands once in each operand and in the result, "
             "and those of the result in an operand")  # fmt: skip
    if any(is_matrix(x) for x in operands):
        fail(UnsupportedError, f"{told} of an htile.Matrix: write F.linear(x, W) or x @ W")
    return terms, right, told


@implements("cross")
def cross(input, other, dim=None):
    """The vector that is perpendicular to two, along the first axis of three elements, or `dim`."""
    if dim is None:
        dim = next((k for k, n in enumerate(input._sizes) if n == 3), -1)
    return linalg_cross(input, other, dim=dim)


@implements("linalg.cross")
def linalg_cross(input, other, *, dim=-1):
    """The vector that is perpendicular to two, along an axis of three elements."""
    for x in (input, other):
        if not x.ndim or x._sizes[axis_of(x, dim)] != 3:
            fail(ShapeError, f"cross of values of shapes {tuple(input._sizes)} and "
                 f"{tuple(other._sizes)}: the axis {dim} has three elements")  # fmt: skip
    (a, b), (c, d) = ((x.roll(-1, dim), x.roll(-2, dim)) for x in (input, other))
    return a * d - b * c


FUNCTIONS[torch.einsum] = "torch.einsum", einsum
formulas({
    "inner": ("The sum of the products of two rows of floats.", _dot_of_rows("inner")),
    "vdot": ("The sum of the products of two rows of floats.", _dot_of_rows("vdot")),
    "linalg.vecdot": ("(x * y).sum(dim), of floats.", lambda x, y, *, dim=-1:
        sum(floating(x, "vecdot") * floating(y, "vecdot"), dim)),
})  # fmt: skip
_matmul = vars(Tensor)["matmul"]
Tensor.__matmul__ = _matmul
Tensor.__rmatmul__ = lambda self, other: _matmul(other, self)

"""Products of rows and small matrices, each as sums of products.

Along the columns a product is a reduction. The other axes are written out, so such a matrix has few
rows or few columns: it is no matter of tensor cores. Large ones are arguments that are annotated
htile.Matrix (htile.frontend.matrices).
"""

from __future__ import annotations

import string
from collections.abc import Callable

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .functions import formulas, implements
from .matrices import is_matrix, linear_of_a_matrix, multiplied, refuse_left
from .ops import AxisOfRow, Op
from .parts import MOST_PARTS
from .promotion import alike, floating
from .reductions import sum
from .shapes import axis_of, permute, squeeze, unsqueeze
from .tensor import FUNCTIONS, Tensor, copy, fail, node

SIZES = {
    "matmul": ((1, 2, 3), (1, 2, 3)), "mm": ((2,), (2,)), "mv": ((2,), (1,)), "bmm": ((3,), (3,)),
    "F.linear": ((1, 2), (2,)),
    **dict.fromkeys(("dot", "inner", "vdot"), ((1,), (1,))),
}  # fmt: skip

KINDS = {1: "a row", 2: "a small matrix", 3: "a few small matrices"}


def product(a: object, b: object, what: str) -> Tensor:
    """The product of rows and matrices, each with as many axes as `what` takes."""
    if isinstance(b, Tensor) and is_matrix(b):
        if 2 not in SIZES[what][1]:  # none of these is x @ W in torch
            fail(UnsupportedError, f"{what} of an htile.Matrix: write F.linear(x, W) or x @ W")
        return multiplied(a, b, what)
    refuse_left(a, b, what)
    shapes = [tuple(x._sizes) if isinstance(x, Tensor) else x for x in (a, b)]
    told = f"{what} of values of shapes {shapes[0]} and {shapes[1]}"
    for x, counts in zip((a, b), SIZES[what], strict=True):
        if not isinstance(x, Tensor) or x.ndim not in counts:
            each = " or ".join(KINDS[count] for count in counts)
            fail(ShapeError, f"{told}: expected {each}; a batch is leading dimensions, or one "
                 "matrix after the other in x.unbind()")  # fmt: skip
    if a._sizes[-1] != b._sizes[-2:][0]:
        fail(ShapeError, f"{told}: the last axis of the first must be as long as the first "
             "axis of the second" + ", behind that of the matrices" * (b.ndim > 2))  # fmt: skip
    if max(a.ndim, b.ndim) > 2:
        return _of_each(a, b, told)
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


def _of_each(a: Tensor, b: Tensor, told: str) -> Tensor:
    """The products of a few matrices, each with its own matrix or row, or all with one."""
    counts = {x._sizes[0] for x in (a, b) if x.ndim > 2} - {1}
    if len(counts) > 1:
        fail(ShapeError, f"{told}: the first axes count the matrices, and are equally long")
    is_one = [x.ndim > 2 and x._sizes[0] == 1 and len(counts) == 1 for x in (a, b)]
    a, b = (squeeze(x, 0) if one else x for x, one in zip((a, b), is_one, strict=True))
    first = {1: "k", 2: "ik", 3: "zik"}[a.ndim]
    second = {1: "k", 2: "kj", 3: "zkj"}[b.ndim]
    left = "z" + "i" * (a.ndim > 1) + "j" * (b.ndim > 1)
    return _summed([first, second], left, (a, b), told, "torch.matmul")


@implements("matmul")
def matmul(input, other):
    """input @ other, of rows and small matrices of floats."""
    return product(input, other, "matmul")


@implements("mm")
def mm(input, mat2):
    """The product of two small matrices of floats."""
    return product(input, mat2, "mm")


@implements("bmm")
def bmm(input, mat2):
    """The products of a few small matrices of floats, one after the other."""
    return product(input, mat2, "bmm")


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


def linear(input, weight, bias=None):
    """The products of a row (K,), or of heads (..., K), with a matrix (N, K), plus a bias."""
    if isinstance(weight, Tensor) and is_matrix(weight):
        return linear_of_a_matrix(input, weight, bias)
    sizes = tuple(weight._sizes) if isinstance(weight, Tensor) else ()
    if len(sizes) != 2 or min(sizes) > MOST_PARTS:  # a row is a matrix without an annotation
        told = f" of shape {sizes}" if len(sizes) == 2 else ""
        fail(UnsupportedError, f"F.linear by what is no matrix argument{told}: annotate the "
             "weight, `weight: htile.Matrix`")  # fmt: skip
    made = product(input, weight.mT, "F.linear")
    return made if bias is None else made + bias


def _plus(input: Tensor, made: Tensor, beta: object, alpha: object, what: str) -> Tensor:
    """beta * input + alpha * made; torch does not read the input if beta is 0, whatever it is."""
    made = made if _is_number(alpha, 1) else alpha * made
    if _is_number(beta, 0):
        return made
    return (input if _is_number(beta, 1) else beta * floating(input, what)) + made


@implements("addmm")
def addmm(input, mat1, mat2, *, beta=1, alpha=1):
    """beta * input + alpha * (mat1 @ mat2), of small matrices."""
    return _plus(input, product(mat1, mat2, "mm"), beta, alpha, "addmm")


@implements("addmv")
def addmv(input, mat, vec, *, beta=1, alpha=1):
    """beta * input + alpha * (mat @ vec), of a small matrix."""
    return _plus(input, product(mat, vec, "mv"), beta, alpha, "addmv")


@implements("baddbmm")
def baddbmm(input, batch1, batch2, *, beta=1, alpha=1):
    """beta * input + alpha * (batch1 @ batch2), of a few small matrices."""
    return _plus(input, product(batch1, batch2, "bmm"), beta, alpha, "baddbmm")


def _is_number(given: object, number: int) -> bool:
    return type(given) in (int, float) and given == number


def einsum(equation, *operands):
    """The sums of products that the letters of the axes say, as in "k,kn->n"; of floats."""
    terms, letters, told = _terms(equation, operands)
    if any(is_matrix(x) for x in operands):
        return _by_a_matrix(terms, letters, operands, told)
    return _summed(terms, letters, operands, told, "torch.einsum")


def _summed(terms: list[str], letters: str, operands: tuple, told: str, outside: str) -> Tensor:
    """The sums of products of operands, whose axes have the letters of `terms`.

    outside: the function of torch that does it outside of a row-wise function.
    """
    sizes: dict[str, int] = {}
    name = outside.removeprefix("torch.")
    for term, x in zip(terms, operands, strict=True):
        for letter, size in zip(term, floating(x, name)._sizes, strict=True):
            if sizes.setdefault(letter, size) != size:
                fail(ShapeError, f"{told}: {letter} has {sizes[letter]} and {size} elements")
    order = sorted(sizes, key=lambda letter: sizes[letter])  # the longest axis is the last
    if any(sizes[letter] > MOST_PARTS for letter in order[:-1]):
        fail(UnsupportedError, f"{told}: all axes but the longest are written out, at most "
             f"{MOST_PARTS} elements of each; call {outside} outside the function")  # fmt: skip
    alike(name, *operands)
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
    text = equation.replace(" ", "") if isinstance(equation, str) else ""
    left, arrow, right = _without_dots(text, operands).partition("->")
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
    return terms, right, told


def _by_a_matrix(terms: list[str], letters: str, operands: tuple, told: str) -> Tensor:
    """The einsum of a row (K,) or heads (..., K) and a matrix argument, summed over K alone."""
    pairs = sorted(zip(operands, terms, strict=True), key=lambda pair: is_matrix(pair[0]))
    *others, (matrix, of_matrix) = pairs
    of_x = others[0][1] if len(others) == 1 and not is_matrix(others[0][0]) else ""
    heads = [letter for letter in of_x if letter not in of_matrix]
    columns = [letter for letter in of_matrix if letter not in of_x]
    if len(columns) != 1 or sorted(heads + columns) != sorted(letters):
        fail(UnsupportedError, f"{told} of an htile.Matrix: write F.linear(x, W) or x @ W")
    is_transposed = of_matrix[0] in columns
    k = of_matrix[is_transposed]
    x = permute(others[0][0], [of_x.index(letter) for letter in (*heads, k)])
    made = multiplied(x, matrix.mT if is_transposed else matrix, "einsum")
    return permute(made, [(heads + columns).index(letter) for letter in letters])


def _without_dots(text: str, operands: tuple) -> str:
    """The equation with letters for the axes that `...` stands for, the same from the last on."""
    left, arrow, right = text.partition("->")
    terms = left.split(",")
    counts = [x.ndim - len(term.replace("...", "")) if isinstance(x, Tensor) else 0
              for term, x in zip(terms, operands, strict=False) if "..." in term]  # fmt: skip
    most = max([0, *counts])
    free = "".join([c for c in string.ascii_letters if c not in text][:most])
    if not free:
        return text.replace("...", "")
    found = iter(counts)
    terms = [t.replace("...", free[most - next(found) :]) if "..." in t else t for t in terms]
    if arrow:
        return f"{','.join(terms)}->{right.replace('...', free)}"
    left = left.replace("...", "").replace(",", "")
    return f"{','.join(terms)}->{free}{''.join(sorted(c for c in left if left.count(c) == 1))}"


@implements("tensordot", method=False)
def tensordot(a, b, dims=2):
    """The sums of products along the last `dims` axes of a and the first of b, or two lists."""
    if not all([isinstance(x, Tensor) and x.ndim for x in (a, b)]):
        fail(ShapeError, "tensordot takes two values with axes: write a * b for a product")
    if isinstance(dims, (tuple, list)):
        given = [tuple(axes) for axes in dims]
    else:
        given = [tuple(range(-dims, 0)), tuple(range(dims))]
    first, second = ([axis_of(x, k) % x.ndim for k in axes]
                     for x, axes in zip((a, b), given, strict=True))  # fmt: skip
    if len(first) != len(second):
        fail(ShapeError, f"tensordot along {len(first)} axes and {len(second)}: expected as many")
    letters = string.ascii_letters
    of_a, of_b = [*letters[: a.ndim]], [*letters[a.ndim : a.ndim + b.ndim]]
    for i, j in zip(first, second, strict=True):
        of_b[j] = of_a[i]
    summed = {of_a[i] for i in first}
    left = "".join([c for c in (*of_a, *of_b) if c not in summed])
    return einsum(f"{''.join(of_a)},{''.join(of_b)}->{left}", a, b)


@implements("linalg.multi_dot", method=False)
def multi_dot(tensors):
    """The product of several small matrices, in their order; the ends may be rows."""
    first, *rest = tensors
    for each in rest:
        first = matmul(first, each)
    return first


@implements("matrix_power", "linalg.matrix_power")
def matrix_power(input, n):
    """A small square matrix multiplied by itself, n of 1 and more times in all."""
    if input.ndim != 2 or input._sizes[0] != input._sizes[1]:
        fail(ShapeError, f"matrix_power of a value of shape {tuple(input._sizes)}: it takes a "
             "square matrix, x.view(n, n)")  # fmt: skip
    if type(n) is not int or n < 1:
        fail(UnsupportedError, f"matrix_power(x, {n}): n is a number of 1 or more; its power 0 is "
             "torch.eye(x.shape[-1])")  # fmt: skip
    if n == 1:
        return copy(input)
    half = matrix_power(input, n // 2)
    square = matmul(half, half)
    return matmul(square, input) if n % 2 else square


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
FUNCTIONS[torch.nn.functional.linear] = "F.linear", linear
formulas({
    "inner": ("The sum of the products of two rows of floats.", _dot_of_rows("inner")),
    "vdot": ("The sum of the products of two rows of floats.", _dot_of_rows("vdot")),
    "linalg.vecdot": ("(x * y).sum(dim), of floats.", lambda x, y, *, dim=-1:
        sum(floating(x, "vecdot") * floating(y, "vecdot"), dim)),
})  # fmt: skip
_matmul = vars(Tensor)["matmul"]
Tensor.__matmul__ = _matmul
Tensor.__rmatmul__ = lambda self, other: _matmul(other, self)

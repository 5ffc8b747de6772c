"""Diagonals and triangles of small matrices that a row is viewed as: `m.tril()`, `m.trace()`."""

from __future__ import annotations

from ..errors import ShapeError
from .dtypes import STORAGE
from .factories import index as places_of
from .functions import implements, where
from .parts import part
from .promotion import BOOL, filled, into, refuse
from .shapes import axis_of, reshaped
from .tensor import Tensor, alias, fail


def _distances(x: Tensor, what: str) -> Tensor:
    """The number of each column of a matrix less that of its row."""
    if x.ndim < 2:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)}: it takes a matrix, "
             "x.view(rows, columns)")  # fmt: skip
    if x._value.dtype in STORAGE:
        refuse(what, x, "convert it first, x.int() or x.float()")
    rows, columns = x._sizes[-2:]
    column, row = places_of(x._builder, columns), places_of(x._builder, rows)
    return column - reshaped(row, (rows, 1))


@implements("tril")
def tril(input, diagonal=0):
    """The elements of a matrix up to a diagonal, and zeros above it."""
    return where(_distances(input, "tril") <= diagonal, input, filled(input, 0))


@implements("triu")
def triu(input, diagonal=0):
    """The elements of a matrix from a diagonal on, and zeros below it."""
    return where(_distances(input, "triu") >= diagonal, input, filled(input, 0))


def _diagonal(x: Tensor, offset: int) -> Tensor:
    """The elements of a matrix whose column is `offset` more than their row."""
    if x.ndim != 2:
        fail(ShapeError, f"the diagonal of a value of shape {tuple(x._sizes)}: it is that of a "
             "matrix, x.view(rows, columns)")  # fmt: skip
    rows, columns = x._sizes
    count = min(rows, columns - offset) if offset >= 0 else min(rows + offset, columns)
    if count < 1:
        fail(ShapeError, f"diagonal {offset} of a matrix of shape {(rows, columns)}: there is none")
    is_on_it = _distances(x, "diagonal") == offset
    along = -1 if offset >= 0 else -2  # each row has one element of it, or each column
    if x._value.dtype is BOOL:
        found = (is_on_it & x).any(along)
    else:
        found = into(where(is_on_it, x, filled(x, 0)).sum(along), x._value)
    return alias(x, part(found, -1, 0, count))  # torch's shares the memory of x


@implements("diagonal")
def diagonal(input, offset=0, dim1=0, dim2=1):
    """A diagonal of a matrix, the `offset`-th above the main one."""
    if input.ndim == 2 and (axis_of(input, dim1), axis_of(input, dim2)) != (-2, -1):
        fail(ShapeError, f"diagonal(dim1={dim1}, dim2={dim2}): write x.t().diagonal(offset)")
    return _diagonal(input, offset)


@implements("diag")
def diag(input, diagonal=0):
    """A diagonal of a matrix, or the matrix that has a row of elements as its main diagonal."""
    if input.ndim != 1:
        return _diagonal(input, diagonal)
    if diagonal:
        fail(ShapeError, f"diag(x, {diagonal}) of a row: it is the main diagonal, diag(x)")
    (n,) = input._sizes
    matrix = input.expand(n, n)
    return where(_distances(matrix, "diag") == 0, matrix, filled(matrix, 0))


@implements("diag_embed")
def diag_embed(input, offset=0, dim1=-2, dim2=-1):
    """The matrix that has a row of elements as its main diagonal."""
    if input.ndim != 1 or offset or (dim1, dim2) not in ((-2, -1), (0, 1)):
        fail(ShapeError, f"diag_embed(x, {offset}, {dim1}, {dim2}) of a value of shape "
             f"{tuple(input._sizes)}: it takes a row, for the main diagonal")  # fmt: skip
    return diag(input)


@implements("trace")
def trace(input):
    """The sum of the main diagonal of a matrix."""
    return _diagonal(input, 0).sum()

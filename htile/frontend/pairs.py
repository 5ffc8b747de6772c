"""What is computed of pairs of rows or elements: distances, products, choices."""

from __future__ import annotations

from itertools import combinations as combinations_of
from itertools import combinations_with_replacement
from math import prod

from ..errors import ShapeError, TraceError
from .functions import implements
from .joins import cat, stack
from .parts import part
from .promotion import floating, operand
from .shapes import reshaped, unsqueeze
from .statistics import norm
from .tensor import Tensor, fail


def _tensor(x: object, what: str) -> Tensor:
    if not isinstance(operand(x), Tensor):
        fail(TraceError, f"{what} of {x!r}: it takes tensors")
    return x


def _of_rows(x: object, what: str) -> Tensor:
    if _tensor(x, what).ndim < 2:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)}: it takes matrices, whose "
             "rows are points; the distance of two rows is torch.dist(x, y)")  # fmt: skip
    return floating(x, what)


@implements("cdist")
def cdist(x1, x2, p=2.0, compute_mode=None):
    """The distances norm(a - b, p) of the rows a of x1 and the rows b of x2."""
    a, b = _of_rows(x1, "cdist"), _of_rows(x2, "cdist")
    if a._sizes[-1] != b._sizes[-1]:
        fail(ShapeError, f"cdist of points of {a._sizes[-1]} and of {b._sizes[-1]} coordinates")
    return norm(unsqueeze(a, -2) - unsqueeze(b, -3), p, -1)


@implements("pdist")
def pdist(input, p=2.0):
    """The distances of the rows of a matrix, of each and those behind it."""
    x = _of_rows(input, "pdist")
    count = x._sizes[-2]
    if x.ndim > 2 or count < 2:
        fail(ShapeError, f"pdist of a value of shape {tuple(x._sizes)}: it takes a matrix of two "
             "or more rows")  # fmt: skip
    each = [part(x, -2, k + 1, count - k - 1) - part(x, -2, k, 1) for k in range(count - 1)]
    return norm(cat(each, -2), p, -1)


@implements("kron")
def kron(input, other):
    """The products of each element of input with all of other, where that element is."""
    given = [_tensor(x, "kron") for x in (input, other)]
    ndim = max(x.ndim for x in given)
    sizes = [(1,) * (ndim - x.ndim) + tuple(x._sizes) for x in given]
    a, b = ([size for n in of for size in ((n, 1) if k == 0 else (1, n))]
            for k, of in enumerate(sizes))  # fmt: skip
    product = reshaped(input, tuple(a)) * reshaped(other, tuple(b))
    return reshaped(product, tuple(m * n for m, n in zip(*sizes, strict=True)))


@implements("cartesian_prod", method=False)
def cartesian_prod(*tensors):
    """All tuples of an element of each row, of shape (tuples, rows); of one row the row."""
    given = [_tensor(x, "cartesian_prod") for x in tensors]
    if any([x.ndim != 1 for x in given]):
        shapes = ", ".join([str(tuple(x._sizes)) for x in given])
        fail(ShapeError, f"cartesian_prod of values of shapes {shapes}: it takes rows")
    if len(given) == 1:
        return given[0]
    sizes = tuple([x._sizes[0] for x in given])
    each = [reshaped(x, tuple([n if k == place else 1 for k, n in enumerate(sizes)])).expand(sizes)
            for place, x in enumerate(given)]  # fmt: skip
    return reshaped(stack(each, -1), (prod(sizes), len(given)))


@implements("combinations")
def combinations(input, r=2, with_replacement=False):
    """All choices of r elements of a short row in their order, of shape (choices, r)."""
    if _tensor(input, "combinations").ndim != 1:
        fail(ShapeError, f"combinations of a value of shape {tuple(input._sizes)}: it takes a row")
    choose = combinations_with_replacement if with_replacement else combinations_of
    places = [*choose(range(input._sizes[0]), r)]
    if not places or not r:
        fail(ShapeError, f"combinations of {r} of {input._sizes[0]} elements: there are none")
    return stack([input[[*column]] for column in zip(*places, strict=True)], -1)

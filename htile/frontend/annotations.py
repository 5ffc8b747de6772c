"""What a parameter is annotated with, where its rank does not say what it is to the row."""

from __future__ import annotations

from ..errors import ArgumentError


class PerRow:
    """Annotation: a tensor of the leading shape, one value per row (`labels: htile.PerRow`)."""


class Inner:
    """Annotation `htile.Inner[k]`: the last k dimensions of the tensor belong to a row, k up to 3.

    A stack of K rows, shape `(*lead, K, N)`, is `htile.Inner[2]`.
    """

    rank: int

    def __class_getitem__(cls, rank: int) -> type:
        if type(rank) is not int or not 1 <= rank <= MOST_AXES:
            raise ArgumentError(f"htile.Inner[{rank!r}]: expected a number from 1 to {MOST_AXES}")
        return INNER[rank]


MOST_AXES = 3  # of a row's shape
INNER = {k: type(f"Inner[{k}]", (Inner,), {"rank": k}) for k in range(1, MOST_AXES + 1)}


class Shared:
    """Annotation: a tensor that is the same for every row, which the function gets as a whole.

    It has one to three dimensions. `table[pos]` is a row of a table (P, D).
    """


class Matrix:
    """Annotation: a matrix that rows are multiplied by: F.linear(x, W), x @ W. All rows share it.

    It has two dimensions and 16-bit floats: (N, K) for F.linear, (K, N) for x @ W.
    """


class Scalar:
    """Annotation: one number for the whole call: a float, or a tensor of shape () or (1,).

    Inside the function it has the shape of the tensor: x.sum() - k has shape (1,) if k has.
    """


class Static:
    """Annotation: a Python value that is fixed in the kernel; each value compiles anew."""

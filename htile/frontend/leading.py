"""What is told of rows whose leading dimensions do not broadcast."""

from __future__ import annotations

from .ops import broadcast_shapes


def not_broadcast(rows: dict[str, tuple[int, ...]], n: int) -> str:
    """The message: the shapes of the row arguments, of at most N elements, and what to write."""
    listed = ", ".join(f"{p} {shape}" for p, shape in rows.items())
    told = f"leading dimensions of the row arguments do not broadcast, got {listed}; "
    return told + (_columns(rows, n) or _SHARED)


_SHARED = (
    "all dimensions but the last must agree or be 1. What all rows share is annotated: a matrix "
    "that rows are multiplied by htile.Matrix, a table htile.Shared"
)


def _columns(rows: dict[str, tuple[int, ...]], n: int) -> str:
    """What to write for vectors of N elements that are columns, (N, 1); none where others differ.

    A last dimension of 1 is one number for each row, of as many rows as the vector has elements.
    """
    columns = [p for p, shape in rows.items() if shape == (n, 1)]
    lead = broadcast_shapes(*(shape[:-1] for p, shape in rows.items() if p not in columns))
    if not columns or lead is None:
        return ""
    return (
        f"{columns[0]} has one number for each of {n} rows: pass a vector of {n} elements that all "
        f"rows share as {columns[0]}.squeeze(-1), and a number for each row in the shape "
        f"{(*lead, 1)}. A matrix of one column is annotated htile.Shared"
    )

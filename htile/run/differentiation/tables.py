"""Adds up, in one order, what rows contribute to gradients of what their indices choose from.

torch sorts the indices, keeps the order of equal ones, and adds in float32. What it adds does not
depend on anything else, so the bits are the same in every run. In a graph that torch compiles it is
an operation, because Inductor would make additions of it that take place in any order.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from math import prod

import torch
from torch.library import register_fake

from ...frontend.ops import Op
from ...frontend.scattered import Scattered
from ..operands import is_inside_transform, is_recorded

LIBRARY = torch.library.Library("htile", "FRAGMENT")


def with_rows(
    found: list[torch.Tensor | None], results: Sequence[torch.Tensor],
    scattered: Sequence[tuple[int, int, int, Scattered]], repeated: Collection[str],
) -> list[torch.Tensor | None]:  # fmt: skip
    """Gradients with those that are to be added up of rows.

    scattered: for each such part which gradient it belongs to, and the places of both outputs.
    repeated: the parameters whose gradients stay in float32, because they are added up further.
    """
    found, dtypes = list(found), {}
    for k, rows, at, of in scattered:
        add = _added_to_rows if of.of_each_row else _added
        part = _moved_back(add(results[rows], results[at], of.shape), of)
        found[k] = part if found[k] is None else found[k] + part
        if of.table not in repeated:
            dtypes[k] = of.dtype
    for k, dtype in dtypes.items():
        found[k] = found[k].to(dtype)
    return found


def _added(rows: torch.Tensor, at: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """What is added to a float32 tensor of zeros of this shape."""
    count, size = shape[0], prod(shape[1:])
    rows, at = rows.reshape(-1, size), at.reshape(-1)
    given = rows, at
    is_traced = is_recorded(given) and not is_inside_transform(given) and not rows.requires_grad
    add = torch.ops.htile.add_rows.default if is_traced else _add_rows
    return add(rows, at, count).reshape(shape)


def _added_to_rows(
    values: torch.Tensor, at: torch.Tensor, shape: tuple[int, ...]
) -> torch.Tensor:
    """What is added to zeros of this shape, for each row at the indices of the row.

    values, at: of shape (*lead, K). The result is of shape (*lead, *shape).
    """
    (size,), lead = shape, at.shape[:-1]
    first = torch.arange(prod(lead), device=at.device).reshape(*lead, 1) * size
    return _added(values, at + first, (prod(lead) * size,)).reshape(*lead, size)


def _add_rows(rows: torch.Tensor, at: torch.Tensor, count: int) -> torch.Tensor:
    return torch.ops.aten.embedding_dense_backward(rows, at, count, -1, False)


def _moved_back(g: torch.Tensor, of: Scattered) -> torch.Tensor:
    """The gradient of the table, of that of its movement."""
    for op, arg, inner in of.moves:
        if op is Op.PERMUTE:
            g = g.permute(sorted(range(-len(arg), 0), key=lambda axis, arg=arg: arg[axis]))
        elif op is Op.SLICE:
            axis, start, step, size = arg
            zeros = g.new_zeros(*g.shape[: len(g.shape) + axis], inner[axis], *g.shape[axis:][1:])
            g = torch.slice_scatter(zeros, g, axis, start, start + (size - 1) * step + 1, step)
        else:
            g = g.reshape(inner)
    return g


LIBRARY.define(
    "add_rows(Tensor rows, Tensor at, SymInt count) -> Tensor", tags=torch.Tag.pt2_compliant_tag
)
LIBRARY.impl("add_rows", _add_rows, "CompositeExplicitAutograd")
register_fake(
    "htile::add_rows", lambda rows, at, count: rows.new_empty(count, rows.shape[-1]), lib=LIBRARY
)

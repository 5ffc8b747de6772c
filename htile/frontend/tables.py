"""Rows of a table that an index chooses: `table[pos]`, `F.embedding`, `index_select`.

A table is an argument that all rows share (htile.Shared), or a movement of one, of two or more
axes. An index of each row chooses a part along its first axis. Several indices, as a row has them
in `htile.Inner[1]`, are looked up one by one. Of any other value of at most 64 parts, as a small
matrix is, all parts are there, and selects choose.
"""

from __future__ import annotations

from math import prod

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .functions import implements
from .graph import Builder, Node, Role
from .indices import chosen, listed, per_row_index
from .indices import getitem as _getitem
from .joins import stack
from .ops import Op, Varies
from .parts import MOST_PARTS, unbind
from .promotion import BOOL
from .scattered import Padding
from .shapes import axis_of, has_any_length, reshaped
from .tensor import FUNCTIONS, Tensor, fail, node

THROUGH = frozenset({Op.RESHAPE, Op.SLICE, Op.PERMUTE})  # movements that a table may have made


def lookup(
    table: Tensor, y: Tensor, what: str = "indexing", padding: int | None = None
) -> Tensor:
    """The parts of a table (P, *inner) at integers of any shape: (*y.shape, *inner).

    padding: an index whose part of the table gets no gradient.

    A negative index counts from the end. Beyond the ends the result is NaN, of integers 0, and of
    masks False.
    """
    is_few = not has_any_length(table, 0) and table._sizes[0] <= MOST_PARTS and padding is None
    is_computed = is_few and _is_computed(table)
    if not is_computed:
        _check_table(table)
    if prod(y._sizes) == 1:
        index = per_row_index(reshaped(y, ()), what)
        if is_computed:
            found = chosen(table, index, wraps=True)
        else:
            found = node(Op.LOOKUP, table, index, arg=None if padding is None else Padding(padding))
        return reshaped(found, (*y._sizes, *found._sizes))
    count = prod(y._sizes)
    if count > MOST_PARTS:
        fail(UnsupportedError, f"{what} by {count} indices of a row, each of which chooses a part "
             f"of shape {tuple(table._sizes[1:])}: at most {MOST_PARTS} are taken, one by one; "
             "pass the indices as values per row, ids.flatten() as htile.PerRow, or look them up "
             "outside the function")  # fmt: skip
    each = unbind(reshaped(y, (count,)), 0)
    rows = stack([lookup(table, index, what, padding) for index in each])
    return reshaped(rows, (*y._sizes, *rows._sizes[1:]))


def _is_computed(table: Tensor) -> bool:
    """Whether a value is of each row, or of constants: it is no table, and computed of none."""
    builder = table._builder
    if table._value.varies is Varies.ROW:
        return _moved(table).op is not Op.LOOKUP
    return all([builder[id].op is not Op.INPUT for id in builder.behind(table._id)])


def _moved(table: Tensor) -> Node:
    """What a value is a movement of."""
    builder, found = table._builder, table._builder[table._id]
    while found.op in THROUGH:
        found = builder[found.inputs[0]]
    return found


def _is_shared(builder: Builder, found: Node) -> bool:
    """Whether an argument is one that all rows share; true of what is no argument."""
    return all([i.role is Role.COLUMN for i in builder.inputs if i.id == found.id])


def _check_table(table: Tensor) -> None:
    """Raise UnsupportedError for what is no argument that all rows share."""
    builder, found = table._builder, _moved(table)
    shape = tuple(table._sizes)
    if found.op is Op.LOOKUP:
        fail(UnsupportedError, _looked_up_twice(builder, found))
    if found.op is not Op.INPUT:
        fail(UnsupportedError, f"an index of a computed value of shape {shape}: it chooses rows of "
             "an argument, so write table[pos] * 2 for (table * 2)[pos]")  # fmt: skip
    if not _is_shared(builder, found):
        places = f"torch.arange({shape[0]})[:{', None' * (len(shape) - 1)}]"
        fail(UnsupportedError, f"an index of {found.arg}, of which each row has its own, of shape "
             f"{shape}: write torch.where({places} == i, {found.arg}, 0).sum(0) for "
             f"{found.arg}[i]; only a tensor that all rows share, annotated "
             f"`{found.arg}: htile.Shared`, is indexed")  # fmt: skip


def _looked_up_twice(builder: Builder, found: Node) -> str:
    """The message for an index of what an index has chosen."""
    table = builder[found.inputs[0]]
    name, shape = table.arg if table.op is Op.INPUT else "table", table.value.inner
    return (f"a second index into the rows of {name}, of shape {shape}: one index chooses a part "
            f"of a table, so flatten the table: pass {name}.flatten(0, 1), and write "
            f"{name}[i * {shape[1]} + j] for {name}[i, j]")  # fmt: skip


def getitem(x: Tensor, index: object) -> Tensor:
    """`table[pos]` and `table[pos, ...]` of two or more axes; else what rows and parts have."""
    index = listed(index)
    parts = index if isinstance(index, tuple) else (index,)
    y = parts[0] if parts else None
    if x.ndim < 2 or not isinstance(y, Tensor) or y._value.dtype is BOOL:
        return _getitem(x, index)
    found, rest = lookup(x, y), parts[1:]
    if not rest:
        return found
    if y.ndim and any(isinstance(each, Tensor) for each in rest):
        fail(UnsupportedError, "several indices at once: write table[ids][:, i], one after another")
    return getitem(found, ((slice(None),) * y.ndim + rest))


Tensor.__getitem__ = getitem


@implements("index_select")
def index_select(input, dim, index):
    """The parts of a table, or elements of a row, at indices of its first axis."""
    if not isinstance(index, Tensor):
        fail(TraceError, f"index_select by {index!r}: an index is a tensor, torch.tensor([...])")
    if input.ndim == 1 and axis_of(input, dim) == -1 and index.ndim == 1:
        return input[index]
    if input.ndim < 2 or axis_of(input, dim) != -input.ndim:
        fail(ShapeError, f"index_select({dim}, ...) of a value of shape {tuple(input._sizes)}: it "
             "takes rows of a table, or elements of a row, index_select(0, ids)")  # fmt: skip
    if index.ndim != 1:
        shape = tuple(index._sizes)
        fail(ShapeError, f"index_select by indices of shape {shape}: write table[pos]")
    return lookup(input, index, "index_select")


def embedding(
    input, weight, padding_idx=None, max_norm=None, norm_type=2.0, scale_grad_by_freq=False,
    sparse=False,
):  # fmt: skip
    """The rows of a table at the indices; a negative one counts from the end."""
    if max_norm is not None:
        fail(UnsupportedError, "F.embedding(max_norm=...) changes the table: leave it out")
    if scale_grad_by_freq or sparse:
        name = "sparse" if sparse else "scale_grad_by_freq"
        fail(UnsupportedError, f"F.embedding({name}=True) asks for another gradient than that of "
             "the rows: leave it out, or call it outside")  # fmt: skip
    if weight.ndim != 2:
        fail(ShapeError, f"F.embedding of a table of shape {tuple(weight._sizes)}: it has two "
             "axes, annotate it htile.Shared")  # fmt: skip
    return lookup(weight, input, "F.embedding", padding_idx)


FUNCTIONS[torch.nn.functional.embedding] = "F.embedding", embedding

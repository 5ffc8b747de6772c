"""Elements at places of a row that is computed elementwise, computed again of those places alone.

`(x * w + b)[y]` is `x[y] * w[y] + b[y]`: one element of each argument is loaded, for one index of
each row (`at_one`), or for each index of a row of them (`gathered`).
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import torch

from .dtypes import FLOAT8, STORAGE
from .functions import clamp
from .graph import Builder, Node, Role
from .ops import COLLECTIVES, MOVEMENTS, Op
from .promotion import FLOAT, INT64, cast, convert
from .shapes import has_any_length, reshaped
from .tensor import Tensor, location

# They are elementwise in none of their operands.
ENDS = {Op.INPUT, Op.TAKE, Op.LOOKUP, Op.MATMUL, Op.CUSTOM}
MOST_TAKEN = 64  # operations that are computed again for one element
Span = tuple[int, int]  # of a row: the first element, and the step from one to the next


def at_one(x: Tensor, y: Tensor) -> Tensor | None:
    """The element at an index of each row; None of a row that is not computed elementwise.

    The index is brought into the row; what it gives there is not used if it was beyond.
    """
    return _at(x, y, Op.TAKE)


def gathered(x: Tensor, y: Tensor) -> Tensor | None:
    """The elements of a long row at the elements of another row, which are indices in that row.

    Each is loaded alone, of all arguments that the row is computed of. None of a row that is not
    computed elementwise from arguments, and where a row has any length.
    """
    if x.ndim != 1 or has_any_length(x, -1) or has_any_length(y, -1):
        return None
    if x._value.dtype in STORAGE:
        found = gathered(wide(x), y)
        return None if found is None else cast(found, x._value.dtype)
    found = _at(x, y, Op.GATHER)
    if found is None or found._value.inner:
        return found
    return found.expand(tuple(y._sizes))  # it is one number that all elements are


def wide(x: Tensor) -> Tensor:
    """An 8-bit value in the dtype that it is computed in, which has all of its numbers."""
    return cast(x, FLOAT if x._value.dtype in FLOAT8 else torch.int32)


def _at(x: Tensor, y: Tensor, op: Op) -> Tensor | None:
    """What is at indices of a row, computed of what is there in each argument.

    op: Op.TAKE for one index of each row, and Op.GATHER for a row of indices.
    """
    builder, n = x._builder, x._sizes[-1]
    chain = _elementwise(x, op is Op.GATHER) if n > 1 and x._value.spread else None
    if chain is None:
        return None
    y = y if op is Op.GATHER else reshaped(clamp(y, 0, n - 1), ())
    places = {(start, step): y * step + start if (start, step) != (0, 1) else y
              for _, (start, step) in chain}  # fmt: skip
    found: dict[tuple[int, Span], int] = {}
    for id, span in sorted(chain):
        each, place = builder[id], places[span]
        if each.op is Op.INPUT:
            made = builder.add(op, (id, place._id), None, each.loc or location())
        elif each.op is Op.CONST:
            value = replace(each.value, inner=(), spread=False)
            made = builder.add_const(each.arg, value, each.loc)
        elif each.op is Op.INDEX:
            last = each.value.inner[-1] - 1
            made = convert(place if op is Op.TAKE else clamp(place, 0, last), INT64)._id
        elif each.op is Op.GATHER:
            row, at = each.inputs
            at = Tensor(builder, found[at, span])
            at = at if op is Op.GATHER else clamp(at, 0, builder[row].value.inner[-1] - 1)
            made = builder.add(op, (row, at._id), None, each.loc)
        elif each.op is Op.SLICE:
            made = found[each.inputs[0], _within(each, span)]
        else:
            operands = [found.get((i, span), i) for i in each.inputs]
            values = [builder[i].value for i in operands]
            flat = [_flat(builder, i) if v.inner == (1,) else i
                    for i, v in zip(operands, values, strict=True)]  # fmt: skip
            made = builder.add(each.op, flat, each.arg, each.loc)
        found[id, span] = made
    return Tensor(builder, found[x._id, (0, 1)])


def _elementwise(x: Tensor, of_parts: bool) -> list[tuple[int, Span]] | None:
    """All that a row is computed of elementwise, each with the part of it that the row is of.

    None where it is computed in another way, or of more than MOST_TAKEN operations.

    of_parts: whether it may be computed of parts of rows.
    """
    builder, chain, todo = x._builder, {}, [(x._id, (0, 1), x._sizes[0])]
    rows = {i.id for i in builder.inputs if i.role in (Role.ROW, Role.COLUMN)}
    while todo:
        id, span, length = todo.pop()
        each = builder[id]
        if not each.value.spread and prod(each.value.inner) > 1:  # such as a few sorted elements
            return None
        if (id, span) in chain or not each.value.spread:
            continue
        if of_parts and each.value.inner == (1,) != (length,):  # it is beside each element
            continue
        is_part = of_parts and each.op is Op.SLICE
        is_leaf = id in rows or each.op in (Op.CONST, Op.INDEX)
        is_elementwise = is_leaf or is_part or each.op not in MOVEMENTS | COLLECTIVES | ENDS
        has_length = each.value.inner == (length,)
        if not has_length or len(chain) == MOST_TAKEN or not is_elementwise:
            return None
        chain[id, span] = None
        operands = each.inputs[1:] if each.op is Op.GATHER else each.inputs
        if is_part:
            span, length = _within(each, span), builder[each.inputs[0]].value.inner[0]
        todo += [(i, span, length) for i in operands]
    return list(chain)


def _within(slice_: Node, span: Span) -> Span:
    """Where the part of a slice is in what is sliced."""
    (_, first, stride, _), (start, step) = slice_.arg, span
    return first + stride * start, stride * step


def _flat(builder: Builder, id: int) -> int:
    """A value of each row without its axis of size 1."""
    return builder.add(Op.RESHAPE, (id,), (), builder[id].loc)

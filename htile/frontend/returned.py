"""The dtype that a value is returned in, where `.to` declares none: which arguments decide it."""

from __future__ import annotations

import torch

from .graph import Builder, Role
from .ops import Op, Value


def returned_dtype(builder: Builder, value: Value) -> torch.dtype:
    """The dtype in memory that a value is returned in.

    What `.to` declared; else, for a row in float32, that of the first floating row argument of 16
    or more bits, or where there is none, of the first such table; else what it is computed in.
    """
    if value.stored is not None or not (value.dtype is torch.float32 and value.spread):
        return value.stored or value.dtype
    floats = [i for i in builder.inputs if i.dtype.is_floating_point and i.dtype.itemsize >= 2]
    rows = [i.dtype for i in floats if i.role is Role.ROW]
    tables = (i for i in floats if i.id in builder.tables or len(builder[i.id].value.inner) > 1)
    rows = rows or [i.dtype for i in tables]
    return rows[0] if rows else value.dtype


def note_table(builder: Builder, id: int) -> None:
    """Count all arguments that a value is computed from as tables, because indices choose from it.

    A vector that all rows share is otherwise no table, and decides no dtype (`returned_dtype`). A
    value that is computed from a row is no table: indices give its elements in another order.
    """
    known = builder.behind(id)
    rows = {i.id for i in builder.inputs if i.role is Role.ROW}
    if known.isdisjoint(rows):
        builder.tables |= {each for each in known if builder[each].op is Op.INPUT}

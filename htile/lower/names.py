"""The names that the emitted kernel gives to the values of its graph."""

from __future__ import annotations

from .emit import RESERVED, _Printer
from .plan import Plan

__all__ = ["RESERVED", "value_names"]


def value_names(plan: Plan) -> dict[int, str]:
    """The name of every value that the source of `plan` names, by the id of its node.

    Constants are written into the expressions that read them, a reshaped value is its operand, and
    a product that is part of an fma is written into it: these have no name.
    """
    printer = _Printer(plan)
    printer.module()
    return dict(printer.names)

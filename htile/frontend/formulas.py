"""What a function computes of a Python float and of numbers that are known, such as `1 - beta`.

Torch computes that in Python, in float64. In float32 a difference would have few digits left of a
number near 1. So kernels get such results as arguments: the host function computes them.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch

from .graph import Graph, Input, Node, Role
from .ops import Op

OPERATORS = {Op.ADD: "+", Op.SUB: "-", Op.MUL: "*", Op.DIV: "/"}
FUNCTIONS = {
    Op.ADD: operator.add, Op.SUB: operator.sub, Op.MUL: operator.mul, Op.DIV: operator.truediv,
}  # fmt: skip
CANCELLING = frozenset({Op.ADD, Op.SUB})  # Others lose no digits in float32.


@dataclass(frozen=True, slots=True)
class Formula:
    """How a number is computed of a Python float.

    op: an operation of FUNCTIONS, or NEG; None for the float itself.
    operands: each a formula, or a number.
    """

    op: Op | None = None
    operands: tuple[Formula | float, ...] = ()

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """The number, of the float as a tensor of float64."""
        if self.op is None:
            return x
        found = [each.value(x) if isinstance(each, Formula) else each for each in self.operands]
        return -found[0] if self.op is Op.NEG else FUNCTIONS[self.op](*found)

    def number(self, x: float) -> float:
        """The same of a Python float; a quotient by zero is infinite or NaN."""
        return self.value(torch.tensor(x, dtype=torch.float64)).item()

    def text(self, name: str) -> str:
        """The expression, of the float of this name."""
        if self.op is None:
            return name
        parts = [
            each._inner(name) if isinstance(each, Formula) else repr(float(each))
            for each in self.operands
        ]
        return f"-{parts[0]}" if self.op is Op.NEG else f" {OPERATORS[self.op]} ".join(parts)

    def _inner(self, name: str) -> str:
        return self.text(name) if self.op is None else f"({self.text(name)})"

    @property
    def cancels(self) -> bool:
        """Whether it has a sum or a difference."""
        return not self.ops.isdisjoint(CANCELLING)

    @property
    def ops(self) -> frozenset[Op | None]:
        """All of its operations."""
        inner = [each.ops for each in self.operands if isinstance(each, Formula)]
        return frozenset({self.op}).union(*inner)


def formulas(graph: Graph) -> dict[int, tuple[Input, Formula]]:
    """The values that are computed in float64, by their ids: the float, and what is made of it."""
    floats = {i.id: i for i in graph.inputs if i.role is Role.SCALAR and i.formula is None}
    if not floats:
        return {}
    found: dict[int, tuple[Input, Formula]] = {}
    for node in graph:
        if node.id in floats:
            found[node.id] = floats[node.id], Formula()
            continue
        if node.op not in FUNCTIONS and node.op is not Op.NEG:
            continue
        operands = graph.operands(node)
        of = {found[each.id][0] for each in operands if each.id in found}
        are_known = all(each.id in found or _is_number(each) for each in operands)
        if len(of) == 1 and are_known and node.value.stored is None:
            parts = [found[each.id][1] if each.id in found else each.arg for each in operands]
            found[node.id] = of.pop(), Formula(node.op, tuple(parts))
    read = {i for node in graph if node.id not in found for i in node.inputs}
    read |= {output.id for output in graph.outputs}
    return {id: each for id, each in found.items() if id in read and each[1].cancels}


def _is_number(node: Node) -> bool:
    return node.op is Op.CONST and not node.value.inner

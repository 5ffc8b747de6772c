"""Which floats and integers a value can be, as far as its operations say.

Some device functions have a longer way for operands that are huge or tiny. Where no operand is, a
kernel does without that way, and gives the same bits.
"""

from __future__ import annotations

import math
from math import inf

import torch

from ..frontend.graph import Graph, Node
from ..frontend.ops import Op

Range = tuple[float, float]

ANY: Range = (-inf, inf)
OF_OP: dict[Op, Range] = {
    Op.SIN: (-1, 1), Op.COS: (-1, 1), Op.TANH: (-1, 1), Op.ERF: (-1, 1), Op.SIGN: (-1, 1),
    Op.SIGMOID: (0, 1), Op.UNIFORM: (2.0**-33, 1), Op.EXP: (0, inf), Op.EXP2: (0, inf),
    Op.EXPONENTIAL: (0, 32), Op.SQRT: (0, inf), Op.RSQRT: (0, inf),
}  # fmt: skip
# What takes an element of its first operand, or 0 or NaN if there is none.
TAKES = frozenset({Op.TAKE, Op.GATHER, Op.LOOKUP})
WITH_INFINITY = frozenset({torch.float32, torch.bfloat16, torch.float16})  # others saturate
ROUNDED = 1 + 2.0**-7  # what a number grows by at most where it is rounded to 16 bits


def range_of(graph: Graph, node: Node) -> Range:
    """A range that has every value of the node but NaN and infinities.

    The rules hold for operands that are infinite, too: the larger of x and 2 may be 2, although x
    is never below 3 where it is finite.
    """
    return _Ranges(graph).of(node.id)


class _Ranges:
    """The ranges of a graph's nodes, each of which is found once."""

    def __init__(self, graph: Graph):
        self.graph = graph
        self.found: dict[int, Range] = {}

    def of(self, id: int) -> Range:
        """As `range_of`."""
        if id not in self.found:
            node = self.graph[id]
            low, high = self._range(node)
            least, most = _of_dtype(node.value.dtype)  # integers beyond them have wrapped
            is_within = least <= low and high <= most  # NaN is not
            self.found[id] = (low, high) if is_within else (least, most)
        return self.found[id]

    def _range(self, node: Node) -> Range:
        op = node.op
        if op in OF_OP:
            return OF_OP[op]
        if op is Op.CONST:
            return (float(node.arg),) * 2 if math.isfinite(node.arg) else ANY
        if op is Op.INDEX:
            return 0, node.arg - 1
        if op is Op.INPUT:
            source = next(i for i in self.graph.inputs if i.id == node.id)
            return _of_dtype(source.dtype) if source.formula is None else ANY
        if op in TAKES:
            return _hull((0, 0), self.of(node.inputs[0]))
        if op is Op.RESHAPE:
            return self.of(node.inputs[0])
        if op in (Op.CONVERT, Op.CAST):
            return self._converted(node)
        if op is Op.WHERE:
            return _hull(*map(self.of, node.inputs[1:]))
        if op in (Op.NEG, Op.ABS):
            low, high = self.of(node.inputs[0])
            return (-high, -low) if op is Op.NEG else (max(low, -high, 0), max(-low, high))
        return self._of_two(node) if len(node.inputs) == 2 else ANY

    def _converted(self, node: Node) -> Range:
        """What numbers become in another dtype; those that it cannot hold, in another way."""
        low, high = self.of(node.inputs[0])
        if node.arg in WITH_INFINITY:
            return (low, high) if node.arg is torch.float32 else (low * ROUNDED, high * ROUNDED)
        least, most = _of_dtype(node.arg)
        was_float = self.graph[node.inputs[0]].value.dtype.is_floating_point
        return (least, most) if was_float or low < least or high > most else (low, high)

    def _of_two(self, node: Node) -> Range:
        """The range of an operation with two operands."""
        (lo, hi), (low, high) = map(self.of, node.inputs)
        a, b = self.graph.operands(node)
        if node.op is Op.ADD:
            return lo + low, hi + high
        if node.op is Op.SUB:
            return lo - high, hi - low
        if node.op is Op.MUL:
            products = [x * y for x in (lo, hi) for y in (low, high)]
            return (0 if a.id == b.id else min(products)), max(products)
        if node.op is Op.DIV and b.op is Op.CONST and low == high != 0:
            return min(lo / low, hi / low), max(lo / low, hi / low)
        if node.op is Op.MOD and b.op is Op.CONST and low == high > 0:
            return 0, low
        if node.op in (Op.MAXIMUM, Op.MINIMUM):
            # The other operand alone bounds the result where one may be infinite.
            number = low if b.op is Op.CONST else lo if a.op is Op.CONST else None
            least, most = _hull((lo, hi), (low, high))
            if number is not None and math.isfinite(number):
                return (number, most) if node.op is Op.MAXIMUM else (least, number)
            return least, most
        return ANY


def _of_dtype(dtype: torch.dtype) -> Range:
    """The range of a dtype's numbers; that of float32, which is not limited, is any."""
    if dtype is torch.bool:
        return 0, 1
    if not dtype.is_floating_point:
        return torch.iinfo(dtype).min, torch.iinfo(dtype).max
    return (torch.finfo(dtype).min, torch.finfo(dtype).max) if dtype.itemsize < 4 else ANY


def _hull(*ranges: Range) -> Range:
    """The range that has these in it."""
    return min(low for low, _ in ranges), max(high for _, high in ranges)

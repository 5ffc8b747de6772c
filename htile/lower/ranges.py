"""Which floats and integers a value can be, as far as its operations say.

Some device functions have a longer way for operands that are huge or tiny. Where no operand is, a
kernel does without that way, and gives the same bits.
"""

from __future__ import annotations

import math
import struct
from math import inf

import torch

from ..frontend.graph import Graph, Node
from ..frontend.ops import Op

Range = tuple[float, float]  # of integers it has ints, which are exact

ANY: Range = (-inf, inf)
OF_OP: dict[Op, Range] = {
    Op.SIN: (-1, 1), Op.COS: (-1, 1), Op.TANH: (-1, 1), Op.ERF: (-1, 1), Op.SIGN: (-1, 1),
    Op.SIGMOID: (0, 1), Op.UNIFORM: (2.0**-33, 1), Op.EXP: (0, inf), Op.EXP2: (0, inf),
    Op.EXPONENTIAL: (0, 32), Op.SQRT: (0, inf), Op.RSQRT: (0, inf),
}  # fmt: skip
# What takes an element of its first operand, or 0 or NaN if there is none.
TAKES = frozenset({Op.TAKE, Op.GATHER, Op.LOOKUP})
# How much further from the exact result a rounded one may be: a share of it, and beside that so
# much. For float32 the share is larger than that of one rounding, because quotients may be short.
ROUNDING = {
    torch.float32: (2.0**-20, 2.0**-148),
    torch.bfloat16: (2.0**-7, 2.0**-132),
    torch.float16: (2.0**-10, 2.0**-24),
}


def range_of(graph: Graph, node: Node) -> Range:
    """A range that has every value of the node but NaN and infinities.

    The rules hold for operands that are infinite, too: the larger of x and 2 may be 2, although x
    is never below 3 where it is finite.
    """
    found: dict[int, Range] = {}
    todo = [node.id]
    while todo:  # not by recursion: graphs are deep
        each = graph[todo[-1]]
        if missing := [id for id in each.inputs if id not in found]:
            todo += missing
        else:
            found[todo.pop()] = _within_dtype(each, _range(graph, each, found))
    return found[node.id]


def _within_dtype(node: Node, found: Range) -> Range:
    """The range, or that of the dtype if it is larger: integers beyond it have wrapped."""
    (low, high), (least, most) = found, _of_dtype(node.value.dtype)
    return found if least <= low and high <= most else (least, most)  # NaN is not within


def _range(graph: Graph, node: Node, found: dict[int, Range]) -> Range:
    op, operands = node.op, [found[id] for id in node.inputs]
    if op in OF_OP:
        return OF_OP[op]
    if op is Op.CONST:
        return _of_number(node)
    if op is Op.INDEX:
        return 0, node.arg - 1
    if op is Op.INPUT:
        source = next(i for i in graph.inputs if i.id == node.id)
        return _of_dtype(source.dtype) if source.formula is None else ANY
    if op in TAKES:
        return _hull((0, 0), operands[0])
    if op is Op.RESHAPE:
        return operands[0]
    if op in (Op.CONVERT, Op.CAST):
        return _converted(graph, node, operands[0])
    if op is Op.WHERE:
        return _hull(*operands[1:])
    if op in (Op.NEG, Op.ABS):
        low, high = operands[0]
        return (-high, -low) if op is Op.NEG else (max(low, -high, 0), max(-low, high))
    if len(operands) != 2:
        return ANY
    result = _of_two(node, *graph.operands(node), *operands)
    is_rounded = node.value.dtype.is_floating_point and op not in (Op.MAXIMUM, Op.MINIMUM, Op.MOD)
    return _rounded(result, torch.float32) if is_rounded else result


def _of_number(node: Node) -> Range:
    if not math.isfinite(node.arg):
        return ANY
    if not node.value.dtype.is_floating_point:
        return int(node.arg), int(node.arg)
    try:
        number = struct.unpack("f", struct.pack("f", node.arg))[0]
    except OverflowError:  # it is infinite in float32
        return ANY
    return number, number


def _converted(graph: Graph, node: Node, operand: Range) -> Range:
    """What numbers become in another dtype; those that it cannot hold, in another way."""
    if node.arg in ROUNDING:
        of_bool_or_float = graph[node.inputs[0]].value.dtype in (torch.bool, torch.float32)
        is_exact = node.arg is torch.float32 and of_bool_or_float
        return operand if is_exact else _rounded(operand, node.arg)
    was_float = graph[node.inputs[0]].value.dtype.is_floating_point
    (low, high), (least, most) = operand, _of_dtype(node.arg)
    is_kept = least <= low and high <= most and not (was_float or node.arg.is_floating_point)
    return operand if is_kept else (least, most)


def _of_two(node: Node, a: Node, b: Node, first: Range, second: Range) -> Range:
    """The range of an operation with two operands, before it is rounded."""
    (lo, hi), (low, high) = first, second
    if node.op is Op.ADD:
        return lo + low, hi + high
    if node.op is Op.SUB:
        return lo - high, hi - low
    if node.op is Op.MUL:
        products = [x * y for x in (lo, hi) for y in (low, high)]
        if any(map(math.isnan, products)):
            return ANY
        return (0 if a.id == b.id else min(products)), max(products)
    if node.op is Op.DIV and b.op is Op.CONST and low == high != 0:
        return min(lo / low, hi / low), max(lo / low, hi / low)
    if node.op is Op.MOD and b.op is Op.CONST and low == high > 0:
        return 0, low
    if node.op in (Op.MAXIMUM, Op.MINIMUM):
        # The other operand alone bounds the result where one may be infinite.
        number = low if b.op is Op.CONST else lo if a.op is Op.CONST else None
        least, most = _hull(first, second)
        if number is not None and math.isfinite(number):
            return (number, most) if node.op is Op.MAXIMUM else (least, number)
        return least, most
    return ANY


def _rounded(found: Range, dtype: torch.dtype) -> Range:
    """The range of numbers of a range that are rounded to a dtype."""
    share, more = ROUNDING[dtype]
    low, high = found
    return low - abs(low) * share - more, high + abs(high) * share + more


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

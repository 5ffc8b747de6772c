"""Columns are numbered in int32 where a trace, as torch, numbers them in int64.

What is computed of the column's number and of numbers alone has a range that is known before the
kernel runs. If it fits int32, it is computed in int32. A comparison with an int64 that a row has
once is one in int32 too: that one is first brought to the range and one number more on each side,
which changes no comparison. Whatever else reads such a value reads it converted to int64.

The index of an element that was found by its rank is the number of a column too, and masks that are
added to each other, or summed over a row, have a range. A comparison that ranges decide is no
comparison, and nothing is brought into a range that it is in already.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import prod

import torch

from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import COMPARISONS, Op
from ..patterns import strip
from .rewrite import Rule

# The comparison with its operands exchanged.
MIRRORED = {Op.LT: Op.GT, Op.GT: Op.LT, Op.LE: Op.GE, Op.GE: Op.LE, Op.EQ: Op.EQ, Op.NE: Op.NE}
INT32, INT64 = torch.int32, torch.int64
LIMITS = torch.iinfo(INT32)
Range = tuple[int, int]
TAKES_BOTH = frozenset({Op.CAST, Op.CONVERT, Op.TAKE, Op.GATHER, Op.LOOKUP})  # int32 or int64
# What adds up elements of an axis, all or those up to each: at most so many times their range.
SUMS = frozenset({Op.SUM, Op.CUMSUM, Op.SUM_FROM_END})
# What gives one of several keys, or the same ones. There are as many keys as ranks, so never none.
KEEPS_KEYS = frozenset({Op.MAX, Op.MIN, Op.MAXIMUM, Op.MINIMUM, Op.WHERE, Op.RESHAPE, Op.GROUPED})


def ranges(graph: Graph) -> dict[int, Range]:
    """The lowest and highest value of each node that is made of the column's number in int64, or
    of the length of a row of any length.

    They are of int64, or of int32 where the user has converted them: `torch.arange(n).int()`.
    """
    found: dict[int, Range] = {}
    in_keys: dict[int, Range | None] = {}  # of the indices in them
    for node in graph:
        if node.value.dtype not in (INT32, INT64):
            continue
        if node.op is Op.WHERE and (same := _chosen(graph, node, found)) is not None:
            if same in found:
                found[node.id] = found[same]
            continue
        if node.op is Op.KEY:
            index = graph[node.inputs[1]]
            in_keys[node.id] = found.get(index.id) or _number(index)
        elif node.op in KEEPS_KEYS and any(i in in_keys for i in node.inputs):
            in_keys[node.id] = _joined(graph, node, in_keys)
        elif node.op is Op.KEY_INDEX:
            range_ = in_keys.get(node.inputs[0])
            if range_ and graph.users(node.id):  # one that is returned and no more stays as it is
                found[node.id] = range_
        elif node.op is Op.INDEX:
            if node.value.dtype is INT64:  # one in int32 is narrow already
                found[node.id] = 0, graph.n - 1
        elif node.op is Op.LENGTH:
            if node.value.dtype is INT64:
                found[node.id] = 1, graph.n
        elif node.op in (Op.CAST, Op.CONVERT):
            if node.inputs[0] in found:
                found[node.id] = found[node.inputs[0]]
            elif _is_counted(graph, node):
                found[node.id] = 0, 1
        elif any(i in found for i in node.inputs):
            operands = _known(graph.operands(node), found)
            if None in operands:
                continue
            is_sum = _is_sum(node)
            range_ = _of_sum(graph, node, *operands) if is_sum else _range(node.op, operands)
            if range_ and LIMITS.min < range_[0] and range_[1] < LIMITS.max:
                found[node.id] = range_
    return found


def _is_counted(graph: Graph, node: Node) -> bool:
    """Whether this is a mask as int64 that is added to others, as in a sum."""
    readers = graph.users(node.id)
    is_mask = graph[node.inputs[0]].value.dtype is torch.bool and node.value.dtype is INT64
    are_added = [graph[id].op is Op.ADD or _is_sum(graph[id]) for id in readers]
    return is_mask and bool(readers) and all(are_added)


def _is_sum(node: Node) -> bool:
    """Whether it sums elements of a row: all, those of a group, or those up to each."""
    return node.op in SUMS or (node.op is Op.GROUPED and node.arg[0] is Op.SUM)


def _chosen(graph: Graph, node: Node, found: dict[int, Range]) -> int | None:
    """What a choice always is, if ranges decide its comparison."""
    condition, *choices = graph.operands(node)
    if condition.op not in COMPARISONS:
        return None
    holds = _decided(condition.op, _known(graph.operands(condition), found))
    if holds is None or choices[not holds].value.inner != node.value.inner:
        return None
    return choices[not holds].id


def _known(operands: Iterable[Node], found: dict[int, Range]) -> list[Range | None]:
    return [found.get(each.id) or _number(each) for each in operands]


def _joined(graph: Graph, node: Node, in_keys: dict[int, Range | None]) -> Range | None:
    """The range of the indices in keys that come of others. A number stands for no key."""
    operands = graph.operands(node)[1:] if node.op is Op.WHERE else graph.operands(node)
    ends = [in_keys.get(each.id) for each in operands if each.op is not Op.CONST]
    if None in ends:
        return None
    return min(low for low, _ in ends), max(high for _, high in ends)


def _number(node: Node) -> Range | None:
    fits = node.op is Op.CONST and LIMITS.min < node.arg < LIMITS.max
    return (node.arg, node.arg) if fits else None


def _of_sum(graph: Graph, node: Node, operand: Range) -> Range:
    """The range of a sum, which has at most as many elements as the row or its operand."""
    (lo, hi), most = operand, max(graph.n, prod(graph[node.inputs[0]].value.inner))
    return min(lo, most * lo), max(hi, most * hi)


def _range(op: Op, operands: list[Range]) -> Range | None:
    """The range of an operation; None for one that is left in int64."""
    (lo, hi), (low, high) = operands[0], operands[-1]
    if op is Op.NEG:
        return -hi, -lo
    if op is Op.ADD:
        return lo + low, hi + high
    if op is Op.SUB:
        return lo - high, hi - low
    if op is Op.MUL:
        products = [a * b for a in (lo, hi) for b in (low, high)]
        return min(products), max(products)
    if op is Op.MAXIMUM:
        return max(lo, low), max(hi, high)
    if op is Op.MINIMUM:
        return min(lo, low), min(hi, high)
    if op is Op.FLOORDIV and low == high > 0:
        return lo // low, hi // low
    if op is Op.MOD and low == high > 0:
        return 0, low - 1
    if op in (Op.AND, Op.OR, Op.XOR):
        return _of_bits(op, *operands)
    if op is Op.NOT:
        return ~hi, ~lo
    if op in (Op.LSHIFT, Op.RSHIFT) and 0 <= low == high < 32:  # inside the width of both dtypes
        return (lo << low, hi << low) if op is Op.LSHIFT else (lo >> low, hi >> low)
    return None


def _of_bits(op: Op, a: Range, b: Range) -> Range:
    """The range of a & b, a | b or a ^ b: the bits of the longer, and a sign if either has one."""
    (lo, hi), (low, high) = a, b
    bits = max((x if x >= 0 else ~x).bit_length() for x in (lo, hi, low, high))
    if op is Op.AND and (lo >= 0 or low >= 0):
        return 0, min(end for start, end in (a, b) if start >= 0)
    return (0 if lo >= 0 <= low else -(1 << bits)), (1 << bits) - 1


def _decided(op: Op, operands: list[Range | None]) -> bool | None:
    """Whether a comparison always holds, or never does; None if it depends on values."""
    if None in operands:
        return None
    (lo, hi), (low, high) = operands
    if op in (Op.EQ, Op.NE):
        return op is Op.NE if hi < low or high < lo else None
    if op in (Op.GT, Op.GE):
        (lo, hi), (low, high), op = (low, high), (lo, hi), MIRRORED[op]
    always, never = (hi < low, lo >= high) if op is Op.LT else (hi <= low, lo > high)
    return True if always else False if never else None


def without_known(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
    """A rule of `rewrite`: what is left of choices and masks of which a part is known."""
    known = [new[i].arg if new[i].op is Op.CONST else None for i in inputs]
    kept = None
    if node.op is Op.WHERE and known[0] is not None:
        kept = inputs[1 if known[0] else 2]
    elif node.op in (Op.AND, Op.OR) and new[inputs[0]].value.dtype is torch.bool:
        neutral = node.op is Op.AND
        kept = next((inputs[1 - k] for k in (0, 1) if known[k] is neutral), None)
    if kept is None:
        return None
    value = new[kept].value
    same = value.inner, value.dtype, value.stored
    return kept if same == (node.value.inner, node.value.dtype, node.value.stored) else None


def narrowing(graph: Graph) -> Rule | None:
    """The rule with which `rewrite` does it; None where a graph has no index."""
    found = ranges(graph)
    return _Narrowing(graph, found) if found else None


class _Narrowing:
    """The rule for a graph, and the ranges of its values.

    wide: from a value in int32 to the same in int64.
    """

    def __init__(self, graph: Graph, found: dict[int, Range]):
        self.graph, self.found = graph, found
        self.wide: dict[int, int] = {}

    def __call__(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is Op.INDEX:
            return new.add_index(node.arg, INT32, node.loc)
        if node.op is Op.LENGTH:
            return new.add(node.op, (), INT32, node.loc)
        if node.op is Op.KEY_INDEX and node.id in self.found:
            index = new.add(node.op, inputs, node.arg, node.loc)
            return new.add(Op.CONVERT, (index,), INT32, node.loc)
        if node.id in self.found:
            return self._ranged(new, node, inputs)
        if not any(i in self.found for i in node.inputs):
            return None
        if node.op in COMPARISONS and (compared := self._compared(new, node, inputs)) is not None:
            return compared
        is_of_others = node.op is Op.KEY and node.inputs[0] not in self.found
        if node.op in TAKES_BOTH or is_of_others:
            return new.add(node.op, inputs, node.arg, node.loc)
        both = zip(self.graph.operands(node), inputs, strict=True)
        operands = [
            self._widened(new, id) if o.id in self.found and o.value.dtype is INT64 else id
            for o, id in both
        ]
        return new.add(node.op, operands, node.arg, node.loc)

    def _ranged(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int:
        """An operation of which a range is known, in int32."""
        if node.op in (Op.CAST, Op.CONVERT):
            if node.inputs[0] in self.found:
                return inputs[0]
            return new.add(Op.CONVERT, inputs, INT32, node.loc)
        if node.op is Op.WHERE:
            return inputs[node.inputs.index(_chosen(self.graph, node, self.found))]
        both = zip(self.graph.operands(node), inputs, strict=True)  # all have ranges
        operands = [id if o.id in self.found else _in_int32(new, o, o.arg) for o, id in both]
        if node.op in (Op.MAXIMUM, Op.MINIMUM) and (same := self._within(new, node, operands)):
            return same
        return new.add(node.op, operands, node.arg, node.loc)

    def _within(self, new: Builder, node: Node, operands: list[int]) -> int | None:
        """The operand that a maximum or minimum always is, because no other one is beyond it."""
        (lo, hi), (low, high) = _known(self.graph.operands(node), self.found)
        is_first, is_second = lo >= high, low >= hi
        if node.op is Op.MINIMUM:
            is_first, is_second = is_second, is_first
        for always, id in zip((is_first, is_second), operands, strict=True):
            if always and new[id].value.inner == node.value.inner:
                return id
        return None

    def _compared(self, new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        """A comparison in int32; None where the other operand differs from column to column."""
        before = self.graph.operands(node)
        holds = _decided(node.op, _known(before, self.found))
        if holds is not None:
            return new.add_const(holds, node.value, node.loc)
        others = [o for o in before if o.id not in self.found]
        if any(o.value.spread and o.op is not Op.CONST for o in others):
            return None
        (range_, *_) = (self.found[i] for i in node.inputs if i in self.found)
        operands = [
            id if o.id in self.found else _limited(new, o, id, range_)
            for o, id in zip(before, inputs, strict=True)
        ]
        if others and node.inputs[0] not in self.found:  # the column's number comes first
            return new.add(MIRRORED[node.op], operands[::-1], node.arg, node.loc)
        return new.add(node.op, operands, node.arg, node.loc)

    def _widened(self, new: Builder, id: int) -> int:
        if id not in self.wide:
            self.wide[id] = new.add(Op.CONVERT, (id,), INT64, new[id].loc)
        return self.wide[id]


def _in_int32(new: Builder, like: Node, value: int) -> int:
    return new.add_const(value, replace(like.value, dtype=INT32, stored=None), like.loc)


def _limited(new: Builder, node: Node, id: int, range_: Range) -> int:
    """What a row has once, in int32: as it is, or one number beyond the range."""
    low, high = max(range_[0] - 1, LIMITS.min), min(range_[1] + 1, LIMITS.max)
    if node.op is Op.CONST:
        return _in_int32(new, node, min(max(node.arg, low), high))
    source = strip(new, new[id])
    if source.op is Op.CONVERT and new[source.inputs[0]].value.dtype is INT32:
        id = source.inputs[0]
    value = new[id].value
    scalar = replace(value, inner=(), dtype=value.dtype)
    at_least = new.add(Op.MAXIMUM, (id, new.add_const(low, scalar)), loc=node.loc)
    within = new.add(Op.MINIMUM, (at_least, new.add_const(high, scalar)), loc=node.loc)
    if value.dtype is INT32:
        return within
    return new.add(Op.CONVERT, (within,), INT32, node.loc)

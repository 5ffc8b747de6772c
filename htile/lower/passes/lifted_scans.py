"""Scans that are lifted to other columns, as a part of choosing by columns (`by_column.py`).

An element of a scan is what all elements before it have together. So a scan of a row that is moved
is not that scan, moved: what lies beyond an end of the row counts in it. This is reduced by itself,
and combined with the scan of what is in the columns. Its sums are added in another order, so a scan
whose largest elements are looked for is left as it is.
"""

from __future__ import annotations

from math import inf, isnan, nan

import torch

from ...frontend.dtypes import STORAGE
from ...frontend.graph import Graph, Node
from ...frontend.ops import FROM_END, SCANS, Op
from ..patterns import NOT_ELEMENTWISE
from .collectives import COMBINE, TOTAL, has_own_bits

# What a reduction of these kinds combines with x to x.
NEUTRAL = {
    Op.SUM: 0, Op.MEAN: 0, Op.PROD: 1, Op.MAX: -inf, Op.MIN: inf, Op.ANY: False, Op.ALL: True,
    Op.KTHVALUE: nan,  # behind all others
}  # fmt: skip
MOST_ROWS = 8  # of what lies beyond an end, each of which is a reduction
Span = tuple[int, int]  # of columns: the first one, and the one behind the last


def neutral(op: Op, dtype: torch.dtype) -> object:
    """What a reduction combines with any x of this dtype to x."""
    number = NEUTRAL[op]
    if dtype.is_floating_point or dtype is torch.bool:
        return float(number) if dtype.is_floating_point else number
    limits = torch.iinfo(dtype)
    if isnan(number):
        return limits.max
    return {-inf: limits.min, inf: limits.max}.get(number, number)


def depending_on_scans(graph: Graph) -> frozenset[int]:
    """The rows that are computed of scans: of the same elements, or of parts of neighbours."""
    found: set[int] = set()
    for node in graph:
        is_row = len(node.value.inner) == 1
        is_near = node.op not in NOT_ELEMENTWISE or node.op in (Op.CAT, Op.EXPAND)
        is_near = is_near or (node.op is Op.SLICE and node.arg[2] == 1)
        if is_row and (node.op in SCANS or (is_near and not found.isdisjoint(node.inputs))):
            found.add(node.id)
    return frozenset(found)


class LiftedScans:
    """The method of a lifting for scans."""

    def _scan(self, node: Node, column: int, span: Span) -> int | None:
        """A scan of what is lifted, and of all that comes before it beyond an end of the row.

        Behind what counts in its columns there may be anything: no element before it sees that.
        """
        (operand,), (size,), dtype = node.inputs, node.value.inner, node.value.dtype
        if dtype in STORAGE or has_own_bits(self.graph, node.id):
            return None
        is_from_end = node.op in FROM_END
        start, end = max(column, 0), min(column + size, self.n)
        read, ends = (start, span[1]), (start, self.n)
        if is_from_end:
            read, ends = (span[0], end), (0, end)
        part = self._row(operand, column, read, ends, node)
        if part is None:
            return None
        found = self.new.add(node.op, (part,), node.arg, node.loc)
        first, last = (end - column, size) if is_from_end else (0, start - column)
        if first == last:
            return found
        if last - first > MOST_ROWS * self.n:
            return None
        return self._both(found, self._all(node, first, last), node)

    def _row(self, operand: int, column: int, read: Span, ends: Span, scan: Node) -> int | None:
        """What a scan takes, with what changes nothing in the columns that are not between ends.

        read: the columns whose elements count. None where it is one element for all columns.
        """
        part, dtype = self._lifted(operand, column, read), scan.value.dtype
        if part is not None:
            nothing = neutral(TOTAL.get(scan.op, Op.MAX), dtype)
            part = self._there(part, *ends, nothing, dtype, scan)
        return part if part is not None and self.new[part].value.inner == (self.n,) else None

    def _all(self, scan: Node, start: int, end: int) -> int:
        """What a scan has of the elements from `start` to `end` together, as one element."""
        found = None
        for first in range(start, end, self.n):  # as rows of this length
            part = self._part(scan, first, min(first + self.n, end))
            found = part if found is None else self._both(found, part, scan)
        return found

    def _part(self, scan: Node, start: int, end: int) -> int:
        """The same of at most as many elements as a row has."""
        (operand,), size = scan.inputs, end - start
        row = self._row(operand, -start, (0, size), (0, size), scan)
        if row is None:
            row = self.new.add(Op.SLICE, (self.ids[operand],), (-1, start, 1, size), scan.loc)

        def reduced(op: Op, row: int) -> int:
            found = self.new.add(op, (row,), None, scan.loc)
            return self.new.add(Op.RESHAPE, (found,), (1,), scan.loc)

        if scan.op in TOTAL:
            return reduced(TOTAL[scan.op], row)
        peak = self._finite(reduced(Op.MAX, row), scan)
        return self._logarithm(reduced(Op.SUM, self._relative(row, peak, scan)), peak, scan)

    def _both(self, first: int, second: int, scan: Node) -> int:
        """What a scan has of two parts together."""
        if scan.op in TOTAL:
            return self._of(scan, COMBINE[TOTAL[scan.op]], first, second)
        peak = self._finite(self._of(scan, Op.MAXIMUM, first, second), scan)
        terms = self._relative(first, peak, scan), self._relative(second, peak, scan)
        return self._logarithm(self._of(scan, Op.ADD, *terms), peak, scan)

    def _finite(self, peak: int, scan: Node) -> int:
        """A largest element to subtract: 0 for an infinite one, of which this would be NaN."""
        infinity, zero = (self._number(number, torch.float32) for number in (inf, 0.0))
        is_infinite = self._of(scan, Op.EQ, self._of(scan, Op.ABS, peak), infinity)
        return self._of(scan, Op.WHERE, is_infinite, zero, peak)

    def _relative(self, value: int, peak: int, scan: Node) -> int:
        """The exponential of a value less a peak."""
        return self._of(scan, Op.EXP, self._of(scan, Op.SUB, value, peak))

    def _logarithm(self, total: int, peak: int, scan: Node) -> int:
        """The logarithm of a sum of what `_relative` gives."""
        return self._of(scan, Op.ADD, self._of(scan, Op.LOG, total), peak)

    def _of(self, scan: Node, op: Op, *operands: int) -> int:
        return self.new.add(op, operands, loc=scan.loc)

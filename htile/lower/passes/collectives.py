"""What is wanted of reductions and scans, as a part of placing a graph (`space.py`).

The order in which a reduction takes its elements is free, so an axis that is reduced may be cut as
the placing asks for: into blocks of one size, or at the ends of the parts that were joined.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from math import gcd, inf, prod

from ...errors import UnsupportedError
from ...frontend.graph import Graph, Node
from ...frontend.ops import COMPARISONS, EXTREMES, FROM_END, RUNNING, SCANS, TURNED, Op
from .axes import Axis, Index, Refine, Ungrouped, Wanted, axes_of, moved_along
from .placed import Placed

MOST_PIECES = 64  # that an axis is cut into
# What combines two pieces of an axis that is reduced.
COMBINE = {
    Op.SUM: Op.ADD, Op.MEAN: Op.ADD, Op.PROD: Op.MUL, Op.MAX: Op.MAXIMUM, Op.MIN: Op.MINIMUM,
    Op.ANY: Op.OR, Op.ALL: Op.AND,
}  # fmt: skip
# What the last element of a scan is, or the first one of a scan from the end; that of the others
# is a logsumexp.
TOTAL = {
    Op.CUMSUM: Op.SUM, Op.CUMPROD: Op.PROD, Op.CUMMAX: Op.MAX, Op.CUMMIN: Op.MIN,
    Op.SUM_FROM_END: Op.SUM, Op.MAX_FROM_END: Op.MAX, Op.MIN_FROM_END: Op.MIN,
}  # fmt: skip
METHODS = {Op.MAX: "amax", Op.MIN: "amin"}  # of a tensor, where they are not called as the op is


def _told(op: Op) -> str:
    """How a scan is called where a user reads it."""
    return f"{TURNED[op].value} from the end" if op in FROM_END else op.value


def _told_total(op: Op) -> str:
    """How the last element of a scan is called there."""
    total = TOTAL.get(op)
    return "logsumexp(-1)" if total is None else f"{METHODS.get(total, total.value)}()"


def has_own_bits(graph: Graph, id: int) -> bool:
    """Whether all that is read of a scan has to be of one scan.

    It has if the scan rounds, and an extreme of what is computed of it is compared with what is.
    """
    scan = graph[id]
    if scan.op in RUNNING or not scan.value.dtype.is_floating_point:
        return False
    behind, has_extreme = {id}, False
    for node in graph:
        if behind.isdisjoint(node.inputs):
            continue
        behind.add(node.id)
        has_extreme |= node.op in EXTREMES
        if has_extreme and node.op in COMPARISONS and behind.issuperset(node.inputs):
            return True
    return False


class Collectives:
    """The methods of a placing for these operations."""

    def _reduced(self, node: Node, wanted: Wanted) -> int:
        """A reduction, whose axis may have to be cut for what it is a reduction of."""
        return self._cutting(("reduced", node.id), lambda: self._reduced_parts(node, wanted))

    def _reduced_parts(self, node: Node, wanted: Wanted) -> int:
        """A reduction, of each part by itself where its axis is cut at the ends of parts."""
        (operand,) = node.inputs
        shape = self.graph[operand].value.inner
        at = len(shape) + (-1 if node.arg is None else node.arg)
        found = None
        for k, (start, end) in enumerate(pairwise([0, *self.ends.get(node.id, ()), shape[at]])):
            part = self._reduced_part(node, wanted, at, k, start, end - start)
            if found is None:
                found = part
            elif node.op is Op.MEAN:
                found = self._mean_of_both(found, part, (end - start) / end, node)
            else:
                found = self._both(found, part, node)
        return found

    def _mean_of_both(self, first: int, second: int, share: float, node: Node) -> int:
        """The mean of two parts, of which the second has a share of all elements.

        Of equal elements it is exactly that element, by the difference of the two. Where that is
        not finite, because one is infinite or both are large, each counts by its share.
        """

        def computed(op: Op, *inputs: int) -> int:
            return self._computed(op, inputs, None, node)

        of_second, of_first, zero = (
            self._add(Placed(Op.CONST, (), number, (), node)) for number in (share, 1 - share, 0.0)
        )
        more = computed(Op.SUB, second, first)
        exact = computed(Op.ADD, first, computed(Op.MUL, more, of_second))
        parts = computed(Op.MUL, first, of_first), computed(Op.MUL, second, of_second)
        is_finite = computed(Op.EQ, computed(Op.SUB, more, more), zero)
        return computed(Op.WHERE, is_finite, exact, computed(Op.ADD, *parts))

    def _reduced_part(
        self, node: Node, wanted: Wanted, at: int, k: int, start: int, size: int
    ) -> int:
        """The reduction of the k-th part of an axis."""
        parts, inside = self._parts(node, wanted, at, k, start, size)
        outside = axes_of(wanted)
        if set(inside) & {axis for part in parts for axis in self.nodes[part].axes}:
            self._note((*outside, *inside))
        found = self._of_all(parts, inside, outside, node)
        columns = self.widened.get(("reduced", node.id, k), size)
        if node.op is Op.MEAN and columns > size:
            first = (*wanted[:at], Index(start), *wanted[at:])
            return self._mean_of_fewer(found, columns / size, node, first)
        return found

    def _of_all(
        self, parts: list[int], inside: list[Axis], outside: tuple[Axis, ...], node: Node
    ) -> int:
        """What a reduction, or a scan at its end, has of these pieces of an axis together."""
        op = TOTAL.get(node.op, node.op)
        if op in SCANS:  # a logsumexp
            largest = self._of_all(parts, inside, outside, replace(node, op=Op.MAX))
            peak = self._finite(largest, node)
            terms = [self._relative(part, peak, node) for part in parts]
            total = self._of_all(terms, inside, outside, replace(node, op=Op.SUM))
            return self._logarithm(total, peak, node)
        count = len(parts)
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=False)
            odd = parts[-1:] if len(parts) % 2 else []
            parts = [self._computed(COMBINE[op], pair, None, node) for pair in pairs] + odd
        (found,) = parts
        if inside and not set(inside) & set(self.nodes[found].axes):
            found = self._of_equal(found, prod([axis.size for axis in inside]), op, node)
        elif inside:
            found = self._add(Placed(op, (found,), None, outside, node, (), tuple(inside)))
        if op is Op.MEAN and count > 1:
            number = self._add(Placed(Op.CONST, (), float(count), (), node))
            found = self._computed(Op.DIV, (found, number), None, node)
        return found

    def _parts(
        self, node: Node, wanted: Wanted, at: int, k: int, start: int, size: int
    ) -> tuple[list[int], list[Axis]]:
        """The pieces of the k-th part of an axis, and the axes of columns that they lie along."""
        key = ("reduced", node.id, k)
        has_columns = any(index.steps for index in wanted[at:])  # inside of it
        if self.by_use and axes_of(wanted):
            key, has_columns = (*key, "row"), True
        if key not in self.factors and has_columns:
            self.factors[key] = [(size, False)]
            self._refuse_many(node, size, 1)
        parts, inside, wide = [], [], self.widened.get(key, size)
        for index, inside in self._blocks(key, wide):  # noqa: B007 (they are the same)
            place = Index(start).plus(index)
            part = self._want(node.inputs[0], (*wanted[:at], place, *wanted[at:]))
            if wide > size:
                part = self._only(part, index, size, self._beside(node), node)
            parts.append(part)
        return parts, inside

    def _of_rank(self, node: Node, wanted: Wanted) -> int:
        """An element by its rank, along an axis that may have to be cut likewise."""
        return self._cutting(("reduced", node.id), lambda: self._ranked(node, wanted))

    def _ranked(self, node: Node, wanted: Wanted) -> int:
        """An element by its rank, among all pieces of its axis together."""
        shape = self.graph[node.inputs[0]].value.inner
        at = len(shape) + (-1 if node.arg is None else node.arg)
        rank = self._want(node.inputs[1], ())
        pieces, along = [], []
        for k, (start, end) in enumerate(pairwise([0, *self.ends.get(node.id, ()), shape[at]])):
            parts, inside = self._parts(node, wanted, at, k, start, end - start)
            if not inside:
                raise Ungrouped if self.in_groups else UnsupportedError(
                    f"{shape[at]} elements that are written out one by one are ranked: pass what "
                    "is ranked as an argument of its own",
                    node.loc,
                )  # fmt: skip
            self._note((*axes_of(wanted), *inside))
            pieces += [self._along(part, inside[0], node) for part in parts]
            along += inside
        inputs, outside = (*pieces, rank), axes_of(wanted)
        return self._add(Placed(node.op, inputs, None, outside, node, (), tuple(along)))

    def _of_equal(self, operand: int, count: int, op: Op, node: Node) -> int:
        """A reduction of so many equal elements."""
        if op is Op.SUM:
            kind = float if node.value.dtype.is_floating_point else int
            number = self._add(Placed(Op.CONST, (), kind(count), (), node))
            return self._computed(Op.MUL, (operand, number), None, node)
        if op is not Op.PROD:
            return operand
        found = operand
        for digit in f"{count:b}"[1:]:  # by squaring, and by a product where the digit is 1
            for factor in (found, operand) if digit == "1" else (found,):
                found = self._computed(Op.MUL, (found, factor), None, node)
        return found

    def _scanned(self, node: Node, wanted: Wanted) -> int:
        """A scan along the columns, or one element of a scan along what is written out."""
        (operand,) = node.inputs
        axis = -1 if node.arg is None else node.arg
        at = len(wanted) + axis
        index, size = wanted[at], self.graph[operand].value.inner[axis]
        is_from_end = node.op in FROM_END
        back = 1 if is_from_end else -1  # towards what comes first
        rest = size - 1 - index.last if is_from_end else index.start  # elements that come first
        if not index.steps:
            is_alone = node.value.spread and axis == -1 and not axes_of(wanted)
            if is_alone and rest == size - 1:  # of a row: all of it
                return self._reduced(node, (*wanted[:at], *wanted[at + 1 :]))
            if rest >= self.most:
                part = f"{index.start}:" if is_from_end else f":{index.start + 1}"
                raise UnsupportedError(
                    f"the element {index.start} alone of a {_told(node.op)}: write "
                    f"x[{part}].{_told_total(node.op)}",
                    node.loc,
                )
            found = self._want(operand, wanted)
            if rest:
                self.scans[node.id, None] = None
                before = self._want(node.id, moved_along(wanted, axis, index, back))
                found = self._both(before, found, node)
            return found
        along, step = max(index.steps, key=lambda each: each[1])
        if self.in_groups and axes_of(wanted) != (along,):
            raise Ungrouped
        if len(index.steps) > 1:
            raise Refine(along, 1, asking=node)
        if step > 1:
            raise UnsupportedError(
                f"one of every {step} elements of a {_told(node.op)}: return all of them, and take "
                "a part of the result (out[:, ::2] is a view)",
                node.loc,
            )
        if rest % along.size:
            raise Refine(along, gcd(rest, along.size), asking=node)
        self.scans[node.id, along] = None
        found = self._spread(operand, wanted, along, node)
        axes = self.nodes[found].axes
        found = self._add(Placed(node.op, (found,), None, axes, node, (), (along,)))
        outside = tuple(each for each in axes_of(wanted) if each != along)
        before = None
        for start in range(rest, 0, -along.size):  # the pieces before this one
            place = moved_along(wanted, axis, index, back * start)
            piece = self._spread(operand, place, along, node)
            whole = self._of_all([piece], [along], outside, node)
            before = whole if before is None else self._both(before, whole, node)
        return found if before is None else self._both(before, found, node)

    def _cut_scans_alike(self) -> None:
        """Raise Refine for a scan that is cut in two ways, if one of its elements is looked for.

        A sum of floats has other bits where its axis is cut otherwise. The largest element of one
        cut would then be equal to none of the other.
        """
        for id in dict.fromkeys(id for id, _ in self.scans):
            found = [axis for other, axis in self.scans if other == id]
            sizes = {1 if axis is None else axis.size for axis in found}
            if len(sizes) > 1 and has_own_bits(self.graph, id):
                longest = max((axis for axis in found if axis), key=lambda axis: axis.size)
                raise Refine(longest, gcd(*sizes), asking=self.graph[id])

    def _both(self, before: int, found: int, node: Node) -> int:
        """What a reduction or a scan has of two pieces together."""
        op = TOTAL.get(node.op, node.op)
        if op not in SCANS:
            return self._computed(COMBINE[op], (before, found), None, node)
        peak = self._computed(Op.MAXIMUM, (before, found), None, node)
        peak = self._finite(peak, node)
        terms = (self._relative(before, peak, node), self._relative(found, peak, node))
        return self._logarithm(self._computed(Op.ADD, terms, None, node), peak, node)

    def _finite(self, peak: int, node: Node) -> int:
        """A largest element to subtract: 0 for an infinite one, of which this would be NaN."""
        infinity = self._add(Placed(Op.CONST, (), inf, (), node))
        zero = self._add(Placed(Op.CONST, (), 0.0, (), node))
        size = self._computed(Op.ABS, (peak,), None, node)
        is_infinite = self._computed(Op.EQ, (size, infinity), None, node)
        return self._computed(Op.WHERE, (is_infinite, zero, peak), None, node)

    def _relative(self, value: int, peak: int, node: Node) -> int:
        """The exponential of a value less a peak."""
        difference = self._computed(Op.SUB, (value, peak), None, node)
        return self._computed(Op.EXP, (difference,), None, node)

    def _logarithm(self, total: int, peak: int, node: Node) -> int:
        """The logarithm of a sum of what `_relative` gives."""
        logarithm = self._computed(Op.LOG, (total,), None, node)
        return self._computed(Op.ADD, (logarithm, peak), None, node)

    def _spread(self, operand: int, wanted: Wanted, axis: Axis, node: Node) -> int:
        """What is wanted of an operand; a row of equal elements if it does not vary there."""
        return self._along(self._want(operand, wanted), axis, node)

    def _along(self, found: int, axis: Axis, node: Node) -> int:
        """A value along an axis; a row of equal elements if it does not vary there."""
        if axis in self.nodes[found].axes:
            return found
        one = 1.0 if node.value.dtype.is_floating_point else 1
        ones = self._add(Placed(Op.CONST, (), one, (axis,), node))
        return self._computed(Op.MUL, (found, ones), None, node)

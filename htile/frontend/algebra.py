"""Builds the nodes of a derivative, with the algebra that keeps them few.

Every rule is an identity of real numbers, so a graph that is built by them can be differentiated
again. Where torch has NaN, because it subtracts infinities or multiplies 0 by one, a rule may give
the number that the identity has. What is built already is not built again. A value may have fewer
axes than what it stands for: it is the same along those that it lacks, as in torch's broadcasting.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

from .graph import Builder, Graph, Node, Role
from .joined import joined_parts
from .ops import COLLECTIVES, COMMUTATIVE, Op, Value, Varies, broadcast_shapes
from .slopes import Slope

FLOAT = torch.float32
MOST_DEPTH = 4  # A term is looked for in so many sums and products that are within each other.


class Algebra:
    """Adds nodes to a graph; every method takes and returns ids.

    loc: the user's line that the next nodes belong to.
    """

    def __init__(self, builder: Builder, graph: Graph):
        self.builder, self.loc = builder, None
        self._count = len(graph)  # of the nodes that are those of the graph; derived ones follow
        self.kept = {out.id for out in graph.outputs}  # which are there anyway: not taken apart
        self._seen: dict[object, int] = {}
        self._always: int | None = None  # the mask that holds everywhere
        self._arithmetic = {Op.NEG: self.neg, Op.ADD: self.add, Op.SUB: self.sub, Op.MUL: self.mul,
                            Op.DIV: self.div}  # fmt: skip
        self.stages: list[int] = []  # how many reductions are on the longest way to each node
        self.same: list[int] = []  # the first node of the graph that computes what each one does
        for node in graph:
            inputs = tuple([self.same[i] for i in node.inputs])
            key = _key(node.op, inputs, node.arg, node.value)
            is_input = node.op is Op.INPUT
            self.same.append(node.id if is_input else self._seen.setdefault(key, node.id))
            self._note(node)

    def __getitem__(self, id: int) -> Node:
        return self.builder[id]

    def is_derived(self, id: int) -> bool:
        """Whether a node is part of the derivative, and not of the graph that is derived."""
        return id >= self._count

    def _note(self, node: Node) -> None:
        before = max([self.stages[i] for i in node.inputs], default=0)
        self.stages.append(before + (node.op in COLLECTIVES))

    def node(self, op: Op, *inputs: int, arg: object = None) -> int:
        """An operation as it is, without algebra."""
        key = _key(op, inputs, arg, None)
        id = self._seen.get(key)
        if id is None:
            id = self._seen[key] = self.builder.add(op, inputs, arg, self.loc)
            self._note(self[id])
        return id

    def known(self, op: Op, *inputs: int, arg: object = None) -> int | None:
        """The node of the graph that is derived which computes this, if it has one."""
        id = self._seen.get(_key(op, inputs, arg, None))
        return None if id is None or self.is_derived(id) else id

    def copied(self, node: Node, inputs: tuple[int, ...]) -> int:
        """A node of another graph, which is no input, with these operands."""
        key = _key(node.op, inputs, node.arg, node.value)
        id = self._seen.get(key)
        if id is None:
            id = self._seen[key] = self.builder.copied(node, inputs)
            self._note(self[id])
        return id

    def input(self, name: str, role: Role, dtype: torch.dtype, value: Value) -> int:
        """A leaf that the caller passes."""
        id = self.builder.add_input(name, role, dtype, value)
        self._note(self[id])
        return id

    def number(self, x: float) -> int:
        """A number in float32, of shape ()."""
        return self.filled(x, ())

    def filled(self, x: float, inner: tuple[int, ...], spread: bool = False) -> int:
        """The number in every element of a shape."""
        return self._constant(float(x), Value(inner, Varies.SCALAR, FLOAT, None, spread))

    def integer(self, x: int) -> int:
        """The number in int64, of shape ()."""
        return self._constant(x, Value((), Varies.SCALAR, torch.int64))

    def _constant(self, x: object, value: Value) -> int:
        key = _key(Op.CONST, (), x, value)
        id = self._seen.get(key)
        if id is None:
            id = self._seen[key] = self.builder.add_const(x, value, self.loc)
            self._note(self[id])
        return id

    def zero_like(self, a: int) -> int:
        """0 with the slope of a value that is 0, which no kernel computes for it."""
        if self._always is None:
            value = Value((), Varies.SCALAR, torch.bool)
            self._always = self.builder.add_const(True, value, self.loc)
            self._note(self[self._always])
        return self.node(Op.WHERE, self._always, self.number(0.0), a, arg=Slope.LAST)

    def index(self, size: int) -> int:
        """The numbers from 0 to size - 1 in int64."""
        value = Value((size,), Varies.SHARED, torch.int64, spread=True)
        key = _key(Op.INDEX, (), size, value)
        id = self._seen.get(key)
        if id is None:
            id = self._seen[key] = self.builder.add_index(size, torch.int64, self.loc)
            self._note(self[id])
        return id

    def count(self, size: int, spread: bool) -> int:
        """How many elements an axis has, in float32: of a row of any length, what the call says."""
        if self.builder.multiple is None or not spread or size != self.builder.n:
            return self.number(size)
        return self.node(Op.CONVERT, self.node(Op.LENGTH, arg=torch.int64), arg=FLOAT)

    def constant(self, id: int) -> float | None:
        """The number that a node holds in every element, or None."""
        node = self[id]
        return node.arg if node.op is Op.CONST and node.value.dtype is FLOAT else None

    def inner(self, id: int) -> tuple[int, ...]:
        """The shape of a node."""
        return self[id].value.inner

    def is_number(self, id: int) -> bool:
        """Whether a node has one element, which is no row of one."""
        value = self[id].value
        return prod(value.inner) == 1 and not value.spread

    # Arithmetic

    def neg(self, a: int) -> int:
        """-a."""
        node, number = self[a], self.constant(a)
        if number is not None:
            return self.number(-number)
        if node.op is Op.NEG:
            return node.inputs[0]
        if node.op is Op.SUB and self.is_derived(a):
            return self.sub(*node.inputs[::-1])
        if node.op is Op.MUL:
            for x, y in (node.inputs, node.inputs[::-1]):
                if (number := self.constant(x)) is not None:
                    return self.mul(self.number(-number), y)
        return self.node(Op.NEG, a)

    def add(self, a: int, b: int) -> int:
        """a + b."""
        if self.constant(a) == 0:
            return b
        if self.constant(b) == 0:
            return a
        for x, y in ((a, b), (b, a)):
            if self[y].op is Op.NEG:
                return self.sub(x, self[y].inputs[0])
        for x, y in ((a, b), (b, a)):
            if (found := self._without(x, y, -1)) is not None:
                return found
        if (divisor := self._divisor(a, b)) is not None:
            return self.div(self.add(self[a].inputs[0], self[b].inputs[0]), divisor)
        found = joined_parts(self, a, b)
        return self.node(Op.ADD, a, b) if found is None else found

    def sub(self, a: int, b: int) -> int:
        """a - b."""
        if self.constant(b) == 0:
            return a
        if self.constant(a) == 0:
            return self.neg(b)
        if self[b].op is Op.NEG:
            return self.add(a, self[b].inputs[0])
        if self[a].op is Op.NEG and self.is_derived(a):
            return self.neg(self.add(self[a].inputs[0], b))
        if self.is_derived(a) and (found := self._without(a, b)) is not None:
            return found
        if (divisor := self._divisor(a, b)) is not None:
            return self.div(self.sub(self[a].inputs[0], self[b].inputs[0]), divisor)
        return self.node(Op.SUB, a, b)

    def _without(self, a: int, b: int, sign: int = 1, depth: int = 0) -> int | None:
        """a - sign * b, if sign * b is found among the terms of a. Else it is None.

        Only nodes of the derivative are taken apart, because a kernel has the others anyway.
        """
        if a == b and sign == 1:
            return self.number(0.0)
        if not self.is_derived(a) or depth == MOST_DEPTH:
            return None
        x, y = self[a], self[b]
        if x.op is y.op is Op.MUL and x.arg is y.arg is None:
            for common in {*x.inputs} & {*y.inputs}:
                (c,), (d,) = (others(node.inputs, common) for node in (x, y))
                if (rest := self._without(c, d, sign, depth + 1)) is not None:
                    return self.mul(common, rest)
        if x.op is Op.NEG:
            rest = self._without(x.inputs[0], b, -sign, depth + 1)
            return None if rest is None else self.neg(rest)
        if x.op in (Op.ADD, Op.SUB):
            first, second = x.inputs
            combine, of_second = (self.add, 1) if x.op is Op.ADD else (self.sub, -1)
            if (rest := self._without(first, b, sign, depth + 1)) is not None:
                return combine(rest, second)
            if (rest := self._without(second, b, sign * of_second, depth + 1)) is not None:
                return combine(first, rest)
        return None

    def _divisor(self, a: int, b: int) -> int | None:
        """What both are divided by, where the quotients are part of the derivative."""
        x, y = self[a], self[b]
        if x.op is not Op.DIV or y.op is not Op.DIV or not self.is_derived(min(a, b)):
            return None
        first, second = x.inputs[1], y.inputs[1]
        if self.is_number(first) and self.is_number(second):  # in whatever shape
            is_common = self.unshaped(first) == self.unshaped(second)
            return max(first, second, key=lambda i: len(self.inner(i))) if is_common else None
        return first if first == second else None

    def unshaped(self, a: int) -> int:
        """A value without the reshapes around it."""
        while self[a].op is Op.RESHAPE:
            (a,) = self[a].inputs
        return a

    def mul(self, a: int, b: int) -> int:
        """a * b."""
        x, y = self.constant(a), self.constant(b)
        if x is not None and y is not None:
            return self.number(x * y)
        for number, other in ((x, b), (y, a)):
            if number == 1:
                return other
            if number == 0:
                return self.number(0.0)
            if number == -1:
                return self.neg(other)
            if number is not None and (found := self._scaled(number, other)) is not None:
                return found
        for c, other in ((a, b), (b, a)):
            if self[c].op is Op.NEG:
                return self.neg(self.mul(self[c].inputs[0], other))
            parts = self._number_of(c)
            if parts is not None and (x, y) == (None, None) and self._keeps_size(c, other):
                return self.mul(parts[0], self.mul(parts[1], other))  # numbers meet outside
        for c, other in ((a, b), (b, a)):
            node = self[other]
            if node.op is Op.DIV and self.is_derived(other):  # c * (d / e) is (c / e) * d
                quotient = self.known(Op.DIV, c, node.inputs[1])
                if quotient is not None:
                    return self.mul(quotient, node.inputs[0])
        for c, other in ((a, b), (b, a)):
            node = self[other]
            if node.op is Op.MUL:  # c * (d * e) is (c * d) * e, where c * d has fewer elements
                for d, e in (node.inputs, node.inputs[::-1]):
                    if self._is_smaller(c, d, other):
                        return self.mul(self.mul(c, d), e)
        return self.node(Op.MUL, a, b)

    def _scaled(self, number: float, a: int) -> int | None:
        """number * a, where a has a number as a factor already."""
        node = self[a]
        if node.op is Op.MUL:
            for x, y in (node.inputs, node.inputs[::-1]):
                if (more := self.constant(x)) is not None:
                    return self.mul(self.number(number * more), y)
        if node.op is Op.DIV:
            if (more := self.constant(node.inputs[0])) is not None:
                return self.div(self.number(number * more), node.inputs[1])
            if more := self.constant(node.inputs[1]):
                return self.mul(self.number(number / more), node.inputs[0])
        return None

    def _number_of(self, a: int) -> tuple[int, int] | None:
        """The number and the rest, if a is their product, which is part of the derivative."""
        node = self[a]
        if node.op is not Op.MUL or not self.is_derived(a):
            return None
        return next((both for both in (node.inputs, node.inputs[::-1])
                     if self.constant(both[0]) is not None), None)  # fmt: skip

    def _keeps_size(self, a: int, b: int) -> bool:
        """Whether the product of a and b has as many elements as a, and more than one."""
        shape = broadcast_shapes(self.inner(a), self.inner(b))
        return prod(shape) == prod(self.inner(a)) > 1

    def _is_smaller(self, a: int, b: int, than: int) -> bool:
        shape = broadcast_shapes(self.inner(a), self.inner(b))
        return prod(shape) < prod(self.inner(than))

    def div(self, a: int, b: int) -> int:
        """a / b."""
        number = self.constant(b)
        if number == 1:
            return a
        if self.constant(a) == 0:
            return self.number(0.0)
        if self.constant(a) is not None and number:
            return self.number(self.constant(a) / number)
        node = self[a]
        if node.op is Op.NEG:
            return self.neg(self.div(node.inputs[0], b))
        if number and (parts := self._number_of(a)) is not None:
            return self.mul(self.number(self.constant(parts[0]) / number), parts[1])
        if node.op is Op.MUL and b in node.inputs and (self._is_total(b) or self._is_share(b)):
            return node.inputs[0] if b == node.inputs[1] else node.inputs[1]
        return self.node(Op.DIV, a, b)

    def _is_total(self, a: int) -> bool:
        """Whether it is a sum of exp(x - max(x)): from 1 to the number of elements, or NaN."""
        node = self[self.unshaped(a)]
        if node.op is not Op.SUM or self[node.inputs[0]].op is not Op.EXP:
            return False
        exponent = self[self[node.inputs[0]].inputs[0]]
        if exponent.op is not Op.SUB:
            return False
        x, peak = exponent.inputs[0], self[self.unshaped(exponent.inputs[1])]
        if peak.op is Op.WHERE:  # 0 stands for an infinite maximum
            peak = self[self.unshaped(peak.inputs[2])]
        return peak.op is Op.MAX and peak.inputs == (x,)

    def _is_share(self, a: int) -> bool:
        """Whether it is exp(x - max(x)) over the sum of its row, or of its group.

        That is 0 only where it is rounded to 0.
        """
        node = self[a]
        if node.op is not Op.DIV or not self._is_total(node.inputs[1]):
            return False
        part, total = node.inputs
        reduction = self[self.unshaped(total)]
        return reduction.inputs == (part,) and meets_its_own(reduction, self.inner(total))

    def of_total(self, mask: int) -> int:
        """The mask, or if it says which shares of a softmax are NaN, whether their total is NaN.

        An element that is NaN makes the total NaN, and that makes all shares NaN.
        """
        node = self[mask]
        if node.op is Op.NE and node.inputs[0] == node.inputs[1]:
            share = node.inputs[0]
            if self._is_share(share):
                total = self[share].inputs[1]
                return self.node(Op.NE, total, total)
        return mask

    def select(self, value: int, masks: tuple[tuple[int, bool], ...]) -> int:
        """The value where each mask is what it is said to be, and 0 elsewhere."""
        if self.constant(value) == 0:
            return value
        zero = self.number(0.0)
        for mask, holds in masks:
            value = self.node(Op.WHERE, mask, *((value, zero) if holds else (zero, value)))
        return value

    # Shapes

    def unsqueezed(self, a: int, axis: int | None) -> int:
        """A value with the axis that a reduction has taken, in size 1."""
        behind, inner = -1 - (axis or -1), self.inner(a)
        if len(inner) <= behind or prod(inner) == 1:
            return a  # it lacks the axis, as any before it
        place = len(inner) - behind
        return self.reshape(a, (*inner[:place], 1, *inner[place:]))

    def reshape(self, a: int, inner: tuple[int, ...]) -> int:
        """The same elements in another shape."""
        if self.inner(a) == inner:
            return a
        if self[a].op is Op.RESHAPE:
            (source,) = self[a].inputs
            if self.is_derived(a) or self.inner(source) == inner:
                return self.reshape(source, inner)
        if (found := self._reshaped_operands(a, inner)) is not None:
            return found
        return self.node(Op.RESHAPE, a, arg=inner)

    def _reshaped_operands(self, a: int, inner: tuple[int, ...]) -> int | None:
        """The same of reshaped operands, where axes of size 1 come or go; else None.

        So terms of a sum are seen as such whatever axes a reduction has kept.
        """
        node, own = self[a], self.inner(a)
        is_moved = [n for n in own if n > 1] != [n for n in inner if n > 1]
        if is_moved or not own or not self.is_derived(a) or node.op not in self._arithmetic:
            return None
        if any([self.inner(i) not in ((), own) for i in node.inputs]):
            return None
        operands = [self.reshape(i, inner) if self.inner(i) else i for i in node.inputs]
        found = self._arithmetic[node.op](*operands)
        return found if self.inner(found) == inner else None

    def widened(self, a: int, inner: tuple[int, ...], spread: bool) -> int:
        """A value with all axes of what it stands for."""
        if self.inner(a) == inner:
            return a
        if prod(self.inner(a)) == prod(inner) and self[a].value.spread == spread:
            return self.reshape(a, inner)
        return self.node(Op.MUL, a, self.filled(1.0, inner, spread))

    def without_leading_ones(self, a: int, rank: int) -> int:
        """A value without the axes of size 1 that are before the last `rank`."""
        inner = self.inner(a)
        return self.reshape(a, inner[len(inner) - rank :]) if len(inner) > rank else a


def meets_its_own(reduction: Node, inner: tuple[int, ...]) -> bool:
    """Whether a reduction in this shape is broadcast to the elements that it was taken of.

    In a square of groups the same shape may meet others: `x - x.amax(-1)` subtracts from a column.
    """
    axis = -1 if reduction.arg is None else int(reduction.arg)
    return prod(inner) == 1 or (len(inner) >= -axis and inner[axis] == 1)


def others(ids: Sequence[int], id: int) -> list[int]:
    """All but the first of these that is `id`."""
    place = ids.index(id)
    return [*ids[:place], *ids[place + 1 :]]


def _key(op: Op, inputs: tuple[int, ...], arg: object, value: object) -> object:
    """Equal for nodes that compute the same."""
    inputs = tuple(sorted(inputs)) if op in COMMUTATIVE else inputs
    if arg is None:
        return op, inputs, None
    # repr tells 1, 1.0 and True apart, and 0.0 from -0.0
    return op, inputs, repr(arg), value if op in (Op.CONST, Op.INDEX) else None

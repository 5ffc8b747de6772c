"""Builds the nodes of a derivative, with the algebra that keeps them few.

Every rule is an identity of real numbers, so a graph that is built by them can be differentiated
again. What is built already is not built again. A value may have fewer axes than what it stands
for: it is the same along those that it lacks, as in torch's broadcasting.

A reduction costs more than anything else that a kernel does. So a sum is taken apart where its
parts need fewer reductions before it: factors that a row has once leave it, and the sum of
`x - mean(x)` is 0.
"""

from __future__ import annotations

from math import prod

import torch

from .graph import Builder, Graph, Node, Role
from .joined import joined_parts
from .ops import COLLECTIVES, COMMUTATIVE, Op, Value, Varies, broadcast_shapes
from .slopes import Slope

FLOAT = torch.float32
_SPREAD_OVER = (Op.MUL, Op.DIV, Op.NEG)  # what a factor is found under


class Algebra:
    """Adds nodes to a graph; every method takes and returns ids.

    loc: the user's line that the next nodes belong to.
    """

    def __init__(self, builder: Builder, graph: Graph):
        self.builder, self.loc = builder, None
        self._count = len(graph)  # of the nodes that are those of the graph; derived ones follow
        self._kept = {out.id for out in graph.outputs}  # which are there anyway: not taken apart
        self._seen: dict[object, int] = {}
        self._always: int | None = None  # the mask that holds everywhere
        self._stages: list[int] = []  # how many reductions are on the longest way to each node
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
        before = max([self._stages[i] for i in node.inputs], default=0)
        self._stages.append(before + (node.op in COLLECTIVES))

    def node(self, op: Op, *inputs: int, arg: object = None) -> int:
        """An operation as it is, without algebra."""
        key = _key(op, inputs, arg, None)
        id = self._seen.get(key)
        if id is None:
            id = self._seen[key] = self.builder.add(op, inputs, arg, self.loc)
            self._note(self[id])
        return id

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
        if (divisor := self._divisor(a, b)) is not None:
            return self.div(self.sub(self[a].inputs[0], self[b].inputs[0]), divisor)
        return self.node(Op.SUB, a, b)

    def _divisor(self, a: int, b: int) -> int | None:
        """What both are divided by, where the quotients are part of the derivative."""
        x, y = self[a], self[b]
        is_common = x.op is y.op is Op.DIV and x.inputs[1] == y.inputs[1]
        return x.inputs[1] if is_common and self.is_derived(min(a, b)) else None

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
        for c, other in ((a, b), (b, a)):
            node = self[other]
            if node.op is Op.DIV and self.is_derived(other):  # c * (d / e) is (c / e) * d
                quotient = self._seen.get((Op.DIV, (c, node.inputs[1]), None))
                if quotient is not None and not self.is_derived(quotient):
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
        if self[a].op is Op.NEG:
            return self.neg(self.div(self[a].inputs[0], b))
        return self.node(Op.DIV, a, b)

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
        if self[a].op is Op.RESHAPE and self.is_derived(a):
            return self.reshape(self[a].inputs[0], inner)
        return self.node(Op.RESHAPE, a, arg=inner)

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

    # Sums

    def total(self, a: int, shape: tuple[int, ...], spread: bool, axes: tuple[int, ...]) -> int:
        """The sum over axes of what `a` stands for, which has this shape; they have size 1 then."""
        for axis in axes:
            if shape[axis] > 1 and not self._has_axis(a, axis, shape):
                return self.mul(
                    self.total(a, shape, spread, tuple(x for x in axes if x != axis)),
                    self.count(shape[axis], spread and axis == -1),
                )
        own = tuple(axis for axis in axes if self._has_axis(a, axis, shape))
        return self._sum(a, own) if own else a

    def _has_axis(self, a: int, axis: int, shape: tuple[int, ...]) -> bool:
        """Whether a value has an axis of what has this shape, and is not the same along it.

        A row of one element has its axis, although that has size 1.
        """
        v = self[a].value
        if len(v.inner) < -axis:
            return False
        return v.inner[axis] > 1 or (axis == -1 and v.spread and shape[axis] == 1)

    def _has_any(self, a: int, axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        return any(self._has_axis(a, axis, shape) for axis in axes)

    def _sum(self, a: int, axes: tuple[int, ...]) -> int:
        if self._is_deviation(a, axes):
            return self.number(0.0)
        node, shape = self[a], self.inner(a)
        if a in self._kept:
            return self._reduced(a, axes)
        is_sum = node.op in (Op.ADD, Op.SUB)
        if is_sum and any(self._sums_early(i, axes, shape) for i in node.inputs):
            v = node.value
            first, second = (self.total(i, v.inner, v.spread, axes) for i in node.inputs)
            return self.add(first, second) if node.op is Op.ADD else self.sub(first, second)
        factors, divisors, rest = self._factors(a, axes, shape)
        if not factors and not divisors:
            return self._reduced(a, axes)
        product = rest[0]
        for each in rest[1:]:
            product = self.mul(product, each)
        if not all(self._has_axis(product, axis, shape) for axis in axes):  # it is a number
            return self._reduced(a, axes)
        result = self._sum(product, axes)
        for each in factors:
            result = self.mul(result, each)
        for each in divisors:
            result = self.div(result, each)
        return result

    def _factors(
        self, a: int, axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> tuple[list[int], list[int], list[int]]:
        """The factors and divisors of a product that lack all axes, and its other factors.

        shape: that of what is summed.
        """
        factors, divisors, rest, todo = [], [], [], [a]
        while todo:
            id = todo.pop()
            node = self[id]
            if not self._has_any(id, axes, shape):
                factors.append(id)
            elif id in self._kept or node.op not in _SPREAD_OVER:
                rest.append(id)
            elif node.op is Op.MUL:
                todo += node.inputs
            elif node.op is Op.NEG:
                factors.append(self.number(-1.0))
                todo += node.inputs
            elif not self._has_any(node.inputs[1], axes, shape):
                divisors.append(node.inputs[1])
                todo.append(node.inputs[0])
            else:
                rest.append(id)
        return sorted(factors), sorted(divisors), sorted(rest)

    def _sums_early(self, a: int, axes: tuple[int, ...], shape: tuple[int, ...]) -> bool:
        """Whether the sum of a term is 0, or can begin before all factors of the term are known."""
        if not self._has_any(a, axes, shape):
            return self._stages[a] > 0
        factors, divisors, rest = self._factors(a, axes, shape)
        is_zero = len(rest) == 1 and self._is_deviation(rest[0], axes)
        return is_zero or any(self._stages[i] > 0 for i in (*factors, *divisors))

    def _is_deviation(self, a: int, axes: tuple[int, ...]) -> bool:
        """Whether it is `x - mean(x)` along these axes, of which the mean has one value each."""
        node = self[a]
        if node.op is not Op.SUB or len(axes) != 1:
            return False
        x, average = node.inputs
        shape = self.inner(a)
        if self._has_axis(average, axes[0], shape) or not self._is_beside(x, average, axes[0]):
            return False
        while self[average].op is Op.RESHAPE:
            (average,) = self[average].inputs
        average, v = self[average], self[x].value
        if average.op is Op.DIV and self._has_axis(x, axes[0], shape):
            if average.inputs[1] != self.count(v.inner[axes[0]], v.spread and axes[0] == -1):
                return False
            average = self[average.inputs[0]]
            return average.op is Op.SUM and average.inputs == (x,) and _axis(average) == axes[0]
        return average.op is Op.MEAN and average.inputs == (x,) and _axis(average) == axes[0]

    def _is_beside(self, x: int, average: int, axis: int) -> bool:
        """Whether a mean over an axis of x stands beside the elements that it is the mean of.

        In a square, or in its own axes turned round, it may stand beside others.
        """
        kept, own = [*self.inner(x)], [*self.inner(average)]
        kept[axis] = 1
        for shape in (kept, own):
            while shape and shape[0] == 1:
                del shape[0]
        return kept == own

    def _reduced(self, a: int, axes: tuple[int, ...]) -> int:
        inner = self.inner(a)
        kept = tuple(1 if k - len(inner) in axes else size for k, size in enumerate(inner))
        if len(axes) > 1 and axes == tuple(range(-len(axes), 0)) and self[a].value.spread:
            # the last axes as one, as htile.frontend.reductions has it
            a = self.reshape(a, (*inner[: -len(axes)], prod(inner[-len(axes) :])))
            axes = (-1,)
        for axis in axes:  # those before it are gone, and it counts from the last
            a = self.node(Op.SUM, a, arg=axis if len(self.inner(a)) > 1 else None)
        while len(kept) > self[a].value.spread and kept[0] == 1:  # but for that of a row of one
            kept = kept[1:]
        return self.reshape(a, kept)


def _axis(node: Node) -> int:
    return -1 if node.arg is None else node.arg


def _key(op: Op, inputs: tuple[int, ...], arg: object, value: object) -> object:
    """Equal for nodes that compute the same."""
    inputs = tuple(sorted(inputs)) if op in COMMUTATIVE else inputs
    if arg is None:
        return op, inputs, None
    # repr tells 1, 1.0 and True apart, and 0.0 from -0.0
    return op, inputs, repr(arg), value if op in (Op.CONST, Op.INDEX) else None

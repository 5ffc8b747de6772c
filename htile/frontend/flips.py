"""Axes in the opposite order: torch.flip.

What is computed of a turned row element by element, or summed from its front, is what can be
computed of the row as it is, and then turned. So a turn waits until something needs the elements in
their places. A second turn undoes the first one: `x.flip(-1).cumsum(-1).flip(-1)` is a sum from the
end. Elements of a long row are loaded from their places one by one then (`places.gathered`), which
needs a row that is computed elementwise from arguments.
"""

from __future__ import annotations

from math import prod

import torch

from ..errors import ShapeError, UnsupportedError
from .factories import index
from .functions import implements
from .joins import cat
from .ops import ELEMENTWISE, MOVEMENTS, REDUCTIONS, SCANS, TURNED, Op, Value
from .parts import MOST_PARTS, part
from .places import gathered
from .shapes import _listed, axes_of, axis_of, transpose
from .tensor import Deferred, Tensor, copy, fail, node

OF_ANY_ORDER = REDUCTIONS | {Op.KTHVALUE}
NOT_BY_ELEMENT = MOVEMENTS | SCANS | {
    Op.KTHVALUE, Op.TAKE, Op.GATHER, Op.LOOKUP, Op.MATMUL, Op.CUSTOM,
}  # fmt: skip


class Turned(Deferred):
    """A value that is turned round along an axis when its elements are needed in their places."""

    @staticmethod
    def __new__(cls, of: Tensor, axis: int) -> Tensor:
        v = of._value
        return torch.Tensor._make_wrapper_subclass(cls, v.inner, dtype=v.dtype, device="meta")

    def __init__(self, of: Tensor, axis: int):
        """axis: of `of`, counted from the last, -1."""
        self._of, self._axis = of, axis
        self._waits = True  # until an operator changes it in place
        super().__init__(of, self._in_place)

    @property
    def _value(self) -> Value:
        return self._of._value if self._waits else super()._value

    @property
    def dtype(self) -> torch.dtype:
        """That of what is turned."""
        return self._of.dtype if self._waits else super().dtype

    def _assign(self, id: int) -> None:
        super()._assign(id)
        self._waits = False

    def _copied(self) -> Tensor:
        if not self._waits:
            return Tensor(self._builder, self._id)
        return Turned(copy(self._of), self._axis)

    def _in_place(self) -> Tensor:
        """The elements in their places: each is a part of its own, or is loaded at its index."""
        size = self._of._sizes[self._axis]
        counted = _counted_back(self._of)
        if counted is not None:
            return counted
        if size > MOST_PARTS:
            found = gathered(self._of, (size - 1) - index(self._of._builder, size))
            if found is not None:
                return found
            fail(UnsupportedError, f"flip of {size} elements: of more than {MOST_PARTS} a kernel "
                 "turns round rows alone that are computed elementwise from arguments; other "
                 "rows can be summed from the end, x.flip(-1).cumsum(-1).flip(-1), or pass "
                 "x.flip(-1) as an argument, and turn results round after the call")  # fmt: skip
        places = range(size - 1, -1, -1)
        return cat([part(self._of, self._axis, k, 1) for k in places], self._axis)

    def _later(self, op: Op, operands: tuple[Tensor, ...], arg: object) -> Tensor | None:
        """The result of an operation, turned later or not at all; None where it cannot wait."""
        if not self._waits:
            return None
        axis = self._axis
        over = -1 if arg is None else arg  # the axis of a reduction or a scan
        if op in OF_ANY_ORDER and over == axis:
            return node(op, self._of, *operands[1:], arg=arg)
        if op in TURNED:
            op = TURNED[op] if over == axis else op
        elif op in NOT_BY_ELEMENT:
            return None
        given = []
        for each in operands:
            if is_turned(each, axis):
                given.append(each._of)
            elif each.ndim < -axis or each._sizes[axis] == 1 or is_constant(each):
                given.append(each)
            else:
                return None
        result = node(op, *given, arg=arg)
        return Turned(result, axis + (op in REDUCTIONS and over > axis))


def _counted_back(x: Tensor) -> Tensor | None:
    """A row in the opposite order that is computed of its columns' numbers alone, as those of
    `torch.arange` are: the numbers are counted back. None of any other row."""
    builder, n = x._builder, x._sizes[-1]
    if x.ndim != 1 or builder.multiple is not None:
        return None
    chain, todo = set(), [x._id]
    while todo:
        each = builder[todo.pop()]
        if not each.value.spread and prod(each.value.inner) > 1:  # such as a few sorted elements
            return None
        if each.id in chain or not each.value.spread:
            continue
        is_leaf = each.op in (Op.INDEX, Op.CONST)
        if each.value.inner != (n,) or not (is_leaf or each.op in ELEMENTWISE):
            return None
        chain.add(each.id)
        todo += each.inputs
    found: dict[int, int] = {}
    for id in sorted(chain):
        each = builder[id]
        if each.op is Op.INDEX:
            found[id] = ((n - 1) - Tensor(builder, id))._id
        elif each.op is not Op.CONST:
            inputs = tuple([found.get(i, i) for i in each.inputs])
            found[id] = builder.add(each.op, inputs, each.arg, each.loc)
    return Tensor(builder, found.get(x._id, x._id))


def is_turned(x: Tensor, axis: int) -> bool:
    """Whether a value waits to be turned along this axis."""
    return isinstance(x, Turned) and x._waits and x._axis == axis


def is_constant(x: Tensor) -> bool:
    """Whether all elements are one number that is known."""
    return not isinstance(x, Turned) and x._builder[x._id].op is Op.CONST


@implements("flip")
def flip(input, dims, *more):
    """The elements of axes in the opposite order.
    More than 64 elements of an axis are turned where they are a row that is computed elementwise
    from arguments, or where the result can do without, as x.cumsum(-1).flip(-1).sum()."""
    x, given = input, _listed((dims, *more))
    for axis in axes_of(x, given) if len(given) else ():
        if is_turned(x, axis):
            x = x._of
        elif x.ndim and x._sizes[axis] > 1:
            x = Turned(x, axis)
    return copy(x)


@implements("flipud")
def flipud(input):
    """The rows of a matrix, or the elements of a row, in the opposite order."""
    if not input.ndim:
        fail(ShapeError, "flipud of a value of shape (): it has one element")
    return flip(input, 0)


@implements("fliplr")
def fliplr(input):
    """The columns of a matrix in the opposite order."""
    if input.ndim < 2:
        fail(ShapeError, f"fliplr of a value of shape {tuple(input._sizes)}: write x.flip(-1)")
    return flip(input, 1)


@implements("rot90")
def rot90(input, k=1, dims=(0, 1)):
    """A small matrix turned by 90 degrees k times, from the first of two axes to the second."""
    first, second = (axis_of(input, axis) for axis in dims)
    if first == second:
        fail(ShapeError, f"rot90 in the axes {tuple(dims)}: they are two of them")
    turned = {1: (second,), 2: (first, second), 3: (first,)}.get(k % 4, ())
    x = flip(input, turned)
    return transpose(x, first, second) if k % 2 else x

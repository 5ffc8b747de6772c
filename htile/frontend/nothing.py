"""Values without elements, such as `x[:0]`, which a loop over parts begins with."""

from __future__ import annotations

from dataclasses import replace
from typing import NoReturn

import torch

from ..errors import ShapeError
from . import hints
from .ops import ELEMENTWISE, INFER, Op, Value, Varies
from .returned import returned_dtype
from .tensor import Deferred, Tensor, constant, fail, location

TOTALS = {Op.SUM: 0, Op.PROD: 1, Op.ANY: False, Op.ALL: True}  # of no elements
SAME_ELEMENTS = frozenset({Op.RESHAPE, Op.PERMUTE, Op.EXPAND})


class Nothing(Deferred):
    """A value without elements: its sum is 0, and torch.cat leaves it out.

    What is computed of its elements is such a value, too. Any other use of it raises ShapeError.
    """

    @staticmethod
    def __new__(cls, like: Tensor, value: Value, told: tuple[int, ...]) -> Tensor:
        inner, dtype = value.inner, value.dtype
        return torch.Tensor._make_wrapper_subclass(cls, inner, dtype=dtype, device="meta")

    def __init__(self, like: Tensor, value: Value, told: tuple[int, ...]):
        """told: the shape of what it is a part of, for the error."""
        self._value, self._told, self._loc = value, told, location()
        self.dtype = returned_dtype(like._builder, value)
        super().__init__(like, self._refused)

    _value = dtype = None  # those of an instance

    def _later(self, op: Op, operands: tuple[Tensor, ...], arg: object) -> Tensor | None:
        """The result of an operation of no elements; None where torch has no number for it."""
        if op not in ELEMENTWISE | SAME_ELEMENTS and op not in TOTALS:
            return None
        try:
            value = INFER[op](tuple([each._value for each in operands]), arg)
        except ShapeError as error:
            fail(ShapeError, error.message)
        if 0 in value.inner:
            return Nothing(self, value, self._told)
        return constant(self, TOTALS[op], replace(value, varies=Varies.SCALAR))

    def _copied(self) -> Tensor:
        return Nothing(self, self._value, self._told)

    def _refused(self) -> NoReturn:
        what = f"a part without elements, of a value of shape {self._told}"
        fail(ShapeError, hints.NOTHING.format(what), self._loc)


def nothing_of(x: Tensor, axis: int) -> Nothing:
    """What `x` is without the elements of an axis, which counts from the last, -1."""
    end = len(x._sizes) + axis
    inner = (*x._value.inner[:end], 0, *x._value.inner[end + 1 :])
    nothing = Nothing(x, replace(x._value, inner=inner), tuple(x._sizes))
    nothing.dtype = x.dtype  # an argument shows that of its memory
    return nothing

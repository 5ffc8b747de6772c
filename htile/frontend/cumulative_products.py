"""The derivative of a cumulative product, which is exact where elements are 0.

Before its first zero a row has the slopes that quotients give: of each product by each element of
it. From there on all products are 0. That zero has the products of the others as its slopes, and
what lies behind it has none, but it has slopes of second order. So there stand zeros that have
these slopes (`Algebra.zero_like`), of which a kernel computes nothing where nobody asks for them.
"""

from __future__ import annotations

from functools import cached_property

import torch

from .algebra import Algebra
from .ops import Op

INT32 = torch.int32
NONE = 2**31 - 1  # behind the places of all elements


class CumulativeProduct:
    """What the slopes of a cumulative product are made of. All are ids of nodes.

    x, y: the elements, and their products. axis: the `arg` of the operation.
    place: the number of each element along the axis.
    is_first, is_before: the masks of the first zero, and of the elements before it.
    factors: the elements, with 1 in place of the first zero.
    others: the products of the factors, which are y before that zero. From the second zero on they
        are 0, and no kernel reads them: threads that multiply apart may find 0 times infinity.
    """

    def __init__(self, a: Algebra, x: int, y: int, axis: int | None):
        self.a, self.x, self.y, self.axis = a, x, y, axis
        self.zero, self.one = a.number(0.0), a.number(1.0)
        size, behind = a.inner(x)[axis or -1], -1 - (axis or -1)
        place = a.node(Op.CONVERT, a.index(size), arg=INT32)
        self.place = a.reshape(place, (size, *(1,) * behind))
        first = self._first_zero(x)
        self.is_first = a.node(Op.EQ, self.place, first)
        self.is_before = a.node(Op.LT, self.place, first)
        self.factors = self._where(self.is_first, self.one, x)
        self.others = a.node(Op.CUMPROD, self.factors, arg=axis)

    def gradient(self, g: int) -> int:
        """The gradient of the elements, of that of the products."""
        a, terms = self.a, self.a.mul(g, self.others)
        before = self._where(self.is_before, terms, a.zero_like(a.mul(g, self.y)))
        behind = self._where(self._is_before_second, terms, a.zero_like(terms))
        of_first = self._total(self._where(self.is_before, self.zero, behind))
        of_zeros = self._where(self.is_first, of_first, self._behind_first(g, terms))
        return self._where(self.is_before, self._from_here(before), of_zeros)

    def _behind_first(self, g: int, terms: int) -> int:
        """The gradient behind the first zero: that times what it would be without it."""
        a, is_left = self.a, self._is_before_second
        of_others = self._only(is_left, self._from_here(self._only(is_left, terms)))
        behind = self._where(is_left, self.zero, a.mul(g, self._without_both))
        of_second = self._total(behind)
        return a.zero_like(a.mul(self._zero, self._where(self._is_second, of_second, of_others)))

    def tangent(self, t: int) -> int:
        """The tangent of the products, of that of the elements."""
        a = self.a
        shares = self._where(a.node(Op.EQ, self.x, self.zero), self.zero, a.div(t, self.x))
        of_others = a.mul(self.others, a.node(Op.CUMSUM, shares, arg=self.axis))
        of_first = a.mul(self._total(self._only(self.is_first, t)), self.others)
        of_first = self._where(self._is_before_second, of_first, a.zero_like(of_first))
        of_second = a.mul(self._total(self._only(self._is_second, t)), self._without_both)
        more = a.mul(self._zero, self._where(self._is_before_second, of_others, of_second))
        return self._where(self.is_before, of_others, a.add(of_first, a.zero_like(more)))

    @cached_property
    def _zero(self) -> int:
        """The first zero itself; 0 too where there is none."""
        return self._total(self._only(self.is_first, self.x))

    @cached_property
    def _second(self) -> int:
        return self._first_zero(self.factors)

    @cached_property
    def _is_second(self) -> int:
        return self.a.node(Op.EQ, self.place, self._second)

    @cached_property
    def _is_before_second(self) -> int:
        return self.a.node(Op.LT, self.place, self._second)

    @cached_property
    def _without_both(self) -> int:
        """The products without the first two zeros."""
        factors = self._where(self._is_second, self.one, self.factors)
        return self.a.node(Op.CUMPROD, factors, arg=self.axis)

    def _first_zero(self, elements: int) -> int:
        """The place of the first zero among elements; `NONE` if there is none."""
        a, is_zero = self.a, self.a.node(Op.EQ, elements, self.zero)
        none = a.node(Op.CONVERT, a.integer(NONE), arg=INT32)
        places = self._where(is_zero, self.place, none)
        return a.unsqueezed(a.node(Op.MIN, places, arg=self.axis), self.axis)

    def _where(self, mask: int, value: int, other: int) -> int:
        return self.a.node(Op.WHERE, mask, value, other)

    def _only(self, mask: int, value: int) -> int:
        return self._where(mask, value, self.zero)

    def _total(self, value: int) -> int:
        return self.a.unsqueezed(self.a.node(Op.SUM, value, arg=self.axis), self.axis)

    def _from_here(self, terms: int) -> int:
        """The sum of each element's terms and all behind it, divided by the element."""
        return self.a.div(self.a.node(Op.SUM_FROM_END, terms, arg=self.axis), self.x)

"""The derivatives of logcumsumexp, y, by the logarithms of their terms.

An element x has the slope exp(x - y) in each y that it counts in. A sum of g exp(-y) times exp(x)
would be infinite where y is far below 0, or 0 times infinity. So the terms are added up by their
logarithms, those above 0 and those below 0 apart, as torch does it for gradients.
"""

from __future__ import annotations

import math

from .algebra import Algebra
from .graph import Node
from .ops import TURNED, Op


class CumulativeLogarithm:
    """node: that of the scan, from either end. x, y: the ids of the elements and of the results."""

    def __init__(self, a: Algebra, node: Node, x: int, y: int):
        self.a, self.op, self.axis = a, node.op, node.arg
        self.x, self.y = x, y

    def gradient(self, g: int) -> int:
        """The gradient of the elements, of that of the results."""
        a = self.a

        def added(g: int) -> int:
            terms = self._logarithms(g, a.neg(self.y))
            behind = a.node(TURNED[self.op], terms, arg=self.axis)
            return a.node(Op.EXP, a.add(behind, self.x))

        return a.sub(added(g), added(a.neg(g)))

    def tangent(self, t: int) -> int:
        """The tangent of the results, of that of the elements."""
        a = self.a
        # Where no term counts, as in the scans of a derivative, y and the sum of the tangents are
        # both minus infinity, and their difference would be NaN.
        is_empty = a.node(Op.EQ, self.y, a.number(-math.inf))
        y = a.node(Op.WHERE, is_empty, a.number(0), self.y)

        def added(t: int) -> int:
            upto = a.node(self.op, self._logarithms(t, self.x), arg=self.axis)
            return a.node(Op.EXP, a.sub(upto, y))

        return a.sub(added(t), added(a.neg(t)))

    def _logarithms(self, values: int, exponents: int) -> int:
        """log(values * exp(exponents)) where the values are above 0, elsewhere minus infinity."""
        a, zero = self.a, self.a.number(0)
        is_above = a.node(Op.GT, values, zero)
        found = a.node(Op.LOG, a.node(Op.WHERE, is_above, values, a.number(1)))
        return a.node(Op.WHERE, is_above, a.add(found, exponents), a.number(-math.inf))

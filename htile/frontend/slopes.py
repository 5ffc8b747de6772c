"""Marks an operation whose slope at an edge (a tie, 0, NaN) is not this operation's usual one."""

from __future__ import annotations

from enum import Enum


class Slope(Enum):
    """Which slope torch's function has where the operation has another: the operation's `arg`.

    Without one, MAXIMUM and MINIMUM of equal operands have half of each one's, as `torch.maximum`,
    SQRT and POW an infinite one at 0, ABS none there, and WHERE that of the branch it chooses.
    Kernels compute the same with it and without it, so `htile.lower.passes.simplify` drops it.
    """

    FIRST = "first"  # of equal operands the first one's, and of NaN neither's, as torch.clamp
    LEFT = "left"  # of equal operands the first one's, and of NaN both's, so that it is NaN
    OTHER = "other"  # of equal operands the second one's, of NaN the first one's, as F.relu
    ZERO = "zero"  # of a root: 0 at 0, as a norm; of MUL: 0 for a 0 times -inf or NaN, as xlogy
    GIVEN = "given"  # of MUL: the second operand is the derivative, whatever the product is
    SIGNED = "signed"  # of ABS: 1 at 0.0 and -1 at -0.0
    RIGHT = "right"  # of ABS: 1 at 0, so that a smooth function of it has all its derivatives there
    LAST = "last"  # of WHERE: that of its last branch, which the other one stands in for
    NAN = "nan"  # of WHERE: NaN where its result is the NaN of its first branch

    def __repr__(self) -> str:
        return f"{type(self).__name__}.{self.name}"


class FirstAlong(int):
    """The axis of a MAX or MIN whose slope is that of the first of equal elements: x.max(dim)."""

    def __repr__(self) -> str:
        return f"first along {int(self)}"

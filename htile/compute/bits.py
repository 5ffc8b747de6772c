"""The device functions of bits that no Python operator says."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass._mlir.dialects import arith

from htile.compute import operands
from htile.compute.operands import Vector, elementwise, like


@elementwise
def bits(x):
    """The bits of floats, as Int32."""
    return operands.bits_of(x)


@elementwise
def float_of(x):
    """The floats that have the bits of an Int32."""
    return operands.float_of(x)


@elementwise
def invert(x):
    """~x, of integers. (`~` of a vector does not trace.)"""
    return x ^ -1


@elementwise
def lshift(x, count):
    """x << count, of integers. By a negative count, or by the width and more, it is 0, as in torch.

    It takes one instruction by a constant. (The DSL's `<<` takes no vector of counts.) LLVM leaves
    open what a count beyond the width gives, so no such count may reach its shift. Of 64 bits the
    operand is replaced and not the result: LLVM joins the select of a result and the shift to one
    `shl.b64`, which reads the low half of the count alone, so that 2 ** 32 + 1 counts as 1.
    """
    inside, zero = _is_inside(count), cute.full_like(x, 0)
    if x.dtype.width == 32:
        return cute.where(inside, like(x, arith.shli(x, cute.where(inside, count, zero))), zero)
    return like(x, arith.shli(cute.where(inside, x, zero), count & 63))


@elementwise
def rshift(x, count):
    """x >> count, of integers; it keeps the sign. By a count beyond the width, or a negative one,
    it is what is left of the sign, 0 or -1, as in torch.
    """
    last = cute.full_like(count, count.dtype.width - 1)
    return like(x, arith.shrsi(x, cute.where(_is_inside(count), count, last)))


def _is_inside(count: Vector) -> Vector:
    """Whether the width has so many bits."""
    return (count >= 0) & (count < count.dtype.width)

"""The bits of integers and of masks: what `& | ^ ~ << >>` compute, of 8 bits too.

Integers of 8 bits are computed in int32, and what is more than 8 bits of a result is cut off, as
in torch.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import DtypeError
from .ops import Op
from .promotion import (
    BOOL,
    BYTES,
    FLOAT,
    byte_dtype,
    cast,
    convert,
    number,
    operand,
    refuse,
    scalar,
    together,
)  # fmt: skip
from .tensor import Tensor, fail, node


def _check(what: str, *operands: object) -> None:
    """Refuse floats, of whose bits torch computes nothing."""
    for x in operands:
        dtype = x._value.dtype if isinstance(x, Tensor) else type(x)
        if dtype in (FLOAT, float):
            name = "f32" if dtype is FLOAT else "a float"
            fail(DtypeError, f"{what} of {name} is not defined: compare the numbers first, x > 0, "
                 "or convert them, x.int()")  # fmt: skip


def inverted(input: Tensor) -> Tensor:
    """~x."""
    _check("~", input)
    dtype = input._value.dtype
    if dtype not in BYTES:
        return node(Op.NOT, input)
    wide = cast(input, torch.int32)
    ones = scalar(wide, 255 if dtype is torch.uint8 else -1, torch.int32)
    return cast(node(Op.XOR, wide, ones), dtype)


def bitwise(op: Op, symbol: str) -> Callable:
    """The function that does an operation of bits."""

    def function(input, other):
        _check(symbol, input, other)
        dtype = byte_dtype(operand(input), operand(other))
        if dtype is not None:
            return _of_bytes(op, input, other, dtype)
        a, b = together(input, other)
        if a._value.dtype is BOOL and op in (Op.LSHIFT, Op.RSHIFT):
            refuse(symbol, a, "convert a mask first, x.int()")
        return node(op, a, b)

    return function


def _of_bytes(op: Op, a: object, b: object, dtype: torch.dtype) -> Tensor:
    """An operation of integers of 8 bits; of a shift to the left the lowest 8 bits are left."""
    like = a if isinstance(a, Tensor) else b
    found = node(op, *(_in_32_bits(op, x, like, dtype) for x in (a, b)))
    if op is Op.LSHIFT:
        low, sign = (scalar(like, bits, torch.int32) for bits in (255, 128))
        found = node(Op.AND, found, low)
        if dtype is torch.int8:
            found = node(Op.XOR, found, sign) - sign
    return cast(found, dtype)


def _in_32_bits(op: Op, x: object, like: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand as an integer of 8 bits in int32; a number of the row is first cut to these bits.
    """
    if isinstance(x, Tensor):
        is_mask = x._value.dtype is BOOL
        return convert(x, torch.int32) if is_mask else cast(cast(x, dtype), torch.int32)
    if type(x) is int and op in (Op.AND, Op.OR, Op.XOR):  # torch cuts `~3` too
        x &= 255
        x -= 256 * (dtype is torch.int8 and x > 127)
    return scalar(like, number(x, dtype), torch.int32)

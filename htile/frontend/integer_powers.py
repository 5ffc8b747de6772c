"""Powers of an integer whose exponents are integers of a row: `2 ** torch.arange(n)`.

They wrap at the width of their dtype, as torch's do.
"""

from __future__ import annotations

import torch

from ..errors import UnsupportedError
from .ops import Op
from .promotion import Number, convert, filled, number, scalar
from .tensor import Tensor, fail, node


def integer_power(base: Tensor | Number, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """base ** exponent in a dtype of integers; the base is the same number everywhere."""
    value, e = _constant(base), convert(exponent, dtype)
    if value is None:
        fail(UnsupportedError, "a power of integers whose base and exponent are both tensors is "
             "not supported; write the base as a Python number, or use x.float()")  # fmt: skip
    value = number(value, dtype)
    if value == 2:
        return node(Op.LSHIFT, scalar(e, 1, dtype), e)
    bits = torch.iinfo(dtype).bits
    result, power = filled(e, 1), value
    for k in range(bits - 1):  # the exponent is a sum of 2 ** k
        if power == 1:
            break
        if power == 0:  # of an even base from some exponent on, because the upper bits are lost
            result = torch.where(e >= 1 << k, 0, result)
            break
        result = result * torch.where(e >> k & 1 == 1, scalar(e, power, dtype), 1)
        power = _wrapped(power * power, bits)
    return result if value in (1, -1) else torch.where(e < 0, 0, result)


def _constant(base: Tensor | Number) -> Number | None:
    """The number that the base is: a Python number, or a constant as `torch.tensor(2)` makes it."""
    if not isinstance(base, Tensor):
        return base
    made = base._builder[base._id]
    return made.arg if made.op is Op.CONST and not base.ndim else None


def _wrapped(value: int, bits: int) -> int:
    """The integer that so many bits hold of this one."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value

"""Arithmetic on integers of 8 bits, which is done in int32 and keeps the lowest 8 bits, as torch's.

A function of the table is first called with the operands as they are. Most functions do not ask
for arithmetic in 8 bits: they compare, or promote to another dtype. One that does is refused, and
`in_32_bits` then calls it again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from ..errors import DtypeError
from .in_place import change
from .ops import dtype_name, not_computed
from .promotion import BOOL, byte_dtype, cast
from .tensor import REFUSED, SAME, Tensor, fail

# Of these functions more than the lowest 8 bits of the operands decide the lowest 8 of the result.
# torch cuts a number to 8 bits first, so one beyond them would mean another.
_OF_WHOLE_NUMBERS = frozenset({
    "clamp", "clamp_max", "clamp_min", "clip", "div", "divide", "eq", "floor_divide", "fmod", "ge",
    "greater", "greater_equal", "gt", "le", "less", "less_equal", "lt", "ne", "not_equal",
    "remainder", "where",
})  # fmt: skip


def in_32_bits(
    error: DtypeError, spelling: str, function: Callable, args: tuple, kwargs: dict
) -> object:
    """What the function gives for integers of 8 bits, in their dtype.

    Raises `error`, which refused them, where torch gives another dtype.
    """
    given = [*_leaves(args), *_leaves(kwargs.values())]
    dtype = byte_dtype(*(x for x in given if isinstance(x, Tensor)))
    if dtype is None or error.message != not_computed(dtype):
        raise error
    limits, name = torch.iinfo(dtype), spelling.rpartition(".")[2].rstrip("_")
    beyond = [x for x in given if type(x) is int and not limits.min <= x <= limits.max]
    if beyond and name in _OF_WHOLE_NUMBERS:
        fail(DtypeError, f"the number {beyond[0]} does not fit {dtype_name(dtype)}: convert the "
             "tensor first, x.int()")  # fmt: skip
    wide = [_each(x, lambda x: _widened(x, dtype)) for x in (args, kwargs)]
    result = _each(function(*wide[0], **wide[1]), lambda x: _narrowed(x, dtype))
    is_in_place = function in SAME and hasattr(function, "__wrapped__")
    return change(args[0], result) if is_in_place else result


def _leaves(x: object) -> Iterator[object]:
    if isinstance(x, (Tensor, str)) or not hasattr(x, "__iter__"):
        yield x
        return
    for each in x:
        yield from _leaves(each)


def _each(x: object, do: Callable[[Tensor], Tensor]) -> object:
    """`x` with each tensor in it replaced."""
    if isinstance(x, Tensor):
        return do(x)
    if isinstance(x, dict):
        return {name: _each(value, do) for name, value in x.items()}
    if isinstance(x, (tuple, list)):
        made = [_each(value, do) for value in x]
        return type(x)._make(made) if hasattr(x, "_make") else type(x)(made)
    return x


def _widened(x: Tensor, dtype: torch.dtype) -> Tensor:
    """An operand in int32. A number of the row in a wider dtype is first cut to 8 bits."""
    return x if x._value.dtype is BOOL else cast(cast(x, dtype), torch.int32)


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """A result: masks, indices and sums have dtypes of their own."""
    return cast(x, dtype) if x._value.dtype is torch.int32 else x


REFUSED.append(in_32_bits)

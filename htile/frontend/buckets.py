"""Places of numbers in a sorted row (`torch.bucketize`, `torch.searchsorted`), and `torch.isin`.

A place is how many elements of the sorted row are before the number. NaN comes after all numbers.
An element of the row that is NaN counts as before every number; torch's place then depends on the
steps of its search.
"""

from __future__ import annotations

import torch

from ..errors import DtypeError, ShapeError, UnsupportedError
from .functions import implements
from .parts import MOST_PARTS
from .promotion import BOOL, cast
from .shapes import reshaped, unsqueeze
from .tensor import Tensor, fail


def _place(number: object, row: Tensor, right: bool, out_int32: bool) -> Tensor:
    """How many elements of the last axis are less than the number, or with `right` no larger."""
    if isinstance(number, Tensor) and number.ndim:
        number = unsqueeze(number, -1)
    is_behind = row > number if right else row >= number
    found = torch.logical_not(is_behind).sum(-1)
    return cast(found, torch.int32) if out_int32 else found


@implements("bucketize")
def bucketize(input, boundaries, *, out_int32=False, right=False):
    """How many of the boundaries, which are sorted and not NaN, are below each element.

    boundaries: of shape (k,); with `right`, those that equal the element count too.
    """
    if not isinstance(boundaries, Tensor) or boundaries.ndim != 1:
        fail(ShapeError, "bucketize takes boundaries of one axis: torch.tensor([...]), or an "
             "htile.Shared")  # fmt: skip
    return _place(input, boundaries, right, out_int32)


@implements("searchsorted")
def searchsorted(sorted_sequence, input, *, out_int32=False, right=False, side=None, sorter=None):
    """How many elements of a sorted row without NaN are below each number of `input`.

    sorted_sequence: of shape (n,). input: a number, a value of a row, or values of any shape.
    right, side: whether elements that equal the number count too; side is "left" or "right".
    """
    is_told_twice = right and side == "left"
    if sorter is not None or side not in (None, "left", "right") or is_told_twice:
        fail(UnsupportedError, f"searchsorted(right={right}, side={side!r}, sorter=...): sort the "
             "row before; side is 'left' or 'right', and agrees with right")  # fmt: skip
    if sorted_sequence.ndim != 1:
        fail(UnsupportedError, f"searchsorted in values of shape {tuple(sorted_sequence._sizes)}: "
             "it takes one sorted row")  # fmt: skip
    return _place(input, sorted_sequence, right or side == "right", out_int32)


@implements("isin", method=False)
def isin(elements, test_elements, *, assume_unique=False, invert=False):
    """Whether each element is one of a few, at most 64; NaN is none.

    elements, test_elements: tensors of any shape, one of which may be a number.
    """
    given = test_elements
    for each in (elements, given):
        if isinstance(each, bool) or (isinstance(each, Tensor) and each._value.dtype is BOOL):
            fail(DtypeError, "isin of bool, which torch does not take: write x.int()")
    if isinstance(given, Tensor):
        count, is_one = given._sizes.numel(), True
        if isinstance(elements, Tensor):
            is_one, elements = elements._sizes.numel() == 1, unsqueeze(elements, -1)
        if count > MOST_PARTS and not is_one:
            fail(UnsupportedError, f"isin of {count} elements: at most {MOST_PARTS} are compared, "
                 "one by one; a sorted row of more has places, torch.searchsorted")  # fmt: skip
        given = reshaped(given, (count,))
        found = (given == elements).any(-1)
    else:
        found = elements == given
    return torch.logical_not(found) if invert else found

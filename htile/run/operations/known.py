"""The row-wise functions of this process by number: in a number Dynamo sees a constant."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

if TYPE_CHECKING:
    from ..rowwise import Rowwise

FUNCTIONS: WeakValueDictionary[str, Rowwise] = WeakValueDictionary()
_NUMBERS = itertools.count()


def numbered(function: Rowwise) -> str:
    """A number for a function, under which it can be found as long as it lives."""
    number = str(next(_NUMBERS))
    FUNCTIONS[number] = function
    return number

"""Gives each row-wise function of this process a number, by which a torch.compile graph names it.

Dynamo takes the number, as text, for a constant. It would not take the function itself for one.
"""

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

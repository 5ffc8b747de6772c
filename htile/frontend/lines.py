"""The user's line that something is made for, and errors that name it."""

from __future__ import annotations

import re
import sys
import threading
from typing import NoReturn

from ..errors import HTileError, Location
from .libraries import internal


class _Asked(threading.local):
    """The user's line that asked for what is made now, where that was deferred."""

    line: Location | None = None


ASKED = _Asked()


def location() -> Location | None:
    """The user's line: that of the innermost frame outside HTile and torch.

    What is deferred is made for the line that asked for it, and not for the one that uses it.
    """
    if ASKED.line is not None:
        return ASKED.line
    frame = sys._getframe(1)
    while frame is not None:
        if not internal(frame.f_code.co_filename):
            return Location(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def fail(error: type[HTileError], message: str, loc: Location | None = None) -> NoReturn:
    """Raise `error` with the user's line, or with another one."""
    raise error(message, loc or location()) from None


def used(pattern: str) -> str | None:
    """The name of a function called on the user's line, for a message that names it."""
    where = location()
    found = re.search(pattern, where.text) if where else None
    return found[1] if found else None

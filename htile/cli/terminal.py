"""What the commands share: colours, where somebody looks at them, and the error of a command."""

from __future__ import annotations

import os

CODES = {"red": "31", "green": "32", "yellow": "33", "bold": "1"}


class UsageError(Exception):
    """The command can not be carried out as it was given; the message says what to write."""


def paint(text: str, colour: str, stream) -> str:
    """`text` in a colour of CODES if `stream` is a terminal and NO_COLOR is not set."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{CODES[colour]}m{text}\x1b[0m"

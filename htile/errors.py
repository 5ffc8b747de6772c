"""The exceptions of HTile: one class for each kind of mistake, all under `HTileError`.

A message says what was expected, what came, where in the user's file, and what to do.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Location:
    """A line of the user's code."""

    file: str
    line: int

    @property
    def short(self) -> str:
        """`softmax.py:12`: the file's last component and the line, in printable characters."""
        name = self.file.replace("\\", "/").rsplit("/", 1)[-1]
        if not name.isprintable():
            name = "".join(c if c.isprintable() else "?" for c in name)
        return f"{name}:{self.line}"

    @property
    def text(self) -> str:
        """The source line, stripped; empty where the file cannot be read."""
        import linecache

        return linecache.getline(self.file, self.line).strip()


def an(noun: str) -> str:
    """The noun with its article: `an int`, `a float`."""
    return f"{'an' if noun[:1].lower() in 'aeio' else 'a'} {noun}"


class HTileError(Exception):
    """Base of every error that HTile raises on purpose.

    `message` says what is wrong and what to do; `loc` is the user's line, or None.
    """

    def __init__(self, message: str, loc: Location | None = None):
        self.message = message
        self.loc = loc
        where = f"\n  {loc.file}:{loc.line}: {loc.text}" if loc is not None else ""
        super().__init__(message + where)

    def __reduce__(self):
        return type(self), (self.message, self.loc)


class TraceError(HTileError):
    """The function does something that cannot be traced: a branch on data, an unknown function."""


class ShapeError(HTileError):
    """Shapes inside a row, or of the arguments, do not go together."""


class DtypeError(HTileError):
    """A dtype that is not supported, or that torch's own rules refuse."""


class ArgumentError(HTileError):
    """A call's arguments do not fit the function: device, layout, aliasing, missing annotation."""


class GradientError(HTileError):
    """A derivative is asked for that HTile does not have, of a call or of an operation."""


class UnsupportedError(HTileError):
    """Right in principle, not built yet; the message names it and what to use instead."""


class LoweringError(HTileError):
    """No plan runs this graph on this target: the row is too long, or a resource is exceeded."""


class CompileError(HTileError):
    """The kernel could not be compiled here: no CuTe-DSL, an unknown architecture."""

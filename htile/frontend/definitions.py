"""The lines of a function that a message about all of it names: its `def` and its `return`."""

from __future__ import annotations

import dis
import linecache
import re
import types

from ..errors import Location


def defined_at(fn: types.FunctionType) -> Location:
    """The line of the `def`, behind decorators; the first line of what has none."""
    code = fn.__code__
    lines = [line for _, _, line in code.co_lines() if line is not None]
    named = re.compile(rf"\s*(async\s+)?def\s+{re.escape(code.co_name)}\b")
    for line in range(code.co_firstlineno, max(lines) + 1):
        if named.match(linecache.getline(code.co_filename, line)):
            return Location(code.co_filename, line)
    return Location(code.co_filename, code.co_firstlineno)


def returned_at(fn: types.FunctionType) -> Location:
    """The line of the only `return`; of several nothing tells which one it was: that of the `def`.

    The end of a function that may be reached is a `return`, too.
    """
    code = fn.__code__
    places = [(start, end, line) for start, end, line in code.co_lines() if line is not None]
    ends = [each.offset for each in dis.get_instructions(code) if each.opname.startswith("RETURN_")]
    lines = {line for start, end, line in places for at in ends if start <= at < end}
    return Location(code.co_filename, *lines) if len(lines) == 1 else defined_at(fn)

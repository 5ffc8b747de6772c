"""What a code object may read from outside of itself, found in its instructions."""

from __future__ import annotations

import dis
import types
from functools import lru_cache
from typing import NamedTuple


class Path(NamedTuple):
    """A name that code loads, and the attributes it reads of it at once: `settings.inner.EPS`."""

    is_cell: bool  # of a closure; else a global
    name: str
    attributes: tuple[str, ...]


class Reads(NamedTuple):
    """All that a code object and the functions defined in it may read from outside.

    imports: the module and the level of each import statement.
    attributes: the names that may be attributes of any object.
    words: the strings that may be such names, because code may hand them to `getattr`.
    """

    paths: tuple[Path, ...]
    imports: tuple[tuple[str, int], ...]
    attributes: tuple[str, ...]
    words: tuple[str, ...]


@lru_cache(maxsize=1024)
def reads_of(code: types.CodeType) -> Reads:
    """The reads of a code object, in the order of its instructions."""
    paths: dict[Path, None] = {}
    imports: dict[tuple[str, int], None] = {}
    attributes: dict[str, None] = {}
    words: dict[str, None] = {}
    parts = [code]
    for part in parts:
        constants = list(part.co_consts)
        for constant in constants:  # both lists grow
            if isinstance(constant, types.CodeType):
                parts.append(constant)
            elif isinstance(constant, tuple):
                constants += constant
            elif isinstance(constant, str) and constant.isidentifier():
                words[constant] = None
        path, level = None, 0
        for instruction in dis.get_instructions(part):
            operation, name = instruction.opname, instruction.argval
            if operation == "EXTENDED_ARG":
                continue
            is_attribute = operation in ("LOAD_ATTR", "LOAD_METHOD")
            if path is not None and is_attribute:
                path = path._replace(attributes=(*path.attributes, name))
                continue
            if path is not None:
                paths[path], path = None, None
            if is_attribute or operation in ("IMPORT_FROM", "LOAD_SUPER_ATTR"):
                attributes[name] = None
            elif operation == "IMPORT_NAME":
                imports[name, level] = None
            elif operation.startswith("LOAD_"):
                if "DEREF" in operation and name in code.co_freevars:
                    path = Path(True, name, ())
                elif "GLOBAL" in operation or operation == "LOAD_NAME":
                    path = Path(False, name, ())
                elif isinstance(name, int):  # the level stands two instructions before an import
                    level = name
    return Reads(*map(tuple, (paths, imports, attributes, words)))

"""What a code object may read from outside of itself, found in its instructions."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterator
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
    for part in _nested(code):
        words |= dict.fromkeys(_words(part.co_consts))
        path, level = None, 0
        for instruction in (*dis.get_instructions(part), None):
            operation = instruction.opname if instruction else ""
            name = instruction.argval if instruction else None
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


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _words(constants: tuple) -> Iterator[str]:
    """The strings among constants that may be names of attributes."""
    for constant in constants:
        if isinstance(constant, str) and constant.isidentifier():
            yield constant
        elif isinstance(constant, tuple):
            yield from _words(constant)

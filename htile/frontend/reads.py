"""What a code object may read from outside of itself, found in its instructions."""

from __future__ import annotations

import dis
import re
import types
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

CONSTRUCTORS = ("__init__", "__new__", "__post_init__")
# What Python calls to write an object as text, which it does where code asks for it.
AS_TEXT = ("__format__", "__repr__", "__str__")
_NEVER_CALLED = ("__annotate__", "__annotate_func__")  # what Python 3.14 finds annotations by
_WRITES = frozenset({"FORMAT_VALUE", "FORMAT_SIMPLE", "FORMAT_WITH_SPEC", "CONVERT_VALUE"})
_WRITERS = frozenset({"ascii", "format", "print", "repr", "str"})
_NAME = re.compile(r"[^\W\d]\w*")


class Path(NamedTuple):
    """A name that code loads, and the attributes it reads of it at once: `settings.inner.EPS`."""

    is_cell: bool  # of a closure; else a global
    name: str
    attributes: tuple[str, ...]


class Reads(NamedTuple):
    """All that a code object and the functions defined in it may read from outside.

    imports: the module and the level of each import statement.
    attributes: the names that may be attributes of any object, and those that are in strings.
    words: the strings that are such names, because code may hand them to `getattr`.
    is_any: whether code asks by `getattr` or `hasattr` for names that it computes.
    """

    paths: tuple[Path, ...]
    imports: tuple[tuple[str, int], ...]
    attributes: tuple[str, ...]
    words: tuple[str, ...]
    is_any: bool


@lru_cache(maxsize=1024)
def reads_of(code: types.CodeType) -> Reads:
    """The reads of a code object, in the order of its instructions."""
    paths: dict[Path, None] = {}
    imports: dict[tuple[str, int], None] = {}
    attributes: dict[str, None] = {}
    words: dict[str, None] = {}
    is_any, parts = False, [code]
    for part in parts:
        parts += [each for each in part.co_consts if isinstance(each, types.CodeType)]
        instructions = [i for i in dis.get_instructions(part) if i.opname != "EXTENDED_ARG"]
        is_any |= any(_computes_name(instructions, k) for k in range(len(instructions)))
        path, level = None, 0
        for instruction in instructions:
            operation, name = instruction.opname, instruction.argval
            for text in _strings(name) if operation.endswith("_CONST") else ():
                words |= {text: None} if text.isidentifier() else {}
                attributes |= dict.fromkeys(_NAME.findall(text))
                attributes |= dict.fromkeys(AS_TEXT if "%" in text or "{" in text else ())
            if operation in _WRITES or (operation == "LOAD_GLOBAL" and name in _WRITERS):
                attributes |= dict.fromkeys(AS_TEXT)
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
    return Reads(*map(tuple, (paths, imports, attributes, words)), is_any)


def _strings(constant: object) -> Iterator[str]:
    """The strings that a constant is or has; a docstring is none that code loads."""
    if isinstance(constant, str):
        yield constant
    elif isinstance(constant, tuple | frozenset):
        for each in constant:
            yield from _strings(each)


def _computes_name(instructions: list[dis.Instruction], at: int) -> bool:
    """Whether an instruction loads `getattr` or `hasattr`, and what follows is a call of it with
    anything but a constant as the second argument."""
    if instructions[at].argval not in ("getattr", "hasattr") or at + 1 == len(instructions):
        return False
    depth, given = 0, None  # how many values the call's arguments have on the stack by now
    for instruction in instructions[at + 1 :]:
        if instruction.opname in ("PUSH_NULL", "PRECALL", "CACHE", "NOP"):
            continue
        if instruction.opname == "CALL" and instruction.arg == depth and depth > 1:
            return given is None
        if instruction.opcode in dis.hasjrel or instruction.opcode in dis.hasjabs:
            return True
        before, depth = depth, depth + dis.stack_effect(instruction.opcode, instruction.arg)
        if before == 1 and depth == 2:
            given = instruction.argval if instruction.opname == "LOAD_CONST" else None
        elif depth < 1 or (before == 3 and depth == 2):
            given = None  # something is made of the second argument
    return True


def special_methods(cls: type) -> list[str]:
    """The names of a class's own methods that Python calls by itself, where an object is used.

    Constructors are none of them, nor is what makes text of an object: code asks for these.
    """
    asked = {*CONSTRUCTORS, *AS_TEXT, *_NEVER_CALLED}
    kinds = types.FunctionType | staticmethod | classmethod | property
    return [
        name for name, member in vars(cls).items()
        if name == "keys" or (
            name[:2] == name[-2:] == "__" and name not in asked
            and (callable(member) or isinstance(member, kinds)) and not isinstance(member, type)
        )
    ]  # fmt: skip

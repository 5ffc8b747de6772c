"""What a function takes from outside: closure cells, globals, the same through its helpers.

A kernel fixes these values, so each is guarded by type and bits: `Captures.fingerprint` gives one
hashable tuple that changes when any of them does. Tensors and mutable objects can not be guarded
and raise. `freeze` is the same guard for one value.
"""

from __future__ import annotations

import builtins
import dataclasses
import dis
import functools
import struct
import sys
import types
from enum import Enum, EnumMeta
from operator import attrgetter

import torch

from ..errors import Location, TraceError

ATOMS = frozenset(
    {type(None), type(...), type(NotImplemented), bool, int, str, bytes, range, torch.dtype}
    | {torch.device, torch.layout, torch.memory_format}
)
BUILTINS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    types.UnionType,
)
# Their functions and constants are known not to change: taken by identity, not looked into.
TRUSTED = sys.stdlib_module_names | {"torch", "htile", "numpy", "builtins"}


def freeze(value: object) -> object:
    """A hashable key of a static value that tells types and bits apart: 1, True, 1.0; 0.0, -0.0."""
    return _freeze(value, _freeze_other)


def _freeze_other(value):
    if isinstance(value, types.FunctionType):
        return _Walk().function(value)
    return type(value), value


def _freeze(value, other):
    """The key of a value; `other` gives that of what is neither a scalar nor a frozen container."""
    cls = type(value)
    if cls in ATOMS:
        return cls, value
    if cls is float:
        return cls, struct.pack("d", value)
    if cls is complex:
        return cls, struct.pack("dd", value.real, value.imag)
    if isinstance(value, Enum):
        return cls, value
    if isinstance(value, tuple):
        return cls, tuple(_freeze(v, other) for v in value)
    if cls is frozenset:
        return cls, frozenset(_freeze(v, other) for v in value)
    if is_frozen_dataclass(value):
        fields = dataclasses.fields(value)
        return cls, tuple(_freeze(getattr(value, f.name, None), other) for f in fields)
    if cls is slice:
        return cls, tuple(_freeze(v, other) for v in (value.start, value.stop, value.step))
    if cls in (torch.finfo, torch.iinfo):
        return cls, value.dtype
    if _is_numpy_scalar(value):
        return cls, value.tobytes()
    return other(value)


def is_frozen_dataclass(value) -> bool:
    parameters = getattr(type(value), "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def _is_numpy_scalar(value) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.generic)


def _trusted(thing) -> bool:
    """Whether a module, class or function is torch's, htile's, numpy's or Python's own."""
    module = thing.__name__ if isinstance(thing, types.ModuleType) else thing.__module__
    return isinstance(module, str) and module.partition(".")[0] in TRUSTED


class Captures:
    """The values that one function takes from outside itself."""

    def __init__(self, fn: types.FunctionType):
        self.fn = fn
        self._known: dict[tuple, tuple] = {}
        self._state: tuple[tuple, tuple] | None = None

    def fingerprint(self) -> tuple:
        """The captured values as a hashable tuple: the same object as long as nothing changed.

        Raises TraceError where a capture is a tensor or can be changed in place.
        """
        if self._state is not None:
            watched, last = self._state
            try:
                for read, where, seen in watched:
                    if read(where) is not seen:
                        break
                else:
                    return last
            except ValueError:  # a cell that has become empty
                pass
        walk = _Walk()
        captured = walk.function(self.fn)[2:]
        captured = self._known.setdefault(captured, captured)
        self._state = (tuple(walk.watched), captured)
        return captured

    def watched(self) -> tuple[tuple[tuple, ...], tuple]:
        """(Where the fingerprint was read, the fingerprint).

        It is the same while `read(where) is value` for each (read, where, value); such a read of a
        cell that has become empty raises ValueError.
        """
        self.fingerprint()
        return self._state


_CELL = attrgetter("cell_contents")
_CODE = attrgetter("__code__")
_DEFAULTS = attrgetter("__defaults__")


class _Walk:
    """One reading of everything that a function captures.

    `watched` collects where each value was read, as (read, where, value): while every
    `read(where) is value`, nothing has changed, for all that is below is immutable.
    """

    def __init__(self):
        self.watched: list[tuple] = []
        self._seen: dict[int, int] = {}
        self._site: tuple[str, Location] | None = None

    def function(self, fn: types.FunctionType) -> tuple:
        """The key of a function: its code, its defaults, and all that it captures."""
        if id(fn) in self._seen:
            return ("again", self._seen[id(fn)])
        self._seen[id(fn)] = len(self._seen)
        code = fn.__code__
        outer = self._site
        self._site = (fn.__name__, Location(code.co_filename, code.co_firstlineno))
        root = outer is None
        defaults = None
        if not root:
            self.watched += [(_CODE, fn, code), (_DEFAULTS, fn, fn.__defaults__)]
            named = (fn.__kwdefaults__ or {}).items()
            defaults = (
                tuple(self.value("a default", v) for v in fn.__defaults__ or ()),
                tuple((k, self.value(f"the default of {k}", v)) for k, v in named),
            )
        captured = []
        cells = {}
        for name, cell in zip(code.co_freevars, fn.__closure__ or (), strict=True):
            try:
                cells[name] = _CELL(cell)
            except ValueError:  # not assigned yet
                self.watched.append((_CELL, cell, None))
                continue
            self.watched.append((_CELL, cell, cells[name]))
        for free, name, attributes in _names(code):
            if free:
                if name in cells:
                    captured.append(self.path(name, cells[name], attributes))
            elif name in fn.__globals__:
                value = fn.__globals__[name]
                self.watched.append((fn.__globals__.get, name, value))
                captured.append(self.path(name, value, attributes))
            elif hasattr(builtins, name):  # until a global hides it
                self.watched.append((fn.__globals__.get, name, None))
        self._site = outer
        return (code, defaults, *captured)

    def path(self, name: str, value: object, attributes: tuple[str, ...]) -> tuple:
        """The key of `name.attribute...`, read through the user's modules and classes."""
        while attributes and _is_namespace(value):
            attribute, *attributes = attributes
            found = self._attribute(value, attribute)
            if found is _MISSING:
                break
            name, value = f"{name}.{attribute}", found
        key = self.value(name, value)
        if attributes and is_frozen_dataclass(value):  # its methods and properties are helpers
            method = self._attribute(type(value), attributes[0])
            if isinstance(method, types.FunctionType):
                return name, key, self.value(f"{name}.{attributes[0]}", method)
        return name, key

    def _attribute(self, owner, name: str):
        if isinstance(owner, types.ModuleType):
            self.watched.append((vars(owner).get, name, vars(owner).get(name)))
            return getattr(owner, name, _MISSING)
        for cls in owner.__mro__:
            self.watched.append((vars(cls).get, name, vars(cls).get(name)))
            if name in vars(cls):
                value = vars(cls)[name]
                if isinstance(value, (staticmethod, classmethod)):
                    return value.__func__
                return value.fget if isinstance(value, property) else value
        return _MISSING

    def value(self, name: str, value: object) -> object:
        """The key of one captured value. Raises TraceError, naming it."""
        return _freeze(value, functools.partial(self._other, name, value))

    def _other(self, name: str, top: object, value: object) -> object:
        if type(value).__module__.partition(".")[0] == "htile":  # another decorated function
            value = getattr(value, "__wrapped__", value)
        if isinstance(value, types.FunctionType):
            return value if _trusted(value) else self.function(value)
        if isinstance(value, types.MethodType):
            owner = value.__self__
            key = owner if isinstance(owner, type) else self.value(f"{name}.__self__", owner)
            return key, self.value(name, value.__func__)
        if isinstance(value, functools.partial):
            keywords = value.keywords.items()
            return (
                self.value(name, value.func),
                self.value(name, value.args),
                tuple((k, self.value(f"{name}, argument {k}", v)) for k, v in keywords),
            )
        if isinstance(value, (type, types.ModuleType)):
            return value
        if isinstance(value, BUILTINS):
            owner = getattr(value, "__self__", None)
            if owner is None or isinstance(owner, (type, types.ModuleType)) or _is_torch(owner):
                return value
        if _is_torch(type(value)) and callable(value) and not isinstance(value, torch.nn.Module):
            return value  # an operator of torch.ops
        self._refuse(name, value, inside=value is not top)

    def _refuse(self, name: str, value: object, inside: bool):
        function, loc = self._site or ("a static function", None)
        what = f"captures {name!r}, " + ("which holds " if inside else "")
        if isinstance(value, torch.Tensor):
            raise TraceError(
                f"{function} {what}a tensor; a kernel fixes what it captures: "
                "pass it as an argument",
                loc,
            )
        remedy = next(
            (r for t, r in _REMEDIES if isinstance(value, t)),
            "pass what it holds as arguments, or capture a frozen dataclass",
        )
        raise TraceError(
            f"{function} {what}a mutable {type(value).__name__}; expected a scalar, string, dtype, "
            f"tuple, frozen dataclass, function or module: {remedy}",
            loc,
        )


_MISSING = object()
_REMEDIES = (
    (list, "capture a tuple"),
    (dict, "capture a tuple of pairs or a frozen dataclass"),
    (set, "capture a frozenset"),
    (torch.nn.Module, "pass its parameters as arguments"),
)


def _is_torch(thing) -> bool:
    module = getattr(thing, "__module__", None)
    return isinstance(module, str) and module.partition(".")[0] == "torch"


def _is_namespace(value) -> bool:
    """A module or class of the user, whose attributes are captured one by one."""
    if isinstance(value, types.ModuleType):
        return not _trusted(value)
    return isinstance(value, type) and not isinstance(value, EnumMeta) and not _trusted(value)


@functools.cache
def _names(code: types.CodeType) -> tuple[tuple[bool, str, tuple[str, ...]], ...]:
    """The names that code takes from outside: (from a cell?, name, the attributes read of it)."""
    found: dict[tuple, None] = {}
    for part in _nested(code):
        chain = None
        for instruction in [*dis.get_instructions(part), None]:
            operation = instruction.opname if instruction else ""
            if chain is not None and operation in ("LOAD_ATTR", "LOAD_METHOD"):
                chain[2].append(instruction.argval)
                continue
            if chain is not None:
                found[chain[0], chain[1], tuple(chain[2])] = None
                chain = None
            if operation.startswith("LOAD_"):
                if "DEREF" in operation and instruction.argval in code.co_freevars:
                    chain = (True, instruction.argval, [])
                elif "GLOBAL" in operation or operation == "LOAD_NAME":
                    chain = (False, instruction.argval, [])
    return tuple(found)


def _nested(code: types.CodeType):
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)

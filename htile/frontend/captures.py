"""What a function takes from outside: closure cells, globals, the same through its helpers.

A kernel fixes these values, so each call must see whether one has changed. The rule is: follow it
or refuse it. `Captures.fingerprint` gives one hashable tuple that changes when any value changes
that a trace can read; what cannot be followed raises and is named. `freeze` gives the same kind of
key for one static argument.
"""

from __future__ import annotations

import builtins
import functools
import importlib.util
import sys
import types
from collections.abc import Iterable, Mapping
from contextlib import suppress
from enum import Enum
from operator import attrgetter
from typing import NoReturn

import torch

from ..errors import Location, TraceError
from .hints import CUSTOM_FUNCTION, DRAWS, RANDOM
from .libraries import SETTINGS, library_of, own_classes, own_members, reads_state
from .reads import CONSTRUCTORS, reads_of, special_methods

ATOMS = frozenset(
    {type(None), type(...), type(NotImplemented), bool, int, str, bytes, range, torch.dtype}
    | {torch.device, torch.layout, torch.memory_format}
)
KNOWN = 256  # fingerprints of one function that are kept, so that an old one is the same object

_BY_TEXT = (float, complex, torch.finfo, torch.iinfo)  # whose `repr` tells all values apart
_DESCRIPTORS = (
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.GenericAlias,
    types.UnionType,
)
# The modules of Python whose hashable objects never change.
_VALUES = "collections dataclasses datetime decimal fractions pathlib re typing uuid"
# The special methods that dataclasses write.
_GENERATED = ("__eq__", "__hash__", "__lt__", "__le__", "__gt__", "__ge__", "__repr__",
              "__setattr__", "__delattr__")  # fmt: skip
_CONSTRUCTORS = dict.fromkeys(CONSTRUCTORS)
_COPIES = frozenset({"__class__", "type", "replace", "_replace", "_make"})
_REMEDIES = (
    (list, "capture a tuple"),
    (dict, "capture a tuple of pairs or a frozen dataclass"),
    (set, "capture a frozenset"),
    (torch.nn.Module, "pass its parameters as arguments"),
    (object, "pass what it holds as arguments, or capture a frozen dataclass"),
)
_HIDDEN = frozenset({"__globals__", "__closure__", "__code__"})  # what they hold is not followed
_OF_NUMPY = "ufunc", "_ArrayFunctionDispatcher"  # the classes of functions of numpy
_MISSING = object()


def line_of(fn: types.FunctionType) -> Location:
    """The line where a function is defined."""
    return Location(fn.__code__.co_filename, fn.__code__.co_firstlineno)


def closure(fn: types.FunctionType) -> dict[str, object]:
    """What the closure of a function holds, by name, without the names not assigned yet."""
    held = {}
    for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
        with suppress(ValueError):
            held[name] = cell.cell_contents
    return held


def freeze(value: object) -> object:
    """A hashable key of a static value that tells types and bits apart: 1, True, 1.0; 0.0, -0.0.

    Raises TypeError, as `hash` does, for a value that may change unseen.
    """
    if type(value) in ATOMS:
        return type(value), value
    try:
        return _Walk(is_static=True).value("", value)
    except TraceError as error:
        raise TypeError(error.message) from None


def check_static(fn: types.FunctionType, values: Mapping[str, object]) -> None:
    """Raise TraceError where `fn` reads of its static arguments what cannot be followed.

    `freeze` follows every member of a class that it can, for it does not know which are used.
    """
    values = {name: value for name, value in values.items() if type(value) not in ATOMS}
    if values:
        walk = _Walk(fn)
        walk.function(fn, is_root=True)
        for name, value in values.items():
            walk.value(name, value)
        walk.members()


class Captures:
    """The values that one function takes from outside itself.

    is_static: the function, or class, is a static argument or part of one. Then its own defaults
        count too, and of a class every member that can be followed.
    """

    def __init__(self, fn: types.FunctionType | type, is_static: bool = False):
        self.fn = fn
        self.is_static = is_static
        self._others: tuple[types.FunctionType, ...] = ()
        self._known: dict[tuple, tuple] = {}
        self._state: tuple[tuple, tuple] | None = None

    def follow(self, other: types.FunctionType) -> None:
        """Count what another function captures, too, in place of one that was followed before."""
        self._others, self._state = (other,), None

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
        walk = _Walk(self.fn)
        if isinstance(self.fn, type):
            captured = walk.every_member(self.fn)
        else:
            captured = walk.function(self.fn, is_root=not self.is_static)
            captured = captured if self.is_static else captured[2:]
            captured += (*map(walk.function, self._others), *walk.members())
        if len(self._known) >= KNOWN:
            self._known.clear()
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


_static_captures = functools.lru_cache(maxsize=1024)(lambda fn: Captures(fn, is_static=True))


class _Walk:
    """One reading of everything that a function captures.

    top: the function whose line an error names while no function is being read.
    is_static: whether a static argument is read. Functions and classes in it have readings of
        their own, which are kept.
    watched: where each value was read, as (read, where, value). While every `read(where) is value`
        nothing has changed, for all that is below is immutable.
    """

    def __init__(self, top: types.FunctionType | type | None = None, is_static: bool = False):
        self._reader = top if isinstance(top, types.FunctionType) else None
        self._is_static = is_static
        self.watched: list[tuple] = []
        self._names: dict[str, None] = {}  # that the code read so far may ask any object for
        self._words: dict[str, None] = {}  # those of them that it has as strings, for `getattr`
        self._is_any = False  # whether that code computes names to ask for
        self._absent: set[tuple[int, str]] = set()  # what was asked for and is not there
        self._owners: dict[int, tuple[str, object]] = {}  # the objects it may ask, by id
        self._functions: dict[int, int] = {}

    def function(self, fn: types.FunctionType, is_root: bool = False) -> tuple:
        """The key of a function: its code, its defaults unless it is the root, its captures."""
        if self._is_static:
            return _static_captures(fn).fingerprint()
        if id(fn) in self._functions:
            return ("again", self._functions[id(fn)])
        self._functions[id(fn)] = len(self._functions)
        outer, self._reader = self._reader, fn
        defaults = None if is_root else self._defaults(fn)
        if vars(fn):
            self._owners[id(fn)] = fn.__name__, vars(fn)
        captured, cells, reads = [], closure(fn), reads_of(fn.__code__)
        self._names |= dict.fromkeys(reads.attributes + reads.words)
        self._words |= dict.fromkeys(reads.words)
        self._is_any |= reads.is_any
        for name, cell in zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True):
            self.watched.append((attrgetter("cell_contents"), cell, cells.get(name)))
        for is_cell, name, attributes in reads.paths:
            if name[0] == "@":  # as pytest names what it adds
                continue
            held = cells if is_cell else fn.__globals__
            if not is_cell:  # a name that is not there may be a builtin, until a global hides it
                self.watched.append((held.get, name, held.get(name)))
            if name in held:
                captured.append(self.path(name, held[name], attributes))
            elif not is_cell and hasattr(builtins, name):
                self.path(name, getattr(builtins, name), attributes)
        for name, level in reads.imports:
            captured += self._imported("." * level + name, fn.__globals__.get("__package__"))
        self._reader = outer
        return (fn.__code__, defaults, *captured)

    def _defaults(self, fn: types.FunctionType) -> tuple:
        places, named = ["__code__", "__defaults__"], {}
        if fn.__code__.co_kwonlyargcount:
            places.append("__kwdefaults__")
            named = fn.__kwdefaults__ or {}
            self._watch_items(named)
        self.watched += [(attrgetter(place), fn, getattr(fn, place)) for place in places]
        return (
            tuple(self.value("a default", v) for v in fn.__defaults__ or ()),
            tuple((k, self.value(f"the default of {k}", v)) for k, v in named.items()),
        )

    def _imported(self, name: str, package: str | None) -> list[object]:
        """The modules that an import in a function brings: `a` and `a.b` for `import a.b`."""
        name = importlib.util.resolve_name(name, package)
        try:
            importlib.import_module(name)  # the function is about to do so
        except ImportError:
            return []  # it may catch this
        modules = [(each, sys.modules[each]) for each in (name.partition(".")[0], name)]
        self.watched += [(sys.modules.get, each, module) for each, module in modules]
        return [self.value(each, module) for each, module in modules]

    def path(self, name: str, value: object, attributes: Iterable[str]) -> tuple:
        """The key of `name.attribute...`, read through modules one by one."""
        attributes = list(attributes)
        hidden = _HIDDEN.intersection(attributes)
        while attributes and isinstance(value, types.ModuleType) and not hidden:
            asked = f"{name}.{attributes[0]}"
            if value is torch.backends:
                self._refuse(f"captures '{asked}', a mutable setting of torch: pass what it holds "
                             "as an argument")  # fmt: skip
            if attributes[0] == "__dict__":
                hidden = {"__dict__"}
            elif (found := self._attribute(value, attributes[0], True)) is not _MISSING:
                name, value, attributes = asked, found, attributes[1:]
            elif "__getattr__" in vars(value) and not library_of(value):
                self._refuse(f"captures '{asked}', which __getattr__ of the module makes: give the "
                             "module a name that holds it")  # fmt: skip
            else:
                break
        if hidden:
            self._refuse(f"reads '{name}.{min(hidden)}', which may change unseen: read the value "
                         "by its own name, or pass it as an argument")  # fmt: skip
        self._names |= dict.fromkeys(attributes)
        return name, self.value(name, value)

    def _attribute(self, owner: object, name: str, is_asked: bool) -> object:
        """What `owner.name` is, `_MISSING` if there is none; watched where it is defined.

        is_asked: whether code asks for it even if it is not there, so that its absence is watched.
        """
        if isinstance(owner, types.ModuleType):
            if library_of(owner):
                is_of_all = hasattr(types.ModuleType, name) and name not in vars(owner)
                return _MISSING if is_of_all else getattr(owner, name, _MISSING)
            owner = vars(owner)
        places = list(map(vars, own_classes(owner))) if isinstance(owner, type) else [owner]
        for k, place in enumerate(places):
            if name in place:
                self.watched += [(p.get, name, p.get(name)) for p in places[: k + 1]]
                return place[name]
        if is_asked and (id(owner), name) not in self._absent:
            self._absent.add((id(owner), name))
            self.watched += [(p.get, name, None) for p in places]
        return _MISSING

    def members(self, is_strict: bool = True) -> tuple:
        """The keys of what code may read by name of the objects that it reaches.

        What is followed may name more attributes and reach more objects, so it goes on until there
        is nothing new. is_strict: raise for what cannot be followed; else it has no key.
        """
        keys: dict[tuple[int, str], object] = {}
        passed, before = () if is_strict else (TraceError,), None
        while before != (before := (len(keys), len(self._owners), len(self._names))):
            if _COPIES & self._names.keys():
                self._names |= _CONSTRUCTORS
            for name, owner in list(self._owners.values()):
                looked_up = dict.fromkeys(self._names, passed)
                if isinstance(owner, type):
                    for each in own_classes(owner):
                        looked_up |= dict.fromkeys(special_methods(each), passed)
                    if "super" in self._names:
                        self._owners |= {id(c): (c.__name__, c) for c in own_classes(owner)}
                if self._is_any:
                    looked_up = dict.fromkeys(own_members(owner), (TraceError,)) | looked_up
                for attribute, passed_over in looked_up.items():
                    place = id(owner), attribute
                    if place in keys:
                        continue
                    value = self._attribute(owner, attribute, attribute in self._words)
                    if value is not _MISSING:
                        keys[place] = None
                        with suppress(*passed_over):
                            keys[place] = self.path(f"{name}.{attribute}", _behind(value), ())
        return tuple(keys.values())

    def every_member(self, cls: type) -> tuple:
        """The keys of all members of a class that can be followed."""
        self.members_of(cls)
        self._names |= {name: None for each in own_classes(cls) for name in vars(each)}
        return self.members(is_strict=False)

    def members_of(self, cls: type) -> tuple:
        """Have followed what code reads by name of a class's objects; the keys known by now."""
        if self._is_static and not library_of(cls):
            return _static_captures(cls).fingerprint()
        if not library_of(cls):
            self._owners[id(cls)] = cls.__name__, cls
        return ()

    def value(self, name: str, value: object, top: object = _MISSING) -> object:
        """The key of one value, which `top` holds. Raises TraceError, naming it."""
        cls, top = type(value), value if top is _MISSING else top
        if cls in ATOMS:
            return cls, value
        if cls in _BY_TEXT:
            return cls, repr(value)
        if (numpy := sys.modules.get("numpy")) and isinstance(value, numpy.generic):
            return cls, value.tobytes()
        if cls is frozenset:
            return cls, frozenset(self.value(name, v, top) for v in value)
        held = getattr(value, "__dict__", None)  # attributes that it may be given at any time
        if cls is slice or isinstance(value, tuple):
            parts = dict(enumerate(value.__reduce__()[1] if cls is slice else value))
        elif isinstance(value, functools.partial):
            parts = {"func": value.func, "args": value.args, **value.keywords}
            self._watch_items(value.keywords)
        elif isinstance(value, Enum):
            parts = {"name": value.name, "value": value.value}
            parts |= {k: v for k, v in held.items() if k[0] != "_"}
            self._watch_items(held, set(parts) & set(held))
            held = None
        elif _is_frozen_dataclass(cls):
            slots = (vars(c).get("__slots__", ()) for c in cls.__mro__)
            names = (n for s in slots for n in ((s,) if isinstance(s, str) else s))
            parts = {n: getattr(value, n) for n in names if n[:2] != "__" and hasattr(value, n)}
            parts, held = parts | (held or {}), None
        elif isinstance(value, torch.nn.Module) and library_of(cls) == "torch":
            inner = {k: v for k, v in held.items() if isinstance(v, (dict, set))}
            if any(self._holds_any(each) for each in inner.values()):
                self._refuse_value(name, value, value is not top)
            self._watch_items(held)
            parts, held = {k: v for k, v in held.items() if k not in inner}, None
        else:
            return self._other(name, value, top)
        if held is not None:
            self._watch_items(held)
            parts |= held
        keys = [(k, self.value(name, v, top)) for k, v in parts.items()]
        return cls, *keys, *self.members_of(cls)

    def _watch_items(self, live: dict, names: Iterable[str] | None = None) -> None:
        """Watch these entries of a dict that may be changed in place, and whether it has others."""
        self.watched.append((len, live, len(live)))
        self.watched += [(live.get, k, live[k]) for k in (live if names is None else names)]

    def _holds_any(self, inner: dict | set) -> bool:
        """Whether a module of torch has parameters, other modules or hooks in this; watched."""
        self._watch_items(inner if isinstance(inner, dict) else {})
        self.watched.append((len, inner, len(inner)))
        return any(v is not None for v in (inner.values() if isinstance(inner, dict) else inner))

    def _other(self, name: str, value: object, top: object) -> object:
        """The key of what holds code or attributes: functions, methods, classes, modules."""
        if type(value).__module__.partition(".")[0] == "htile":  # another decorated function
            if hasattr(value, "_backward"):
                self.watched.append((attrgetter("_backward"), value, value._backward))
                if value._backward is not None:
                    return self.function(value.__wrapped__), self.function(value._backward.fn)
            value = getattr(value, "__wrapped__", value)
        cls, origin, owner = type(value), library_of(value), getattr(value, "__self__", None)
        if any(value is setting for setting in SETTINGS):
            self.watched.append((lambda setting: setting(), value, value()))
            return value, value()
        if isinstance(value, types.ModuleType):
            self._owners[id(value)] = name, value
            return value
        if origin and callable(value) and reads_state(value):
            is_draw = getattr(value, "__name__", "") in DRAWS
            remedy = "compute it outside and pass it as an argument" + f"; {RANDOM}" * is_draw
            if value is torch.set_grad_enabled:
                remedy = "write `with torch.no_grad():` for what has no gradient"
            self._refuse(f"uses {name!r}, which may give something else at the next call; a kernel "
                         f"fixes it: {remedy}")  # fmt: skip
        if isinstance(value, type) and issubclass(value, torch.autograd.Function):
            if torch.is_grad_enabled():  # torch would run its forward pass as if it had no gradient
                self._refuse(f"captures {name!r}, {CUSTOM_FUNCTION}")
            self.watched.append((lambda setting: setting(), torch.is_grad_enabled, False))
        if isinstance(value, type):
            self._names |= _CONSTRUCTORS if not origin else {value.__name__: None}
            return (value, *self.members_of(value))
        if isinstance(value, types.FunctionType) and origin:  # a decorator's holds the user's
            if origin == "functools" and hasattr(value, "registry"):
                self._refuse(f"uses {name!r}, a functools.singledispatch, whose functions may be "
                             "replaced unseen: call the one that is meant")  # fmt: skip
            inner = (f for f in closure(value).values() if isinstance(f, types.FunctionType))
            return value, *(self.value(name, f) for f in inner if not library_of(f))
        if isinstance(value, types.FunctionType):
            is_generated = value.__code__.co_filename == "<string>"
            return value if is_generated and value.__name__ in _GENERATED else self.function(value)
        if isinstance(value, types.MethodType) or type(owner) in (str, bytes, tuple, list, dict):
            key = self.value(f"{name}.__self__", owner)
            return key, value.__name__, self.value(name, getattr(value, "__func__", None))
        is_function = isinstance(value, types.BuiltinFunctionType) or cls.__name__ in _OF_NUMPY
        is_torchs = cls.__module__ == "torch._ops"
        if isinstance(value, _DESCRIPTORS) or is_torchs or (origin and is_function):
            return value
        if library_of(cls).removeprefix("_") in _VALUES.split() and cls.__hash__:
            return cls, repr(value), value
        self._refuse_value(name, value, value is not top)

    def _refuse_value(self, name: str, value: object, is_inside: bool) -> NoReturn:
        what = f"captures {name!r}, {'which holds ' * is_inside}"
        what = what if name else "holds " if is_inside else "is "
        if isinstance(value, torch.Tensor):
            self._refuse(f"{what}a tensor; a kernel fixes what it captures: pass it as an argument")
        cls = type(value)
        remedy = next(r for t, r in _REMEDIES if isinstance(value, t))
        if isinstance(value, torch.nn.Module):
            remedy += _function_of(cls)
        if any(map(_is_frozen_dataclass, cls.__mro__)):
            remedy = f"decorate {cls.__name__} with @dataclass(frozen=True) too"
        remedy = remedy if name else remedy.replace("capture ", "pass ")
        self._refuse(
            f"{what}a mutable {cls.__name__}; expected a scalar, string, dtype, tuple, frozen "
            f"dataclass, function or module: {remedy}"
        )

    def _refuse(self, message: str) -> NoReturn:
        if self._reader is None:
            raise TraceError(f"it {message}")
        raise TraceError(f"{self._reader.__name__} {message}", line_of(self._reader))


def _function_of(module: type) -> str:
    """How the function of torch that computes what a module does is called; "" without one."""
    names = {name.replace("_", ""): name for name in vars(torch.nn.functional)}
    name = names.get(module.__name__.lower())
    return f", and call F.{name}" if name and module.__module__.startswith("torch.nn.") else ""


def _is_frozen_dataclass(cls: type) -> bool:
    """Whether no attribute of its objects can be set; a subclass is to be decorated as well."""
    parameters = vars(cls).get("__dataclass_params__")
    return parameters is not None and parameters.frozen


def _behind(member: object) -> object:
    """The function behind a descriptor of a class; any other member as it is."""
    if isinstance(member, staticmethod | classmethod):
        return member.__func__
    if isinstance(member, property):
        return member.fget
    return member.func if isinstance(member, functools.cached_property) else member

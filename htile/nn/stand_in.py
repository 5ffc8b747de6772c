"""A module's own forward as a function of its tensors, and what else that forward reads.

A `Forward` calls the class's `forward` with a stand-in for `self`: an object of the same class that
has the given tensors as parameters and buffers, and the module's other attributes. Nothing of the
module itself is touched, so the tensors may be symbolic.
"""

from __future__ import annotations

import inspect
import keyword
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from ..errors import HTileError, TraceError
from ..frontend.captures import freeze
from ..frontend.libraries import library_of
from ..frontend.reads import reads_of, special_methods
from ..frontend.tensor import Tensor as Symbolic
from ..run.rowwise import Rowwise, rowwise

PLACES = ("_parameters", "_buffers")  # the dicts of a module that hold its tensors
_OWN = {*vars(torch.nn.Module())} - {"training"}  # what torch keeps in each module


@dataclass(frozen=True)
class Forward:
    """The forward of a class of modules, for modules that have the same of all that it reads.

    inputs: the names of its arguments that are tensors.
    tensors: (the module's dict, the name) of each parameter and buffer.
    absent: the same of those that are None.
    attributes: what else of the module the forward reads: by name a value that cannot change in
        place.
    members: what it reads of its classes, as (class, name, value).
    missed: the names of attributes that it asks for, as by `hasattr`, and that are not there.
    """

    kind: type[torch.nn.Module]
    inputs: tuple[str, ...]
    tensors: tuple[tuple[str, str], ...]
    absent: tuple[tuple[str, str], ...]
    attributes: tuple[tuple[str, object], ...]
    members: tuple[tuple[type, str, object], ...]
    missed: tuple[str, ...] = ()

    def __call__(self, *values: torch.Tensor) -> object:
        """What the forward gives for these inputs and tensors."""
        return run_with(self, values, dict(self.attributes))

    def holds_for(self, module: torch.nn.Module) -> bool:
        """Whether nothing that the forward reads has been changed, but for the tensors."""
        held = vars(module)
        for name, value in self.attributes:
            found = held.get(name)
            if found is not value and not _is_same(found, value):
                return False
        if any(held[place].get(name) is not None for place, name in self.absent):
            return False
        count = sum(len(held[place]) for place in (*PLACES, "_modules"))
        if count != len(self.tensors) + len(self.absent):
            return False  # there are parameters, buffers or modules that were not there
        if any(name in held or hasattr(self.kind, name) for name in self.missed):
            return False
        return all(vars(owner).get(name) is value for owner, name, value in self.members)

    def values_of(self, module: torch.nn.Module) -> list[torch.Tensor]:
        """The module's tensors, in order."""
        held = vars(module)
        return [held[place].get(name) for place, name in self.tensors]

    def rowwise(self) -> Rowwise:
        """The forward as a row-wise function of the inputs and the tensors."""
        code = tuple(v for _, _, member in self.members for v in _functions(member))
        read = (*code, *(value for _, value in self.attributes))
        run = _hidden(self)

        def forward(*values):
            return run(read, values)  # `read` is read here, so that what it captures is followed

        return rowwise(self.as_function(forward))

    def as_function(self, function: types.FunctionType) -> types.FunctionType:
        """A function of any values as one whose parameters have the names of these."""
        names: list[str] = []
        for name in (*self.inputs, *(name for _, name in self.tensors)):
            while name in names or keyword.iskeyword(name) or not name.isidentifier():
                name = f"{name}_" if name.isidentifier() else f"tensor{len(names)}"
            names.append(name)
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters = [inspect.Parameter(name, kind) for name in names]
        function.__signature__ = inspect.Signature(parameters)
        function.__name__ = function.__qualname__ = self.kind.__name__
        return function


def _hidden(forward: Forward):
    """A call of a forward. The class is held here, where captured values are not followed.

    Of a captured class its constructor would be, which no call of a forward runs.
    """

    def run(read: tuple, values: tuple) -> object:
        return forward(*values)

    return run


class _Recorded(dict):
    """Attributes, which remembers those that were asked for; it gives no mutable one."""

    def __init__(self, values: Mapping[str, object]):
        super().__init__(values)
        self.read: dict[str, object] = {}
        self.missed: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        is_there = super().__contains__(name)
        self.missed |= {} if is_there else {name: None}
        return is_there

    def __getitem__(self, name: str) -> object:
        value = super().__getitem__(name)
        self.read[name] = _frozen(name, value)
        return value


def _frozen(name: str, value: object) -> object:
    if isinstance(value, torch.Tensor):
        raise TraceError(f"its forward reads self.{name}, a tensor that is no parameter or buffer")
    try:
        freeze(value)
    except TypeError as error:
        raise TraceError(f"its forward reads self.{name}: {error}") from None
    return value


def _is_same(one: object, other: object) -> bool:
    """Whether two values are the same to a kernel, as copies of an immutable object are."""
    try:
        return freeze(one) == freeze(other)
    except TypeError:
        return False


def run_with(forward: Forward, values: tuple, attributes: dict[str, object]) -> object:
    """Call a forward with a stand-in that has these attributes.

    Raises TraceError if it stores anything, and if it changes a tensor that is traced in place.
    """
    kind, count = forward.kind, len(forward.inputs)
    own = {name: value for name, value in vars(torch.nn.Module()).items() if name != "training"}
    for place in PLACES:
        own[place] = {}
    for place, name in forward.absent:
        own[place][name] = None
    for (place, name), value in zip(forward.tensors, values[count:], strict=True):
        own[place][name] = value
    stand_in = object.__new__(kind)
    if not isinstance(attributes, _Recorded):
        own |= attributes
    else:  # a member of the class that an attribute hides would be found before `_modules`
        hiding = [name for name in attributes if hasattr(kind, name)]
        own |= {name: attributes[name] for name in hiding}
        own["_modules"] = attributes  # where torch.nn.Module.__getattr__ looks last
    vars(stand_in).update(own)
    tensors = {place: dict(own[place]) for place in PLACES}
    before = [value._id if isinstance(value, Symbolic) else None for value in values]
    try:
        result = kind.forward(stand_in, *values[:count])
    except (TypeError, HTileError) as error:
        name = _stored_name(error)
        if name is None:
            raise
        message = f"its forward stores an attribute, self.{name}, so it is no function"
        raise TraceError(message) from None
    stored = [n for n, v in vars(stand_in).items() if n not in own or own[n] is not v]
    for place in PLACES:
        stored += [n for n, v in own[place].items() if tensors[place].get(n, own) is not v]
    if stored:
        raise TraceError(f"its forward stores self.{stored[0]}, so it is no function")
    names = *(f"its argument {name}" for name in forward.inputs), *(
        f"self.{name}" for _, name in forward.tensors
    )
    for name, value, id in zip(names, values, before, strict=True):
        if isinstance(value, Symbolic) and value._id != id:
            raise TraceError(f"its forward changes {name}, so it is no function")
    return result


def _stored_name(error: Exception) -> str | None:
    """The name of the attribute that torch failed to store; None where it failed elsewhere.

    torch refuses to store a tensor or a number under the name of what it takes for a module. To say
    so it asks a symbolic tensor for its type, which that refuses in turn.
    """
    store = torch.nn.Module.__setattr__.__code__
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return next((frame.f_locals["name"] for frame in frames if frame.f_code is store), None)


def forward_of(
    module: torch.nn.Module, run: Callable[[types.FunctionType], object]
) -> tuple[Forward, object]:
    """The forward of a module, and what `run` gave.

    run: it is given the forward as a function of the inputs and tensors, and calls it. What that
        call reads of the module is then part of the forward.
    """
    kind, held = type(module), vars(module)
    parameters = [*inspect.signature(kind.forward).parameters.values()][1:]
    several = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in several]
    named = [(place, name) for place in PLACES for name in held[place]]
    tensors = tuple((place, name) for place, name in named if held[place][name] is not None)
    absent = tuple((place, name) for place, name in named if held[place][name] is None)
    forward = Forward(kind, tuple(needed), tensors, absent, (), tuple(_members(kind)))
    recorded = _Recorded({name: value for name, value in held.items() if name not in _OWN})

    def recording(*values):
        return run_with(forward, values, recorded)

    found = run(forward.as_function(recording))
    read, missed = tuple(recorded.read.items()), tuple(recorded.missed)
    return replace(forward, attributes=read, missed=missed), found


def _members(kind: type) -> Iterator[tuple[type, str, object]]:
    """What the forward of a class may read of the user's classes, through all that it names."""
    users = [each for each in kind.__mro__ if not library_of(each)]
    names, done = ["forward", *(n for each in users for n in special_methods(each))], set()
    for name in names:  # it grows
        for owner in users:
            if name in done or name not in vars(owner):
                continue
            member = vars(owner)[name]
            yield owner, name, member
            code = _functions(member)
            for reads in (reads_of(function.__code__) for function in code):
                names += [n for n in (*reads.attributes, *reads.words) if n not in names]
            if not code:
                _frozen(name, member)
        done.add(name)


def _functions(member: object) -> list[types.FunctionType]:
    """The functions behind a member of a class."""
    member = getattr(member, "__func__", None) or getattr(member, "fget", None) or member
    return [member] if isinstance(member, types.FunctionType) else []

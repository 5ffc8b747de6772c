"""A repeated call as a function of its own: a few checks, the results, the launch.

A writer writes it for one launch, in Python, with the user's parameters. A shortcut is for the
sizes of the first call, or for any number of rows. `text.py` has what it checks of tensors,
`out.py` what it does about `out=`, and `gradients.py` calls that are differentiated.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import torch
from torch.utils import _pytree as pytree

from ...build.forks import renew_in_children
from ...frontend.annotations import Static
from ...frontend.captures import Captures, freeze
from ..launch import Launch, Request
from ..operands import has_one_twice
from .text import NotTold, Writer, tuple_of

if TYPE_CHECKING:
    from ..runner import Runner

ONE = pytree.tree_structure(0)  # the structure of a single tensor
MAX_SHORTCUTS = 5  # of one kind that are added to a tuple; then none is
MAX_TRIES = 16  # to add some to the tuple of one graph
MAX_MISSES = 3  # calls of other sizes, after which a shortcut for one size is removed
_LOCK = threading.Lock()  # held while a tuple of shortcuts is replaced
renew_in_children(sys.modules[__name__], "_LOCK", threading.Lock)

Missed = Callable[[], None]


def add(owner: object, name: str, writer: type[Writer], first: Request, *more: object) -> None:
    """Add shortcuts for calls like `first` to a tuple, unless it has enough of this writer.

    Each call adds one for any number of rows, unless its kernel takes rows that lie anyhow, and so
    calls that have a faster kernel. The first call of a kind, as one that writes to just these
    arguments, adds one for its own sizes, which is removed after some calls of other sizes.

    owner, name: the object that holds the tuple, and the name of the attribute.
    more: what the writer takes beside the call and what it does for other sizes.
    """
    kinds = [each.kind for each in getattr(owner, name)]
    if [kind[0] for kind in kinds].count(writer) >= MAX_SHORTCUTS:
        return
    misses = itertools.count(1)

    def missed() -> None:
        if next(misses) >= MAX_MISSES and of_any_size:
            replace_shortcuts(owner, name, (), of_this_size)

    is_faster = len(first.call.lead) < 2 or first.is_flat
    of_any_size = _shortcut(writer, first, None, *more) if is_faster else None
    of_this_size = None
    if first.call.lead and (of_any_size is None or (writer, first.in_place) not in kinds):
        of_this_size = _shortcut(writer, first, missed, *more)
    replace_shortcuts(owner, name, (of_this_size, of_any_size))


def add_after(
    owner: object, writer: type[Writer], run: Runner, values: tuple, lead: tuple[int, ...],
    *more: object,
) -> None:  # fmt: skip
    """Add shortcuts to `owner.shortcuts` after a call of a graph that none of them has taken.

    So few times are tried, counted by `owner.tries`, that calls that can not be told from others
    lose little time.
    """
    launch = run.launch_of(values, lead) if owner.tries < MAX_TRIES else None
    if launch is not None:
        owner.tries += 1
        add(owner, "shortcuts", writer, run.request(values, lead), launch, *more)


def clear(owner: object, *names: str) -> None:
    """Take all shortcuts away."""
    with _LOCK:
        for name in names:
            setattr(owner, name, ())


def replace_shortcuts(
    owner: object, name: str, added: Iterable[Callable | None], removed: Callable | None = None
) -> None:
    """Add shortcuts to a tuple, and remove one."""
    with _LOCK:
        these = *getattr(owner, name), *added
        setattr(owner, name, tuple(each for each in these if each not in (None, removed)))


def _shortcut(
    writer: type[Writer], first: Request, missed: Missed | None, *more: object
) -> Callable | None:
    """The function for calls like `first`; None where cheap checks do not tell them from others.

    It returns None for a call that is not like the first.

    missed: if given, the function is for the sizes of this call, and calls `missed` for others.
    """
    if any(name.startswith("_") for name in first.given) or has_one_twice(first.values):
        return None  # such a name may be one of the scope; `TensorGuards` takes no tensor twice
    try:
        function = writer(first, missed, *more).function()
    except NotTold:
        return None
    function.kind = writer, first.in_place
    return function


class CallWriter(Writer):
    """Writes the shortcut of a call of the user's function, which returns new tensors.

    It takes what that function takes. It raises TypeError for arguments that the function would not
    take, and NameError or ValueError where a captured name or cell is gone.

    watched: where the captured values of the call were read, and their fingerprint.
    """

    def __init__(
        self, first: Request, missed: Missed | None, captures: Captures,
        watched: tuple[tuple, tuple], launch: Launch,
    ):  # fmt: skip
        super().__init__(first, missed, launch)
        self.captures, self.watched = captures, watched
        if first.copied:  # tensors that need no copy would be given to this kernel first
            raise NotTold

    def function(self) -> Callable:
        """Write the text, and return the function that it defines."""
        parameters = self.parameters()
        return self.defined(str(inspect.Signature(parameters)), self.captures.fn.__globals__)

    def parameters(self) -> list[inspect.Parameter]:
        """Those of the user's function."""
        parameters = []
        for k, parameter in enumerate(self.first.signature.parameters):
            if parameter.default is not inspect.Parameter.empty:
                self.scope[f"_default{k}"] = parameter.default
                parameter = parameter.replace(default=_Name(f"_default{k}"))
            parameters.append(parameter.replace(annotation=inspect.Parameter.empty))
        return parameters

    def guards(self) -> list[str]:
        return [*self._same_values(), *self.same_tensors(), *self.same_captures()]

    def modes(self) -> Iterator[str]:
        if any(tensor.requires_grad for tensor in self.guarded.values()):
            yield "not _grad()"

    def _same_values(self) -> Iterator[str]:
        """What must hold of arguments that are no tensors."""
        kinds = zip(self.first.signature.kinds, self.first.given.items(), strict=True)
        for k, (kind, (name, value)) in enumerate(kinds):
            if isinstance(value, torch.Tensor):
                continue
            if type(value) is float and kind is not Static:
                yield f"_type({name}) is _float"
            elif value is not None and kind not in (None, Static):  # an integer for a float
                raise NotTold
            elif value is None or isinstance(value, bool):
                yield f"{name} is {value}"
            elif isinstance(value, int | str | torch.dtype):
                self.scope |= {f"_static{k}": value, f"_type{k}": type(value)}
                yield f"_type({name}) is _type{k} and {name} == _static{k}"
            elif _never_changes(value):
                self.scope |= {"_freeze": freeze, f"_static{k}": freeze(value)}
                yield f"_freeze({name}) == _static{k}"
            else:
                raise NotTold

    def same_captures(self) -> Iterator[str]:
        """What must hold of captured values. The shortcut sees the same globals as the function."""
        watched, captured = self.watched
        self.scope |= {"_captured": captured, "_captures": self.captures.fingerprint}
        globals_, hidden = self.captures.fn.__globals__, {*self.first.given, "out"}
        reads = []
        for k, (read, where, seen) in enumerate(watched):
            own = getattr(read, "__self__", None) is globals_
            if own and where not in hidden and not where.startswith("_"):
                if where not in globals_:  # a builtin, until a global hides it
                    seen = getattr(builtins, where, seen)
                self.scope[f"_seen_{where}"] = seen
                reads.append(f"{where} is _seen_{where}")
            else:
                self.scope |= {f"_read{k}": read, f"_where{k}": where, f"_seen{k}": seen}
                reads.append(f"_read{k}(_where{k}) is _seen{k}")
        if reads:
            yield f"({' and '.join(dict.fromkeys(reads))} or _captures() is _captured)"

    def returned(self) -> list[str]:
        """Lines that return the results in the user's structure."""
        structure = self.graph.structure
        if structure == ONE:
            return [f"return {self.results[0]}"]
        if structure == pytree.tree_structure((0,) * len(self.results)):
            return [f"return {tuple_of(self.results)}"]
        self.scope |= {"_structure": structure, "_unflatten": pytree.tree_unflatten}
        return [f"return _unflatten([{', '.join(self.results)}], _structure)"]


def _never_changes(value: object) -> bool:
    """Whether a static value is the one that was traced, whatever has run since."""
    if type(value) is tuple:
        return all(map(_never_changes, value))
    return value is None or type(value) in (bool, int, float, str, torch.dtype)


class _Name(str):
    """Text that is its own `repr`."""

    __repr__ = str.__str__

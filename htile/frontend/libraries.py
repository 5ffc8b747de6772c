"""Tells a library's code from the user's: Python's own, torch's, numpy's and HTile's are libraries.

The folder of a file decides, never a name. A user may have a module called `token`, and
`functools.wraps(torch.exp)` gives torch's names to a helper of the user.
"""

from __future__ import annotations

import builtins
import os
import re
import sys
import sysconfig
import types
from functools import lru_cache

import torch

_PYTHON = {os.path.join(sysconfig.get_path(key), "") for key in ("stdlib", "platstdlib")}
_PYTHON.add(os.path.join(os.path.dirname(os.path.abspath(os.__file__)), ""))
_INSTALLED = re.compile(r"[/\\](site|dist)-packages[/\\]")
_FOLDERS = {
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep: "htile",
    os.path.dirname(os.path.abspath(torch.__file__)) + os.sep: "torch",
}

# Modules of Python whose functions give the same result for the same arguments, always.
_PURE = (
    "abc array bisect builtins cmath collections collections_abc contextlib copy dataclasses "
    "enum fractions functools heapq itertools keyword logging math numbers operator re "
    "statistics string struct textwrap types typing warnings"
)

_ESCAPES = {dir, eval, exec, globals, input, vars, builtins.__import__}
_SETTING = re.compile(r"(get|current|are|initial)_|(seed|rand|randn|randint|randperm)$|.*_enabled$")
_HEAP_TYPE = 1 << 9  # the flag of a class that a class statement made
SETTINGS = (torch.get_default_dtype, torch.is_grad_enabled, torch.is_inference_mode_enabled)
"""Functions of torch that read a setting which is followed: each call asks them again."""


@lru_cache(maxsize=4096)
def library(file: str) -> str:
    """`htile`, `torch`, `numpy`, or the module of Python that a file is; "" for the user's."""
    if frozen := re.match(r"<frozen (\w+)", file):
        return frozen[1]
    for folder, name in _FOLDERS.items():
        if file.startswith(folder):
            return name
    numpy = getattr(sys.modules.get("numpy"), "__file__", None)
    if numpy and file.startswith(os.path.dirname(numpy) + os.sep):
        return "numpy"
    for folder in _PYTHON:
        if file.startswith(folder) and not _INSTALLED.search(file):
            path = file[len(folder) :].removeprefix("lib-dynload" + os.sep)
            return re.split(r"[./\\]", path)[0]
    return ""


@lru_cache(maxsize=4096)
def internal(file: str) -> bool:
    """Whether a file is HTile's own or torch's."""
    return library(file) in ("htile", "torch")


def library_of(thing: object) -> str:
    """The library that a function, class, module or object of one comes from; "" for the user's."""
    if isinstance(thing, types.FunctionType):
        return library(thing.__code__.co_filename)
    if not isinstance(thing, types.ModuleType):
        module = getattr(thing, "__module__", None)
        if module == "builtins" and isinstance(thing, type):
            return "" if thing.__flags__ & _HEAP_TYPE else "builtins"  # `exec` says builtins too
        owner = None  # of a method; the metaclass of a class may answer to any name
        if not isinstance(thing, type):
            owner = getattr(thing, "__self__", None)
            owner = getattr(thing, "__objclass__", None) if owner is None else owner
        if owner is not None:
            return library_of(owner if isinstance(owner, (type, types.ModuleType)) else type(owner))
        thing = sys.modules.get(module, sys.modules.get(type(thing).__module__))
        if thing is None:
            return ""
    name, file = thing.__name__, vars(thing).get("__file__")
    if file and os.path.isabs(file):
        return library(file)
    if name in sys.builtin_module_names and sys.modules.get(name) is thing:
        return name
    parent = sys.modules.get(name.partition(".")[0])  # torch._C._nn has no file, torch.ops no path
    return library_of(parent) if parent not in (None, thing) else ""


def reads_state(function: object) -> bool:
    """Whether a library's function or class may give another result the next time.

    Functions of torch that read a setting are told by their names: `torch.get_num_threads`.
    """
    if isinstance(function, types.BuiltinFunctionType) and function in _ESCAPES:
        return True
    origin, name = library_of(function), getattr(function, "__name__", "")
    if origin == "torch":
        return bool(_SETTING.match(name)) and function not in SETTINGS
    if origin == "numpy":
        return "random" in (getattr(function, "__module__", None) or "")
    return origin != "htile" and origin.removeprefix("_") not in _PURE.split()


def own_classes(cls: type) -> list[type]:
    """The user's classes among those that a class and its metaclass inherit from."""
    return [each for each in (*cls.__mro__, *type(cls).__mro__) if not library_of(each)]


def own_members(owner: object) -> list[str]:
    """The names of what a class, a module of the user or a dict has."""
    if isinstance(owner, types.ModuleType) and library_of(owner):
        return []
    places = map(vars, own_classes(owner)) if isinstance(owner, type) else [
        owner if isinstance(owner, dict) else vars(owner)]  # fmt: skip
    return [name for place in places for name in place if name[:2] != "__"]


def dropped_weight() -> object:
    """The weight that F.l1_loss was called with: torch 2.13 hands it on to nobody.

    Each mode of torch calls the function again, without the weight. So the caller's is that of the
    nearest call that has one.
    """
    frame, own = sys._getframe(1), torch.nn.functional.l1_loss.__code__
    while frame is not None:
        weight = frame.f_locals.get("weight") if frame.f_code is own else None
        if weight is not None:
            return weight
        frame = frame.f_back
    return None

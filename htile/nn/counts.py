"""Whether a forward decides by how many rows it is given.

A row-wise function sees one row, so it takes the same branch for every batch, and a comparison with
the forward on a few batches need not find that out. Here the forward runs with tensors whose sizes
know that they are compared.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable

import torch

from ..frontend.libraries import internal

_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
_CONVERTS = ("int", "float", "truediv", "rtruediv", "pow", "divmod", "rdivmod")  # to other numbers


class Count(int):
    """A number that is made of a batch's sizes.

    seen: where it is noted that the user's code compares one with a number that is none, or makes
        a number of it that does not know where it comes from.
    is_size: whether it is a size as it is. With 0 it may be compared: there are no results then.
    """

    def __new__(cls, value: int, seen: list[str], is_size: bool = False) -> Count:
        made = super().__new__(cls, value)
        made.seen, made.is_size = seen, is_size
        return made

    __hash__ = int.__hash__

    def __bool__(self) -> bool:
        return self != 0

    def __neg__(self) -> Count:
        return Count(int.__neg__(self), self.seen)


def _is_in_library() -> bool:
    """Whether torch computes this, and not the user's code."""
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return internal(frame.f_code.co_filename)


def _compared(name: str) -> Callable:
    compare = getattr(int, f"__{name}__")

    def method(self: Count, other: object) -> bool:
        is_other = not isinstance(other, Count)  # those of two arguments may well be compared
        is_empty = self.is_size and other == 0
        if is_other and not is_empty and not _is_in_library():
            self.seen.append(name)
        return compare(self, other)

    return method


def _computed(name: str) -> Callable:
    compute = getattr(int, name)

    def method(self: Count, other: object) -> object:
        found = compute(self, other)
        return found if found is NotImplemented else Count(found, self.seen)

    return method


def _converted(name: str) -> Callable:
    convert = getattr(int, name)

    def method(self: Count, *others: object) -> object:
        if not _is_in_library():
            self.seen.append(name)
        return convert(self, *others)

    return method


for _name in _CONVERTS:
    setattr(Count, f"__{_name}__", _converted(f"__{_name}__"))
for _name in _COMPARES:
    setattr(Count, f"__{_name}__", _compared(_name))
for _name in _ARITHMETIC:
    setattr(Count, f"__{_name}__", _computed(f"__{_name}__"))
    setattr(Count, f"__r{_name}__", _computed(f"__r{_name}__"))


class _Watched(torch.Tensor):
    """A tensor whose sizes are Counts, but for that of its last axis. So are those of results."""

    seen: list[str]

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.__len__:
            cls.seen.append("len")
        if func in (torch.Tensor.numel, torch.Tensor.nelement, torch.numel):
            return Count(found, cls.seen, is_size=True)
        if func is torch.Tensor.size and isinstance(found, int):
            dim, rank = operator.index(args[1] if len(args) > 1 else kwargs["dim"]), args[0].ndim
            return found if dim % rank == rank - 1 else Count(found, cls.seen, is_size=True)
        if isinstance(found, torch.Size):
            batch = [Count(n, cls.seen, is_size=True) for n in found[:-1]]
            return torch.Size([*batch, *found[-1:]])
        return found


def counts_rows(function: Callable, values: list[torch.Tensor], inputs: int) -> bool:
    """Whether a function compares sizes of the batch, of which the first so many values are."""
    watched = type("Watched", (_Watched,), {"seen": []})
    rows = [value.detach().as_subclass(watched) for value in values[:inputs]]
    with torch.no_grad():
        function(*rows, *values[inputs:])
    return bool(watched.seen)

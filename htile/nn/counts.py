"""Whether a forward decides by how many rows it is given.

A row-wise function sees one row, so it takes the same branch for every batch, and a comparison with
the forward on a few batches need not find that out. Here the forward runs with two batches, of
tensors whose sizes tell what they are compared with. What it decides by sizes of the row is the
same for both.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from ..frontend.libraries import internal

_COMPARES = ("eq", "ne", "lt", "le", "gt", "ge")
_ARITHMETIC = ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift")
# What makes a number of it that tells nothing.
_CONVERTS = ("int", "float", "truediv", "rtruediv", "pow", "divmod", "rdivmod")

Told = list[tuple]  # what was done with sizes: an operation, and what tells the sizes apart


class Count(int):
    """A size of a tensor, or what is computed of sizes.

    told: where it says that the user's code compares it, or makes another number of it.
    sizes: what it is computed of; none where it is a size as it is. A size may be compared with 0:
        there are no results then.
    """

    def __new__(cls, value: int, told: Told, sizes: tuple[int, ...] = ()) -> Count:
        made = super().__new__(cls, value)
        made.told, made.sizes = told, sizes
        return made

    @property
    def of(self) -> tuple[int, ...]:
        """The sizes that it tells something of."""
        return self.sizes or (int.__int__(self),)

    __hash__ = int.__hash__

    def __copy__(self) -> Count:
        return self

    def __deepcopy__(self, memo: dict) -> Count:
        return self

    def __bool__(self) -> bool:
        return self != 0

    def __neg__(self) -> Count:
        return Count(int.__neg__(self), self.told, self.of)

    def bit_length(self) -> int:
        """As of an int; it is told."""
        return int(self).bit_length()


def _is_in_library() -> bool:
    """Whether torch computes this, and not the user's code."""
    frame = sys._getframe()
    while frame.f_code.co_filename == __file__:
        frame = frame.f_back
    return internal(frame.f_code.co_filename)


def _compared(name: str) -> Callable:
    compare = getattr(int, f"__{name}__")

    def method(self: Count, other: object) -> bool:
        is_of_results = self.sizes or isinstance(other, Count) or other != 0
        if is_of_results and not _is_in_library():
            # Sizes of two arguments may well be as large as each other.
            of = int.__sub__(self, other) if isinstance(other, Count) else self.of
            self.told.append((name, of))
        return compare(self, other)

    return method


def _computed(name: str) -> Callable:
    compute = getattr(int, name)

    def method(self: Count, other: object) -> object:
        found = compute(self, other)
        if found is NotImplemented:
            return found
        return Count(found, self.told, self.of + (other.of if isinstance(other, Count) else ()))

    return method


def _converted(name: str) -> Callable:
    convert = getattr(int, name)

    def method(self: Count, *others: object) -> object:
        if not _is_in_library():
            self.told.append((name, self.of))
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
    """A tensor whose sizes are Counts, and so are those of what is computed of it."""

    told: Told

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        found = super().__torch_function__(func, types, args, kwargs or {})
        if func is torch.Tensor.__len__:  # of which Python makes an int
            cls.told.append(("len", found))
        elif isinstance(found, torch.Size):
            return torch.Size([Count(n, cls.told) for n in found])
        elif func in _SIZES and isinstance(found, int):
            return Count(found, cls.told)
        return found


_SIZES = (torch.Tensor.size, torch.Tensor.numel, torch.Tensor.nelement, torch.numel)


def counts_rows(function: Callable, values: list[torch.Tensor], inputs: int) -> bool:
    """Whether a function decides by sizes of the batch, of which the first so many values are."""

    def told(times: int) -> Told:
        """What it does with sizes where each axis of the batch is so many times as long."""
        watched = type("Watched", (_Watched,), {"told": []})
        rows = [v.detach().repeat(*[times] * (v.ndim - 1), 1) for v in values[:inputs]]
        with torch.no_grad():
            function(*(row.as_subclass(watched) for row in rows), *values[inputs:])
        return watched.told

    return told(1) != told(2)

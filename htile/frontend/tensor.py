"""The symbolic tensor that a traced function computes with: one value of a graph being built.

It answers to torch's functions through `__torch_function__` and to torch's methods, both filled
in from the table of htile.frontend.functions. What it can not do says so, with the user's line.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from functools import cache, lru_cache
from inspect import signature
from typing import NoReturn

import torch

from ..errors import HTileError, Location, ShapeError, TraceError, UnsupportedError
from .graph import Builder, returned_dtype
from .ops import Op, Value

_HTILE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
INTERNAL = (_HTILE + os.sep, os.path.dirname(os.path.abspath(torch.__file__)) + os.sep)

FUNCTIONS: dict[Callable, tuple[str, Callable]] = {}
"""From torch's function to its spelling and to what it does with symbolic tensors."""

_RANKS = "sorting and arg-reductions are not built yet"
_PRODUCT = "write (a * b).sum() for the product of two rows"
_ALONG = "operations along the row other than reductions are not built yet"
HINTS = {
    **dict.fromkeys(("argmax", "argmin", "argsort", "sort", "topk", "median", "kthvalue"), _RANKS),
    **dict.fromkeys(("matmul", "mm", "dot", "inner", "linear", "bmm", "vdot"), _PRODUCT),
    **dict.fromkeys(
        ("cumsum", "cumprod", "cat", "stack", "roll", "flip", "gather", "chunk", "split"), _ALONG
    ),
    **dict.fromkeys(("view", "reshape", "permute", "flatten"), "a row has one axis, use it"),
    **dict.fromkeys(("item", "tolist", "numpy"), "values are not known while tracing"),
    **dict.fromkeys(("device", "cuda", "cpu", "is_cuda"), "the kernel runs where its inputs are"),
    **dict.fromkeys(("tan", "sinh", "cosh"), "write it with sin, cos or exp"),
    "fmod": "write torch.remainder, or x - torch.trunc(x / y) * y",
    "nonzero": "write (x != 0).sum() to count",
    "dropout": "random numbers are not built yet",
    "double": "float64 is not supported; write x.float()",
    "empty_like": "write torch.zeros_like",
}


@cache
def internal(file: str) -> bool:
    """Whether a file is HTile's own or torch's."""
    return file.startswith(INTERNAL)


_location = lru_cache(maxsize=4096)(Location)


def location() -> Location | None:
    """The user's line: the innermost frame outside HTile and torch."""
    frame = sys._getframe(1)
    while frame is not None:
        if not internal(frame.f_code.co_filename):
            return _location(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def fail(error: type[HTileError], message: str) -> NoReturn:
    """Raise `error` with the user's line."""
    raise error(message, location()) from None


def unsupported(spelling: str) -> NoReturn:
    """Raise that a torch function or method is not built, with what to use instead."""
    name = spelling.rsplit(".", 1)[-1]
    if name.endswith("_") and not name.startswith("_"):
        base = name.rstrip("_")
        fail(TraceError, f"{spelling} changes a tensor in place; write x = x.{base}(...)")
    hint = HINTS.get(name, "write it with the elementwise functions and reductions of HTile")
    fail(UnsupportedError, f"{spelling} is not supported; {hint}")


def captured(value: torch.Tensor) -> NoReturn:
    """Raise that a real tensor was met inside the function."""
    what = f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
    fail(
        TraceError,
        f"a real tensor ({what}) inside a traced function: pass it as an argument, "
        "or write a Python number for a constant",
    )


_KEYWORDS = {"axis": "dim", "keepdims": "keepdim"}
_IGNORED = frozenset({"_stacklevel", "out", "inplace"})


def call(spelling: str, function: Callable, args: tuple, kwargs: dict):
    """Call an entry of the table as torch would: its keywords, real tensors and errors."""
    for value in (*args, *kwargs.values()):
        if isinstance(value, torch.Tensor):
            captured(value)
    if kwargs:
        if kwargs.get("out") is not None:
            fail(TraceError, f"{spelling}(out=...) inside a traced function; assign the result")
        if kwargs.get("inplace"):
            fail(TraceError, f"{spelling}(inplace=True) changes a tensor; write x = {spelling}(x)")
        kwargs = {_KEYWORDS.get(k, k): v for k, v in kwargs.items() if k not in _IGNORED}
    try:
        return function(*args, **kwargs)
    except TypeError as error:
        if error.__traceback__.tb_next is not None:  # raised inside, not by the call
            raise
    parameters = ", ".join(str(p) for p in signature(function).parameters.values())
    fail(UnsupportedError, f"arguments that {spelling} does not take here: it is ({parameters})")


_TRUTH = (
    "the truth of a symbolic value is not known while tracing, so `if`, `while`, `and`, `or`, "
    "`not`, `in` and the built-in max and min can not read it: write torch.where(condition, a, b), "
    "`&` `|` `~`, torch.maximum or torch.minimum, or make it a static argument (htile.Static)"
)
_NUMBER = (
    "a symbolic value has no Python number while tracing: write the torch spelling (torch.exp(x) "
    "for math.exp(x), x.to(dtype) for float(x) and int(x)), or make it a static argument "
    "(htile.Static)"
)
_ITERATION = (
    "the elements of a row can not be visited one by one: write an expression of the whole row, "
    "or a reduction (x.sum(), x.max()) for the built-in sum(x) and max(x)"
)
_ASSIGNMENT = "a row can not be changed in place: write x = torch.where(mask, value, x)"


def _refuse(message: str) -> Callable:
    def method(self, *args, **kwargs):
        fail(TraceError, message)

    return method


def _used(pattern: str) -> str | None:
    """The name of a function called on the user's line, for a message that names it."""
    where = location()
    found = re.search(pattern, where.text) if where else None
    return found[1] if found else None


def _no_number(self) -> NoReturn:
    name = _used(r"\bmath\.(\w+)")
    if name and hasattr(torch, name):
        fail(TraceError, f"math.{name} takes Python numbers only: write torch.{name}")
    fail(TraceError, _NUMBER)


def _no_length(self) -> NoReturn:
    if name := _used(r"\btorch\.(tensor|as_tensor|asarray)\b"):
        fail(
            TraceError, f"torch.{name} of a symbolic value: it is a tensor already, use it as it is"
        )
    fail(TraceError, "len(x) is not available while tracing: write x.shape[-1]")


def _no_product(self, other) -> NoReturn:
    unsupported("x.matmul")


class Tensor:
    """A value of the graph under construction; shapes are those of one row, as under vmap."""

    __slots__ = ("_builder", "_id")
    __array_ufunc__ = None
    __hash__ = object.__hash__

    def __init__(self, builder: Builder, id: int):
        self._builder = builder
        self._id = id

    @property
    def _value(self) -> Value:
        return self._builder[self._id].value

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self._value.inner)

    @property
    def ndim(self) -> int:
        return len(self._value.inner)

    @property
    def dtype(self) -> torch.dtype:
        """An argument's own dtype in memory; of a computed value, the one it is returned in.

        So `y.to(x.dtype)` gives back what came in, as in torch. Arithmetic is float32 either way.
        """
        node = self._builder[self._id]
        if node.op is Op.INPUT:
            return next(i.dtype for i in self._builder.inputs if i.id == node.id)
        return returned_dtype(self._builder, node.value)

    def dim(self) -> int:
        return self.ndim

    def size(self, dim: int | None = None):
        if dim is None:
            return self.shape
        if not -self.ndim <= dim < self.ndim:
            fail(ShapeError, f"size({dim}) of a value of shape {tuple(self.shape)}")
        return self.shape[dim]

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return self.dtype.is_floating_point

    def __repr__(self) -> str:
        return f"Tensor(%{self._id}: {self._value})"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        known = FUNCTIONS.get(func)
        if known is None:
            for value in (*args, *kwargs.values()):
                if isinstance(value, torch.Tensor):
                    captured(value)
            unsupported(_spelling(func))
        return call(*known, args, kwargs)

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        unsupported(f"x.{name}")

    __bool__ = __contains__ = _refuse(_TRUTH)
    __float__ = __int__ = __index__ = __complex__ = _no_number
    __iter__ = _refuse(_ITERATION)
    __len__ = _no_length
    __matmul__ = __rmatmul__ = _no_product
    __array__ = _refuse("numpy can not take a symbolic value: write the torch spelling")
    __setitem__ = __delitem__ = _refuse(_ASSIGNMENT)


def _spelling(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return "this attribute of torch.Tensor"
    for module, prefix in ((torch, "torch"), (torch.nn.functional, "F"), (torch.Tensor, "x")):
        if getattr(module, name, None) is func:
            return f"{prefix}.{name}"
    return torch.overrides.resolve_name(func) or name


class NoIndices:
    """The place of the indices in `x.max(dim=-1)`; any use of them raises."""

    __slots__ = ("_name",)
    __array_ufunc__ = None

    def __init__(self, name: str):
        self._name = name

    def use(self, *args, **kwargs) -> NoReturn:
        """Raise that arg-reductions are not built."""
        fail(
            UnsupportedError,
            f"the indices of x.{self._name}(dim=...) are not supported: arg-reductions are not "
            f"built yet; use its .values, or x.a{self._name}(dim=...)",
        )

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        next(v for v in (*args, *(kwargs or {}).values()) if isinstance(v, NoIndices)).use()

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        self.use()


_DUNDERS = (
    "add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv mod rmod pow rpow and rand or "
    "ror xor rxor matmul eq ne lt le gt ge neg pos abs invert bool float int index len iter "
    "getitem setitem"
)
for _name in _DUNDERS.split():
    setattr(NoIndices, f"__{_name}__", NoIndices.use)
NoIndices.__hash__ = object.__hash__


def node(op: Op, *operands: Tensor, arg: object = None) -> Tensor:
    """Add an operation to the operands' graph; an error gets the user's line."""
    builder = operands[0]._builder
    if any(t._builder is not builder for t in operands):
        fail(TraceError, "a value of another trace: a traced function may not keep its values")
    loc = location()
    try:
        return Tensor(builder, builder.add(op, [t._id for t in operands], arg, loc))
    except HTileError as error:
        raise type(error)(error.message, error.loc or loc) from None


def constant(like: Tensor, number: object, value: Value) -> Tensor:
    """A number fixed in the kernel, in the graph of `like`."""
    builder = like._builder
    return Tensor(builder, builder.add_const(number, value, location()))

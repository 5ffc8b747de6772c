"""The symbolic tensor that a traced function computes with: one value of a graph being built.

It answers to torch's functions through `__torch_function__` and to torch's methods. Both come from
the table `FUNCTIONS`, which htile.frontend.functions and the modules after it fill. What it cannot
do raises, with the user's line and with what to write instead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from math import prod
from typing import NoReturn

import torch

from ..errors import DtypeError, HTileError, Location, ShapeError, TraceError, UnsupportedError
from . import hints
from .device import Device
from .graph import Builder, Role
from .libraries import internal
from .lines import ASKED, fail, location, used
from .ops import Op, Value
from .returned import returned_dtype

FUNCTIONS: dict[Callable, tuple[str, Callable]] = {}
"""From each function of torch to its spelling and to the function that does it symbolically."""

IN_PLACE: dict[Callable, Callable] = {}
"""From an entry to the one that changes its first argument, for those that take `inplace=True`."""

REFUSED: list[Callable] = []
"""What calls an entry that has refused the dtypes of its operands (htile.frontend.eight_bits)."""

SAME: set[Callable] = set()
"""The entries whose result is the very tensor that they are given, as in torch: `x.detach()`."""


def unsupported(spelling: str) -> NoReturn:
    """Raise that a function or method of torch is not built, with what to use instead."""
    name, known = spelling.rpartition(".")[2], {s.rpartition(".")[2] for s, _ in FUNCTIONS.values()}
    if name.endswith("_") and not name.startswith("_"):
        base = name.rstrip("_")
        made = "a new value"
        if base in known:
            made = f"x = x.{base}(...)" if hasattr(Tensor, base) else f"x = {_spelled(base)[0]}(x)"
        instead = _INSTEAD.get(base, made)
        told = hints.HINTS.get(base, f"write {instead}")
        fail(TraceError, f"{spelling} changes a tensor in place; {told}")
    told = hints.advice(name, known)
    if told is hints.SIZE:
        fail(TraceError, f"{spelling}: {told}")
    if name in known and name not in hints.HINTS:  # of a function that is no method
        told = f"write {' or '.join(_spelled(name))}"
    fail(UnsupportedError, f"{spelling} is not supported; {told}")


def _spelled(name: str) -> list[str]:
    """The spellings of torch that end with this name."""
    return sorted({s for s, _ in FUNCTIONS.values() if s.rpartition(".")[2] == name})


def is_real(value: object) -> bool:
    """Whether a value is a tensor with memory; symbolic ones are instances of torch's class."""
    return isinstance(value, torch.Tensor) and not isinstance(value, (Tensor, Ragged))


def _is_no_value(value: object) -> bool:
    """Whether a value is a tensor, and none of a graph."""
    return isinstance(value, torch.Tensor) and not isinstance(value, Tensor)


_INSTEAD = {
    **dict.fromkeys(
        ("bernoulli", "cauchy", "dropout", "exponential", "geometric", "log_normal", "normal",
         "random", "uniform"), f"a new value; {hints.RANDOM}"),
}  # fmt: skip
KEYWORDS = {"axis": "dim", "keepdims": "keepdim", "train": "training"}
MADE_BY = "_htile_made_by"  # of a real tensor that torch made in a trace: the function
_IGNORED = frozenset({"_stacklevel", "out", "inplace"})


def call(spelling: str, function: Callable | None, args: tuple, kwargs: dict) -> object:
    """Call an entry of the table as torch would: its keywords, real tensors, aliases and errors.

    function: None for a function of torch that is not in the table.
    """
    for value in filter(_is_no_value, (*args, *kwargs.values())):
        if isinstance(value, Ragged):
            return value._answer(spelling, function, args, kwargs)
        if not value.numel():
            what = f"a tensor without elements, of shape {tuple(value.shape)}"
            fail(ShapeError, hints.NOTHING.format(what))
        of = f" of {getattr(value, MADE_BY)}" if hasattr(value, MADE_BY) else ""
        dtype = str(value.dtype).removeprefix("torch.")
        what = f"a real tensor{of} ({tuple(value.shape)} {dtype})"
        fail(TraceError, f"{what} inside a traced function: pass it as an argument, or write a "
             "Python number for a constant")  # fmt: skip
    if function is None:
        unsupported(spelling)
    if kwargs:
        if kwargs.get("out") is not None:
            fail(TraceError, f"{spelling}(out=...) inside a traced function; assign the result")
        function = IN_PLACE[function] if kwargs.get("inplace") else function
        kwargs = {KEYWORDS.get(k, k): v for k, v in kwargs.items() if k not in _IGNORED}
    refused = None
    try:
        result = function(*args, **kwargs)
    except DtypeError as error:
        refused = error
    except TypeError as error:
        own = signature(function)
        try:
            own.bind(*args, **kwargs)
        except TypeError:
            fail(UnsupportedError, f"arguments that {spelling} does not take here: it is {own}")
        fail(TraceError, f"an argument that {spelling}{own} does not take here: {error}")
    if refused is not None:
        result = REFUSED[0](refused, spelling, function, args, kwargs)
    is_given = any(result is value for value in args)
    return copy(result) if is_given and function not in SAME else result


def refuse_iteration() -> NoReturn:
    """Raise that a row is not visited element by element."""
    fail(TraceError, hints.ITERATION)


def _refuse(message: str) -> Callable:
    def method(self, *args, **kwargs):
        fail(TraceError, message)

    return method


def _refuse_copies() -> None:
    if name := used(r"\btorch\.(tensor|as_tensor|asarray|Tensor)\("):
        fail(TraceError, f"torch.{name} of a symbolic value: it is a tensor already, use it as "
             "it is")  # fmt: skip


def _no_number(self) -> NoReturn:
    if _is_of_length(self):
        _no_length(self)
    if internal(sys._getframe(1).f_code.co_filename):  # torch.as_tensor came here first
        _refuse_copies()
    name = used(r"\bmath\.(\w+)")
    if name and hasattr(torch, name) and not used(r"\b(float|int|complex)\("):
        fail(TraceError, f"math.{name} takes Python numbers only: write torch.{name}(x), and of a "
             f"number s that is given at run time torch.{name}(torch.tensor(s)), or make it static "
             "(s: htile.Static)")  # fmt: skip
    fail(TraceError, hints.STEPS if used(r"\b(range)\(") else hints.NUMBER)


def _is_of_length(x: Tensor) -> bool:
    """Whether a value is computed of the length of rows, which differs from call to call."""
    used = [x._builder[id] for id in x._builder.behind(x._node)]
    leaves = {each.op for each in used if not each.inputs}
    return Op.LENGTH in leaves and leaves <= {Op.LENGTH, Op.CONST}


def _no_truth(self, *args) -> NoReturn:
    if _is_of_length(self):
        _no_length(self)
    fail(TraceError, hints.ASSERTED if used(r"^\s*(assert)\b") else hints.TRUTH)


def _no_length(self) -> NoReturn:
    name = used(r"\bmath\.(\w+)")
    root = "n ** 0.5 for math.sqrt(n), " if name == "sqrt" else ""
    fail(TraceError, "the length of a row differs from call to call (dynamic_n=True), so it has no "
         f"Python number while tracing: write {root}torch.arange(n) for range(n), torch.where for "
         "if, or leave dynamic_n out")  # fmt: skip


class Tensor(torch.Tensor):
    """A value of the graph under construction; its shape is that of one row, as under vmap.

    It is a torch.Tensor without memory, so that `isinstance` and torch's functions take it. It
    refers to a value as a name in Python refers to a tensor: `x += 1` gives the same object
    another value, so every name of it sees the change, as in torch. The memory of an argument is
    never written: only what the function returns leaves it. Where two tensors may be aliases, that
    is share memory in torch (`x` and `x.float()`, which is `x` itself if that is float32), an
    in-place operator on one of them makes every use of the other raise.
    """

    __array_ufunc__ = None
    __hash__ = object.__hash__
    _later: Callable | None = None  # of values whose elements are not in their places yet (`node`)

    @staticmethod
    def __new__(cls, builder: Builder, id: int, *more: object) -> Tensor:
        v = builder[id].value
        return torch.Tensor._make_wrapper_subclass(cls, v.inner, dtype=v.dtype, device="meta")

    def __init__(self, builder: Builder, id: int):
        self._builder, self._node = builder, id
        self._changes: list[str] = []  # of aliases, in place: all share it, and what changes leaves
        self._repeats = False  # whether elements share memory, as those that expand repeats do
        self._part_of: tuple[Tensor, object] | None = None  # x and the index, of x[index]

    def _current(self, loc: Location | None = None) -> int:
        """The id of the node, to compute with at this line."""
        if self._changes:
            node = self._builder[self._node]
            of = f"a tensor that is, or was made from, the argument {node.arg}"
            name = of if node.op is Op.INPUT else "this tensor"
            fail(TraceError, hints.STALE.format(name, self._changes[0]), loc)
        return self._node

    _id = property(_current)

    def _assign(self, id: int) -> None:
        """Refer to another value from now on; no alias of this tensor may be used any more."""
        loc = location()
        where = f"`{loc.text}` ({loc.short})" if loc and loc.text else "an operator"
        self._changes.append(where if loc is None or loc.text else f"{where} at {loc.short}")
        self._node, self._changes = id, []

    @property
    def _value(self) -> Value:
        return self._builder[self._node].value

    @property
    def _sizes(self) -> torch.Size:
        """The shape in the graph."""
        return torch.Size(self._value.inner)

    @property
    def shape(self) -> torch.Size | Shape:
        """`(N,)` for a row; `()` or `(1,)` for one value a row; without the leading dimensions."""
        v = self._value
        if self._builder.multiple is None or not v.spread:
            return torch.Size(v.inner)
        return Shape(Length(self._builder) if n == self._builder.n else n for n in v.inner)

    @property
    def ndim(self) -> int:
        """The number of axes, without the leading dimensions."""
        return len(self._value.inner)

    @property
    def dtype(self) -> torch.dtype:
        """An argument's own dtype in memory; of a computed value, the one it is returned in.

        So `y.to(x.dtype)` gives back what came in, as in torch. Arithmetic is float32 either way.
        """
        node = self._builder[self._node]
        while node.op in (Op.STOP, Op.CUSTOM):
            node = self._builder[node.inputs[0]]
        if node.op is Op.INPUT:
            return next(i.dtype for i in self._builder.inputs if i.id == node.id)
        return returned_dtype(self._builder, node.value)

    @property
    def device(self) -> Device:
        """That of the arguments: it may be compared with another one, and given to torch."""
        return Device("x.device")

    def size(self, dim: int | None = None):
        """The shape, or its size at `dim`."""
        if dim is None:
            return self.shape
        if not isinstance(dim, int) or not -self.ndim <= dim < self.ndim:
            fail(ShapeError, f"size({dim!r}) of a value of shape {tuple(self.shape)}")
        return self.shape[dim]

    def __repr__(self) -> str:
        return f"Tensor(%{self._node}: {self._value})"

    def __format__(self, spec: str) -> str:
        if spec and _is_of_length(self):
            _no_length(self)
        if spec:
            why = f"{spec!r} formats a number, and {hints.VALUE}"
            fail(TraceError, f"{why}: print the result outside")
        return repr(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "__get__":
            raise AttributeError  # `__getattr__` knows the name
        known = FUNCTIONS.get(func) or (_spelling(func), None)
        return call(*known, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        _refuse_copies()
        if func is torch.ops.aten._local_scalar_dense.default:  # as torch.arange(n) asks for it
            fail(TraceError, hints.SIZE)
        fail(TraceError, f"torch computes {func} of a symbolic value by itself, as in torch.vmap "
             f"and torch.func, which belong around the call: {hints.REFERENCE}")  # fmt: skip

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        if name == "requires_grad" and internal(sys._getframe(1).f_code.co_filename):
            return False  # modules of torch ask before they take a shortcut
        unsupported(f"x.{name}")

    __bool__ = __contains__ = _no_truth
    __float__ = __int__ = __index__ = __complex__ = _no_number
    __delitem__ = _refuse("the elements of a row cannot be deleted: write a slice or a mask")
    __array__ = _refuse("numpy cannot take a symbolic value: write the torch spelling")


class Length(Tensor):
    """How many elements the rows of a call have, where each call may have other ones.

    In torch it is an int. It takes part in arithmetic as an int does, and where torch takes a size
    it is that of a row. No Python number can be made of it.
    """

    __hash__ = object.__hash__

    @staticmethod
    def __new__(cls, builder: Builder) -> Length:
        return torch.Tensor._make_wrapper_subclass(cls, (), dtype=torch.int64, device="meta")

    def __init__(self, builder: Builder):
        super().__init__(builder, builder.add(Op.LENGTH, (), torch.int64, location()))

    def __eq__(self, other: object) -> bool | Tensor:
        return True if isinstance(other, Length) else super().__eq__(other)

    def __ne__(self, other: object) -> bool | Tensor:
        return False if isinstance(other, Length) else super().__ne__(other)

    def __repr__(self) -> str:
        return "n"

    def __divmod__(self, other: object) -> tuple[Tensor, Tensor]:
        return self // other, self % other

    def __rdivmod__(self, other: object) -> tuple[Tensor, Tensor]:
        return other // self, other % self

    __bool__ = __float__ = __int__ = __index__ = __complex__ = _no_length


class Shape(tuple):
    """The shape of a row of any length: `torch.Size` holds ints only."""

    def numel(self) -> int | Tensor:
        """The product of the sizes."""
        return self[0] if len(self) == 1 else prod(self)


def _spelling(func: Callable) -> str:
    name = getattr(func, "__name__", str(func))
    for module, prefix in ((torch, "torch"), (torch.nn.functional, "F"), (torch.Tensor, "x")):
        if getattr(module, name, None) is func:
            return f"{prefix}.{name}"
    return torch.overrides.resolve_name(func) or name


class Ragged(torch.Tensor):
    """Elements whose number is known when the kernel runs, so that they are no value of a graph.

    They answer to torch's functions themselves, as `_answer` of htile.frontend.selected says.
    """

    def _answer(self, spelling: str, function: Callable | None, args: tuple, kwargs: dict):
        raise NotImplementedError

    def _refuse(self, what: str | None = None) -> NoReturn:
        """Raise that something is not supported, or where it is None, that they are returned."""
        raise NotImplementedError


class Deferred(Tensor):
    """A value that joins the graph when it is first used, such as the indices of `x.max(dim)`."""

    @staticmethod
    def __new__(cls, like: Tensor, make: Callable[[], Tensor]) -> Tensor:
        v = like._value  # which one that waits for its elements has before they are asked for
        return torch.Tensor._make_wrapper_subclass(cls, v.inner, dtype=v.dtype, device="meta")

    def __init__(self, like: Tensor, make: Callable[[], Tensor]):
        self._make, self._made, self._line = make, None, location()
        super().__init__(like._builder, None)

    @property
    def _node(self) -> int:
        if self._made is None:
            before, ASKED.line = ASKED.line, self._line
            try:
                self._made = self._make()._id
            finally:
                ASKED.line = before
        return self._made

    @_node.setter
    def _node(self, id: int | None) -> None:
        self._made = id


def _recorded(builder: Builder, id: int, loc: Location | None) -> int:
    """A value that is computed here, which has no gradient where autograd records nothing."""
    is_stopped = builder.records and not torch.is_grad_enabled()
    return builder.add(Op.STOP, (id,), None, loc) if is_stopped else id


def node(op: Op, *operands: Tensor, arg: object = None) -> Tensor:
    """Add an operation to the operands' graph; an error gets the user's line.

    What is computed in `torch.no_grad()` or `torch.inference_mode()` inside has no gradient. An
    operand that can wait for its elements (htile.frontend.flips) may make the result wait, too.
    """
    builder, later = operands[0]._builder, None
    for each in operands:
        if each._builder is not builder:
            fail(TraceError, "a value of another trace: a traced function may not keep its values")
        later = each._later or later
    if later is not None and (result := later(op, operands, arg)) is not None:
        return result
    loc = location()
    try:
        id = builder.add(op, [t._id for t in operands], arg, loc)
        return Tensor(builder, _recorded(builder, id, loc))
    except ShapeError as error:
        raise ShapeError(error.message + _told(operands), loc) from None
    except HTileError as error:
        raise type(error)(error.message, error.loc or loc) from None


def _told(operands: tuple[Tensor, ...]) -> str:
    """The shapes of those operands that are arguments, and how to pass one value for each row."""
    nodes = {t._node: t._builder[t._node] for t in operands}
    named = [n for n in nodes.values() if n.op is Op.INPUT]
    shapes = ", ".join(f"{n.arg} {n.value.inner}" for n in named)
    shared = {i.id for i in operands[0]._builder.inputs if i.role is Role.COLUMN}
    is_vector = any(n.id in shared and len(n.value.inner) == 1 for n in named)
    advice = "; a value for each row is annotated htile.PerRow" if is_vector else ""
    return f": inside the function {shapes}{advice}" if named else ""


def constant(like: Tensor, number: object, value: Value) -> Tensor:
    """A number that is fixed in the kernel, in the graph of `like`."""
    return Tensor(like._builder, like._builder.add_const(number, value, location()))


def copy(x: Tensor) -> Tensor:
    """The same value as a tensor of its own, which an in-place operator changes alone."""
    if x._later is not None:
        return x._copied()
    return Tensor(x._builder, _recorded(x._builder, x._id, location()))


def viewed(x: Tensor) -> Tensor:
    """A view of all of `x`: `x` itself, but for its gradient where autograd records nothing."""
    return alias(x, x) if x._builder.records and not torch.is_grad_enabled() else x


def alias(x: Tensor, y: Tensor) -> Tensor:
    """`y`, noted as an alias of `x`: in torch they may share memory."""
    y = copy(y) if y is x else y
    y._changes, y._repeats = x._changes, x._repeats
    return y

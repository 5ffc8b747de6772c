"""Results that are reduced over all rows of a call: `htile.sum_rows` and `htile.max_rows`.

A function of one row says what each row adds. Nothing in the function knows the result, so what
these return can only be returned. Outside a trace, as under `torch.vmap`, they return what the one
row adds. The oracle (`htile/testing.py`) asks for marked terms instead, and adds them up itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
from torch.utils import _pytree as pytree

from ..errors import DtypeError, Location, TraceError, UnsupportedError, an
from .dtypes import STORAGE
from .ops import Op
from .promotion import BOOL, FLOAT, INT64, convert
from .tensor import Tensor, fail

# The dtypes that a result may be stored in, by whether it is computed in floating point.
FLOATING = (torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int64, torch.int32)

_MARKED: ContextVar[bool] = ContextVar("htile_terms_are_marked", default=False)


@dataclass(frozen=True)
class Term:
    """What one row, or under `torch.vmap` each row, adds to a result: a leaf of what is returned.

    over: `Op.SUM` or `Op.MAX`. dtype: that of the result, if the function declares one.
    """

    value: torch.Tensor
    over: Op
    dtype: torch.dtype | None = None

    def to(self, dtype: torch.dtype) -> Term:
        """The term of a result in another dtype."""
        return replace(self, dtype=dtype)

    def reduced(self) -> torch.Tensor:
        """The result over the first dimension of the values; torch's error for no maximum."""
        return self.value.sum(0) if self.over is Op.SUM else self.value.amax(0)


pytree.register_pytree_node(
    Term,
    lambda term: ([term.value], (term.over, term.dtype)),
    lambda values, context: Term(values[0], *context),
)


@contextlib.contextmanager
def terms_marked() -> Iterator[None]:
    """In here the functions below return a `Term` of a real tensor."""
    token = _MARKED.set(True)
    try:
        yield
    finally:
        _MARKED.reset(token)


class OverRows(Tensor):
    """A reduction over all rows, symbolically. Its node is what one row adds."""

    @staticmethod
    def __new__(cls, term: Tensor, over: Op, stored: torch.dtype) -> Tensor:
        return Tensor.__new__(cls, term._builder, term._id)

    def __init__(self, term: Tensor, over: Op, stored: torch.dtype):
        super().__init__(term._builder, term._id)
        self._over, self._stored = over, stored

    def _current(self, loc: Location | None = None) -> int:
        """It raises, because no row can read it."""
        name = f"htile.{_NAMES[self._over]}"
        fail(TraceError, f"the result of {name} is known when all rows are done, so it can only be "
             f"returned: compute with it outside the function, or with what {name} takes; "
             ".to(dtype) is there", loc)  # fmt: skip

    _id = property(_current)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the result is returned in."""
        return self._stored

    def to(self, dtype: torch.dtype) -> OverRows:
        """The same, returned in another dtype of its kind."""
        known = FLOATING if self._stored in FLOATING else INTEGERS
        if dtype not in known:
            names = " or ".join(str(each) for each in known)
            fail(DtypeError, f"the result of htile.{_NAMES[self._over]} is returned as {names}, "
                 f"not as {dtype}: convert it outside the function")  # fmt: skip
        term = Tensor(self._builder, self._node)
        return OverRows(term, self._over, dtype)


_NAMES = {Op.SUM: "sum_rows", Op.MAX: "max_rows"}


def sum_rows(v: torch.Tensor) -> torch.Tensor:
    """The sum of `v` over all rows of the call. It can only be returned, and `.to(dtype)` taken.

    v: of each row, a row `(N,)` or a number `()`, or any other shape. The result has this shape,
        without leading dimensions. It is float32, or int64 of integers and masks, unless `.to` of
        the result declares another dtype of its kind. Of no rows it is 0.

    The sum has a fixed order for N, the dtypes and the architecture: the same rows give the same
    bits in every call, and rows of zeros behind them change none. Outside a row-wise function it
    returns `v`, the sum over one row.

    Raises UnsupportedError with `dynamic_n=True`, and DtypeError for int8, uint8 and float8.
    """
    return _over_rows(Op.SUM, v)


def max_rows(v: torch.Tensor) -> torch.Tensor:
    """The largest `v` over all rows of the call, element by element; NaN if any is NaN.

    It takes what `sum_rows` takes, but for masks. The result is float32, or integers of the dtype
    of `v`. A call with no rows raises ArgumentError, because nothing is the largest of none.
    """
    return _over_rows(Op.MAX, v)


def _converted(dtype: torch.dtype) -> Callable:
    return lambda self: self.to(dtype)


for _name in ("float", "half", "bfloat16", "int", "long", "double"):
    for _kind in (Term, OverRows):
        setattr(_kind, _name, _converted(getattr(torch, _name)))


def _over_rows(over: Op, v: torch.Tensor) -> torch.Tensor:
    name = f"htile.{_NAMES[over]}"
    if not isinstance(v, torch.Tensor):
        fail(TraceError, f"{name} takes a tensor that is computed of a row, not "
             f"{an(type(v).__name__)}")  # fmt: skip
    if not isinstance(v, Tensor):
        return Term(v, over) if _MARKED.get() else v
    dtype = v._builder[v._id].value.dtype
    if v._builder.multiple is not None:
        remedy = "leave dynamic_n out, or return the row and reduce it outside"
        fail(UnsupportedError, f"{name} in a function of rows of any length (dynamic_n=True) is "
             f"not supported yet: {remedy}")  # fmt: skip
    if dtype in STORAGE or (dtype is BOOL and over is Op.MAX):
        told = str(dtype).removeprefix("torch.")
        remedy = "v.int()" if not dtype.is_floating_point else "v.float()"
        fail(DtypeError, f"{name} of {told}: convert it, {remedy}")
    if over is Op.SUM and dtype is not FLOAT:
        v = convert(v, INT64)
    return OverRows(v, over, FLOAT if dtype is FLOAT else v._value.dtype)


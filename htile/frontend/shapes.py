"""Dtypes and shapes of symbolic tensors: `.to` and its short forms, constants, axes, indexing.

A row stays a row; a value per row may have the shape () or (1,).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .functions import attach, implements
from .ops import Op, Value, Varies
from .promotion import BOOL, Number, cast, filled, number, operand
from .tensor import Tensor, constant, fail, node


@implements("to", "type")
def to(input, dtype=None, *, copy=False, non_blocking=False, memory_format=None):
    dtype = dtype.dtype if isinstance(dtype, Tensor) else dtype
    if not isinstance(dtype, torch.dtype):
        fail(TraceError, f"x.to({dtype!r}): inside a row only x.to(dtype); devices do not change")
    return cast(input, dtype)


@implements("type_as")
def type_as(input, other):
    return cast(input, other.dtype)


def _cast_to(dtype: torch.dtype) -> Callable:
    return lambda input: cast(input, dtype)


for _name in ("float", "half", "bfloat16", "int", "long", "bool", "double"):
    attach(_name, _cast_to(getattr(torch, _name)))


def _like(value: Number) -> Callable:
    return lambda input, *, dtype=None: filled(input, value, dtype)


implements("zeros_like")(_like(0))
implements("ones_like")(_like(1))


@implements("full_like")
def full_like(input, fill_value, *, dtype=None):
    if isinstance(operand(fill_value), Tensor):
        fail(UnsupportedError, "full_like of a traced value: write value.expand_as(x)")
    return filled(input, fill_value, dtype)


implements("is_floating_point", method=False)(lambda input: input.is_floating_point())
implements("numel", method=False)(lambda input: input.numel())


def check_dim(x: Tensor, dim: object) -> None:
    """A row has one axis: dim is None, -1 or 0."""
    if dim is None:
        return
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if len(dims) > 1 or not all(type(d) is int and d in (-1, 0) for d in dims):
        fail(ShapeError, f"dim={dim!r}: a row has one axis, write dim=-1 or leave it out")


def _per_row(x: Tensor, what: str, inner: tuple[int, ...]) -> Tensor:
    if x._value.spread or x.ndim > 1 or x.ndim == len(inner) == 1:
        fail(UnsupportedError, f"{what} of a value of shape {tuple(x.shape)}: a row has one axis")
    return x if x._value.inner == inner else node(Op.RESHAPE, x, arg=inner)


@implements("unsqueeze")
def unsqueeze(input, dim):
    check_dim(input, dim)
    if input.ndim:
        fail(UnsupportedError, "unsqueeze of a row: a value inside a row has at most one axis")
    return _per_row(input, "unsqueeze", (1,))


@implements("squeeze")
def squeeze(input, dim=None):
    check_dim(input, dim)
    return _only_element(input) if input.shape == (1,) else _per_row(input, "squeeze", ())


def _only_element(x: Tensor) -> Tensor:
    """The element of a value of shape (1,); of a row of one, by the reduction that keeps its bits.

    A row belongs to one thread then, and a value per row to all.
    """
    v = x._value
    if not v.spread:
        return node(Op.RESHAPE, x, arg=())
    element = node(Op.ANY if v.dtype is BOOL else Op.MAX, x)
    return element if v.stored is None else cast(element, v.stored)


def spread(x: Tensor) -> Tensor:
    """A value per row as a row of equal elements."""
    if x._value.spread:
        return x
    dtype, n = x._value.dtype, x._builder.n
    ones = constant(x, number(1, dtype), Value((n,), Varies.SCALAR, dtype, None, True))
    return node(Op.AND if dtype is BOOL else Op.MUL, x, ones)


@implements("broadcast_to")
def broadcast_to(input, size):
    shape = tuple(input.shape[-1] if s == -1 and input.ndim else s for s in size)
    if shape == (input._builder.n,):
        return spread(input)
    if shape == tuple(input.shape):
        return input
    if shape == (1,) and not input._value.spread:
        return _per_row(input, "expand", (1,))
    fail(ShapeError, f"expand of shape {tuple(input.shape)} to {shape} does not fit in a row")


def expand(input, *sizes):
    sizes = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    return broadcast_to(input, sizes)


attach("expand", expand)
attach("expand_as", lambda input, other: broadcast_to(input, other.shape))


def getitem(x: Tensor, index: object) -> Tensor:
    """`m[..., None]` of a value per row, `m[..., 0]` of one element; `x[...]` and `x[:]`."""
    parts = index if isinstance(index, tuple) else (index,)
    whole = (Ellipsis, slice(None))
    rest = [p for p in parts if isinstance(p, Tensor) or p not in whole]
    if not rest:
        return x
    if len(rest) == 1 and rest[0] is None and not x.ndim:
        return unsqueeze(x, -1)
    if len(rest) == 1 and type(rest[0]) is int and rest[0] in (0, -1) and x.shape == (1,):
        return squeeze(x, -1)
    fail(
        UnsupportedError,
        "indexing a row is not supported: write a mask (torch.where with a condition) or a "
        "reduction (x.sum(), x.max())",
    )


Tensor.__getitem__ = getitem

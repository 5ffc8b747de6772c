"""Dtypes and shapes of symbolic tensors: `.to` and its short forms, constants, axes, indexing.

A row stays a row; a value per row may have the shape () or (1,).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .functions import attach, formulas, implements
from .hints import advice
from .ops import Op, Value, Varies
from .promotion import BOOL, Number, cast, filled, number, numeric, operand
from .tensor import FUNCTIONS, SAME, Device, Tensor, alias, constant, fail, node


@implements("to", "type")
def to(input, *args, dtype=None, device=None, copy=False, non_blocking=False, memory_format=None):
    """input in another dtype: it rounds, and declares what the result is stored in."""
    given = [each for each in (*args, dtype, device) if not isinstance(each, (bool, type(None)))]
    given_dtypes = [each for each in given if not isinstance(each, Device)]
    is_dtype = all(isinstance(each, (Tensor, torch.dtype)) for each in given_dtypes)
    if not given or len(given_dtypes) > 1 or not is_dtype:
        shown = ", ".join(map(repr, given_dtypes))
        fail(TraceError, f"x.to({shown}): only x.to(dtype) inside a row; devices do not change")
    if not given_dtypes:
        return alias(input, input)
    dtype = getattr(given_dtypes[0], "dtype", given_dtypes[0])
    result, v = cast(input, dtype), input._value
    is_alias = (v.stored or v.dtype) is dtype and not copy  # torch gives x itself back
    return alias(input, result) if is_alias else result


def _to(dtype: torch.dtype) -> Callable:
    return lambda input: to(input, dtype)


for _name in ("float", "half", "bfloat16", "int", "long", "bool", "double"):
    attach(_name, _to(getattr(torch, _name)), f"The same as x.to(torch.{_name}).")


def _like(value: Number) -> Callable:
    return lambda input, *, dtype=None, **more: full_like(input, value, dtype=dtype, **more)


@implements("full_like")
def full_like(
    input, fill_value, *, dtype=None, device=None, layout=None, memory_format=None,
    requires_grad=False,
):  # fmt: skip
    """A constant of the shape of input."""
    if isinstance(operand(fill_value), Tensor):
        fail(UnsupportedError, "full_like of a traced value: write value.expand_as(x)")
    if not isinstance(device, (Device, type(None))):
        fail(TraceError, f"device={device!r}: a constant is where the row is; leave it out")
    return filled(input, fill_value, dtype)


# axes


def check_dim(x: Tensor, dim: object) -> None:
    """A row has one axis: dim is None, -1 or 0."""
    if dim is None:
        return
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    if len(dims) > 1 or not all(type(d) is int and d in (-1, 0) for d in dims):
        fail(ShapeError, f"dim={dim!r}: a row has one axis, write dim=-1 or leave it out")


def _per_row(x: Tensor, what: str, inner: tuple[int, ...]) -> Tensor:
    """A value per row in another shape; in torch it is a view."""
    if x._value.spread or x.ndim > 1 or x.ndim == len(inner) == 1:
        fail(UnsupportedError, f"{what} of a value of shape {tuple(x.shape)}: a row has one axis")
    return alias(x, x if x._value.inner == inner else node(Op.RESHAPE, x, arg=inner))


def _view(input, *shape):
    sizes = _listed(shape)
    if isinstance(sizes, torch.dtype):
        fail(UnsupportedError, f"x.view({sizes}): the bits of a number cannot be read")
    sizes = tuple(sizes.shape if isinstance(sizes, Tensor) else sizes)
    if sizes == tuple(input.shape) or (sizes == (-1,) and input.ndim):
        return input
    if sizes in ((), (1,), (-1,)) and not input._value.spread:
        return _per_row(input, "view", sizes and (1,))
    fail(UnsupportedError, f"x.view{sizes} of shape {tuple(input.shape)}: {advice('view', ())}")


@implements("unsqueeze")
def unsqueeze(input, dim):
    """A value per row with an axis of size 1."""
    check_dim(input, dim)
    if input.ndim:
        fail(UnsupportedError, "unsqueeze of a row: a value inside a row has at most one axis")
    return _per_row(input, "unsqueeze", (1,))


@implements("squeeze")
def squeeze(input, dim=None):
    """A value per row without its axis of size 1."""
    check_dim(input, dim)
    v = input._value
    if v.inner != (1,) or not v.spread:
        return _per_row(input, "squeeze", ())
    # A row of one belongs to one thread and a value per row to all: a reduction brings it there.
    element = node(Op.ANY if v.dtype is BOOL else Op.MAX, input)
    return alias(input, element if v.stored is None else cast(element, v.stored))


def _as_row(x: Tensor) -> Tensor:
    """A value per row as a row of equal elements."""
    if x._value.spread:
        return x
    dtype, stored, n = x._value.dtype, x._value.stored, x._builder.n
    ones = constant(x, number(1, dtype), Value((n,), Varies.SCALAR, dtype, stored, True))
    return node(Op.AND if dtype is BOOL else Op.MUL, x, ones)


@implements("broadcast_to")
def broadcast_to(input, size):
    """A value per row as a row of N equal elements; a row as it is."""
    shape = tuple(input.shape[-1] if s == -1 and input.ndim else s for s in size)
    if shape == (input._builder.n,):
        return alias(input, _as_row(input))
    if shape == tuple(input.shape):
        return alias(input, input)
    if shape == (1,) and not input._value.spread:
        return _per_row(input, "expand", (1,))
    fail(ShapeError, f"expand of shape {tuple(input.shape)} to {shape} does not fit in a row")


def _listed(sizes: tuple) -> object:
    """The sizes of `x.view(a, b)` and of `x.view((a, b))`."""
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


formulas({
    "zeros_like": ("Zeros of the shape of input.", _like(0)),
    "ones_like": ("Ones of the shape of input.", _like(1)),
    "type_as": ("input in the dtype of other.", lambda input, other: to(input, other)),
    "is_complex": ("False.", lambda input: False),
    "is_floating_point": ("Whether the dtype is a floating one.", lambda input:
        input.dtype.is_floating_point),
    "dim": ("The number of axes: 0 or 1.", lambda input: input.ndim),
    "numel": ("The number of elements: N for a row, 1 for one value a row.", lambda input:
        input.shape.numel()),
    "contiguous": ("input.", lambda input, *, memory_format=None: alias(input, input)),
    "expand": ("The same as torch.broadcast_to(x, sizes).", lambda input, *sizes:
        broadcast_to(input, _listed(sizes))),
    "expand_as": ("x.expand(other.shape).", lambda input, other: broadcast_to(input, other.shape)),
    "detach": ("input itself.", lambda input: input),
    "positive": ("input itself, which is no mask.", lambda input: numeric(input, "+")),
    "view reshape": ("input itself, for -1 or its shape; a value per row as () or (1,).", _view),
    "view_as reshape_as": ("The same as x.view(other.shape).", lambda input, other:
        _view(input, other)),
    "flatten": ("input itself.", lambda input, start_dim=0, end_dim=-1: _view(input, -1)),
    "ravel": ("input itself.", lambda input: _view(input, -1)),
})  # fmt: skip
_SAME = "detach positive reshape flatten ravel view_as"
SAME |= {FUNCTIONS[getattr(torch.Tensor, name)][1] for name in _SAME.split()}
Tensor.__pos__ = vars(Tensor)["positive"]


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
    remedy = "write a mask (torch.where with a condition) or a reduction (x.sum(), x.max())"
    if None in rest:
        remedy = "a row has one axis and gets no other, use it as it is"
    elif isinstance(rest[0], slice):
        remedy = advice("split", ())
    fail(UnsupportedError, f"indexing a row is not supported: {remedy}")


Tensor.__getitem__ = getitem

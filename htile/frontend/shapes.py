"""Dtypes and shapes of symbolic tensors: `.to` and its short forms, constants, and the axes.

A value has any number of axes behind the leading dimensions. What takes parts of an axis and joins
them is in htile.frontend.parts.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

import torch

from ..errors import ShapeError, TraceError, UnsupportedError
from .dtypes import FLOAT8
from .dynamic import ONLY_WHOLE
from .functions import attach, formulas, implements
from .ops import Op, Value, Varies, broadcast_shapes
from .promotion import BOOL, BYTES, FLOAT, Number, cast, filled, number, numeric, operand
from .tensor import (
    FUNCTIONS,
    SAME,
    Device,
    Length,
    Tensor,
    alias,
    constant,
    copy,
    fail,
    node,
    viewed,
)


@implements("to", "type")
def to(input, *args, dtype=None, device=None, copy=False, non_blocking=False, memory_format=None):
    """input in another dtype: it rounds, and declares what the result is stored in."""
    given = [each for each in (*args, dtype, device) if not isinstance(each, (bool, type(None)))]
    given_dtypes = [each for each in given if not isinstance(each, Device)]
    is_dtype = all(isinstance(each, (Tensor, torch.dtype)) for each in given_dtypes)
    if not given:
        fail(TraceError, "x.to() and x.type() take a dtype inside a row, as x.to(torch.float16) "
             "does; the dtype that it has is x.dtype")  # fmt: skip
    if len(given_dtypes) > 1 or not is_dtype:
        shown = ", ".join(map(repr, given_dtypes))
        fail(TraceError, f"x.to({shown}): only x.to(dtype) inside a row; devices do not change")
    if not given_dtypes:
        return input if copy else _itself(input)  # which is copied by who calls this
    dtype = getattr(given_dtypes[0], "dtype", given_dtypes[0])
    v = input._value
    if input.dtype is dtype and not copy:
        return _itself(input, lambda: cast(input, dtype))
    result = cast(input, dtype)
    return alias(input, result) if (v.stored or v.dtype) is dtype and not copy else result


def _itself(x: Tensor, made: Callable[[], Tensor] | None = None) -> Tensor:
    """What torch gives `x` itself back for, also where autograd records nothing.

    made: gives the same value with what is declared of it.
    """
    with torch.enable_grad():
        return alias(x, made() if made else x)


def _to(dtype: torch.dtype) -> Callable:
    return lambda input: to(input, dtype)


for _name in ("float", "half", "bfloat16", "int", "long", "bool", "double"):
    attach(_name, _to(getattr(torch, _name)), f"The same as x.to(torch.{_name}).")
attach("char", _to(torch.int8), "The same as x.to(torch.int8).")
attach("byte", _to(torch.uint8), "The same as x.to(torch.uint8).")


def _like(value: Number) -> Callable:
    return lambda input, *, dtype=None, **more: full_like(input, value, dtype=dtype, **more)


@implements("full_like")
def full_like(
    input, fill_value, *, dtype=None, device=None, layout=None, memory_format=None,
    requires_grad=False,
):  # fmt: skip
    """A constant of the shape of input."""
    if not isinstance(device, (Device, type(None))):
        fail(TraceError, f"device={device!r}: a constant is where the row is; leave it out")
    if not isinstance(operand(fill_value), Tensor):
        return filled(input, fill_value, dtype)
    value = as_number(fill_value, "torch.full_like", "write value.expand_as(x)")
    declared = dtype or input._value.stored
    if declared is None and input._value.dtype is FLOAT:
        value = cast(value, FLOAT)  # in 16 bits, too: of a Python number nothing is rounded either
    else:
        value = to(value, declared or input.dtype)
    return copy(broadcast_to(value, input.shape))


def as_number(x: Tensor, what: str, remedy: str) -> Tensor:
    """A value that torch makes a Python number of, without a gradient: one for all rows."""
    if x.ndim or x._value.varies is Varies.ROW:
        fail(TraceError, f"{what} of a symbolic value: {remedy}")
    return torch.detach(x)


# axes


def axis_of(x: Tensor, dim: object) -> int:
    """The axis that `dim` names, counted from the last, -1. Raises ShapeError for another."""
    if type(dim) is not int or not -max(x.ndim, 1) <= dim < max(x.ndim, 1):
        remedy = "a row has one axis, write dim=-1 or leave it out"
        if x.ndim > 1:
            remedy = f"a value of shape {tuple(x._sizes)} has the axes 0 to {x.ndim - 1}"
        fail(ShapeError, f"dim={dim!r}: {remedy}")
    return dim if dim < 0 else dim - max(x.ndim, 1)


def cut_axis(x: Tensor, dim: object, what: str) -> int:
    """The axis that `dim` names, to take parts of. Raises ShapeError where there is none."""
    if not x.ndim:
        fail(ShapeError, f"{what} of a value of shape (): it is one number, and has no axis")
    return axis_of(x, dim)


def has_any_length(x: Tensor, axis: int) -> bool:
    """Whether an axis has another length in each call: `x._sizes` has the longest one then."""
    return x.ndim > 0 and isinstance(x.shape[axis], Length)


def known_axis(x: Tensor, dim: object, what: str) -> int:
    """The axis that `dim` names, whose length tells how many parts it has.

    Raises UnsupportedError for a row of any length.
    """
    axis = cut_axis(x, dim, what)
    if has_any_length(x, axis):
        fail(UnsupportedError, ONLY_WHOLE.format("a part"))
    return axis


def axes_of(x: Tensor, dim: object) -> tuple[int, ...]:
    """The axes that `dim` names, the first one first: a number, several, or None for all."""
    if dim is None:
        return tuple(range(-max(x.ndim, 1), 0))
    dims = tuple(dim) if isinstance(dim, (tuple, list)) else (dim,)
    axes = sorted(axis_of(x, d) for d in dims)
    if len(set(axes)) < len(axes):
        fail(ShapeError, f"dim={dim!r} names an axis twice")
    return tuple(axes) or axes_of(x, None)


def reshaped(x: Tensor, inner: tuple[int, ...]) -> Tensor:
    """The same elements in another shape, in torch a view; x itself for its own shape."""
    return viewed(x) if x._value.inner == inner else alias(x, node(Op.RESHAPE, x, arg=inner))


def fixed(sizes: tuple, x: Tensor) -> tuple:
    """Sizes as the graph of `x` has them, where the length of a row is n.

    Raises UnsupportedError for a number of elements of a row, where that differs from call to call.
    """
    builder = x._builder
    if builder.multiple is None:
        return sizes
    if any(type(size) is int and (size > 1 if x._value.spread else size == builder.n > 1)
           for size in sizes):  # fmt: skip
        fail(UnsupportedError, ONLY_WHOLE.format(f"the sizes {sizes}"))
    return tuple(builder.n if isinstance(size, Length) else size for size in sizes)


def _view(input, *shape, dtype=None):
    sizes = _listed(shape) if dtype is None else dtype
    return _of_bits(input, sizes) if isinstance(sizes, torch.dtype) else _reshape(input, *shape)


def _reshape(input, *shape):
    sizes = _listed(shape)
    sizes = fixed(tuple(sizes) if isinstance(sizes, (tuple, list)) else (sizes,), input)
    return reshaped(input, filled_in(sizes, input._sizes.numel(), f"x.view{sizes}", input))


def _of_bits(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x.view(dtype): the same bits as another dtype."""
    if dtype is x.dtype:
        return viewed(x)
    ops = {(torch.float32, torch.int32): Op.BITS, (torch.int32, torch.float32): Op.FLOAT_OF}
    if (x.dtype, dtype) not in ops:
        fail(
            UnsupportedError,
            f"x.view({dtype}) of {x.dtype}: only the bits of float32 can be read, as int32, and "
            "the other way round; write x.float().view(torch.int32), or pass a view as an argument",
        )
    return alias(x, node(ops[x.dtype, dtype], x))


def filled_in(sizes: tuple, count: int, what: str, x: Tensor) -> tuple[int, ...]:
    """Sizes with what -1 stands for. Raises ShapeError where there are not `count` elements."""
    if not all(map(_is_size, sizes)) or sizes.count(-1) > 1:
        fail(ShapeError, f"{what}: expected integers, one of them -1 at most")
    known = prod(size for size in sizes if size != -1)
    if -1 in sizes and known > 0 and count % known == 0:
        sizes = tuple(count // known if size == -1 else size for size in sizes)
    if min(sizes, default=1) < 1 or prod(sizes) != count:
        fail(ShapeError, f"{what} of a value of shape {tuple(x._sizes)}: the sizes do not fit")
    return sizes


@implements("unflatten")
def unflatten(input, dim, sizes):
    """An axis of input as several."""
    axis, shape = cut_axis(input, dim, "unflatten"), tuple(input._sizes)
    end = axis + len(shape) + 1
    sizes = filled_in(tuple(sizes), shape[axis], f"unflatten({dim}, {tuple(sizes)})", input)
    return reshaped(input, (*shape[: end - 1], *sizes, *shape[end:]))


def _flatten(input, start_dim=0, end_dim=-1):
    shape = tuple(input._sizes)
    first, last = (axis_of(input, dim) + len(shape) for dim in (start_dim, end_dim))
    if not shape:
        return reshaped(input, (1,))
    if first > last:
        fail(ShapeError, f"flatten({start_dim}, {end_dim}) of a value of shape {shape}: the axis "
             "to begin with comes after the one to end with")  # fmt: skip
    if first == last:
        return input
    return reshaped(input, (*shape[:first], prod(shape[first : last + 1]), *shape[last + 1 :]))


def _contiguous(input, *, memory_format=None):
    if input._later is not None:  # what torch.flip gives is contiguous
        return _itself(input)
    node, builder = input._builder[input._id], input._builder
    while node.op in (Op.RESHAPE, Op.STOP):
        node = builder[node.inputs[0]]
    is_apart = node.op in (Op.PERMUTE, Op.EXPAND, Op.SLICE)  # then torch copies the elements
    return alias(input, input) if is_apart else _itself(input)


@implements("broadcast_tensors", method=False)
def broadcast_tensors(*tensors):
    """The tensors, each broadcast to the shape that they have together."""
    for x in tensors:
        if not isinstance(x, Tensor):
            fail(TraceError, f"broadcast_tensors takes tensors, got {x!r}: write "
                 f"torch.full_like(x, {x!r}) for it")  # fmt: skip
    shape = broadcast_shapes(*(tuple(x._sizes) for x in tensors))
    if shape is None:
        shapes = ", ".join(str(tuple(x._sizes)) for x in tensors)
        fail(ShapeError, f"broadcast_tensors of shapes {shapes}: they do not go together")
    return tuple(broadcast_to(x, shape) for x in tensors)


@implements("unsqueeze")
def unsqueeze(input, dim):
    """input with an axis of size 1 more."""
    shape = tuple(input._sizes)
    if type(dim) is not int or not -len(shape) - 1 <= dim <= len(shape):
        fail(ShapeError, f"unsqueeze({dim!r}) of a value of shape {shape}")
    place = dim if dim >= 0 else dim + len(shape) + 1
    return reshaped(input, (*shape[:place], 1, *shape[place:]))


@implements("atleast_1d")
def atleast_1d(input):
    """input with one axis or more."""
    return input if input.ndim else unsqueeze(input, 0)


@implements("atleast_2d")
def atleast_2d(input):
    """input with two axes or more, of which the first ones are new."""
    return input if input.ndim > 1 else unsqueeze(atleast_1d(input), 0)


@implements("squeeze")
def squeeze(input, dim=None):
    """input without its axes of size 1, or without that one."""
    v, shape = input._value, tuple(input._sizes)
    axes = axes_of(input, dim)
    kept = [size for k, size in enumerate(shape) if k - len(shape) not in axes or size > 1]
    if v.inner != (1,) or not v.spread:
        return alias(input, reshaped(input, tuple(kept)))
    # A row of one belongs to one thread and a value per row to all: a reduction brings it there.
    if v.dtype in FLOAT8 or v.dtype in BYTES:
        wide = cast(input, FLOAT if v.dtype in FLOAT8 else torch.int32)
        return alias(input, cast(node(Op.MAX, wide), v.dtype))
    element = node(Op.ANY if v.dtype is BOOL else Op.MAX, input)
    return alias(input, element if v.stored is None else cast(element, v.stored))


@implements("permute")
def permute(input, *dims):
    """input with its axes in another order."""
    axes = tuple(axis_of(input, dim) for dim in _listed(dims))
    if sorted(axes) != list(range(-input.ndim, 0)):
        fail(ShapeError, f"permute{axes} of a value of shape {tuple(input._sizes)}")
    moves = axes != tuple(range(-input.ndim, 0))
    return alias(input, node(Op.PERMUTE, input, arg=axes) if moves else input)


@implements("transpose", "swapaxes", "swapdims")
def transpose(input, dim0, dim1):
    """input with two of its axes exchanged."""
    axes = list(range(-input.ndim, 0))
    first, second = axis_of(input, dim0), axis_of(input, dim1)
    if not axes:
        return alias(input, input)
    axes[first], axes[second] = axes[second], axes[first]
    return permute(input, axes)


def _matrix_transposed(input):
    if input.ndim > 2:
        fail(ShapeError, f"x.t() of a value of shape {tuple(input._sizes)}: it takes a matrix, "
             "write x.transpose(0, -1)")  # fmt: skip
    return transpose(input, 0, -1)


def _moved(input, source, destination):
    axes = list(range(-input.ndim, 0))
    moved, place = axis_of(input, source), axis_of(input, destination) + input.ndim
    if not axes:
        return alias(input, input)
    axes.remove(moved)
    axes.insert(place, moved)
    return permute(input, axes)


def _as_row(x: Tensor) -> Tensor:
    """A value per row as a row of equal elements."""
    if x._value.spread:
        return x
    dtype, stored, n = x._value.dtype, x._value.stored, x._builder.n
    ones = constant(x, number(1, dtype), Value((n,), Varies.SCALAR, dtype, stored, True))
    return node(Op.AND if dtype is BOOL else Op.MUL, x, ones)


@implements("broadcast_to")
def broadcast_to(input, size):
    """input with its axes of size 1, and those that it lacks, repeated."""
    sizes = fixed(tuple(size) if isinstance(size, (tuple, list)) else (size,), input)
    own = (None,) * (len(sizes) - input.ndim) + tuple(input._sizes)
    shape = tuple(o if s == -1 else s for s, o in zip(sizes, own, strict=False))
    is_value = input._sizes in ((), (1,)) and not input._value.spread
    whole = all(_is_size(s) and s > 0 for s in shape)  # a new axis has no size for -1 to keep
    if whole and shape == (input._builder.n,) and is_value and shape != (1,):
        return _repeated(input, _as_row(input))
    fits = whole and len(own) <= len(sizes)
    if not fits or broadcast_shapes(tuple(input._sizes), shape) != shape:
        fail(ShapeError, f"expand of a value of shape {tuple(input._sizes)} to {sizes}")
    if not input.ndim and shape == (1,):
        return reshaped(input, shape)
    if shape == input._sizes:
        return alias(input, input)
    return _repeated(input, node(Op.EXPAND, input, arg=shape))


def _repeated(x: Tensor, y: Tensor) -> Tensor:
    """`y`, an alias of `x` some elements of which share memory in torch if it has more of them."""
    y = alias(x, y)
    y._repeats |= prod(y._sizes) > prod(x._sizes)
    return y


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool)


def _listed(sizes: tuple) -> object:
    """The sizes of `x.view(a, b)` and of `x.view((a, b))`."""
    return sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes


formulas({
    "zeros_like": ("Zeros of the shape of input.", _like(0)),
    "ones_like": ("Ones of the shape of input.", _like(1)),
    "empty_like": ("Zeros of the shape of input, to be overwritten.", _like(0)),
    "type_as": ("input in the dtype of other.", lambda input, other: to(input, other)),
    "is_complex": ("False.", lambda input: False),
    "is_floating_point": ("Whether the dtype is a floating one.", lambda input:
        input.dtype.is_floating_point),
    "dim": ("The number of axes.", lambda input: input.ndim),
    "numel": ("The number of elements of the row.", lambda input: input.shape.numel()),
    "contiguous": ("input.", _contiguous),
    "expand": ("The same as torch.broadcast_to(x, sizes).", lambda input, *sizes:
        broadcast_to(input, _listed(sizes))),
    "expand_as": ("x.expand(other.shape).", lambda input, other: broadcast_to(input, other.shape)),
    "detach": ("input itself, which no derivative goes through.", lambda input:
        alias(input, node(Op.STOP, input)) if input._value.dtype is FLOAT else input),
    "positive": ("input itself, which is no mask.", lambda input: numeric(input, "+")),
    "reshape": ("The elements in another shape, of as many.", _reshape),
    "view": (
        "The elements in another shape, of as many; or the bits of float32 as torch.int32, and "
        "those of int32 as torch.float32.", _view),
    "view_as reshape_as": ("The same as x.view(other.shape).", lambda input, other:
        _reshape(input, other.shape)),
    "flatten": ("The axes from start_dim to end_dim as one.", _flatten),
    "ravel": ("All axes as one.", lambda input: reshaped(input, (input._sizes.numel(),))),
    "t": ("The transpose of a matrix; a row is itself.", _matrix_transposed),
    "movedim moveaxis": ("input with one axis at another place.", _moved),
})  # fmt: skip
_SAME = "detach positive reshape view unflatten flatten ravel view_as"
SAME |= {FUNCTIONS[getattr(torch.Tensor, name)][1] for name in _SAME.split()}
Tensor.__pos__ = vars(Tensor)["positive"]


def _reversed_axes(x: Tensor) -> Tensor:
    """The axes in reverse order."""
    return permute(x, tuple(range(-1, -1 - x.ndim, -1)))


def _transposed(x: Tensor) -> Tensor:
    """The last two axes exchanged."""
    return transpose(x, -2, -1)


def _data(x: Tensor) -> Tensor:
    """x.detach()."""
    return x.detach()


Tensor.T, Tensor.mT = property(_reversed_axes), property(_transposed)
Tensor.data = property(_data)

"""What changes a tensor in place: `x += y`, `x.mul_(y)`, `x[:n] = y`, `F.relu(x, inplace=True)`.

The tensor refers to another value from then on, in its own shape and dtype (`Tensor._assign`). The
memory of an argument is never written.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import EllipsisType

import torch

from ..errors import DtypeError, HTileError, ShapeError, TraceError, UnsupportedError
from . import composites as composites  # fill the table, of which all entries are read here
from . import dropouts as dropouts
from . import put as put
from . import scans as scans
from . import special as special
from . import triangles as triangles
from .dtypes import STORAGE
from .dynamic import ONLY_WHOLE
from .factories import index as places_of
from .functions import OPERATORS, attach, masked_fill, with_slope_of
from .graph import Role
from .indices import each_of_lists
from .joins import cat, stack
from .ops import Varies, broadcast_shapes
from .parts import MOST_PARTS, check_slice, is_mask, part, too_many, with_one_ellipsis
from .promotion import BOOL, FLOAT, filled, into, operand, put_into
from .selected import Selected, enter_operator_in_place, with_selected
from .shapes import broadcast_to, reshaped, squeeze, unsqueeze
from .tensor import FUNCTIONS, IN_PLACE, SAME, Length, Tensor, fail


def change(x: Tensor, new: Tensor) -> Tensor:
    """`x`, which has the elements of `new` from now on.

    Raises ShapeError, TraceError or DtypeError where torch cannot put them there.
    """
    if isinstance(new, Selected):
        fail(ShapeError, "a change in place puts the elements of x[mask] into a value of another "
             "length: reduce them first, as in s += x[mask].sum()")  # fmt: skip
    old, value = x._value, new._value
    if x._repeats:
        fail(TraceError, "a change in place of elements that expand repeats, which share memory in "
             "torch: write x = x + ... for x += ..., or expand(...).clone()")  # fmt: skip
    if value.inner != old.inner:
        fail(ShapeError, f"a change in place of a value of shape {old.inner} to one of shape "
             f"{value.inner}: write x = x + ... for x += ...")  # fmt: skip
    if value.varies is Varies.ROW is not old.varies and _roles(x) - {Role.SCALAR}:
        fail(TraceError, "a change in place puts what differs from row to row into a value "
             "that all rows share: write x = x + ... for x += ...")  # fmt: skip
    if not torch.can_cast(value.dtype, old.dtype):
        fail(DtypeError, f"a change in place cannot put {value.dtype} into {old.dtype}: write "
             "x = x + ... for x += ...")  # fmt: skip
    new = into(new, old)
    if x._builder.records and not torch.is_grad_enabled() and old.dtype is FLOAT:
        with torch.enable_grad():  # a tensor that changes under no_grad keeps its gradient
            new = with_slope_of(x, new)
    id = new._id
    if not _changes_whole(x, new):
        x._assign(id)
    return x


def _changes_whole(x: Tensor, new: Tensor) -> bool:
    """Change what `x` is a part of, and `x` too; whether that can be written.

    If not, or if `x` is no part that shares memory, nothing is changed. The two may be used from
    then on, and no other alias of them.
    """
    if x._part_of is None or x._part_of[0]._changes is not x._changes:
        return False
    whole, index = x._part_of
    id = new._id
    try:
        changed = _with_index(whole, index, new)
    except HTileError:  # `x` alone changes then, so that a use of the whole raises
        return False
    change(whole, changed)
    x._node, x._changes = id, whole._changes
    return True


def _roles(x: Tensor) -> set[Role]:
    """The roles of the arguments that a value is computed of."""
    used = {x._id}
    for id in range(x._id, -1, -1):
        used |= set(x._builder[id].inputs) if id in used else set()
    return {i.role for i in x._builder.inputs if i.id in used}


def _operator(function: Callable) -> Callable:
    def method(self, other):
        result = function(self, other)
        is_number = _roles(self) == {Role.SCALAR} and not self._value.spread
        if is_number or isinstance(self, Length):
            return result  # a Python number: the name is bound anew, other names of it are not
        return change(self, result)

    return method


for _name, _method in OPERATORS.items():
    setattr(Tensor, f"__i{_name}__", _operator(vars(Tensor)[_method]))
    enter_operator_in_place(_name, vars(Tensor)[f"__i{_name}__"])


# methods, and functions of torch


def _changing(function: Callable) -> Callable:
    @functools.wraps(function)
    def changed(input, *args, **kwargs):
        return change(input, function(input, *args, **kwargs))

    changed.__module__ = __name__  # the reference has a group for each module
    SAME.add(changed)
    return changed


# Of these torch changes the shape or the history, and not the elements.
_OTHER = {"detach", "squeeze", "unsqueeze", "swapaxes", "swapdims", "t", "transpose"}
for _function, (_spelling, _entry) in list(FUNCTIONS.items()):
    _prefix, _, _name = _spelling.rpartition(".")
    _module = {"x": torch.Tensor, "torch": torch, "F": torch.nn.functional}.get(_prefix)
    if _prefix == "F":
        IN_PLACE[_entry] = _changing(_entry)
    if _name in _OTHER or not hasattr(_module, f"{_name}_"):
        continue
    if _prefix == "x":
        attach(f"{_name}_", _changing(_entry))
    else:
        FUNCTIONS[getattr(_module, f"{_name}_")] = f"{_spelling}_", _changing(_entry)


def _filled(input, value):
    if not isinstance(operand(value), Tensor):
        return filled(input, value)
    if value.ndim:
        fail(ShapeError, f"fill_ takes a value without axes, got one of shape {value._sizes}: "
             "write copy_")  # fmt: skip
    return broadcast_to(value, input.shape)


def _copied(input, src, non_blocking=False):
    return broadcast_to(src, input.shape)


attach("fill_", _changing(_filled), "x with this value in all of its elements.")
attach("zero_", _changing(lambda input: filled(input, 0)), "x with zeros.")
attach("copy_", _changing(_copied), "x with the elements of another tensor.")
FUNCTIONS[torch.fill_] = "torch.fill_", FUNCTIONS[torch.Tensor.fill_][1]
FUNCTIONS[torch.zero_] = "torch.zero_", FUNCTIONS[torch.Tensor.zero_][1]


# x[...] = value


def setitem(x: Tensor, index: object, value: object) -> None:
    """Give a part of one axis other elements: a number, or what is broadcast to its shape.

    After `x[index] += y` Python sets the part that has changed, and with it `x`, once more.
    """
    if isinstance(value, Tensor) and value._part_of is not None and not _chosen_by_data(index):
        whole, place = value._part_of
        if whole is x and value._changes is x._changes and place == index and not x._changes:
            return
    change(x, _with_index(x, index, value))


def _with_index(x: Tensor, index: object, value: object) -> Tensor:
    """`x` with another value in the part that an index chooses."""
    parts = with_one_ellipsis(x, index) if isinstance(index, tuple) else (index,)
    if isinstance(value, Selected) and not (len(parts) == 1 and is_mask(parts[0])):
        value._refuse("x[...] = y[mask] is not supported")
    if len(parts) == 1 and x.ndim:
        if isinstance(parts[0], Tensor):
            return _with_elements(x, parts[0], value)
        if isinstance(parts[0], list) and all(type(k) is int for k in parts[0]):
            return _with_elements_at(x, parts[0], _each(x, value, len(parts[0])))
    if any(type(each) is list for each in parts):
        return _with_lists(x, parts, value)
    for each in parts:
        if isinstance(each, Tensor):
            fail(UnsupportedError, "x[...] = value at a mask or an index beside other indices: "
                 "write x = torch.where(mask, value, x) with a mask of all of x")  # fmt: skip
        if type(each) not in (int, slice, EllipsisType):
            fail(UnsupportedError, f"x[{each!r}] = value: write numbers and slices")
    for each in parts:
        check_slice(each)
    return _with_parts(x, _cut(x, parts), value)


def _with_parts(x: Tensor, cut: list[tuple[int, int | slice]], value: object) -> Tensor:
    """`x` with another value in a part of each of some axes, of which the first come first."""
    axis, place = cut[0] if cut else (-1, slice(None))
    if x._builder.multiple is not None and place != slice(None):
        fail(UnsupportedError, ONLY_WHOLE.format("a change of a part"))
    if len(cut) > 1:
        piece = x[(*(slice(None),) * (x.ndim + axis), place)]
        value = _with_parts(piece, cut[1:], value)
    return _with_part(x, axis, place, value)


def _with_lists(x: Tensor, parts: tuple, value: object) -> Tensor:
    """`x` with another value at places that are listed, of which the last of equal ones counts."""
    places, axis = each_of_lists(x, parts)
    values = [value] * len(places)
    if not _is_one(value):
        own, shape = tuple(value._sizes), tuple(x[parts]._sizes)
        if broadcast_shapes(own, shape) != shape:
            fail(ShapeError, f"x[y] = value of shape {own}: the part has the shape {shape}")
        values = broadcast_to(value, shape).unbind(axis)
    for place, each in zip(places, values, strict=True):
        x = _with_index(x, place, each)
    return x


Tensor.__setitem__ = setitem


def _chosen_by_data(index: object) -> bool:
    """Whether an index, or one of several, is a tensor."""
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(each, Tensor) for each in parts)


def _with_elements(x: Tensor, index: Tensor, value: object) -> Tensor:
    """`x` with another value where a mask holds, or at one or several indices of its first axis."""
    if index._value.dtype is BOOL:
        return _with_masked(x, index, value)
    if index._value.dtype is FLOAT or index._value.dtype in STORAGE:
        fail(DtypeError, f"x[y] = value with y of {index._value.dtype}: an index is an integer, "
             "write y.long()")  # fmt: skip
    if not index.ndim:
        return _with_elements_at(x, [index], [value])
    size = index._sizes[0]
    if index.ndim > 1 or size > MOST_PARTS:
        fail(UnsupportedError, f"x[y] = value with y of shape {tuple(index._sizes)}: write an "
             f"index, or a vector of at most {MOST_PARTS}")  # fmt: skip
    return _with_elements_at(x, [index[k] for k in range(size)], _each(x, value, size))


def _with_masked(x: Tensor, mask: Tensor, value: object) -> Tensor:
    if tuple(mask._sizes) != tuple(x._sizes[: mask.ndim]):
        fail(ShapeError, f"x[mask] = value with a mask of shape {tuple(mask._sizes)}, and x of "
             f"shape {tuple(x._sizes)}: a mask has the first axes of x")  # fmt: skip
    if isinstance(value, Selected):
        return with_selected(x, mask, value)
    if not _is_one(value):
        fail(UnsupportedError, "x[mask] = value takes one number: of a value of the shape of x "
             "write x[mask] = value[mask], or x = torch.where(mask, value, x)")  # fmt: skip
    mask = mask.view(*mask._sizes, *(1,) * (x.ndim - mask.ndim)) if mask.ndim < x.ndim else mask
    return masked_fill(x, mask, value.reshape(()) if isinstance(value, Tensor) else value)


def _is_one(value: object) -> bool:
    return not isinstance(value, Tensor) or value._sizes.numel() == 1


def _each(x: Tensor, value: object, count: int) -> list:
    """What so many places of the first axis of `x` get of a value: a part each, or all of it."""
    if _is_one(value) or value.ndim < x.ndim or value._sizes[0] == 1:
        return [value] * count
    if value._sizes[0] != count:
        fail(ShapeError, f"x[y] = value of shape {tuple(value._sizes)} at {count} indices")
    return [value[k] for k in range(count)]


def _with_elements_at(x: Tensor, places: list[int | Tensor], values: list) -> Tensor:
    """`x` with other values at some places of its first axis. The last of equal places counts.

    A place of an element that there is not changes nothing.
    """
    axis, size = -x.ndim, x.shape[0]
    for place, each in zip(places, values, strict=True):
        if isinstance(place, int):
            x = _with_part(x, axis, place, each)
            continue
        place = torch.where(place < 0, place + size, place)
        is_it = places_of(x._builder, x._sizes[0]) == place
        is_it = is_it.view(x._sizes[0], *(1,) * (x.ndim - 1)) if x.ndim > 1 else is_it
        if _is_one(each):
            x = masked_fill(x, is_it, each.reshape(()) if isinstance(each, Tensor) else each)
            continue
        shape = tuple(x._sizes[1:])
        if broadcast_shapes(tuple(each._sizes), shape) != shape:
            fail(ShapeError, f"x[y] = value of shape {tuple(each._sizes)}: at an index x has the "
                 f"shape {shape}")  # fmt: skip
        x = torch.where(is_it, put_into(broadcast_to(each, shape), x, "x[y] = value"), x)
    return x


def _cut(x: Tensor, parts: tuple) -> list[tuple[int, int | slice]]:
    """Of which axes a part is meant, and which. Raises ShapeError for too many indices."""
    taken = sum(each is not Ellipsis for each in parts)
    if taken > x.ndim:
        fail(ShapeError, too_many(taken, x))
    parts = parts if Ellipsis in parts else (*parts, Ellipsis)
    at = parts.index(Ellipsis)
    before = [(k - x.ndim, each) for k, each in enumerate(parts[:at])]
    behind = [(k - len(parts), each) for k, each in enumerate(parts) if k > at]
    return [(axis, each) for axis, each in before + behind if each != slice(None)]


def _with_part(x: Tensor, axis: int, place: int | slice, value: object) -> Tensor:
    """`x` with another value in a part of an axis."""
    size, told = x._sizes[axis] if x.ndim else 1, f"x[{_shown(place)}] = y"
    if isinstance(place, int) and not -size <= place < size:
        fail(ShapeError, f"index {place} of an axis of {size} elements, of shape {tuple(x._sizes)}")
    chosen = range(place % size, place % size + 1) if isinstance(place, int) else range(size)[place]
    if not len(chosen) or chosen.step < 1:
        fail(ShapeError, f"{told}: the part of an axis of {size} elements has no elements")
    if not isinstance(operand(value), Tensor) or value._sizes.numel() == 1:
        value = squeeze(value.reshape(1), -1) if isinstance(value, Tensor) else value
        return masked_fill(x, _mask(x, axis, chosen), value)
    if isinstance(place, int) and value.ndim == x.ndim - 1:
        value = unsqueeze(value, axis)
    if len(chosen) == size and place == slice(None):
        return broadcast_to(value, x.shape)
    shape = [len(chosen) if k - x.ndim == axis else each for k, each in enumerate(x._sizes)]
    if broadcast_shapes(tuple(value._sizes), tuple(shape)) != tuple(shape):
        fail(ShapeError, f"{told} of shape {tuple(value._sizes)}: the part has the shape "
             f"{tuple(shape)}")  # fmt: skip
    value = put_into(broadcast_to(value, tuple(shape)), x, told)
    if len(chosen) == size:
        return value
    if chosen.step == 1:
        ends = (0, chosen.start), (chosen.stop, size)
        first, last = ([part(x, axis, a, b - a)] if b > a else [] for a, b in ends)
        return cat([*first, value, *last], axis)
    if size % chosen.step or len(chosen) * chosen.step != size:
        _refuse_step(told, axis, chosen, size)
    step, sizes = chosen.step, tuple(x._sizes)
    each = [value if k == chosen.start else part(x, axis, k, size // step, step)
            for k in range(step)]  # fmt: skip
    end = axis + len(sizes) + 1
    return reshaped(stack(each, end), sizes)


def _refuse_step(told: str, axis: int, chosen: range, size: int) -> None:
    """Raise UnsupportedError for a part with a step that is not the same in the whole axis."""
    start, step, k = chosen.start, chosen.step, f"torch.arange({size})"
    k += "[:" + ", None" * (-1 - axis) + "]" if axis < -1 else ""
    tests = [f"(k >= {start})"] if start else []
    tests += [f"(k < {chosen.stop})"] if chosen[-1] + step < size else []
    tests.append(f"((k - {start}) % {step} == 0)" if start else f"(k % {step} == 0)")
    fail(UnsupportedError, f"{told}: values of several elements are stored with a step only where "
         f"this cuts the whole axis of {size} elements into parts of one length, as x[::2] = y of "
         f"an even number does; with k = {k} write x = torch.where({' & '.join(tests)}, y, x), "
         "where y is as long as x")  # fmt: skip


def _shown(place: int | slice) -> str:
    if isinstance(place, int):
        return str(place)
    text = ":".join("" if k is None else str(k) for k in (place.start, place.stop, place.step))
    return text.removesuffix(":") if place.step is None else text


def _mask(x: Tensor, axis: int, chosen: range) -> Tensor:
    """A mask of the elements of an axis that have one of these places."""
    size = x._sizes[axis] if x.ndim else 1
    if len(chosen) == size:
        return filled(x, True, BOOL)
    place = places_of(x._builder, size)
    inside = (place >= chosen.start) & (place < chosen.stop)
    if chosen.step > 1:
        inside = inside & ((place - chosen.start) % chosen.step == 0)
    return broadcast_to(inside.view(size, *(1,) * (-1 - axis)), x.shape)

"""Tensors that torch makes of numbers alone, such as `torch.arange(N)`, as symbolic values.

None of their arguments is symbolic, so the `__torch_function__` of symbolic tensors never hears of
such a call. `Factories` is a mode of torch, which hears of every call while a function is traced.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from typing import NoReturn

import torch
from torch.overrides import TorchFunctionMode

from ..errors import DtypeError, ShapeError, TraceError, UnsupportedError
from .dtypes import STORAGE
from .functions import attach
from .graph import Builder
from .hints import DRAWS, RANDOM
from .joins import cat
from .libraries import internal
from .ops import Value, Varies
from .promotion import BYTES, FLOAT, INT64, as_stored, byte, cast, supported
from .shapes import as_number, reshaped
from .tensor import MADE_BY, Device, Length, Tensor, copy, fail, location


class Factories(TorchFunctionMode):
    """In here torch's factories give symbolic values."""

    def __init__(self, builder: Builder):
        super().__init__()
        self._builder = builder

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if isinstance(kwargs.get("device"), Device):
            kwargs = {key: kwargs[key] for key in kwargs if key != "device"}
        make = FACTORIES.get(func) or _DRAWS.get(func)
        if func is torch.empty and internal(sys._getframe(1).f_code.co_filename):
            make = None  # HTile and the modules of torch want memory
        if make is not None and self._builder.multiple is not None:
            args, kwargs = _fixed(self._builder, func, args, kwargs)
        if any(isinstance(x, Tensor) for x in (*args, *kwargs.values())):
            _check_device(func, kwargs)
            return OF_VALUES.get(func, func)(*args, **kwargs)
        if make is None:
            return _told(func, func(*args, **kwargs), args)
        try:
            more = {k: kwargs[k] for k in kwargs if k != "device"}
            result = make(self._builder, func, args, more)
        except (RuntimeError, ValueError, TypeError, OverflowError) as error:  # torch's own
            fail(TraceError, f"torch.{func.__name__}: {str(error).splitlines()[0]}")
        if result is None:
            return func(*args, **kwargs)
        _check_device(func, kwargs)
        return result


def _told(func: Callable, result: object, args: tuple) -> object:
    """What a function of torch returns. A tensor of numbers alone remembers it, for errors."""
    if isinstance(result, torch.Tensor) and not any(isinstance(x, torch.Tensor) for x in args):
        setattr(result, MADE_BY, _spelled(func))
    return result


def _spelled(func: Callable) -> str:
    """How a function of torch is written: torch.fft.fftfreq calls itself fft_fftfreq."""
    place, _, last = func.__name__.partition("_")
    if hasattr(getattr(torch, place, None), last):
        return f"torch.{place}.{last}"
    return f"torch.{func.__name__}"


def _check_device(func: Callable, kwargs: dict) -> None:
    device = kwargs.get("device")
    if func in FACTORIES and device is not None:
        where = f"torch.{func.__name__}(device={str(device)!r}) inside the function"
        fail(TraceError, f"{where}: leave device out, or write device=x.device; the kernel runs "
             "where its inputs are")  # fmt: skip


def _fixed(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
    """The arguments with n for the length of a row, where each call may have another length.

    Raises UnsupportedError where they are not those of a whole row.
    """
    names = _SIZES.get(func)
    if names is None:
        return args, kwargs
    names = ("end",) if func is torch.arange and len(args) == 1 else names
    given = dict(zip(names, args, strict=False)) | {k: kwargs[k] for k in names if k in kwargs}
    start, step = given.pop("start", 0), given.pop("step", 1)
    sizes = [*given.values(), *args[len(names) :]] if func is not torch.full else [*given.values()]
    sizes = [x for each in sizes for x in (each if isinstance(each, (tuple, list)) else (each,))]
    is_whole = all(isinstance(x, Length) or (type(x) is int and x <= 1) for x in sizes)
    is_counted = all(type(x) is int for x in (start, step)) and (start, step) == (0, 1)
    if not (is_whole and is_counted):
        fail(UnsupportedError, f"torch.{func.__name__} of other sizes than x.shape[-1] beside rows "
             "of any length (dynamic_n=True): write torch.arange(x.shape[-1]), and compute with "
             "that")  # fmt: skip

    def of_graph(x: object) -> object:
        if isinstance(x, (tuple, list)):
            return tuple(map(of_graph, x))
        return builder.n if isinstance(x, Length) else x

    return tuple(map(of_graph, args)), {k: of_graph(v) for k, v in kwargs.items()}


def index(builder: Builder, size: int) -> Tensor:
    """The numbers from 0 to size - 1, in int64."""
    return Tensor(builder, builder.add_index(size, loc=location()))


def _dtype(real: torch.Tensor, kwargs: dict) -> torch.dtype:
    """The dtype that is asked for, or torch's; torch's default for floats counts as float32."""
    if kwargs.get("dtype") is not None:
        return kwargs["dtype"]
    return FLOAT if real.is_floating_point() else real.dtype


def _constant(
    builder: Builder, value: object, shape: torch.Size, dtype: torch.dtype
) -> Tensor | None:
    """A number in every element; None for what is no number."""
    if not isinstance(value, (bool, int, float)) or 0 in shape:
        return None
    computed = supported(dtype)
    if computed in BYTES:
        held = _constant(builder, byte(value, computed), shape, torch.int32)
        return cast(held, computed)
    if computed in STORAGE:
        fail(DtypeError, f"a constant of {computed}: write it in float32 and convert the result")
    stored = dtype if computed is FLOAT else None
    is_row = shape not in ((), (1,)) or (len(shape) > 0 and builder.n == 1)
    shown = Value(tuple(shape), Varies.SCALAR, computed, stored, is_row)
    return Tensor(builder, builder.add_const(as_stored(value, dtype), shown, location()))


def _filled(value: object) -> Callable:
    def make(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
        real = func(*args, **kwargs, device="meta")
        return _constant(builder, value, real.shape, _dtype(real, kwargs))

    return make


def _full(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    real = func(*args, **kwargs, device="meta")
    value = args[1] if len(args) > 1 else kwargs["fill_value"]
    return _constant(builder, value, real.shape, _dtype(real, kwargs))


def _number(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """`torch.tensor(2.0)`, and of lists of numbers; of other things torch makes a real tensor."""
    value = args[0] if args else kwargs.get("data")
    if isinstance(value, (list, tuple)) and any(isinstance(x, Tensor) for x in value):
        return _listed(builder, value, **{key: kwargs[key] for key in kwargs if key != "data"})
    if isinstance(value, (list, tuple)) and (numbers := _flat(value)):
        real = func(*args, **kwargs)  # raises where it is no array
        dtype = _dtype(real, kwargs)
        flat = cat([_constant(builder, x, torch.Size([1]), dtype) for x in numbers])
        return reshaped(flat, tuple(real.shape))
    if not isinstance(value, (bool, int, float)):
        return None
    real = func(*args, **kwargs, device="meta")
    return _constant(builder, value, real.shape, _dtype(real, kwargs))


def _flat(values: object) -> list | None:
    """The numbers of nested lists; None where there is something else."""
    if isinstance(values, (bool, int, float)):
        return [values]
    if not isinstance(values, (list, tuple)):
        return None
    parts = [_flat(each) for each in values]
    return None if None in parts else [x for each in parts for x in each]


def _eye(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Ones in the diagonal, and zeros elsewhere."""
    real = func(*args, **kwargs, device="meta")
    if not real.numel():
        return None
    rows, columns = (index(builder, size) for size in real.shape)
    return cast(reshaped(rows, (*rows._sizes, 1)) == columns, _dtype(real, kwargs))


def _listed(builder: Builder, values: list, dtype=None, requires_grad=False) -> Tensor:
    """`torch.tensor` of a list of numbers and of values that are one number each."""
    each = [
        x if isinstance(x, Tensor) else _number(builder, torch.tensor, (x,), {}) for x in values
    ]
    if any(x is None or x.ndim for x in each):
        fail(TraceError, "torch.tensor of a list takes numbers: write torch.stack or torch.cat")
    values = [as_number(x, "torch.tensor", "write torch.stack") for x in each]
    joined = cat([x.view(1) for x in values])
    return joined if dtype is None else joined.to(dtype)


def _arange(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """start + step * index. Of integers it is exact; floats are computed in float32."""
    names = ("end",) if len(args) == 1 else ("start", "end", "step")
    given = dict(zip(names, args, strict=False)) | kwargs
    start, step, end = given.get("start", 0), given.get("step", 1), given.get("end")
    if all(type(x) is int for x in (start, step, end)) and (end - start) * step > 0:
        count, dtype = len(range(start, end, step)), kwargs.get("dtype") or INT64
    else:  # the first one of a process takes torch 0.4 s
        real = func(*args, **kwargs, device="meta")
        count, dtype = real.numel(), _dtype(real, kwargs)
    if not count:
        return None
    columns = index(builder, count)
    if not dtype.is_floating_point:
        start, step = int(start), int(step)  # torch converts them before it computes
    elif isinstance(start, float) or isinstance(step, float):
        columns = cast(columns, FLOAT)
    columns = columns if step == 1 else columns * step
    columns = columns if start == 0 else columns + start
    return columns if dtype is INT64 else cast(columns, dtype)


def _random(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> NoReturn:
    fail(UnsupportedError, f"torch.{func.__name__} gives other numbers for each call; {RANDOM}")


def _linspace(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """Numbers at equal distances, in float32, from both ends to the middle, as torch has them."""
    _refuse_any_length(builder, func)
    real = func(*args, **kwargs, device="meta")
    if not real.numel():
        return None
    given = dict(zip(("start", "end", "steps"), args, strict=False)) | kwargs
    start, end, dtype = given["start"], given["end"], _dtype(real, kwargs)
    if not dtype.is_floating_point:
        fail(UnsupportedError, f"torch.{func.__name__} of integers is not supported: write "
             "torch.arange")  # fmt: skip
    last = real.numel() - 1
    place, step = cast(index(builder, last + 1), FLOAT), (end - start) / max(last, 1)
    result = torch.where(2 * place < last, start + step * place, end - step * (last - place))
    return cast(result if last else place + start, dtype)


def _refuse_any_length(builder: Builder, func: Callable) -> None:
    if builder.multiple is not None:
        what = f"torch.{func.__name__} beside rows of any length (dynamic_n=True)"
        fail(UnsupportedError, f"{what} is not supported: write torch.arange(x.shape[-1]), and "
             "compute with that")  # fmt: skip


def _logspace(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
    """The base to powers at equal distances, in float32."""
    names = ("start", "end", "steps", "base")
    given = dict(zip(names, args, strict=False)) | kwargs
    base = given.pop("base", 10.0)
    if base <= 0:
        fail(UnsupportedError, f"torch.logspace of base {base}: it takes one above 0")
    powers = _linspace(builder, func, (), given)
    return None if powers is None else cast(base**powers, powers.dtype)


def _window(formula: Callable) -> Callable:
    """A window of this formula, of places from 0 to 2, of which the middle is 1."""

    def make(builder: Builder, func: Callable, args: tuple, kwargs: dict) -> Tensor | None:
        _refuse_any_length(builder, func)
        given = dict(zip(("window_length", "periodic", "alpha", "beta"), args, strict=False))
        given |= kwargs
        _check_window(func, given)
        real = func(*args, **kwargs, device="meta")
        size = real.numel()
        if not size:
            return None
        last = size if given.get("periodic", True) else size - 1
        more = {key: given[key] for key in ("alpha", "beta") if key in given}
        if size == 1:
            return _constant(builder, 1.0, real.shape, _dtype(real, kwargs))
        place = cast(index(builder, size), FLOAT) * (2 / last)
        return cast(formula(place, **more), _dtype(real, kwargs))

    return make


def _check_window(func: Callable, given: dict) -> None:
    """Refuse what torch refuses of a window that is not on the device "meta"."""
    size, dtype = given.get("window_length"), given.get("dtype")
    if isinstance(size, int) and size < 0:
        fail(ShapeError, f"torch.{func.__name__}({size}): a window has no fewer than 0 elements")
    if dtype is not None and not dtype.is_floating_point:
        fail(DtypeError, f"torch.{func.__name__}(dtype={dtype}): a window is of floats, write "
             f".to({dtype}) behind it")  # fmt: skip


def _hann(place: Tensor) -> Tensor:
    return 0.5 - 0.5 * torch.cos(math.pi * place)


def _hamming(place: Tensor, alpha: float = 0.54, beta: float = 0.46) -> Tensor:
    return alpha - beta * torch.cos(math.pi * place)


def _blackman(place: Tensor) -> Tensor:
    angle = math.pi * place
    return 0.42 - 0.5 * torch.cos(angle) + 0.08 * torch.cos(2 * angle)


def _bartlett(place: Tensor) -> Tensor:
    return 1 - abs(place - 1)


# From each factory to what makes its symbolic result, or None for a real one.
FACTORIES: dict[Callable, Callable] = {
    torch.arange: _arange, torch.zeros: _filled(0), torch.ones: _filled(1), torch.full: _full,
    torch.empty: _filled(0), torch.linspace: _linspace, torch.eye: _eye,
    torch.logspace: _logspace, torch.hann_window: _window(_hann),
    torch.hamming_window: _window(_hamming), torch.blackman_window: _window(_blackman),
    torch.bartlett_window: _window(_bartlett),
    **dict.fromkeys((torch.tensor, torch.scalar_tensor, torch.as_tensor, torch.asarray), _number),
}  # fmt: skip


# Of a value that all rows share: torch makes a number of it, which has no gradient.


def _copied(data, *, dtype=None, device=None, requires_grad=False):
    value = as_number(data, "torch.tensor", "it is a tensor already, use it as it is")
    return copy(value) if dtype is None else value.to(dtype)


def _spread(size, fill_value, *, dtype=None, device=None, requires_grad=False):
    value = as_number(fill_value, "torch.full", "write value.expand(size)")
    return copy((value if dtype is None else value.to(dtype)).expand(size))


OF_VALUES: dict[Callable, Callable] = {
    torch.tensor: _copied, torch.scalar_tensor: _copied, torch.full: _spread,
}  # fmt: skip
# Which arguments of these are sizes.
_SIZES: dict[Callable, tuple[str, ...]] = {
    torch.arange: ("start", "end", "step"), torch.zeros: ("size",), torch.ones: ("size",),
    torch.full: ("size",), torch.empty: ("size",),
}  # fmt: skip
# What draws numbers is refused here: it would be drawn once, while the function is traced.
_DRAWS: dict[Callable, Callable] = {getattr(torch, name): _random for name in DRAWS}


# Methods of a tensor, whose dtype the new one has.


def _new(function: Callable) -> Callable:
    def method(input, *args, dtype=None, device=None, requires_grad=False):
        device = None if isinstance(device, Device) else device
        return function(*args, dtype=dtype or input.dtype, device=device)  # of the mode

    return method


for _name, _doc in {
    "zeros": "Zeros of this shape.", "ones": "Ones of this shape.",
    "empty": "Zeros of this shape, to be overwritten.",
    "full": "A constant of this shape.", "tensor": "torch.tensor(data).",
}.items():  # fmt: skip
    _doc = f"{_doc[:-1]}, in the dtype of input."
    _function = torch.zeros if _name == "empty" else getattr(torch, _name)
    attach(f"new_{_name}", _new(_function), _doc)

"""The elements of a row that a mask chooses: `x[mask]`, of which torch makes a shorter tensor.

How many there are is known only when the kernel runs. So all elements of the row are kept beside
the mask. A function of single elements is applied to all of them. A reduction gets what changes
nothing where the mask does not hold, such as 0 in a sum. Anything else raises.

Elements that are not chosen may become NaN or infinite on the way, as in `x[x > 0].log().sum()`.
They never reach a result, because a reduction chooses before it adds. They never reach a gradient
either, because the row and the numbers of the row are chosen before they are computed with.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import signature
from math import inf, nan
from types import FunctionType, MethodType
from typing import NoReturn

import torch

from ..errors import DtypeError, ShapeError, UnsupportedError
from . import hints
from .device import Device
from .functions import OPERATORS, implements
from .graph import Builder
from .ops import ELEMENTWISE, Op
from .promotion import BOOL, FLOAT, INT64, put_into
from .shapes import broadcast_to
from .statistics import root
from .tensor import KEYWORDS, Ragged, Shape, Tensor, call, copy, fail, location

OF_ALL = {
    "sum": 0, "nansum": 0, "count_nonzero": 0, "norm": 0, "vector_norm": 0, "any": 0,
    "prod": 1, "all": 1,
    "amax": -inf, "max": -inf, "logsumexp": -inf, "amin": inf, "min": inf,
}  # fmt: skip
"""From functions that give one result of all elements to what changes nothing in it."""
OF_EACH = {
    "softmax": -inf, "log_softmax": -inf, "softmin": inf, "cumsum": 0, "cumprod": 1,
    "logcumsumexp": -inf,
}  # fmt: skip
"""The same for functions that need all elements, and have a result for each of them."""

# What keeps the place of each element, and makes a result of that element alone.
_OF_ONE = ELEMENTWISE | {Op.CONST, Op.RESHAPE, Op.EXPAND}


class Selected(Ragged):
    """The elements of a value that a mask chooses, in their order, as a tensor of one axis."""

    __hash__ = object.__hash__

    @staticmethod
    def __new__(cls, elements: Tensor, mask: Tensor) -> Selected:
        dtype = elements._value.dtype
        return torch.Tensor._make_wrapper_subclass(cls, (1,), dtype=dtype, device="meta")

    def __init__(self, elements: Tensor, mask: Tensor):
        self._elements, self._mask, self._loc = elements, mask, location()

    @property
    def dtype(self) -> torch.dtype:
        """That of the elements."""
        return self._elements.dtype

    @property
    def shape(self) -> Shape:
        """How many elements there are, which is a value of the row."""
        return Shape((self._count(),))

    @property
    def ndim(self) -> int:
        """1, as in torch."""
        return 1

    @property
    def device(self) -> Device:
        """That of the arguments."""
        return self._elements.device

    def __repr__(self) -> str:
        return f"{self._elements!r}[mask]"

    def __format__(self, spec: str) -> str:
        return repr(self)

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func.__name__ == "__get__":
            raise AttributeError  # `__getattr__` knows the name
        return Tensor.__torch_function__(func, types, args, kwargs)

    __torch_dispatch__ = Tensor.__torch_dispatch__

    def __getattribute__(self, name: str):
        """Methods are those of `Tensor`, of which a wrong argument is an error of HTile."""
        method = None if name.startswith("_") or name in vars(Selected) else vars(Tensor).get(name)
        if isinstance(method, FunctionType):
            return MethodType(method, self)
        return super().__getattribute__(name)

    def __getattr__(self, name: str):
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(f"x[mask].{name} is not supported")

    def _refuse(self, what: str | None = None) -> NoReturn:
        if what is None:
            fail(UnsupportedError, f"x[mask] has no fixed length: {hints.RAGGED}", self._loc)
        fail(UnsupportedError, f"{what}, because x[mask] has no fixed length: {hints.RAGGED}")

    def _answer(self, spelling: str, function: Callable | None, args: tuple, kwargs: dict):
        name = spelling.rpartition(".")[2]
        if name.endswith("_") and not name.startswith("_"):
            self._elements = self._in_place(spelling, args, kwargs)._elements
            return self
        if name.startswith("__"):
            self._refuse(f"x[mask].{name} is not supported")
        is_first = bool(args) and args[0] is self
        if is_first and name in _OWN:
            return self._own(spelling, _OWN[name], args, kwargs)
        of_two = len(args) > 1 and isinstance(args[1], torch.Tensor)  # torch.max(x, y)
        if is_first and not of_two and name in OF_ALL | OF_EACH:
            return self._together(spelling, name, function, args[1:], kwargs)
        if function is not None and "reduction" in signature(function).parameters:
            return self._loss(spelling, function, args, kwargs)
        return self._of_each(spelling, function, args, kwargs)

    def _own(self, spelling: str, own: Callable, args: tuple, kwargs: dict):
        """What a function of `_OWN` gives."""
        kwargs = {KEYWORDS.get(key, key): value for key, value in kwargs.items()}
        try:
            signature(own).bind(*args, **kwargs)
        except TypeError as error:
            self._refuse(f"{spelling} with other arguments ({error}) is not supported")
        return own(*args, **kwargs)

    def _loss(self, spelling: str, function: Callable, args: tuple, kwargs: dict):
        """What a loss gives: those of the elements, or their mean or sum."""
        reduction = kwargs.get("reduction", signature(function).parameters["reduction"].default)
        others = ("size_average", "reduce", "weight")
        if reduction not in ("mean", "sum") or any(kwargs.get(key) is not None for key in others):
            return self._of_each(spelling, function, args, kwargs)
        each = self._of_each(spelling, function, args, {**kwargs, "reduction": "none"})
        return each.mean() if reduction == "mean" else each.sum()

    def _in_place(self, spelling: str, args: tuple, kwargs: dict) -> Selected:
        """What an in-place method gives, such as `x.mul_(2)`."""
        method = getattr(Tensor, spelling.rpartition(".")[2].rstrip("_"), None)
        if method is None or not args or args[0] is not self:
            self._refuse(f"{spelling} of x[mask] is not supported")
        return method(*args, **kwargs)

    def _filled(self, number: float) -> Tensor:
        """All elements, with a number where the mask does not hold."""
        dtype = self._elements._value.dtype
        if dtype is BOOL:
            number = number > 0
        elif dtype is not FLOAT:
            info = torch.iinfo(dtype)
            number = {inf: info.max, -inf: info.min}.get(number, number)
        return torch.where(self._mask, self._elements, number)

    def _count(self, *, dtype: torch.dtype = INT64) -> Tensor:
        """How many elements there are."""
        return self._mask.sum().to(dtype)

    def _together(self, spelling: str, name: str, function: Callable, args: tuple, kwargs: dict):
        order = args[0] if args else kwargs.get("p", kwargs.get("ord"))
        if name.endswith("norm") and type(order) in (int, float) and order < 0:
            self._refuse(f"{spelling} of order {order} of x[mask] is not supported")
        if name in ("max", "min") and (args or kwargs):
            self._refuse(f"x[mask].{name}(dim) is not supported, write x[mask].a{name}(dim)")
        number = OF_ALL[name] if name in OF_ALL else OF_EACH[name]
        result = call(spelling, function, (self._filled(number), *args), kwargs)
        return result if name in OF_ALL else Selected(result, self._mask)

    def _of_each(self, spelling: str, function: Callable | None, args: tuple, kwargs: dict):
        """What a function of single elements gives."""
        begin = len(self._elements._builder)
        args = tuple(self._beside(value) for value in args)
        kwargs = {key: self._beside(value) for key, value in kwargs.items()}
        result = call(spelling, function, args, kwargs)
        if not isinstance(result, Tensor) or not _is_of_each(result, self._elements, begin):
            self._refuse(f"{spelling} of x[mask] is not supported")
        return Selected(result, self._mask)

    def _beside(self, value: object) -> object:
        """What stands beside the elements, as a value of the row."""
        if isinstance(value, Selected):
            if not _is_same(self._mask._builder, self._mask._id, value._mask._id):
                fail(ShapeError, "x[mask] and y[other] may have different lengths: choose with "
                     "the same mask")  # fmt: skip
            return value._elements
        if not isinstance(value, Tensor):
            return value
        if value._sizes.numel() != 1:
            fail(ShapeError, f"x[mask] beside a value of shape {tuple(value._sizes)}: choose its "
                 "elements too, y[mask]")  # fmt: skip
        value = value.reshape(())
        return torch.where(self._mask, value, 1.0) if value._value.dtype is FLOAT else value


def selected(x: Tensor, mask: Tensor) -> Selected:
    """`x[mask]`, with a mask of the shape of `x`."""
    if tuple(mask._sizes) != tuple(x._sizes) or not x.ndim:
        fail(UnsupportedError, f"x[mask] has no fixed length, with a mask of shape "
             f"{tuple(mask._sizes)} and x of shape {tuple(x._sizes)}: "
             f"{hints.OTHER_MASK}")  # fmt: skip
    if x._value.dtype not in (FLOAT, BOOL, torch.int32, INT64):
        fail(DtypeError, f"x[mask] of {x._value.dtype}: write x.float()[mask]")
    elements, mask = copy(x), copy(mask)
    if x.ndim > 1:
        elements, mask = elements.reshape(-1), mask.reshape(-1)
    result = Selected(elements, mask)
    result._elements = result._filled(0)
    return result


@implements("masked_select")
def masked_select(input, mask):
    """x[mask], of as many elements as the mask chooses: it is computed with and reduced."""
    if mask._value.dtype is not BOOL:
        fail(DtypeError, f"masked_select takes a mask, got {mask._value.dtype}")
    shape = torch.broadcast_shapes(tuple(input._sizes), tuple(mask._sizes))
    return selected(broadcast_to(input, shape), broadcast_to(mask, shape))


def with_selected(x: Tensor, mask: Tensor, value: Selected) -> Tensor:
    """`x` with these elements where the mask holds, which has chosen them."""
    own = mask.reshape(-1) if mask.ndim > 1 else mask
    if not _is_same(mask._builder, own._id, value._mask._id):
        fail(ShapeError, "x[mask] = y[other]: the masks may choose different numbers of elements, "
             "so both have to be the same")  # fmt: skip
    elements = put_into(value._elements.reshape(tuple(x._sizes)), x, "x[mask] = value")
    return torch.where(mask, elements, x)


def _is_of_each(result: Tensor, elements: Tensor, begin: int) -> bool:
    """Whether an element of the result depends on that element alone of what was given.

    begin: the first node that was not there before.
    """
    if result._sizes != elements._sizes:
        return False
    builder, used = result._builder, {result._id}
    for id in range(result._id, begin - 1, -1):
        if id in used:
            if builder[id].op not in _OF_ONE:
                return False
            used |= set(builder[id].inputs)
    return True


def _is_same(builder: Builder, first: int, second: int) -> bool:
    """Whether two nodes compute the same of the same: a mask may be written twice."""
    pending, seen = [(first, second)], set()
    while pending:
        pair = pending.pop()
        if pair[0] == pair[1] or pair in seen:
            continue
        seen.add(pair)
        one, other = (builder[id] for id in pair)
        alike = one.op is other.op and one.arg == other.arg and one.value == other.value
        if not alike or len(one.inputs) != len(other.inputs):
            return False
        pending += zip(one.inputs, other.inputs, strict=True)
    return True


# what the number of the elements is part of


def _mean(x: Selected, dim=None, keepdim=False, *, dtype=None) -> Tensor:
    x = x.to(dtype) if dtype is not None else x
    if x._elements._value.dtype is not FLOAT:
        fail(DtypeError, f"the mean of {x._elements._value.dtype}: write x.float()")
    average = x.sum(dim, keepdim) / x._count(dtype=FLOAT)
    return average if dtype is None else average.to(dtype)


def _var_mean(x: Selected, dim=None, unbiased=True, keepdim=False, *, correction=None):
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    average = _mean(x)
    deviation = x - average
    squares = (deviation * deviation).sum(dim, keepdim)
    freedom = x._count(dtype=FLOAT) - (int(unbiased) if correction is None else correction)
    return squares / freedom.clamp(min=0.0), average.reshape((1,) if keepdim else ())


def _of_variance(made: Callable) -> Callable:
    """What is made of the variance and the mean, with the arguments of `var_mean`."""
    @wraps(_var_mean)
    def function(*args, **kwargs):
        return made(*_var_mean(*args, **kwargs))

    return function


def _rank(x: Selected, function: Callable, *args, **kwargs) -> Tensor:
    """An element by its rank, found by a function that leaves NaN out; NaN if any is chosen."""
    if x._elements._value.dtype is not FLOAT:
        fail(DtypeError, f"elements by rank of x[mask] of {x._elements._value.dtype}: write "
             "x.float()[mask]")  # fmt: skip
    others = torch.where(x._mask, x._elements, nan)
    return torch.where(x.isnan().any(), nan, function(others, *args, **kwargs))


def _median(x: Selected) -> Tensor:
    return _rank(x, torch.nanmedian)


def _quantile(x: Selected, q, dim=None, keepdim=False, *, interpolation="linear") -> Tensor:
    if x.dtype is not FLOAT:
        name = str(x.dtype).removeprefix("torch.")
        fail(DtypeError, f"quantile of {name}: it takes float32, write x.float()")
    return _rank(x, torch.nanquantile, q, dim, keepdim, interpolation=interpolation)


_OWN = {
    "mean": _mean,
    "median": _median,
    "quantile": _quantile,
    "var_mean": _var_mean,
    "var": _of_variance(lambda variance, mean: variance),
    "std": _of_variance(lambda variance, mean: root(variance)),
    "std_mean": _of_variance(lambda variance, mean: (root(variance), mean)),
    "numel": lambda x: x._count(),
    "nelement": lambda x: x._count(),
    "dim": lambda x: 1,
}  # fmt: skip
"""Methods whose results no neutral element gives."""


# operators


def _operator(function: Callable) -> Callable:
    return lambda self, *other: function(self, *other)


def _changing(function: Callable) -> Callable:
    def method(self, other):
        self._elements = function(self, other)._elements
        return self

    return method


for _name, _method in OPERATORS.items():
    _function = vars(Tensor)[_method]
    setattr(Selected, f"__{_name}__", _operator(_function))
    setattr(Selected, f"__r{_name}__", lambda self, other, f=_function: f(other, self))
    setattr(Selected, f"__i{_name}__", _changing(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "round", "pos"):
    if _function := vars(Tensor).get(f"__{_name}__"):
        setattr(Selected, f"__{_name}__", _operator(_function))
for _name in ("len", "iter", "bool", "float", "int", "index", "contains"):
    _told = "write mask.sum() for len(x[mask])" if _name == "len" else f"{_name}(x[mask])"
    setattr(Selected, f"__{_name}__", lambda self, *other, told=_told: self._refuse(told))

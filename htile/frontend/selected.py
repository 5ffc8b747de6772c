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
from .graph import Builder, Node
from .ops import ELEMENTWISE, Op, broadcast_shapes
from .promotion import BOOL, FLOAT, INT64, floating, put_into
from .shapes import broadcast_to
from .statistics import root
from .tensor import FUNCTIONS, KEYWORDS, Ragged, Shape, Tensor, call, copy, fail, location

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

    def __getitem__(self, index: object) -> Selected:
        """The elements that a mask of them chooses."""
        return _chosen(self._elements, self._mask & self._among(index))

    def __setitem__(self, index: object, value: object) -> None:
        """Give the elements that a mask of them chooses another value."""
        chosen = self._among(index)
        if isinstance(value, Selected):
            changed = with_selected(self._elements, self._mask & chosen, value)
            self._elements.copy_(changed)
        else:
            self._elements[chosen] = value

    def _among(self, index: object) -> Tensor:
        if not isinstance(index, Selected) or index._elements._value.dtype is not BOOL:
            self._refuse("x[mask][index] is not supported with an index that is no mask of them")
        return self._beside(index, False)

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
        if name.startswith("__"):
            self._refuse(f"x[mask].{name} is not supported")
        if not args and kwargs.get("input") is self:
            args, kwargs = (self,), {key: x for key, x in kwargs.items() if key != "input"}
        is_first = bool(args) and args[0] is self
        if name.endswith("_") and not is_first:
            fail(ShapeError, f"{spelling}: the elements of x[mask] cannot be put into a value of "
                 "another length")  # fmt: skip
        if is_first and name in _OWN:
            return self._own(spelling, _OWN[name], args, kwargs)
        is_of_two = "other" in kwargs or (len(args) > 1 and isinstance(args[1], torch.Tensor))
        if is_first and not is_of_two and name in OF_ALL | OF_EACH:
            return self._of_all(spelling, name, function, args[1:], kwargs)
        if is_first and name.removesuffix("_") in OF_EACH:  # x.cumsum_(0)
            result = getattr(self, name.removesuffix("_"))(*args[1:], **kwargs)
            self._elements.copy_(result._elements)
            return self
        if is_first and name in ("to", "type_as") and isinstance(args[-1], Tensor):
            args = (self, args[-1].dtype)  # of which it is all that counts
            function = FUNCTIONS[torch.Tensor.to][1]
        if function is not None and "reduction" in signature(function).parameters:
            return self._loss(spelling, name, function, args, kwargs)
        return self._of_each(spelling, _caller(spelling, function), args, kwargs)

    def _own(self, spelling: str, own: Callable, args: tuple, kwargs: dict):
        """What a function of `_OWN` gives."""
        kwargs = {KEYWORDS.get(key, key): value for key, value in kwargs.items()}
        try:
            signature(own).bind(*args, **kwargs)
        except TypeError as error:
            self._refuse(f"{spelling} with other arguments ({error}) is not supported")
        return own(*args, **kwargs)

    def _loss(self, spelling: str, name: str, function: Callable, args: tuple, kwargs: dict):
        """What a loss gives: those of the elements, or their mean or sum.

        torch hands the reduction on by its name. With weights the mean is divided by their sum in
        most losses, and by the number of elements in those of probabilities.
        """
        reduction = kwargs.get("reduction", signature(function).parameters["reduction"].default)
        is_by_number = kwargs.get("weight") is None or name.startswith("binary_cross_entropy")
        if reduction == "mean" and not is_by_number:
            self._refuse(f"{spelling} with a weight and reduction='mean' is not supported")
        to_each = _caller(spelling, function)
        is_old = any(kwargs.get(key) is not None for key in ("size_average", "reduce"))
        if is_old or reduction not in ("mean", "sum", "batchmean"):
            return self._of_each(spelling, to_each, args, kwargs)
        each = self._of_each(spelling, to_each, args, {**kwargs, "reduction": "none"})
        return each.sum() if reduction == "sum" else each.mean()

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

    def _of_all(self, spelling: str, name: str, function: Callable, args: tuple, kwargs: dict):
        """What a function of all elements gives."""
        order = args[0] if args else kwargs.get("p", kwargs.get("ord"))
        if name.endswith("norm") and type(order) in (int, float) and order < 0:
            self._refuse(f"{spelling} of order {order} of x[mask] is not supported")
        if name in ("max", "min") and (args or kwargs):
            self._refuse(f"x[mask].{name}(dim) is not supported, write x[mask].a{name}(dim)")
        number = OF_ALL[name] if name in OF_ALL else OF_EACH[name]
        is_of_integers = name == "logsumexp" and self._elements._value.dtype is not FLOAT
        given = self.float() if is_of_integers else self
        result = call(spelling, function, (given._filled(number), *args), kwargs)
        return result if name in OF_ALL else Selected(result, self._mask)

    def _of_each(self, spelling: str, function: Callable, args: tuple, kwargs: dict):
        """What a function of single elements gives: `self` where it has changed its elements."""
        args = tuple(self._beside(value, place > 0) for place, value in enumerate(args))
        kwargs = {key: self._beside(value, True) for key, value in kwargs.items()}
        begin = len(self._elements._builder)
        result = function(*args, **kwargs)
        if isinstance(result, bool):  # x.is_floating_point()
            return result
        if not isinstance(result, Tensor) or not _is_of_each(result, self._elements, begin):
            self._refuse(f"{spelling} of x[mask] is not supported")
        return self if result is self._elements else Selected(result, self._mask)

    def _beside(self, value: object, is_later: bool) -> object:
        """What stands beside the elements, as a value of the row.

        is_later: whether it is not the first argument, which may be changed in place. Integers may
        be divided by, so that they are not 0 where the mask does not hold.
        """
        if isinstance(value, Selected):
            if not _is_same(self._mask._builder, self._mask._id, value._mask._id):
                fail(ShapeError, "x[mask] and y[other] may have different lengths: choose with "
                     "the same mask")  # fmt: skip
            is_divisor = is_later and value._elements._value.dtype in (torch.int32, INT64)
            return value._filled(1) if is_divisor else value._elements
        if not isinstance(value, Tensor):
            return value
        if value._sizes.numel() != 1:
            fail(ShapeError, f"x[mask] beside a value of shape {tuple(value._sizes)}: choose its "
                 "elements too, y[mask]")  # fmt: skip
        value = value.reshape(())
        return value if value._value.dtype is BOOL else torch.where(self._mask, value, 1)


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
    return _chosen(elements, mask)


def _chosen(elements: Tensor, mask: Tensor) -> Selected:
    """The elements that a mask chooses, with 0 in place of the others.

    What waits to be turned round, as x.flip(0) does, is put in its place first.
    """
    elements, mask = (Tensor(each._builder, each._id) for each in (elements, mask))
    result = Selected(elements, mask)
    result._elements = result._filled(0)
    return result


@implements("masked_select")
def masked_select(input, mask):
    """x[mask], of as many elements as the mask chooses: it is computed with and reduced."""
    if mask._value.dtype is not BOOL:
        fail(DtypeError, f"masked_select takes a mask, got {mask._value.dtype}")
    shapes = tuple(input._sizes), tuple(mask._sizes)
    shape = broadcast_shapes(*shapes)
    if shape is None:
        fail(ShapeError, f"masked_select of shape {shapes[0]} with a mask of shape {shapes[1]}")
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

    begin: the first node that was not there before. All that was given is in the graph by then, so
    that the nodes behind it are those of the function.
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
        one, other = (_value_of(builder, id) for id in pair)
        alike = one.op is other.op and repr(one.arg) == repr(other.arg)  # -0.0 is not 0.0
        alike = alike and one.value == other.value
        if not alike or len(one.inputs) != len(other.inputs):
            return False
        pending += zip(one.inputs, other.inputs, strict=True)
    return True


def _caller(spelling: str, function: Callable | None) -> Callable:
    """The function as torch calls it."""
    return lambda *args, **kwargs: call(spelling, function, args, kwargs)


def _value_of(builder: Builder, id: int) -> Node:
    """The node of a value, whether its gradient is taken or not: a mask has none."""
    while builder[id].op is Op.STOP:
        id = builder[id].inputs[0]
    return builder[id]


# functions of all elements whose results no neutral element gives


def _mean(x: Selected, dim=None, keepdim=False, *, dtype=None) -> Tensor:
    x = x.to(dtype) if dtype is not None else x
    floating(x._elements, "the mean")
    average = x.sum(dim, keepdim) / x._count(dtype=FLOAT)
    return average if dtype is None else average.to(dtype)


def _var_mean(x: Selected, dim=None, unbiased=True, keepdim=False, *, correction=None):
    if isinstance(dim, bool):  # torch.var(x, unbiased)
        dim, unbiased = None, dim
    if not isinstance(unbiased, bool):
        x._refuse(f"a variance with unbiased={unbiased!r} is not supported")
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
    floating(x._elements, "an element by rank of x[mask]")
    others = torch.where(x._mask, x._elements, nan)
    return torch.where(x.isnan().any(), nan, function(others, *args, **kwargs))


def _median(x: Selected) -> Tensor:
    return _rank(x, torch.nanmedian)


def _quantile(x: Selected, q, dim=None, keepdim=False, *, interpolation="linear") -> Tensor:
    if x.dtype is not FLOAT:
        name = str(x.dtype).removeprefix("torch.")
        fail(DtypeError, f"quantile of {name}: it takes float32, write x.float()")
    return _rank(x, torch.nanquantile, q, dim, keepdim, interpolation=interpolation)


def _nanmean(x: Selected, dim=None, keepdim=False, *, dtype=None) -> Tensor:
    number = torch.logical_not(x.isnan()).sum(dim, keepdim)
    return x.nansum(dim, keepdim, dtype=dtype) / number


def _dot(x: Selected, tensor: Selected) -> Tensor:
    if not isinstance(tensor, Selected) or tensor.dtype is not x.dtype:
        fail(ShapeError, "x[mask].dot(y) takes elements of the same mask and dtype, y[mask]")
    return (x * tensor).sum()


_OWN = {
    "mean": _mean,
    "nanmean": _nanmean,
    "dot": _dot,
    "masked_select": lambda x, mask: x[mask],
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
"""Those functions, by their names."""


# operators


def _binary(function: Callable) -> Callable:
    return lambda self, *other: function(self, *other)


def _in_place(spelling: str, function: Callable) -> Callable:
    return lambda self, other: self._of_each(spelling, function, (self, other), {})


for _name, _method in OPERATORS.items():
    _function = vars(Tensor)[_method]
    setattr(Selected, f"__{_name}__", _binary(_function))
    setattr(Selected, f"__r{_name}__", lambda self, other, f=_function: f(other, self))
for _name in ("eq", "ne", "lt", "le", "gt", "ge", "neg", "abs", "invert", "round", "pos"):
    if _function := vars(Tensor).get(f"__{_name}__"):
        setattr(Selected, f"__{_name}__", _binary(_function))
for _name in ("len", "iter", "bool", "float", "int", "index", "contains"):
    _told = f"{_name}(x[mask]) is not supported"
    _told = "write mask.sum() for len(x[mask])" if _name == "len" else _told
    setattr(Selected, f"__{_name}__", lambda self, *other, told=_told: self._refuse(told))


def enter_operator_in_place(name: str, function: Callable) -> None:
    """Add an operator such as `+=`, whose function for tensors is made after this module."""
    setattr(Selected, f"__i{name}__", _in_place(f"__i{name}__", function))

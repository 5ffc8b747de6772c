"""What torch's functions and methods do with symbolic tensors: the primitive ones.

Each entry is a Python function under torch's names; `implements` puts it in the table behind
`__torch_function__` and makes it a method where torch has one. Operands are brought to torch's
promoted dtype here; htile.frontend.composites builds the rest from these.
"""

from __future__ import annotations

import operator
from collections.abc import Callable

import torch

from ..errors import DtypeError, TraceError, UnsupportedError
from .ops import Op
from .promotion import (
    BOOL,
    FLOAT,
    Number,
    convert,
    filled,
    not_zero,
    number,
    numeric,
    operand,
    refuse,
    result_dtype,
    scalar,
    together,
)
from .tensor import FUNCTIONS, Tensor, call, fail, node


def implements(*spellings: str, method: bool = True) -> Callable:
    """Enter a function under torch's names; a dotted one (`linalg.norm`) means that place only."""

    def enter(function: Callable) -> Callable:
        for spelling in spellings:
            if "." in spelling:
                FUNCTIONS[operator.attrgetter(spelling)(torch)] = f"torch.{spelling}", function
                continue
            for module, prefix in (
                (torch.special, "torch.special"),
                (torch.nn.functional, "F"),
                (torch, "torch"),
            ):
                if (known := getattr(module, spelling, None)) is not None:
                    FUNCTIONS[known] = f"{prefix}.{spelling}", function
            if method and hasattr(torch.Tensor, spelling):
                attach(spelling, function)
        return function

    return enter


def attach(name: str, function: Callable) -> None:
    """Make a method of `Tensor`; its first argument is the tensor."""

    def method(self, *args, **kwargs):
        return call(f"x.{name}", function, (self, *args), kwargs)

    method.__name__ = name
    method.__doc__ = function.__doc__
    setattr(Tensor, name, method)


# elementwise, one operand


def _float_unary(op: Op) -> Callable:
    return lambda input: node(op, *together(input, floating=True))


def _numeric_unary(op: Op) -> Callable:
    return lambda input: node(op, numeric(input, op.value))


def _rounding(op: Op) -> Callable:
    def function(input, *, decimals=0):
        if decimals:
            fail(UnsupportedError, "torch.round(decimals=...) is not supported; scale, then round")
        return node(op, input) if numeric(input, op.value)._value.dtype is FLOAT else input

    return function


def _same(input, *, memory_format=None):
    return input


# fmt: off
UNARY = {
    "sqrt": Op.SQRT, "rsqrt": Op.RSQRT, "exp": Op.EXP, "exp2": Op.EXP2, "expm1": Op.EXPM1,
    "log": Op.LOG, "log2": Op.LOG2, "log10": Op.LOG10, "log1p": Op.LOG1P, "sin": Op.SIN,
    "cos": Op.COS, "tanh": Op.TANH, "sigmoid": Op.SIGMOID, "expit": Op.SIGMOID, "erf": Op.ERF,
}
# fmt: on
for _name, _op in UNARY.items():
    implements(_name)(_float_unary(_op))
for _name, _op in {"neg": Op.NEG, "negative": Op.NEG, "abs": Op.ABS, "absolute": Op.ABS}.items():
    implements(_name)(_numeric_unary(_op))
for _op in (Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC):
    implements(_op.value)(_rounding(_op))
implements("fix")(_rounding(Op.TRUNC))
implements("clone", "contiguous", "detach")(_same)


@implements("positive")
def positive(input):
    return numeric(input, "+")


@implements("sign", "sgn")
def sign(input):
    return input if input._value.dtype is BOOL else node(Op.SIGN, input)


@implements("logical_not")
def logical_not(input):
    return node(Op.NOT, not_zero(input))


@implements("bitwise_not")
def bitwise_not(input):
    return node(Op.NOT, _mask(input))


# elementwise, two operands

_OF_MASKS = {Op.ADD: Op.OR, Op.MUL: Op.AND, Op.MAXIMUM: Op.OR, Op.MINIMUM: Op.AND}


def arithmetic(op: Op, a: object, b: object) -> Tensor:
    """`a op b` after promotion; of two masks the logical operation that torch means."""
    a, b = together(a, b)
    if a._value.dtype is BOOL:
        if op not in _OF_MASKS:
            refuse(op.value, a, "convert the masks first, x.int() or x.float()")
        op = _OF_MASKS[op]
    return node(op, a, b)


def scaled(x: object, factor: Number) -> object:
    """`x * factor`, or `x` itself for 1."""
    if type(factor) is int and factor == 1:
        return x
    return arithmetic(Op.MUL, x, factor) if isinstance(x, Tensor) else x * factor


@implements("add")
def add(input, other, *, alpha=1):
    return arithmetic(Op.ADD, input, scaled(other, alpha))


@implements("sub", "subtract")
def sub(input, other, *, alpha=1):
    for x in (input, other):
        if isinstance(x, bool) or (isinstance(x, Tensor) and x._value.dtype is BOOL):
            fail(DtypeError, "- of bool is not defined: ~k inverts a mask, a ^ b compares two")
    return arithmetic(Op.SUB, input, scaled(other, alpha))


@implements("rsub", method=False)
def rsub(input, other, *, alpha=1):
    return sub(other, input, alpha=alpha)


@implements("mul", "multiply")
def mul(input, other):
    return arithmetic(Op.MUL, input, other)


@implements("div", "divide", "true_divide")
def div(input, other, *, rounding_mode=None):
    if rounding_mode == "floor":
        return floor_divide(input, other)
    if rounding_mode not in (None, "trunc"):
        fail(TraceError, f"rounding_mode={rounding_mode!r}: expected None, 'floor' or 'trunc'")
    if rounding_mode and not result_dtype(operand(input), operand(other)).is_floating_point:
        fail(UnsupportedError, "rounding_mode='trunc' of integers is not supported; use x // y")
    quotient = node(Op.DIV, *together(input, other, floating=True))
    return node(Op.TRUNC, quotient) if rounding_mode else quotient


@implements("floor_divide")
def floor_divide(input, other):
    return arithmetic(Op.FLOORDIV, input, other)


@implements("remainder")
def remainder(input, other):
    return arithmetic(Op.MOD, input, other)


@implements("maximum")
def maximum(input, other):
    return arithmetic(Op.MAXIMUM, input, other)


@implements("minimum")
def minimum(input, other):
    return arithmetic(Op.MINIMUM, input, other)


@implements("reciprocal")
def reciprocal(input):
    return div(1.0, input)


@implements("square")
def square(input):
    return pow(input, 2)


_POWERS = {
    1.0: lambda x: x,
    2.0: lambda x: mul(x, x),
    3.0: lambda x: mul(mul(x, x), x),
    0.5: lambda x: node(Op.SQRT, x),
    -0.5: lambda x: node(Op.RSQRT, x),
    -1.0: lambda x: div(1.0, x),
    -2.0: lambda x: div(1.0, mul(x, x)),
}


@implements("pow")
def pow(input, exponent):
    x, e = operand(input), operand(exponent)
    dtype = result_dtype(x, e)
    if dtype is BOOL:
        refuse("**", x if isinstance(x, Tensor) else e, "convert it first, x.int() or x.float()")
    if isinstance(e, Tensor):
        if dtype is not FLOAT:
            fail(UnsupportedError, "an integer power by a tensor is not supported; use x.float()")
        if not isinstance(x, Tensor) and x == 2:
            return node(Op.EXP2, convert(e, FLOAT))
        return node(Op.POW, *together(x, e))
    x = convert(x, dtype)
    if e == 0:
        return filled(x, 1)
    if dtype is FLOAT:
        return _POWERS[e](x) if e in _POWERS else node(Op.POW, *together(x, e))
    if e < 0:
        fail(DtypeError, f"an integer to the power {e}: write x.float() ** {e}")
    result = None
    while e:  # square and multiply
        if e & 1:
            result = x if result is None else node(Op.MUL, result, x)
        if e := e >> 1:
            x = node(Op.MUL, x, x)
    return result


def _comparison(op: Op) -> Callable:
    def function(input, other):
        a, b = together(input, other)
        if a._value.dtype is BOOL:
            if op in (Op.EQ, Op.NE):
                differ = node(Op.XOR, a, b)
                return differ if op is Op.NE else node(Op.NOT, differ)
            a, b = convert(a, torch.int32), convert(b, torch.int32)
        return node(op, a, b)

    return function


for _op, _names in {
    Op.EQ: ("eq",),
    Op.NE: ("ne", "not_equal"),
    Op.LT: ("lt", "less"),
    Op.LE: ("le", "less_equal"),
    Op.GT: ("gt", "greater"),
    Op.GE: ("ge", "greater_equal"),
}.items():
    implements(*_names)(_comparison(_op))


def _mask(x: object) -> object:
    dtype = x._value.dtype if isinstance(x, Tensor) else type(x)
    if dtype not in (BOOL, bool):
        fail(UnsupportedError, "bitwise operations are for masks (bool); compare the numbers first")
    return x


def _logical(op: Op, prepare: Callable) -> Callable:
    def function(input, other):
        a, b = (prepare(operand(x)) for x in (input, other))
        return node(op, *together(a, b))

    return function


def _truth(x: Tensor | Number) -> Tensor | bool:
    return not_zero(x) if isinstance(x, Tensor) else bool(x)


for _op in (Op.AND, Op.OR, Op.XOR):
    implements(f"logical_{_op.value}")(_logical(_op, _truth))
    implements(f"bitwise_{_op.value}")(_logical(_op, _mask))


@implements("where", method=False)
def where(condition, input, other):
    if operand(condition) is not condition or not isinstance(condition, Tensor):
        fail(TraceError, "torch.where needs a condition on tensors; for a Python bool write if")
    if condition._value.dtype is not BOOL:
        refuse("torch.where", condition, "its condition is a mask, write x != 0")
    given = [operand(x) for x in (input, other)]
    dtype = result_dtype(*given)
    branches = [
        convert(x, dtype) if isinstance(x, Tensor) else scalar(condition, x, dtype) for x in given
    ]
    return node(Op.WHERE, condition, *branches)


attach("where", lambda input, condition, other: where(condition, input, other))


@implements("masked_fill")
def masked_fill(input, mask, value):
    if isinstance(operand(value), Tensor):
        value = convert(value, input._value.dtype)
    else:
        value = scalar(input, value, input._value.dtype)
    return where(mask, value, input)


@implements("clamp", "clip")
def clamp(input, min=None, max=None):
    bounds = [b for b in (min, max) if b is not None]
    if not bounds:
        fail(TraceError, "clamp needs min, max or both: write x.clamp(min=0.0)")
    dtype = result_dtype(input, *map(operand, bounds))
    if dtype is BOOL and not all(isinstance(b, Tensor) for b in bounds):
        refuse("clamp to a number", input, "write it with & and |")
    x = convert(input, dtype)
    for op, bound in ((Op.MAXIMUM, min), (Op.MINIMUM, max)):
        if bound is not None:
            bound = convert(bound, dtype) if isinstance(bound, Tensor) else number(bound, dtype)
            x = arithmetic(op, x, bound)
    return x


implements("clamp_min")(lambda input, min: clamp(input, min=min))
implements("clamp_max")(lambda input, max: clamp(input, max=max))


# operators


def _reflected(function: Callable) -> Callable:
    return lambda self, other: function(other, self)


def _comparable(function: Callable) -> Callable:
    def method(self, other):
        foreign = other is None or isinstance(other, (str, type, torch.dtype))
        return NotImplemented if foreign else function(self, other)

    return method


_METHODS = vars(Tensor)
for _name, _function in {
    "add": add, "sub": sub, "mul": mul, "truediv": div, "floordiv": floor_divide,
    "mod": remainder, "pow": pow, "and": _METHODS["bitwise_and"], "or": _METHODS["bitwise_or"],
    "xor": _METHODS["bitwise_xor"],
}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", lambda self, other, f=_function: f(self, other))
    setattr(Tensor, f"__r{_name}__", _reflected(_function))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tensor, f"__{_name}__", _comparable(_METHODS[_name]))
for _name, _method in {"neg": "neg", "pos": "positive", "abs": "abs", "invert": "bitwise_not",
                       "round": "round", "floor": "floor", "ceil": "ceil", "trunc": "trunc",
                       }.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _METHODS[_method])

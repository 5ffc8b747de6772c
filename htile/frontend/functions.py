"""What torch's functions and methods do with symbolic tensors: the primitive ones.

Each entry is a function with torch's parameter names and one line of docstring. `implements` puts
it in the table behind `__torch_function__` and makes it a method where torch has one. Operands are
brought to torch's promoted dtype here; htile.frontend.composites builds the rest from these.
"""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable

import torch

from ..errors import DtypeError, ShapeError, TraceError
from .bits import bitwise, inverted
from .integer_powers import integer_power
from .ops import Op, Value, Varies
from .promotion import (
    BOOL,
    BYTES,
    FLOAT,
    Number,
    byte,
    cast,
    convert,
    filled,
    in_32_bits,
    into,
    not_zero,
    numeric,
    operand,
    real,
    refuse,
    result_dtype,
    scalar,
    together,
)
from .slopes import Slope
from .tensor import FUNCTIONS, Tensor, call, constant, copy, fail, node

PLACES = {"torch.special": torch.special, "F": torch.nn.functional, "torch": torch}
"""Where torch may have a function. Of one that several modules hold, the last spelling wins."""


_BESIDE_DIM = frozenset({"sum", "mean", "prod", "logsumexp", "max", "min"})
"""The methods of which torch takes `keepdim` only where `dim` is given."""


def implements(
    *spellings: str, method: bool = True, check: Callable | None = None
) -> Callable[[Callable], Callable]:
    """Enter a function under torch's names; a dotted one (`linalg.norm`) means that place only.

    check: called as `check(input, name)` before the function; its result replaces the first
        operand. The checked function is entered, and the unchecked one is returned.
    """

    def enter(function: Callable) -> Callable:
        @functools.wraps(function)
        def checked(input, *args, **kwargs):
            return function(check(input, spellings[0]), *args, **kwargs)

        entry = checked if check else function
        for spelling in spellings:
            if "." in spelling:
                FUNCTIONS[operator.attrgetter(spelling)(torch)] = f"torch.{spelling}", entry
                continue
            for prefix, module in PLACES.items():
                if hasattr(module, spelling):
                    FUNCTIONS[getattr(module, spelling)] = f"{prefix}.{spelling}", entry
            if method and hasattr(torch.Tensor, spelling):
                attach(spelling, entry)
        return function

    return enter


def formulas(table: dict[str, tuple[str, Callable]], check: Callable | None = None) -> None:
    """Enter functions of one line: {names: (docstring, function)}; `check` as above."""
    for names, (doc, function) in table.items():
        function.__doc__ = doc
        implements(*names.split(), check=check)(function)


def attach(name: str, function: Callable, doc: str = "") -> None:
    """Make a method of `Tensor`; its first argument is the tensor."""
    function.__doc__ = function.__doc__ or doc

    def method(self, *args, **kwargs):
        if name in _BESIDE_DIM and not args and {"keepdim", "keepdims"} & {*kwargs}:
            if not {"dim", "axis"} & {*kwargs}:
                fail(TraceError, f"x.{name}(keepdim=True) without dim: torch takes keepdim beside "
                     f"dim only, write x.{name}(-1, keepdim=True)")  # fmt: skip
        return call(f"x.{name}", function, (self, *args), kwargs)

    method.__name__, method.__doc__ = name, function.__doc__
    FUNCTIONS[getattr(torch.Tensor, name)] = f"x.{name}", function
    setattr(Tensor, name, method)


# elementwise, one operand

MOST_DECIMALS = 39  # 10 to this power is infinite in float32, as torch has it
ROUND = "round to {0} places: torch takes their number by its name, write x.round(decimals={0})"


def _unary(op: Op) -> Callable:
    return lambda input: node(op, input)


def _rounding(op: Op, of_log2: Op | None = None) -> Callable:
    """of_log2: the operation for a logarithm to base 2, whose own rounding would show."""

    def function(input):
        made = input._builder[input._id]
        while made.op is Op.STOP:
            made = input._builder[made.inputs[0]]
        if of_log2 is not None and made.op is Op.LOG2:
            return node(of_log2, Tensor(input._builder, *made.inputs))
        return node(op, input) if input._value.dtype is FLOAT else input

    return function


def _rounded(input, *places, decimals=0):
    if places:  # of Python's round(x, 2) and of x.round(2)
        fail(TraceError, ROUND.format(places[0]))
    if type(decimals) is not int:
        fail(TraceError, f"round(decimals={decimals!r}): expected a Python integer")
    if not decimals:
        return _rounding(Op.ROUND)(input)
    if input._value.dtype is not FLOAT:
        refuse("round(decimals=...)", input, "leave decimals out")
    power = 10.0 ** min(abs(decimals), MOST_DECIMALS)
    return node(Op.ROUND, input * power) / power if decimals > 0 else (
        node(Op.ROUND, input / power) * power
    )


_rounded.__signature__ = inspect.Signature([
    p for p in inspect.signature(_rounded).parameters.values() if p.name != "places"
])  # fmt: skip


formulas({
    "sqrt": ("The square root.", _unary(Op.SQRT)),
    "rsqrt": ("One over the square root.", _unary(Op.RSQRT)),
    "exp": ("e to the power x.", _unary(Op.EXP)),
    "exp2": ("2 to the power x.", _unary(Op.EXP2)),
    "expm1": ("exp(x) - 1, exact for small x.", _unary(Op.EXPM1)),
    "log": ("The natural logarithm.", _unary(Op.LOG)),
    "log2": ("The logarithm to base 2.", _unary(Op.LOG2)),
    "log10": ("The logarithm to base 10.", _unary(Op.LOG10)),
    "log1p": ("log(1 + x), exact for small x.", _unary(Op.LOG1P)),
    "sin": ("The sine.", _unary(Op.SIN)),
    "cos": ("The cosine.", _unary(Op.COS)),
    "tanh": ("The hyperbolic tangent.", _unary(Op.TANH)),
    "sigmoid expit": ("1 / (1 + exp(-x)).", _unary(Op.SIGMOID)),
    "erf": ("The error function.", _unary(Op.ERF)),
}, real)  # fmt: skip
formulas({
    "neg negative": ("-x.", _unary(Op.NEG)),
    "abs absolute": ("The magnitude.", _unary(Op.ABS)),
    "floor": ("The next integer below.", _rounding(Op.FLOOR, Op.FLOOR_LOG2)),
    "ceil": ("The next integer above.", _rounding(Op.CEIL, Op.CEIL_LOG2)),
    "round": ("The nearest integer, of two the even one; or of so many decimals.", _rounded),
    "trunc fix": ("The next integer towards zero.", _rounding(Op.TRUNC)),
}, numeric)  # fmt: skip
formulas({
    "sign sgn": ("-1, 0 or 1.", lambda input:
        input if input._value.dtype is BOOL else node(Op.SIGN, input)),
    "logical_not": ("Whether x is zero.", lambda input: node(Op.NOT, not_zero(in_32_bits(input)))),
    "bitwise_not": ("~x, of a mask or of the bits of integers.", inverted),
    "clone": ("A copy.", lambda input, *, memory_format=None: copy(input)),
})  # fmt: skip


# elementwise, two operands

_OF_MASKS = {Op.ADD: Op.OR, Op.MUL: Op.AND, Op.MAXIMUM: Op.OR, Op.MINIMUM: Op.AND}


def arithmetic(op: Op, a: object, b: object, slope: Slope | None = None) -> Tensor:
    """`a op b` after promotion; of two masks the logical operation that torch means.

    slope: of a MAXIMUM or MINIMUM of floats whose ties are not shared.
    """
    is_by_zero = op in (Op.FLOORDIV, Op.MOD) and not isinstance(b, Tensor) and operand(b) == 0
    a, b = together(a, b)
    if is_by_zero and a._value.dtype is not FLOAT:
        fail(TraceError, "a division (//, %) of integers by zero")
    if a._value.dtype is BOOL:
        if op not in _OF_MASKS:
            refuse(op.value, a, "convert the masks first, x.int() or x.float()")
        op = _OF_MASKS[op]
    return node(op, a, b, arg=slope if a._value.dtype is FLOAT else None)


def _scaled(a: object, b: object, factor: Number | Tensor) -> object:
    """`b * factor` in the dtype of `a + b`; `b` itself for 1. A symbolic factor is a float."""
    if isinstance(factor, Tensor):
        if factor._value.varies is not Varies.SCALAR or factor._value.dtype is not FLOAT:
            fail(TraceError, "alpha is one number for all rows: write the product, a + alpha * b")
        if not result_dtype(operand(a), operand(b)).is_floating_point:
            fail(DtypeError, "alpha of integers cannot be a float parameter: make it htile.Static")
        return arithmetic(Op.MUL, b, factor)
    if type(factor) is int and factor == 1:
        return b
    dtype = result_dtype(operand(a), operand(b))
    if isinstance(factor, float) and not dtype.is_floating_point:
        fail(DtypeError, f"alpha={factor} of integers: write x.float(), or an integer alpha")
    if isinstance(factor, bool) and dtype is not BOOL:
        fail(DtypeError, f"alpha={factor} of numbers: write alpha={int(factor)}")
    if not isinstance(b, Tensor):
        return b * factor
    b = convert(b, dtype)
    return node(Op.MUL if dtype is not BOOL else Op.AND, b, scalar(b, factor, dtype))


@implements("sub", "subtract")
def sub(input, other, *, alpha=1):
    """input - alpha * other."""
    for x in (input, other):
        if isinstance(x, bool) or (isinstance(x, Tensor) and x._value.dtype is BOOL):
            fail(DtypeError, "- of bool is not defined: ~k inverts a mask, a ^ b compares two")
    return arithmetic(Op.SUB, input, _scaled(input, other, alpha))


@implements("div", "divide", "true_divide")
def div(input, other, *, rounding_mode=None):
    """input / other; rounding_mode is None, "floor" or "trunc"."""
    if rounding_mode == "floor":
        return arithmetic(Op.FLOORDIV, input, other)
    if rounding_mode not in (None, "trunc"):
        fail(TraceError, f"rounding_mode={rounding_mode!r}: expected None, 'floor' or 'trunc'")
    if rounding_mode and not result_dtype(operand(input), operand(other)).is_floating_point:
        below = arithmetic(Op.FLOORDIV, input, other)
        rest = arithmetic(Op.MOD, input, other)  # of the divisor's sign
        is_less = (rest != 0) & ((rest < 0) != (operand(input) < 0))
        return below + is_less
    quotient = node(Op.DIV, *together(input, other, floating=True))
    return node(Op.TRUNC, quotient) if rounding_mode else quotient


def _binary(op: Op) -> Callable:
    return lambda input, other: arithmetic(op, input, other)


POWERS = {
    1.0: copy,
    2.0: lambda x: x * x,
    3.0: lambda x: x * x * x,
    0.5: lambda x: node(Op.SQRT, x),
    -0.5: lambda x: node(Op.RSQRT, x),
    -1.0: lambda x: 1.0 / x,
    -2.0: lambda x: 1.0 / (x * x),
}


@implements("pow")
def pow(input, exponent):
    """input ** exponent; of integers one of the two must be a number."""
    x, e = operand(input), operand(exponent)
    dtype = result_dtype(x, e)
    if dtype is BOOL:
        refuse("**", x if isinstance(x, Tensor) else e, "convert it first, x.int() or x.float()")
    if isinstance(e, Tensor):
        if dtype is not FLOAT:
            return integer_power(x, e, dtype)
        if not isinstance(x, Tensor) and x == 2:
            return node(Op.EXP2, convert(e, FLOAT))
        return node(Op.POW, *together(x, e))
    x = convert(x, dtype)
    if e == 0:
        return filled(x, 1)
    if dtype is FLOAT:
        return POWERS[e](x) if e in POWERS else node(Op.POW, *together(x, e))
    if e < 0:
        fail(DtypeError, f"an integer to the power {e}: write x.float() ** {e}")
    result = None
    while e:  # square and multiply
        if e & 1:
            result = copy(x) if result is None else node(Op.MUL, result, x)
        if e := e >> 1:
            x = node(Op.MUL, x, x)
    return result


def _comparison(op: Op) -> Callable:
    def function(input, other):
        a, b = together(in_32_bits(input, other), in_32_bits(other, input))
        if a._value.dtype is BOOL:
            if op in (Op.EQ, Op.NE):
                differ = node(Op.XOR, a, b)
                return differ if op is Op.NE else node(Op.NOT, differ)
            a, b = convert(a, torch.int32), convert(b, torch.int32)
        return node(op, a, b)

    return function


def _truth(x: Tensor | Number) -> Tensor | bool:
    return not_zero(in_32_bits(x)) if isinstance(x, Tensor) else bool(x)


def _logical(op: Op) -> Callable:
    return lambda input, other: node(op, *together(*(_truth(operand(x)) for x in (input, other))))


maximum, minimum = _binary(Op.MAXIMUM), _binary(Op.MINIMUM)
formulas({
    "add": ("input + alpha * other; of two masks, or.", lambda input, other, *, alpha=1:
        arithmetic(Op.ADD, input, _scaled(input, other, alpha))),
    "rsub": ("other - alpha * input.", lambda input, other, *, alpha=1:
        sub(other, input, alpha=alpha)),
    "mul multiply": ("input * other; of two masks, and.", _binary(Op.MUL)),
    "floor_divide": ("input // other.", _binary(Op.FLOORDIV)),
    "remainder": ("input % other, with the sign of other.", _binary(Op.MOD)),
    "maximum": ("The larger; NaN if either is.", maximum),
    "minimum": ("The smaller; NaN if either is.", minimum),
    "reciprocal": ("1 / x.", lambda input: 1.0 / input),
    "square": ("x * x.", lambda input: input**2),
    "eq": ("input == other.", _comparison(Op.EQ)),
    "ne not_equal": ("input != other.", _comparison(Op.NE)),
    "lt less": ("input < other.", _comparison(Op.LT)),
    "le less_equal": ("input <= other.", _comparison(Op.LE)),
    "gt greater": ("input > other.", _comparison(Op.GT)),
    "ge greater_equal": ("input >= other.", _comparison(Op.GE)),
    "logical_and": ("Whether both are nonzero.", _logical(Op.AND)),
    "logical_or": ("Whether one is nonzero.", _logical(Op.OR)),
    "logical_xor": ("Whether exactly one is nonzero.", _logical(Op.XOR)),
    "bitwise_and": ("input & other, of masks or of the bits of integers.", bitwise(Op.AND, "&")),
    "bitwise_or": ("input | other, of masks or of the bits of integers.", bitwise(Op.OR, "|")),
    "bitwise_xor": ("input ^ other, of masks or of the bits of integers.", bitwise(Op.XOR, "^")),
    "bitwise_left_shift": ("input << other, of integers; 0 by a negative number of bits, or by as "
        "many as there are.", bitwise(Op.LSHIFT, "<<")),
    "bitwise_right_shift": ("input >> other, of integers, which keeps the sign; by a negative "
        "number of bits, or by as many as there are, 0, or -1 below zero.",
        bitwise(Op.RSHIFT, ">>")),
})  # fmt: skip


@implements("where", method=False)
def where(condition, input, other):
    """input where the condition holds, other elsewhere; the condition is a mask."""
    return chosen(condition, input, other)


def chosen(condition: object, input: object, other: object, slope: Slope | None = None) -> Tensor:
    """`torch.where`, with another slope than that of the chosen branch."""
    if operand(condition) is not condition or not isinstance(condition, Tensor):
        fail(TraceError, "torch.where needs a condition on tensors; for a Python bool write if")
    if condition._value.dtype is not BOOL:
        refuse("torch.where", condition, "its condition is a mask, write x != 0")
    return node(Op.WHERE, condition, *together(input, other, like=condition), arg=slope)


def with_slope_of(x: Tensor, result: Tensor) -> Tensor:
    """`result`, whose gradient goes to `x`, of the same shape, as if it were `x`."""
    always = constant(x, True, Value((), Varies.SCALAR, BOOL))
    return node(Op.WHERE, always, result, x, arg=Slope.LAST)


attach("where", lambda input, condition, other: where(condition, input, other),
       "x where the condition holds, other elsewhere.")  # fmt: skip


@implements("masked_fill")
def masked_fill(input, mask, value):
    """The value where the mask holds, input elsewhere."""
    dtype, is_number = input._value.dtype, not isinstance(operand(value), Tensor)
    if not is_number and value.ndim:
        fail(ShapeError, "masked_fill takes one value: write torch.where(mask, value, x)")
    if dtype in BYTES:
        held = byte(value, dtype) if is_number else in_32_bits(into(value, input._value))
        return cast(where(mask, held, in_32_bits(input)), dtype)
    if is_number:
        return where(mask, scalar(input, value, dtype), input)
    return where(mask, into(value, input._value), input)


@implements("clamp", "clip")
def clamp(input, min=None, max=None):
    """input, but not below min nor above max; each is a number, a tensor or None."""
    value = bounded(input, min, max, Slope.FIRST)
    are_given = min is not None and max is not None and value._value.dtype is FLOAT
    if not are_given or not (isinstance(min, Tensor) or isinstance(max, Tensor)):
        return value
    x, min, max = together(input, min, max)
    parts = (((x >= min) & (x <= max), x), ((x < min) & (min < max), min),
             ((x > max) | (max < min), max))  # fmt: skip
    of_x, of_min, of_max = [where(mask, part, 0.0) for mask, part in parts]
    return with_slope_of(of_x + of_min + of_max, value)  # torch's, also of bounds that are equal


def bounded(input: Tensor, min: object, max: object, slope: Slope) -> Tensor:
    """`clamp`, whose slope at the bounds is that of `slope`."""
    bounds = [b for b in (min, max) if b is not None]
    ops = [op for op, b in ((Op.MAXIMUM, min), (Op.MINIMUM, max)) if b is not None]
    if not bounds:
        fail(TraceError, "clamp needs min, max or both: write x.clamp(min=0.0)")
    dtype = result_dtype(input, *map(operand, bounds))
    if dtype is BOOL and not all(isinstance(b, Tensor) for b in bounds):
        refuse("clamp to a number", input, "write it with & and |")
    x, *bounds = together(input, *bounds)
    for op, bound in zip(ops, bounds, strict=True):
        x = arithmetic(op, x, bound, slope)
    return x


formulas({
    "clamp_min": ("input, but not below min.", lambda input, min: clamp(input, min=min)),
    "clamp_max": ("input, but not above max.", lambda input, max: clamp(input, max=max)),
})  # fmt: skip


# operators


def _comparable(function: Callable) -> Callable:
    foreign = (type(None), str, type, torch.dtype)
    return lambda self, other: (
        NotImplemented if isinstance(other, foreign) else function(self, other)
    )


_METHODS = vars(Tensor)
OPERATORS = {
    "add": "add", "sub": "sub", "mul": "mul", "truediv": "div", "floordiv": "floor_divide",
    "mod": "remainder", "pow": "pow", "and": "bitwise_and", "or": "bitwise_or",
    "xor": "bitwise_xor", "lshift": "bitwise_left_shift", "rshift": "bitwise_right_shift",
}  # fmt: skip
"""The special methods of two operands, and the methods that do the same."""
for _name, _method in OPERATORS.items():
    _function = _METHODS[_method]
    setattr(Tensor, f"__{_name}__", lambda self, other, f=_function: f(self, other))
    setattr(Tensor, f"__r{_name}__", lambda self, other, f=_function: f(other, self))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Tensor, f"__{_name}__", _comparable(_METHODS[_name]))
for _name, _method in {"neg": "neg", "abs": "abs", "invert": "bitwise_not", "round": "round",
                       "floor": "floor", "ceil": "ceil", "trunc": "trunc"}.items():  # fmt: skip
    setattr(Tensor, f"__{_name}__", _METHODS[_method])

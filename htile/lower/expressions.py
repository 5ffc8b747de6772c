"""How each operation is written in the emitted text: one expression for each member of `Op`."""

from __future__ import annotations

from collections.abc import Callable
from math import copysign, inf, isnan

import torch

from ..frontend.dtypes import DTYPES
from ..frontend.graph import Node
from ..frontend.ops import REDUCTIONS, Op
from .patterns import Function

CUTLASS_TYPES = {dtype: known.cute for dtype, known in DTYPES.items() if known.computed}

Expression = Callable[[Node, tuple[str, ...], Function], str]


def _binary(symbol: str) -> Expression:
    return lambda node, args, function: f"{args[0]} {symbol} {args[1]}"


def _call(name: str) -> Expression:
    def expression(node: Node, args: tuple[str, ...], function: Function) -> str:
        option = ["fastmath=True"] if function is Function.FAST else []
        return f"math.{name}({', '.join([*args, *option])})"

    return expression


def _by_function(otherwise: Expression, **names: str) -> Expression:
    """The device function named for a member of `Function`, such as `bounded="exp_bounded"`."""

    def expression(node: Node, args: tuple[str, ...], function: Function) -> str:
        name = names.get(function.name.lower())
        return (_call(name) if name else otherwise)(node, args, function)

    return expression


def _convert(node: Node, args: tuple[str, ...], function: Function) -> str:
    """To another kind of number; to a 16-bit dtype it is a rounding of a float32."""
    if node.value.stored in (torch.bfloat16, torch.float16) and node.op is Op.CAST:
        return f"math.round_to({args[0]}, {CUTLASS_TYPES[node.value.stored]})"
    return f"math.convert({args[0]}, {CUTLASS_TYPES[node.value.dtype]})"


def _not_computed(node: Node, args: tuple[str, ...], function: Function) -> str:
    raise AssertionError(f"{node} is not computed")


# fmt: off
EMIT: dict[Op, Expression] = {
    **dict.fromkeys((Op.INPUT, Op.CONST, Op.RESHAPE), _not_computed),
    **dict.fromkeys(REDUCTIONS, _not_computed),
    Op.NEG: lambda node, args, function: f"-{args[0]}",
    Op.ADD: _by_function(_binary("+"), fma="fma"),
    Op.SUB: _by_function(_binary("-"), fms="fms", fnma="fnma"),
    Op.MUL: _by_function(_binary("*"), factors="product"),
    Op.DIV: _by_function(
        _call("div"), bounded="div_bounded", number="div_number", quotient="exp_quotient"),
    Op.EXP: _by_function(_call("exp"), bounded="exp_bounded"),
    **{op: _call(op.value) for op in (
        Op.ABS, Op.SIGN, Op.SQRT, Op.RSQRT, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10, Op.LOG1P,
        Op.SIN, Op.COS, Op.TANH, Op.SIGMOID, Op.ERF, Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC,
        Op.FLOORDIV, Op.MOD, Op.POW, Op.MAXIMUM, Op.MINIMUM, Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT,
        Op.GE, Op.WHERE)},
    Op.NOT: _call("logical_not"), Op.AND: _call("logical_and"), Op.OR: _call("logical_or"),
    Op.XOR: _call("logical_xor"),
    Op.CAST: _convert, Op.CONVERT: _convert,
}
# fmt: on


def literal(number: object, dtype: torch.dtype) -> str:
    """A number of this dtype as Python text."""
    if dtype is torch.bool:
        return repr(bool(number))
    if dtype is not torch.float32:
        return f"{CUTLASS_TYPES[dtype]}({int(number)})"
    number = float(number)
    if isnan(number):
        return 'Float32(float("nan"))'
    if number in (inf, -inf):
        return f"{'-' if number < 0 else ''}Float32.inf"
    if number == 0 and copysign(1, number) < 0:
        return "math.negative_zero()"
    return f"({number!r})" if number < 0 else repr(number)

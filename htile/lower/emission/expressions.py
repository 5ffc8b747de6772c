"""Writes the emitted text: an expression for each member of `Op`, numbers, and broken lines."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import copysign, inf, isnan

import torch

from ...frontend.dtypes import DTYPES
from ...frontend.graph import Node
from ...frontend.ops import COLLECTIVES, MOVEMENTS, Op
from ..patterns import Function
from ..precision import NEAR_OPS
from ..reductions import OF_OP

WIDTH = 100  # A line has at most so many characters.
INDENT = " " * 4
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


def _of_masks(name: str, otherwise: Expression) -> Expression:
    """The device function of this name for masks; another expression for integers."""

    def expression(node: Node, args: tuple[str, ...], function: Function) -> str:
        is_mask = node.value.dtype is torch.bool
        return (_call(name) if is_mask else otherwise)(node, args, function)

    return expression


def _convert(node: Node, args: tuple[str, ...], function: Function) -> str:
    """To another kind of number; to a 16-bit dtype it is a rounding of a float32."""
    if node.value.stored in (torch.bfloat16, torch.float16) and node.op is Op.CAST:
        return f"math.round_to({args[0]}, {CUTLASS_TYPES[node.value.stored]})"
    return f"math.convert({args[0]}, {CUTLASS_TYPES[node.value.dtype]})"


def _index(node: Node, args: tuple[str, ...], function: Function) -> str:
    """The numbers of a thread's columns, which a context has in int32."""
    (cols,) = args
    return cols if node.value.dtype is torch.int32 else f"math.convert({cols}, Int64)"


def _length(node: Node, args: tuple[str, ...], function: Function) -> str:
    """How many elements the row has, which a context has in int32."""
    (length,) = args
    return length if node.value.dtype is torch.int32 else f"math.convert({length}, Int64)"


def _unbundle(node: Node, args: tuple[str, ...], function: Function) -> str:
    which, count, dtype = node.arg
    return f"math.unbundle({args[0]}, {which}, {count}, {CUTLASS_TYPES[dtype]})"


def _bundle(node: Node, args: tuple[str, ...], function: Function) -> str:
    return f"math.bundle({', '.join(args)}, dtype={CUTLASS_TYPES[node.arg]})"


def _key(node: Node, args: tuple[str, ...], function: Function) -> str:
    if function is Function.INDEXED:
        return f"math.indexed({', '.join(args)})"
    smaller = ", smaller=True" if node.arg else ""
    return f"math.{node.op.value}({', '.join(args)}{smaller})"


def _key_value(node: Node, args: tuple[str, ...], function: Function) -> str:
    return f"math.key_value({args[0]}, {CUTLASS_TYPES[node.arg]})"


def _philox(node: Node, args: tuple[str, ...], function: Function) -> str:
    return f"math.philox({', '.join(args)}, word={node.arg})"


def _word(node: Node, args: tuple[str, ...], function: Function) -> str:
    vec = ["vec=ctx.vec_size"] if function is Function.FOURS else []
    return f"math.word({', '.join([*args, *vec])})"


def _grouped(node: Node, args: tuple[str, ...], function: Function) -> str:
    ctx, *operands = args
    if function is Function.ELEMENT:
        return f"{ctx}.group_element({', '.join(operands)})"
    op, size = node.arg
    return f"{ctx}.group_reduce({operands[0]}, {OF_OP[op].combine}, {size})"


def _not_computed(node: Node, args: tuple[str, ...], function: Function) -> str:
    raise AssertionError(f"{node} is not computed")


# fmt: off
EMIT: dict[Op, Expression] = {
    **dict.fromkeys(
        (Op.INPUT, Op.CONST, Op.STOP, Op.CUSTOM, Op.MATMUL, *MOVEMENTS, *COLLECTIVES),
        _not_computed),
    Op.INDEX: _index, Op.LENGTH: _length, Op.UNBUNDLE: _unbundle, Op.BUNDLE: _bundle,
    Op.PHILOX: _philox, Op.WORD: _word, Op.UNIFORM: _call("uniform"),
    Op.EXPONENTIAL: _call("exponential"),
    **dict.fromkeys(  # as pictures have them
        (Op.TAKE, Op.GATHER, Op.LOOKUP), lambda node, args, function: f"{args[0]}[{args[1]}]"),
    Op.NEG: lambda node, args, function: f"-{args[0]}",
    Op.ADD: _by_function(_binary("+"), fma="fma"),
    Op.SUB: _by_function(_binary("-"), fms="fms", fnma="fnma"),
    Op.MUL: _by_function(_binary("*"), factors="product", gelu="gelu_near"),
    Op.DIV: _by_function(
        _call("div"), bounded="div_bounded", near="div_near", number="div_number",
        shared="div_shared", quotient="exp_quotient"),
    **{op: _by_function(_call(op.value), bounded=f"{op.value}_bounded", near=f"{op.value}_near")
       for op in NEAR_OPS - {Op.DIV, Op.POW} | {Op.SIN, Op.COS}},
    Op.POW: _by_function(_call("pow"), near="pow_near", scalar="pow_scalar"),
    **{op: _call(op.value) for op in (
        Op.ABS, Op.SIGN, Op.SQRT, Op.RSQRT, Op.EXP2, Op.ERF, Op.FLOOR, Op.CEIL,
        Op.ROUND, Op.TRUNC, Op.FLOOR_LOG2, Op.CEIL_LOG2, Op.EXPONENT, Op.LDEXP, Op.FLOORDIV, Op.MOD,
        Op.BITS, Op.FLOAT_OF,
        Op.MAXIMUM, Op.MINIMUM, Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE, Op.WHERE,
        Op.LSHIFT, Op.RSHIFT)},
    Op.NOT: _of_masks("logical_not", _call("invert")),
    Op.AND: _of_masks("logical_and", _binary("&")), Op.OR: _of_masks("logical_or", _binary("|")),
    Op.XOR: _of_masks("logical_xor", _binary("^")),
    Op.CAST: _convert, Op.CONVERT: _convert,
    Op.GROUPED: _grouped, Op.KEY: _key, Op.KEY_INDEX: _key, Op.KEY_VALUE: _key_value,
}
# fmt: on


def written(node: Node, args: tuple[str, ...], function: Function, ctx: str = "ctx") -> str:
    """The expression of a node with these operands; `ctx` is the context that knows the columns."""
    if node.op is Op.INDEX:
        args = (f"{ctx}.cols",)
    elif node.op is Op.LENGTH:
        args = (f"{ctx}.shape[1]",)
    elif node.op is Op.GROUPED:
        args = (ctx, *args)
    elif function is Function.COLUMNS:
        args = (f"{ctx}.offsets", f"{ctx}.offset_of({args[0]})")
    return EMIT[node.op](node, args, function)


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


def wrapped_call(head: str, args: list[str], tail: str) -> list[str]:
    """A call on one line if it fits, and with its arguments on lines of their own if not."""
    joined = ", ".join(args)
    if len(head) + len(joined) + len(tail) <= WIDTH:
        return [head + joined + tail]
    indent = " " * (len(head) - len(head.lstrip()))
    return [head, *lines_of(args, indent + INDENT), indent + tail]


def wrapped_expression(head: str, expression: str) -> list[str]:
    """An assignment. A long call has its arguments below, a long operation has parentheses."""
    if len(head) + len(expression) <= WIDTH:
        return [head + expression]
    if expression.startswith("math."):
        name, _, args = expression.removesuffix(")").partition("(")
        return wrapped_call(f"{head}{name}(", args.split(", "), ")")
    left, operator, right = expression.split(" ")
    indent = " " * (len(head) - len(head.lstrip()))
    return [f"{head}(", f"{indent}    {left}", f"{indent}    {operator} {right}", f"{indent})"]


def lines_of(args: list[str], indent: str) -> list[str]:
    """Arguments on one line if they fit, and one a line if not; a long tuple has lines below."""
    joined = indent + ", ".join(args)
    if len(joined) <= WIDTH:
        return [joined]
    lines = []
    for arg in args:
        if len(indent) + len(arg) < WIDTH or not arg.startswith("("):
            lines.append(f"{indent}{arg},")
        else:
            parts = arg[1:-1].split(", ")
            lines += [f"{indent}(", *lines_of(parts, indent + INDENT), f"{indent}),"]
    return lines


def located(lines: list[str], node: Node) -> list[str]:
    """The lines with the user's line as a comment at the end, where it fits."""
    comment = f"  # {node.loc.short}" if node.loc else ""
    last = lines[-1] + comment if len(lines[-1]) + len(comment) <= WIDTH else lines[-1]
    return [*lines[:-1], last]


def tuple_of(parts: Iterable[str]) -> str:
    parts = list(parts)
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"

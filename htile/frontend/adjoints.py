"""The derivative of each operation: `DERIVE`, the table from `Op` to what its operands contribute.

A rule gets the gradient `g` of the operation's result, and returns for each operand what it
contributes to that one's gradient. The formulas are torch's (tools/autograd/derivatives.yaml), in
terms of the result where torch's are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple, NoReturn

import torch

from ..errors import GradientError
from .algebra import Algebra
from .cumulative_logarithms import CumulativeLogarithm
from .cumulative_products import CumulativeProduct
from .graph import Node
from .joined import placed, sliced
from .ops import COLLECTIVES, COMPARISONS, FROM_END, MOVEMENTS, RUNNING, TURNED, Op
from .slopes import FirstAlong, Slope

FLOAT, INT64 = torch.float32, torch.int64


class Masked(NamedTuple):
    """A contribution that is only made where a mask is `holds`, and is 0 elsewhere.

    The selection is made last, after all factors: 0 times an infinite factor would be NaN. So the
    slope of `where(x > 0, log(x), 0)` at 0 is 0, where torch has NaN.
    """

    value: int
    mask: int
    holds: bool = True


class Step(NamedTuple):
    """An operation whose derivative is taken: its node, its operands and its result, as ids."""

    node: Node
    operands: tuple[int, ...]
    result: int


Contribution = int | Masked | None
Rule = Callable[[Algebra, Step, int], tuple[Contribution, ...]]


def nothing(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    """The rule of what has no derivative, or one that is 0 everywhere: integers, masks, steps."""
    return (None,) * len(step.operands)


def refuse(node: Node, what: str) -> NoReturn:
    """Raise GradientError with the user's line."""
    raise GradientError(what, node.loc)


# Functions of one operand, as factors of g, of the operand x and the result y


def _factor(of: Callable[[Algebra, int, int], int]) -> Rule:
    return lambda a, step, g: (a.mul(g, of(a, step.operands[0], step.result)),)


def _magnitude(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    (x,) = step.operands
    if step.node.arg is Slope.RIGHT:
        below = a.node(Op.LT, x, a.number(0))
        return (a.mul(g, a.node(Op.WHERE, below, a.number(-1), a.number(1))),)
    if step.node.arg is Slope.SIGNED:  # 1 / 0.0 and 1 / -0.0 have signs
        is_zero = a.node(Op.EQ, x, a.number(0))
        x = a.node(Op.WHERE, is_zero, a.node(Op.DIV, a.number(1), x), x)
    return (a.mul(g, a.node(Op.SIGN, x)),)


def _root(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    slope = a.div(g, a.mul(a.number(2), step.result))
    if step.node.arg is not Slope.ZERO:
        return (slope,)
    return (Masked(slope, a.node(Op.EQ, step.result, a.number(0)), holds=False),)


def _logarithm(unit: float) -> Rule:
    def rule(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
        return (a.div(g, a.mul(step.operands[0], a.number(unit))),)

    return rule


def _same_float(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    """Of a conversion between floats; the gradient is not rounded."""
    dtypes = a[step.operands[0]].value.dtype, step.node.value.dtype
    return (g if all(dtype.is_floating_point for dtype in dtypes) else None,)


# Functions of two operands


def _product(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    x, y = step.operands
    if step.node.arg is Slope.GIVEN:
        return a.mul(g, y), None
    if x == y:
        return a.mul(a.mul(a.number(2), g), x), None
    if step.node.arg is Slope.ZERO:
        is_steep = a.node(Op.NOT, a.node(Op.GT, y, a.number(-math.inf)))
        is_flat = a.node(Op.AND, a.node(Op.EQ, x, a.number(0)), is_steep)
        return Masked(a.mul(g, y), is_flat, holds=False), a.mul(g, x)
    return a.mul(g, y), a.mul(g, x)


def _quotient(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    x = a.div(g, step.operands[1])
    return x, a.neg(a.mul(x, step.result))


def _remainder(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    """The quotient is that of the remainder: the one that is divided may round to the next.

    Where that one is far from it, because y is 0 or x - result is infinite, it is the right one.
    """
    x, y = step.operands
    exact = a.node(Op.ROUND, a.div(a.sub(x, step.result), y))
    divided = a.node(Op.FLOOR, a.div(x, y))
    is_near = a.node(Op.LE, a.node(Op.ABS, a.sub(divided, exact)), a.number(1))
    return g, a.neg(a.mul(g, a.node(Op.WHERE, is_near, exact, divided)))


def _power(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    x, e = step.operands
    zero, number = a.number(0), a.constant(e)
    less = a.sub(e, a.number(1)) if number is None else a.number(number - 1)
    slope = a.mul(g, a.mul(e, _raised(a, x, less)))
    if number is not None:
        is_zero = step.node.arg is Slope.ZERO
        of_base = Masked(slope, a.node(Op.EQ, x, zero), holds=False) if is_zero else slope
        return None if number == 0 else of_base, None
    is_flat = a.node(Op.AND, a.node(Op.EQ, x, zero), a.node(Op.GE, e, zero))
    of_exponent = a.mul(g, a.mul(step.result, a.node(Op.LOG, x)))
    of_base = Masked(slope, a.node(Op.EQ, e, zero), holds=False)
    return of_base, Masked(of_exponent, is_flat, holds=False)


def _raised(a: Algebra, x: int, e: int) -> int:
    """x to the power e. Common powers are products and roots, as they are in a trace."""
    by_number = {
        2.0: lambda: a.mul(x, x),
        3.0: lambda: a.mul(a.mul(x, x), x),
        0.5: lambda: a.node(Op.SQRT, x),
        -0.5: lambda: a.node(Op.RSQRT, x),
        -1.0: lambda: a.div(a.number(1), x),
        -2.0: lambda: a.div(a.number(1), a.mul(x, x)),
    }
    return by_number.get(a.constant(e), lambda: a.node(Op.POW, x, e))()


def _extreme(less: Op, at_least: Op) -> Rule:
    """Of MAXIMUM and MINIMUM: `less` says that the first operand is not chosen, even if NaN."""
    no_more = Op.LE if less is Op.LT else Op.GE

    def rule(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
        x, y = step.operands
        if step.node.arg is Slope.FIRST:
            return Masked(g, a.node(at_least, x, y)), Masked(g, a.node(less, x, y))
        if step.node.arg is Slope.LEFT:
            first, second = a.node(less, x, y), a.node(at_least, x, y)
            return Masked(g, first, holds=False), Masked(g, second, holds=False)
        if step.node.arg is Slope.OTHER:
            not_chosen = a.node(no_more, x, y)
            return Masked(g, not_chosen, holds=False), Masked(g, not_chosen)
        half = a.node(Op.WHERE, a.node(Op.EQ, x, y), a.mul(g, a.number(0.5)), g)
        first, second = a.node(less, x, y), a.node(less, y, x)
        return Masked(half, first, holds=False), Masked(half, second, holds=False)

    return rule


def _scaled_by_power(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    return a.node(Op.LDEXP, g, step.operands[1]), None


def _choice(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    mask = step.operands[0]
    if step.node.arg is Slope.LAST:
        return None, None, g
    if step.node.arg is Slope.NAN:
        return None, None, a.node(Op.WHERE, a.of_total(mask), a.number(math.nan), g)
    return None, Masked(g, mask), Masked(g, mask, holds=False)


# Movements. They get `g` without masks, and give contributions of their operand's elements.


def _reshape(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    inner = a.inner(step.operands[0])
    if a.is_number(g):
        return (a.reshape(g, ()),)
    return (a.reshape(a.widened(g, step.node.value.inner, step.node.value.spread), inner),)


def _slice(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    axis, start, stride, _ = step.node.arg
    size = a.inner(step.operands[0])[axis]
    wide = a.widened(g, step.node.value.inner, step.node.value.spread)
    return (placed(a, wide, axis, start, stride, size),)


def _permute(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    axes = step.node.arg
    if a.is_number(g):
        return (a.reshape(g, ()),)
    wide = a.widened(g, step.node.value.inner, step.node.value.spread)
    back = tuple(sorted(range(-len(axes), 0), key=lambda axis: axes[axis]))
    return (a.node(Op.PERMUTE, wide, arg=back),)


def _expand(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    return (g,)


def _cat(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    axis, start, parts = step.node.arg, 0, []
    for operand in step.operands:
        size = a.inner(operand)[axis]
        parts.append(sliced(a, g, axis, start, size))
        start += size
    return tuple(parts)


def _take(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    row, index = step.operands
    columns = a.index(a.inner(row)[-1])
    index = index if a[index].value.dtype is INT64 else a.node(Op.CONVERT, index, arg=INT64)
    return Masked(g, a.node(Op.EQ, columns, index)), None


def _scattered(a: Algebra, step: Step, g: int) -> NoReturn:
    raise AssertionError("what it contributes is no value of a row: see htile.frontend.scattered")


# Keys: the gradient goes to the element whose index a key has. No two keys are equal.


def _key(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    return g, None


def _of_key(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    return (g,)


# Reductions and scans. They get `g` without masks.


def _sum(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    return (a.unsqueezed(g, step.node.arg),)


def _mean(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    v = a[step.operands[0]].value
    axis = step.node.arg or -1
    count = a.count(v.inner[axis], v.spread and axis == -1)
    return (a.unsqueezed(a.div(g, count), step.node.arg),)


def _largest(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    """Of MAX and MIN: equal elements share, as in torch.amax; it is NaN for a row with NaN.

    Of x.max(dim) the element has it whose index torch gives, which is the first of equal ones. The
    only element is the result, whatever it is: `v[0]` of a row of one is such a maximum.
    """
    (x,), axis = step.operands, step.node.arg
    g = a.unsqueezed(g, axis)
    if (mask := _chosen(a, x)) is not None:
        return (Masked(g, mask),)
    if _is_only_one(a, x, axis):
        return (g,)
    is_it = a.node(Op.EQ, x, a.unsqueezed(step.result, axis))
    if not step.node.value.dtype.is_floating_point:
        return (Masked(g, is_it),)
    if isinstance(axis, FirstAlong):
        return (Masked(g, _first(a, step.node.op, x, int(axis))),)
    ones = a.node(Op.CONVERT, is_it, arg=FLOAT)
    count = a.unsqueezed(a.node(Op.SUM, ones, arg=axis), axis)
    return (a.mul(a.div(g, count), ones),)


def _is_only_one(a: Algebra, x: int, axis: int | None) -> bool:
    """Whether there is one element along the axis that a reduction takes, or of the row."""
    inner = a.inner(x)
    return math.prod(inner) == 1 if axis is None else inner[int(axis)] == 1


def _first(a: Algebra, op: Op, x: int, axis: int) -> int:
    """The mask of the first of the largest or smallest elements, as argmax finds it, by keys."""
    inner = a.inner(x)
    places = a.reshape(a.index(inner[axis]), (inner[axis], *(1,) * (-1 - axis)))
    keys = a.node(Op.KEY, a.node(Op.NEG, x) if op is Op.MIN else x, places, arg=False)
    largest = a.node(Op.MAX, keys, arg=axis if len(inner) > 1 else None)
    return a.node(Op.EQ, keys, a.unsqueezed(largest, axis))


def _of_rank(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    """Of KTHVALUE: the first of the elements that are equal to the result has all of it."""
    (x, _), axis = step.operands, step.node.arg
    y = a.unsqueezed(step.result, axis)
    is_it = a.node(Op.EQ, x, y)
    if step.node.value.dtype.is_floating_point:
        are_nan = a.node(Op.AND, a.node(Op.NE, x, x), a.node(Op.NE, y, y))
        is_it = a.node(Op.OR, is_it, are_nan)
    first = _first(a, Op.MAX, a.node(Op.CONVERT, is_it, arg=FLOAT), -1 if axis is None else axis)
    return Masked(a.unsqueezed(g, axis), a.node(Op.AND, first, is_it)), None


def _chosen(a: Algebra, x: int) -> int | None:
    """The mask of the only element that is not -inf, where an index chose it; else None."""
    node = a[x]
    if node.op is not Op.WHERE or a.constant(node.inputs[2]) != -math.inf:
        return None
    mask = a[node.inputs[0]]
    is_one = mask.op is Op.EQ and a[mask.inputs[0]].op is Op.INDEX
    is_one = is_one and math.prod(a.inner(mask.inputs[1])) == 1
    return mask.id if is_one else None


def _of_product(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    """Of PROD: of one zero its element gets the product of the others, of several none does.

    `small` is the sum of all zeros, and so it stands for the one that a gradient of second order
    asks about: for another element the product of the rest has it as a factor, if there is one
    zero, and for a zero it is the other one, if there are two.
    """
    (x,), axis = step.operands, step.node.arg
    g, one, zero = a.unsqueezed(g, axis), a.number(1), a.number(0)
    is_zero = a.node(Op.EQ, x, zero)
    ones = a.node(Op.CONVERT, is_zero, arg=FLOAT)
    zeros = a.unsqueezed(a.node(Op.SUM, ones, arg=axis), axis)
    factors = a.node(Op.WHERE, is_zero, one, x)
    rest = a.unsqueezed(a.node(Op.PROD, factors, arg=axis), axis)
    small = a.node(Op.SUM, a.node(Op.WHERE, is_zero, x, zero), arg=axis)
    small, of_all = a.unsqueezed(small, axis), a.div(rest, factors)
    is_one, is_two = (a.node(Op.EQ, zeros, a.number(count)) for count in (1, 2))
    of_two = a.zero_like(a.node(Op.WHERE, is_two, a.mul(rest, a.sub(small, x)), zero))
    of_one = a.zero_like(a.node(Op.WHERE, is_one, a.mul(of_all, small), zero))
    of_zero = a.node(Op.WHERE, is_one, rest, of_two)
    of_other = a.node(Op.WHERE, a.node(Op.EQ, zeros, zero), of_all, of_one)
    return (a.mul(g, a.node(Op.WHERE, is_zero, of_zero, of_other)),)


def _cumulative(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    """Of CUMSUM and SUM_FROM_END: each is the other one of the gradients.

    The total less all before an element would have the error of the total, however little is
    behind it.
    """
    value = step.node.value
    g = a.widened(g, value.inner, value.spread)
    return (a.node(TURNED[step.node.op], g, arg=step.node.arg),)


def _cumulative_product(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    value = step.node.value
    g = a.widened(g, value.inner, value.spread)
    return (CumulativeProduct(a, step.operands[0], step.result, step.node.arg).gradient(g),)


def _cumulative_logarithm(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    value = step.node.value
    g = a.widened(g, value.inner, value.spread)
    return (CumulativeLogarithm(a, step.node, step.operands[0], step.result).gradient(g),)


def _of_running(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    op = step.node.op
    name = (TURNED[op] if op in FROM_END else op).value
    refuse(step.node, f"the gradient of {name}: write x.detach().{name}(dim) where it is a bound "
           "that is not trained")  # fmt: skip


def _of_matmul(a: Algebra, step: Step, g: int) -> tuple[Contribution, ...]:
    refuse(step.node, "the gradient of a product with a matrix: call F.linear outside of the "
           "function for the part that is trained, or pass detached tensors")  # fmt: skip


def _of_custom(a: Algebra, step: Step, g: int) -> NoReturn:
    raise AssertionError("its operands are found together: see htile.frontend.custom")


def _of_placed(a: Algebra, step: Step, g: int) -> NoReturn:
    raise AssertionError(f"{step.node} is in a placed graph: a traced one is differentiated")


WITHOUT = (  # whose derivative is 0 or none
    Op.INPUT, Op.CONST, Op.INDEX, Op.LENGTH, Op.STOP, Op.SIGN, Op.FLOOR, Op.CEIL, Op.ROUND,
    Op.TRUNC, Op.FLOOR_LOG2, Op.CEIL_LOG2, Op.EXPONENT, Op.UNIFORM, Op.EXPONENTIAL, Op.NOT,
    Op.BITS, Op.FLOAT_OF,
    Op.FLOORDIV, *COMPARISONS, Op.AND, Op.OR, Op.XOR, Op.LSHIFT, Op.RSHIFT, Op.KEY_INDEX,
    Op.PHILOX, Op.WORD, Op.ANY, Op.ALL,
)  # fmt: skip
# fmt: off
DERIVE: dict[Op, Rule] = {
    **dict.fromkeys(WITHOUT, nothing),
    Op.NEG: lambda a, step, g: (a.neg(g),),
    Op.ABS: _magnitude,
    Op.SQRT: _root,
    Op.RSQRT: lambda a, step, g: (
        a.mul(a.mul(a.number(-0.5), g), a.mul(step.result, a.mul(step.result, step.result))),),
    Op.EXP: _factor(lambda a, x, y: y),
    Op.EXP2: _factor(lambda a, x, y: a.mul(a.number(math.log(2)), y)),
    Op.EXPM1: _factor(lambda a, x, y: a.node(Op.EXP, x)),  # y + 1 has no digits where y is -1
    Op.LOG: _logarithm(1.0), Op.LOG2: _logarithm(math.log(2)), Op.LOG10: _logarithm(math.log(10)),
    Op.LOG1P: lambda a, step, g: (a.div(g, a.add(step.operands[0], a.number(1))),),
    Op.SIN: _factor(lambda a, x, y: a.node(Op.COS, x)),
    Op.COS: _factor(lambda a, x, y: a.neg(a.node(Op.SIN, x))),
    Op.TANH: _factor(lambda a, x, y: a.sub(a.number(1), a.mul(y, y))),
    Op.SIGMOID: _factor(lambda a, x, y: a.mul(y, a.sub(a.number(1), y))),
    Op.ERF: _factor(lambda a, x, y: a.mul(
        a.number(2 / math.sqrt(math.pi)), a.node(Op.EXP, a.neg(a.mul(x, x))))),
    Op.CAST: _same_float, Op.CONVERT: _same_float,
    Op.ADD: lambda a, step, g: (g, g), Op.SUB: lambda a, step, g: (g, a.neg(g)),
    Op.MUL: _product, Op.DIV: _quotient, Op.MOD: _remainder, Op.POW: _power,
    Op.MAXIMUM: _extreme(Op.LT, Op.GE), Op.MINIMUM: _extreme(Op.GT, Op.LE),
    Op.LDEXP: _scaled_by_power, Op.WHERE: _choice,
    Op.RESHAPE: _reshape, Op.SLICE: _slice, Op.PERMUTE: _permute, Op.EXPAND: _expand, Op.CAT: _cat,
    Op.TAKE: _take, **dict.fromkeys((Op.GATHER, Op.LOOKUP), _scattered),
    Op.KEY: _key, Op.KEY_VALUE: _of_key,
    Op.SUM: _sum, Op.MEAN: _mean, Op.PROD: _of_product, Op.MAX: _largest, Op.MIN: _largest,
    Op.CUMSUM: _cumulative, Op.SUM_FROM_END: _cumulative, Op.CUMPROD: _cumulative_product,
    **dict.fromkeys((Op.LOGCUMSUMEXP, Op.LOGSUMEXP_FROM_END), _cumulative_logarithm),
    **dict.fromkeys(RUNNING, _of_running),
    Op.KTHVALUE: _of_rank, Op.CUSTOM: _of_custom, Op.MATMUL: _of_matmul,
    **dict.fromkeys((Op.SHIFT, Op.UNBUNDLE, Op.BUNDLE, Op.GROUPED), _of_placed),
}
# fmt: on

REARRANGED = (MOVEMENTS - {Op.EXPAND}) | COLLECTIVES | {
    Op.TAKE, Op.GATHER, Op.LOOKUP, Op.CUSTOM,
}  # fmt: skip
"""Operations whose result has other elements than the operands: no mask of it goes with them."""

def reached(
    nodes: Iterable[Node], found: set[int], without: Collection[int] = ()
) -> set[int]:
    """The nodes that have a derivative with respect to those `found`, and these; keys have one.

    nodes: in order, behind those. without: nodes that have none.
    """
    for node in nodes:
        if DERIVE[node.op] is nothing or node.id in without:
            continue
        is_float = node.value.dtype.is_floating_point
        if (is_float or node.op in CARRIERS) and not found.isdisjoint(node.inputs):
            found.add(node.id)
    return found


CARRIERS = frozenset({Op.KEY, Op.MAX, Op.MIN, Op.WHERE}) | MOVEMENTS
"""Operations that give keys, integers that elements are found in again."""

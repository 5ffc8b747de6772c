"""The operations of the language and their first interpretation: the shape and dtype rule.

Everything that a function may do to a row is one member of `Op`. Each meaning of the language is
one table from `Op` to a rule: `INFER` here, `EVALUATE` in htile.frontend.reference, `DERIVE` in
htile.frontend.adjoints, `EMIT` in htile.lower.emission.expressions. Composites (softmax,
layer_norm, clamp) have no member: a trace is made of their parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from functools import reduce
from math import prod

import torch

from ..errors import DtypeError, ShapeError
from .dtypes import FLOAT8, STORAGE, compute_dtype, dtype_name


class Op(Enum):
    """One operation. Operands of arithmetic and comparisons have one dtype: tracing adds casts."""

    __hash__ = object.__hash__  # That of an Enum is written in Python, and passes ask for it often.

    # leaves
    INPUT = "input"  # arg: the parameter's name
    CONST = "const"  # arg: a Python bool, int or float
    INDEX = "index"  # arg: N; the numbers from 0 to N - 1, those of the columns
    LENGTH = "length"  # arg: its dtype; how many elements a row has, if that may differ by call
    # one operand
    NEG = "neg"
    ABS = "abs"
    SIGN = "sign"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    EXP = "exp"
    EXP2 = "exp2"
    EXPM1 = "expm1"
    LOG = "log"
    LOG2 = "log2"
    LOG10 = "log10"
    LOG1P = "log1p"
    SIN = "sin"
    COS = "cos"
    TANH = "tanh"
    SIGMOID = "sigmoid"
    ERF = "erf"
    FLOOR = "floor"
    CEIL = "ceil"
    ROUND = "round"  # half to even, as torch.round
    TRUNC = "trunc"
    # floor(log2(x)) and ceil(log2(x)), exact: a logarithm may be rounded to a whole number
    FLOOR_LOG2 = "floor_log2"
    CEIL_LOG2 = "ceil_log2"
    EXPONENT = "exponent"  # torch.frexp's, of float32 as int32; of 0, infinities and NaN it is 0
    BITS = "bits"  # of float32, as int32
    FLOAT_OF = "float_of"  # the float32 that has the bits of an int32
    UNIFORM = "uniform"  # of an unsigned word of 32 bits: the number between 0 and 1 in float32
    STOP = "stop"  # torch.detach: the value itself, whose derivative is none; none in placed graphs
    # The value itself, whose derivative the user has written, of all operands behind it. arg: a
    # htile.frontend.custom.Link. None in placed graphs.
    CUSTOM = "custom"
    EXPONENTIAL = "exponential"  # of such a word: -log of that number, before it was rounded
    NOT = "not"  # of integers each bit
    CAST = "cast"  # arg: a torch dtype; to a narrower floating type a rounding
    CONVERT = "convert"  # arg: a torch dtype; the change that promotion makes, it declares nothing
    # two operands
    ADD = "add"
    SUB = "sub"
    MUL = "mul"
    DIV = "div"
    FLOORDIV = "floordiv"  # torch.floor_divide: towards minus infinity
    MOD = "mod"  # torch.remainder: the divisor's sign
    POW = "pow"
    MAXIMUM = "maximum"  # NaN if either is
    MINIMUM = "minimum"  # NaN if either is
    EQ = "eq"
    NE = "ne"
    LT = "lt"
    LE = "le"
    GT = "gt"
    GE = "ge"
    AND = "and"  # this one and the next two: of masks, and of integers bit by bit
    OR = "or"
    XOR = "xor"
    LSHIFT = "lshift"  # by an amount that is negative or beyond the width: 0
    RSHIFT = "rshift"  # by such an amount: 0, or -1 of a negative integer
    LDEXP = "ldexp"  # of float32 and int32: x * 2 ** e, rounded once
    # keys: an element and its index as one int64; arg: whether of equal elements the smaller index
    # makes the smaller key, else the larger key. NaN is the largest element.
    KEY = "key"  # of an element of float32 or int32, and an index
    KEY_INDEX = "key_index"
    KEY_VALUE = "key_value"  # arg: the element's dtype; its -0.0 is 0.0
    # three operands
    WHERE = "where"
    PHILOX = "philox"  # arg: which of the four words; of a counter, a key and a subsequence
    WORD = "word"  # word index % 4 of counter index // 4; of an index, a key and a subsequence
    # movements: each element of the result is one of an operand; axes count from the last, -1
    RESHAPE = "reshape"  # arg: the new inner shape, of as many elements
    SLICE = "slice"  # arg: (axis, start, step, size)
    PERMUTE = "permute"  # arg: for each axis of the result that of the operand
    EXPAND = "expand"  # arg: the new inner shape, where axes of size 1 repeat
    CAT = "cat"  # arg: the axis, perhaps an `AxisOfRow`; any number of operands
    # Of a row, `size` neighbours from `start` on, which may reach beyond its ends. Beside the row
    # they are any number. Lowering makes it of parts. arg: (start, size)
    SHIFT = "shift"
    TAKE = "take"  # of a row and an index of each row, which is in the row: the element there
    # Of a row and a row of indices: the element at each index. An index beyond the ends stands for
    # the first element, or for the last one.
    GATHER = "gather"
    # Of what all rows share and an index of each row: its part at that place of the first axis. A
    # negative index counts from the end. Beyond the ends all of it is NaN, or 0, or False. arg: the
    # index that has no gradient, or None; in placed graphs the columns that are read, as the first
    # one and the one behind the last, or None for all.
    LOOKUP = "lookup"
    # Of a row (K,) and a matrix that all rows share: the row of N products. arg: whether the matrix
    # is (N, K), as F.linear takes it, and not (K, N).
    MATMUL = "matmul"
    # bundles: neighbouring elements of memory as one wide element, in placed graphs only
    UNBUNDLE = "unbundle"  # arg: (which element, of how many, its dtype)
    BUNDLE = "bundle"  # arg: the dtype of the elements; any number of operands
    # What a reduction gives for each group of neighbouring columns, in all columns of the group; in
    # placed graphs only. arg: (the reduction, the size of a group, a power of two)
    GROUPED = "grouped"
    # reductions; arg: the axis, or None where there is one axis
    SUM = "sum"
    MEAN = "mean"  # of equal elements it is that element
    PROD = "prod"
    MAX = "max"  # NaN if any is
    MIN = "min"  # NaN if any is
    ANY = "any"
    ALL = "all"
    # Of a row and a number of each row: the element that so many others come before in ascending
    # order. NaN is the largest, -0.0 is 0.0, and it is NaN or any integer where there is no such
    # element. arg: the axis, or None. Placed graphs may have the row in several operands, and the
    # number behind them.
    KTHVALUE = "kthvalue"
    # scans: of each element and all before it; arg: the axis, or None where there is one axis
    CUMSUM = "cumsum"
    CUMPROD = "cumprod"
    CUMMAX = "cummax"  # NaN if any is
    CUMMIN = "cummin"  # NaN if any is
    LOGCUMSUMEXP = "logcumsumexp"
    # of each element and all behind it: derivatives are made of them, and scans of turned rows
    SUM_FROM_END = "sum_from_end"
    MAX_FROM_END = "max_from_end"
    MIN_FROM_END = "min_from_end"
    LOGSUMEXP_FROM_END = "logsumexp_from_end"


# An element of the result depends on the elements of the operands that are at the same place.
ELEMENTWISE = frozenset({
    Op.NEG, Op.ABS, Op.SIGN, Op.SQRT, Op.RSQRT, Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2,
    Op.LOG10, Op.LOG1P, Op.SIN, Op.COS, Op.TANH, Op.SIGMOID, Op.ERF, Op.FLOOR, Op.CEIL, Op.ROUND,
    Op.TRUNC, Op.FLOOR_LOG2, Op.CEIL_LOG2, Op.EXPONENT, Op.BITS, Op.FLOAT_OF, Op.UNIFORM,
    Op.STOP, Op.EXPONENTIAL, Op.NOT, Op.CAST, Op.CONVERT, Op.ADD, Op.SUB, Op.MUL, Op.DIV,
    Op.FLOORDIV, Op.MOD, Op.POW, Op.MAXIMUM, Op.MINIMUM, Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE,
    Op.AND, Op.OR, Op.XOR, Op.LSHIFT, Op.RSHIFT, Op.LDEXP, Op.KEY, Op.KEY_INDEX, Op.KEY_VALUE,
    Op.WHERE, Op.PHILOX,
})  # fmt: skip
MOVEMENTS = frozenset({Op.RESHAPE, Op.SLICE, Op.PERMUTE, Op.EXPAND, Op.CAT, Op.SHIFT})
REDUCTIONS = frozenset({Op.SUM, Op.MEAN, Op.PROD, Op.MAX, Op.MIN, Op.ANY, Op.ALL})
# From each scan that has one to the same scan from the other end.
TURNED = {
    Op.CUMSUM: Op.SUM_FROM_END, Op.CUMMAX: Op.MAX_FROM_END, Op.CUMMIN: Op.MIN_FROM_END,
    Op.LOGCUMSUMEXP: Op.LOGSUMEXP_FROM_END,
}  # fmt: skip
FROM_END = frozenset(TURNED.values())
TURNED |= {turned: op for op, turned in TURNED.items()}
SCANS = frozenset({Op.CUMPROD, *TURNED})
RUNNING = frozenset({Op.CUMMAX, Op.CUMMIN, Op.MAX_FROM_END, Op.MIN_FROM_END})
# Each result is one of the elements that it is found among.
EXTREMES = frozenset({Op.MAX, Op.MIN, Op.KTHVALUE, *RUNNING})
# They need all elements of a row before any of their result.
COLLECTIVES = REDUCTIONS | SCANS | {Op.KTHVALUE}
COMMUTATIVE = frozenset(
    {Op.ADD, Op.MUL, Op.MAXIMUM, Op.MINIMUM, Op.EQ, Op.NE, Op.AND, Op.OR, Op.XOR}
)
COMPARISONS = frozenset({Op.EQ, Op.NE, Op.LT, Op.LE, Op.GT, Op.GE})


class Varies(Enum):
    """Over what a value changes: with the row, only with the column, or not at all.

    Of the operands of an operation the first in this order decides.
    """

    ROW = "row"
    SHARED = "shared"
    SCALAR = "scalar"


@dataclass(frozen=True, slots=True)
class Value:
    """What a node computes, for one row.

    inner: the shape that `torch.vmap` shows: `()`, `(1,)`, `(N,)`; any shape before a graph is
        placed (htile.lower.passes.space).
    varies: see `Varies`.
    dtype: what it is computed in: float32, int32, int64 or bool; or one of `STORAGE`, whose values
        are converted and stored only.
    stored: the dtype that `.to` declared for it, or None.
    spread: whether there is one element for each column, spread over the threads of a row. At N = 1
        `inner` alone cannot tell a row from a reduction with `keepdim=True`; this can. Before a
        graph is placed: whether the last axis comes from a row or column, and was not reduced.
    """

    inner: tuple[int, ...]
    varies: Varies
    dtype: torch.dtype
    stored: torch.dtype | None = None
    spread: bool = False

    def __str__(self) -> str:
        shape = ",".join(map(str, self.inner))
        declared = f" stored {dtype_name(self.stored)}" if self.stored is not None else ""
        return f"{self.varies.value} {dtype_name(self.dtype)}[{shape}]{declared}"


def join_stored(values: tuple[Value, ...]) -> torch.dtype | None:
    """The declared dtype that sticks to an elementwise result: the promotion of those declared.

    As in torch, values with an axis decide, and those without count only where there is no other.
    """
    values = [v for v in values if v.inner] or values
    declared = [v.stored for v in values if v.stored is not None]
    return reduce(torch.promote_types, declared) if declared else None


class AxisOfRow(int):
    """The axis along which a CAT joins numbers to a row, such as the columns of a product."""

    def __repr__(self) -> str:
        return f"{int(self)} of a row"


def broadcast_shapes(*shapes: tuple[int, ...]) -> tuple[int, ...] | None:
    """torch's broadcast of shapes, None where they do not go together.

    torch.broadcast_shapes imports sympy, which takes half a second.
    """
    rank = max(map(len, shapes), default=0)
    columns = zip(*((1,) * (rank - len(s)) + tuple(s) for s in shapes), strict=True)
    wide = []
    for sizes in columns:  # which may be torch's symbols, that have no hash
        size = 1
        for each in sizes:
            if size != 1 and each != 1 and each != size:
                return None
            size = each if size == 1 else size
        wide.append(size)
    return tuple(wide)


Rule = Callable[[tuple[Value, ...], object], Value]
_ORDER = tuple(Varies)


def _joined(values: tuple[Value, ...], of: tuple[Value, ...]) -> Value:
    """The value of operands together, with the dtypes of those in `of`."""
    inners = {v.inner for v in values if v.inner}
    inner = broadcast_shapes(*inners) if len(inners) > 1 else next(iter(inners), ())
    if inner is None:
        shapes = " and ".join(map(str, sorted(inners)))
        raise ShapeError(f"values of shapes {shapes} do not go together")
    assert len({v.dtype for v in of}) == 1, f"operands of different dtypes: {of}"
    varies = min([v.varies for v in values], key=_ORDER.index)
    spread = any([v.spread for v in values])
    return Value(inner, varies, of[0].dtype, join_stored(of), spread)


def _elementwise(values: tuple[Value, ...], arg: object) -> Value:
    return _joined(values, values)


def _comparison(values: tuple[Value, ...], arg: object) -> Value:
    _refuse_storage(values)
    return replace(_joined(values, values), dtype=torch.bool, stored=None)


def _first(values: tuple[Value, ...], arg: object) -> Value:
    return values[0]


def _made(dtype: torch.dtype) -> Rule:
    """The rule of one operand whose result has this dtype."""
    return lambda values, arg: replace(values[0], dtype=dtype, stored=None)


def _ldexp(values: tuple[Value, ...], arg: object) -> Value:
    x, e = values
    assert x.dtype is torch.float32 and e.dtype is torch.int32, f"a float and an int32: {values}"
    return _joined(values, values[:1])


def _where(values: tuple[Value, ...], arg: object) -> Value:
    assert values[0].dtype is torch.bool, f"expected a bool condition: {values}"
    _refuse_storage(values)
    return _joined(values, values[1:])


def _cast(values: tuple[Value, ...], arg: object) -> Value:
    assert isinstance(arg, torch.dtype)
    return replace(values[0], dtype=compute_dtype(arg), stored=arg)


def _convert(values: tuple[Value, ...], arg: object) -> Value:
    """Of a promotion; torch promotes no float8 to another dtype."""
    if values[0].dtype in FLOAT8:
        _refuse_storage(values)
    assert arg in (torch.float32, torch.int32, torch.int64), f"not a computed number: {arg}"
    return replace(values[0], dtype=arg, stored=None)


def _shaped(value: Value, inner: tuple[int, ...]) -> Value:
    """A value in another shape; without an axis it is one number of the row."""
    return replace(value, inner=inner, spread=value.spread and inner != ())


def _key(values: tuple[Value, ...], arg: object) -> Value:
    x, index = values
    assert x.dtype in (torch.float32, torch.int32) and not index.dtype.is_floating_point, values
    return replace(_joined(values, values[:1]), dtype=torch.int64, stored=None)


def _of_key(values: tuple[Value, ...], arg: object) -> Value:
    (key,) = values
    assert key.dtype is torch.int64, f"expected a key: {values}"
    return replace(key, dtype=arg if isinstance(arg, torch.dtype) else key.dtype, stored=None)


def _reshape(values: tuple[Value, ...], arg: object) -> Value:
    assert prod(arg) == prod(values[0].inner), f"of another number of elements: {values}, {arg}"
    return _shaped(values[0], arg)


def _slice(values: tuple[Value, ...], arg: object) -> Value:
    axis, start, step, size = arg
    inner = list(values[0].inner)
    assert axis < 0 <= start and start + (size - 1) * step < inner[axis], f"beyond: {values}, {arg}"
    inner[axis] = size
    return replace(values[0], inner=tuple(inner))


def _shift(values: tuple[Value, ...], arg: object) -> Value:
    assert len(values[0].inner) == 1, f"no row: {values}"
    return replace(values[0], inner=(arg[1],))


def _permute(values: tuple[Value, ...], arg: object) -> Value:
    return replace(values[0], inner=tuple(values[0].inner[axis] for axis in arg))


def _expand(values: tuple[Value, ...], arg: object) -> Value:
    assert broadcast_shapes(values[0].inner, arg) == arg, f"does not expand: {values}, {arg}"
    return replace(values[0], inner=arg)


def _cat(values: tuple[Value, ...], arg: object) -> Value:
    assert len({v.dtype for v in values}) == 1, f"operands of different dtypes: {values}"
    inner = list(values[0].inner)
    inner[arg] = sum([v.inner[arg] for v in values])
    varies = min((v.varies for v in values), key=_ORDER.index)
    spread = isinstance(arg, AxisOfRow) or any(v.spread for v in values)
    return Value(tuple(inner), varies, values[0].dtype, join_stored(values), spread)


def _take(values: tuple[Value, ...], arg: object) -> Value:
    row, index = values
    assert not index.spread and prod(index.inner) == 1, f"an index of each row: {values}"
    varies = min(row.varies, index.varies, key=_ORDER.index)
    return replace(row, inner=(), varies=varies, spread=False)


def _gather(values: tuple[Value, ...], arg: object) -> Value:
    row, index = values
    assert row.spread and len(row.inner) == len(index.inner) == 1, f"a row and indices: {values}"
    varies = min(row.varies, index.varies, key=_ORDER.index)
    return replace(row, inner=index.inner, varies=varies, spread=index.spread)


def _lookup(values: tuple[Value, ...], arg: object) -> Value:
    table, index = values
    assert not index.inner and len(table.inner) > 0, f"a table and an index of each row: {values}"
    varies = min(table.varies, index.varies, key=_ORDER.index)
    return replace(_shaped(table, table.inner[1:]), varies=varies)


def _matmul(values: tuple[Value, ...], arg: object) -> Value:
    row, matrix = values
    n, k = matrix.inner if arg else matrix.inner[::-1]
    assert row.inner == (k,) and row.spread and len(matrix.inner) == 2, f"a row: {values}"
    return Value((n,), row.varies, torch.float32, spread=True)


def _unbundle(values: tuple[Value, ...], arg: object) -> Value:
    return replace(values[0], dtype=compute_dtype(arg[2]), stored=None)


def _bundle(values: tuple[Value, ...], arg: object) -> Value:
    wide = WIDE[arg.itemsize * len(values)]
    return replace(_joined(values, values[:1]), dtype=wide, stored=None)


def _reduction(values: tuple[Value, ...], arg: object) -> Value:
    (operand,) = values
    varies = Varies.ROW if operand.varies is Varies.ROW else Varies.SCALAR
    if arg is None:
        return Value((), varies, operand.dtype)
    inner = list(operand.inner)
    del inner[arg]
    if operand.varies is Varies.SHARED and inner:
        varies = Varies.SHARED
    return Value(tuple(inner), varies, operand.dtype, None, operand.spread and arg < -1)


def _kthvalue(values: tuple[Value, ...], arg: object) -> Value:
    *pieces, rank = values
    assert rank.dtype is torch.int32 and not rank.inner, f"a rank is a number: {values}"
    found = _reduction((pieces[0],), arg)
    is_of_row = any(each.varies is Varies.ROW for each in values)
    return replace(found, varies=Varies.ROW) if is_of_row else found


def _grouped(values: tuple[Value, ...], arg: object) -> Value:
    (operand,), (op, size) = values, arg
    assert op in REDUCTIONS and operand.spread and operand.inner[-1] % size == 0, (values, arg)
    return replace(operand, stored=None)


def _scan(values: tuple[Value, ...], arg: object) -> Value:
    (operand,) = values
    assert operand.inner, f"a scan of one number: {values}"
    varies = Varies.ROW if operand.varies is Varies.ROW else Varies.SHARED
    return replace(operand, varies=varies)


def _of(rule: Rule, *dtypes: torch.dtype) -> Rule:
    """The rule for operands of these dtypes only: tracing brings them to one."""

    def checked(values: tuple[Value, ...], arg: object) -> Value:
        _refuse_storage(values)
        assert {v.dtype for v in values}.issubset(dtypes), f"expected {dtypes}: {values}"
        return rule(values, arg)

    return checked


def _refuse_storage(values: tuple[Value, ...]) -> None:
    """Raise DtypeError where an operand has a dtype that is not computed in."""
    for v in values:
        if v.dtype in STORAGE:
            raise DtypeError(not_computed(v.dtype))


def not_computed(dtype: torch.dtype) -> str:
    """What to write where something is computed in a dtype of 8 bits."""
    remedy = "x.float()" if dtype in FLOAT8 else "x.float() or x.int()"
    name = str(dtype).removeprefix("torch.")
    return f"{name} is stored and not computed in: convert it first, {remedy}"


def _length(values: tuple[Value, ...], arg: object) -> Value:
    return Value((), Varies.SCALAR, arg)


def _leaf(values: tuple[Value, ...], arg: object) -> Value:
    raise AssertionError("the value of a leaf is given, not inferred")


WIDE = {4: torch.int32, 8: torch.int64}  # what a bundle of so many bytes is held in
MASKS, FLOATS, INTEGERS = (torch.bool,), (torch.float32,), (torch.int32, torch.int64)
NUMBERS = (torch.float32, torch.int32, torch.int64)
# From each operation to the rule that gives its value from those of its operands. A rule may raise
# DtypeError or ShapeError.
# fmt: off
INFER: dict[Op, Rule] = {
    Op.INPUT: _leaf, Op.CONST: _leaf, Op.INDEX: _leaf, Op.LENGTH: _length,
    **dict.fromkeys(
        (Op.SQRT, Op.RSQRT, Op.EXP, Op.EXP2, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10, Op.LOG1P, Op.SIN,
         Op.COS, Op.TANH, Op.SIGMOID, Op.ERF, Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC, Op.DIV,
         Op.FLOOR_LOG2, Op.CEIL_LOG2,
         Op.POW), _of(_elementwise, *FLOATS)),
    **dict.fromkeys(
        (Op.NEG, Op.ABS, Op.SIGN, Op.ADD, Op.SUB, Op.MUL, Op.FLOORDIV, Op.MOD, Op.MAXIMUM,
         Op.MINIMUM), _of(_elementwise, *NUMBERS)),
    **dict.fromkeys((Op.NOT, Op.AND, Op.OR, Op.XOR), _of(_elementwise, *MASKS, *INTEGERS)),
    **dict.fromkeys((Op.LSHIFT, Op.RSHIFT), _of(_elementwise, *INTEGERS)),
    **dict.fromkeys((Op.PHILOX, Op.WORD), _of(_elementwise, torch.int64)),
    **dict.fromkeys((Op.UNIFORM, Op.EXPONENTIAL), _of(_made(torch.float32), torch.int64)),
    **dict.fromkeys(COMPARISONS, _comparison),
    Op.EXPONENT: _of(_made(torch.int32), *FLOATS), Op.LDEXP: _ldexp,
    Op.BITS: _of(_made(torch.int32), *FLOATS), Op.FLOAT_OF: _of(_made(torch.float32), torch.int32),
    Op.STOP: _first, Op.CUSTOM: _first, Op.CAST: _cast, Op.CONVERT: _convert,
    Op.WHERE: _where, Op.RESHAPE: _reshape, Op.SLICE: _slice, Op.SHIFT: _shift,
    Op.PERMUTE: _permute, Op.EXPAND: _expand, Op.CAT: _cat, Op.UNBUNDLE: _unbundle,
    Op.BUNDLE: _bundle, Op.TAKE: _take, Op.GATHER: _gather, Op.LOOKUP: _lookup,
    Op.MATMUL: _matmul, Op.GROUPED: _grouped, Op.KEY: _key, Op.KEY_INDEX: _of_key,
    Op.KEY_VALUE: _of_key,
    **dict.fromkeys((Op.SUM, Op.PROD, Op.MAX, Op.MIN), _of(_reduction, *NUMBERS)),
    Op.MEAN: _of(_reduction, *FLOATS),
    **dict.fromkeys((Op.ANY, Op.ALL), _of(_reduction, *MASKS)),
    Op.KTHVALUE: _of(_kthvalue, torch.float32, torch.int32),
    **dict.fromkeys(SCANS, _of(_scan, *NUMBERS)),
    **dict.fromkeys((Op.LOGCUMSUMEXP, Op.LOGSUMEXP_FROM_END), _of(_scan, *FLOATS)),
}
# fmt: on

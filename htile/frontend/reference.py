"""Evaluates a Graph with torch, at the same rounding points as the kernel: HTile without a GPU.

The forms of a plan are not followed: where a kernel rounds a product and a sum once, by fma, torch
rounds twice.

`EVALUATE` is the table from each operation to its torch function. A value is held as a tensor of
the rows' leading dimensions (each of full size or 1) and the axes of its `inner` shape. Operands of
an elementwise operation get axes of size 1 between the two, so that torch's broadcasting is that of
the row.

A row's bits depend on the row alone. torch's own sums depend on the layout, on the number of rows
and on the number of threads, so rows are summed as halving trees here. Some elementwise functions
of torch have two kernels that differ in the last bit or in the sign of a zero, one for elements
that are neighbours in memory; here always the same one decides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from ..errors import ArgumentError
from .dtypes import E8M0, FLOAT8, STORAGE
from .formulas import formulas
from .graph import Graph
from .ops import COMPARISONS, FROM_END, MOVEMENTS, REDUCTIONS, SCANS, TURNED, WIDE, Op
from .philox import exponential_of, uniform_of, word_of, words

Function = Callable[..., Tensor]
Rule = Callable[[tuple[Tensor, ...], object, torch.dtype], Tensor]


def _apart(function: Function) -> Function:
    """A function that torch computes with other bits where elements are neighbours in memory.

    Every second element of a buffer has no neighbour.
    """

    def apart(*values: Tensor) -> Tensor:
        if not values[0].is_floating_point():
            return function(*values)
        values = torch.broadcast_tensors(*values)
        return function(*(torch.stack((v, v), -1)[..., 0] for v in values))

    return apart


def _divide(function: Function) -> Function:
    """Of integers: torch on the CPU raises for a zero divisor, a kernel gives any value."""

    def checked(a: Tensor, b: Tensor) -> Tensor:
        if not b.is_floating_point() and b.device.type != "meta" and (b == 0).any():
            raise ArgumentError("a division (//, %) of integers by zero")
        return function(a, b)

    return checked


def _pairwise(function: Function, join: Function) -> Function:
    """Maximum and minimum. Of two zeros torch gives either, so their signs are joined: it gives
    the other one for swapped operands."""

    def pairwise(a: Tensor, b: Tensor) -> Tensor:
        if not a.is_floating_point():
            return function(a, b)
        bits = torch.int32 if a.dtype is torch.float32 else torch.int64
        return join(function(a, b).view(bits), function(b, a).view(bits)).view(a.dtype)

    return pairwise


def _extreme(function: Function, is_negative: bool) -> Function:
    """A row's maximum and minimum; a zero has the sign that `_pairwise` would give."""

    def extreme(x: Tensor) -> Tensor:
        result = function(x, dim=-1, keepdim=True)
        if x.is_floating_point() and x.device.type != "meta" and (result == 0).any():
            found = ((x == 0) & (x.signbit() == is_negative)).any(-1, keepdim=True)
            zero = torch.where(found == is_negative, -0.0, 0.0).to(x.dtype)
            result = torch.where(result == 0, zero, result)
        return result

    return extreme


def _halved(x: Tensor, combine: Function) -> Tensor:
    """The two halves of a row combined; an odd element stays."""
    half = x.shape[-1] // 2
    pairs = combine(x[..., :half], x[..., half : 2 * half])
    return torch.cat([pairs, x[..., 2 * half :]], -1) if x.shape[-1] % 2 else pairs


def _folded(x: Tensor, combine: Function) -> Tensor:
    while x.shape[-1] > 1:
        x = _halved(x, combine)
    return x


def _sum(x: Tensor) -> Tensor:
    """A row's sum: of floating values in float64, for `evaluate` to round.

    Three times the row is halved as it is, then in float64. So sums of equal elements are exact:
    float32 holds 8 times any element.
    """
    if not x.is_floating_point():
        return torch.sum(x, -1, keepdim=True, dtype=x.dtype)
    whole = x.shape[-1] // 8 * 8
    eighth = x[..., :whole]
    for _ in range(3):
        eighth = _halved(eighth, torch.add)
    return _folded(torch.cat([eighth.double(), x[..., whole:].double()], -1), torch.add)


def _product(x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return torch.prod(x, -1, keepdim=True, dtype=x.dtype)
    return _folded(x.double(), torch.mul)


def _scan(function: Function) -> Function:
    """A row's cumulative sums or products, as `_sum` has floating values."""

    def scan(x: Tensor) -> Tensor:
        return function(x, -1, dtype=torch.float64 if x.is_floating_point() else x.dtype)

    return scan


def _running(function: Function) -> Function:
    return lambda x: function(x, -1).values


def _turned(op: Op) -> Function:
    """A scan from the end of a row."""
    return lambda x: _FUNCTIONS[TURNED[op]](x.flip(-1)).flip(-1)


def _kthvalue(x: Tensor, rank: Tensor) -> Tensor:
    """The element of a rank in a row; NaN of floats where there is none, and 0 of integers."""
    size = x.shape[-1]
    lead = torch.broadcast_shapes(x.shape[:-1], rank.shape)  # a vector may be all rows'
    found = (x.sort(-1).values + 0).expand(*lead, size)
    place = rank.long().expand(lead)[..., None]
    is_there = (place >= 0) & (place < size)
    found = found.gather(-1, place.clamp(0, size - 1))
    return torch.where(is_there, found, torch.nan if x.is_floating_point() else 0)


SATURATING = STORAGE - {torch.float8_e5m2, E8M0}  # e5m2 has infinities, and e8m0 gives NaN


def _convert(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    """Round to the dtype `arg`, and go on in what it is computed in.

    A float beyond the range of float8_e4m3fn, int8 or uint8 becomes the end of the range, and NaN
    the integer 0. torch leaves open what becomes of them in integers, and its versions differ for
    infinities in float8_e4m3fn.
    """
    (value,) = values
    if arg in FLOAT8 and not value.is_floating_point():
        value = value.to(dtype)
    if arg in SATURATING and value.is_floating_point():
        info = (torch.finfo if arg in FLOAT8 else torch.iinfo)(arg)
        value = value.clamp(info.min, info.max)
        value = value if arg in FLOAT8 else value.nan_to_num(nan=0.0)
    if not arg.is_floating_point:
        return value.to(arg)
    return (value if arg is torch.float32 else value.to(arg)).to(dtype)


def _exponent(x: Tensor) -> Tensor:
    """What torch.frexp leaves open for infinities and NaN is 0."""
    return torch.where(x.isfinite(), torch.frexp(x).exponent, 0)


def _whole_log2(x: Tensor, is_ceil: bool) -> Tensor:
    """The floor or the ceiling of log2(x), from the exponent."""
    mantissa, exponent = torch.frexp(x)
    whole = (exponent - 1 + ((mantissa > 0.5) & is_ceil)).to(x.dtype)
    whole = torch.where(x < 1, -whole.abs(), whole)  # between 0.5 and 1 the ceiling is -0.0
    return torch.where((x > 0) & x.isfinite(), whole, torch.log2(x))


MOST = 1000  # of the exponents of powers of two that are float64, with what is far enough beyond


def _ldexp(x: Tensor, e: Tensor) -> Tensor:
    """x * 2 ** e as torch 2.13 has it, for `evaluate` to round. Older ones round 2 ** e first."""
    power = (e.clamp(-MOST, MOST).long() + 1023 << 52).view(torch.float64)
    return x.double() * power


_NAMESAKES = (  # operations whose function of torch has their name
    Op.NEG, Op.ABS, Op.SIGN, Op.SQRT, Op.RSQRT, Op.EXP, Op.EXPM1, Op.LOG, Op.LOG2, Op.LOG10,
    Op.LOG1P, Op.SIN, Op.COS, Op.TANH, Op.ERF, Op.FLOOR, Op.CEIL, Op.ROUND, Op.TRUNC, Op.ADD,
    Op.SUB, Op.MUL, Op.DIV, Op.WHERE, *COMPARISONS,
)  # fmt: skip
_FUNCTIONS: dict[Op, Function] = {
    **{op: getattr(torch, op.value) for op in _NAMESAKES},
    Op.EXP2: _apart(torch.exp2),
    Op.EXPONENT: _exponent,
    Op.BITS: lambda x: x.float().view(torch.int32),
    Op.FLOOR_LOG2: partial(_whole_log2, is_ceil=False),
    Op.CEIL_LOG2: partial(_whole_log2, is_ceil=True),
    Op.LDEXP: _ldexp,
    Op.POW: _apart(torch.pow),
    Op.SIGMOID: lambda x: torch.neg(x).exp_().add_(1).reciprocal_(),
    Op.FLOORDIV: _divide(torch.floor_divide),
    Op.MOD: _divide(_apart(torch.remainder)),
    Op.MAXIMUM: _pairwise(torch.maximum, torch.bitwise_and),
    Op.MINIMUM: _pairwise(torch.minimum, torch.bitwise_or),
    Op.NOT: torch.bitwise_not,
    Op.AND: torch.bitwise_and,
    Op.OR: torch.bitwise_or,
    Op.XOR: torch.bitwise_xor,
    Op.LSHIFT: torch.bitwise_left_shift,
    Op.RSHIFT: torch.bitwise_right_shift,
    Op.STOP: lambda x: x, Op.CUSTOM: lambda x, *read: x,
    Op.RESHAPE: lambda x: x,  # `evaluate` reshapes: it knows how many leading dimensions there are
    Op.SUM: _sum,
    Op.MEAN: lambda x: _sum(x) / x.shape[-1],  # of equal elements it is that element, as torch's
    Op.PROD: _product,
    Op.MAX: _extreme(torch.amax, is_negative=False),
    Op.MIN: _extreme(torch.amin, is_negative=True),
    Op.ANY: partial(torch.any, dim=-1, keepdim=True),
    Op.ALL: partial(torch.all, dim=-1, keepdim=True),
    Op.CUMSUM: _scan(torch.cumsum),
    Op.CUMPROD: _scan(torch.cumprod),
    Op.CUMMAX: _running(torch.cummax), Op.CUMMIN: _running(torch.cummin),
    Op.LOGCUMSUMEXP: lambda x: torch.logcumsumexp(x.double(), -1),
    Op.KTHVALUE: _kthvalue,
    **{op: _turned(op) for op in FROM_END},
}


def _rule(function: Function) -> Rule:
    return lambda values, arg, dtype: function(*values)


def _slice(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    axis, start, step, size = arg
    kept = slice(start, start + (size - 1) * step + 1, step)
    return values[0][(..., kept, *(slice(None),) * (-1 - axis))]


def _shift(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    (x,), (start, size) = values, arg
    places = torch.arange(start, start + size, device=x.device)
    return x[..., places.clamp(0, x.shape[-1] - 1)]


def _permute(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    (x,) = values
    return x.permute((*range(x.dim() - len(arg)), *(x.dim() + axis for axis in arg)))


def _expand(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    (x,) = values
    return x.expand((*x.shape[: x.dim() - len(arg)], *arg))


def _cat(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    shapes = [(*v.shape[:arg], 1, *v.shape[arg:][1:]) for v in values]
    shape = list(torch.broadcast_shapes(*shapes))
    wide = []
    for v in values:
        shape[arg] = v.shape[arg]
        wide.append(v.expand(shape))
    return torch.cat(wide, arg)


def _take(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    row, index = values
    index = index[..., 0] if index.dim() == row.dim() else index
    lead = torch.broadcast_shapes(row.shape[:-1], index.shape)
    places = index.expand(lead)[..., None].long()
    return row.expand((*lead, row.shape[-1])).take_along_dim(places, -1)[..., 0]


def _gather(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    row, index = values
    lead = torch.broadcast_shapes(row.shape[:-1], index.shape[:-1])
    row = row.expand((*lead, row.shape[-1]))
    places = index.expand((*lead, index.shape[-1])).long().clamp(0, row.shape[-1] - 1)
    return row.take_along_dim(places, -1)


# A key has an element in its upper 32 bits, as an int32 in the order of the elements, and its index
# or the complement of that in the lower ones.
_LOW = 2**32 - 1


def _key(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    x, index = values
    if x.is_floating_point():
        x = x.float() + 0.0  # no -0.0
        bits = x.view(torch.int32)
        ordered = bits ^ (bits >> 31 & 0x7FFFFFFF)  # of negative floats the larger bits are less
        x = torch.where(x.isnan(), 0x7FFFFFFF, ordered)
    index = index.long()
    return x.long() << 32 | (index if arg else _LOW - index)


def _key_index(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    low = values[0] & _LOW
    return low if arg else _LOW - low


def _key_value(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    x = (values[0] >> 32).int()
    return (x ^ (x >> 31 & 0x7FFFFFFF)).view(arg).to(dtype) if arg.is_floating_point else x


def _philox(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    return words(*values)[arg]


def _word(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    return word_of(*values)


def _uniform(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    return uniform_of(values[0]).to(dtype)  # the float32 number in either


def _float_of(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    return values[0].contiguous().view(torch.float32).to(dtype)  # the float32 number in either


def _exponential(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    return exponential_of(values[0], dtype)


def _lookup(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    """A part of a table (1, ..., P, *inner) for each index (*lead,); torch reads none beyond."""
    table, index = values
    table, index = table.reshape(table.shape[index.dim() :]), index.long()
    place = torch.where(index < 0, index + len(table), index)
    is_there = (place >= 0) & (place < len(table))
    found = table[place.clamp(0, len(table) - 1)]
    is_there = is_there.reshape((*is_there.shape, *(1,) * (table.dim() - 1)))
    if table.dtype in FLOAT8:  # which torch does not choose from
        bits = torch.where(is_there, found.view(torch.uint8), NAN8.get(table.dtype, 0x7F))
        return bits.view(table.dtype)
    return torch.where(is_there, found, found.new_tensor(NAN if found.is_floating_point() else 0))


def _matmul(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    """Of rows (*lead, K) and a matrix (1, ..., N, K), for `evaluate` to round."""
    row, matrix = values[0].double(), values[1].double()
    matrix = matrix.reshape(matrix.shape[-2:])
    return torch.matmul(row, matrix.T if arg else matrix)


def _grouped(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    op, size = arg
    groups = values[0].unflatten(-1, (-1, size))
    return EVALUATE[op]((groups,), None, dtype).expand(groups.shape).flatten(-2)


NAN, NAN8 = float("nan"), {E8M0: 0xFF}  # and its bits, where they are not 0x7F


def _unbundle(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    which, count, of = arg
    return values[0].contiguous().view(of)[..., which::count]


def _bundle(values: tuple[Tensor, ...], arg: object, dtype: torch.dtype) -> Tensor:
    values = torch.broadcast_tensors(*(value.to(arg) for value in values))
    return torch.stack(values, -1).flatten(-2).view(WIDE[arg.itemsize * len(values)])


# The leaves INPUT, CONST, INDEX and LENGTH have no rule: `evaluate` gives their values.
EVALUATE: dict[Op, Rule] = {op: _rule(function) for op, function in _FUNCTIONS.items()}
EVALUATE |= {Op.CAST: _convert, Op.CONVERT: _convert}
EVALUATE |= {Op.SLICE: _slice, Op.PERMUTE: _permute, Op.EXPAND: _expand, Op.CAT: _cat}
EVALUATE |= {Op.SHIFT: _shift}
EVALUATE |= {Op.KEY: _key, Op.KEY_INDEX: _key_index, Op.KEY_VALUE: _key_value}
EVALUATE |= {Op.PHILOX: _philox, Op.WORD: _word}
EVALUATE |= {Op.UNIFORM: _uniform, Op.EXPONENTIAL: _exponential, Op.FLOAT_OF: _float_of}
EVALUATE |= {Op.UNBUNDLE: _unbundle, Op.BUNDLE: _bundle}
EVALUATE |= {Op.TAKE: _take, Op.GATHER: _gather, Op.LOOKUP: _lookup}
EVALUATE |= {Op.GROUPED: _grouped, Op.MATMUL: _matmul}


def evaluate(
    graph: Graph,
    tensors: Mapping[str, Tensor | float],
    lead: tuple[int, ...],
    dtype: torch.dtype = torch.float32,
    length: int | None = None,
) -> object:
    """What the graph's function returns for these arguments, in the function's own structure.

    lead: the rows' leading shape.
    dtype: what floating values are computed in. Where it is not float32, floating outputs have it
        too, so that a test sees them before their last rounding.
    length: how many elements the rows have, of a graph of rows of any length.

    Outputs are contiguous and share no memory with inputs or each other.
    """
    found = [t for t in tensors.values() if isinstance(t, Tensor)]
    device = max(found, key=Tensor.dim).device if found else "cpu"  # that of a row
    last_use = {i: node.id for node in graph for i in node.inputs}
    outputs = {out.id for out in graph.outputs}
    values: dict[int, Tensor] = {}
    count = len(lead)
    whole = None if length is None else (graph.n,)  # the shape of rows of any length
    numbers = formulas(graph)
    numbers |= {i.id: (i, i.formula) for i in graph.inputs if i.formula is not None}
    for node in graph:
        inner = (length,) if node.value.inner == whole else node.value.inner
        if node.id not in last_use and node.id not in outputs:
            continue  # a row that gives the kernel its shape, and is not read
        if node.id in numbers:
            i, formula = numbers[node.id]
            value = formula.value(torch.as_tensor(tensors[i.name], dtype=torch.float64))
            value = value.to(device=device, dtype=dtype).reshape((1,) * count)
        elif node.op is Op.INDEX:
            value = torch.arange(prod(inner), dtype=node.value.dtype, device=device)
            value = value.reshape((*(1,) * count, *inner))
        elif node.op in (Op.INPUT, Op.CONST, Op.LENGTH):
            value = length if node.op is Op.LENGTH else node.arg
            value = tensors[node.arg] if node.op is Op.INPUT else value
            if not isinstance(value, Tensor):
                of = dtype if node.value.dtype.is_floating_point else node.value.dtype
                value = torch.tensor(value, dtype=of, device=device)
            # the leading shape of this argument; () for what all rows share
            own = value.shape[: max(0, value.dim() - len(inner))]
            rest = value.shape[len(own) :] if len(own) + len(inner) == value.dim() else ()
            rest = (1,) * (len(inner) - len(rest)) + tuple(rest)
            value = value.reshape((*(1,) * (count - len(own)), *own, *rest))
        elif node.op is Op.RESHAPE:
            value = values[node.inputs[0]]
            value = value.reshape((*value.shape[:count], *inner))
        elif node.op in REDUCTIONS:
            value = values[node.inputs[0]].movedim(node.arg or -1, -1)
            value = EVALUATE[node.op]((value,), node.arg, dtype).squeeze(-1)
        elif node.op is Op.KTHVALUE:
            *pieces, rank = (values[i] for i in node.inputs)
            axis = node.arg or -1
            row = torch.cat([each.movedim(axis, -1) for each in pieces], -1)
            rank = _aligned(rank, count, len(inner))
            value = EVALUATE[node.op]((row, rank), node.arg, dtype).squeeze(-1)
        elif node.op in SCANS:
            value = values[node.inputs[0]].movedim(node.arg or -1, -1)
            value = EVALUATE[node.op]((value,), node.arg, dtype).movedim(-1, node.arg or -1)
        elif node.op is Op.EXPAND:  # new axes are behind the leading dimensions
            value = _aligned(values[node.inputs[0]], count, len(inner))
            value = EVALUATE[node.op]((value,), node.arg, dtype)
        elif node.op in MOVEMENTS or node.op in (Op.TAKE, Op.GATHER, Op.LOOKUP, Op.MATMUL):
            value = EVALUATE[node.op](tuple(values[i] for i in node.inputs), node.arg, dtype)
        else:
            operands = tuple(_aligned(values[i], count, len(inner)) for i in node.inputs)
            value = EVALUATE[node.op](operands, node.arg, dtype)
        if value.is_floating_point() and value.dtype is not dtype:
            value = value.to(dtype)  # sums, means and products are rounded once
        values[node.id] = value.expand((*value.shape[:count], *inner))
        for i in set(node.inputs) - outputs:
            if last_use[i] == node.id:
                del values[i]
    results = []
    for out in graph.outputs:
        keep = dtype is not torch.float32 and out.dtype.is_floating_point
        inner = (length,) if out.inner == whole else out.inner
        shape, stored = (*lead, *inner), dtype if keep else out.dtype
        value = values[out.id]
        if value.dim() > count + len(out.inner):  # one element, in a placed graph
            value = value.reshape((*value.shape[:count], *out.inner))
        value = _aligned(value, count, len(out.inner))
        if out.over is not None:
            value = _over_rows(value.expand(shape), count, out.over)
            shape = value.shape
        results.append(torch.empty(shape, dtype=stored, device=device).copy_(value))
    return pytree.tree_unflatten(results, graph.structure)


def _over_rows(value: Tensor, count: int, over: Op) -> Tensor:
    """The reduction of a value over its `count` leading dimensions; of no rows a sum is 0.

    Each column is reduced as `EVALUATE` reduces a row.
    """
    rows = value.reshape((prod(value.shape[:count]), *value.shape[count:])).movedim(0, -1)
    if rows.shape[-1] == 0 and over is Op.SUM:
        return rows.new_zeros(rows.shape[:-1])
    return EVALUATE[over]((rows,), None, value.dtype).squeeze(-1)


def _aligned(value: Tensor, count: int, rank: int) -> Tensor:
    """A value with `rank` axes behind its `count` leading dimensions."""
    missing = rank - (value.dim() - count)
    return value.reshape((*value.shape[:count], *(1,) * missing, *value.shape[count:]))

"""Patterns in a graph: which device function computes a node, and what becomes an fma.

They are read off the shape of the graph, as is what a difference subtracts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from enum import Enum
from math import inf, isclose, sqrt

import torch

from ..frontend.graph import Builder, Graph, Node, Output
from ..frontend.known import Known
from ..frontend.ops import COLLECTIVES, COMPARISONS, MOVEMENTS, Op, Varies
from .precision import NEAR_OPS, seen_in_16_bits
from .ranges import range_of


class Function(Enum):
    """Which device function computes a node. Each is as exact as its result needs."""

    EXACT = "exact"
    BOUNDED = "bounded"  # the operand's range makes a short one as exact as the output needs
    QUOTIENT = "as a power"  # an exponential over a known sum of them, for 16-bit results
    NUMBER = "by a number"  # as exact, through the reciprocal and one correction
    SCALAR = "by a scalar"  # as exact, by an exponent that is one number of the launch
    SHARED = "shared"  # as exact, by a divisor that the elements of a group share
    NEAR = "near"  # a shorter one, because its result is only seen in 16 bits
    GELU = "gelu"  # as near, of a product that is x times the normal distribution function of x
    FAST = "fast"  # asked for by fastmath=True
    FMA = "fma"  # a * b + c, of the factors of a product that nobody else reads
    FMS = "fms"  # a * b - c
    FNMA = "fnma"  # c - a * b
    COLUMNS = "of columns"  # the column's number beside what a row has once: one instruction
    FOURS = "fours"  # random words of a row's keys: four neighbouring columns share a counter
    ELEMENT = "element"  # the one of a group of a tile that a column's number picks, if it is there
    FACTORS = "factors"  # a product that a sum alone reads, over the row or all rows: adds by fma
    INDEXED = "indexed"  # a key that maxima of the row alone read: a thread makes one of all its


PRODUCTS = {4.0: 2, 5.0: 3, 6.0: 3, 7.0: 4}  # of a power with such an exponent
MOST_EXPONENT = 64  # of a power, in magnitude, up to which the short function is near enough
# Where a function takes the shorter of its two ways. Angles are less than `htile.compute.angles`
# says, and numbers are twice the least that has all its digits, or more.
ANGLES, NORMAL = (-1e5, 1e5), (2.0**-125, inf)
ENDS = {
    Op.SIN: ANGLES, Op.COS: ANGLES, Op.LOG: NORMAL, Op.LOG2: NORMAL, Op.LOG10: NORMAL,
}  # fmt: skip
FAST_OPS = frozenset({Op.TANH, Op.LOG, Op.LOG2, Op.LOG10, Op.SIN, Op.COS})


def choose_function(
    graph: Graph, node: Node, fastmath: bool, near: bool, in_loops: bool = False,
    in_tiles: bool = False,
) -> tuple[Function, tuple[int, ...]]:
    """The device function for a node, and the nodes that it takes.

    These are the node's inputs, or in place of a product its factors. A short function is chosen
    where the range of the operands allows it.

    near: whether it is an element that is only seen in 16 bits (`seen_in_16_bits`).
    in_loops: whether a loop computes exponentials again that one before it has summed.
    in_tiles: whether the rows are products, of which a thread has pairs of neighbours.
    """
    if in_tiles and (picked := _element_of(graph, node)):
        return Function.ELEMENT, picked
    if _compares_columns(graph, node, in_loops):
        return Function.COLUMNS, node.inputs[1:]
    if node.op is Op.WORD:
        index, *others = graph.operands(node)
        is_shared = _counts_columns(graph, index) and not any(o.value.spread for o in others)
        is_shared = is_shared and not in_tiles
        return Function.FOURS if is_shared else Function.EXACT, node.inputs
    if node.op is Op.EXP and (node.arg is Known.SHARE or is_bounded_exponential(graph, node)):
        return Function.BOUNDED, node.inputs
    if node.op is Op.DIV and (node.arg is Known.SHARE or is_part_of_sum(graph, node)):
        exponential, total = graph.operands(node)
        if in_loops and _is_only_returned_in_16_bits(graph, node):
            return Function.QUOTIENT, (exponential.inputs[0], total.id)
        return Function.BOUNDED, node.inputs
    if node.op is Op.DIV and node.arg is Known.ORDINARY:
        return Function.BOUNDED, node.inputs
    if is_largest_share(graph, node):  # the same function, so that it equals the element
        return Function.BOUNDED, node.inputs
    is_fast = fastmath and node.op in FAST_OPS
    if near and _has_near_form(graph, node) and not is_fast:
        return Function.NEAR, node.inputs
    if near and (x := _gelu_of(graph, node)) is not None:
        return Function.GELU, (x,)
    if node.op in ENDS and not is_fast and _is_ordinary(graph, node):
        return Function.BOUNDED, node.inputs
    if node.op is Op.LOG1P and _is_at_most_one(graph, graph[node.inputs[0]]):
        return Function.BOUNDED, node.inputs
    if node.op is Op.DIV:
        divisor = graph[node.inputs[1]]
        if divisor.op is Op.CONST and 2.0**-100 <= abs(divisor.arg) <= 2.0**100:
            return Function.NUMBER, node.inputs  # its reciprocal is neither huge nor tiny
        if divisor.value.spread and divisor.id in graph.equal_in_groups:
            return Function.SHARED, node.inputs
    if node.op is Op.POW and _is_scalar(graph[node.inputs[1]]):
        return Function.SCALAR, node.inputs
    product = _added_product(graph, node)
    if product is not None:
        kind = Function.FMS if product == node.inputs[0] else Function.FNMA
        rest = (i for i in node.inputs if i != product)
        return Function.FMA if node.op is Op.ADD else kind, (*graph[product].inputs, *rest)
    if node.op is Op.MUL and _is_only_summed(graph, node):
        return Function.FACTORS, node.inputs
    if not in_tiles and _is_only_in_maxima(graph, node):
        return Function.INDEXED, node.inputs
    return Function.FAST if is_fast else Function.EXACT, node.inputs


def has_branches(graph: Graph, node: Node) -> bool:
    """Whether a thread takes a longer way for elements that are huge or tiny."""
    if node.op in (Op.FLOORDIV, Op.MOD):
        return node.value.dtype is torch.float32
    return node.op in (Op.SIN, Op.COS) and not _is_ordinary(graph, node)


def count_short_functions(graph: Graph) -> Counter[Op]:
    """How many values are computed by short functions, by operation, because only 16 bits of them
    are seen."""
    near = seen_in_16_bits(graph)
    short = (Function.NEAR, Function.GELU)
    spread = [node for node in graph if node.value.spread and node.id in near]
    return Counter(n.op for n in spread if choose_function(graph, n, False, True)[0] in short)


def _has_near_form(graph: Graph, node: Node) -> bool:
    """Whether there is a short function of it for results that are only seen in 16 bits."""
    if node.op is not Op.POW:
        return node.op in NEAR_OPS
    exponent = graph[node.inputs[1]]
    if exponent.op is not Op.CONST:
        return _is_scalar(exponent)
    return 0 < abs(exponent.arg) <= MOST_EXPONENT and not number_of_products(graph, node)


def _is_scalar(node: Node) -> bool:
    """Whether it is one number of the launch, which the kernel does not know as it is compiled."""
    return node.op is not Op.CONST and node.value.varies is Varies.SCALAR and not node.value.spread


def number_of_products(graph: Graph, power: Node) -> int:
    """How many products a power is, or 0 if it is none."""
    exponent = graph[power.inputs[1]]
    return PRODUCTS.get(exponent.arg, 0) if exponent.op is Op.CONST else 0


def _element_of(graph: Graph, node: Node) -> tuple[int, ...]:
    """What a group's maximum takes, if all but the element at a column's number are -inf there.

    That is the row and the number, and the row's end if columns behind it do not count; else
    nothing.
    """
    if node.op is not Op.GROUPED or node.arg[0] is not Op.MAX:
        return ()
    chosen, ends = graph[node.inputs[0]], ()
    if before := _where_column(graph, chosen, Op.LT):
        chosen, ends = graph[before[0]], before[1:]
    picked = _where_column(graph, chosen, Op.EQ)
    return (*picked, *ends) if picked else ()


def _where_column(graph: Graph, node: Node, comparison: Op) -> tuple[int, ...]:
    """(x, number) if the node is x where the column's number compares so with it, else -inf."""
    if node.op is not Op.WHERE:
        return ()
    condition, x, other = graph.operands(node)
    if condition.op is not comparison or other.op is not Op.CONST or other.arg != -inf:
        return ()
    column, number = graph.operands(condition)
    return (x.id, number.id) if column.op is Op.INDEX and not number.value.spread else ()


def _compares_columns(graph: Graph, node: Node, in_loops: bool) -> bool:
    """Whether it is a comparison of the column's number, in int32, with what a row has once.

    In a comparison with a constant, a held row is better off with the column itself: the compiler
    then sees which vectors lie on one side of it, and does not even load those that have no effect.
    """
    if node.op not in COMPARISONS:
        return False
    columns, other = graph.operands(node)
    is_index = columns.op is Op.INDEX and columns.value.dtype is torch.int32
    return is_index and (in_loops if other.op is Op.CONST else not other.value.spread)


def _counts_columns(graph: Graph, node: Node) -> bool:
    """Whether it is the column's number, or that and a multiple of 4."""
    while node.op in (Op.RESHAPE, Op.CONVERT):
        node = graph[node.inputs[0]]
    if node.op is Op.ADD:
        node, number = graph.operands(node)
        return node.op is Op.INDEX and number.op is Op.CONST and number.arg % 4 == 0
    return node.op is Op.INDEX


def _is_only_returned_in_16_bits(graph: Graph, node: Node) -> bool:
    """Whether the node is returned in 16 bits or fewer, and nothing else reads it."""
    returned = [output for output in graph.outputs if output.id == node.id]
    bundles = [graph[id] for id in graph.readers[node.id] if graph[id].op is Op.BUNDLE]
    is_read = len(returned) + len(bundles) < len(graph.readers[node.id])
    # A term of a sum over rows counts as read: it has to be exact, whatever the sum is stored in.
    sizes = [o.dtype.itemsize if o.over is None else 4 for o in returned]
    sizes += [each.arg.itemsize for each in bundles]
    return not is_read and max(sizes) <= 2


def _is_ordinary(graph: Graph, node: Node) -> bool:
    """Whether the operand of a function is never so large or so small that it goes another way."""
    (low, high), (least, most) = range_of(graph, graph[node.inputs[0]]), ENDS[node.op]
    return least <= low and high <= most


def _is_at_most_one(graph: Graph, node: Node) -> bool:
    """Whether it is a power with an exponent of -|x|, so from 0 to 1."""
    if node.op not in (Op.EXP, Op.EXP2):
        return False
    exponent = graph[node.inputs[0]]
    return exponent.op is Op.NEG and graph[exponent.inputs[0]].op is Op.ABS


def _gelu_of(graph: Graph, node: Node) -> int | None:
    """x, if the node is x * (1 + erf(x / sqrt(2))) / 2, in whatever order it is multiplied."""
    number, factors = _factors(graph, node)
    if number != 0.5 or len(factors) != 2:
        return None
    for x, share in (factors, factors[::-1]):
        if share.op is Op.ADD:
            one, of_erf = sorted(graph.operands(share), key=lambda operand: operand.op is Op.ERF)
            if one.op is Op.CONST and one.arg == 1 and of_erf.op is Op.ERF:
                number, inside = _factors(graph, graph[of_erf.inputs[0]])
                if inside == [x] and isclose(number, sqrt(0.5), rel_tol=1e-6):
                    return x.id
    return None


def _factors(graph: Graph, node: Node) -> tuple[float, list[Node]]:
    """What a product multiplies: the product of its numbers, and the other factors."""
    if node.op is Op.CONST:
        return float(node.arg), []
    if node.op is Op.DIV and graph[node.inputs[1]].op is Op.CONST and graph[node.inputs[1]].arg:
        number, found = _factors(graph, graph[node.inputs[0]])
        return number / graph[node.inputs[1]].arg, found
    if node.op is not Op.MUL:
        return 1.0, [node]
    (a, first), (b, second) = (_factors(graph, operand) for operand in graph.operands(node))
    return a * b, first + second


def _added_product(graph: Graph, node: Node) -> int | None:
    """The operand of an addition or subtraction that is a product nobody else reads: an fma.

    A product that others read is rounded for all of them, so that exp(x * w - max(x * w)) is 1 at
    the maximum. So is a product that another product is added to: x * c - max(x) * c is 0 at the
    maximum, and x * x - y * y is 0 where x is y.
    """
    if node.op not in (Op.ADD, Op.SUB):
        return None
    products = [i for i in node.inputs if _is_product(graph, graph[i])]
    alone = len(products) == 1 and _is_read_once(graph, graph[products[0]])
    return products[0] if alone else None


def _is_product(graph: Graph, node: Node) -> bool:
    """Whether it is a product, the negative of one, or the largest or smallest of some."""
    while node.op in (Op.RESHAPE, Op.NEG, Op.MAX, Op.MIN):
        node = graph[node.inputs[0]]
    return node.op is Op.MUL


def _is_read_once(graph: Graph, node: Node) -> bool:
    """Whether it is a product of floats, one an element, that one node alone reads."""
    is_product = node.op is Op.MUL and node.value.dtype is torch.float32 and node.value.spread
    readers = graph.readers[node.id]
    return is_product and len(readers) == 1 and readers != (node.id,)


def _is_only_summed(graph: Graph, node: Node) -> bool:
    """Whether a sum over the row or over all rows alone reads a product of floats, an element each.
    """
    if _is_read_once(graph, node):
        return graph[graph.readers[node.id][0]].op in (Op.SUM, Op.MEAN)
    is_result = node.value.dtype is torch.float32 and graph.readers[node.id] == (node.id,)
    if not is_result or not node.value.spread:
        return False
    (output,) = (output for output in graph.outputs if output.id == node.id)
    return output.over is Op.SUM


def _is_only_in_maxima(graph: Graph, node: Node) -> bool:
    """Whether maxima over the row alone read the key of an element and of its column's number."""
    if node.op is not Op.KEY or node.arg or graph[node.inputs[1]].op is not Op.INDEX:
        return False
    readers = graph.readers[node.id]
    return node.value.spread and all(graph[i].op is Op.MAX and i != node.id for i in readers)


def subtracted(graph: Graph, node: Node, op: Op, in_groups: bool = False) -> Node | None:
    """The reduction of x by `op`, if the node is x minus it.

    logsumexp subtracts 0 in place of an infinite maximum.

    in_groups: whether it may be the reduction of a group of columns.
    """
    if node.op is not Op.SUB:
        return None
    x, m = graph.operands(node)
    m = strip(graph, m)
    if op is Op.MAX and m.op is Op.WHERE:
        condition, zero, peak = (strip(graph, operand) for operand in graph.operands(m))
        is_zero = zero.op is Op.CONST and zero.arg == 0.0
        if not (is_zero and is_infinite(graph, condition, peak)):
            return None
        m = peak
    is_found = m.op is op or (in_groups and m.op is Op.GROUPED and m.arg[0] is op)
    return m if is_found and m.inputs == (x.id,) else None


def peak_of_total(graph: Graph, node: Node) -> Node | None:
    """max(x), if the node is the sum of exp(x - max(x)) over the same row or the same groups."""
    is_grouped = node.op is Op.GROUPED and node.arg[0] is Op.SUM
    if not is_grouped and node.op is not Op.SUM:
        return None
    exponential = graph[node.inputs[0]]
    if exponential.op is not Op.EXP:
        return None
    exponent = graph[exponential.inputs[0]]
    peak = subtracted(graph, exponent, Op.MAX, in_groups=is_grouped)
    if peak is None or (peak.op is Op.GROUPED) != is_grouped:
        return None
    is_same = peak.arg[1:] == node.arg[1:] if is_grouped else peak.arg == node.arg
    return peak if is_same else None


def total_of(graph: Graph, node: Node, in_groups: bool = False) -> Node | None:
    """The sum of a softmax's exponentials, if the node is its logarithm.

    log_softmax has NaN in place of it where the maximum is infinite.

    in_groups: whether it may be the softmax of a group of columns.
    """
    node, condition = strip(graph, node), None
    if node.op is Op.WHERE:
        condition, nan, node = (strip(graph, graph[i]) for i in node.inputs)
        if nan.op is not Op.CONST or nan.arg == nan.arg:
            return None
    if node.op is not Op.LOG:
        return None
    total = strip(graph, graph[node.inputs[0]])
    peak = peak_of_total(graph, total) if in_groups or total.op is Op.SUM else None
    if peak is None or (condition is not None and not is_infinite(graph, condition, peak)):
        return None
    return total


def is_infinite(graph: Graph, condition: Node, x: Node) -> bool:
    """Whether the condition is abs(x) == inf."""
    if condition.op is not Op.EQ:
        return False
    magnitude, limit = (strip(graph, operand) for operand in graph.operands(condition))
    is_magnitude = magnitude.op is Op.ABS and strip(graph, graph[magnitude.inputs[0]]).id == x.id
    return is_magnitude and limit.op is Op.CONST and limit.arg == inf


def is_bounded_exponential(graph: Graph, node: Node) -> bool:
    """Whether it is exp(x - max(x)) or exp(log_softmax(x)), which are at most 1.

    The short function of these has an error that grows with |x|, where the result is small.
    """
    if is_exponential(graph, node):
        return True
    if node.op is not Op.EXP or graph[node.inputs[0]].op is not Op.SUB:
        return False
    exponent, logarithm = graph.operands(graph[node.inputs[0]])
    total = total_of(graph, logarithm, in_groups=True)
    return total is not None and graph[total.inputs[0]].inputs == (exponent.id,)


def is_exponential(graph: Graph, node: Node) -> bool:
    """Whether it is exp(x - max(x))."""
    if node.op is not Op.EXP:
        return False
    return subtracted(graph, graph[node.inputs[0]], Op.MAX, in_groups=True) is not None


def is_part_of_sum(graph: Graph, node: Node) -> bool:
    """Whether it is e / sum(e) with e = exp(x - max(x)).

    The sum is in [1, N], so rcp.approx loses nothing.
    """
    if node.op is not Op.DIV:
        return False
    part, whole = graph.operands(node)
    whole = strip(graph, whole)
    return whole.op is Op.SUM and whole.inputs == (part.id,) and is_exponential(graph, part)


def is_largest_share(graph: Graph, node: Node) -> bool:
    """Whether it is 1 / sum(e), the largest of e / sum(e) with e = exp(x - max(x))."""
    if node.op is not Op.DIV:
        return False
    one, whole = graph[node.inputs[0]], strip(graph, graph[node.inputs[1]])
    is_sum = whole.op is Op.SUM and one.op is Op.CONST and one.arg == 1.0
    return is_sum and is_exponential(graph, graph[whole.inputs[0]])


# These do not follow from their operands element by element, or not in a thread alone.
NOT_ELEMENTWISE = frozenset({
    Op.INPUT, Op.CONST, Op.INDEX, Op.LENGTH, Op.TAKE, Op.GATHER, Op.LOOKUP, Op.MATMUL, Op.BUNDLE,
    Op.UNBUNDLE, Op.GROUPED, Op.PHILOX, Op.WORD, Op.KEY, *COLLECTIVES, *MOVEMENTS,
})  # fmt: skip


def periods(graph: Graph) -> dict[int, int]:
    """After how many columns a value repeats, by the id of its node; powers of two.

    That is what is computed of the column's number in its group, of values of the row and of
    numbers.
    """
    found: dict[int, int] = {}
    for node in graph:
        if not node.value.spread:
            continue
        if period := _of_number(graph, node):
            found[node.id] = period
        elif node.op not in NOT_ELEMENTWISE:
            spread = [o.id for o in graph.operands(node) if o.value.spread and o.op is not Op.CONST]
            if spread and found.keys() >= {*spread}:
                found[node.id] = max(found[id] for id in spread)
    return found


def _of_number(graph: Graph, node: Node) -> int | None:
    """The size of the groups, if the node is the column's number in its group."""
    if node.op is not Op.AND or node.value.dtype is torch.bool:
        return None
    number, mask = graph.operands(node)
    is_number = number.op is Op.INDEX and mask.op is Op.CONST and mask.arg > 0
    return mask.arg + 1 if is_number and mask.arg & (mask.arg + 1) == 0 else None


def strip(graph: Graph | Builder, node: Node) -> Node:
    """The node without the reshapes around it, which move no element."""
    while node.op is Op.RESHAPE:
        node = graph[node.inputs[0]]
    return node


def ancestors(graph: Graph, outputs: Iterable[Output]) -> set[int]:
    """The nodes that outputs are computed from, themselves included."""
    found: set[int] = set()
    todo = [output.id for output in outputs]
    while todo:
        id = todo.pop()
        if id not in found:
            found.add(id)
            todo += graph[id].inputs
    return found

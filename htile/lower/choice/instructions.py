"""About how many instructions a thread takes: for an element of a row, and for its values.

They are those of the machine code (SASS) of sm_90a, as `python -m benchmarks.instructions` counts
them. Plans are chosen by them.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import ceil, inf

import torch

from ...frontend.graph import Graph
from ...frontend.ops import Op
from ..patterns import Function, number_of_products
from ..reductions import FOLLOWING, KTHVALUE, MOMENTS, SCANNED, SOFTMAX, Part, Reduce
from ..steps import Compute
from ..vectors import WARP

LEAVES = frozenset({Op.INPUT, Op.CONST})
# For an element, and how many of these are for the special function units (MUFU). A key that names
# both the operation and the device function counts first, then the device function alone. What is
# not here takes one instruction. `LOG` keeps what it took when the plans were measured, although it
# takes (18, 2) now: with that, slower plans are chosen for functions of one logarithm a row.
OP_COSTS = {
    Op.SQRT: (4, 1), Op.RSQRT: (4, 1), Op.EXP: (8, 1), Op.EXP2: (4, 1), Op.EXPM1: (17, 0),
    Op.LOG: (24, 0), Op.LOG2: (19, 2), Op.LOG10: (21, 2), Op.LOG1P: (18, 2), Op.SIN: (17, 0),
    Op.COS: (17, 0), Op.TANH: (15, 2), Op.SIGMOID: (10, 2), Op.ERF: (20, 1), Op.DIV: (10, 1),
    Op.FLOORDIV: (27, 1), Op.MOD: (19, 1), Op.POW: (72, 2), Op.PHILOX: (40, 0), Op.WORD: (60, 0),
    Op.UNIFORM: (3, 0), Op.EXPONENTIAL: (28, 0), Op.KEY: (6, 0), Op.GROUPED: (3, 0),
    Op.EXPONENT: (10, 0), Op.LDEXP: (20, 0), Op.FLOOR_LOG2: (12, 0), Op.CEIL_LOG2: (15, 0),
    Op.GATHER: (8, 0), Function.FOURS: (16, 0),
    Function.BOUNDED: (2, 1), Function.QUOTIENT: (2, 1), Function.NUMBER: (2, 0),
    Function.SHARED: (4, 0), Function.FAST: (2, 1), Function.GELU: (15, 2),
    Function.ELEMENT: (0, 0), (Op.EXP, Function.NEAR): (5, 1),
    (Op.EXPM1, Function.NEAR): (6, 1), (Op.LOG, Function.NEAR): (11, 1),
    (Op.LOG2, Function.NEAR): (11, 1), (Op.LOG10, Function.NEAR): (11, 1),
    (Op.LOG1P, Function.NEAR): (6, 1), (Op.LOG1P, Function.BOUNDED): (9, 0),
    (Op.SIN, Function.BOUNDED): (16, 0), (Op.COS, Function.BOUNDED): (16, 0),
    (Op.LOG, Function.BOUNDED): (21, 0), (Op.LOG2, Function.BOUNDED): (16, 2),
    (Op.LOG10, Function.BOUNDED): (18, 2),
    (Op.SIGMOID, Function.NEAR): (4, 2), (Op.TANH, Function.NEAR): (9, 2),
    Function.INDEXED: (2, 0), (Op.DIV, Function.NEAR): (7, 1), (Op.POW, Function.NEAR): (13, 2),
}  # fmt: skip
# These are for a power of a positive number, and for one whose exponent all elements share.
ONE_BASE, ONE_EXPONENT = (26, 0), (56, 2)
BY_NUMBER = {Op.FLOORDIV: (9, 0), Op.MOD: (11, 0)}  # where the divisor is a constant
# These are for a division by a value of the row, whose reciprocal is computed once.
SHARED_DIVISOR_COSTS = {Function.EXACT: (3, 0), Function.NEAR: (2, 0)}
# Instructions for an element; other parts take one. A scan takes more for each vector, and an
# element by its rank for each bit (`counting_cost`).
PART_COSTS = {
    SOFTMAX: 6, MOMENTS: 6, **dict.fromkeys(SCANNED.values(), 2), KTHVALUE: 0,
    SCANNED[Op.LOGCUMSUMEXP]: 30, SCANNED[Op.LOGSUMEXP_FROM_END]: 30, FOLLOWING: 0,
}  # fmt: skip
SCAN_COSTS = 18  # instructions of a scan for each vector of a thread, and each word of an element
COUNTED = 2  # to count an element that is less than a number, for each bit that is looked for
OF_ROUND = 16  # instructions of a thread for what each bit takes beside, and each result
TAKEN = 8  # instructions for what is at an index: its address, the load, and what converts it
# Instructions of a thread for a row of a table, beside those that load its elements: whether the
# index is one of the table, the address, and what the elements are if it is not.
LOOKED_UP = 24
# Instructions of a thread for each result of an exchange, and for a maximum and a sum that move.
EXCHANGED, MOVED = 24, (12, 4)
STORED = 3  # instructions for a result that a row has once
# The address of each tensor beside the first FREE_ADDRESSES takes a thread so many instructions.
ADDRESS, FREE_ADDRESSES = 8, 4


def sweep_costs(
    graph: Graph, computes: tuple[Compute, ...], parts: tuple[Part, ...]
) -> tuple[int, int]:
    """Instructions of a sweep for each element, and those of them for MUFU."""
    chains = {part.chain for part in parts} - {None}
    plain = [PART_COSTS.get(part.kind, 1) for part in parts if part.chain is None]
    plain += [len(part.results) for part in parts if part.kind is FOLLOWING]
    plain += [counting_cost(part) for part in parts if part.kind is KTHVALUE]
    count, special = sum(plain) + sum([chain.sorting for chain in chains]), 0
    counters = set()  # four words of one counter take about what one takes
    for step in computes:
        if graph[step.id].op is Op.PHILOX:
            if step.inputs in counters:
                continue
            counters.add(step.inputs)
        own, own_special = _step_costs(graph, step)
        count, special = count + own, special + own_special
    return count, special


def counting_cost(part: Part) -> int:
    """Instructions for an element in the loop over the bits of an element by rank."""
    return COUNTED * (32 - part.zero_bits)


def following_costs(reduces: Iterable[Reduce], warps: int) -> int:
    """Instructions of a thread for exchanges of maxima and of sums that follow them.

    Those of an exchange of two results are left out, because every exchange counts as one.

    warps: how many work on a row.
    """
    found, moves = 0, 1 + ceil(warps / WARP)  # to the maxima of the warp, and from warps to the row
    for reduce in [each for each in reduces if each.exchanges and each.following is not None]:
        maxima, sums = len(reduce.following.maxima), len(reduce.following.moves)
        found += EXCHANGED * (len(reduce.results) + sums - 2)
        found += moves * (MOVED[0] * maxima + MOVED[1] * sums)
    return found


def _step_costs(graph: Graph, step: Compute) -> tuple[int, int]:
    """The costs of a step for an element; what is computed once a row or a group does not count."""
    node, function = graph[step.id], step.function
    if not node.value.spread or (step.id in graph.equal_in_groups and node.op is not Op.GROUPED):
        return 0, 0
    is_shared = node.op is Op.DIV and not graph[step.inputs[1]].value.spread
    if is_shared and function in SHARED_DIVISOR_COSTS:
        return SHARED_DIVISOR_COSTS[function]
    return _listed(graph, step)


def _listed(graph: Graph, step: Compute) -> tuple[int, int]:
    op, function = graph[step.id].op, step.function
    if op is Op.POW and (count := number_of_products(graph, graph[step.id])):
        return count, 0
    if op is Op.POW and function is not Function.NEAR:
        base, exponent = [graph[id] for id in step.inputs]
        if base.op is Op.CONST and 0.0 < base.arg < inf and base.arg != 1.0:
            return ONE_BASE
        if not exponent.value.spread:
            return ONE_EXPONENT
    if op in BY_NUMBER and graph[step.inputs[1]].op is Op.CONST:
        return BY_NUMBER[op]
    keys = (op, function), function, op
    return next((OP_COSTS[key] for key in keys if key in OP_COSTS), (1, 0))


def value_costs(graph: Graph, computes: Iterable[Compute], stored: int = 0) -> int:
    """Instructions of a thread for values that its row has once, `stored` of which are results.

    Every thread of the row computes them, so they count more if each has fewer elements.
    """
    return STORED * stored + sum([_value_costs(graph, step) for step in computes])


def _value_costs(graph: Graph, step: Compute) -> int:
    """Instructions for one value; 64 bits take twice as many."""
    node = graph[step.id]
    if node.value.spread or node.op is Op.RESHAPE or node.op in LEAVES:
        return 0
    if node.op is Op.TAKE:
        return TAKEN
    is_wide = any(graph[id].value.dtype is torch.int64 for id in (node.id, *node.inputs))
    return _listed(graph, step)[0] * (2 if is_wide else 1)

"""Passes over the graph: each takes a graph and returns a new, verified one.

They leave a number for what is one, one node for one value, and no node that nobody reads. All
other arithmetic is left to MLIR.
"""

from __future__ import annotations

import torch

from ...errors import UnsupportedError
from ...frontend.dtypes import STORAGE
from ...frontend.graph import Builder, Graph, Node
from ...frontend.ops import COLLECTIVES, COMMUTATIVE, Op, Value, Varies
from ...frontend.reference import EVALUATE
from ...frontend.slopes import FirstAlong, Slope
from ..patterns import strip
from ..precision import Sign, signs_of
from ..vectors import WARP, vector_size
from .bundles import bundle_neighbours
from .host_numbers import on_the_host
from .limits import limit_loads
from .narrow import narrowing, without_known
from .one_total import share_totals
from .ranked import choose_by_rank
from .ranked_shares import rank_elements
from .rewrite import rewrite
from .shares import gather_shares, logarithm_of_share
from .ways import place_well, refuse_many_tensors

_ITSELF = (Op.STOP, Op.CUSTOM)  # which are their first operand, but to a derivative


def drop_slopes(graph: Graph) -> Graph:
    """Drop what only a derivative reads: where none goes through, and which slope is meant."""
    marks = Slope, FirstAlong
    if not any([
        node.op in _ITSELF or type(node.arg) in marks or (node.op is Op.LOOKUP and node.arg)
        for node in graph
    ]):  # fmt: skip
        return graph

    def drop(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.arg is Slope.LAST and new[inputs[0]].arg is True:
            return inputs[1]
        if isinstance(node.arg, Slope):
            return new.add(node.op, inputs, loc=node.loc)
        if isinstance(node.arg, FirstAlong):
            axis = int(node.arg) if len(new[inputs[0]].value.inner) > 1 else None
            return new.add(node.op, inputs, axis, node.loc)
        if node.op is Op.LOOKUP:
            return new.add(node.op, inputs, loc=node.loc)
        return inputs[0] if node.op in _ITSELF else None

    return rewrite(graph, drop)


def merge_common_subexpressions(graph: Graph) -> Graph:
    """Keep one node of those that compute the same.

    So exp(x * w - max(w * x)) is 1 at the maximum, because the two products are one.
    """
    seen: dict[object, int] = {}

    def merge(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op is Op.INPUT:
            seen[node.id, "input"] = len(seen)
            return None
        # repr tells 1, 1.0 and True apart, and 0.0 from -0.0
        operands = tuple(sorted(inputs)) if node.op in COMMUTATIVE else inputs
        key = (node.op, operands, repr(node.arg), None if operands else node.value)
        fresh = len(seen)  # ids ascend with the nodes that are kept
        id = seen.setdefault(key, fresh)
        return None if id == fresh else id

    return rewrite(graph, merge)


def fold_constants(graph: Graph) -> Graph:
    """Replace what is computed from numbers only by its number, rounded as the kernel rounds.

    A left shift by a number becomes a product. A product of integers with 0 is 0, and a choice
    between a number and itself is that number: MLIR gives up on a long chain of them.
    """

    def fold(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        operands = [new[i] for i in inputs]
        if node.op is Op.LSHIFT and operands[1].op is Op.CONST:
            return _multiplied(new, node, inputs)
        if node.op in (Op.MUL, Op.WHERE) and (same := _same_whatever(node, operands)) is not None:
            return new.add_const(same, node.value, node.loc)
        collects = node.op in COLLECTIVES or node.op is Op.GROUPED
        if collects or not operands or any(o.op is not Op.CONST for o in operands):
            return None
        if node.value.dtype in STORAGE:
            return None  # no kernel writes down a number of 8 bits
        if node.op in (Op.FLOORDIV, Op.MOD) and operands[1].arg == 0:
            return None  # torch raises for integers; the kernel does not
        numbers = tuple(torch.tensor([o.arg], dtype=o.value.dtype, device="cpu") for o in operands)
        result = EVALUATE[node.op](numbers, node.arg, torch.float32)
        return new.add_const(result.item(), node.value, node.loc)

    return rewrite(graph, fold)


def choose_by_sign(graph: Graph) -> Graph:
    """Drop what depends on a sign that a value never has.

    So log(gamma(x)) of a softplus is not reflected at 0. A graph without such a comparison is
    returned as it is.
    """
    if not {node.op for node in graph} & {Op.LT, Op.GT}:
        return graph
    signs = signs_of(graph, surely=True)

    def choose(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        operands = [new[i] for i in inputs]
        if node.op in (Op.LT, Op.GT) and operands[1].op is Op.CONST:
            if _never_holds(node.op, signs[node.inputs[0]], operands[1].arg):
                return new.add_const(False, node.value, node.loc)
        if node.op is Op.WHERE and operands[0].op is Op.CONST:
            chosen = 1 if operands[0].arg else 2
            return inputs[chosen] if operands[chosen].value == node.value else None
        if node.op in (Op.AND, Op.OR, Op.XOR) and node.value.dtype is torch.bool:
            for k, each in enumerate(operands):
                if each.op is Op.CONST and not each.arg:
                    other = k if node.op is Op.AND else 1 - k
                    return inputs[other] if operands[other].value == node.value else None
        return None

    return rewrite(graph, choose)


def _never_holds(comparison: Op, sign: Sign, limit: float) -> bool:
    """Whether no number of this sign is less (or greater) than the limit. A NaN never is."""
    if comparison is Op.LT:
        return sign.not_negative and limit <= 0
    return sign.not_positive and limit >= 0


def _same_whatever(node: Node, operands: list[Node]) -> object | None:
    """The number that a product or a choice is, whatever its other operand or its condition is."""
    if node.value.dtype.is_floating_point:  # 0 times infinity is NaN, and there are two zeros
        return None
    numbers = [each.arg for each in operands[-2:] if each.op is Op.CONST]
    if node.op is Op.MUL:
        return 0 if 0 in numbers else None
    return numbers[0] if len(numbers) == 2 and numbers[0] == numbers[1] else None


def _multiplied(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
    """x << count as a product, if the width has so many bits.

    CuTe-DSL 4.8.1 crashes where a product is shifted by a constant.
    """
    x, count = inputs
    shift, top = new[count].arg, 8 * node.value.dtype.itemsize - 1
    if not 0 <= shift <= top:
        return None
    factor = 1 << shift if shift < top else -1 << top  # the largest power is the lowest integer
    return new.add(Op.MUL, (x, new.add_const(factor, new[count].value)), loc=node.loc)


def choose_forms(graph: Graph) -> Graph:
    """Choose how means are computed, and logarithms of a softmax.

    A mean is MEAN where its operand has other readers, and a sum divided by N elsewhere. MEAN of
    equal elements is exactly that element, so `x - x.mean()` is 0 for them. A sum rounds on its
    way, but costs less where a row is padded. Where nothing else reads the operand, no difference
    is taken that would show the rounding. So the mean of equal elements that is only returned may
    be a unit in the last place off.

    The logarithm of a softmax is the difference that `logarithm_of_share` describes.
    """

    def choose(new: Builder, node: Node, inputs: tuple[int, ...]) -> int | None:
        if node.op in (Op.LOG, Op.SUB):
            return logarithm_of_share(graph, node, new, inputs)
        reduction = _averaged(graph, node)
        if reduction is None:
            return None
        is_shared = len(set(graph.readers[reduction.inputs[0]])) > 1
        if is_shared == (node.op is Op.MEAN):
            return None
        if not is_shared:
            total = new.add(Op.SUM, inputs, loc=node.loc)
            number = _count(new)
            return new.add(Op.DIV, (total, number), loc=node.loc)
        (operand,) = strip(new, new[inputs[0]]).inputs
        mean = new.add(Op.MEAN, (operand,), loc=node.loc)
        inner = node.value.inner
        return new.add(Op.RESHAPE, (mean,), inner, node.loc) if inner else mean

    return rewrite(graph, choose)


def _count(new: Builder) -> int:
    """N as a float32."""
    if new.multiple is None:
        return new.add_const(float(new.n), Value((), Varies.SCALAR, torch.float32))
    return new.add(Op.CONVERT, (new.add(Op.LENGTH, (), torch.int64),), torch.float32)


def _averaged(graph: Graph, node: Node) -> Node | None:
    """The reduction of a mean, which is the node itself, or a sum that it divides by N."""
    if node.op is Op.MEAN:
        return node
    if node.op is not Op.DIV or not _is_count(graph, graph[node.inputs[1]]):
        return None
    total = strip(graph, graph[node.inputs[0]])
    return total if total.op is Op.SUM and graph[total.inputs[0]].value.spread else None


def _is_count(graph: Graph, node: Node) -> bool:
    """Whether a node is N."""
    if graph.multiple is None:
        return node.arg == graph.n
    return node.op is Op.CONVERT and graph[node.inputs[0]].op is Op.LENGTH


def narrow_indices(graph: Graph) -> Graph:
    """Number columns in int32 where that is enough; see `narrow.py`."""
    rule = narrowing(graph)
    if rule is None:
        return rewrite(graph)
    narrowed = rewrite(rewrite(graph, rule), without_known)
    return merge_common_subexpressions(narrowed)


PASSES = (
    fold_constants,
    choose_by_sign,
    merge_common_subexpressions,
    choose_forms,
    merge_common_subexpressions,
    narrow_indices,
)


def run_passes(graph: Graph) -> Graph:
    """The placed graph of a traced one, as kernels are made of it.

    Raises UnsupportedError, with a line of the user's, where it cannot be placed.
    """
    try:
        return _passed(graph)
    except UnsupportedError as error:
        raise UnsupportedError(error.message, error.loc or graph.last_line) from None


def _passed(graph: Graph) -> Graph:
    """What `run_passes` gives.

    Groups of more elements than the lanes of a warp hold, a vector each, are written out.
    """
    graph = drop_slopes(graph)
    placed = bundle_neighbours(place_well(graph))
    if (placed.group_size or 1) > WARP * vector_size(placed):
        placed = bundle_neighbours(place_well(graph, in_groups=False))
    refuse_many_tensors(graph, placed)
    graph = placed
    for apply in PASSES:
        graph = apply(graph)
    if (shared := share_totals(graph)) is not graph:
        graph = merge_common_subexpressions(shared)
    if (gathered := gather_shares(rank_elements(graph))) is not graph:
        graph = merge_common_subexpressions(gathered)
    return limit_loads(on_the_host(choose_by_rank(graph)))

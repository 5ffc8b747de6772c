"""Prints the steps of a plan: what a thread does with its elements, chunk loops, and exchanges."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...frontend.graph import Input, Output, Role
from ...frontend.ops import Op
from ..patterns import strip
from ..ranks import Chain
from ..reductions import FOLLOWING, MAX, MEAN, MOMENTS, PEAK, SOFTMAX, Part, Reduce
from ..steps import ChunkLoop, Compute, Fence, Home, Load, OwnMaxima, Reload, Step, Store
from ..vectors import WARP
from .expressions import (
    CUTLASS_TYPES,
    INDENT,
    literal,
    located,
    tuple_of,
    wrapped_call,
    wrapped_expression,
)
from .names import Names
from .stored_ranks import StoredRanks

# The verb of the context that starts to carry a part, for those that need more than a vector.
STARTS = {MEAN: "mean_sum", SOFTMAX: "softmax_pair", MOMENTS: "welford_triple"}

Header = tuple[str, list[str], str]  # a call that opens a block or a body: head, arguments, tail

# What elements of these dtypes are converted to as soon as they are loaded. Those of bool and uint8
# are of Int8 where they come from a view.
CONVERTED = {
    torch.bfloat16: "Float32", torch.float16: "Float32", torch.bool: "Boolean",
    torch.uint8: "Uint8",
}  # fmt: skip


def print_step(names: Names, step: Step, ctx: str = "ctx", indent: str = INDENT) -> list[str]:
    """The lines of a step; `ctx` is the name of the context whose elements it works on."""
    match step:
        case Load() | Reload():
            lines = []
            for i in step.inputs if isinstance(step, Reload) else (step.input,):
                read = f"{ctx}.load_column({names.whole(i)})"
                if i.role is Role.ROW:
                    end = names.end(i)
                    part = f"{ctx}.until({end})" if end else ctx
                    read = f"{part}.load_row({names.chunk(i)})"
                if i in names.staged:
                    tile = names.fragments.get(i, f"{names.staged[i]}.arrived()")
                    read = f"{ctx}.read_row({tile})"
                elif step.home in (Home.SHARED, Home.PACKED):
                    read = f"{ctx}.read_row({names.fragments[i]})"
                elif ctx == "chunk" and names.plan.placement.prefetch:
                    read = names.fragments[i]
                lines += assign(names, i, f"{read}.load()", indent)
            return lines
        case Compute(id):
            node = names.plan.graph[id]
            if node.op is Op.RESHAPE or id in names.unprinted:
                return []
            if node.op in (Op.TAKE, Op.LOOKUP):
                leaf = names.plan.work.source(node)
                args = [names.tensors[leaf], names.operand(node.inputs[1])]
                verb = "load_element" if node.op is Op.TAKE else "look_up_element"
                taken = f"{ctx}.{verb}({', '.join(args)})"
                if node.value.spread:
                    args += map(str, node.arg or ())  # the columns that are read of it
                    taken = f"{ctx}.look_up({', '.join(args)}).load()"
                return located(assign(names, leaf, taken, indent, id), node)
            if node.op is Op.GATHER:
                leaf = names.plan.work.source(node)
                args = f"{names.tensors[leaf]}, {names.operand(node.inputs[1])}"
                taken = f"{ctx}.gather({args}).load()"
                return located(assign(names, leaf, taken, indent, id), node)
            head = f"{indent}{names.values[id]} = "
            lines = located(wrapped_expression(head, names.expression(step, ctx)), node)
            if id in names.repeated:
                lines.append(f"{head}{ctx}.in_every_chunk({names.values[id]})")
            return lines
        case OwnMaxima(part):
            return _own_maxima(names, part, ctx, indent)
        case Fence():
            return [f"{indent}{ctx}.wait_for_row()  # before anything is overwritten"]
        case Store(output):
            tensor, value = names.tensors[output], names.operand(output.id)
            if output.over is not None:
                total = names.totals[output]
                return [f"{indent}{total} = {total}.take({ctx}, {value})"]
            if output in names.kept:
                return [f"{indent}{names.kept[output]}.put({ctx}, {value})"]
            args = [tensor, value]
            if output in names.plan.places:
                args.append(f"{names.staged[names.plan.places[output]]}.tile")
            args += end_of(names, output)
            return wrapped_call(f"{indent}ElementwiseStorer({ctx}).store(", args, ")")
    raise AssertionError(f"{step} is not printed")


def _own_maxima(names: Names, part: Part, ctx: str, indent: str) -> list[str]:
    """Compute with the maxima of the thread's own elements."""
    name, graph = names.carried[part], names.plan.graph
    lines, share = [], f"{ctx}.share"
    if not names.plan.numerics.in_loops:
        operands = [reduced(names, graph[id].inputs[0]) for id in part.maxima]
        lines += _follow(names, part, [f"ctx.row_partial({x}, {MAX.combine})" for x in operands])
        share = "0"
    for k, id in enumerate(part.maxima):
        line = f"{indent}{names.values[id]} = {name}.of_thread({share}, {k})"
        lines += located([line], graph[id])
    return lines


def _follow(names: Names, part: Part, peaks: list[str]) -> list[str]:
    """Start to sum relative to the thread's own maxima."""
    args = [tuple_of(peaks)]
    for move in part.following.moves:
        slopes = [move.slopes, move.base] if move.slopes else []
        args.append(f"Move({', '.join(map(repr, [move.powers, *slopes]))})")
    return wrapped_call(f"    {names.carried[part]} = ctx.following_sums(", args, ")")


def store_values(names: Names, outputs: list[Output]) -> list[str]:
    """The store of a value of the row, or of several that lie side by side."""
    tensor, values = names.tensors[outputs[0]], [names.operand(each.id) for each in outputs]
    if (ranks := names.stored_ranks.get(outputs[0])) is not None:
        assert len(outputs) == ranks.count, "ranks of one chain are there together"
        return _store_ranked(names, tensor, ranks)
    places = [str(names.places.get(each, 0)) for each in outputs]
    if places == ["0"]:
        return [f"{INDENT}ctx.store_row_value({tensor}, {values[0]})"]
    args = [tensor, tuple_of(places), tuple_of(values)]
    return wrapped_call(f"{INDENT}ctx.store_row_values(", args, ")")


def _store_ranked(names: Names, tensor: str, ranks: StoredRanks) -> list[str]:
    """The store of elements by rank that lie side by side, or of their indices."""
    key = ranks.key
    is_value = key.op is Op.KEY_VALUE
    made = ["math.key_value", CUTLASS_TYPES[key.arg]] if is_value else ["math.key_index", key.arg]
    args = [tensor, names.ranks[ranks.part], ranks.first, ranks.count, *made]
    return wrapped_call(f"{INDENT}ctx.store_ranked(", [*map(str, args)], ")")


def assign(
    names: Names, i: Input, expression: str, indent: str = INDENT, id: int | None = None
) -> list[str]:
    """An input, or the node `id` that is an element of it, as the kernel computes with it."""
    start = f"{indent}{names.values[i.id if id is None else id]} = "
    if i.dtype not in CONVERTED:
        return [start + expression]
    return wrapped_call(f"{start}math.convert(", [expression, CONVERTED[i.dtype]], ")")


def reduced(names: Names, id: int) -> str:
    """An operand of a reduction; a number gets its type, which the reduction asks for."""
    node = names.plan.graph[id]
    text = names.operand(id)
    return f"{CUTLASS_TYPES[node.value.dtype]}({text})" if node.op is Op.CONST else text


def prefetch(names: Names, k: int) -> list[str]:
    """Start to load what the loop at the k-th step reads from global memory."""
    plan, loop = names.plan, names.plan.steps[k]
    args = [str(plan.placement.prefetch), *(names.tensors[i] for i in loop.reads)]
    args += ["backwards=True"] if loop.backwards else []
    ends = [names.end(i) for i in loop.reads]
    args += [f"ends={tuple_of(map(str, ends))}"] if any(ends) else []
    there = [names.there(i) for i in loop.reads]
    args += [f"there={tuple_of(map(str, there))}"] if any(there) else []
    if plan.pads(loop):
        args.append(f"padding={literal(loop.padding, torch.float32)}")
    return wrapped_call(f"    {names.prefetched[k]} = ctx.prefetch(", args, ")")


def loop(names: Names, k: int, is_prefetched: bool) -> list[str]:
    """The loop at the k-th step: what it carries, and its body.

    is_prefetched: whether its first chunks are on their way already.
    """
    plan, loop = names.plan, names.plan.steps[k]
    lines = [line for part in loop.parts for line in _started(names, loop, part)]
    if k in names.prefetched and not is_prefetched:
        lines += prefetch(names, k)
    if k in names.zeros:
        lines.append(f"    {names.zeros[k]} = ctx.unknown_zero()")
    for step in loop.steps:
        if isinstance(step, Load) and step.input in names.staged:
            i = step.input
            lines.append(f"    {names.fragments[i]} = {names.staged[i]}.arrived()")
    kept = [s.output for s in loop.steps if isinstance(s, Store) and s.output in names.kept]
    lines += [line for output in kept for line in _keep(names, output)]
    outer = INDENT
    if plan.turns > 1:
        lines.append(f"    for s in cutlass.range_constexpr({plan.turns}):")
        outer += INDENT
    for headers in _headers(names, k, loop):
        indent = outer
        for head, args, tail in headers:
            lines += wrapped_call(indent + head, args, tail)
            indent += INDENT if tail.endswith(":") else ""
        if k in names.zeros:
            lines.append(f"{indent}chunk = chunk.counted_from({names.zeros[k]})")
        lines += _body(names, loop, indent)
    if plan.turns > 1:  # nothing more is added in this share
        lines += _folds(names, loop.parts, outer)
    return lines + [f"    {names.kept[output]}.store()" for output in kept]


def _keep(names: Names, output: Output) -> list[str]:
    """Say where a result stays until a loop has made all of it."""
    place = names.plan.kept[output]
    args = [names.tensors[output], *([names.fragments[place]] if place is not None else [])]
    args += end_of(names, output)
    return wrapped_call(f"    {names.kept[output]} = ElementwiseStorer(ctx).keep(", args, ")")


def end_of(names: Names, output: Output) -> list[str]:
    """The argument of a store that says where the rows of a result end, if before the columns."""
    end = names.end(output)
    return [f"end={end}"] if end else []


def _started(names: Names, loop: ChunkLoop, part: Part) -> list[str]:
    """Start to carry a part."""
    if part.kind is FOLLOWING:
        peaks = [Part(PEAK, (id,)) for id in part.maxima]
        return _follow(names, part, [names.carried[peak] for peak in peaks])
    return [f"    {names.carried[part]} = ctx.{_start(names, loop, part)}"]


def _start(names: Names, loop: ChunkLoop, part: Part) -> str:
    """The call that starts to carry a part."""
    plan = names.plan
    if part.kind in STARTS:
        in_pairs = part.kind is MOMENTS and plan.numerics.merged
        return f"{STARTS[part.kind]}({'in_pairs=True' if in_pairs else ''})"
    if part in plan.folds(loop):
        return "two_level_sum()"
    dtype = plan.graph[part.operands(plan.graph)[0]].value.dtype
    kind = [] if dtype is torch.float32 else [CUTLASS_TYPES[dtype]]
    return f"partial({', '.join([part.kind.combine, *kind])})"


def _headers(names: Names, k: int, loop: ChunkLoop) -> list[list[Header]]:
    """What stands above each of a loop's bodies: of its groups of chunks, and of the rest."""
    plan, place = names.plan, names.plan.placement
    if k not in names.prefetched:
        over = ("for k in cutlass.range_constexpr(", ["ctx.num_chunks"], "):")
        if not plan.is_unrolled:
            unroll = f"unroll={place.unroll}"
            over = ("for k in cutlass.range(", ["ctx.num_chunks", unroll], "):")
        return [[over, ("chunk = ctx.chunk(", ["k", "s"] if plan.turns > 1 else ["k"], ")")]]
    taken = ", ".join(["chunk", *(names.fragments[i] for i in loop.reads)])

    def take(first: object, count: int) -> Header:
        args = [str(first), str(count), *(["share=s"] if plan.turns > 1 else [])]
        return f"for {taken} in {names.prefetched[k]}.take(", args, "):"

    if plan.is_unrolled:
        return [[take(0, plan.chunks)]]
    step = place.prefetch
    most = plan.chunks // step * step - step  # the rest is of static numbers
    over = ("for k in cutlass.range(", ["0", str(most), str(step), "unroll=1"], "):")
    return [[over, take("k", step)], [take(most, plan.chunks - most)]]


def _body(names: Names, loop: ChunkLoop, indent: str) -> list[str]:
    plan, lines = names.plan, []
    for step in loop.steps:
        lines += print_step(names, step, "chunk", indent)
    for part in loop.parts:
        name = names.carried[part]
        args = [name, *(reduced(names, id) for id in part.operands(plan.graph))]
        args += ["padded=True"] if plan.pads(loop) else []
        verb = "add_following" if part.kind is FOLLOWING else "accumulate"
        call = wrapped_call(f"{indent}{name} = chunk.{verb}(", args, ")")
        lines += located(call, plan.graph[part.results[0]])
    if folded := plan.folds(loop):
        last = plan.numerics.folded - 1  # a power of two less one: `&` leaves no branch if unrolled
        lines.append(f"{indent}if chunk.k & {last} == {last}:")
        lines += _folds(names, folded, indent + INDENT)
    return lines


def _folds(names: Names, parts: Iterable[Part], indent: str) -> list[str]:
    """The inner level of each part added to the outer."""
    share = "s" if names.plan.turns > 1 else ""
    carried = (names.carried[part] for part in parts)
    return [f"{indent}{name} = {name}.fold({share})" for name in carried]


def reduce_held(names: Names, step: Reduce) -> list[str]:
    """The reductions of a stage of a row that is held."""
    graph, slot = names.plan.graph, names.plan.slot(step)
    results = ", ".join(names.values[id] for id in step.made(graph))
    first = graph[step.results[0]]
    if step.is_pair:
        verb = "online_logsumexp" if step.parts[0].finite else "online_softmax"
        x = names.operand(step.operands(graph)[0])
        return located([f"    {results} = ctx.{verb}({x}, slot={slot})"], first)
    if step.is_by_rank:
        return _by_rank(names, step, slot)
    if step.following is not None:
        return _reduce_following(names, step)
    alone = [part for part in step.parts if part.chain is None]
    lines: list[str] = []
    if alone:
        results = ", ".join(names.values[id] for part in alone for id in part.results)
        values = ", ".join(
            names.trees[p.results[0]]
            if p.results[0] in names.trees
            else reduced(names, graph[p.results[0]].inputs[0])
            for p in alone
        )
        ops = ", ".join(part.kind.combine for part in alone)
        from_end = [part.kind.from_end for part in alone]
        if len(alone) > 1:
            values, ops = f"({values})", f"({ops})"
        args, verb = [values, ops, f"slot={slot}"], "row_scan" if step.is_scan else "row_reduce"
        if any(from_end):
            args.append(f"from_end={tuple(from_end) if len(alone) > 1 else True}")
        lines = located(wrapped_call(f"    {results} = ctx.{verb}(", args, ")"), first)
        slot += len(alone)
    for part in dict.fromkeys(step.parts):
        if part.chain is not None:
            lines += _ranks(names, part, slot)
            slot += part.chain.slots
    return lines


def _by_rank(names: Names, step: Reduce, slot: int) -> list[str]:
    """The elements of a rank of a stage."""
    graph = names.plan.graph
    rows, ranks = [], []
    for id in step.results:
        *pieces, rank = graph[id].inputs
        texts = [names.operand(piece) for piece in pieces]
        rows.append(tuple_of(texts) if len(texts) > 1 else texts[0])
        ranks.append(names.operand(rank))
    several = len(step.results) > 1
    args = [tuple_of(rows) if several else rows[0], tuple_of(ranks) if several else ranks[0]]
    args += [f"slot={slot}"] + ([f"zero_bits={step.zero_bits}"] if step.zero_bits else [])
    results = ", ".join(names.values[id] for id in step.results)
    call = wrapped_call(f"    {results} = ctx.kthvalue(", args, ")")
    return located(call, graph[step.results[0]])


def _ranks(names: Names, part: Part, slot: int) -> list[str]:
    """The ranks of a chain, from its first slot on."""
    chain = part.chain
    keys = [names.operand(id) for id in chain.keys]
    args = [tuple_of(keys) if len(keys) > 1 else keys[0]]
    args += [str(len(chain.results)), f"slot={slot}"]
    args += ["smaller=True"] if chain.smaller else []
    args += [f"index_bits={chain.index_bits}"] if chain.index_bits else []
    args += [f"group={chain.group}"] if chain.group > 1 else []
    num = names.plan.numerics
    are_together = chain.are_together(num.threads_per_row, num.cluster_n)
    lists = chain.lists(min(num.threads_per_row, WARP), names.plan.elements_per_thread)
    if are_together:
        args += ["together=True", *([f"zero_bits={chain.zero_bits}"] if chain.zero_bits else [])]
    elif lists:
        args.append("candidates=True")
    if (are_together or lists) and (elements := _elements(names, chain)):
        args.append(f"elements={elements}")
    call = wrapped_call(f"    {names.ranks[part]} = ctx.ranks(", args, ")")
    return located(call, names.plan.graph[chain.results[0]])


def _elements(names: Names, chain: Chain) -> str | None:
    """The elements of the keys of a chain, where they are rows of floats; the largest is first.

    Padded ones, which are -inf, come last by their indices: these are the columns.
    """
    graph = names.plan.graph
    indices = [strip(graph, graph[graph[key].inputs[1]]) for key in chain.keys]
    if names.plan.is_ragged and any(index.op is not Op.INDEX for index in indices):
        return None
    found = [graph[graph[key].inputs[0]] for key in chain.keys]
    are_rows = all(each.value.spread and each.op is not Op.CONST for each in found)
    if chain.smaller or not are_rows or any(x.value.dtype is not torch.float32 for x in found):
        return None
    texts = [names.operand(each.id) for each in found]
    return tuple_of(texts) if len(texts) > 1 else texts[0]


def reduce_carried(names: Names, step: Reduce) -> list[str]:
    """The results of a stage, from what loops have carried."""
    part, slot = step.parts[0], names.plan.slot(step)
    results = ", ".join(names.values[id] for id in step.results)
    if step.is_pair:
        args = f"{names.carried[part]}, slot={slot}{', finite=True' if part.finite else ''}"
        return [f"    {results} = ctx.reduce_pair({args})"]
    if step.following is not None:
        return _reduce_following(names, step)
    if not step.exchanges:
        (reference,) = part.references
        about = f"{names.moments[part]}.about({names.operand(reference)})"
        return wrapped_call(f"    {results} = ", [about], "")
    if part.at_once:
        head = f"    {results}, {names.moments[part]} = ctx.reduce_moments("
        return wrapped_call(head, [names.carried[part], f"slot={slot}"], ")")
    carried = []
    for part, id in zip(step.parts, step.results, strict=True):
        name, place = names.carried[part], part.results.index(id)
        if place > 0:
            name += f".about({names.operand(part.references[place - 1])})"
        elif part.carries_two_stages:
            name += ".first"
        carried.append(name)
    given = f"({', '.join(carried)})" if len(carried) > 1 else carried[0]
    return wrapped_call(f"    {results} = ctx.reduce_partials(", [given, f"slot={slot}"], ")")


def _reduce_following(names: Names, step: Reduce) -> list[str]:
    """The maxima of a row and what is reduced beside them, or the sums that follow the maxima."""
    graph, values = names.plan.graph, names.values
    found = names.found[step.following]
    if not step.exchanges:
        references, lines = [names.operand(id) for id in step.parts[0].references], []
        for place, id in enumerate(step.results):
            args = [str(place), *references]
            lines += wrapped_call(f"    {values[id]} = {found}.sum(", args, ")")
        return lines
    part = next(part for part in names.carried if part.following == step.following)
    sums, others, made, lines = names.carried[part], [], [], []
    for id, own in zip(step.results, step.parts, strict=True):
        if own.kind is not PEAK:
            made.append(values[id])
            others.append(names.carried[own] if own in names.carried else _of_row(names, own))
    if not names.plan.numerics.in_loops:
        terms = [reduced(names, id) for id in part.operands(graph)]
        lines += wrapped_call(f"    {sums} = ctx.add_following(", [sums, *terms], ")")
    head = f"    {', '.join([*made, found])}{'' if made else ','} = ctx.reduce_following("
    slot = f"slot={names.plan.slot(step)}"
    lines += wrapped_call(head, [sums, *others, slot], ")")
    maxima = enumerate(part.maxima)
    return lines + [f"    {values[id]} = {found}.maximum({place})" for place, id in maxima]


def _of_row(names: Names, part: Part) -> str:
    """A reduction of a held row, before the exchange."""
    (id,) = part.operands(names.plan.graph)
    return f"ctx.row_partial({reduced(names, id)}, {part.kind.combine})"

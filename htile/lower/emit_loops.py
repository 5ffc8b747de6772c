"""Prints loops over the chunks of a row, and the exchange of what they carry."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .emit_steps import print_step, reduced
from .expressions import CUTLASS_TYPES, literal
from .names import Names
from .reductions import MEAN, MOMENTS, SOFTMAX, Part, Reduce
from .steps import ChunkLoop
from .text import INDENT, located, wrapped_call

# The verb of the context that starts to carry a part, for those that need more than a vector.
STARTS = {MEAN: "mean_sum", SOFTMAX: "softmax_pair", MOMENTS: "welford_triple"}

Header = tuple[str, list[str], str]  # a call that opens a block or a body: head, arguments, tail


def prefetch(names: Names, k: int) -> list[str]:
    """Start to load what the loop at the k-th step reads from global memory."""
    plan = names.plan
    loop = plan.steps[k]
    args = [str(plan.placement.prefetch), *(names.tensors[i] for i in loop.reads)]
    if loop.backwards:
        args.append("backwards=True")
    if loop.padding and plan.is_ragged:
        args.append(f"padding={literal(loop.padding, torch.float32)}")
    return wrapped_call(f"    {names.prefetched[k]} = ctx.prefetch(", args, ")")


def loop(names: Names, k: int, is_prefetched: bool) -> list[str]:
    """The loop at the k-th step: what it carries, and its body.

    is_prefetched: whether its first chunks are on their way already.
    """
    plan = names.plan
    loop = plan.steps[k]
    lines = [f"    {names.carried[part]} = ctx.{_start(names, loop, part)}" for part in loop.parts]
    if k in names.prefetched and not is_prefetched:
        lines += prefetch(names, k)
    depth = 1
    if plan.turns > 1:
        lines.append(f"    for s in cutlass.range_constexpr({plan.turns}):")
        depth += 1
    for headers in _headers(names, k, loop):
        inner = depth
        for head, args, tail in headers:
            lines += wrapped_call(INDENT * inner + head, args, tail)
            inner += tail.endswith(":")
        lines += _body(names, loop, INDENT * inner)
    if plan.turns > 1:  # nothing more is added in this share
        lines += _folds(names, loop.parts, INDENT * depth)
    return lines


def _start(names: Names, loop: ChunkLoop, part: Part) -> str:
    """The call that starts to carry a part."""
    plan = names.plan
    if part.kind in STARTS:
        in_pairs = part.kind is MOMENTS and plan.numerics.merged
        return f"{STARTS[part.kind]}({'in_pairs=True' if in_pairs else ''})"
    if part in plan.folds(loop):
        return "two_level_sum()"
    dtype = plan.graph[part.operand(plan.graph)].value.dtype
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
        share = ["s"] if plan.turns > 1 else []
        return [[over, ("chunk = ctx.chunk(", ["k", *share], ")")]]
    share = ["share=s"] if plan.turns > 1 else []
    taken = ", ".join(["chunk", *(names.fragments[i] for i in loop.reads)])

    def take(first: object, count: int) -> Header:
        args = [str(first), str(count), *share]
        return f"for {taken} in {names.prefetched[k]}.take(", args, "):"

    if plan.is_unrolled:
        return [[take(0, plan.chunks)]]
    step = place.prefetch
    most = plan.chunks // step * step - step  # the rest is of static numbers
    over = ("for k in cutlass.range(", ["0", str(most), str(step), "unroll=1"], "):")
    return [[over, take("k", step)], [take(most, plan.chunks - most)]]


def _body(names: Names, loop: ChunkLoop, indent: str) -> list[str]:
    """What is done with one chunk."""
    plan, lines = names.plan, []
    for step in loop.steps:
        lines += print_step(names, step, "chunk", indent)
    for part in loop.parts:
        name = names.carried[part]
        args = [name, reduced(names, part.operand(plan.graph))]
        args += ["padded=True"] if loop.padding and plan.is_ragged else []
        call = f"{indent}{name} = chunk.accumulate({', '.join(args)})"
        lines += located([call], plan.graph[part.results[0]])
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


def reduce_carried(names: Names, step: Reduce) -> list[str]:
    """The results of a stage, from what loops have carried."""
    part = step.parts[0]
    results = ", ".join(names.values[id] for id in step.results)
    if step.is_pair:
        finite = ", finite=True" if part.finite else ""
        pair = names.carried[part]
        return [f"    {results} = ctx.reduce_pair({pair}, slot={step.slot}{finite})"]
    if not step.exchanges:
        (reference,) = part.references
        about = f"{names.moments[part]}.about({names.operand(reference)})"
        return wrapped_call(f"    {results} = ", [about], "")
    if part.at_once:
        args = [names.carried[part], f"slot={step.slot}"]
        head = f"    {results}, {names.moments[part]} = ctx.reduce_moments("
        return wrapped_call(head, args, ")")
    carried = [_carried(names, part, id) for part, id in zip(step.parts, step.results, strict=True)]
    given = f"({', '.join(carried)})" if len(carried) > 1 else carried[0]
    args = [given, f"slot={step.slot}"]
    return wrapped_call(f"    {results} = ctx.reduce_partials(", args, ")")


def _carried(names: Names, part: Part, result: int) -> str:
    """What a part carries for one of its results."""
    if not part.carries_two_stages:
        return names.carried[part]
    place = part.results.index(result)
    if place == 0:
        return f"{names.carried[part]}.first"
    return f"{names.carried[part]}.about({names.operand(part.references[place - 1])})"

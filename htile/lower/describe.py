"""A plan as text: its layout, what moves, and every step with the names of the emitted source."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..frontend.ops import Op, dtype_name
from .emission.expressions import WIDTH
from .emission.names import Names
from .reductions import Part, Reduce
from .steps import ChunkLoop, Compute, Home, Load, OwnMaxima, Prefetch, Reload, Step, Store

if TYPE_CHECKING:
    from ..frontend.graph import Input, Output
    from .plan import Plan

PLACES = {
    Home.REGISTERS: "in registers",
    Home.PACKED: "in registers, as in memory",
    Home.SHARED: "in shared memory",
    Home.REREAD: "read again",
    Home.RECOMPUTE: "computed again",
}


def describe(plan: Plan) -> str:
    names = Names(plan)
    lines = [
        f"plan {plan.graph.name}, N {plan.graph.length_text}, {plan.target.arch.name}",
        *(f"  {line}" for line in describe_layout(plan)),
        f"  {describe_traffic(plan)}",
        *(f"  {line}" for line in _describe_steps(plan, names, plan.steps)),
    ]
    crossing = (f"{names.operand(id)} {PLACES[home]}" for id, home in sorted(plan.homes.items()))
    across = f"  across exchanges: {', '.join(crossing) or 'nothing'}"
    lines += textwrap.wrap(across, WIDTH, subsequent_indent=" " * 4)
    return "\n".join(lines)


def describe_traffic(plan: Plan) -> str:
    """The bytes that move, as a line."""
    read, written = plan.bytes_per_row()
    joined = plan.target.joined  # rows of the call, which are what is counted
    traffic = f"traffic    {read // joined} bytes read and {written // joined} written a row"
    if again := plan.bytes_read_again() // joined:
        traffic += f", {again} read again"
    if columns := sum(i.dtype.itemsize for i in plan.work.columns):
        traffic += f"; {plan.graph.n * columns} bytes that all rows share"
    return traffic


def describe_layout(plan: Plan) -> list[str]:
    """Numerics and placement, a line each."""
    num, place = plan.numerics, plan.placement
    threads = _count(num.threads_per_row, "thread")
    numerics = [
        f"{threads} a row" if num.cluster_n == 1 else "",
        f"{num.cluster_n} shares of a row, {threads} each" if num.cluster_n > 1 else "",
        f"{plan.elements_per_thread} elements a thread, {num.vec_size} adjacent",
        f"in {_count(plan.chunks, 'chunk')}" if num.in_loops else "",
        f"{' and '.join(num.joint)} in one exchange" if num.joint else "",
        "two chunks merged at a time" if num.merged else "",
        f"summed {num.folded} chunks at a time" if num.folded else "",
        f"{num.groups} groups of rows, {plan.parts} parts" if num.groups else "",
    ]
    part = "one share" if place.shares == 1 else f"{place.shares} shares"
    part = _count(plan.rows_per_block, "row") if num.cluster_n == 1 else part
    joined = plan.target.joined
    placement = [
        f"{joined} rows of {plan.graph.n // joined} are one" if joined > 1 else "",
        f"{place.num_threads} threads and {part} a CTA",
        f"{place.abreast} at a time" if place.abreast > 1 else "",
        "in no cluster" if place.apart else "",
        f"{place.loader} loads, {place.columns} columns, {place.copy_bytes}-byte accesses",
        "shifted rows" if place.shifted else "",
        "computed a vector at a time" if plan.stretches else "",
        f"{_count(place.unroll, 'chunk')} in a loop's body" if num.in_loops else "",
        f"{_count(place.prefetch, 'chunk')} prefetched" if place.prefetch else "",
    ]
    return [
        f"numerics   {', '.join(filter(None, numerics))}",
        f"placement  {', '.join(filter(None, placement))}",
    ]


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _named(plan: Plan, piece: Input | Output) -> str:
    """Its name, and which elements of the tensor it has if it is a piece: `x[0:4096]`."""
    return piece.name + (piece.view.elements(plan.graph.n) if piece.view else "")


def _describe_steps(plan: Plan, names: Names, steps: Iterable[Step]) -> list[str]:
    graph, lines = plan.graph, []
    for step in steps:
        match step:
            case Load(i, home) if home is not Home.REREAD:  # which the loops alone read
                kind = f"{i.role.value} {_named(plan, i)} ({dtype_name(i.dtype)})"
                end = f", below {names.operand(i.end)}" if i.end is not None else ""
                lines.append(f"load      {kind} to {PLACES[home].removeprefix('in ')}{end}")
            case Reload(inputs, home):
                where = "shared memory" if home is Home.SHARED else "global memory"
                where = "registers" if home is Home.PACKED else where
                named = ", ".join(_named(plan, i) for i in inputs)
                ends = dict.fromkeys(names.operand(i.end) for i in inputs if i.end is not None)
                below = f", below {', '.join(ends)}" if ends and home is Home.REREAD else ""
                lines.append(f"read      {named} from {where}{below}")
            case Prefetch(inputs):
                chunks = _count(plan.placement.prefetch, "chunk")
                named = ", ".join(_named(plan, i) for i in inputs)
                lines.append(f"prefetch  {chunks} of {named}")
            case Compute(id):
                if graph[id].op is not Op.RESHAPE:
                    text = names.expression(step).removeprefix("math.")
                    lines.append(f"compute   {names.values[id]} = {text}")
            case OwnMaxima(part):
                maxima = " and ".join(names.values[id] for id in part.maxima)
                lines.append(f"take      {maxima} of the thread's own elements")
            case Reduce():
                lines.append(_describe_reduce(plan, names, step))
            case Store(output):
                value = names.operand(output.id)
                kind = f"{_named(plan, output)} ({dtype_name(output.dtype)})"
                if output.over is not None:
                    over = f"rows and {output.groups} groups" if output.groups > 1 else "rows"
                    lines.append(f"add up    {kind} = {output.over.value} of {value}, over {over}")
                    continue
                lines.append(f"store     {kind} = {value}")
            case ChunkLoop(inner, parts):
                back = ", from the last to the first" if step.backwards else ""
                lines.append(f"for each chunk{back}")
                lines += [f"  {line}" for line in _describe_steps(plan, names, inner)]
                for part in parts:
                    kinds = " and ".join(graph[id].op.value for id in part.results)
                    operands = " and ".join(map(names.operand, part.operands(graph)))
                    lines.append(f"  carry     {names.carried[part]}: {kinds} of {operands}")
    return lines


def _describe_reduce(plan: Plan, names: Names, step: Reduce) -> str:
    """The results of an exchange, and what each of them reduces."""
    graph = plan.graph
    if chains := [part for part in dict.fromkeys(step.parts) if part.chain is not None]:
        return _describe_ranks(names, step, chains)
    if step.is_by_rank:
        return _describe_by_rank(names, step)
    made = ", ".join(names.values[id] for id in step.made(graph) if id in names.values)
    ops = " and ".join(graph[id].op.value for id in step.results)
    if plan.numerics.in_loops:
        found = [names.carried[part] for part in step.parts]
    else:
        found = [names.operand(id) for id in step.operands(graph)[: 1 if step.is_pair else None]]
    of = " and ".join(dict.fromkeys(found))
    wait = f"slot {plan.slot(step)}" if step.exchanges else "from the exchange before"
    verb = "scan  " if step.is_scan else "reduce"
    return f"{verb}    stage {step.stage}: {made} = {ops} of {of}, {wait}"


def _describe_by_rank(names: Names, step: Reduce) -> str:
    """The elements of a rank, and how many exchanges bring their bits."""
    graph, found = names.plan.graph, []
    for id in step.results:
        *pieces, rank = graph[id].inputs
        row = " and ".join(map(names.operand, pieces))
        number = graph[rank].arg if graph[rank].op is Op.CONST else names.operand(rank)
        found.append(f"{names.values[id]} = the element of {row} that {number} come before")
    slots = f"{step.waits} exchanges from slot {names.plan.slot(step)}"
    return f"reduce    stage {step.stage}: {'; '.join(found)}, {slots}"


def _describe_ranks(names: Names, step: Reduce, chains: list[Part]) -> str:
    """The ranks that a stage finds, and what else it reduces."""
    graph = names.plan.graph
    found = [
        f"{names.values[id]} = {graph[id].op.value} of {names.operand(graph[id].inputs[0])}"
        for id, part in zip(step.results, step.parts, strict=True)
        if part.chain is None
    ]
    num = names.plan.numerics
    for part in chains:
        keys = " and ".join(map(names.operand, part.chain.keys))
        are_together = part.chain.are_together(num.threads_per_row, num.cluster_n)
        whose = ", of all warps together" if are_together else ""
        found.append(f"{names.ranks[part]} = {part.chain} of {keys}{whose}")
    return f"reduce    stage {step.stage}: {'; '.join(found)}, slot {names.plan.slot(step)}"

"""Prints a loop over rows, and the kernel that combines what the loops of all CTAs have."""

from __future__ import annotations

import textwrap

import torch

from ...frontend.graph import Input, Output, Role
from ..over_rows import PartsOf, part_dtype, parts_of
from ..plan import Plan
from ..reductions import OF_OP
from ..steps import Load
from .expressions import CUTLASS_TYPES, INDENT, tuple_of, wrapped_call
from .names import Names
from .steps import assign, print_step

LANES = 16  # of a row, at least, that load the numbers of as many rows at a time
COMBINED = 32  # columns that a CTA of the second kernel works on
COMBINED_OF_GROUPS = 8  # the same where it adds up groups of columns
COMBINING_THREADS = 512


def loads_once(plan: Plan, names: Names) -> list[str]:
    """What all rows share, what is added up, and the loop itself."""
    block, lines = names.block, []
    for i in (step.input for step in names.opening if isinstance(step, Load)):
        if i.role is Role.COLUMN:
            lines.append(f"    {names.fragments[i]} = {block}.load_column({names.whole(i)})")
        elif i.role is Role.DEVICE_SCALAR:
            lines += assign(names, i, f"{names.tensors[i]}[0]")
    for output in plan.graph.over_rows:
        dtype = CUTLASS_TYPES[part_dtype(plan.graph, output)]
        given = OF_OP[output.over].combine, dtype
        start, args = ("of_rows", (block, *given)) if output.is_row else ("of_values", given)
        call = f"    {names.totals[output]} = OverRows.{start}("
        lines += wrapped_call(call, list(args), ")")
    lines.append(f"    {names.loop} = RowLoop({block}, {plan.numerics.groups})")
    if is_ahead(plan):
        args = [names.loop, *(names.tensors[i] for i in plan.work.rows)]
        ends = [names.end(i) if i.end is None else None for i in plan.work.rows]
        args += [f"ends={tuple_of(map(str, ends))}"] if any(ends) else []
        lines += wrapped_call(f"    {names.ahead} = RowsAhead(", args, ")")
    if batch := _batch(names):
        tensors, held = batch
        lines += wrapped_call(f"    {held} = {names.loop}.values(", ["0", tensors], ")")
    for i, name in names.next_values.items():
        if not in_batches(plan, i):
            lines.append(f"    {name} = {names.loop}.row(0).load_row_value({names.tensors[i]})")
    return lines


def in_batches(plan: Plan, i: Input) -> bool:
    """Whether the lanes of a warp load a number each of several rows, which they then hand around.

    Rows of few threads have few lanes, and shuffles move 4 bytes.
    """
    return plan.numerics.threads_per_row >= LANES and i.dtype in (torch.float32, torch.int32)


def is_ahead(plan: Plan) -> bool:
    """Whether the next row is on its way through shared memory while one is worked on."""
    return plan.placement.loader == "shared" and bool(plan.work.rows)


def loop(plan: Plan, names: Names, steps: list[str]) -> list[str]:
    """The loop over rows, with what a row loads, and its steps."""
    head = f"    for k in cutlass.range({names.loop}.count, unroll=1):"
    body = [f"    ctx = {names.loop}.row(k)", *_loads(plan, names), *_next_values(names), *steps]
    return [head, *textwrap.indent("\n".join(body), INDENT).split("\n")]


def _batch(names: Names) -> tuple[str, str] | None:
    """The tensors whose numbers come in batches of rows, and what a lane holds of them, as tuples.
    """
    given = {names.tensors[i]: n for i, n in names.next_values.items() if in_batches(names.plan, i)}
    return (tuple_of(given), tuple_of(given.values())) if given else None


def _loads(plan: Plan, names: Names) -> list[str]:
    """The loads of one row."""
    rows, lines = plan.work.rows, []
    fragments = [names.fragments[i] for i in rows]
    has_loader = bool(rows) and not is_ahead(plan)
    if is_ahead(plan):
        comma = "," if len(fragments) == 1 else ""
        lines.append(f"    {', '.join(fragments)}{comma} = {names.ahead}.take(k)")
    elif rows:
        lines.append("    loader = GlobalToRegLoader(ctx)")
    for step in names.opening:
        if not isinstance(step, Load):
            lines += print_step(names, step)
        elif step.input.role is Role.ROW and has_loader:
            i = step.input
            lines.append(f"    {names.fragments[i]} = loader.start({names.whole(i)})")
        elif step.input.role is Role.PER_ROW:
            value = names.next_values[step.input]
            if in_batches(plan, step.input):
                value = f"{names.loop}.value(k, {value})"
            lines += assign(names, step.input, value)
    lines += ["    loader.finish()"] if has_loader else []
    for step in names.opening if not plan.stretches else ():
        if isinstance(step, Load) and step.input.role in (Role.ROW, Role.COLUMN):
            lines += assign(names, step.input, f"{names.fragments[step.input]}.load()")
    return lines


def _next_values(names: Names) -> list[str]:
    """The loads of the numbers of the next row, or batch of rows, so that no row waits for its own.
    """
    lines, following = [], f"{names.loop}.row(k + 1, is_there=False)"
    if batch := _batch(names):
        tensors, held = batch
        args = ["k", tensors, held]
        lines += wrapped_call(f"    {held} = {names.loop}.next_values(", args, ")")
    return lines + [
        f"    {name} = {following}.load_row_value({names.tensors[i]})"
        for i, name in names.next_values.items() if not in_batches(names.plan, i)
    ]  # fmt: skip


def stores(plan: Plan, names: Names) -> list[str]:
    """What follows the loop: each CTA stores its part of each result."""
    lines = ["", "    # the part of this CTA"]
    for parts in parts_of(plan):
        args = [names.loop, names.totals[parts.output]]
        lines.append(f"    {_parts(plan, names, parts)}.store({', '.join(args)})")
    return lines


def _parts(plan: Plan, names: Names, parts: PartsOf) -> str:
    dtype = CUTLASS_TYPES[parts.dtype]
    args = [names.workspace, parts.start, dtype, plan.parts, parts.columns]
    return f"Parts({', '.join(map(str, args))})"


def _columns(plan: Plan, output: Output) -> int:
    """How many elements a result over all rows has."""
    return plan.graph.n // output.groups if output.is_row else 1


def _blocks(plan: Plan, output: Output) -> int:
    """How many CTAs of the second kernel combine a result."""
    return -(-_columns(plan, output) // (COMBINED if output.groups == 1 else COMBINED_OF_GROUPS))


def combining_kernel(plan: Plan, names: Names) -> list[str]:
    """The kernel that combines the parts of all results."""
    results = dict.fromkeys(names.tensors[each.output] for each in parts_of(plan))
    params = [f"{names.workspace}: cute.Tensor", *(f"{name}: cute.Tensor" for name in results)]
    lines = [
        "@cute.kernel",
        *wrapped_call(f"def {names.combining}(", [*params, "parts: Int32"], "):"),
    ]
    if plan.target.arch.dependent_launch:
        lines += [
            "    cute.arch.griddepcontrol_wait()  # all parts are there",
            "    cute.arch.griddepcontrol_launch_dependents()  # the next may start",
        ]
    for place, each in enumerate(parts_of(plan)):
        output = each.output
        columns = names.end(output) or str(_columns(plan, output))
        args = [OF_OP[output.over].combine, names.tensors[output], columns, "parts"]
        args += [f"place={place}"] if place else []
        args += [f"groups={output.groups}"] if output.groups > 1 else []
        lines += wrapped_call(f"    {_parts(plan, names, each)}.combine(", args, ")")
    return lines


def combining_launch(plan: Plan, names: Names) -> list[str]:
    """Its launch, behind that of the loops, whose grid it takes the number of parts from."""
    each = parts_of(plan)
    results = dict.fromkeys(names.tensors[parts.output] for parts in each)
    most = max([_blocks(plan, parts.output) for parts in each])
    args = [names.workspace, *results, f"{names.grid}[0]"]
    launch = [
        f"grid=[{most}, {len(each)}, 1]",
        f"block=[{COMBINING_THREADS}, 1, 1]",
        "stream=stream",
        *(["use_pdl=True"] if plan.target.arch.dependent_launch else []),
    ]
    return [
        *wrapped_call(f"    {names.combining}(", args, ").launch("),
        *(f"        {each}," for each in launch),
        "    )",
    ]

"""Prints the stretches of a held row whose elements are computed a vector at a time."""

from __future__ import annotations

from ..steps import Store
from ..stretches import Stretch, carried_by
from .expressions import CUTLASS_TYPES, INDENT, located, wrapped_call
from .names import Names
from .steps import assign, end_of, print_step, reduce_held, reduced

VECTOR = "chunk"  # the context of a vector, as in loops
INSIDE = INDENT + INDENT


def print_stretch(names: Names, stretch: Stretch) -> list[str]:
    """What a thread computes until the next exchange, without results of which a row has one."""
    plan = names.plan
    lines = []
    for i in stretch.columns:
        loaded = f"ctx.load_column({names.whole(i)})"
        loaded = f"{names.staged[i]}.arrived()" if i in names.staged else loaded
        lines.append(f"{INDENT}{names.fragments[i]} = {loaded}")
    for step in stretch.once:
        lines += print_step(names, step)
    body = _body(names, stretch)
    if body:
        for id in stretch.kept:
            dtype = CUTLASS_TYPES[plan.graph[id].value.dtype]
            lines.append(f"{INDENT}{names.held[id]} = ctx.make_row({dtype})")
        for output in stretch.shifted(plan):
            tensor = names.tensors[output]
            keep = [tensor, f"ctx.make_row({tensor}.element_type)"]
            if output in plan.places:
                keep[1] = f"{names.staged[plan.places[output]]}.tile"
            keep += end_of(names, output)
            head = f"{INDENT}{names.kept[output]} = ElementwiseStorer(ctx).keep("
            lines += wrapped_call(head, keep, ")")
        for part in stretch.carried:
            lines.append(f"{INDENT}{names.trees[part.results[0]]} = ctx.tree({part.kind.combine})")
        lines.append(f"{INDENT}for j in cutlass.range_constexpr(ctx.num_chunks):")
        verb = "in_tree" if stretch.carried else "chunk"
        lines.append(f"{INSIDE}{VECTOR} = ctx.{verb}(j)")
        lines += body
    for output in stretch.shifted(plan):
        lines.append(f"{INDENT}{names.kept[output]}.store()")
    inputs = {i.id: i for i in (*plan.work.rows, *plan.work.columns)}
    for id in stretch.whole:
        if id in inputs:
            held = names.fragments[inputs[id]]
            held = f"ctx.read_row({held})" if inputs[id] in names.staged else held
            lines += assign(names, inputs[id], f"{held}.load()")
        else:
            lines.append(f"{INDENT}{names.values[id]} = {names.held[id]}.load()")
    for step in stretch.factors:
        lines += print_step(names, step)
    return lines + (reduce_held(names, stretch.then) if stretch.then else [])


def _body(names: Names, stretch: Stretch) -> list[str]:
    """What is done for each vector."""
    others = [each for each in names.plan.stretches if each is not stretch]
    # Of an input that is read again the compiler would keep converted elements, which are wider.
    hidden = {i for each in others for i in each.inputs}
    hidden.update(names.plan.work.columns if names.plan.graph.over_rows else ())  # by other rows
    hidden.update(names.staged)  # which are in shared memory
    lines = []
    left = list(stretch.carried)

    def add(made: set[int]) -> None:
        """Let trees take what is there now."""
        for part in [p for p in left if {*carried_by(names.plan.graph, p)} <= made]:
            left.remove(part)
            value = reduced(names, part.operands(names.plan.graph)[0])
            line = f"{INSIDE}{VECTOR}.add_to({names.trees[part.results[0]]}, {value})"
            lines.extend(located([line], names.plan.graph[part.results[0]]))

    for i in stretch.inputs:
        verb = "read_row" if i in hidden else "take_row"
        lines += assign(names, i, f"{VECTOR}.{verb}({names.fragments[i]}).load()", INSIDE)
    elsewhere = {step.id for each in others for step in each.computes}
    again = {i for step in stretch.computes if step.id in elsewhere for i in step.inputs}
    for id in stretch.read:  # the compiler would also keep what other stretches compute of it
        verb = "read_row" if id in again else "take_row"
        lines.append(f"{INSIDE}{names.values[id]} = {VECTOR}.{verb}({names.held[id]}).load()")
    made = {*(i.id for i in stretch.inputs), *stretch.read}
    add(made)
    for step in stretch.computes:
        lines += print_step(names, step, VECTOR, INSIDE)
        made.add(step.id)
        add(made)
        if step.id in stretch.kept:
            args = f"{names.held[step.id]}, {names.values[step.id]}"
            lines.append(f"{INSIDE}{VECTOR}.put_row({args})")
    for output in stretch.stores:
        lines += print_step(names, Store(output), VECTOR, INSIDE)
    return lines

"""Prints how pieces of the tensors are taken, and how their leading dimensions become one mode.

The host function does so before it launches. But where a kernel reads or writes two pieces of one
tensor, it takes all tensors uncut and does so itself. Then it computes the address of a row once
for all pieces of a tensor, because the compiler knows that they have the same strides.
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import UnsupportedError
from ...frontend.graph import Graph, Input, Output, Role, View
from ...frontend.ops import Varies
from ..plan import Plan
from ..vectors import ends_at_vector
from .expressions import CUTLASS_TYPES, tuple_of, wrapped_call
from .names import Names


def print_views(plan: Plan, names: Names, arguments: Sequence[Input | Output]) -> list[str]:
    """The lines that take the pieces, and make one mode of the leading dimensions of each."""
    firsts = [a for a in arguments if a not in names.places]
    pieces = [line for a in firsts for line in _piece(plan, names, a)]
    collapsed = [line for a in arguments for line in _collapse(plan, names, a)]
    lead = []
    if collapsed and plan.target.broadcast:
        lead.append(f"    lead = {names.argument(of_rows(plan))}.shape[:{plan.target.lead}]")
    return [
        *lead,
        *pieces,
        *dict.fromkeys(collapsed),  # a tensor may be read as a row and by its elements
    ]


def number_of_rows(plan: Plan, names: Names) -> str:
    """The text that counts the rows in the host function."""
    counted, lead, joined = of_rows(plan), plan.target.lead, plan.target.joined
    # What the kernel takes uncut is joined in the kernel, and so not counted in joined rows here.
    divided = f" // {joined}" if names.uncut and joined > 1 else ""
    if lead == 1:
        return f"{names.argument(counted)}.shape[0]{divided}"
    if names.uncut:
        return f"cute.size({names.argument(counted)}.shape[:{lead}]){divided}"
    return f"cute.size({names.tensors[counted]}, mode=[0])"


def of_rows(plan: Plan) -> Input | Output:
    """An argument that has the whole leading shape: a result of each row, or else an input.

    Raises UnsupportedError where all results are over all rows and all inputs repeat over some.
    """
    graph = plan.graph
    for output in graph.outputs:
        if output.over is None:
            return output
    repeated = {name for name, _ in plan.target.broadcast}
    for i in graph.inputs:
        is_of_rows = i.role in (Role.ROW, Role.PER_ROW) and row_shape(graph, i)[1] is not None
        if is_of_rows and i.name not in repeated:
            return i
    raise UnsupportedError(
        f"{graph.name}: all results are reduced over all rows, and each argument repeats over some "
        "of their leading dimensions: expand one of them, x.expand(...).contiguous(), or return a "
        "row beside",
        graph[graph.outputs[0].id].loc,
    )


def _piece(plan: Plan, names: Names, argument: Input | Output) -> list[str]:
    """The line that takes a piece of a tensor, where an input or output is one.

    Of a number that the host function computes of a Python float, it is the line that does so.
    """
    view = argument.view
    if argument.formula is not None:
        text = argument.formula.text(names.argument(argument))
        return wrapped_call(f"    {names.tensors[argument]} = Float32(", [text], ")")
    if view is None:
        return []
    if view.at is not None:
        return _table(plan, names, argument)
    args = [names.argument(argument), tuple_of(map(str, view.start))]
    if view.steps is not None:
        args += [tuple_of(map(str, view.steps)), str(plan.graph.n)]
    if view.width > 1:
        args += [CUTLASS_TYPES[argument.dtype], str(divisor(plan, argument))]
    elif isinstance(argument, Input) and argument.role is Role.DEVICE_SCALAR:
        args += [tuple_of("0" for _ in view.start), "1"]
    args += _groups(view)
    return wrapped_call(f"    {names.tensors[argument]} = view_of(", args, ")")


def _groups(view: View) -> list[str]:
    """The argument that says how the groups of a piece lie, where they do not follow each other."""
    if view.groups is None:
        return []
    size, far = view.groups
    return [f"groups=({size}, {tuple_of(map(str, far))})"]


def _table(plan: Plan, names: Names, table: Input) -> list[str]:
    """The line that takes the rows of a table of which indices choose one, or their elements."""
    view, args = table.view, [names.argument(table), tuple_of(map(str, table.view.start))]
    args += [] if view.steps is None else [tuple_of(map(str, view.steps)), str(plan.graph.n)]
    args += _groups(view)
    axis, step, count = view.at
    if not has_all_rows(view):
        args += [f"axis={axis}", f"step={step}", f"count={count}"]
    return wrapped_call(f"    {names.tensors[table]} = table_of(", args, ")")


def has_all_rows(view: View) -> bool:
    """Whether the rows of a table are all those that its tensor has along its first axis.

    Then the kernel reads how many there are, so that it serves tables of any length.
    """
    return view.at == (0, 1, view.shape[0]) and view.start[0] == 0


def _collapse(plan: Plan, names: Names, argument: Input | Output) -> list[str]:
    """Lines that make one mode of an argument's leading dimensions, where it is not one."""
    is_row, inner = row_shape(plan.graph, argument)
    if inner is None or (isinstance(argument, Output) and argument.over is not None):
        return []
    name = names.tensors[argument]
    if plan.target.joined > 1:
        args = name, str(plan.target.joined), str(plan.numerics.vec_size)
        return [f"    {name} = as_joined_rows({', '.join(args)})"]
    own = own_dimensions(plan, argument)
    if plan.target.lead == 1 and own is None and (is_row or not inner):
        return []
    args = [name] if is_row else [name, str(len(inner))]
    args += [] if own is None else ["lead", tuple_of(map(str, own))]
    args += ["flat=True"] if plan.target.flat else []
    verb = "as_rows" if is_row else "as_row_values"
    return [f"    {name} = {verb}({', '.join(args)})"]


def own_dimensions(plan: Plan, argument: Input | Output) -> tuple[bool | None, ...] | None:
    """`Target.broadcast` of an input that the rows repeat; None of any other argument."""
    is_input = isinstance(argument, Input)
    return dict(plan.target.broadcast).get(argument.name) if is_input else None


def row_shape(graph: Graph, argument: Input | Output) -> tuple[bool, tuple[int, ...] | None]:
    """Whether it is whole rows, and its shape after the leading dimensions; None without those."""
    if isinstance(argument, Output):
        return argument.is_row, argument.inner
    if argument.role is Role.PER_ROW and argument.view is not None:
        return False, ()
    if argument.role not in (Role.ROW, Role.PER_ROW, Role.TAKEN) or is_vector(graph, argument):
        return False, None
    return argument.role is not Role.PER_ROW, graph[argument.id].value.inner


def is_vector(graph: Graph, argument: Input) -> bool:
    """Whether all rows share what elements are taken of."""
    varies = graph[argument.id].value.varies
    return argument.role is Role.TAKEN and varies is not Varies.ROW


def divisor(plan: Plan, argument: Input | Output) -> int:
    """Elements that a row's or column's pointer and stride are declared a multiple of."""
    itemsize = argument.dtype.itemsize
    is_column = isinstance(argument, Input) and argument.role in (Role.COLUMN, Role.TABLE)
    if plan.placement.shifted and not is_column:
        return 1
    view = argument.view
    n, vec = plan.graph.n, plan.numerics.vec_size
    is_torn = view is not None and view.there(n) and not ends_at_vector(argument, n, vec)
    if is_torn or (view is not None and not view.is_contiguous):
        return 1  # its elements are accessed one by one, or in aligned pieces wherever it begins
    vector = plan.numerics.vec_size * itemsize
    return max(min(vector, plan.placement.copy_bytes), itemsize) // itemsize

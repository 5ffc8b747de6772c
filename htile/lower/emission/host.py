"""Prints the host function of a kernel, and the arguments that it is compiled with."""

from __future__ import annotations

from collections.abc import Iterable

from ...errors import UnsupportedError
from ...frontend.graph import Graph, Input, Output, Role, View, tensor_dtype
from ...frontend.ops import Varies
from ..over_rows import workspace_bytes
from ..plan import Plan
from .expressions import CUTLASS_TYPES, lines_of, tuple_of, wrapped_call
from .names import Names
from .rows import combining_launch


def parameters(plan: Plan, names: Names, texts: Iterable[str]) -> list[str]:
    """The arguments of these names as parameters of the kernel or of the host function."""
    scalars = plan.work.of(Role.SCALAR)
    kinds = {names.argument(i): "Float64" for i in scalars if i.formula is not None}
    kinds |= {names.tensors[i]: "Float32" for i in scalars}
    return [f"{name}: {kinds.get(name, 'cute.Tensor')}" for name in texts]


def host(plan: Plan, names: Names) -> list[str]:
    """The function that takes the pieces, makes one mode of leading dimensions, and launches."""
    params = [*parameters(plan, names, names.arguments), "stream: cuda.CUstream"]
    params[-1:-1] = [f"{names.workspace}: cute.Tensor"] if plan.graph.over_rows else []
    passed = [*row_tensors(plan, names), "tiled_copy"]
    of_rows = _of_rows(plan)
    counted = names.tensors[of_rows]
    firsts = [a for a in names.tensors if a not in names.places]
    pieces = [line for a in firsts for line in _piece(plan, names, a)]
    lines = [line for a in names.tensors for line in _collapse(plan, names, a)]
    collapsed = [*dict.fromkeys(lines)]  # a tensor may be read as a row and by its elements
    rows = f"cute.size({counted}, mode=[0])" if collapsed else f"{counted}.shape[0]"
    lead = f"    lead = {names.argument(of_rows)}.shape[:{plan.target.lead}]"
    grid = f"config.grid({rows})"
    before, after = [], []
    if plan.graph.over_rows:
        grid, after = names.grid, combining_launch(plan, names)
        before = [f"    {grid} = config.grid_of_groups({rows}, {plan.numerics.groups})"]
    launch = [
        f"grid={grid}",
        "block=config.block",
        "cluster=config.cluster",
        "stream=stream",
        *(["use_pdl=True"] if plan.target.arch.dependent_launch else []),
        *(["min_blocks_per_mp=blocks", "preferred_smem_carveout=-1"] if plan.names_blocks else []),
    ]
    return [
        "@cute.jit",
        *wrapped_call(f"def {names.function}(", params, "):"),
        f"    tiled_copy = config.make_vector_copy({plan.numerics.vec_size}).tiled_copy_2d()",
        *([lead] if plan.target.broadcast else []),
        *pieces,
        *collapsed,
        *before,
        *wrapped_call(f"    {names.function}_kernel(", passed, ").launch("),
        *lines_of(launch, " " * 8),
        "    )",
        *after,
    ]


def row_tensors(plan: Plan, names: Names) -> list[str]:
    """The tensors that the kernel of the rows takes, in their order."""
    over = plan.graph.over_rows
    tensors = dict.fromkeys([n for each, n in names.tensors.items() if each not in over])
    return [*tensors, *([names.workspace] if over else [])]


def _of_rows(plan: Plan) -> Input | Output:
    """An argument that has the whole leading shape: a result of each row, or else an input.

    Raises UnsupportedError where all results are over all rows and all inputs repeat over some.
    """
    graph = plan.graph
    for output in graph.outputs:
        if output.over is None:
            return output
    repeated = {name for name, _ in plan.target.broadcast}
    for i in graph.inputs:
        is_of_rows = i.role in (Role.ROW, Role.PER_ROW) and _row_shape(graph, i)[1] is not None
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

    Of a Python float it is the line that computes a number of it.
    """
    view = argument.view
    if argument.formula is not None:
        text = argument.formula.text(names.argument(argument))
        return wrapped_call(f"    {names.tensors[argument]} = Float32(", [text], ")")
    if view is None:
        return []
    args = [names.argument(argument), tuple_of(map(str, view.start))]
    if view.at is not None:
        return _table(plan, names, argument)
    if view.steps is not None:
        args += [tuple_of(map(str, view.steps)), str(plan.graph.n)]
    if view.width > 1:
        args += [CUTLASS_TYPES[argument.dtype], str(_divisibility(plan, argument))]
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
    if not _is_whole(view):
        args += [f"axis={axis}", f"step={step}", f"count={count}"]
    return wrapped_call(f"    {names.tensors[table]} = table_of(", args, ")")


def _is_whole(view: View) -> bool:
    """Whether the rows of a table are all those that its tensor has along its first axis.

    Then the kernel reads how many there are, so that it serves tables of any length.
    """
    return view.at == (0, 1, view.shape[0]) and view.start[0] == 0


def _collapse(plan: Plan, names: Names, argument: Input | Output) -> list[str]:
    """Lines that make one mode of an argument's leading dimensions, where it is not one."""
    is_row, inner = _row_shape(plan.graph, argument)
    if inner is None or (isinstance(argument, Output) and argument.over is not None):
        return []
    own = _own_dimensions(plan, argument)
    if plan.target.lead == 1 and own is None and (is_row or not inner):
        return []
    name = names.tensors[argument]
    args = [name] if is_row else [name, str(len(inner))]
    args += [] if own is None else ["lead", tuple_of(map(str, own))]
    args += ["flat=True"] if plan.target.flat else []
    verb = "as_rows" if is_row else "as_row_values"
    return [f"    {name} = {verb}({', '.join(args)})"]


def fake_arguments(plan: Plan, names: Names) -> list[str]:
    """What stands for the tensors when the host function is compiled."""
    graph, n, count = plan.graph, plan.graph.n, plan.target.lead
    sizes = ["m"] if count == 1 else [f"m{k}" for k in range(count)]
    whole = str(n) if graph.multiple is None else "n"
    args = []
    for name in names.arguments:
        pieces = [a for a in names.tensors if names.argument(a) == name]
        a = pieces[0]
        dtype = CUTLASS_TYPES[tensor_dtype(a)]
        rows = [p for p in pieces if p.view is None or p.view.steps]
        rows = [p for p in rows if not isinstance(p, Input) or p.role is not Role.TAKEN]
        # The piece with the widest vectors says how aligned the tensor is; one element may lie
        # anywhere.
        wide = [_divisibility(plan, p) * (p.view.width if p.view else 1) for p in rows]
        divisibility = max(wide, default=1)
        if isinstance(a, Input) and a.role is Role.SCALAR:
            args.append("Float32(0)" if a.formula is None else "Float64(0)")
        elif isinstance(a, Output) and a.over is not None:
            inner = tuple_of(map(str, a.view.shape if a.view else a.inner))
            args.append(f"make_fake_tensor({dtype}, {inner}, any_stride=True)")
        elif _is_shared(plan, a):
            shape = a.view.shape if a.view else graph[a.id].value.inner
            if any(p.view is not None and p.view.at and _is_whole(p.view) for p in pieces):
                shape = ("cute.sym_int64()", *shape[1:])
            shape = (whole,) if graph.multiple is not None else map(str, shape)
            args.append(f"make_fake_tensor({dtype}, {tuple_of(shape)}, {divisibility})")
        elif isinstance(a, Input) and a.role is Role.DEVICE_SCALAR:
            shape = "(1,)" if graph[a.id].value.inner else "()"
            args.append(f"make_fake_tensor({dtype}, {shape}, stride={shape})")
        else:
            is_row, inner = _row_shape(graph, a)
            if not a.view and is_row:
                inner = (whole,) if graph.multiple is not None else inner or (n,)
            inner = a.view.shape if a.view else inner
            is_row = any(_row_shape(graph, piece)[0] for piece in pieces) or a.view is not None
            is_row &= inner != ()  # else its kernel takes its shape from one value of each row
            has = _own_dimensions(plan, a) or (True,) * len(sizes)
            lead = [m if own else "1" for m, own in zip(sizes, has, strict=True) if own is not None]
            shape = [*lead, *map(str, inner)]
            last = [str(divisibility)] if is_row else ["any_stride=True"]
            args.append(f"make_fake_tensor({', '.join([dtype, tuple_of(shape), *last])})")
    if graph.over_rows:
        args.append(f"make_fake_tensor(Int8, ({workspace_bytes(plan)},), align=16)")
    return [
        "def fake_arguments():",
        '    """What stands for the tensors when the kernel is compiled."""',
        *(f"    {m} = cute.sym_int()" for m in sizes),
        *([f"    n = cute.sym_int({_multiple(graph)})"] if graph.multiple is not None else []),
        *wrapped_call("    return (", args, ")" if len(args) > 1 else ",)"),
    ]


def _multiple(graph: Graph) -> str:
    """What the length of a row is a multiple of, as an argument of a symbol."""
    return f"divisibility={graph.multiple}" if graph.multiple > 1 else ""


def _is_shared(plan: Plan, argument: Input | Output) -> bool:
    """Whether it is, or is a piece of, a vector that all rows share."""
    if not isinstance(argument, Input):
        return False
    is_piece = argument.role is Role.DEVICE_SCALAR and argument.view is not None
    is_whole = argument.role in (Role.COLUMN, Role.TABLE)
    return is_whole or is_piece or _is_vector(plan.graph, argument)


def _own_dimensions(plan: Plan, argument: Input | Output) -> tuple[bool | None, ...] | None:
    """`Target.broadcast` of an input that the rows repeat; None of any other argument."""
    is_input = isinstance(argument, Input)
    return dict(plan.target.broadcast).get(argument.name) if is_input else None


def _row_shape(graph: Graph, argument: Input | Output) -> tuple[bool, tuple[int, ...] | None]:
    """Whether it is whole rows, and its shape after the leading dimensions; None without those."""
    if isinstance(argument, Output):
        return argument.is_row, argument.inner
    if argument.role is Role.PER_ROW and argument.view is not None:
        return False, ()
    if argument.role not in (Role.ROW, Role.PER_ROW, Role.TAKEN) or _is_vector(graph, argument):
        return False, None
    return argument.role is not Role.PER_ROW, graph[argument.id].value.inner


def _is_vector(graph: Graph, argument: Input) -> bool:
    """Whether all rows share what elements are taken of."""
    varies = graph[argument.id].value.varies
    return argument.role is Role.TAKEN and varies is not Varies.ROW


def _divisibility(plan: Plan, argument: Input | Output) -> int:
    """Elements that a row's or column's pointer and stride are declared a multiple of."""
    itemsize = argument.dtype.itemsize
    is_column = isinstance(argument, Input) and argument.role in (Role.COLUMN, Role.TABLE)
    if plan.placement.shifted and not is_column:
        return 1
    view = argument.view
    if view is not None and (not view.is_contiguous or view.there(plan.graph.n)):
        return 1  # its elements are accessed one by one, or in aligned pieces wherever it begins
    vector = plan.numerics.vec_size * itemsize
    return max(min(vector, plan.placement.copy_bytes), itemsize) // itemsize

"""Prints the host function of a kernel, and the arguments that it is compiled with."""

from __future__ import annotations

from collections.abc import Iterable

from ...frontend.graph import Graph, Input, Output, Role, tensor_dtype
from ..over_rows import workspace_bytes
from ..plan import Plan
from .expressions import CUTLASS_TYPES, lines_of, tuple_of, wrapped_call
from .names import Names
from .rows import combining_launch
from .views import (
    divisor,
    has_all_rows,
    is_vector,
    number_of_rows,
    own_dimensions,
    print_views,
    row_shape,
)


def parameters(plan: Plan, names: Names, texts: Iterable[str]) -> list[str]:
    """The arguments of these names as parameters of the kernel or of the host function."""
    scalars = plan.work.of(Role.SCALAR)
    kinds = {names.argument(i): "Float64" for i in scalars if i.formula is not None}
    kinds |= {names.tensors[i]: "Float32" for i in scalars}
    return [f"{name}: {kinds.get(name, 'cute.Tensor')}" for name in texts]


def host(plan: Plan, names: Names) -> list[str]:
    """The function that takes what users give, and launches the kernel."""
    params = [*parameters(plan, names, names.arguments), "stream: cuda.CUstream"]
    params[-1:-1] = [f"{names.workspace}: cute.Tensor"] if plan.graph.over_rows else []
    passed = [*row_tensors(plan, names), "tiled_copy"]
    lines = print_views(plan, names, names.cut_before)
    rows = number_of_rows(plan, names)
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
        *lines,
        *before,
        *wrapped_call(f"    {names.function}_kernel(", passed, ").launch("),
        *lines_of(launch, " " * 8),
        "    )",
        *after,
    ]


def row_tensors(plan: Plan, names: Names) -> list[str]:
    """The tensors that the kernel of the rows takes, in their order."""
    over, passed_on = plan.graph.over_rows, {*names.uncut}
    taken = {a: name for a, name in names.tensors.items() if a not in over}
    if passed_on:
        taken = {a: names.argument(a) if a in passed_on else name for a, name in taken.items()}
    tensors = dict.fromkeys(taken.values())
    return [*tensors, *([names.workspace] if over else [])]


def fake_arguments(plan: Plan, names: Names) -> list[str]:
    """What stands for the tensors when the host function is compiled."""
    graph, count, joined = plan.graph, plan.target.lead, plan.target.joined
    n = graph.n // joined
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
        wide = [divisor(plan, p) * (p.view.width if p.view else 1) for p in rows]
        divisibility = max(wide, default=1)
        if isinstance(a, Input) and a.role is Role.SCALAR:
            args.append("Float32(0)" if a.formula is None else "Float64(0)")
        elif isinstance(a, Output) and a.over is not None:
            inner = tuple_of(map(str, a.view.shape if a.view else a.inner))
            args.append(f"make_fake_tensor({dtype}, {inner}, any_stride=True)")
        elif _is_shared(plan, a):
            shape = a.view.shape if a.view else graph[a.id].value.inner
            if any(p.view is not None and p.view.at and has_all_rows(p.view) for p in pieces):
                shape = ("cute.sym_int64()", *shape[1:])
            shape = (whole,) if graph.multiple is not None else map(str, shape)
            args.append(f"make_fake_tensor({dtype}, {tuple_of(shape)}, {divisibility})")
        elif isinstance(a, Input) and a.role is Role.DEVICE_SCALAR:
            shape = "(1,)" if graph[a.id].value.inner else "()"
            args.append(f"make_fake_tensor({dtype}, {shape}, stride={shape})")
        else:
            is_row, inner = row_shape(graph, a)
            if not a.view and is_row:
                inner = (whole,) if graph.multiple is not None else inner or (n,)
            inner = a.view.shape if a.view else inner
            is_row = any(row_shape(graph, piece)[0] for piece in pieces) or a.view is not None
            is_row &= inner != ()  # else its kernel takes its shape from one value of each row
            has = own_dimensions(plan, a) or (True,) * len(sizes)
            lead = [m if own else "1" for m, own in zip(sizes, has, strict=True) if own is not None]
            inner = (n,) if joined > 1 else inner
            shape = [*lead, *map(str, inner)]
            last = [str(divisibility)] if is_row else ["any_stride=True"]
            if joined > 1:  # contiguous rows, of which only the first is aligned
                align = divisibility * tensor_dtype(a).itemsize
                outer = "cute.sym_int64(), " * (count - 1)
                last = [f"align={align}", f"stride=({outer}{n}, 1)"]
            args.append(f"make_fake_tensor({', '.join([dtype, tuple_of(shape), *last])})")
    if graph.over_rows:
        args.append(f"make_fake_tensor(Int8, ({workspace_bytes(plan)},), align=16)")
    return [
        "def fake_arguments():",
        '    """What stands for the tensors when the kernel is compiled."""',
        *(f"    {m} = cute.sym_int()" for m in sizes[: None if joined == 1 else -1]),
        *([f"    {sizes[-1]} = cute.sym_int(divisibility={joined})"] if joined > 1 else []),
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
    is_column = argument.role in (Role.COLUMN, Role.TABLE)
    return is_column or is_piece or is_vector(plan.graph, argument)



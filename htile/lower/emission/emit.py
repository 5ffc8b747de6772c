"""Prints a plan as the source text of one CuTe-DSL kernel over HTile's primitives.

It decides nothing but which threads store elements by rank (`stored_ranks.py`): each step of the
plan has a way to be printed, each operation an expression in `EMIT`. The same plan gives the same
text, in every process. `steps.py` prints the steps, `views.py` the pieces of tensors, `host.py` the
host function and what it is compiled with.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence
from itertools import takewhile

from ...frontend.graph import Input, Output, Role, tensor_dtype
from ...frontend.ops import dtype_name
from ..over_rows import TURNS
from ..plan import Plan
from ..reductions import Reduce
from ..steps import ChunkLoop, Fence, Home, Load, Prefetch, Step, Store
from .expressions import CUTLASS_TYPES, WIDTH, wrapped_call
from .host import fake_arguments, host, parameters, row_tensors
from .names import Names
from .rows import combining_kernel, is_ahead, loads_once, stores
from .rows import loop as row_loop
from .steps import (
    assign,
    loop,
    prefetch,
    print_step,
    reduce_carried,
    reduce_held,
    store_values,
)
from .stretches import print_stretch
from .views import print_views


def emit(plan: Plan) -> str:
    """The text of the kernel, its host function and the arguments that it is compiled with."""
    names = Names(plan)
    parts = [_config(plan), _kernel(plan, names), host(plan, names), fake_arguments(plan, names)]
    if plan.graph.over_rows:
        parts.insert(2, combining_kernel(plan, names))
    text = "\n\n\n".join("\n".join(part) for part in parts)
    return "\n".join(_docstring(plan) + _imports(text)) + "\n\n" + text + "\n"


def _docstring(plan: Plan) -> list[str]:
    graph, joined = plan.graph, plan.target.joined
    takes, gives = (
        ", ".join(dict.fromkeys(f"{each.name} {dtype_name(tensor_dtype(each))}" for each in some))
        for some in (graph.inputs, graph.outputs)
    )
    title = f'"""{graph.name}: one row of N {graph.length_text}'
    title += f", which is {joined} rows of {graph.n // joined}" if joined > 1 else ""
    return [f"{title}.", "", *textwrap.wrap(f"{takes} -> {gives}", WIDTH), '"""', ""]


def _imports(text: str) -> list[str]:
    # All at once: to search a long text for each name takes seconds.
    words, called = {*re.findall(r"\w+", text)}, {*re.findall(r"\w+\(", text)}
    types = [t for t in CUTLASS_TYPES.values() if t in words]
    types += ["Float64"] if "Float64" in text else []  # of what the host function computes
    types.sort(key=lambda t: [int(p) if p.isdigit() else p for p in re.split(r"(\d+)", t)])
    verbs = ("ElementwiseLoader", "GlobalToRegLoader", "ElementwiseStorer")
    dataflow = ["ElementwiseKernelContext", *(name for name in verbs if f"{name}(" in text)]
    views = (
        "as_joined_rows", "as_row_values", "as_rows", "expand", "make_fake_tensor", "table_of",
        "view_of",
    )  # fmt: skip
    loops = ["RowLoop"] if "RowLoop(" in text else []
    loops += ["RowsAhead"] if "RowsAhead(" in text else []
    utils = [u for u in views if f"{u}(" in called]
    return [
        "import cuda.bindings.driver as cuda",
        *(["import cutlass"] if "cutlass.range" in text else []),
        "import cutlass.cute as cute",
        f"from cutlass import {', '.join(types)}",
        "",
        *(["from htile.compute import math"] if "math." in text else []),
        *(["from htile.compute.following import Move"] if "Move(" in text else []),
        *(["from htile.compute.log_add import LOGADD"] if "LOGADD" in words else []),
        *(["from htile.compute.mean import MEAN"] if "MEAN" in words else []),
        *(["from htile.compute.parts import OverRows, Parts"] if "OverRows." in text else []),
        "from htile.config import ElementwiseTileConfig",
        *([f"from htile.copy.row_loop import {', '.join(loops)}"] if loops else []),
        f"from htile.dataflow import {', '.join(sorted(dataflow))}",
        f"from htile.utils import {', '.join(utils)}",
    ]


# Bytes of stack in each thread that a second thread block of a multiprocessor is worth, and a third
# one, where registers are spared for more than fit; of aligned rows and of shifted ones, which need
# the most registers while they are loaded. It was set on 106 kernels of held rows, timed with one
# more than fitted: two in place of one take 0.62 to 0.86 of the time where that spills at most 96
# bytes, and three in place of two 0.82 to 0.92 where it spills nothing. At other lengths 16 kernels
# take 0.63 to 0.79, and seven 0.76 to 0.98. With a small stack for the third one they take up to
# 1.49, and with four in place of three many take longer (one H200, 2026-11-30).
WORTH, WORTH_SHIFTED = (0, 0), (96, 0)


def _config(plan: Plan) -> list[str]:
    """The tile's configuration, and for how many CTAs registers are spared."""
    num, place = plan.numerics, plan.placement
    args = [
        CUTLASS_TYPES[_primary(plan).dtype],
        f"N={plan.graph.n}",
        f"num_threads={place.num_threads}",
        f"threads_per_row={num.threads_per_row}",
        f"cluster_n={num.cluster_n}",
        f"stage={plan.slots * (TURNS if num.groups else 1)}",
        *([f"shares={place.shares}"] if place.shares > 1 else []),
        *([f"abreast={place.abreast}"] if place.abreast > 1 else []),
        *(["apart=True"] if place.apart else []),
        *(["reduction_dtype=Int64"] if plan.sweeps.has_wide_words else []),
        *([f"copy_bytes={place.copy_bytes}"] if place.copy_bytes < 16 else []),
        *(["shifted=True"] if place.shifted else []),
        *(["any_end=True"] if plan.may_end_anywhere else []),
        *([f"evict_first_rows={most}"] if (most := plan.evict_first_rows) else []),
    ]
    lines = wrapped_call("config = ElementwiseTileConfig(", args, ")")
    if plan.names_blocks:
        what = "for which registers are spared" if place.blocks else "as the compiler likes"
        lines.append(f"blocks = {place.blocks}  # of an SM, {what}")
    if plan.may_have_more_blocks:
        worth = WORTH_SHIFTED if place.shifted else WORTH
        lines.append(f"worth = {worth}  # bytes of a thread's stack for a second and a third one")
    return lines


def _primary(plan: Plan) -> Input | Output:
    """What the context is set up for: the first row that is loaded, or the first.

    Without rows, it is the first result that is one, or the first.
    """
    results = [*plan.work.writes, *(o for o in plan.graph.outputs if o.over is None)]
    numbers = plan.work.of(Role.PER_ROW)  # where all results are over all rows
    return [*plan.work.rows, *plan.work.of(Role.ROW), *results, *numbers][0]


def _kernel(plan: Plan, names: Names) -> list[str]:
    params = [*parameters(plan, names, row_tensors(plan, names)), "tiled_copy: cute.TiledCopy"]
    tiler = f"config.tiler_mn({plan.numerics.vec_size})"
    primary = names.tensors[_primary(plan)]
    if not (plan.work.of(Role.ROW) or plan.work.writes):
        primary = f"expand({primary}, 1, {plan.graph.n})"
    setup = [primary, tiler, "tiled_copy"]
    extra = [CUTLASS_TYPES[i.dtype] for i in plan.work.rows[1:]]
    if plan.placement.loader != "shared" or not plan.work.rows:
        setup.append("shared=False")
    elif extra:
        setup.append(f"extra_smem_tensors=({', '.join(extra)},)")
    if is_over_rows := bool(plan.graph.over_rows):
        setup += [f"turns={TURNS}"] if is_ahead(plan) else []
    block = names.block if is_over_rows else "ctx"
    wait = "    cute.arch.griddepcontrol_wait()  # the kernel before has ended"
    launch = "    cute.arch.griddepcontrol_launch_dependents()  # the next may start"
    dependent = plan.target.arch.dependent_launch
    return [
        "@cute.kernel",
        *wrapped_call(f"def {names.function}_kernel(", params, "):"),
        *print_views(plan, names, names.uncut),
        f"    {block} = ElementwiseKernelContext(config)",
        *wrapped_call(f"    {block}.setup(", setup, ")"),
        *([wait] if dependent else []),
        *(_loop_over_rows(plan, names) if is_over_rows else _loads(plan, names)),
        *([launch] if dependent else []),
        *(stores(plan, names) if is_over_rows else _steps(plan, names)),
    ]


def _stretches(plan: Plan, names: Names) -> list[str]:
    """What follows the first loads of a held row that is computed a vector at a time."""
    lines: list[str] = []
    for stage, stretch in enumerate(plan.stretches):
        lines += ["", _heading(plan, stage), *print_stretch(names, stretch)]
        stores = [Store(output) for output in stretch.values]
        for k, step in enumerate(stores):
            if step.output.over:
                lines += print_step(names, step)
            elif not (k and _is_beside(names, stores[k - 1], step)):
                lines += store_values(names, _beside(names, stores[k:]))
    return lines


def _loop_over_rows(plan: Plan, names: Names) -> list[str]:
    """What is loaded once, and the loop over rows, behind which the next kernel may start."""
    looked_up = plan.work.early if _looks_up_early(plan) else ()
    early = [line for step in looked_up for line in print_step(names, step)]
    lines = row_loop(plan, names, [*early, *_steps(plan, names)])
    return ["", *loads_once(plan, names), *(line.rstrip() for line in lines)]


def _loads(plan: Plan, names: Names) -> list[str]:
    """What is loaded before anything is computed; the rows are in flight meanwhile."""
    in_loops = plan.numerics.in_loops
    is_shared = plan.placement.loader == "shared"
    has_loader = bool(plan.work.rows) and plan.rows_home is not Home.REREAD
    lines = []
    if has_loader:
        kind = "ElementwiseLoader" if is_shared else "GlobalToRegLoader"
        lines.append(f"    loader = {kind}(ctx)")
    staged = [f"    {n} = ctx.stage_column({names.tensors[i]})" for i, n in names.staged.items()]
    lines += staged if in_loops else []  # shifted rows of loops are waited for at once
    for step in names.opening:
        if not isinstance(step, Load):
            lines += print_step(names, step)
            continue
        i = step.input
        tensor = names.tensors[i]
        if i.role is Role.ROW:
            if has_loader:
                verb = "keep" if in_loops else "start"
                lines.append(f"    {names.fragments[i]} = loader.{verb}({names.whole(i)})")
        elif i.role is Role.COLUMN:
            lines.append(f"    {names.fragments[i]} = ctx.load_column({names.whole(i)})")
        else:
            is_one = i.role is Role.DEVICE_SCALAR
            value = f"{tensor}[0]" if is_one else f"ctx.load_row_value({tensor})"
            lines += assign(names, i, value)
    if _looks_up_early(plan):  # these are in flight with the rows
        lines += [line for step in plan.work.early for line in print_step(names, step)]
    lines += [] if in_loops else staged
    if has_loader:
        lines.append("    loader.finish()")
    for step in names.opening if not (in_loops or plan.stretches) else ():
        if isinstance(step, Load) and step.input.role in (Role.ROW, Role.COLUMN):
            lines += assign(names, step.input, f"{names.fragments[step.input]}.load()")
    return ["", *lines] if lines else []


def _looks_up_early(plan: Plan) -> bool:
    """Whether threads load rows of tables while rows that are held are on their way."""
    early = {step.id for step in plan.work.early}
    return not plan.numerics.in_loops and any(node.id in early for node in plan.work.lookups)


def _steps(plan: Plan, names: Names) -> list[str]:
    """What follows the first loads. A comment names each stage."""
    if plan.stretches:
        return _stretches(plan, names)
    lines: list[str] = []
    in_loops, first = plan.numerics.in_loops, len(names.opening)
    early = plan.work.early
    stage, is_open, is_prefetched = 0, False, False

    def start(k: int) -> list[str]:
        """Lines that start to load what the first loop after the k-th step reads."""
        return prefetch(names, next(j for j in sorted(names.prefetched) if j > k))

    while plan.steps[first] in early or isinstance(plan.steps[first], Fence | Prefetch):
        step = plan.steps[first]
        if isinstance(step, Prefetch):
            lines += ["", *start(first)]
            is_prefetched = True
        elif isinstance(step, Fence) or not _looks_up_early(plan):
            lines += [] if lines else [""]
            lines += print_step(names, step)
        first += 1
    for k, step in enumerate(plan.steps[first:], first):
        if isinstance(step, Prefetch):
            lines += start(k)
            is_prefetched = True
            continue
        if isinstance(step, ChunkLoop) or not is_open:
            lines += ["", _heading(plan, stage)]
            stage += 1
        is_open = not isinstance(step, Reduce)
        if isinstance(step, ChunkLoop):
            lines += loop(names, k, is_prefetched)
            is_prefetched = False
        elif isinstance(step, Store) and not (step.output.is_row or step.output.over):
            if not _is_beside(names, plan.steps[k - 1], step):  # or it is stored with that one
                lines += store_values(names, _beside(names, plan.steps[k:]))
        elif isinstance(step, Reduce):
            lines += reduce_carried(names, step) if in_loops else reduce_held(names, step)
        else:
            lines += print_step(names, step)
    return lines


def _beside(names: Names, steps: Sequence[Step]) -> list[Output]:
    """What the first steps store side by side."""
    beside = takewhile(lambda other: _is_beside(names, steps[0], other), steps)
    return [step.output for step in beside]


def _is_beside(names: Names, step: Step, other: Step) -> bool:
    """Whether two steps store elements of a result that lie side by side."""
    are_stores = isinstance(step, Store) and isinstance(other, Store)
    return are_stores and names.tensors[step.output] == names.tensors[other.output]


def _heading(plan: Plan, stage: int) -> str:
    """What the next steps are for, after so many stages."""
    if stage >= plan.stages:
        return "    # output"
    reduce = plan.sweeps.reduces[stage]
    each = zip(reduce.parts, reduce.results, strict=True)
    ops = [plan.graph[id].op.value for part, id in each if part.chain is None]
    chains = dict.fromkeys(part.chain for part in reduce.parts if part.chain is not None)
    return f"    # stage {stage + 1}: {', '.join([*ops, *map(str, chains)])}"

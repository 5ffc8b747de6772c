"""The picture of a product's plan: from global memory through stages to tensor cores and back."""

from __future__ import annotations

from ..frontend.graph import Input
from ..frontend.ops import dtype_name
from ..lower.products.fused import Tile
from ..lower.products.plan import ProductPlan
from .canvas import Canvas
from .memory import draw_moments
from .model import KIND_OF_ROLE, Box, Kind, Style, Text
from .segments import MOST_ROWS, Bar, Moment

MOST_STAGES = 6  # that have a box each
BLOCK_ROWS = 64  # that an instruction of a warpgroup multiplies, and that are stored at a time


def draw_product_plan(plan: ProductPlan) -> Canvas:
    """The plan, drawn. Raises UnsupportedError without matplotlib."""
    return draw_moments(plan.title, plan.layout(), *moments_of(plan))


def moments_of(plan: ProductPlan) -> tuple[list[Moment], list[Bar]]:
    """What is where at a time, and what the stages and the sums hold meanwhile."""
    tile, kernel = plan.tile, plan.kernel
    (left, size), *rights = plan.loads()
    moments = [
        Moment("global memory", [_box("left", Kind.ROW, left, size)] + [
            _box(f"right{k}", Kind.COLUMN, name, size) for k, (name, size) in enumerate(rights)
        ], what="all warps load" if tile.warps else "one warp loads"),
        Moment("shared memory", _stages(tile.stages, plan.stage_elements),
               what="free stages are filled"),
        Moment("tensor cores", [
            _box(worker, Kind.REDUCTION, f"{worker} multiplies",
                 f"{plan.worker_rows} x {tile.columns}") for worker in plan.workers
        ], what=_how(tile)),
    ]  # fmt: skip
    before = _box_of("row", plan.computes(False))
    beside = [_given(plan, i) for i in plan.given(False) + plan.given(True)]
    body = _box_of("elements", plan.computes(True)) or [
        _box("elements", Kind.ELEMENTWISE, "the sums as they are")
    ]
    what = f"{kernel.chunk} columns at a time"
    moments.append(Moment("registers", before + body, beside, what))
    if plan.staged is not None:
        moments.append(Moment("shared memory", [
            _box("tile", Kind.ROW, "a tile to store", f"{BLOCK_ROWS} x {kernel.chunk}")]))
    moments.append(Moment("global memory", [
        Box(f"store-{name}", Kind.OUTPUT, [Text(name, style=Style.BOLD), Text(how)])
        for name, how in plan.stores()
    ]))  # fmt: skip
    shared = f"{tile.stages * plan.stage_bytes >> 10} KiB"
    sums = f"{tile.rows} x {tile.columns} float32"
    return moments, [
        Bar(0, Kind.ROW, ("stages", "in shared memory", shared), 1, 2, True),
        Bar(1, Kind.REDUCTION, ("sums", "in registers", sums), 2, 3, True),
    ]


def _how(tile: Tile) -> str:
    """How the workers multiply."""
    if tile.warps:
        return ""
    return f"{BLOCK_ROWS} rows at a time" + ", in turns" * tile.in_turns


def _box(key: str, kind: Kind, name: str, more: str = "") -> Box:
    return Box(key, kind, [Text(name, more, Style.BOLD)])


def _box_of(key: str, lines: list[str]) -> list[Box]:
    """A box of what is computed, without the middle of many lines; none of nothing."""
    if len(lines) > MOST_ROWS:
        hidden = len(lines) - MOST_ROWS + 1
        lines = [*lines[: MOST_ROWS - 4], f"... {hidden} more", *lines[-3:]]
    return [Box(key, Kind.ELEMENTWISE, [Text(line) for line in lines])] if lines else []


def _given(plan: ProductPlan, i: Input) -> Box:
    more = f"{plan.names.get(i.id, '')} {dtype_name(i.dtype)}".lstrip()
    return _box(f"load-{i.name}", KIND_OF_ROLE[i.role], i.name, more)


def _stages(count: int, elements: int) -> list[Box]:
    """A box for each stage, of many for the first and the last ones."""
    shown = [*range(count)] if count <= MOST_STAGES else [0, 1, -1, count - 1]
    return [
        _box(f"stage{k}", Kind.ROW, f"stage {k}", f"{elements} of K") if k >= 0
        else _box("stages", Kind.ROW, f"{count - 3} more") for k in shown
    ]  # fmt: skip

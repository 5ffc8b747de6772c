"""The picture of a plan: a row's way from global memory through its stages and back.

Time runs from left to right. A barrier is a dashed line through the reductions that share it;
below, a bar for each value that is on both sides of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field

from ..frontend.graph import Input, Role
from ..frontend.ops import Op, dtype_name
from ..lower.plan import Plan
from ..lower.reductions import SOFTMAX, Part, Reduce
from ..lower.steps import ColumnLoop, Compute, Home, Load, Prefetch, Reload, Step, Store
from .canvas import FAINT, INK, Canvas, Point, Rect, columns_width, text_room
from .model import COLOURS, KIND_OF_ROLE, Kind, describe, kind_of

MARGIN, LINE, INSET = 12.0, 11.0, 6.0
GAP = 24.0  # between the columns of the picture
STACK = 10.0  # between boxes in a column
BAR, BAR_GAP = 16.0, 6.0
MOST_LINES = 10  # of operations in a box
NARROWEST, WIDEST = 12, 28  # columns of text in a box
WIRE = "#59607a"
BANDS = ("#f3f5f7", "#e9edf1")
FONT_HEAD = 9.0
HOME_TEXT = {
    Home.REGISTERS: "kept in registers",
    Home.SHARED: "kept in shared memory",
    Home.REREAD: "read again from global memory",
    Home.RECOMPUTE: "computed again",
}


@dataclass
class Segment:
    """What happens between two barriers, and the reductions of the barrier that ends it.

    ahead: reductions of the next barrier that are gathered here.
    fetched: what is on its way to the next loop from here on.
    """

    loads: list[Load] = field(default_factory=list)
    reloads: list[tuple[Input, Home]] = field(default_factory=list)
    computes: list[Compute] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    reduces: list[Reduce] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    fetched: list[Input] = field(default_factory=list)


@dataclass
class Card:
    """A box of text; `name` becomes its id in the SVG."""

    kind: Kind
    lines: list[str]
    name: str
    again: bool = False
    beside: Card | None = None
    rect: Rect | None = None

    @property
    def height(self) -> float:
        """Points that its lines need."""
        return len(self.lines) * LINE + INSET


@dataclass
class Column:
    """Boxes at one moment; `above` is what reaches them from outside just then."""

    title: str
    cards: list[Card]
    above: list[Card] = field(default_factory=list)
    barrier: bool = False
    x: float = 0.0
    width: float = 0.0


def segments_of(plan: Plan) -> list[Segment]:
    """The steps of a row, cut at its barriers; the last segment has no reductions."""
    segments = [Segment()]
    for step in _flat(plan.steps):
        now = segments[-1]
        match step:
            case Load():
                now.loads.append(step)
            case Reload(inputs, home):
                first = {load.input for load in segments[0].loads} if len(segments) == 1 else ()
                now.reloads += [(i, home) for i in inputs if i not in first]
            case Compute():
                now.computes.append(step)
            case Prefetch(inputs):
                now.fetched += inputs
            case Store():
                now.stores.append(step)
            case ColumnLoop(_, parts):
                now.ahead += [id for part in parts if not _pair(part) for id in part.results[1:]]
            case Reduce():
                now.reduces.append(step)
                segments.append(Segment())
    return segments


def _pair(part: Part) -> bool:
    return part.kind is SOFTMAX and part.at_once


def _later(reduce: Reduce) -> dict[int, int]:
    """The reference of each result that was carried with one of the stage before."""
    found = {}
    for id, part in zip(reduce.results, reduce.parts, strict=True):
        place = part.results.index(id)
        if place and not reduce.is_pair:
            found[id] = part.references[place - 1]
    return found


def _flat(steps: tuple[Step, ...]) -> Iterator[Step]:
    """The steps with those of a loop behind it."""
    for step in steps:
        yield step
        if isinstance(step, ColumnLoop):
            yield from _flat(step.steps)


def kept(plan: Plan, segments: list[Segment]) -> dict[int, tuple[int, int, Home]]:
    """Each value on both sides of a barrier: first and last segment that has it, and its home.

    What a segment makes again for itself alone is on no barrier, unless the plan names its home.
    """
    made: dict[int, int] = {}  # where the newest copy of a value comes from
    spans: dict[int, tuple[int, int, Home]] = {}

    def have(id: int, first: int, last: int) -> None:
        start, end, home = spans.get(id, (first, last, plan.homes.get(id, Home.REGISTERS)))
        spans[id] = min(start, first), max(end, last), home

    def make(id: int, k: int) -> None:
        if id in made and plan.homes.get(id, Home.REGISTERS) is not Home.REGISTERS:
            have(id, made[id], k)
        made[id] = k

    for k, segment in enumerate(segments):
        for load in segment.loads:
            make(load.input.id, k)
        for i, _ in segment.reloads:
            make(i.id, k)
        for step in segment.computes:
            make(step.id, k)
        reads = [i for step in segment.computes for i in step.inputs]
        reads += [step.output.id for step in segment.stores]
        for reduce in segment.reduces:
            later = _later(reduce)
            reads += list(later.values()) or reduce.operands(plan.graph)
        for id in reads:
            if made.get(id, k) < k:
                have(id, made[id], k)
        made |= {id: k + 1 for reduce in segment.reduces for id in reduce.results}
    return dict(sorted(spans.items()))


def draw_plan(plan: Plan) -> Canvas:
    """The plan, drawn. Raises UnsupportedError without matplotlib."""
    segments = segments_of(plan)
    columns, segment_columns = _columns(plan, segments)
    bars = kept(plan, segments)
    head, *notes = _heading(plan)

    at = MARGIN
    for column in columns:
        texts = [line for card in column.cards + column.above for line in card.lines]
        wide = text_room([*texts, column.title], NARROWEST, WIDEST)
        column.x, column.width = at + GAP / 2, columns_width(wide) + 2 * INSET
        at += column.width + GAP
    longest = max([columns_width(len(head), 13), *(columns_width(len(n)) for n in notes)])
    width = max(at + MARGIN, longest + 2 * MARGIN)
    band_top = 40 + len(notes) * LINE
    above_top = band_top + 24
    above = max(_stacked(column.above) for column in columns)
    main_top = above_top + above + (24 if above else 0)
    main = max(_stacked(column.cards) for column in columns)
    bars_top = main_top + main + 30
    bottom = bars_top + len(bars) * (BAR + BAR_GAP) + BAR_GAP
    canvas = Canvas(width, bottom + MARGIN)

    canvas.text(MARGIN, 22, head, size=13, bold=True)
    for k, note in enumerate(notes):
        topic, _, rest = note.partition(" ")  # SVG would merge the blanks between them
        canvas.text(MARGIN, 40 + k * LINE, topic, colour=FAINT)
        canvas.text(MARGIN + columns_width(11), 40 + k * LINE, rest.lstrip(), colour=FAINT)
    middle = main_top + main / 2
    for k, column in enumerate(columns):
        band = Rect(column.x - GAP / 2, band_top, column.width + GAP, bottom - band_top)
        canvas.box(band, BANDS[k % 2], None, round=0)
        canvas.text(
            column.x + column.width / 2, band_top + 12, column.title, size=FONT_HEAD, bold=True,
            width=column.width + GAP, align="center",
        )  # fmt: skip
        _place(column, column.above, above_top + above - _stacked(column.above))
        _place(column, column.cards, middle - _stacked(column.cards) / 2)
        if column.barrier:
            x = column.x + column.width / 2
            line = [(x, band_top + 24), (x, bottom)]  # the card covers its middle
            canvas.wire(line, COLOURS[Kind.REDUCTION][1], dashed=True, arrow=False)
    _wires(canvas, columns, middle)
    for column in columns:
        for card in column.cards + column.above:
            _draw_card(canvas, card)
    if bars:
        canvas.text(MARGIN + GAP / 2, bars_top - 10, "across barriers", colour=FAINT)
    for k, (id, (first, last, home)) in enumerate(bars.items()):
        a, b = columns[segment_columns[first]], columns[segment_columns[last]]
        x, y = a.x + a.width / 4, bars_top + k * (BAR + BAR_GAP)
        _draw_bar(canvas, plan, id, home, Rect(x, y, b.x + 0.75 * b.width - x, BAR))
    return canvas


def _heading(plan: Plan) -> list[str]:
    """The headline and what the plan's text says of numerics, placement and traffic."""
    lines = [line.strip() for line in str(plan).splitlines()[:4]]
    numbers = [i.name for i in plan.graph.inputs if i.role is Role.SCALAR]
    if numbers:
        lines.append(f"numbers    {', '.join(numbers)} given at run time")
    return lines


def _columns(plan: Plan, segments: list[Segment]) -> tuple[list[Column], list[int]]:
    """The columns of the picture, and which of them each segment is."""
    first = segments[0].loads
    columns = [Column("global memory", [_input_card(plan, s.input) for s in first])]
    if plan.placement.loader == "shared":
        text = ["cp.async", f"{plan.placement.copy_bytes} bytes an access"]
        cards = [
            Card(card.kind, [card.lines[0], *text], f"shared-{card.name}", beside=card)
            for card in columns[0].cards
            if card.kind is Kind.ROW
        ]
        columns.append(Column("shared memory", cards))
    places = []
    for k, segment in enumerate(segments):
        above = [_input_card(plan, s.input) for s in segment.loads] if k else []
        above += [_input_card(plan, i, home) for i, home in segment.reloads]
        card = Card(Kind.ELEMENTWISE, _work(plan, segment), f"segment{k}")
        places.append(len(columns))
        chunks = plan.numerics.in_loops and not any(map(_later, segment.reduces))
        columns.append(Column(f"registers{', in chunks' if chunks else ''}", [card], above))
        for reduce in segment.reduces:
            card = _reduce_card(plan, reduce)
            columns.append(Column(f"stage {reduce.stage}", [card], barrier=reduce.exchanges))
    stores = [_store_card(plan, s) for segment in segments for s in segment.stores]
    columns.append(Column("global memory", stores))
    return columns, places


def _work(plan: Plan, segment: Segment) -> list[str]:
    lines = [f"%{s.input.id} = {s.input.name}" for s in segment.loads]
    lines += [f"%{i.id} = {i.name}, again" for i, _ in segment.reloads]
    for step in segment.computes:
        lines.append(describe(plan.graph, plan.graph[step.id]))
    lines += [f"gathers %{id} too" for id in segment.ahead]
    for reduce in segment.reduces:
        if reduce.is_pair:
            peak, total = reduce.results
            lines.append(f"gathers %{peak} with %{total} about it")
        for id, reference in _later(reduce).items():
            lines.append(f"%{id} as gathered, about %{reference}")
    if segment.fetched:
        lines.append(f"fetches {', '.join(i.name for i in segment.fetched)}")
    return _cut(lines) or ["nothing to compute"]


def _cut(lines: list[str]) -> list[str]:
    """The first lines, and how many more there are."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 1], f"… and {len(lines) - MOST_LINES + 1} more"]


def _reduce_card(plan: Plan, reduce: Reduce) -> Card:
    lines = _cut([describe(plan.graph, plan.graph[id]) for id in reduce.results])
    ctas = plan.numerics.cluster_n // plan.placement.shares
    if not reduce.exchanges:
        lines.append("of what the barrier brought")
    else:
        lines.append("one barrier" if ctas == 1 else f"one barrier of {ctas} CTAs")
    return Card(Kind.REDUCTION, lines, f"stage{reduce.stage}")


def _input_card(plan: Plan, i: Input, again: Home | None = None) -> Card:
    count = plan.graph.n if i.role in (Role.ROW, Role.COLUMN) else 1
    per = " a row" if i.role in (Role.ROW, Role.PER_ROW) else " for all rows"
    size = f"{count * i.dtype.itemsize} bytes{per}"
    lines = [f"%{i.id} = {i.name}", f"{i.role.value} {dtype_name(i.dtype)}", size]
    if again is not None:
        place = "shared" if again is Home.SHARED else "global"
        lines[1] = f"again from {place} memory"
    return Card(KIND_OF_ROLE[i.role], lines, f"load-{i.name}", again is not None)


def _store_card(plan: Plan, step: Store) -> Card:
    out = step.output
    size = (plan.graph.n if out.is_row else 1) * out.dtype.itemsize
    what = "row" if out.is_row else "per-row"
    lines = [f"{out.name} = %{out.id}", f"{what} {dtype_name(out.dtype)}", f"{size} bytes a row"]
    return Card(Kind.OUTPUT, lines, f"store-{out.name}")


def _stacked(cards: list[Card]) -> float:
    return sum(card.height for card in cards) + STACK * max(0, len(cards) - 1)


def _place(column: Column, cards: list[Card], y: float) -> None:
    for card in cards:
        at = card.beside.rect.y if card.beside else y
        card.rect = Rect(column.x, at, column.width, card.height)
        y += card.height + STACK


def _draw_card(canvas: Canvas, card: Card) -> None:
    rect = card.rect
    fill, border = COLOURS[card.kind]
    canvas.box(rect, "#ffffff" if card.again else fill, border, name=card.name, dashed=card.again)
    for k, line in enumerate(card.lines):
        y = rect.y + INSET / 2 + LINE * (k + 0.5)
        if card.kind is Kind.REDUCTION:
            heavy = k < len(card.lines) - 1
        else:
            heavy = k == 0 and card.kind is not Kind.ELEMENTWISE
        colour = INK if heavy or card.kind is Kind.ELEMENTWISE else FAINT
        room = rect.width - 2 * INSET
        canvas.text(rect.x + INSET, y, line, bold=heavy, colour=colour, width=room)


def _wires(canvas: Canvas, columns: list[Column], middle: float) -> None:
    """From each column to the next; where they are many, gathered in the middle between."""

    def wire(*points: Point) -> None:
        level = abs(points[0][1] - points[-1][1]) < 0.5
        canvas.wire([points[0], points[-1]] if level else list(points), WIRE, width=1.6)

    for k, (column, after) in enumerate(itertools.pairwise(columns)):
        bend = after.x - GAP / 2
        last = k == len(columns) - 2
        direct = {id(card.beside): card for card in after.cards}
        for card in column.cards if not last else after.cards:
            y = card.rect.y + card.rect.height / 2
            if last:
                wire((column.x + column.width, middle), (bend, middle), (bend, y), (after.x, y))
            elif id(card) in direct:
                wire((card.rect.right, y), (after.x, y))
            else:
                # What skips the column of shared memory goes straight through it.
                skips = any(other.beside for other in after.cards)
                x = columns[k + 2].x if skips else after.x
                wire((card.rect.right, y), (x - GAP / 2, y), (x - GAP / 2, middle), (x, middle))
        if column.above:
            x = column.x + column.width / 2
            down = [(x, column.above[-1].rect.bottom), (x, column.cards[0].rect.y)]
            canvas.wire(down, WIRE, width=1.6)


def _draw_bar(canvas: Canvas, plan: Plan, id: int, home: Home, rect: Rect) -> None:
    node = plan.graph[id]
    on_chip = home in (Home.REGISTERS, Home.SHARED)
    kind = kind_of(plan.graph, node)
    fill, border = COLOURS[kind]
    canvas.box(rect, fill if on_chip else "#ffffff", border, name=f"kept-n{id}", dashed=not on_chip)
    size = (plan.graph.n if node.value.spread else 1) * node.value.dtype.itemsize
    if home in (Home.SHARED, Home.REREAD) and node.op is Op.INPUT:
        dtype = next(i.dtype for i in plan.graph.inputs if i.id == id)
        size = size // node.value.dtype.itemsize * dtype.itemsize
    text = f"{describe(plan.graph, node)}: {HOME_TEXT[home]}"
    if home is not Home.RECOMPUTE:
        text += f", {size} bytes a row"
    canvas.text(rect.x + INSET, rect.y + BAR / 2, text, size=7.5, width=rect.width - 2 * INSET)

"""The picture of a plan: a row's way from global memory through its stages and back.

Time runs from top to bottom. A barrier is a dashed line through the reductions that share it. At
the right is a bar for each value that is on both sides of a barrier.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping

from ..frontend.graph import Role
from ..lower.names import value_names
from ..lower.plan import Plan
from .boxes import (
    ACCENT,
    GUTTER,
    HEAD,
    INSET,
    LINE,
    MARGIN,
    ROUNDS,
    SMALL,
    THICK,
    Legend,
    draw_band,
    draw_box,
    size_of,
)
from .canvas import FAINT, INK, Canvas, Rect, width_of
from .model import COLOURS
from .names import all_names
from .segments import Bar, Moment, moments_of

GAP = 24.0  # between moments
BESIDE = 26.0  # between the boxes of a moment and what is at their left and right
STACK = 8.0  # between boxes of one moment
MOST_LANES = 10  # of bars with all their text; where there are more they have names alone
BAR_GAP, BAR_LINE = 6.0, 9.0
WIRE = "#59607a"


def draw_plan(plan: Plan) -> Canvas:
    """The plan, drawn. Raises UnsupportedError without matplotlib."""
    names = all_names(plan.graph, value_names(plan))
    moments, bars = moments_of(plan, names)
    boxes = [box for moment in moments for box in moment.beside + moment.boxes]
    title, notes = _heading(plan, names)
    lanes = lanes_of(bars)
    shown = 3 if len(lanes) <= MOST_LANES else 1  # texts of a bar
    widths = [max(_bar_width(bar, shown) for bar in lane) for lane in lanes]
    beside = max((size_of(box).width for m in moments for box in m.beside), default=-BESIDE)
    left = MARGIN + GUTTER + beside + BESIDE
    across = max(_across(moment) for moment in moments)
    right = left + across + BESIDE
    width = max(
        right + sum(widths) + BAR_GAP * len(widths) + MARGIN,
        2 * MARGIN + width_of(title, 13),
        2 * MARGIN + max(map(width_of, notes)),
    )
    top = HEAD + len(notes) * LINE + GAP / 2
    rects, spans = place(moments, top, left, across)
    signs = [("thick", "moves on")]
    signs += [("barrier", "barrier")] * any(moment.is_barrier for moment in moments)
    is_again = not all(bar.is_kept for bar in bars) or any(b.dashed for b in boxes)
    signs += [("again", "read or computed again, not kept")] * is_again
    legend = Legend(boxes, signs, width - 2 * MARGIN)
    bottom = spans[-1].bottom
    canvas = Canvas(width, bottom + legend.height + MARGIN)

    canvas.text(MARGIN, 20, title, size=13, bold=True)
    for k, note in enumerate(notes):
        topic, _, rest = note.partition(" ")  # SVG would merge the blanks between them
        canvas.text(MARGIN, HEAD + k * LINE, topic, colour=FAINT)
        canvas.text(MARGIN + 11 * width_of("m"), HEAD + k * LINE, rest.lstrip(), colour=FAINT)
    for k, (moment, span) in enumerate(zip(moments, spans, strict=True)):
        band = Rect(MARGIN, span.y, width - 2 * MARGIN, span.height)
        draw_band(canvas, band, k, moment.place, moment.what)
        if moment.is_barrier:
            middle = span.centre[1]
            line = [(MARGIN + GUTTER, middle), (width - MARGIN, middle)]
            canvas.wire(line, ACCENT, dashed=True, arrow=False, level=True)
    for one, other in itertools.pairwise(moments):
        for box, to in itertools.product(one.boxes, other.boxes):
            start, end = rects[box.key], rects[to.key]
            ends = [(start.centre[0], start.bottom), (end.centre[0], end.y)]
            canvas.wire(ends, WIRE, width=THICK)
    for moment in moments:
        for box in moment.beside:
            start, end = rects[box.key], rects[moment.boxes[0].key]
            ends = [(start.right, start.centre[1]), (end.x, end.centre[1])]
            canvas.wire(ends, WIRE, width=THICK, level=True)
    for box in boxes:
        draw_box(canvas, box, rects[box.key])
    for lane, wide in zip(lanes, widths, strict=True):
        for bar in lane:
            first, last = spans[bar.first], spans[bar.last]
            start, end = first.centre[1] + 3, last.centre[1] - 3
            _draw_bar(canvas, bar, Rect(right, start, wide, end - start), shown)
        right += wide + BAR_GAP
    legend.draw(canvas, bottom)
    return canvas


def place(
    moments: list[Moment], top: float, left: float, across: float
) -> tuple[dict[str, Rect], list[Rect]]:
    """The rectangle of each box by its key, and the band of each moment from `top` on."""
    rects, spans = {}, []
    for moment in moments:
        sizes = {box.key: size_of(box) for box in moment.boxes}
        stack = {box.key: size_of(box) for box in moment.beside}
        high = sum(size.height + STACK for size in stack.values()) - STACK
        named = 3 * LINE if moment.what else LINE
        height = max([named, high, *(size.height for size in sizes.values())])
        x = left + (across - _across(moment)) / 2
        for key, size in sizes.items():
            y = top + GAP / 2 + (height - size.height) / 2
            rects[key] = Rect(x, y, size.width, size.height)
            x += size.width + STACK
        y = top + GAP / 2 + (height - high) / 2
        for key, size in stack.items():
            rects[key] = Rect(left - BESIDE - size.width, y, size.width, size.height)
            y += size.height + STACK
        spans.append(Rect(0, top, 0, height + GAP))
        top += height + GAP
    return rects, spans


def lanes_of(bars: list[Bar]) -> list[list[Bar]]:
    """The bars side by side: each in the first lane that is free where it begins."""
    lanes: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.first, -bar.last, bar.id)):
        free = (lane for lane in lanes if lane[-1].last <= bar.first)
        lane = next(free, None)
        if lane is None:
            lanes.append([bar])
        else:
            lane.append(bar)
    return lanes


def _heading(plan: Plan, names: Mapping[int, str]) -> tuple[str, list[str]]:
    """The title, and what is said of the plan as a whole."""
    read, written = plan.bytes_per_row()
    again = plan.bytes_read_again()
    notes = [
        *plan.layout(),
        f"traffic    {read} bytes read and {written} written a row"
        f"{f', {again} read again' if again else ''}",
    ]
    numbers = [names[i.id] for i in plan.graph.inputs if i.role is Role.SCALAR]
    if numbers:
        notes.append(f"numbers    {', '.join(numbers)} given at run time")
    return f"plan {plan.graph.name}, N = {plan.graph.n}, {plan.target.arch.name}", notes


def _across(moment: Moment) -> float:
    widths = [size_of(box).width + (ROUNDS if box.rounds > 1 else 0) for box in moment.boxes]
    return sum(widths) + STACK * max(0, len(widths) - 1)


def _bar_width(bar: Bar, shown: int) -> float:
    return max(width_of(text, SMALL) for text in bar.texts[:shown]) + INSET


def _draw_bar(canvas: Canvas, bar: Bar, rect: Rect, shown: int) -> None:
    fill, border = COLOURS[bar.kind]
    fill = fill if bar.is_kept else "#ffffff"
    canvas.box(rect, fill, border, name=f"kept-n{bar.id}", dashed=not bar.is_kept)
    for k, text in enumerate(bar.texts[:shown]):
        y = rect.y + INSET / 2 + BAR_LINE * (k + 0.6)
        colour = FAINT if k else INK
        canvas.text(rect.x + INSET / 2, y, text, size=SMALL, bold=k == 0, colour=colour)

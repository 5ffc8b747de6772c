"""The picture of a plan: a row's way from global memory through its stages and back.

Time runs from top to bottom. A barrier is a dashed line through the reductions that share it. At
the right is a bar for each value that is on both sides of a barrier. A picture that would be too
high goes on in a further column, and so do its bars.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

from ..frontend.graph import Role
from ..lower.describe import describe_traffic
from ..lower.emission.names import value_names
from ..lower.plan import Plan
from .boxes import (
    ACCENT,
    BETWEEN_COLUMNS,
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
from .layout import cuts
from .model import COLOURS
from .names import all_names
from .segments import Bar, Moment, moments_of

GAP = 24.0  # between moments
BESIDE = 26.0  # between the boxes of a moment and what is at their left and right
STACK = 8.0  # between boxes of one moment
COLUMN_HEIGHT = 1700.0  # at which a picture goes on in a further column
MOST_LANES = 10  # of bars with all their text; where there are more they have names alone
BAR_GAP, BAR_LINE = 6.0, 9.0
WIRE = "#59607a"


def draw_plan(plan: Plan) -> Canvas:
    """The plan, drawn. Raises UnsupportedError without matplotlib."""
    names = all_names(plan.graph, value_names(plan))
    return draw_moments(*_heading(plan), *moments_of(plan, names))


def draw_moments(
    title: str, notes: list[str], moments: list[Moment], bars: list[Bar]
) -> Canvas:
    """Moments below each other, and bars beside them; notes are lines below the title."""
    columns = columns_of(moments, bars)
    across = sum(column.width + BETWEEN_COLUMNS for column in columns) - BETWEEN_COLUMNS
    width = max([across, width_of(title, 13), *map(width_of, notes)])
    columns[-1].width += width - across
    boxes = [box for moment in moments for box in moment.beside + moment.boxes]
    signs = [("thick", "moves on")]
    signs += [("barrier", "barrier")] * any(moment.is_barrier for moment in moments)
    is_again = not all(bar.is_kept for bar in bars) or any(box.dashed for box in boxes)
    signs += [("again", "read or computed again, not kept")] * is_again
    legend = Legend(boxes, signs, width)
    top = HEAD + len(notes) * LINE + GAP / 2
    bottom = top + max(column.height for column in columns)
    canvas = Canvas(width + 2 * MARGIN, bottom + legend.height + MARGIN)
    canvas.text(MARGIN, 20, title, size=13, bold=True)
    for k, note in enumerate(notes):
        topic, _, rest = note.partition(" ")  # SVG would merge the blanks between them
        canvas.text(MARGIN, HEAD + k * LINE, topic, colour=FAINT)
        canvas.text(MARGIN + 11 * width_of("m"), HEAD + k * LINE, rest.lstrip(), colour=FAINT)
    left = MARGIN
    for column in columns:
        column.draw(canvas, left, top)
        left += column.width + BETWEEN_COLUMNS
    legend.draw(canvas, bottom)
    return canvas


def columns_of(moments: list[Moment], bars: list[Bar]) -> list[Column]:
    """The moments in columns of like height, which begin behind a barrier, with parts of bars."""
    heights = [_height(moment) for moment in moments]
    barriers = itertools.accumulate((moment.is_barrier for moment in moments), initial=0)
    count = math.ceil(sum(heights) / COLUMN_HEIGHT)
    columns = []
    for start, end in itertools.pairwise(cuts(heights, list(barriers)[:-1], count)):
        parts = [
            replace(bar, first=max(bar.first, start) - start, last=min(bar.last, end) - start)
            for bar in bars
            if bar.first < end and bar.last > start
        ]
        columns.append(Column(moments[start:end], parts, start))
    return columns


class Column:
    """Some moments one below the other, and the bars beside them.

    A bar begins and ends in the middle of a moment; one whose last moment is behind the end of the
    column goes on in the next.
    """

    def __init__(self, moments: list[Moment], bars: list[Bar], first: int):
        self.moments, self.first = moments, first
        self.lanes = lanes_of(bars)
        self.texts = 3 if len(self.lanes) <= MOST_LANES else 1  # of a bar
        self.widths = [max(map(self._bar_width, lane)) + BAR_GAP for lane in self.lanes]
        beside = max((size_of(box).width for m in moments for box in m.beside), default=-BESIDE)
        self.left = GUTTER + beside + BESIDE
        rounds = 2 * ROUNDS if any(box.rounds > 1 for m in moments for box in m.boxes) else 0.0
        self.across = max(_across(moment) for moment in moments) + rounds
        self.right = self.left + self.across + BESIDE
        self.width = self.right + sum(self.widths)
        self.height = sum(map(_height, moments))

    def _bar_width(self, bar: Bar) -> float:
        return max(width_of(text, SMALL) for text in bar.texts[: self.texts]) + INSET

    def draw(self, canvas: Canvas, left: float, top: float) -> None:
        """Draw all of it from a point on."""
        spans = []
        for k, moment in enumerate(self.moments):
            spans.append(Rect(left, top, self.width, _height(moment)))
            draw_band(canvas, spans[-1], self.first + k, moment.place, moment.what)
            if moment.is_barrier:
                _, y = spans[-1].centre
                line = [(left + GUTTER, y), (left + self.width, y)]
                canvas.wire(line, ACCENT, dashed=True, arrow=False, level=True)
            top += _height(moment)
        rects = [
            self._rects(moment, span) for moment, span in zip(self.moments, spans, strict=True)
        ]
        for (_, boxes), (_, below) in itertools.pairwise(rects):
            for start, end in itertools.product(boxes, below):
                ends = [(start.centre[0], start.bottom), (end.centre[0], end.y)]
                canvas.wire(ends, WIRE, width=THICK)
        for moment, (beside, boxes) in zip(self.moments, rects, strict=True):
            for rect in beside:
                ends = [(rect.right, rect.centre[1]), (boxes[0].x, boxes[0].centre[1])]
                canvas.wire(ends, WIRE, width=THICK, level=True)
            for box, rect in zip(moment.beside + moment.boxes, beside + boxes, strict=True):
                draw_box(canvas, box, rect)
        x = left + self.right
        for lane, width in zip(self.lanes, self.widths, strict=True):
            for bar in lane:
                start = spans[bar.first].centre[1] + 3 if bar.first else spans[0].y
                end = spans[bar.last].centre[1] - 3 if bar.last < len(spans) else spans[-1].bottom
                self._draw_bar(canvas, bar, Rect(x, start, width - BAR_GAP, end - start))
            x += width

    def _rects(self, moment: Moment, span: Rect) -> tuple[list[Rect], list[Rect]]:
        """The rectangles of what is beside a moment's boxes, and of the boxes."""
        middle, y = span.x + self.left + self.across / 2, span.centre[1]
        boxes, x = [], middle - _across(moment) / 2
        for size in map(size_of, moment.boxes):
            boxes.append(size.moved(x, y - size.height / 2))
            x += size.width + STACK
        beside, top = [], y - _stacked(moment) / 2
        for size in map(size_of, moment.beside):
            beside.append(size.moved(span.x + self.left - BESIDE - size.width, top))
            top += size.height + STACK
        return beside, boxes

    def _draw_bar(self, canvas: Canvas, bar: Bar, rect: Rect) -> None:
        fill, border = COLOURS[bar.kind]
        name = f"kept-n{bar.id}" + (f"-from-{self.first}" if self.first and not bar.first else "")
        canvas.box(rect, fill if bar.is_kept else "#ffffff", border, name=name,
                   dashed=not bar.is_kept)  # fmt: skip
        for k, text in enumerate(bar.texts[: self.texts]):
            y = rect.y + INSET / 2 + BAR_LINE * (k + 0.6)
            colour = FAINT if k else INK
            canvas.text(rect.x + INSET / 2, y, text, size=SMALL, bold=k == 0, colour=colour)


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


def _height(moment: Moment) -> float:
    """Points from the top of a moment to that of the next."""
    named = 3 * LINE if moment.what else LINE
    boxes = (size_of(box).height for box in moment.boxes)
    return max([named, _stacked(moment), *boxes]) + GAP


def _stacked(moment: Moment) -> float:
    return sum(size_of(box).height + STACK for box in moment.beside) - STACK


def _across(moment: Moment) -> float:
    widths = [size_of(box).width for box in moment.boxes]
    return sum(widths) + STACK * max(0, len(widths) - 1)


def _heading(plan: Plan) -> tuple[str, list[str]]:
    """The title, and what is said of the plan as a whole."""
    notes = [*plan.layout(), describe_traffic(plan)]
    numbers = dict.fromkeys(i.name for i in plan.graph.inputs if i.role is Role.SCALAR)
    if numbers:
        notes.append(f"numbers    {', '.join(numbers)} given at run time")
    return f"plan {plan.graph.name}, N {plan.graph.length_text}, {plan.target.arch.name}", notes

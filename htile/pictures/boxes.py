"""How boxes, bands and legends look, in the picture of a graph and in that of a plan."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable

from .canvas import FAINT, GLYPH, INK, Canvas, Rect, width_of
from .model import COLOURS, MEANING, Box, Kind, Style
from .names import text_width

MARGIN = 12.0  # points around a picture; all lengths are in points
HEAD = 40.0  # height of the title
BETWEEN_COLUMNS = 6.0
LINE = 11.0  # height of a row of text
INSET = 6.0  # between a box and its text
GUTTER = 104.0  # at the left, for the names of the bands
ROUNDS = 36.0  # right of a box that shows the rounds of a loop, for their number
SMALL = 7.0  # font size of legends and tags
LEGEND_LINE = 16.0
NARROWEST, WIDEST = 10, 56  # columns of text in a box
BANDS = ("#f3f5f7", "#e9edf1")
ACCENT = "#b8391f"
THICK, THIN = 1.8, 0.8  # wires


def size_of(box: Box) -> Rect:
    """A box as wide as its text needs, within limits, and as high as its rows."""
    columns = [text_width(t.left) + (text_width(t.right) + 2 if t.right else 0) for t in box.texts]
    width = max(NARROWEST, min(WIDEST, max(columns))) * width_of("m")
    return Rect(0, 0, width + 2 * INSET, len(box.texts) * LINE + INSET)


def draw_box(canvas: Canvas, box: Box, rect: Rect) -> None:
    """A box with its rows of text. Behind one that shows the rounds of a loop there are more."""
    fill, border = COLOURS[box.kind]
    fill = "#ffffff" if box.dashed else fill
    if box.rounds > 1:
        for shift in (5.0, 2.5):
            canvas.box(rect.moved(shift, -shift), fill, border)
        canvas.text(rect.right + 8, rect.y + 4, f"× {box.rounds}", size=9, colour=ACCENT, bold=True)
    canvas.box(rect, fill, border, name=f"node-{box.key}", dashed=box.dashed)
    for k, text in enumerate(box.texts):
        y, room = rect.y + INSET / 2 + LINE * (k + 0.5), rect.width - 2 * INSET
        if text.right:
            room -= width_of(text.right + " ")
            canvas.text(rect.right - INSET, y, text.right, colour=FAINT, align="right")
        colour, bold = FAINT if text.style is Style.FAINT else INK, text.style is Style.BOLD
        canvas.text(rect.x + INSET, y, text.left, colour=colour, bold=bold, width=room)


def draw_band(canvas: Canvas, rect: Rect, number: int, name: str, what: str) -> None:
    """A band across the picture, with its name at the left."""
    canvas.box(rect, BANDS[number % 2], None, round=0)
    room = GUTTER - 2 * INSET
    canvas.text(rect.x + INSET, rect.y + 12, name, size=9, bold=True, width=room)
    for k, line in enumerate(textwrap.wrap(what, int(room / (GLYPH * SMALL)))):
        canvas.text(rect.x + INSET, rect.y + 24 + 9 * k, line, size=SMALL, colour=FAINT)


class Legend:
    """What the fills of the boxes and other signs mean, in rows of at most `width` points.

    signs: (sign, meaning); a sign is `thick`, `thin`, `tag`, `again` or `barrier`.
    """

    def __init__(self, boxes: Iterable[Box], signs: Iterable[tuple[str, str]], width: float):
        boxes = list(boxes)
        kinds = {box.kind for box in boxes}
        self.entries: list[tuple[Kind | str, str]] = [(k, MEANING[k]) for k in Kind if k in kinds]
        self.entries += signs
        if any(box.rounds > 1 for box in boxes):
            self.entries.append(("rounds", "n rounds of a loop, of which the first is shown"))
        self.places, x, y = [], 0.0, 0.0
        for _, text in self.entries:
            wide = 26 + width_of(text, SMALL)
            if x and x + wide > width:
                x, y = 0.0, y + LEGEND_LINE
            self.places.append((x, y))
            x += wide + 10
        self.height = y + LEGEND_LINE + 4

    def draw(self, canvas: Canvas, top: float) -> None:
        """Draw it, from `top` on."""
        for (sign, text), (x, y) in zip(self.entries, self.places, strict=True):
            at = Rect(x + MARGIN, y + top + 4, 18, 10)
            _, middle = at.centre
            line = [(at.x, middle), (at.right, middle)]
            if isinstance(sign, Kind):
                canvas.box(at, *COLOURS[sign], round=2)
            elif sign == "rounds":
                canvas.text(at.x, middle, "× n", colour=ACCENT, bold=True)
            elif sign in ("tag", "again"):
                canvas.box(at, "#ffffff", INK, round=5 if sign == "tag" else 2, dashed=True)
            elif sign == "barrier":
                canvas.wire(line, ACCENT, dashed=True, arrow=False, level=True)
            else:
                canvas.wire(line, INK, width=THICK if sign == "thick" else THIN, level=True)
            canvas.text(at.right + 4, middle, text, size=SMALL, colour=FAINT)

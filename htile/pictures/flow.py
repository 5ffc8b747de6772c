"""The picture of a graph: a lane for each stage, a box for each node, a wire for each value."""

from __future__ import annotations

from ..frontend.graph import Graph
from .canvas import FAINT, INK, Canvas, Point, Rect, columns_width, text_room
from .layout import Layout, layout
from .model import COLOURS, Box, Kind, Picture, picture_of

MARGIN = 12.0
LINE = 11.0
INSET = 6.0
HEAD = 46.0  # the title
LANE_HEAD = 30.0
LEGEND = 30.0
NARROWEST, WIDEST = 20, 36  # columns of text in a box

# Colours of wires, so that neighbours can be told apart.
WIRES = ["#3c6e9f", "#8a6d1d", "#3f7f6d", "#8c4a7a", "#5d6b2f", "#59607a"]


def draw_graph(graph: Graph) -> Canvas:
    """The dataflow, drawn. Raises UnsupportedError without matplotlib."""
    picture = picture_of(graph)
    shape = arrange(picture)
    legend = _legend(picture)
    inner = max(shape.width, legend[-1][0].right if legend else 0.0)
    canvas = Canvas(inner + 2 * MARGIN, HEAD + LANE_HEAD + shape.height + LEGEND + MARGIN)
    canvas.text(MARGIN, 24, picture.headline, size=13, bold=True)
    top = HEAD + LANE_HEAD

    def moved(rect: Rect) -> Rect:
        return Rect(rect.x + MARGIN, rect.y + top, rect.width, rect.height)

    for number, (lane, (name, what)) in enumerate(zip(shape.lanes, picture.lanes, strict=True)):
        band = Rect(lane.x + MARGIN, HEAD, lane.width, lane.height + LANE_HEAD)
        canvas.box(band, "#f3f5f7" if number % 2 == 0 else "#e9edf1", None, round=0)
        room = lane.width - 2 * INSET
        canvas.text(band.x + INSET, HEAD + 11, name, size=9, bold=True, width=room)
        canvas.text(band.x + INSET, HEAD + 23, what, size=7, colour=FAINT, width=room)
    boxes = {box.key: box for box in picture.boxes}
    colours = _wire_colours(picture)
    for (start, end), points in shape.wires.items():
        placed: list[Point] = [(x + MARGIN, y + top) for x, y in points]
        width = 1.6 if boxes[start].spread else 0.8
        canvas.wire(placed, colours[start], width=width, name=f"edge-{start}-{end}")
    for box in picture.boxes:
        _draw_box(canvas, box, moved(shape.boxes[box.key]))
    for rect, kind in legend:
        at = Rect(rect.x + MARGIN, top + shape.height + 12, 14, 10)
        fill, border = COLOURS[kind]
        canvas.box(at, fill, border, round=2)
        canvas.text(at.right + 4, at.y + 5, kind.value, size=7, colour=FAINT)
    return canvas


def arrange(picture: Picture) -> Layout:
    """Where everything goes: boxes as wide as their texts need, within limits."""
    texts = [t for b in picture.boxes for t in (b.title, b.value + "  " + b.where, b.source)]
    wide = text_room(texts, NARROWEST, WIDEST)
    return layout(picture, columns_width(wide) + 2 * INSET, 3 * LINE + INSET)


def _draw_box(canvas: Canvas, box: Box, rect: Rect) -> None:
    fill, border = COLOURS[box.kind]
    canvas.box(rect, fill, border, name=f"node-{box.key}")
    x, room = rect.x + INSET, rect.width - 2 * INSET
    lines = [(box.title, INK, True), (box.value, INK, False), (box.source, FAINT, False)]
    y = rect.y + INSET / 2 + LINE / 2
    for k, (text, colour, bold) in enumerate(lines):
        free = room
        if k == 1 and box.where:
            free -= columns_width(len(box.where) + 1)
            canvas.text(rect.right - INSET, y, box.where, colour=FAINT, align="right")
        canvas.text(x, y, text, colour=colour, bold=bold, width=free)
        y += LINE


def _wire_colours(picture: Picture) -> dict[str, str]:
    colours = {}
    for k, box in enumerate(picture.boxes):
        plain = box.kind is Kind.ELEMENTWISE
        colours[box.key] = WIRES[k % len(WIRES)] if plain else COLOURS[box.kind][1]
    return colours


def _legend(picture: Picture) -> list[tuple[Rect, Kind]]:
    x, entries = 0.0, []
    used = {box.kind for box in picture.boxes}
    for kind in Kind:
        if kind in used:
            width = 22 + columns_width(len(kind.value), 7)
            entries.append((Rect(x, 0, width, 0), kind))
            x += width + 10
    return entries

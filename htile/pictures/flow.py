"""The picture of a graph: boxes from top to bottom, in bands for its stages."""

from __future__ import annotations

from collections.abc import Mapping

from ..frontend.graph import Graph
from .boxes import HEAD, MARGIN, SMALL, THICK, THIN, Legend, draw_band, draw_box
from .canvas import Canvas, width_of
from .layout import arrange
from .model import COLOURS, Kind, picture_of

NARROWEST = 420.0  # points; the legend takes more rows where it is less

# Colours of wires, so that neighbours can be told apart.
WIRES = ("#3c6e9f", "#8a6d1d", "#3f7f6d", "#8c4a7a", "#5d6b2f", "#59607a")


def draw_graph(graph: Graph, known: Mapping[int, str] | None = None) -> Canvas:
    """The dataflow, drawn; `known` has the names of the source. Needs matplotlib."""
    picture = picture_of(graph, known)
    shape = arrange(picture)
    width = max(shape.width, width_of(picture.headline, 13), NARROWEST)
    signs = [("thick", "N elements"), ("thin", "one number")]
    if shape.tags:
        signs.append(("tag", "read from elsewhere in the picture"))
    legend = Legend(picture.boxes, signs, width)
    canvas = Canvas(width + 2 * MARGIN, HEAD + shape.height + legend.height + MARGIN)
    canvas.text(MARGIN, 20, picture.headline, size=13, bold=True)

    for band, rect in shape.bands:
        draw_band(canvas, rect.moved(MARGIN, HEAD), picture.bands.index(band), band.name, band.what)
    boxes = {box.key: box for box in picture.boxes}
    colours = {
        box.key: WIRES[k % len(WIRES)] if box.kind is Kind.ELEMENTWISE else COLOURS[box.kind][1]
        for k, box in enumerate(picture.boxes)
    }
    for edge in picture.edges:
        if corners := shape.wires.get((edge.start, edge.end)):
            points = [(x + MARGIN, y + HEAD) for x, y in corners]
            name = f"edge-{edge.start}-{edge.end}"
            canvas.wire(points, colours[edge.start], width=THICK if edge.wide else THIN, name=name)
    for tag in shape.tags:
        rect, to = tag.rect.moved(MARGIN, HEAD), shape.boxes[tag.end].moved(MARGIN, HEAD)
        fill, border = COLOURS[boxes[tag.start].kind]
        _, middle = rect.centre
        canvas.box(rect, fill, border, name=f"tag-{tag.start}-{tag.end}", round=5, dashed=True)
        canvas.text(rect.x + 3, middle, tag.text, size=SMALL)
        canvas.wire([(rect.right, middle), (to.x, middle)], border, width=THIN, level=True)
    for box in picture.boxes:
        draw_box(canvas, box, shape.boxes[box.key].moved(MARGIN, HEAD))
    legend.draw(canvas, HEAD + shape.height)
    return canvas

"""Boxes, wires and text on a matplotlib figure, in points from the top left corner.

All text is monospaced, so that its width is known without asking a font.
"""

from __future__ import annotations

import io
import itertools
import warnings
from dataclasses import dataclass

from ..errors import UnsupportedError
from .names import shorten, text_width

FONT_SIZE = 8.0
GLYPH = 0.602  # width of a glyph of DejaVu Sans Mono, in font sizes
FONTS = ["DejaVu Sans Mono", "monospace"]
INK, FAINT = "#1d2329", "#5c6670"

# What matplotlib draws with these settings is what its defaults give: the user's own are not read.
SETTINGS = ("axes.", "figure.", "font.", "lines.", "patch.", "path.", "savefig.", "svg.", "text.")

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Rect:
    """An upright rectangle; y grows downwards."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of the right side."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of the lower side."""
        return self.y + self.height

    @property
    def centre(self) -> Point:
        """The point in the middle."""
        return self.x + self.width / 2, self.y + self.height / 2

    def moved(self, x: float, y: float) -> Rect:
        """The same rectangle, so much further right and down."""
        return Rect(self.x + x, self.y + y, self.width, self.height)


def width_of(text: str, size: float = FONT_SIZE) -> float:
    """Points that a text takes in a row."""
    return text_width(text) * GLYPH * size


class Canvas:
    """A figure of a given size in points. Raises UnsupportedError where matplotlib is missing."""

    def __init__(self, width: float, height: float):
        try:
            import matplotlib
            from matplotlib import patches
            from matplotlib.figure import Figure
            from matplotlib.path import Path
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != "matplotlib":
                raise
            raise UnsupportedError(
                "SVG pictures are drawn by matplotlib, which is not installed: "
                "`pip install matplotlib`; graph_dot() and graph_json() need nothing"
            ) from None
        self._matplotlib, self._patches, self._path = matplotlib, patches, Path
        self._settings = {
            **{k: v for k, v in matplotlib.rcParamsDefault.items() if k.startswith(SETTINGS)},
            "svg.fonttype": "none",
            "svg.hashsalt": "htile",
        }
        with matplotlib.rc_context(self._settings):
            self.figure = Figure(figsize=(width / 72, height / 72), dpi=72, facecolor="white")
            self._axes = self.figure.add_axes((0, 0, 1, 1))
            self._axes.set(xlim=(0, width), ylim=(height, 0))
            self._axes.axis("off")

    def box(
        self, rect: Rect, fill: str, border: str | None, *, name: str | None = None,
        round: float = 3.0, dashed: bool = False,
    ) -> None:  # fmt: skip
        """A rounded rectangle; `name` becomes its id in the SVG."""
        patch = self._patches.FancyBboxPatch(
            (rect.x, rect.y), rect.width, rect.height,
            boxstyle=f"round,pad=0,rounding_size={round}", facecolor=fill,
            edgecolor=border or "none", linewidth=1.0, linestyle=(0, (3, 2)) if dashed else "-",
            zorder=3 if border else 0,
        )  # fmt: skip
        patch.set_gid(name)
        self._axes.add_artist(patch)

    def text(
        self, x: float, y: float, text: str, *, size: float = FONT_SIZE, colour: str = INK,
        bold: bool = False, width: float | None = None, align: str = "left",
    ) -> None:  # fmt: skip
        """One line, centred on y; shortened to `width` points."""
        fits = 10**6 if width is None else int(width / (GLYPH * size) + 1e-6)
        self._axes.text(
            x, y, shorten(text, fits), fontsize=size, color=colour, ha=align,
            va="center_baseline", family=FONTS, weight="bold" if bold else "normal", zorder=4,
            parse_math=False,
        )  # fmt: skip

    def wire(
        self, points: list[Point], colour: str, *, width: float = 1.0, name: str | None = None,
        dashed: bool = False, arrow: bool = True, level: bool = False,
    ) -> None:  # fmt: skip
        """A smooth line through the points, upright at each or level, and an arrowhead."""
        path = self._path
        vertices, codes = [points[0]], [path.MOVETO]
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            x, y = (x0 + x1) / 2, (y0 + y1) / 2
            vertices += [(x, y0), (x, y1), (x1, y1)] if level else [(x0, y), (x1, y), (x1, y1)]
            codes += [path.CURVE4] * 3
        patch = self._patches.PathPatch(
            path(vertices, codes), fill=False, edgecolor=colour, linewidth=width,
            linestyle=(0, (3, 2)) if dashed else "-", capstyle="butt", zorder=2,
        )  # fmt: skip
        patch.set_gid(name)
        self._axes.add_artist(patch)
        if arrow:
            x, y = points[-1]
            back, half = 5.0, 2.4
            corners = [(x, y), (x - half, y - back), (x + half, y - back)]
            if level:
                corners = [(x, y), (x - back, y - half), (x - back, y + half)]
            self._axes.add_artist(
                self._patches.Polygon(corners, facecolor=colour, edgecolor="none", zorder=5)
            )

    def svg(self) -> str:
        """The figure as SVG: text as text, no date, the same bytes each time."""
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        return self._save(format="svg", metadata=metadata).decode()

    def png(self, dpi: float = 144) -> bytes:
        """The figure as PNG."""
        return self._save(format="png", dpi=dpi)

    def _save(self, **how: object) -> bytes:
        data = io.BytesIO()
        with self._matplotlib.rc_context(self._settings), warnings.catch_warnings():
            # The reader's font draws the text; ours need not have its glyphs.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            self.figure.savefig(data, facecolor="white", **how)
        return data.getvalue()

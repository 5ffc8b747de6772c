"""Boxes, wires and text on a matplotlib figure, in points from the top left corner.

All text is monospaced, so its width is known without asking a font.
"""

from __future__ import annotations

import io
import warnings
from dataclasses import dataclass

from ..errors import UnsupportedError
from .model import shorten, text_width

FONT_SIZE = 8.0
GLYPH = 0.602  # width of a glyph of DejaVu Sans Mono, in font sizes
FONTS = ["DejaVu Sans Mono", "monospace"]
INK, FAINT = "#1d2329", "#5c6670"
CORNER = 4.0

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


def columns_width(columns: int, size: float = FONT_SIZE) -> float:
    """Points that so many characters take."""
    return columns * GLYPH * size


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
            **{k: v for k, v in matplotlib.rcParamsDefault.items() if k.startswith(_READ)},
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
        self._axes.add_patch(patch)

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
        dashed: bool = False, arrow: bool = True,
    ) -> None:  # fmt: skip
        """A line through the points with rounded corners, and an arrowhead at its end."""
        path = self._path
        vertices, codes = [points[0]], [path.MOVETO]
        for before, at, after in zip(points, points[1:], points[2:], strict=False):
            vertices += [_towards(at, before), at, _towards(at, after)]
            codes += [path.LINETO, path.CURVE3, path.CURVE3]
        vertices.append(points[-1])
        codes.append(path.LINETO)
        style = (0, (3, 2)) if dashed else "-"
        patch = self._patches.PathPatch(
            path(vertices, codes), fill=False, edgecolor=colour, linewidth=width, linestyle=style,
            capstyle="butt", zorder=2,
        )  # fmt: skip
        patch.set_gid(name)
        self._axes.add_patch(patch)
        if arrow:
            (x0, y0), (x, y) = points[-2:]
            dx, dy = _sign(x - x0), _sign(y - y0)
            long, half = 5.0, 2.4
            corners = [
                (x, y),
                (x - long * dx + half * dy, y - long * dy + half * dx),
                (x - long * dx - half * dy, y - long * dy - half * dx),
            ]
            self._axes.add_patch(
                self._patches.Polygon(corners, facecolor=colour, edgecolor="none", zorder=5)
            )

    def svg(self) -> str:
        """The figure as SVG: text as text, no date, the same bytes each time."""
        metadata = {"Date": None, "Creator": None, "Format": None, "Type": None}
        return self._save(format="svg", metadata=metadata).decode()

    def png(self, dpi: float = 144) -> bytes:
        """The figure as PNG."""
        return self._save(format="png", dpi=dpi)

    def _save(self, **how) -> bytes:
        data = io.BytesIO()
        with self._matplotlib.rc_context(self._settings), warnings.catch_warnings():
            # The reader's font draws the text; ours need not have its glyphs.
            warnings.filterwarnings("ignore", message="Glyph .* missing from")
            self.figure.savefig(data, facecolor="white", **how)
        return data.getvalue()


# The user's own settings of these would change the picture.
_READ = ("axes.", "figure.", "font.", "lines.", "patch.", "path.", "savefig.", "svg.", "text.")


def text_room(texts: list[str], least: int, most: int) -> int:
    """Columns that the longest of the texts needs, within limits."""
    return max(least, min(most, max(map(text_width, texts), default=0)))


def _towards(at: Point, other: Point) -> Point:
    """The point at most a corner's radius from `at`."""
    dx, dy = other[0] - at[0], other[1] - at[1]
    part = min(CORNER, (abs(dx) + abs(dy)) / 2) / max(abs(dx) + abs(dy), 1e-9)
    return at[0] + dx * part, at[1] + dy * part


def _sign(x: float) -> float:
    return float(x > 1e-9) - float(x < -1e-9)

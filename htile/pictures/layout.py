"""Where boxes and wires go: a grid of boxes with channels for the wires between rows and columns.

A lane is some columns of the grid, filled like a newspaper: its reductions, then the rest in the
order of the user's code. A wire runs only in channels and over empty cells, so never through a box.
The layouts of networkx place points; these are boxes of text in lanes, so the grid is made here.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass

from .canvas import Point, Rect
from .model import Kind, Picture

TRACK = 6.0  # between neighbouring wires
PAD = 9.0  # between a box and the first wire
ASPECT = 1.6  # width over height that the picture aims at

Cell = tuple[int, int]  # row, column
Edge = tuple[str, str]
Channel = tuple[str, int]  # ("h", k): above row k; ("v", k): left of column k


@dataclass(frozen=True)
class Layout:
    """Rectangles of boxes and lanes, the corners of every wire; in points from (0, 0)."""

    width: float
    height: float
    boxes: dict[str, Rect]
    lanes: tuple[Rect, ...]
    wires: dict[Edge, list[Point]]


def layout(picture: Picture, box_width: float, box_height: float) -> Layout:
    """Lay out boxes of one size."""
    cells, first_columns = place(picture, box_width, box_height)
    return _Router(picture, cells, first_columns, box_width, box_height).run()


def place(picture: Picture, box_width: float, box_height: float) -> tuple[dict[str, Cell], list]:
    """The cell of each box, and the first column of each lane and of what follows the last.

    A lane goes down a column and on at the top of the next one, at the height that gives the whole
    picture its aspect.
    """
    lanes: list[list[str]] = [[] for _ in picture.lanes]
    for box in sorted(picture.boxes, key=lambda box: box.kind is not Kind.REDUCTION):
        lanes[box.lane].append(box.key)
    counts = [len(lane) for lane in lanes]

    def distortion(rows: int) -> float:
        across = sum(max(1, -(-count // rows)) for count in counts) * (box_width + 3 * PAD)
        down = min(rows, max(counts)) * (box_height + 2 * PAD)
        return abs(math.log(across / down / ASPECT))

    rows = min(range(max(counts), 0, -1), key=distortion)
    cells, first_columns = {}, [0]
    for lane in lanes:
        tall = -(-len(lane) // max(1, -(-len(lane) // rows)))  # columns of a lane equally full
        for k, key in enumerate(lane):
            cells[key] = k % tall, first_columns[-1] + k // tall
        first_columns.append(1 + max((cells[key][1] for key in lane), default=first_columns[-1]))
    return cells, first_columns


class _Router:
    """Routes every edge through channels, gives each wire a track in them, then coordinates."""

    def __init__(
        self, picture: Picture, cells: dict[str, Cell], first_columns: list[int],
        box_width: float, box_height: float,
    ):  # fmt: skip
        self.picture = picture
        self.cells = cells
        self.at = {cell: key for key, cell in cells.items()}
        self.first_columns = first_columns
        self.box_width, self.box_height = box_width, box_height
        self.rows = 1 + max(row for row, _ in cells.values())
        self.columns = first_columns[-1]
        self.exits: dict[str, set[str]] = defaultdict(set)  # box -> sides that wires leave
        # (box, side) -> start of a wire that enters there -> where it comes from: -1 above, 0, 1
        self.entries: dict[tuple[str, str], dict[str, int]] = defaultdict(dict)

    def run(self) -> Layout:
        routes = {edge: self._route(*edge) for edge in self.picture.edges}
        tracks = self._tracks(routes)
        xs = self._spread(tracks, "v", self.columns, self.box_width)
        ys = self._spread(tracks, "h", self.rows, self.box_height)
        boxes = {
            key: Rect(xs[column][1], ys[row][1], self.box_width, self.box_height)
            for key, (row, column) in self.cells.items()
        }
        ports = {
            (key, side, start): share
            for (key, side), starts in self.entries.items()
            for start, share in self._shares(key, side, starts).items()
        }
        wires = {}
        for edge, route in routes.items():
            wires[edge] = self._points(edge, route, boxes, tracks, xs, ys, ports)
        width, height = xs[self.columns][0] + PAD, ys[self.rows][1]
        lanes = tuple(
            Rect(xs[a][0], 0.0, xs[b - 1][1] + self.box_width + PAD - xs[a][0], height)
            for a, b in zip(self.first_columns, self.first_columns[1:], strict=False)
        )
        return Layout(width, height, boxes, lanes, wires)

    def _route(self, start: str, end: str) -> tuple[str, str, tuple[Channel, ...]]:
        """(side that the wire leaves, side that it enters, channels between)."""
        (row, column), (to_row, to_column) = self.cells[start], self.cells[end]
        if column == to_column and to_row > row and self._empty_column(column, row, to_row):
            leave, enter, channels, comes = "bottom", "top", (), 0
        elif row == to_row and to_column > column and self._empty_row(row, column, to_column):
            leave, enter, channels, comes = "right", "left", (), 0
        elif to_column == column + 1 and to_row != row:
            leave, enter, channels = "right", "left", (("v", to_column),)
            comes = -1 if row < to_row else 1
        elif to_row == row + 1:
            leave, enter, channels = "bottom", "top", (("h", to_row),)
            comes = -1 if column < to_column else 1
        else:
            leave, enter, channels = "bottom", "left", (("h", row + 1), ("v", to_column))
            comes = -1 if row < to_row else 1
        self.exits[start].add(leave)
        self.entries[end, enter][start] = comes
        return leave, enter, channels

    def _empty_column(self, column: int, row: int, to_row: int) -> bool:
        return all((r, column) not in self.at for r in range(row + 1, to_row))

    def _empty_row(self, row: int, column: int, to_column: int) -> bool:
        return all((row, c) not in self.at for c in range(column + 1, to_column))

    def _shares(self, key: str, side: str, starts: dict[str, int]) -> dict[str, float]:
        """Where on a side each wire enters, as a share of its length.

        The middle is for a straight wire, or free if the neighbour's wires do not leave towards it.
        """
        order = sorted(starts, key=lambda s: (starts[s], self.cells[s][::-1]))
        straight = [s for s in order if starts[s] == 0]
        row, column = self.cells[key]
        cell = (row - 1, column) if side == "top" else (row, column - 1)
        facing = "bottom" if side == "top" else "right"
        blocked = facing in self.exits[self.at[cell]] if cell in self.at else False
        if straight:
            before = [s for s in order if starts[s] < 0]
            after = [s for s in order if starts[s] > 0]
            return {
                **{s: 0.5 * (k + 1) / (len(before) + 1) for k, s in enumerate(before)},
                straight[0]: 0.5,
                **{s: 0.5 + 0.5 * (k + 1) / (len(after) + 1) for k, s in enumerate(after)},
            }
        shares = {s: (k + 1) / (len(order) + 1) for k, s in enumerate(order)}
        if blocked:
            for s, share in shares.items():
                if abs(share - 0.5) < 1e-9:
                    shares[s] = 0.5 + 0.125 * starts[s]
        return shares

    def _tracks(self, routes: dict) -> dict[Channel, dict[str, int]]:
        """For each channel the track of each wire; short wires next to the boxes they enter.

        All edges that leave one box are one wire, so they share a track.
        """
        spans: dict[Channel, dict[str, list[int]]] = defaultdict(dict)

        def use(channel: Channel, start: str, *places: int) -> None:
            spans[channel].setdefault(start, []).extend(places)

        for (start, end), (_, _, channels) in routes.items():
            (row, column), (to_row, to_column) = self.cells[start], self.cells[end]
            match channels:
                case (("v", _) as v,):
                    use(v, start, 2 * row + 1, 2 * to_row + 1)
                case (("h", _) as h,):
                    use(h, start, 2 * column + 1, 2 * to_column + 1)
                case (("h", k) as h, v):
                    use(h, start, 2 * column + 1, 2 * to_column)
                    use(v, start, 2 * k, 2 * to_row + 1)
        tracks: dict[Channel, dict[str, int]] = {}
        for channel, wires in spans.items():
            reach = {start: (min(at), max(at)) for start, at in wires.items()}
            order = sorted(reach, key=lambda s: (reach[s][1] - reach[s][0], reach[s], s))
            filled: list[list[tuple[int, int]]] = []
            tracks[channel] = {}
            for start in order:
                low, high = reach[start]
                free = (
                    k
                    for k, there in enumerate(filled)
                    if all(high < a or b < low for a, b in there)
                )
                track = next(free, len(filled))
                if track == len(filled):
                    filled.append([])
                filled[track].append((low, high))
                tracks[channel][start] = track
        return tracks

    def _spread(
        self, tracks: dict, kind: str, count: int, size: float
    ) -> list[tuple[float, float]]:
        """Where each channel begins, and the boxes after it; once more for the end."""
        places, at = [], 0.0
        for k in range(count + 1):
            wires = 1 + max(tracks.get((kind, k), {}).values(), default=-1)
            room = 2 * PAD + max(0, wires - 1) * TRACK
            if kind == "v" and 0 < k < count and k in self.first_columns:
                at += PAD  # the right margin of a lane
            places.append((at, at + room))
            at += room + size
        return places

    def _points(self, edge, route, boxes, tracks, xs, ys, ports) -> list[Point]:
        start, end = edge
        leave, enter, channels = route
        box, to = boxes[start], boxes[end]
        share = ports[end, enter, start]
        if leave == "bottom":
            out = (box.x + box.width / 2, box.bottom)
        else:
            out = (box.right, box.y + box.height / 2)
        if enter == "top":
            into = (to.x + to.width * share, to.y)
        else:
            into = (to.x, to.y + to.height * share)
        lines = {
            # The first track lies next to the boxes that it enters.
            channel: (xs if channel[0] == "v" else ys)[channel[1]][1]
            - PAD
            - tracks[channel][start] * TRACK
            for channel in channels
        }
        match channels:
            case ():
                return [out, into]
            case (("v", _) as v,):
                return [out, (lines[v], out[1]), (lines[v], into[1]), into]
            case (("h", _) as h,):
                return [out, (out[0], lines[h]), (into[0], lines[h]), into]
            case (h, v):
                corners = [(out[0], lines[h]), (lines[v], lines[h]), (lines[v], into[1])]
                return [out, *corners, into]

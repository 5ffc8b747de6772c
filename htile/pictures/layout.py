"""Where the boxes of a graph go: in layers from top to bottom, each below what it reads.

Stages follow one another. A picture that would be too high goes on in a further column. A wire
joins boxes that are near each other. A box that reads a value from far away has a tag with its
name instead. The order in a layer is found by barycentres, and places by least squares.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .boxes import BETWEEN_COLUMNS, GUTTER, ROUNDS, SMALL, size_of
from .canvas import Point, Rect, width_of
from .model import Band, Edge, Picture

BETWEEN = 14.0  # points between boxes of a layer; all lengths are in points
LANE = 8.0  # beside a wire that passes a layer
PORT = 8.0  # between wires that enter a box, and from its corners
GAP, NARROW_GAP = 20.0, 12.0  # between layers: where wires bend, and where none does
STRAIGHT = 12.0  # how far a wire may go aside that does not count as bent
BAND_GAP = 14.0  # more between layers of two stages
TAG_LINE = 10.0
WIDEST_LAYER = 860.0  # without tags; less where the page has no room for the picture then
MOST_TRIES = 8
COLUMN_HEIGHT = 900.0  # at which a picture goes on in a further column, if there is room for it
PAGE_WIDTH = 1570.0
MID_STAGE = 150.0  # what a column may be longer for, so that it ends where a stage does
LONGEST_WIRE = 3  # layers; a value that is read further away gets a tag
MOST_TAGS = 6  # tags of one box
SWEEPS = 12  # down and up again, for order and places
PULL = 0.1  # of the middle of a column on each box, where each wire pulls with 1

Layers = list[list[str]]  # boxes
Item = tuple[str, int]  # a box in its layer; in layers below it, the wire that comes from the box


@dataclass(frozen=True, slots=True)
class Tag:
    """The name of a value that the box `end` reads from the box `start`, far away."""

    start: str
    end: str
    text: str
    rect: Rect


@dataclass(frozen=True, slots=True)
class Layout:
    """Rectangles, and points that each wire goes through, upright, from (0, 0)."""

    width: float
    height: float
    boxes: dict[str, Rect]
    bands: list[tuple[Band, Rect]]
    wires: dict[tuple[str, str], list[Point]]
    tags: list[Tag]


def arrange(picture: Picture) -> Layout:
    """Lay out a picture: in as many columns as its height asks for and the page has room for."""
    sizes = {box.key: size_of(box) for box in picture.boxes}
    widest = WIDEST_LAYER
    for _ in range(MOST_TRIES):
        columns = columns_of(picture, layers_of(picture, sizes, widest), sizes)
        width = sum(GUTTER + column.width for column in columns)
        width += BETWEEN_COLUMNS * (len(columns) - 1)
        if width <= PAGE_WIDTH:
            break
        widest *= max(0.9, min(0.98, PAGE_WIDTH / width))
    whole = Layout(width, max(column.height for column in columns), {}, [], {}, [])
    left = 0.0
    for column in columns:
        column.add_to(whole, left)
        left += GUTTER + column.width + BETWEEN_COLUMNS
    return whole


def columns_of(picture: Picture, layers: Layers, sizes: dict[str, Rect]) -> list[_Column]:
    """As many columns as the height asks for and the page has room for; at least one."""
    stage = {box.key: box.stage for box in picture.boxes}
    stages = [stage[layer[0]] for layer in layers]
    heights = [max(sizes[key].height for key in layer) + GAP for layer in layers]
    for count in range(math.ceil(sum(heights) / COLUMN_HEIGHT), 0, -1):
        ends = itertools.pairwise(cuts(heights, stages, count))
        columns = [_Column(picture, layers[a:b], sizes) for a, b in ends]
        if sum(GUTTER + column.width for column in columns) <= PAGE_WIDTH:
            break
    return columns


def layers_of(picture: Picture, sizes: dict[str, Rect], widest: float) -> Layers:
    """The boxes of each layer: below all that they read, and stage by stage.

    A box that reads nothing is just above the first box that reads it.
    """
    layer: dict[str, int] = {}
    used: dict[int, float] = defaultdict(float)
    reads, readers = defaultdict(list), defaultdict(list)
    for edge in picture.edges:
        reads[edge.end].append(edge.start)
        readers[edge.start].append(edge.end)

    def put(key: str, options: Iterable[int]) -> None:
        """In the first of the layers that has room."""
        width = sizes[key].width + BETWEEN
        if key in layer:
            used[layer[key]] -= width
        layer[key] = next(at for at in options if not used[at] or used[at] + width <= widest)
        used[layer[key]] += width

    first = 0
    for _, group in itertools.groupby(picture.boxes, key=lambda box: box.stage):
        keys = [box.key for box in group]
        for key in keys:
            put(key, itertools.count(max([first, *(layer[other] + 1 for other in reads[key])])))
        end = max(layer[key] for key in keys) + 1
        for key in keys:
            if not reads[key]:
                below = min([end, *(layer[other] for other in readers[key] if other in layer)])
                put(key, range(below - 1, layer[key] - 1, -1))
        first = end
    found: dict[int, list[str]] = defaultdict(list)
    for key, at in layer.items():
        found[at].append(key)
    return [found[at] for at in sorted(found)]


def cuts(heights: list[float], stages: list[int], count: int) -> list[int]:
    """The first layers of `count` columns of like height, and the end; between stages if it can."""
    tops = [0.0, *itertools.accumulate(heights)]
    found = [0]
    for k in range(1, count):
        goal = tops[-1] * k / count
        options = range(found[-1] + 1, len(heights))
        costs = {at: abs(tops[at] - goal) + MID_STAGE * (stages[at] == stages[at - 1])
                 for at in options}  # fmt: skip
        found += [min(costs, key=costs.get)] if costs else []
    return [*found, len(heights)]


class _Column:
    """Some layers of a picture, laid out from (0, 0)."""

    def __init__(self, picture: Picture, layers: Layers, sizes: dict[str, Rect]):
        self.layers, self.sizes = layers, sizes
        self.boxes = {box.key: box for box in picture.boxes}
        self.bands = {band.stage: band for band in picture.bands}
        self.layer = {key: k for k, layer in enumerate(layers) for key in layer}
        self.below: dict[Item, list[Item]] = defaultdict(list)  # what an item is joined to
        self.above: dict[Item, list[Item]] = defaultdict(list)
        self.ways: dict[tuple[str, str], list[Item]] = {}  # the items of each wire
        self.tags: dict[str, list[tuple[str, str]]] = defaultdict(list)
        for edge in picture.edges:
            self._add(edge)
        for tags in self.tags.values():
            if len(tags) > MOST_TAGS:
                more = f"{len(tags) - MOST_TAGS + 1} more"
                tags[MOST_TAGS - 1 :] = [(tags[-1][0], more)]
        self.x = self._places(self._ordered())
        self.width = max(x + self._right(item) for item, x in self.x.items()) + BETWEEN
        self.ports = self._ports()
        self._set_heights()

    def _add(self, edge: Edge) -> None:
        """Give an edge a wire, or its values tags if it comes from afar."""
        start, end = self.layer.get(edge.start), self.layer.get(edge.end)
        if end is None:
            return
        if start is None or end - start > LONGEST_WIRE:
            self.tags[edge.end] += [(edge.start, name) for name in edge.names]
            return
        way = [*((edge.start, k) for k in range(start, end)), (edge.end, end)]
        self.ways[edge.start, edge.end] = way
        for one, other in itertools.pairwise(way):
            if other not in self.below[one]:
                self.below[one].append(other)
                self.above[other].append(one)

    def _left(self, item: Item) -> float:
        """Points from the middle of a box, or from a wire, to what is left of it."""
        key, layer = item
        tags = max((width_of(text, SMALL) + 18 for _, text in self.tags.get(key, ())), default=0)
        return self.sizes[key].width / 2 + tags if self.layer[key] == layer else 0.0

    def _right(self, item: Item) -> float:
        key, layer = item
        rounds = ROUNDS if self.boxes[key].rounds > 1 else 0.0
        return self.sizes[key].width / 2 + rounds if self.layer[key] == layer else 0.0

    def _ordered(self) -> list[list[Item]]:
        """The items of each layer from left to right, with few crossings of wires."""
        order = [[(key, k) for key in layer] for k, layer in enumerate(self.layers)]
        for item in dict.fromkeys(item for way in self.ways.values() for item in way[1:-1]):
            order[item[1]].append(item)
        best, fewest = order, self._crossings(order)
        for sweep in range(SWEEPS):
            down = sweep % 2 == 0
            order = [layer[:] for layer in order]
            for k in range(1, len(order)) if down else range(len(order) - 2, -1, -1):
                fixed, beside = (order[k - 1], self.above) if down else (order[k + 1], self.below)
                place = {item: j / len(fixed) for j, item in enumerate(fixed)}
                centre = {item: j / len(order[k]) for j, item in enumerate(order[k])}
                for item in order[k]:
                    if there := beside[item]:
                        centre[item] = sum(place[i] for i in there) / len(there)
                order[k].sort(key=centre.get)
            if (crossings := self._crossings(order)) < fewest:
                best, fewest = order, crossings
        return best

    def _crossings(self, order: list[list[Item]]) -> int:
        """How often wires cross between layers."""
        place = {item: k for layer in order for k, item in enumerate(layer)}
        lines = [[(place[a], place[b]) for a in layer for b in self.below[a]] for layer in order]
        return sum(
            (a - c) * (b - d) < 0
            for gap in lines
            for (a, b), (c, d) in itertools.combinations(gap, 2)
        )

    def _places(self, order: list[list[Item]]) -> dict[Item, float]:
        """The middles of boxes and wires, close to what they are joined to."""
        x: dict[Item, float] = {}
        gaps = []
        for layer in order:
            gaps.append([
                self._right(a) + self._left(b)
                + (BETWEEN if self._right(a) and self._right(b) else LANE)
                for a, b in itertools.pairwise(layer)
            ])  # fmt: skip
            places = [0.0, *itertools.accumulate(gaps[-1])]
            x |= {item: at - places[-1] / 2 for item, at in zip(layer, places, strict=True)}
        for sweep in range(2 * SWEEPS):
            is_last = sweep >= 2 * SWEEPS - 4  # then all wires pull, and only they
            sides = [self.above, self.below] if is_last else [(self.above, self.below)[sweep % 2]]
            rest = 0.0 if is_last else PULL
            for k in reversed(range(len(order))) if sweep % 2 else range(len(order)):
                pulls = [
                    [x[i] for side in sides for i in side[item]] or [x[item]] for item in order[k]
                ]
                ideal = [sum(pull) / (len(pull) + rest) for pull in pulls]
                x |= dict(
                    zip(order[k], settle(ideal, list(map(len, pulls)), gaps[k]), strict=True)
                )
        left = min(x[item] - self._left(item) for item in x)
        return {item: at - left + BETWEEN for item, at in x.items()}

    def _ports(self) -> dict[tuple[Item, Item], float]:
        """Where each wire enters a box from the item above: as straight below it as can be."""
        ports = {}
        for key, layer in self.layer.items():
            above = sorted(self.above[key, layer], key=self.x.get)
            room = self.sizes[key].width / 2 - PORT
            low, high = self.x[key, layer] - room, self.x[key, layer] + room
            apart = min(PORT, (high - low) / max(1, len(above) - 1))
            for k, item in enumerate(above):
                at = min(max(self.x[item], low), high - (len(above) - 1 - k) * apart)
                ports[item, (key, layer)] = at
                low = at + apart
        return ports

    def _set_heights(self) -> None:
        """The top and bottom of each layer, and the top of each stage."""
        self.rows: list[tuple[float, float]] = []
        self.tops: list[tuple[int, float]] = []
        at = 0.0
        for k, layer in enumerate(self.layers):
            stage = self.boxes[layer[0]].stage
            if not self.tops or stage != self.tops[-1][0]:
                self.tops.append((stage, at + BAND_GAP / 2 if k else 0.0))
                at += BAND_GAP
            at += self._gap(k) if k else 0.0
            tags = max(len(self.tags.get(key, ())) for key in layer)
            high = max([tags * TAG_LINE, *(self.sizes[key].height for key in layer)])
            self.rows.append((at, at + high))
            at += high
        self.height = at + BAND_GAP

    def _gap(self, k: int) -> float:
        """Points above layer k: fewer where no wire bends."""
        wires = ((a, (key, k)) for key in self.layer for a in self.above.get((key, k), ()))
        ends = [abs(self.ports.get((a, b), self.x[b]) - self.x[a]) for a, b in wires]
        return GAP if max(ends, default=0.0) > STRAIGHT else NARROW_GAP

    def add_to(self, whole: Layout, left: float) -> None:
        """Add this column to the layout of the picture, from `left` on."""
        ends = [top for _, top in self.tops[1:]] + [whole.height]
        for (stage, top), end in zip(self.tops, ends, strict=True):
            rect = Rect(left, top, GUTTER + self.width, end - top)
            whole.bands.append((self.bands[stage], rect))
        left += GUTTER
        for key, layer in self.layer.items():
            size, (top, _) = self.sizes[key], self.rows[layer]
            whole.boxes[key] = size.moved(left + self.x[key, layer] - size.width / 2, top)
            for k, (start, text) in enumerate(self.tags.get(key, ())):
                wide = width_of(text, SMALL) + 6
                rect = Rect(whole.boxes[key].x - 10 - wide, top + k * TAG_LINE, wide, TAG_LINE - 1)
                whole.tags.append(Tag(start, key, text, rect))
        for (start, end), way in self.ways.items():
            points = [(left + self.x[way[0]], whole.boxes[start].bottom)]
            for item in way[:-1]:
                x, (top, bottom) = left + self.x[item], self.rows[item[1]]
                points += [(x, top), (x, bottom)] if item != way[0] else [(x, bottom)]
            points.append((left + self.ports[way[-2], way[-1]], whole.boxes[end].y))
            whole.wires[start, end] = points


def settle(ideal: Sequence[float], weights: Sequence[float], gaps: Sequence[float]) -> list[float]:
    """Places closest to the ideal ones, by weighted squares, in order and at least `gaps` apart.

    This is isotonic regression, by pooling adjacent violators.
    """
    offsets = [0.0, *itertools.accumulate(gaps)]
    pools: list[tuple[float, float, int]] = []  # mean, weight, members
    for want, weight, offset in zip(ideal, weights, offsets, strict=True):
        mean, members = want - offset, 1
        while pools and pools[-1][0] > mean:
            other, mass, count = pools.pop()
            mean = (mean * weight + other * mass) / (weight + mass)
            weight, members = weight + mass, members + count
        pools.append((mean, weight, members))
    means = (mean for mean, _, members in pools for _ in range(members))
    return [mean + offset for mean, offset in zip(means, offsets, strict=True)]

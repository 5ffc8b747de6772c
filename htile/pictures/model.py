"""What a picture of a graph shows: boxes of lines, the stage of each, and what reads what.

A line is a value: `sub0 = x - max0`. A box is what belongs together: the reductions of one barrier,
or the operations of one stage that come from one line of the user's code. The rounds of a loop are
shown once. Constants are written into the lines that read them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import networkx as nx

from ..frontend.graph import Graph, Input, Node, Role
from ..frontend.ops import COLLECTIVES, SCANS, Op, dtype_name
from ..lower.reductions import assign_stages
from .fold import find_rounds
from .names import INFIX, all_names, counted, expression, flowed, span, strip, type_text

MOST_LINES = 12  # values in a box


class Kind(Enum):
    """What a box is; it decides the colour."""

    ROW = "row"
    COLUMN = "column"
    PER_ROW = "per-row"
    SCALAR = "scalar"
    ELEMENTWISE = "elementwise"
    REDUCTION = "reduction"
    SCAN = "scan"
    OUTPUT = "output"


# kind -> (fill, border)
COLOURS = {
    Kind.ROW: ("#cfe3fb", "#1f5fae"),
    Kind.COLUMN: ("#cdeeda", "#1b7a47"),
    Kind.PER_ROW: ("#e6dbf8", "#6a3fb0"),
    Kind.SCALAR: ("#e6e8eb", "#5c6670"),
    Kind.ELEMENTWISE: ("#ffffff", "#77828d"),
    Kind.REDUCTION: ("#fbd5cd", "#b8391f"),
    Kind.SCAN: ("#fde4d3", "#b0561a"),
    Kind.OUTPUT: ("#fdebb8", "#a67400"),
}

# What a legend says of each kind.
MEANING = {
    Kind.ROW: "a row of an argument",
    Kind.COLUMN: "N elements that all rows share",
    Kind.PER_ROW: "one number for each row",
    Kind.SCALAR: "one number for all rows",
    Kind.ELEMENTWISE: "computed",
    Kind.REDUCTION: "reduced over the row",
    Kind.SCAN: "combined with all before it in the row",
    Kind.OUTPUT: "returned",
}

ACROSS = (Kind.REDUCTION, Kind.SCAN)  # of these, threads exchange what they have of a row

KIND_OF_ROLE = {
    Role.ROW: Kind.ROW,
    Role.TAKEN: Kind.ROW,
    Role.COLUMN: Kind.COLUMN,
    Role.TABLE: Kind.COLUMN,
    Role.PER_ROW: Kind.PER_ROW,
    Role.SCALAR: Kind.SCALAR,
    Role.DEVICE_SCALAR: Kind.SCALAR,
    Role.STATIC: Kind.SCALAR,
}


class Style(Enum):
    """How a row of text in a box is written."""

    PLAIN = "plain"
    BOLD = "bold"
    FAINT = "faint"


@dataclass(frozen=True, slots=True)
class Text:
    """A row of text in a box; `right` is set at its right end."""

    left: str
    right: str = ""
    style: Style = Style.PLAIN


@dataclass(slots=True)
class Box:
    """Values that are shown together.

    stage: the reductions that have to be known before it is computed; of a reduction its own.
    ids: the nodes of its lines; those of the first round where it shows the rounds of a loop.
    rounds: how many rounds of a loop it shows.
    dashed: what it has was there before, and has not been kept.
    """

    key: str
    kind: Kind
    texts: list[Text]
    stage: int = 0
    ids: list[int] = field(default_factory=list)
    rounds: int = 1
    dashed: bool = False


@dataclass(frozen=True, slots=True)
class Edge:
    """The values of one box that another reads. wide: one of them has N elements."""

    start: str
    end: str
    names: tuple[str, ...]
    wide: bool


@dataclass(frozen=True, slots=True)
class Band:
    """A stage as the picture names it, and what is said of it."""

    stage: int
    name: str
    what: str


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes, each after those that it reads; the edges; the stages that boxes are in."""

    headline: str
    boxes: tuple[Box, ...]
    edges: tuple[Edge, ...]
    bands: tuple[Band, ...]


def picture_of(graph: Graph, known: Mapping[int, str] | None = None) -> Picture:
    """The picture of a graph; `known` has the names of the emitted source (`value_names`)."""
    return _Model(graph, known).picture()


def kind_of(graph: Graph, node: Node) -> Kind:
    """The kind of a node: the role of an argument, else what it does."""
    for leaf in graph.inputs:
        if leaf.id == node.id:
            return KIND_OF_ROLE[leaf.role]
    if node.op is Op.CONST:
        return Kind.SCALAR
    if node.op in SCANS:
        return Kind.SCAN
    return Kind.REDUCTION if node.op in COLLECTIVES else Kind.ELEMENTWISE


def needed_in(graph: Graph, stage: Mapping[int, int]) -> dict[int, int]:
    """The stage in which each value is first needed; of a reduction or scan its own.

    A value that a reduction of stage 2 reads is needed in stage 1. One that is returned is there as
    soon as it can be.
    """
    returned = {out.id for out in graph.outputs}
    found: dict[int, int] = {}
    for node in reversed(list(graph)):
        readers = [graph[user] for user in graph.users(node.id)]
        needs = [stage[r.id] - 1 if r.op in COLLECTIVES else found[r.id] for r in readers]
        is_now = node.op in COLLECTIVES or node.id in returned or not needs
        found[node.id] = stage[node.id] if is_now else max(stage[node.id], min(needs))
    return found


class _Model:
    """Gathers the lines of one graph into boxes."""

    def __init__(self, graph: Graph, known: Mapping[int, str] | None):
        self.graph = graph
        self.names = all_names(graph, known)
        self.stage = assign_stages(graph)
        self.needed = needed_in(graph, self.stage)
        # Of each node in a loop: the number of the loop, and its counterparts in all rounds.
        self.loop: dict[int, int] = {}
        self.rounds: dict[int, tuple[int, ...]] = {}
        for k, found in enumerate(find_rounds(graph)):
            for ids in found.steps:
                self.loop |= dict.fromkeys(ids, k)
                self.rounds |= dict.fromkeys(ids, ids)
        # Of each value of a first round that the next one reads: what the first round reads there.
        self.seeds: dict[int, dict[int, None]] = defaultdict(dict)
        for ids in dict.fromkeys(self.rounds.values()):
            for pair in zip(graph[ids[0]].inputs, graph[ids[1]].inputs, strict=True):
                here, there = (strip(graph, i) for i in pair)
                if self.rounds.get(there, (None,))[0] == there:
                    self.seeds[there][here] = None
        self.within = {n.id for n in graph if known is not None and self._is_within(n, known)}
        self.boxes: dict[str, Box] = {}
        self.box_of: dict[int, Box] = {}  # of each node that has a line
        self.newest: dict[object, Box] = {}  # of the operations that come from one user line
        self.flow = nx.DiGraph()  # from each box to those that read it

    def picture(self) -> Picture:
        for node in self.graph:
            if node.op is not Op.INPUT and self._has_line(node):
                self._add(node)
        self._join_chains()
        for box in self.boxes.values():
            box.texts = list(self._texts(box))
        self._add_arguments()
        edges = self._edges()
        headline = f"{self.graph.name}, one row of N {self.graph.length_text}"
        return Picture(headline, self._in_order(edges), edges, tuple(self._bands()))

    def _each(self, id: int) -> tuple[int, ...]:
        """A node in all rounds of its loop; the node alone where it is in none."""
        return self.rounds.get(id, (id,))

    def _is_within(self, node: Node, known: Mapping[int, str]) -> bool:
        """Whether the source has no name for a value, because its only reader computes it."""
        return node.op not in (Op.INPUT, Op.CONST, Op.RESHAPE) and not any(
            id in known or len(self.graph.readers[id]) != 1 or not self.graph.users(id)
            for id in self._each(node.id)
        )

    def _has_line(self, node: Node) -> bool:
        hidden = node.op in (Op.CONST, Op.RESHAPE) or node.id in self.within
        return not hidden and self._each(node.id)[0] == node.id

    def _line_of(self, id: int) -> int:
        """The node whose line shows a value."""
        return self._each(strip(self.graph, id))[0]

    def _sources(self, id: int) -> Iterator[int]:
        """What the line of a node reads: all of the first round, and the arguments of the others.

        A value of a loop is the one of that round which is read.
        """
        for k, each in enumerate(self._each(id)):
            for source in (strip(self.graph, i) for i in self.graph[each].inputs):
                op = self.graph[source].op
                if source in self.within:
                    yield from self._sources(source)
                elif op is Op.INPUT or (k == 0 and op is not Op.CONST):
                    yield source

    def _operands(self, id: int) -> list[str]:
        """The operands of a line as it names them; `x0 … x9` where they differ by round."""
        first, last = (self.graph[self._each(id)[k]].inputs for k in (0, -1))
        return [self._operand(id, *pair) for pair in zip(first, last, strict=True)]

    def _operand(self, reader: int, first: int, last: int) -> str:
        first, last = strip(self.graph, first), strip(self.graph, last)
        node, outer = self.graph[first], self.graph[reader].op
        if first in self.within:
            text = expression(node, self._operands(first))
            binds = node.op is Op.MUL and outer in (Op.ADD, Op.SUB)
            return text if outer not in INFIX or node.op not in INFIX or binds else f"({text})"
        if node.op is Op.CONST:
            return span(str(node.arg), str(self.graph[last].arg))
        has_arguments = node.op is self.graph[last].op is Op.INPUT
        return span(self.names[first], self.names[last if has_arguments else first])

    def _texts(self, box: Box) -> Iterator[Text]:
        """The rows of a box: each user line above the values that are computed for it."""
        before = None
        for id in box.ids:
            node = self.graph[id]
            if node.loc is not None and node.loc != before:
                yield Text(node.loc.text, node.loc.short, Style.FAINT)
            before = node.loc
            text = f"{self.names[id]} = {expression(node, self._operands(id))}"
            style = Style.BOLD if box.kind in ACROSS else Style.PLAIN
            yield Text(text, type_text(node.value), style)
            yield from (Text(note, "", Style.FAINT) for note in self._notes(id))

    def _notes(self, id: int) -> Iterator[str]:
        """What becomes of a value of a loop: in the next round, and after the last."""
        for seed in self.seeds.get(id, ()):
            yield f"{self.names[id]} is {self._operand(id, seed, seed)} of the next round"
        last = self._each(id)[-1]
        if last != id and any(
            reader == last or self.loop.get(reader) != self.loop[id]
            for reader in self.graph.readers[last]
        ):
            yield f"{self.names[last]} is that of the last round"

    def _add(self, node: Node) -> None:
        """Give a node a line, in the newest box that it belongs to or in one of its own."""
        kind, stage = kind_of(self.graph, node), self.needed[node.id]
        place = None if kind in ACROSS else node.loc or node.id
        group = (kind, stage, self.loop.get(node.id), place)
        box = self.newest.get(group)
        lines = (self._line_of(i) for i in self._sources(node.id))
        reads = [self.box_of[i].key for i in lines if i in self.box_of]
        # Two boxes may not read each other, not even by way of others.
        if box is not None and (
            len(box.ids) >= MOST_LINES
            or any(nx.has_path(self.flow, box.key, key) for key in reads if key != box.key)
        ):
            box = None
        if box is None:
            box = Box(f"n{node.id}", kind, [], stage, [], len(self._each(node.id)))
            self.boxes[box.key] = self.newest[group] = box
            self.flow.add_node(box.key)
        box.ids.append(node.id)
        self.box_of[node.id] = box
        self.flow.add_edges_from((key, box.key) for key in reads if key != box.key)

    def _join_chains(self) -> None:
        """Make one box of two where one is all that the other reads, and nobody else reads it."""
        for key in [*self.boxes]:
            readers = list(self.flow.successors(key))
            if len(readers) != 1 or self.flow.in_degree(readers[0]) != 1:
                continue
            box, after = self.boxes[key], self.boxes[readers[0]]
            one, other = ((b.kind, b.stage, self.loop.get(b.ids[0])) for b in (box, after))
            few = len(box.ids) + len(after.ids) <= MOST_LINES
            if one == other and few and box.kind is Kind.ELEMENTWISE:
                after.ids[:0] = box.ids
                self.box_of |= dict.fromkeys(box.ids, after)
                before = list(self.flow.predecessors(key))
                self.flow.add_edges_from((source, after.key) for source in before)
                self.flow.remove_node(key)
                del self.boxes[key]

    def _add_arguments(self) -> None:
        """A box for each result, and for the arguments of one type that the same boxes read."""
        readers: dict[int, dict[str, None]] = {leaf.id: {} for leaf in self.graph.inputs}
        for key, box in self.boxes.items():
            for source in (i for id in box.ids for i in self._sources(id) if i in readers):
                readers[source][key] = None
        for k, out in enumerate(self.graph.outputs):
            readers.get(strip(self.graph, out.id), {})[f"out{k}"] = None
        groups: dict[object, list[Input]] = defaultdict(list)
        for leaf in self.graph.inputs:
            groups[leaf.role, leaf.dtype, self.graph[leaf.id].value, (*readers[leaf.id],)] += [leaf]
        for (role, dtype, value, _), leaves in groups.items():
            ids = [leaf.id for leaf in leaves]
            texts = [Text(row, "", Style.BOLD) for row in flowed([self.names[id] for id in ids])]
            texts.append(Text(f"{role.value} {dtype_name(dtype)} as {type_text(value)}"))
            stage = min(self.needed[id] for id in ids)
            box = Box(f"n{ids[0]}", KIND_OF_ROLE[role], texts, stage, ids)
            self.boxes[box.key] = box
            self.box_of |= dict.fromkeys(ids, box)
        for k, out in enumerate(self.graph.outputs):
            kind = "row" if out.is_row else "per-row"
            shape = f"[{','.join(map(str, out.inner))}]" if out.inner else ""
            texts = [Text(f"{out.name} = {self._operand(out.id, out.id, out.id)}", "", Style.BOLD)]
            texts.append(Text(f"{kind} {dtype_name(out.dtype)}{shape}"))
            source = self.box_of.get(self._line_of(out.id))
            stage = source.stage if source else 0
            self.boxes[f"out{k}"] = Box(f"out{k}", Kind.OUTPUT, texts, stage)

    def _edges(self) -> tuple[Edge, ...]:
        found: dict[tuple[str, str], dict[int, None]] = defaultdict(dict)
        for key, box in self.boxes.items():
            for id in box.ids:
                for source in self._sources(id):
                    if (start := self.box_of[self._line_of(source)].key) != key:
                        found[start, key][source] = None
        for k, out in enumerate(self.graph.outputs):
            if (line := self._line_of(out.id)) in self.box_of:
                found[self.box_of[line].key, f"out{k}"][strip(self.graph, out.id)] = None
        return tuple(
            Edge(*ends, tuple(self.names[i] for i in ids),
                 any(self.graph[i].value.spread for i in ids))
            for ends, ids in found.items()
        )  # fmt: skip

    def _in_order(self, edges: tuple[Edge, ...]) -> tuple[Box, ...]:
        """The boxes by stage, reductions first, each box after those that it reads."""
        place = {
            key: (box.stage, box.kind not in ACROSS, k)
            for k, (key, box) in enumerate(self.boxes.items())
        }
        flow = nx.DiGraph((edge.start, edge.end) for edge in edges)
        flow.add_nodes_from(self.boxes)
        return tuple(self.boxes[k] for k in nx.lexicographical_topological_sort(flow, place.get))

    def _bands(self) -> Iterator[Band]:
        """The stages that boxes are in; the stages of all rounds where a loop has some in each."""
        for stage in sorted({box.stage for box in self.boxes.values()}):
            ids = [id for box in self.boxes.values() if box.stage == stage for id in box.ids]
            reduced = [id for id in ids if self.graph[id].op in COLLECTIVES]
            what = "before any reduction" if stage == 0 else "after the last round"
            if reduced:
                ops = [self.graph[id].op for id in reduced]
                many = _barriers(ops)
                what = f"{counted([op.value for op in ops])} behind {many}"
            rounds = [[self.stage[i] for i in self._each(id)] for id in reduced or ids]
            later = max(rounds, key=lambda stages: stages[-1] - stages[0], default=[stage])
            yield Band(stage, stages_text([k - later[0] + stage for k in later]), what)


def _barriers(ops: list[Op]) -> str:
    """How many barriers the reductions and scans of a stage have."""
    others = len({op in SCANS for op in ops if op is not Op.KTHVALUE})
    many = ("", "one barrier", "two barriers")[others]
    if Op.KTHVALUE not in ops:
        return many
    return f"{many} and one for each bit" if many else "a barrier for each bit"


def stages_text(stages: list[int]) -> str:
    """`stage 1`, or `stages 2, 4 … 40` of the rounds of a loop."""
    if stages[0] == stages[-1]:
        return f"stage {stages[0]}"
    return f"stages {stages[0]}, {stages[1]} … {stages[-1]}"

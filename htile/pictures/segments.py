"""What a picture of a plan shows: what happens between two barriers, and what is kept across them.

This module alone knows the steps of a plan. The rounds of a loop that a kernel repeats, barriers
and all, are shown once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from ..frontend.graph import Input, Output, Role
from ..frontend.ops import Op, dtype_name
from ..lower.describe import PLACES
from ..lower.emission.expressions import written
from ..lower.plan import Plan
from ..lower.ranks import Chain
from ..lower.reductions import SOFTMAX, Part, Reduce
from ..lower.steps import ChunkLoop, Compute, Home, Load, Prefetch, Reload, Step, Store
from .fold import find_rounds, repetitions
from .model import KIND_OF_ROLE, Box, Kind, Style, Text, kind_of, stages_text
from .names import flowed, span, strip

FEWEST_HIDDEN = 2  # segments that a fold of the plan must at least hide
MOST_ROWS = 16  # of text in a box
MANY = 4  # names, of which only the first and the last are written


@dataclass
class Segment:
    """What happens between two barriers, and the reductions of the barrier that ends it.

    carried_along: reductions of the next barrier that are carried along here.
    prefetched: what is on its way to the next loop from here on.
    """

    loads: list[Load] = field(default_factory=list)
    reloads: list[tuple[Input, Home]] = field(default_factory=list)
    computes: list[Compute] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    reduces: list[Reduce] = field(default_factory=list)
    carried_along: list[int] = field(default_factory=list)
    prefetched: list[Input] = field(default_factory=list)


@dataclass
class Moment:
    """A row of the picture: boxes, and at their left what reaches them from memory just then.

    place: where that is, such as registers. what: more about it.
    """

    place: str
    boxes: list[Box]
    beside: list[Box] = field(default_factory=list)
    what: str = ""
    is_barrier: bool = False


@dataclass(frozen=True, slots=True)
class Bar:
    """A value that is on both sides of a barrier.

    texts: its name, where it is, and its size. first, last: the moments that it spans.
    """

    id: int
    kind: Kind
    texts: tuple[str, str, str]
    first: int
    last: int
    is_kept: bool


def segments_of(plan: Plan) -> list[Segment]:
    """The steps of a row, cut at its barriers; the last segment has no reductions."""
    segments = [Segment()]
    for step in _flat(plan.steps):
        now = segments[-1]
        match step:
            case Load():
                now.loads.append(step)
            case Reload(inputs, home):
                first = {load.input for load in segments[0].loads} if len(segments) == 1 else ()
                now.reloads += [(i, home) for i in inputs if i not in first]
            case Compute():
                now.computes.append(step)
            case Prefetch(inputs):
                now.prefetched += inputs
            case Store():
                now.stores.append(step)
            case ChunkLoop(_, parts):
                along = (_along(part) for part in parts if not _is_pair(part))
                now.carried_along += [id for results in along for id in results]
            case Reduce():
                now.reduces.append(step)
                segments.append(Segment())
    return segments


def _is_pair(part: Part) -> bool:
    return part.kind is SOFTMAX and part.at_once


def _along(part: Part) -> tuple[int, ...]:
    """The results of the next stage that are carried along with others."""
    return part.results if part.maxima else part.results[1:]


def _references(reduce: Reduce) -> dict[int, tuple[int, ...]]:
    """The references of each result that was carried with reductions of the stage before."""
    found = {}
    for id, part in zip(reduce.results, reduce.parts, strict=True):
        place = part.results.index(id)
        if part.maxima:
            found[id] = part.references
        elif place and part.chain is None and not reduce.is_pair:
            found[id] = part.references[place - 1 : place]
    return found


def _flat(steps: tuple[Step, ...]) -> Iterator[Step]:
    """The steps with those of a loop behind it."""
    for step in steps:
        yield step
        if isinstance(step, ChunkLoop):
            yield from _flat(step.steps)


def kept(plan: Plan, segments: list[Segment]) -> dict[int, tuple[int, int, Home]]:
    """Each value on both sides of a barrier: first and last segment that has it, and its home.

    What a segment makes again for itself alone is on no barrier, unless the plan names its home.
    """
    made: dict[int, int] = {}  # where the newest copy of a value comes from
    spans: dict[int, tuple[int, int, Home]] = {}

    def have(id: int, first: int, last: int) -> None:
        start, end, home = spans.get(id, (first, last, plan.homes.get(id, Home.REGISTERS)))
        spans[id] = min(start, first), max(end, last), home

    def make(id: int, k: int) -> None:
        if id in made and plan.homes.get(id, Home.REGISTERS) is not Home.REGISTERS:
            have(id, made[id], k)
        made[id] = k

    for k, segment in enumerate(segments):
        for load in segment.loads:
            make(load.input.id, k)
        for i, _ in segment.reloads:
            make(i.id, k)
        for step in segment.computes:
            make(step.id, k)
        reads = [i for step in segment.computes for i in step.inputs]
        reads += [step.output.id for step in segment.stores]
        for reduce in segment.reduces:
            along = _references(reduce).values()
            reads += [i for each in along for i in each] or reduce.operands(plan.graph)
        for id in reads:
            if made.get(id, k) < k:
                have(id, made[id], k)
        made |= {id: k + 1 for reduce in segment.reduces for id in reduce.results}
    return dict(sorted(spans.items()))


def moments_of(plan: Plan, names: Mapping[int, str]) -> tuple[list[Moment], list[Bar]]:
    """The rows of the picture from top to bottom, and the bars beside them."""
    story = _Story(plan, names)
    return story.moments, story.bars


class _Story:
    """Tells one plan as moments and bars."""

    def __init__(self, plan: Plan, names: Mapping[int, str]):
        self.plan, self.graph, self.names = plan, plan.graph, names
        self.segments = segments_of(plan)
        # Of each node in a loop, its counterpart in the first round.
        self.first = {
            id: ids[0] for found in find_rounds(plan.graph) for ids in found.steps for id in ids
        }
        kinds = [
            tuple(self.first.get(id, id) for id in (
                *(step.id for step in segment.computes),
                *(id for reduce in segment.reduces for id in reduce.results)))
            for segment in self.segments
        ]  # fmt: skip
        self.loops = repetitions(kinds, FEWEST_HIDDEN, lambda start, size, most: most)
        self.moments = list(self._moments())
        self.bars = list(self._bars())

    def _round(self, k: int) -> tuple[range, int]:
        """The segments of the shown round that a segment belongs to, and how many rounds."""
        for start, size, count in self.loops:
            if start <= k < start + size * count:
                return range(start, start + size), count
        return range(k, k + 1), 1

    def _moments(self) -> Iterator[Moment]:
        self.places: dict[int, int] = {}  # of each segment that is shown, the moment
        rows = [s.input for s in self.segments[0].loads if s.input.role is Role.ROW]
        yield Moment("global memory", list(self._inputs((i, None) for i in rows)))
        at = 1
        if self.plan.placement.loader == "shared":
            how = f"cp.async, {self.plan.placement.copy_bytes} bytes an access"
            how = "shifted on the way" if self.plan.placement.shifted else how
            texts = [*self._named(rows), Text(how, "", Style.FAINT)]
            yield Moment("shared memory", [Box("shared", Kind.ROW, texts)])
            at += 1
        for k, segment in enumerate(self.segments):
            shown, count = self._round(k)
            if k not in shown:
                continue
            self.places[k] = at
            loads = [(s.input, None) for s in segment.loads if s.input not in rows]
            texts = list(self._texts(segment)) or [Text("nothing to compute", "", Style.FAINT)]
            work = Box(f"segment{k}", Kind.ELEMENTWISE, texts, rounds=count)
            in_loop = self.plan.numerics.in_loops and not any(map(_references, segment.reduces))
            what = f"in {self.plan.chunks} chunks" if in_loop else ""
            beside = list(self._inputs([*loads, *segment.reloads], f"-{k}" if k else ""))
            yield Moment("registers", [work], beside, what)
            for j, reduce in enumerate(segment.reduces):
                later = range(k, k + len(shown) * count, len(shown))
                stages = [self.segments[m].reduces[j].stage for m in later]
                yield self._barrier(reduce, stages, count)
            at += 1 + len(segment.reduces)
        yield Moment("global memory", list(self._stores()))

    def _texts(self, segment: Segment) -> Iterator[Text]:
        """What is computed; the steps of a loop's first round for all of them."""
        rows = [s.input.name for s in segment.loads if s.input.role is Role.ROW]
        if rows:
            text = ", ".join(rows) if len(rows) < MANY else span(rows[0], rows[-1])
            yield Text(f"reads {text}", "", Style.FAINT)
        rounds: dict[int, list[Compute]] = defaultdict(list)
        for step in segment.computes:
            if self.graph[step.id].op is not Op.RESHAPE:
                rounds[self.first.get(step.id, step.id)].append(step)
        lines = []
        for step, *others in rounds.values():
            times = f"× {len(others) + 1}" if others else ""
            lines.append(Text(self._line(step), times))
        yield from _cut(lines)
        notes = [f"carries {self.names[id]} along" for id in segment.carried_along]
        for reduce in segment.reduces:
            if reduce.is_pair:
                peak, total = (self.names[id] for id in reduce.results)
                notes.append(f"carries {peak}, and {total} relative to it")
            for id, references in _references(reduce).items():
                about = " and ".join(map(self._operand, references))
                notes.append(f"{self.names[id]} as carried, now about {about}")
        if segment.prefetched:
            notes.append(f"prefetches {', '.join(self.names[i.id] for i in segment.prefetched)}")
        yield from (Text(note, "", Style.FAINT) for note in notes)

    def _line(self, step: Compute) -> str:
        """A step as the source has it, with its device function."""
        operands = tuple(map(self._operand, step.inputs))
        ctx = "chunk" if self.plan.numerics.in_loops else "ctx"
        text = written(self.graph[step.id], operands, step.function, ctx)
        return f"{self.names[step.id]} = {text.removeprefix('math.')}"

    def _operand(self, id: int) -> str:
        node = self.graph[strip(self.graph, id)]
        return str(node.arg) if node.op is Op.CONST else self.names[id]

    def _named(self, inputs: Iterable[Input]) -> list[Text]:
        return [Text(row, "", Style.BOLD) for row in flowed([self.names[i.id] for i in inputs])]

    def _barrier(self, reduce: Reduce, stages: list[int], rounds: int) -> Moment:
        texts = []
        for part in dict.fromkeys(reduce.parts):
            if part.chain is not None:
                texts.append(Text(self._ranks(part.chain), "", Style.BOLD))
        alone = [id for id, p in zip(reduce.results, reduce.parts, strict=True) if p.chain is None]
        for id in alone:
            operands = ", ".join(map(self._operand, self.graph[id].inputs))
            line = f"{self.names[id]} = {self.graph[id].op.value}({operands})"
            texts.append(Text(line, "", Style.BOLD))
        ctas = self.plan.ctas
        what = f"{reduce.waits} barriers" if reduce.waits > 1 else "one barrier"
        what = what if ctas == 1 else f"{what} of {ctas} CTAs"
        what = what if reduce.exchanges else "of what the barrier before brought"
        kind = Kind.SCAN if reduce.is_scan else Kind.REDUCTION
        box = Box(f"stage{reduce.stage}", kind, _cut(texts), rounds=rounds)
        return Moment(stages_text(stages), [box], [], what, reduce.exchanges)

    def _ranks(self, chain: Chain) -> str:
        """What finds all ranks of a chain: `ranks0 = the 8 largest of key0`."""
        name = self.names[chain.results[0]].partition("[")[0]
        keys = " and ".join(map(self._operand, chain.keys))
        return f"{name} = {chain} of {keys}"

    def _inputs(
        self, inputs: Iterable[tuple[Input, Home | None]], suffix: str = ""
    ) -> Iterator[Box]:
        """A box for the inputs of each role and dtype; dashed if it is read again, from a home."""
        groups: dict[tuple[Role, torch.dtype, Home | None], list[Input]] = defaultdict(list)
        for i, home in inputs:
            groups[i.role, i.dtype, home].append(i)
        for (role, dtype, home), group in groups.items():
            place = "shared" if home is Home.SHARED else "global"
            what = f"again from {place} memory" if home else f"{role.value} {dtype_name(dtype)}"
            count = self.graph.n if role in (Role.ROW, Role.COLUMN) else 1
            per = "a row" if role in (Role.ROW, Role.PER_ROW) else "for all rows"
            size = f"{count * dtype.itemsize} bytes {per}{' each' if len(group) > 1 else ''}"
            texts = [*self._named(group), Text(what), Text(size)]
            key = f"{'again' if home else 'load'}-{group[0].name}{suffix}"
            yield Box(key, KIND_OF_ROLE[role], texts, dashed=home is not None)

    def _stores(self) -> Iterator[Box]:
        """A box for the results of each kind and dtype."""
        groups: dict[tuple[bool, torch.dtype], list[Output]] = defaultdict(list)
        for out in (step.output for segment in self.segments for step in segment.stores):
            groups[out.is_row, out.dtype].append(out)
        for (is_row, dtype), outs in groups.items():
            lines = [f"{out.name} = {self._operand(out.id)}" for out in outs]
            size = f"{(self.graph.n if is_row else 1) * dtype.itemsize} bytes a row"
            texts = [Text(line, "", Style.BOLD) for line in lines]
            texts.append(Text(f"{'row' if is_row else 'per-row'} {dtype_name(dtype)}"))
            texts.append(Text(f"{size}{' each' if len(outs) > 1 else ''}"))
            yield Box(f"store-{outs[0].name}", Kind.OUTPUT, texts)

    def _bars(self) -> Iterator[Bar]:
        """The bars, at the moments that show their segments; of a loop those of the shown round."""
        for id, (first, last, home) in kept(self.plan, self.segments).items():
            (start, _), (end, _) = self._round(first), self._round(last)
            if first not in start and start == end:
                continue  # the shown round has it
            top = start[(first - start[0]) % len(start)]
            bottom = last if last in end else end[-1]
            if bottom > top:
                yield self._bar(id, home, self.places[top], self.places[bottom])

    def _bar(self, id: int, home: Home, first: int, last: int) -> Bar:
        node = self.graph[id]
        dtype = node.value.dtype
        if home in (Home.SHARED, Home.REREAD) and node.op is Op.INPUT:
            dtype = next(i.dtype for i in self.graph.inputs if i.id == id)
        size = (self.graph.n if node.value.spread else 1) * dtype.itemsize
        texts = (self._operand(id), PLACES[home], "" if home is Home.RECOMPUTE else f"{size} bytes")
        is_kept = home in (Home.REGISTERS, Home.SHARED)
        return Bar(id, kind_of(self.graph, node), texts, first, last, is_kept)


def _cut(texts: list[Text]) -> list[Text]:
    """The first rows, and how many more there are."""
    if len(texts) <= MOST_ROWS:
        return texts
    more = Text(f"… and {len(texts) - MOST_ROWS + 1} more", "", Style.FAINT)
    return [*texts[: MOST_ROWS - 1], more]

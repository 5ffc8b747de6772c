"""What one graph asks of a kernel, computed once: `enumeration`, `choice`, `schedule` and the
pictures read it.

A row is worked on in sweeps. Between two exchanges a thread does one sweep over its elements of the
row. A row that is held in registers is loaded once, and each sweep goes on from what the one before
has computed. A row that is worked on in loops over its chunks is read anew by each sweep, which
computes again what it needs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ..frontend.graph import Graph, Input, Output, Role
from ..frontend.ops import Op
from .costs import instructions
from .patterns import ancestors, choose_function
from .reductions import (
    Part,
    Reduce,
    assign_stages,
    by_stage,
    has_wide_words,
    with_next,
    with_pairs,
)
from .steps import Compute, Home

LEAVES = frozenset({Op.INPUT, Op.CONST})
# From so many inputs on, all are converted to float32 before the first is computed with. Elements
# of fewer stay as they are in memory until then.
MANY_INPUTS = 6
LOAD_ORDER = (Role.ROW, Role.COLUMN, Role.PER_ROW, Role.DEVICE_SCALAR)  # of what is in memory


@dataclass(frozen=True)
class Sweep:
    """What a thread does between two exchanges.

    goals: the nodes that it is for: operands of reductions, and results.
    computes: what is computed for them, by id.
    rows, columns: inputs that it reads. Of a held row only columns that no sweep before has read.
    parts: what its elements are added to.
    stores: what is written once it is computed.
    then: the exchanges that follow, and what is computed once a row between them.
    words: 32-bit registers for each element that are live at its widest point; of loops only.
    instructions: instructions for each element; of loops only.
    is_loop: whether it goes over the chunks of the row.
    """

    goals: tuple[int, ...]
    computes: tuple[Compute, ...]
    rows: tuple[Input, ...] = ()
    columns: tuple[Input, ...] = ()
    parts: tuple[Part, ...] = ()
    stores: tuple[Output, ...] = ()
    then: tuple[Compute | Reduce, ...] = ()
    words: float = 1.0
    instructions: int = 0
    is_loop: bool = False

    @property
    def reduces(self) -> list[Reduce]:
        """The exchanges that follow it."""
        return [step for step in self.then if isinstance(step, Reduce)]

    def reads(self, home: Home) -> tuple[Input, ...]:
        """What it reads from global memory, if rows are at `home`."""
        return self.rows + self.columns if home is Home.REREAD else self.columns


@dataclass(frozen=True)
class Sweeps:
    """All sweeps of a row, in order."""

    all: tuple[Sweep, ...]

    @cached_property
    def loops(self) -> list[Sweep]:
        """Those that go over the chunks of the row."""
        return [sweep for sweep in self.all if sweep.is_loop]

    @cached_property
    def reduces(self) -> list[Reduce]:
        """All reductions, in order."""
        return [reduce for sweep in self.all for reduce in sweep.reduces]

    @property
    def exchanges(self) -> int:
        """How often threads wait for each other."""
        return sum(reduce.exchanges for reduce in self.reduces)

    @property
    def slots(self) -> int:
        """Places of the exchange buffer."""
        return sum(reduce.slots for reduce in self.reduces)

    @property
    def joint(self) -> tuple[str, ...]:
        """The names of the entries whose results come of one exchange."""
        parts = {part.kind.name for r in self.reduces for part in r.parts if part.at_once}
        return tuple(sorted(parts))

    @property
    def carries_two_stages(self) -> bool:
        """Whether a loop carries reductions of two stages."""
        return any(part.carries_two_stages for sweep in self.loops for part in sweep.parts)

    @property
    def words(self) -> float:
        """Registers an element, at the widest point of all loops."""
        return max((sweep.words for sweep in self.loops), default=1.0)


class Work:
    """What a graph asks of a kernel. Each figure is computed when it is first asked for."""

    def __init__(self, graph: Graph, fastmath: bool = False):
        self.graph = graph
        self.fastmath = fastmath

    @cached_property
    def stage(self) -> dict[int, int]:
        """The stage of every node."""
        return assign_stages(self.graph)

    @cached_property
    def stages(self) -> int:
        """Dependent rounds of reductions."""
        return max(self.stage.values())

    @cached_property
    def loaded(self) -> tuple[Input, ...]:
        """The inputs in memory that are read, rows first: they are in flight while others load."""
        g = self.graph
        read = {i for node in g for i in node.inputs} | {out.id for out in g.outputs}
        inputs = [i for i in g.inputs if i.role in LOAD_ORDER and i.id in read]
        return tuple(sorted(inputs, key=lambda i: LOAD_ORDER.index(i.role)))

    def of(self, role: Role) -> list[Input]:
        """The inputs of a role."""
        return [i for i in self.graph.inputs if i.role is role]

    @cached_property
    def rows(self) -> tuple[Input, ...]:
        """The rows that are read."""
        return tuple(i for i in self.loaded if i.role is Role.ROW)

    @cached_property
    def columns(self) -> tuple[Input, ...]:
        """The vectors that all rows share and that are read."""
        return tuple(i for i in self.loaded if i.role is Role.COLUMN)

    @cached_property
    def writes(self) -> tuple[Output, ...]:
        """The results that are whole rows."""
        return tuple(output for output in self.graph.outputs if output.is_row)

    @property
    def has_columns(self) -> bool:
        """Whether there are vectors that all rows share."""
        return bool(self.of(Role.COLUMN))

    @property
    def row_bytes(self) -> int:
        """Bytes of one element of all row inputs."""
        return sum(i.dtype.itemsize for i in self.of(Role.ROW))

    @property
    def is_wide(self) -> bool:
        """Whether elements of the rows, in or out, have more than 16 bits."""
        dtypes = [i.dtype for i in self.of(Role.ROW)] + [o.dtype for o in self.writes]
        return max(dtype.itemsize for dtype in dtypes) > 2

    @cached_property
    def has_pair(self) -> bool:
        """Whether a maximum and the sum of exponentials below it can be one exchange."""
        return len(self._paired) < len(self._by_stage)

    @cached_property
    def repeats_exp(self) -> bool:
        """Whether an exponential that a reduction needs is read after it: loops would repeat it."""
        crossing = set().union(*self.crossing(late_columns=False))
        return any(self.graph[id].op is Op.EXP for id in crossing)

    @cached_property
    def _by_stage(self) -> list[Reduce]:
        return by_stage(self.graph, self.stage)

    @cached_property
    def _paired(self) -> list[Reduce]:
        return with_pairs(self.graph, self._by_stage)

    def has_wide_words(self, sweeps: Sweeps) -> bool:
        """Whether 64 bits are exchanged at a time."""
        return has_wide_words(self.graph, sweeps.reduces)

    # ---- a row that is held in registers

    @cached_property
    def held(self) -> Sweeps:
        """A row that is held, each stage with an exchange of its own."""
        return self._hold(self._by_stage)

    @cached_property
    def held_joint(self) -> Sweeps:
        """A row that is held, with maxima and sums of exponentials in one exchange."""
        return self._hold(self._paired)

    def _hold(self, reduces: Sequence[Reduce]) -> Sweeps:
        """A sweep for each exchange, then one for each result."""
        graph = self.graph
        done = {node.id for node in graph if node.op in LEAVES}
        left = {i.id: i for i in self.columns}
        sweeps = []

        def sweep(goals: tuple[int, ...], then: tuple = (), stores: tuple = ()) -> None:
            computes = self._needed(goals, done)
            reads = {i for step in computes for i in step.inputs} | set(goals)
            columns = tuple(left.pop(i) for i in sorted(reads & left.keys()))
            sweeps.append(Sweep(goals, computes, (), columns, (), stores, then))

        for reduce in reduces:
            goals = reduce.operands(graph)
            sweep(goals[:1] if reduce.is_pair else goals, then=(reduce,))
            done.update(made_by_exchange(graph, reduce))
        for output in graph.outputs:
            sweep((output.id,), stores=(output,))
        return Sweeps(tuple(sweeps))

    def crossing(self, late_columns: bool, joint: bool = False) -> list[set[int]]:
        """For each exchange of a held row, the values made before it that are read after it."""
        graph = self.graph
        sweeps = (self.held_joint if joint else self.held).all
        exchanges = len((self.held_joint if joint else self.held).reduces)
        born = {i.id: 0 for i in self.loaded}
        read: dict[int, int] = {}
        for k, sweep in enumerate(sweeps):
            k = min(k, exchanges)  # the sweeps of results follow the last exchange
            if late_columns:
                born |= {i.id: k for i in sweep.columns}
            born |= {step.id: k for step in sweep.computes}
            read |= {i: k for step in sweep.computes for i in step.inputs}
            read |= dict.fromkeys((o.id for o in sweep.stores), k)
            for reduce in sweep.reduces:
                read |= dict.fromkeys(reduce.operands(graph), k)
                born |= dict.fromkeys(made_by_exchange(graph, reduce), k + 1)
        return [
            {id for id in born if born[id] <= k < read.get(id, -1)} for k in range(exchanges)
        ]

    def held_words(self, late_columns: bool, joint: bool = False) -> float:
        """Registers for each element of a held row, at the widest point.

        That is what is loaded at once at first, or what crosses an exchange.
        """
        sweeps = (self.held_joint if joint else self.held).all
        columns = sweeps[0].columns if late_columns else self.columns
        loaded = self.rows + tuple(columns)
        least = 1 if len(loaded) >= MANY_INPUTS else 0
        loading = sum(max(least, i.dtype.itemsize / 4) for i in loaded)
        crossing = (self._words(ids) for ids in self.crossing(late_columns, joint))
        return max([loading, 1.0, *crossing])

    # ---- a row that is worked on in loops over its chunks

    @cached_property
    def loops(self) -> Sweeps:
        """As few loops as can be, then what is computed once a row.

        A loop carries the reductions of the next stage too, if it can carry all of them. What is
        stored and needs no result of the last loop is stored by it.
        """
        graph = self.graph
        kept = {node.id for node in graph if node.op in LEAVES}
        left, sweeps = self.writes, []
        waiting = list(self._paired)
        while waiting:
            reduce, following = waiting.pop(0), None
            both = with_next(graph, reduce, waiting[0]) if waiting else None
            if both is not None:
                reduce, following = both
                waiting.pop(0)
            results = {*reduce.results, *(following.results if following else ())}
            parts = tuple(dict.fromkeys(reduce.parts))
            stores: tuple[Output, ...] = ()
            if left and not waiting and not results & ancestors(graph, left):
                stores, left = left, ()
            operands = tuple(part.operand(graph) for part in parts)
            then: tuple[Compute | Reduce, ...] = (reduce,)
            loop = self._loop(operands, kept, parts, stores)
            kept |= {*reduce.results}
            if following:
                references = dict.fromkeys(id for part in parts for id in part.references)
                then += (*self._needed(tuple(references), kept), following)
                kept |= {*following.results}
            sweeps.append(replace(loop, then=then))
        if left:
            sweeps.append(self._loop((), kept, (), left))
        values = tuple(output for output in graph.outputs if not output.is_row)
        goals = tuple(output.id for output in values)
        sweeps.append(Sweep(goals, self._needed(goals, set(kept), True), stores=values))
        return Sweeps(tuple(sweeps))

    def _loop(
        self,
        operands: tuple[int, ...],
        kept: set[int],
        parts: tuple[Part, ...],
        stores: tuple[Output, ...],
    ) -> Sweep:
        """A loop that adds operands to parts and stores results, from the inputs and `kept`."""
        graph = self.graph
        goals = operands + tuple(output.id for output in stores)
        computes = self._needed(goals, set(kept), in_loops=True)
        reads = {i for step in computes for i in step.inputs} | set(goals)
        rows = tuple(i for i in self.rows if i.id in reads)
        columns = tuple(i for i in self.columns if i.id in reads)
        events = [({i.id for i in rows}, set())] if rows else []
        events += [({i.id}, set()) for i in columns]
        events += [({step.id}, {*step.inputs}) for step in computes]
        events += [(set(), {output.id}) for output in stores]
        events.append((set(), {*operands}))
        return Sweep(
            goals, computes, rows, columns, parts, stores, (),
            self._widest(events, len(parts)), instructions(graph, computes, parts), is_loop=True,
        )  # fmt: skip

    def _widest(self, events: list[tuple[set[int], set[int]]], carried: int) -> float:
        """Registers an element of steps that make and read nodes, beside what is carried."""
        last = {id: k for k, (_, reads) in enumerate(events) for id in reads}
        live: set[int] = set()
        widest = 1.0
        for k, (made, _) in enumerate(events):
            live = {id for id in live | made if last.get(id, -1) >= k}
            widest = max(widest, self._words(live) + carried)
        return widest

    def homes_in_loops(self, rows: Home) -> dict[int, Home]:
        """Where values are that are read on both sides of an exchange, if loops read rows again."""
        made = Counter(
            id
            for sweep in self.loops.loops
            for id in {
                *(i.id for i in sweep.rows + sweep.columns), *(s.id for s in sweep.computes),
            }
            if self.graph[id].value.spread
        )  # fmt: skip
        across = {id for id, count in made.items() if count > 1}
        # What is carried along with another reduction is not made for it, and may be made once.
        for ids in self.crossing(late_columns=True):
            across |= {id for id in ids if made[id] > 1 or not self.graph[id].value.spread}
        homes = {}
        for id in sorted(across):
            node = self.graph[id]
            if not node.value.spread:
                homes[id] = Home.REGISTERS
            elif node.op is not Op.INPUT:
                homes[id] = Home.RECOMPUTE
            else:
                homes[id] = rows if any(i.id == id for i in self.rows) else Home.REREAD
        return homes

    # ---- both

    def _words(self, ids: Iterable[int]) -> float:
        """Registers for an element of each of these values, without those that are one a row."""
        values = (self.graph[id].value for id in ids)
        return sum(max(1, value.dtype.itemsize / 4) for value in values if value.spread)

    def _needed(
        self, goals: tuple[int, ...], done: set[int], in_loops: bool = False
    ) -> tuple[Compute, ...]:
        """What the goals still need, by id; adds it to `done`."""
        graph = self.graph
        steps: dict[int, Compute] = {}
        todo = [id for id in goals if id not in done]
        while todo:
            id = todo.pop()
            if id not in steps:
                chosen = choose_function(graph, graph[id], self.fastmath, in_loops)
                steps[id] = Compute(id, *chosen)
                todo += [i for i in steps[id].inputs if i not in done]
        done.update(steps)
        return tuple(steps[id] for id in sorted(steps))


def made_by_exchange(graph: Graph, reduce: Reduce) -> tuple[int, ...]:
    """The nodes of a held row that are there after an exchange.

    A pair brings the exponentials too, unless they are relative to 0 for an infinite maximum.
    """
    if reduce.is_pair and not reduce.parts[0].finite:
        return (*reduce.results, *reduce.operands(graph)[1:])
    return reduce.results

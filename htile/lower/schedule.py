"""From a graph to the steps of its kernel: stages of reductions, what is computed before each.

`stage(node)` is the number of reductions on its longest path from the inputs. All reductions of a
stage share one barrier. A value is computed in the first stage that needs it.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

from ..frontend.graph import Graph, Node, Role
from ..frontend.ops import REDUCTIONS, Op
from .patterns import choose_form, gathered_online, padding, strip
from .plan import (
    LONG_N,
    MONOIDS,
    ColumnLoop,
    Compute,
    Fetch,
    Home,
    Load,
    Online,
    Reduce,
    Reload,
    Step,
    Store,
)

LEAVES = frozenset({Op.INPUT, Op.CONST})
# Of more, and no very long ones, a lane would combine what four warps send of two reductions: many
# rows lose more by it than by one exchange more.
CARRIED_N = 65536


@dataclass(frozen=True)
class Schedule:
    """The steps of a row, the homes of values that cross a barrier, the slots of the buffer.

    words: 32-bit registers for each element of a row, or of a chunk of it in loops, that are live
        at the widest point.
    """

    steps: tuple[Step, ...]
    homes: dict[int, Home]
    slots: int
    words: float

    @property
    def loops(self) -> list[ColumnLoop]:
        """Those over chunks of the row."""
        return [step for step in self.steps if isinstance(step, ColumnLoop)]

    @property
    def is_online(self) -> bool:
        """Whether a loop gathers reductions of two stages."""
        return any(loop.is_online for loop in self.loops)

    @property
    def reduces(self) -> list[Reduce]:
        """Rounds of reductions."""
        return [step for step in self.steps if isinstance(step, Reduce)]

    @property
    def exchanges(self) -> int:
        """Barriers behind which reductions are."""
        return sum(not reduce.carried for reduce in self.reduces)

    @property
    def has_pairs(self) -> bool:
        """Whether reductions of two stages are one exchange, of two numbers a slot."""
        return any(reduce.paired or reduce.carried for reduce in self.reduces)


def assign_stages(graph: Graph) -> dict[int, int]:
    """The stage of every node: reductions on its longest path from the inputs, itself included."""
    stage: dict[int, int] = {}
    for node in graph:
        before = max((stage[i] for i in node.inputs), default=0)
        stage[node.id] = before + (node.op in REDUCTIONS)
    return stage


def make_schedule(
    graph: Graph,
    fastmath: bool = False,
    late_columns: bool = False,
    in_place: bool = False,
    paired: bool = False,
) -> Schedule:
    """Order the graph into loads, computations, one `Reduce` a stage, and stores.

    late_columns: a column is loaded where it is first used, not while the rows are in flight. Its
        latency shows then, but it takes no registers before.
    in_place: an output is the memory of an input, so all is read before anything is stored.
    paired: a maximum and the sum of exponentials below it, each alone in its stage, share one.
    """
    loads = _loads(graph)
    columns = [s for s in loads if s.input.role is Role.COLUMN]
    late = {s.input.id: s for s in columns} if late_columns else {}
    steps: list[Step] = [s for s in loads if s.input.id not in late]
    done = {node.id for node in graph if node.op in LEAVES}

    def compute(goals: tuple[int, ...]) -> list[Step]:
        """What the goals need, and first the late columns that this reads."""
        computed = _compute(graph, goals, done, fastmath)
        reads = {i for step in computed for i in step.inputs} | set(goals)
        return [*(late.pop(i) for i in sorted(reads & late.keys())), *computed]

    reduces = _in_pairs(graph, _reduces(graph)) if paired else _reduces(graph)
    for reduce in reduces:
        steps += [*compute(reduce.operands[:1] if reduce.paired else reduce.operands), reduce]
        done.update(reduce.made)
    if in_place:
        steps += compute(tuple(output.id for output in graph.outputs))
    for output in graph.outputs:
        steps += [*compute((output.id,)), Store(output)]
    crossing = _live_at_barriers(steps, graph)
    homes = {id: Home.REGISTERS for ids in crossing for id in ids}
    slots = sum(reduce.slots for reduce in reduces)
    return Schedule(tuple(steps), homes, slots, _widest(graph, steps, crossing))


def make_loops(graph: Graph, home: Home, fastmath: bool = False) -> Schedule:
    """The graph as loops over chunks of the row, one before each barrier and one for row outputs.

    Each reads what it needs of the row inputs again from `home` (SHARED, or REREAD: global memory)
    and of the columns from global memory, and computes all of it again but what was reduced. In
    place as it is: a thread stores a chunk after it has read all of it, and for the last time.

    There are as few loops as can be. One gathers the reductions of the next stage too, if it can
    gather all of them: any other would read the row again for itself, and could gather the rest
    then. What is stored and needs no result of the last loop is stored by it.
    """
    rows = {i.id: i for i in graph.inputs if i.role is Role.ROW}
    loads = _loads(graph)
    columns = {s.input.id: s for s in loads if s.input.role is Role.COLUMN}
    steps: list[Step] = [
        Load(s.input, home) if s.input.id in rows else s for s in loads if s.input.id not in columns
    ]
    kept = {node.id for node in graph if node.op in LEAVES}

    def body(goals: tuple[int, ...]) -> list[Step]:
        computed = _compute(graph, goals, set(kept), fastmath, again=True)
        reads = sorted({i for step in computed for i in step.inputs} | set(goals))
        again = tuple(rows[i] for i in reads if i in rows)
        first = [Reload(again, home)] if again else []
        return [*first, *(columns[i] for i in reads if i in columns), *computed]

    whole = [output for output in graph.outputs if output.is_row]
    stored = tuple(output.id for output in whole)
    waiting = _in_pairs(graph, _reduces(graph))
    slots = sum(reduce.slots for reduce in waiting)
    while waiting:
        reduce = waiting.pop(0)
        ahead = _gathered_ahead(graph, reduce, waiting[0]) if waiting else None
        if ahead is not None:
            waiting.pop(0)
        made = {*reduce.results, *(ahead.results if ahead is not None else ())}
        stores: list[Step] = []
        goals = tuple(operand for _, operand, _ in reduce.gathered)
        if whole and not waiting and not made & _needed(graph, stored):
            goals, stores, whole = goals + stored, [*map(Store, whole)], []
        steps += [ColumnLoop((*body(goals), *stores), reduce, ahead), reduce]
        kept.update(reduce.results)
        if ahead is not None:
            steps += [*_compute(graph, tuple(a.about for a in ahead.ahead), kept, fastmath), ahead]
            kept.update(ahead.results)
    if whole:
        again = any(isinstance(step, ColumnLoop) for step in steps) and home is Home.REREAD
        steps.append(ColumnLoop((*body(stored), *map(Store, whole)), backwards=again))
    values = [output for output in graph.outputs if not output.is_row]
    steps += [*body(tuple(output.id for output in values)), *map(Store, values)]

    steps = [
        replace(s, padding=padding(graph, s)) if isinstance(s, ColumnLoop) else s for s in steps
    ]
    steps = _with_fetch(steps)
    loops = [step for step in steps if isinstance(step, ColumnLoop)]
    crossing = _live_at_barriers(make_schedule(graph, fastmath, True).steps, graph)
    made = Counter(id for loop in loops for id in _made(graph, loop))
    across = {id for id, count in made.items() if count > 1}.union(*crossing)
    # what is gathered ahead is not made for it, and may be made once
    across = {id for id in across if made[id] > 1 or not graph[id].value.spread}
    homes = {id: _home(graph, id, home) for id in sorted(across)}
    words = max((_words(graph, loop) for loop in loops), default=1.0)
    return Schedule(tuple(steps), homes, slots, words)


def _needed(graph: Graph, goals: tuple[int, ...]) -> set[int]:
    """The nodes that the goals are computed of, themselves included."""
    needed, waiting = set(), [*goals]
    while waiting:
        id = waiting.pop()
        if id not in needed:
            needed.add(id)
            waiting += graph[id].inputs
    return needed


def _with_fetch(steps: list[Step]) -> list[Step]:
    """The steps, with a `Fetch` of what each loop reads before the barrier that it waits for."""
    found: list[Step] = []
    for step in steps:
        if isinstance(step, ColumnLoop) and step.reads:
            barriers = [
                k
                for k, before in enumerate(found)
                if isinstance(before, Reduce) and not before.carried
            ]
            if barriers:
                found.insert(barriers[-1], Fetch(step.reads))
        found.append(step)
    return found


def _reduces(graph: Graph) -> list[Reduce]:
    """The reductions of each stage, behind one barrier, in order."""
    stage = assign_stages(graph)
    rounds: dict[int, list[Node]] = {}
    for node in graph:
        if node.op in REDUCTIONS:
            rounds.setdefault(stage[node.id], []).append(node)
    slots = itertools.accumulate((len(rounds[k]) for k in sorted(rounds)), initial=0)
    return [
        Reduce(
            k,
            tuple(node.id for node in rounds[k]),
            tuple(node.inputs[0] for node in rounds[k]),
            tuple(MONOIDS[node.op] for node in rounds[k]),
            slot,
        )
        for k, slot in zip(sorted(rounds), slots, strict=False)
    ]


def has_pair(graph: Graph) -> bool:
    """Whether a maximum and a sum can be one exchange: see `Reduce.paired`."""
    reduces = _reduces(graph)
    return len(_in_pairs(graph, reduces)) < len(reduces)


def _in_pairs(graph: Graph, reduces: list[Reduce]) -> list[Reduce]:
    """The reductions, a maximum and the sum of exponentials below it as one."""
    joined: list[Reduce] = []
    for reduce in reduces:
        before = joined[-1] if joined else None
        finite = None if before is None else _is_exp_below(graph, before, reduce)
        if finite is not None:
            joined[-1] = replace(
                before,
                results=before.results + reduce.results,
                operands=before.operands + reduce.operands,
                monoids=before.monoids + reduce.monoids,
                paired=True,
                finite=finite,
            )
        else:
            slot = 0 if before is None else before.slot + before.slots
            joined.append(replace(reduce, stage=len(joined) + 1, slot=slot))
    return joined


def _is_exp_below(graph: Graph, first: Reduce, second: Reduce) -> bool | None:
    """If `first` is max(x) alone and `second` the sum of exp(x - max(x)) alone: whether 0 stands
    for an infinite maximum, which asks for no other use of the exponentials."""
    if (len(first.results), len(second.results)) != (1, 1):
        return None
    online = gathered_online(graph, graph[second.results[0]])
    if online is None or online.form is not Online.SOFTMAX or online.first != first.results[0]:
        return None
    finite = strip(graph, graph[online.about]).id != online.first
    (exp,) = second.operands
    uses = sum(exp in node.inputs for node in graph) + sum(exp == o.id for o in graph.outputs)
    return None if finite and uses > 1 else finite


def _gathered_ahead(graph: Graph, reduce: Reduce, following: Reduce) -> Reduce | None:
    """The reductions of the next stage as they are gathered with those of this one, if all are."""
    if reduce.paired:
        return None
    forms = [gathered_online(graph, graph[id]) for id in following.results]
    if all(form is not None and form.first in reduce.results for form in forms):
        alone = len(reduce.results) == len(forms) == 1 and forms[0].form is Online.WELFORD
        carried = alone and not CARRIED_N < graph.n <= LONG_N
        return replace(following, ahead=tuple(forms), carried=carried)
    return None


def _events(graph: Graph, loop: ColumnLoop) -> list[tuple[set[int], set[int]]]:
    """What each step of a loop makes and reads, and what is gathered at its end."""
    events: list[tuple[set[int], set[int]]] = []
    for step in loop.steps:
        match step:
            case Reload(inputs, _):
                events.append(({i.id for i in inputs}, set()))
            case Load(input):
                events.append(({input.id}, set()))
            case Compute(id, _, inputs):
                events.append(({id}, set(inputs)))
            case Store(output):
                events.append((set(), {output.id}))
    gathered = loop.reduce.gathered if loop.reduce else ()
    return [*events, (set(), {operand for _, operand, _ in gathered})]


def _made(graph: Graph, loop: ColumnLoop) -> set[int]:
    """The vectors that a loop reads or computes."""
    made = set().union(*(made for made, _ in _events(graph, loop)))
    return {id for id in made if graph[id].value.spread}


def _words(graph: Graph, loop: ColumnLoop) -> float:
    """Registers an element of a chunk: what is live at the widest point, the gathered included."""
    events, gathered = _events(graph, loop), len(loop.reduce.gathered) if loop.reduce else 0
    last = {id: k for k, (_, reads) in enumerate(events) for id in reads}
    live: set[int] = set()
    widest = 0.0
    for k, (made, _) in enumerate(events):
        live = {id for id in live | made if last.get(id, -1) >= k and graph[id].value.spread}
        sizes = (max(1, graph[id].value.dtype.itemsize / 4) for id in live)
        widest = max(widest, sum(sizes) + gathered)
    return max(1.0, widest)


def _home(graph: Graph, id: int, reload: Home) -> Home:
    """Where a value that is read on both sides of a barrier is, if rows are loaded again."""
    node = graph[id]
    if not node.value.spread:
        return Home.REGISTERS
    if node.op is not Op.INPUT:
        return Home.RECOMPUTE
    role = next(i.role for i in graph.inputs if i.id == id)
    return reload if role is Role.ROW else Home.REREAD


def _loads(graph: Graph) -> list[Step]:
    """Rows first, so that they are in flight while the rest is loaded; scalars need no load."""
    order = {Role.ROW: 0, Role.COLUMN: 1, Role.PER_ROW: 2, Role.DEVICE_SCALAR: 3}
    read = {i for node in graph for i in node.inputs} | {out.id for out in graph.outputs}
    inputs = [i for i in graph.inputs if i.role in order and i.id in read]
    return [Load(i) for i in sorted(inputs, key=lambda i: order[i.role])]


def _compute(
    graph: Graph, goals: tuple[int, ...], done: set[int], fastmath: bool, again: bool = False
) -> list[Compute]:
    """What the goals still need, by id; adds it to `done`.

    again: exponentials whose sum is known are computed for their shares of it alone.
    """
    steps: dict[int, Compute] = {}
    todo = [id for id in goals if id not in done]
    while todo:
        id = todo.pop()
        if id not in steps:
            steps[id] = Compute(id, *choose_form(graph, graph[id], fastmath, again))
            todo += [i for i in steps[id].inputs if i not in done]
    done.update(steps)
    return [steps[id] for id in sorted(steps)]


def _live_at_barriers(steps: Iterable[Step], graph: Graph) -> list[set[int]]:
    """For each Reduce, the values made before it that are read after it."""
    made: list[set[int]] = [set()]
    reads: list[set[int]] = [set()]
    for step in steps:
        match step:
            case Load(input):
                made[-1].add(input.id)
            case Compute(id, _, inputs):
                made[-1].add(id)
                reads[-1].update(inputs)
            case Reduce(operands=operands):
                reads[-1].update(operands)
                made.append(set(step.made))
                reads.append(set())
            case Store(output):
                reads[-1].add(output.id)
    return [
        set().union(*made[: k + 1]) & set().union(*reads[k + 1 :]) for k in range(len(made) - 1)
    ]


def _widest(graph: Graph, steps: list[Step], crossing: list[set[int]]) -> float:
    """Registers an element: what is loaded at once at first, or what crosses a barrier."""
    first = itertools.takewhile(lambda step: isinstance(step, Load), steps)
    loading = sum(
        step.input.dtype.itemsize / 4
        for step in first
        if step.input.role in (Role.ROW, Role.COLUMN)
    )
    words = [
        sum(max(1, graph[id].value.dtype.itemsize / 4) for id in ids if graph[id].value.spread)
        for ids in crossing
    ]
    return max([loading, 1.0, *words])

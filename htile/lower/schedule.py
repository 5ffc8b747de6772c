"""From a graph to the steps of its kernel: stages of reductions, what is computed before each.

`stage(node)` is the number of reductions on its longest path from the inputs. All reductions of a
stage share one barrier. A value is computed in the first stage that needs it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from ..frontend.graph import Graph, Node, Role
from ..frontend.ops import REDUCTIONS, Op
from .plan import MONOIDS, Compute, Form, Home, Load, Reduce, Reload, Step, Store

RELOADED_WORDS = 0.5  # registers an element of a row that is read again after each barrier
FAST_OPS = frozenset({Op.TANH, Op.LOG, Op.LOG2, Op.LOG10, Op.SIN, Op.COS})


@dataclass(frozen=True)
class Schedule:
    """The steps of a row, the homes of values that cross a barrier, the slots of the buffer.

    words: 32-bit registers for each element of a row that are live at the widest point.
    """

    steps: tuple[Step, ...]
    homes: dict[int, Home]
    slots: int
    words: float


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
    reload: Home | None = None,
    in_place: bool = False,
) -> Schedule:
    """Order the graph into loads, computations, one `Reduce` a stage, and stores.

    late_columns: a column is loaded where it is first used, not while the rows are in flight. Its
        latency shows then, but it takes no registers before.
    reload: after each barrier rows are loaded again from there (SHARED, or REREAD: global memory),
        and what was computed of them is computed again, so that neither takes registers across.
    in_place: an output is the memory of an input, so all is read before anything is stored.
    """
    stage = assign_stages(graph)
    rounds: dict[int, list[Node]] = {}
    for node in graph:
        if node.op in REDUCTIONS:
            rounds.setdefault(stage[node.id], []).append(node)

    loads = _loads(graph)
    columns = [s for s in loads if s.input.role is Role.COLUMN]
    late = {s.input.id: s for s in columns} if late_columns or reload else {}
    steps: list[Step] = [s for s in loads if s.input.id not in late]
    resident = {s.input.id for s in steps}
    done: set[int] = {node.id for node in graph if node.op in (Op.INPUT, Op.CONST)}
    rows = {i.id: i for i in graph.inputs if i.role is Role.ROW}

    def compute(goals: tuple[int, ...]) -> list[Step]:
        """What the goals need, and first the inputs that this reads and that are not here."""
        computed = _compute(graph, goals, done, fastmath)
        reads = {i for step in computed for i in graph[step.id].inputs} | set(goals)
        missing = sorted(reads - resident)
        again = tuple(rows[i] for i in missing if i in rows)
        columns = [late[i] for i in missing if i in late]
        resident.update(missing)
        return [*([Reload(again, reload)] if again else []), *columns, *computed]

    slot = 0
    for k in sorted(rounds):
        operands = tuple(node.inputs[0] for node in rounds[k])
        steps += compute(operands)
        results = tuple(node.id for node in rounds[k])
        monoids = tuple(MONOIDS[node.op] for node in rounds[k])
        steps.append(Reduce(k, results, operands, monoids, slot))
        done.update(results)
        slot += len(results)
        if reload:
            resident = {i for i in resident if not graph[i].value.spread}
            leaves = (Op.INPUT, Op.CONST)
            done = {i for i in done if not graph[i].value.spread or graph[i].op in leaves}
    if in_place:
        steps += compute(tuple(output.id for output in graph.outputs))
    for output in graph.outputs:
        steps += compute((output.id,))
        steps.append(Store(output))
    if reload:
        crossing = _live_at_barriers(make_schedule(graph, fastmath, late_columns).steps, graph)
        homes = {id: _home(graph, id, reload) for ids in crossing for id in ids}
        widest = max((len(s.inputs) for s in steps if isinstance(s, Reload)), default=1)
        words = RELOADED_WORDS * widest
        if not in_place:  # numerics depend on words, and may not depend on out=
            words = make_schedule(graph, fastmath, late_columns, reload, True).words
        return Schedule(tuple(steps), homes, slot, words)
    crossing = _live_at_barriers(steps, graph)
    homes = {id: Home.REGISTERS for ids in crossing for id in ids}
    return Schedule(tuple(steps), homes, slot, _widest(graph, steps, crossing))


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
    graph: Graph, goals: tuple[int, ...], done: set[int], fastmath: bool
) -> list[Compute]:
    """What the goals still need, by id; adds it to `done`."""
    needed: set[int] = set()
    todo = [id for id in goals if id not in done]
    while todo:
        id = todo.pop()
        if id not in needed:
            needed.add(id)
            todo += [i for i in graph[id].inputs if i not in done]
    done |= needed
    return [Compute(id, choose_form(graph, graph[id], fastmath)) for id in sorted(needed)]


def choose_form(graph: Graph, node: Node, fastmath: bool) -> Form:
    """The device function for a node: a short one where the operands' range allows it."""
    if node.op is Op.EXP and _is_below_zero(graph, graph[node.inputs[0]]):
        return Form.BOUNDED
    if node.op is Op.DIV and _is_share(graph, *graph.operands(node)):
        return Form.BOUNDED
    if node.op is Op.DIV and _is_plain_number(graph[node.inputs[1]]):
        return Form.NUMBER
    return Form.FAST if fastmath and node.op in FAST_OPS else Form.EXACT


def _is_below_zero(graph: Graph, node: Node) -> bool:
    """x - max(x): exp of it is at most 1, so an error that grows with |x| is never seen."""
    if node.op is not Op.SUB:
        return False
    x, m = graph.operands(node)
    m = _strip(graph, m)
    if m.op is Op.WHERE:  # logsumexp takes 0 for an infinite maximum
        condition, zero, peak = (_strip(graph, operand) for operand in graph.operands(m))
        if not (_is_number(zero, 0.0) and _is_infinite(graph, condition, peak)):
            return False
        m = peak
    return m.op is Op.MAX and m.inputs == (x.id,)


def _is_number(node: Node, number: float) -> bool:
    return node.op is Op.CONST and node.arg == number


def _is_infinite(graph: Graph, condition: Node, x: Node) -> bool:
    """abs(x) == inf"""
    if condition.op is not Op.EQ:
        return False
    magnitude, limit = (_strip(graph, operand) for operand in graph.operands(condition))
    if magnitude.op is not Op.ABS or not _is_number(limit, inf):
        return False
    return _strip(graph, graph[magnitude.inputs[0]]).id == x.id


def _is_plain_number(node: Node) -> bool:
    """A constant whose reciprocal is neither huge nor tiny."""
    return node.op is Op.CONST and 2.0**-100 <= abs(node.arg) <= 2.0**100


def _is_share(graph: Graph, part: Node, whole: Node) -> bool:
    """e / sum(e) with e = exp(x - max(x)): the sum is in [1, N], so rcp.approx loses nothing."""
    whole = _strip(graph, whole)
    return (
        whole.op is Op.SUM
        and whole.inputs == (part.id,)
        and part.op is Op.EXP
        and _is_below_zero(graph, graph[part.inputs[0]])
    )


def _strip(graph: Graph, node: Node) -> Node:
    while node.op is Op.RESHAPE:
        node = graph[node.inputs[0]]
    return node


def _live_at_barriers(steps: Iterable[Step], graph: Graph) -> list[set[int]]:
    """For each Reduce, the values made before it that are read after it."""
    made: list[set[int]] = [set()]
    reads: list[set[int]] = [set()]
    for step in steps:
        match step:
            case Load(input):
                made[-1].add(input.id)
            case Compute(id, _):
                made[-1].add(id)
                reads[-1].update(graph[id].inputs)
            case Reduce(_, results, operands, _, _):
                reads[-1].update(operands)
                made.append(set(results))
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

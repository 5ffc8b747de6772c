"""Stretches: whether and how a thread computes its held row one vector at a time.

A stretch is what a thread computes between two exchanges. A statement of the emitted text works on
all elements of a thread, and ptxas keeps the order of the statements. So a value takes a register
for each element until the last statement that reads it, even if no other stretch does. If that is
too much, each stretch is printed as a loop over the thread's vectors. Then only values that cross
an exchange take registers for all elements. No bit depends on it, because whole rows are still
summed in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..frontend.graph import Graph, Input, Output
from ..frontend.ops import Op
from .choice.instructions import sweep_costs
from .patterns import Function, strip
from .periods import once
from .reductions import Reduce
from .steps import Compute, Home, Load, Step, Store

if TYPE_CHECKING:
    from .plan import Plan

# A row is computed by vectors if that saves so many registers for each element, and if an element
# takes so many instructions. Both were chosen on 319 held plans of the fitting half. With this rule
# they take .99 of the time in the mean, and at most 1.11 times as long (`docs/traps.md`). Elements
# may take fewer instructions if a function has no columns, and its rows are shifted or divided over
# a cluster. 80 such plans of the fitting half take .95 of the time, and at most 1.02.
LEAST_SAVED, LEAST_INSTRUCTIONS = 1.0, 10
# Beside staged columns elements may take fewer instructions, if it saves STAGED_SAVED registers for
# each: the compiler would load whole columns from shared memory at once. Shifted rows gain only if
# they have more than STAGED_N elements, and a thread has STAGED_ELEMENTS or more. They were chosen
# on timings of layer norm and RMS norms (H200, 2026-11-28, `docs/traps.md`).
STAGED_SAVED, STAGED_ELEMENTS, STAGED_N = 1.5, 40, 8192
# Loops over rows have few threads, which may have all registers. They gain only if elements take so
# many instructions. This was chosen on 28 gradients with weights.
LEAST_OVER_ROWS = 200
MOST_AGAIN = 2  # instructions of a value that a later stretch may compute again
WHOLE_WORDS = (torch.float32, torch.int32)  # dtypes of what may be kept for a later stretch


class Stretch(NamedTuple):
    """The steps between two exchanges, and the exchange that follows.

    columns: those that are loaded where the stretch begins.
    once: what is computed of values of the row, before the elements.
    computes: what is computed of each vector, also what a stretch before has computed already.
    inputs: rows and columns that this reads.
    read: what it reads that stretches before it have kept.
    kept: what it keeps for later stretches, or for the exchange.
    whole: rows, columns and kept values of which the exchange needs all elements at once.
    factors: products that the exchange adds up. They are printed behind the loop over vectors.
    stores: results that have elements. They are stored of each vector, or added up over rows.
    values: results with one value a row. They may be added up over rows too.
    then: the exchange; None behind the last one.
    """

    columns: tuple[Input, ...]
    once: tuple[Compute, ...]
    computes: tuple[Compute, ...]
    inputs: tuple[Input, ...]
    read: tuple[int, ...]
    kept: tuple[int, ...]
    whole: tuple[int, ...]
    factors: tuple[Compute, ...]
    stores: tuple[Output, ...]
    values: tuple[Output, ...]
    then: Reduce | None

    def shifted(self, plan: Plan) -> list[Output]:
        """The results that are stored whole, once all vectors are computed."""
        if plan.placement.shifted:
            return [o for o in self.stores if o.over is None]
        return [o for o in self.stores if o in plan.work.cut]


def stretches(plan: Plan) -> tuple[Stretch, ...]:
    """The stretches of a plan, if its kernel is faster by vectors, and else none."""
    if is_light(plan) and not (may_read_by_vectors(plan) or _gains_without_columns(plan)):
        return ()
    if plan.chunks < 2 or plan.numerics.in_loops or not _is_plain(plan):
        return ()
    of_statements = _words_of_statements(plan)
    if plan.graph.over_rows:
        sums = len([output for output in plan.graph.over_rows if output.is_row])
        if (of_statements + sums) * plan.elements_per_thread < LEAST_OVER_ROWS:
            return ()
    ways = [_divided(plan, again) for again in ({}, _cheap(plan))]
    ways = [found for found in ways if _can_keep(plan.graph, found)]
    least = STAGED_SAVED if is_light(plan) and plan.work.columns else LEAST_SAVED
    best = min(ways, key=lambda found: _widest(plan, found), default=[])
    saves = best and of_statements - _widest(plan, best) >= least
    return tuple(best) if saves else ()


def is_light(plan: Plan) -> bool:
    """Whether an element takes so few instructions that whole rows are mostly as good."""
    return plan.sweeps.costs[0] < LEAST_INSTRUCTIONS


def may_read_by_vectors(plan: Plan) -> bool:
    """Whether staged columns of light elements are read by vectors, if that saves registers."""
    if plan.placement.columns != "staged" or not is_light(plan):
        return False
    is_long = plan.graph.n > STAGED_N and plan.elements_per_thread >= STAGED_ELEMENTS
    return is_long or not plan.placement.shifted


def _gains_without_columns(plan: Plan) -> bool:
    """Whether light elements without columns are computed by vectors, if that saves registers.

    Sums over rows were not measured, so loops that add them up stay as they are.
    """
    if plan.work.columns or plan.graph.over_rows:
        return False
    return plan.placement.shifted or plan.numerics.cluster_n > 1


def homes(plan: Plan) -> dict[int, Home]:
    """Where values for later stretches are while a thread waits: kept, as loaded, or nowhere."""
    inputs = {i.id for i in (*plan.work.rows, *plan.work.columns)}
    computed: set[int] = set()
    kept: set[int] = set()
    found: dict[int, Home] = {}
    for k, stretch in enumerate(plan.stretches):
        here = {step.id for step in stretch.computes}
        reads = {i.id for i in stretch.inputs} | {*stretch.whole}
        found |= dict.fromkeys({*stretch.read} | (reads & kept) - here, Home.REGISTERS)
        again = reads & inputs - {i.id for i in stretch.columns} if k else ()
        found |= dict.fromkeys(again, Home.PACKED)
        found |= dict.fromkeys(here & computed, Home.RECOMPUTE)
        computed |= here
        kept |= {*stretch.kept}
    return dict(sorted(found.items()))


def _can_keep(graph: Graph, found: Sequence[Stretch]) -> bool:
    """Whether what stretches keep has whole registers."""
    return all(graph[id].value.dtype in WHOLE_WORDS for each in found for id in each.kept)


def _cheap(plan: Plan) -> dict[int, list[Compute]]:
    """What is computed of rows and columns by few instructions, and the steps that do so."""
    graph = plan.graph
    found: dict[int, list[Compute]] = {i.id: [] for i in (*plan.work.rows, *plan.work.columns)}
    for step in (step for section in _sections(plan) for step in section):
        is_vector = isinstance(step, Compute) and graph[step.id].value.spread
        if not is_vector or graph[step.id].op is Op.RESHAPE:
            continue
        operands = _of_elements(graph, step.inputs)
        if all(id in found for id in operands):
            steps = list(dict.fromkeys([*(s for id in operands for s in found[id]), step]))
            if sweep_costs(graph, steps, ())[0] <= MOST_AGAIN:
                found[step.id] = steps
    return {id: steps for id, steps in found.items() if steps}


def _is_plain(plan: Plan) -> bool:
    """Whether a held row has nothing but elements, and reductions of them in exchanges."""
    work, graph = plan.work, plan.graph
    has_more = work.needs_held or work.chains or work.lookups
    has_more = has_more or any(graph[step.id].value.spread for step in work.early)
    has_more = has_more or plan.numerics.joint or plan.target.aliases or plan.turns > 1
    has_more = has_more or any(node.op in (Op.GROUPED, Op.GATHER) for node in graph) or once(plan)
    kinds = (Compute, Load, Reduce, Store)
    if has_more or not all(isinstance(step, kinds) for step in plan.steps):
        return False
    return all(o.dtype.itemsize in (2, 4) for o in work.writes)


def _of_elements(graph: Graph, ids: Iterable[int]) -> list[int]:
    """Those of these values that differ from element to element, as they are printed."""
    nodes = [strip(graph, graph[id]) for id in ids]
    return [n.id for n in nodes if n.value.spread and n.op is not Op.CONST]


def _read_by(graph: Graph, step: Step) -> list[int]:
    """The elements that a step reads."""
    if isinstance(step, Compute):
        return _of_elements(graph, step.inputs)
    if isinstance(step, Store):
        return _of_elements(graph, [step.output.id])
    return _of_elements(graph, step.operands(graph)) if isinstance(step, Reduce) else []


def _at_once(graph: Graph, section: Sequence[Step]) -> list[Step]:
    """The steps of a section that read all elements of a thread at once.

    These are the exchange, and the products that it adds up.
    """
    reduces = [step for step in section if isinstance(step, Reduce)]
    added = {id for reduce in reduces for id in _read_by(graph, reduce)}
    computes = [step for step in section if isinstance(step, Compute) and step.id in added]
    return [*(s for s in computes if s.function is Function.FACTORS), *reduces]


def _sections(plan: Plan) -> list[list[Step]]:
    """The steps behind the first loads, divided behind each exchange."""
    sections: list[list[Step]] = [[]]
    for step in plan.steps:
        is_late = isinstance(step, Load) and step.input in plan.late_columns
        if step in plan.work.ends or (isinstance(step, Load) and not is_late):
            continue
        sections[-1].append(step)
        if isinstance(step, Reduce):
            sections.append([])
    return sections if sections[-1] else sections[:-1]


def _divided(plan: Plan, again: Mapping[int, list[Compute]]) -> list[Stretch]:
    """All stretches of a held row.

    again: the values that a later stretch computes again, and the steps that do so.
    """
    graph, sections = plan.graph, _sections(plan)
    inputs = {i.id: i for i in (*plan.work.rows, *plan.work.columns)}
    last = {
        id: k
        for k, section in enumerate(sections)
        for step in section
        for id in _read_by(graph, step)
    }
    made: set[int] = set()
    found = []
    for k, section in enumerate(sections):
        at_once = _at_once(graph, section)
        factors = [step for step in at_once if isinstance(step, Compute)]
        own = [s for s in section if isinstance(s, Compute) and graph[s.id].value.spread]
        own = [s for s in own if s not in factors and graph[s.id].op is not Op.RESHAPE]
        stores = [s for s in section if isinstance(s, Store) and s.output.is_row]
        named = {step.id for step in factors}
        at_end = [id for s in at_once for id in _read_by(graph, s) if id not in named]
        read = dict.fromkeys(id for s in (*own, *stores) for id in _read_by(graph, s))
        repeated = [s for id in (*read, *at_end) if id in made for s in again.get(id, ())]
        computes = list(dict.fromkeys((*repeated, *own)))
        read = dict.fromkeys(id for s in (*computes, *stores) for id in _read_by(graph, s))
        here = {step.id for step in computes}
        kept = [id for id in here if id in at_end or (last.get(id, -1) > k and id not in again)]
        found.append(
            Stretch(
                columns=tuple(s.input for s in section if isinstance(s, Load)),
                once=tuple(
                    s for s in section if isinstance(s, Compute) and not graph[s.id].value.spread
                ),
                computes=tuple(computes),
                inputs=tuple(inputs[id] for id in read if id in inputs),
                read=tuple(id for id in read if id in made and id not in here),
                kept=tuple(sorted(kept)),
                whole=tuple(dict.fromkeys(at_end)),
                factors=tuple(factors),
                stores=tuple(s.output for s in stores),
                values=tuple(
                    s.output for s in section if isinstance(s, Store) and not s.output.is_row
                ),
                then=section[-1] if isinstance(section[-1], Reduce) else None,
            )
        )
        made |= here
    return found


def _packed(inputs: Iterable[Input | Output]) -> float:
    """Registers for an element of each of these as they are in memory."""
    return sum([each.dtype.itemsize / 4 for each in inputs])


def _widest(plan: Plan, found: Sequence[Stretch]) -> float:
    """Registers for each element at the widest point, if stretches are computed by vectors."""
    return max(_words(plan, found, k) for k in range(len(found)))


def _words(plan: Plan, found: Sequence[Stretch], k: int) -> float:
    """Registers for each element while the k-th stretch is computed by vectors.

    What it keeps takes the place of what is read for the last time.
    """
    stretch, later = found[k], found[k + 1 :]
    before = {id for earlier in found[:k] for id in earlier.kept}
    after = {id for each in later for id in (*each.read, *each.whole)}
    inputs = (*plan.work.rows, *plan.work.columns)
    of_later = {i for each in later for i in each.inputs} | {i for i in inputs if i.id in after}
    at_first = len(before & ({*stretch.read, *stretch.whole} | after))
    at_first += _packed({*stretch.inputs, *of_later})
    at_last = len({*stretch.whole} | (before | {*stretch.kept}) & after) + _packed(of_later)
    at_last += _packed(stretch.shifted(plan))
    return max(at_first, at_last)


def _words_of_statements(plan: Plan) -> int:
    """Registers for each element at the widest point, if each statement works on all elements.

    Booleans take predicates.
    """
    graph = plan.graph
    steps = [step for section in _sections(plan) for step in section]
    last = {id: k for k, step in enumerate(steps) for id in _read_by(graph, step)}
    live = {i.id for i in (*plan.work.rows, *plan.work.columns)} & last.keys()
    widest = len(live)
    for k, step in enumerate(steps):
        if isinstance(step, Compute) and graph[step.id].value.dtype is not torch.bool:
            live.update(_of_elements(graph, [step.id]))
        live = {id for id in live if last.get(id, -1) > k}
        widest = max(widest, len(live))
    return widest

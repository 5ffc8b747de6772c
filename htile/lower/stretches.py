"""Stretches: whether and how a thread computes its held row one vector at a time.

A stretch is what a thread computes between two exchanges. A statement of the emitted text works on
all elements of a thread, and ptxas keeps the order of the statements. So a value takes a register
for each element until the last statement that reads it, even if no other stretch does. If that is
too much, each stretch is printed as a loop over the thread's vectors. Then only values that cross
an exchange take registers for all elements. Several reductions of one exchange take one vector
after the other, so that what they reduce takes none either. No bit depends on it, because all are
summed in the same order.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..frontend.graph import Graph, Input, Output
from ..frontend.ops import Op
from .choice.instructions import sweep_costs
from .patterns import Function, has_branches, strip
from .periods import once
from .reductions import PLAIN, Part, Reduce
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
# From LEAST_CARRIED to MOST_CARRIED reductions of one exchange take one vector after the other.
# Each of them takes the registers of a vector or two. More of them are faster as statements about
# whole rows, because ptxas then adds up the values of some before it computes those of others.
LEAST_CARRIED, MOST_CARRIED = 2, 8
# Rows are computed by vectors for that alone if an element takes so many instructions between two
# exchanges, in the mean. It was chosen on 58 plans; `docs/traps.md` tells how others fared.
LEAST_OF_STRETCH = 7
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
    carried: the reductions to which the values of each vector are added at once.
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
    carried: tuple[Part, ...]
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
    cheap = _cheap(plan)
    found = _narrowest(plan, [_divided(plan, again) for again in ({}, cheap)])
    least = STAGED_SAVED if is_light(plan) and plan.work.columns else LEAST_SAVED
    saves = found and of_statements - _widest(plan, found) >= least
    if saves or _gains_by_carrying(plan):
        more = cheap | _cheap_of_kept(plan, cheap)
        ways = [_divided(plan, again, carries=True) for again in ({}, cheap, more)]
        carrying = _narrowest(plan, [way for way in ways if any([each.carried for each in way])])
        widest = _widest(plan, found) if saves else of_statements
        if carrying and widest - _widest(plan, carrying) >= LEAST_SAVED:
            return tuple(carrying)
    return tuple(found) if saves else ()


def _narrowest(plan: Plan, ways: Sequence[list[Stretch]]) -> list[Stretch]:
    """The stretches that take the fewest registers; none if no way can keep what it has to."""
    ways = [found for found in ways if _can_keep(plan.graph, found)]
    return min(ways, key=lambda found: _widest(plan, found), default=[])


def _gains_by_carrying(plan: Plan) -> bool:
    """Whether rows are computed by vectors for the sake of reductions that take one after another.

    Where vectors save registers without that, they take it along.
    """
    if plan.sweeps.costs[0] < LEAST_OF_STRETCH * (plan.stages + 1):
        return False
    return not any([has_branches(plan.graph, node) for node in plan.graph])


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
    """Where elements for later stretches are while a thread waits: kept, as loaded, or nowhere."""
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
    return found


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


def _cheap_of_kept(plan: Plan, cheap: Mapping[int, list[Compute]]) -> dict[int, list[Compute]]:
    """What few instructions compute of values that are kept anyway, and the steps that do so.

    These values are kept until nothing reads the result any more. cheap: what `_cheap` gives.
    """
    graph, found, sections = plan.graph, {}, _sections(plan)
    last = _last_read(graph, sections)
    inputs = {i.id for i in (*plan.work.rows, *plan.work.columns)}
    for k, section in enumerate(sections):
        for step in section:
            is_vector = isinstance(step, Compute) and graph[step.id].value.spread
            if not is_vector or graph[step.id].op is Op.RESHAPE or step.id in cheap:
                continue
            if last.get(step.id, -1) <= k or sweep_costs(graph, (step,), ())[0] > MOST_AGAIN:
                continue
            operands = {*_of_elements(graph, step.inputs)} - inputs
            lasting = [id for id in operands if last.get(id, -1) >= last[step.id]]
            if len(lasting) == len(operands) and not operands & (cheap.keys() | found.keys()):
                found[step.id] = [step]
    return found


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


def _carried(graph: Graph, section: Sequence[Step]) -> list[Part]:
    """The reductions of a section that take one vector after the other."""
    plain = [step for step in section if isinstance(step, Reduce) and step.following is None]
    parts = [part for step in plain if not (step.is_pair or step.is_scan) for part in step.parts]
    parts = [part for part in parts if part.kind in PLAIN and part.chain is None]
    keys = {s.id for s in section if isinstance(s, Compute) and s.function is Function.INDEXED}
    parts = [part for part in parts if {*carried_by(graph, part)} - keys]
    return parts if LEAST_CARRIED <= len(parts) <= MOST_CARRIED else []


def carried_by(graph: Graph, part: Part) -> list[int]:
    """The elements that a part reduces, if it reduces elements and not a number of the row."""
    return _of_elements(graph, part.operands(graph))


def _at_once(graph: Graph, section: Sequence[Step], carried: Sequence[Part]) -> list[int]:
    """What the exchange behind a section needs all elements of at once."""
    found: list[int] = []
    for reduce in [step for step in section if isinstance(step, Reduce)]:
        each = zip(reduce.results, reduce.parts, strict=True)
        if left := [(id, part) for id, part in each if part not in carried]:
            results, parts = zip(*left, strict=True)
            found += _read_by(graph, replace(reduce, results=results, parts=parts))
    return found


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


def _last_read(graph: Graph, sections: Sequence[Sequence[Step]]) -> dict[int, int]:
    """For each value that is read, the section that reads it last."""
    each = enumerate(sections)
    return {id: k for k, steps in each for step in steps for id in _read_by(graph, step)}


def _divided(
    plan: Plan, again: Mapping[int, list[Compute]], carries: bool = False
) -> list[Stretch]:
    """All stretches of a held row.

    again: the values that a later stretch computes again, and the steps that do so.
    carries: whether reductions take one vector after the other, where they may.
    """
    graph, sections = plan.graph, _sections(plan)
    inputs = {i.id: i for i in (*plan.work.rows, *plan.work.columns)}
    last = _last_read(graph, sections)
    made: set[int] = set()
    found = []
    for k, section in enumerate(sections):
        carried = _carried(graph, section) if carries else []
        at_once = _at_once(graph, section, carried)
        factors = [s for s in section if isinstance(s, Compute) and s.id in at_once]
        factors = [step for step in factors if step.function is Function.FACTORS]
        own = [s for s in section if isinstance(s, Compute) and graph[s.id].value.spread]
        own = [s for s in own if s not in factors and graph[s.id].op is not Op.RESHAPE]
        stores = [s for s in section if isinstance(s, Store) and s.output.is_row]
        named = {step.id for step in factors}
        at_end = [id for id in at_once if id not in named]
        at_end += [id for step in factors for id in _read_by(graph, step)]
        added = [id for part in carried for id in carried_by(graph, part)]
        read = dict.fromkeys([*(id for s in (*own, *stores) for id in _read_by(graph, s)), *added])
        repeated = [s for id in (*read, *at_end) if id in made for s in again.get(id, ())]
        computes = list(dict.fromkeys((*repeated, *own)))
        read = dict.fromkeys(
            [*(id for s in (*computes, *stores) for id in _read_by(graph, s)), *added]
        )
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
                carried=tuple(carried),
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
    waiting = plan.chunks.bit_length() - 1  # vectors of a reduction that takes them one by one
    of_carried = len(stretch.carried) * waiting / plan.chunks
    return max(at_first, at_last) + of_carried


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

"""Which of a graph's plans is the default: the one that the cost model expects to be the fastest.

The numerics have to serve every number of rows and every alignment. So they are those that take the
least time for many aligned rows and for few, in the geometric mean of both. Of the placements that
these numerics have, the one is taken that takes the least time for as many rows as there are.

The cost model has errors. Where the numerics that were measured to be fast (`preference`) are
expected to take about as long as the best, they are taken, with the placement that was measured.
"""

from __future__ import annotations

from dataclasses import replace

from .cost import cost
from .enumeration import plans_of_work
from .plan import ROWS, Numerics, Plan
from .preference import closest_first
from .reductions import VERY_LONG_N

MANY_WEIGHT = 0.7  # of the logarithm of the time of many rows; that of few rows has the rest
FEW_ROWS = 16
MANY_BYTES = 256 << 20  # of all rows, where they are many
# Numerics that take more than SLOW times as long as others for many rows are not asked how long
# they take for few.
SLOW = 1.25
# Preferred numerics are taken if they are expected to take at most ABOUT times as long as the best.
ABOUT = 1.1
PADDED = 0.04  # Rows that are padded by more than this share of them have no preferred plan.


def choose(plans: list[Plan]) -> Plan:
    """The default among plans of one graph and target."""
    ordered = closest_first(plans)
    if not _has_cost(ordered[0]):
        return ordered[0]
    numerics = _choose_numerics(ordered)
    if numerics == ordered[0].numerics and _has_preference(ordered[0]):
        return ordered[0]
    rows = _typical_rows(ordered[0])
    placed = [plan for plan in ordered if plan.numerics == numerics]
    return min(placed, key=lambda plan: cost(plan, rows).time)


def _choose_numerics(ordered: list[Plan]) -> Numerics:
    """The numerics for any number of rows, of those that these plans have.

    The first plan has the preferred ones. All are judged by the plans that many aligned rows have.
    """
    usual, target = ordered[0].numerics, ordered[0].target
    known = {plan.numerics for plan in ordered}
    if len(known) == 1:
        return usual
    many_aligned = replace(target, align=16, lead=1, broadcast=(), aliases=(), rows=ROWS[-1])
    if target != many_aligned:
        every = plans_of_work(ordered[0].work, many_aligned)
        ordered = [plan for plan in every if plan.numerics in known]
    placed: dict[Numerics, list[Plan]] = {}
    for plan in ordered:
        placed.setdefault(plan.numerics, []).append(plan)
    rows = _typical_rows(ordered[0])
    many = {one: min([cost(p, rows).time for p in plans]) for one, plans in placed.items()}
    longest = SLOW * min(many.values())

    def mean(numerics: Numerics) -> float:
        few = min([cost(plan, FEW_ROWS).time for plan in placed[numerics]])
        return many[numerics] ** MANY_WEIGHT * few ** (1 - MANY_WEIGHT)

    means = {one: mean(one) for one, time in many.items() if time <= longest}
    best = min(means, key=means.__getitem__)
    if usual not in means or not _has_preference(placed[usual][0]):
        return best
    return usual if means[usual] <= ABOUT * means[best] else best


def _has_cost(plan: Plan) -> bool:
    """Whether the cost of a plan is known: not for other GPUs, and not for very long rows."""
    return plan.target.arch.max_cluster > 1 and plan.graph.n <= VERY_LONG_N


def _has_preference(plan: Plan) -> bool:
    """Whether `preference` has measured its kind: rows that are not shifted, and hardly padded."""
    padded = plan.numerics.step * plan.chunks
    return not plan.placement.shifted and padded <= (1 + PADDED) * plan.graph.n


def _typical_rows(plan: Plan) -> int:
    """A number of rows of the kind that a plan is for; many keep the memory busy for a while."""
    least = plan.target.rows
    if least < ROWS[-1]:
        return 2 * least if least > 1 else FEW_ROWS
    return max(least, MANY_BYTES // (plan.graph.n * max(1, plan.work.row_bytes)))

"""Which plans a graph has on a target: numerics and placements that go together.

Numerics come from N, dtypes, the graph and the architecture alone, so that a row's bits never
depend on the batch. Rows are held (`held.py`) or worked on in loops (`loops.py`).
"""

from __future__ import annotations

from dataclasses import replace

from ...frontend.graph import Graph
from ..over_rows import plans_over_rows
from ..plan import ROWS, Plan, Target
from ..work import Work
from .bounds import MIN_CLUSTER_N
from .cost import is_computing
from .held import HeldPlans
from .loops import LoopPlans

FEWEST_APART = 256  # From so many rows on, the CTAs of a row may start apart from each other.


def enumerate_plans(graph: Graph, target: Target) -> list[Plan]:
    """Every sensible plan; none only where reductions need more shared memory than there is."""
    return plans_of_work(Work(graph, target.fastmath), target)


def plans_of_work(work: Work, target: Target) -> list[Plan]:
    """The same, for a graph whose work is known already."""
    enumeration = _Enumeration(work, target)
    if work.graph.over_rows:
        return list(plans_over_rows(work, target, enumeration.held()))
    plans = list(enumeration.held())
    if work.needs_held:  # One CTA may not hold the rows of many inputs
        return plans or list(enumeration.held_in_clusters())
    if work.graph.n >= MIN_CLUSTER_N or not plans:
        plans += enumeration.in_loops()
    return _apart(plans) if _may_start_apart(work, target) else plans


def _may_start_apart(work: Work, target: Target) -> bool:
    """Whether the CTAs of a row do not wait for each other, and rows are so many that it counts."""
    return work.is_map and not target.aliases and target.rows >= FEWEST_APART


def _apart(plans: list[Plan]) -> list[Plan]:
    """The same plans, without clusters if CTAs compute about as long as they move.

    The CTAs of a cluster start together, once there is room for all of them. Until then, the room
    of CTAs that have ended stays empty. If all wait for memory, that costs nothing, and clusters
    are even a little faster. `docs/traps.md` has the figures.
    """
    divided = [plan for plan in plans if plan.ctas > 1]
    if not divided or not is_computing(divided[0], ROWS[-1]):
        return plans
    return [
        replace(plan, placement=replace(plan.placement, apart=True)) if plan.ctas > 1 else plan
        for plan in plans
    ]


class _Enumeration(HeldPlans, LoopPlans):
    """All plans of a graph."""

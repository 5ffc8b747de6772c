"""From a traced graph to the source of its kernel: passes, plans, choice, emission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import LoweringError
from ..frontend.graph import Graph
from .choice import choose, enumerate_plans
from .emit import emit, kernel_name
from .passes import run_passes
from .plan import Plan, Target


@dataclass(frozen=True)
class Lowered:
    """A kernel before it is compiled; `function` is the name of its host function in `source`."""

    traced: Graph
    graph: Graph
    plan: Plan
    source: str
    function: str


def lower(graph: Graph, target: Target, wanted: Mapping[str, object] | None = None) -> Lowered:
    """Run the passes, choose a plan, print it.

    `wanted` keeps only plans with these values of `Numerics` and `Placement` fields. Raises
    LoweringError where no plan is left.
    """
    passed = run_passes(graph)
    plans = enumerate_plans(passed, target)
    if wanted:
        kept = [plan for plan in plans if _has(plan, wanted)]
        if not kept:
            raise LoweringError(f"{graph.name}: no plan has {dict(wanted)} at N = {graph.n}")
        plans = kept
    plan = choose(plans, target)
    return Lowered(graph, passed, plan, emit(plan), kernel_name(plan))


def _has(plan: Plan, wanted: Mapping[str, object]) -> bool:
    def value(name: str) -> object:
        for part in (plan.numerics, plan.placement):
            if hasattr(part, name):
                return getattr(part, name)
        raise LoweringError(
            f"a plan has no {name!r}; it has threads_per_row, cluster_n, num_threads, loader"
        )

    return all(value(name) == want for name, want in wanted.items())

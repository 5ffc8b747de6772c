"""From a traced graph to the source of its kernel: passes, plans, choice, emission."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

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


def lower(
    traced: Graph, graph: Graph, target: Target, wanted: Mapping[str, object] | None = None
) -> Lowered:
    """Choose a plan for `graph`, which is `traced` after the passes, and print it.

    `wanted` keeps only plans with these values of `Numerics` and `Placement` fields. Raises
    LoweringError where no plan is left.
    """
    plans = enumerate_plans(graph, target)
    if wanted:
        plans = [plan for plan in plans if _has(plan, wanted)]
        if not plans:
            raise LoweringError(f"{graph.name}: no plan has {dict(wanted)} at N = {graph.n}")
    plan = choose(plans)
    return Lowered(traced, graph, plan, emit(plan), kernel_name(plan))


def _has(plan: Plan, wanted: Mapping[str, object]) -> bool:
    has = {**asdict(plan.numerics), **asdict(plan.placement)}
    for name in wanted:
        if name not in has:
            raise LoweringError(f"a plan has no {name!r}; it has {', '.join(has)}")
    return all(has[name] == want for name, want in wanted.items())


__all__ = ["Lowered", "choose", "emit", "enumerate_plans", "kernel_name", "lower", "run_passes"]

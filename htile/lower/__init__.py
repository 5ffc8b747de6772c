"""From a traced graph to the source of its kernel: passes, plans, choice, emission."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from itertools import combinations

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
        plans = _matching(graph, target, plans, wanted)
    plan = choose(plans)
    return Lowered(traced, graph, plan, emit(plan), kernel_name(plan))


def _matching(
    graph: Graph, target: Target, plans: list[Plan], wanted: Mapping[str, object]
) -> list[Plan]:
    """The plans that have all that is wanted. Raises LoweringError where there are none."""
    properties = [{**asdict(plan.numerics), **asdict(plan.placement)} for plan in plans]
    for name in wanted:
        if name not in properties[0]:
            raise LoweringError(f"a plan has no {name!r}; it has {', '.join(properties[0])}")

    def having(names: Iterable[str]) -> list[int]:
        return [k for k, p in enumerate(properties) if all(p[n] == wanted[n] for n in names)]

    if found := having(wanted):
        return [plans[k] for k in found]
    sizes = range(1, len(wanted) + 1)
    subsets = (names for size in sizes for names in combinations(wanted, size))
    least = next(names for names in subsets if not having(names))  # what can not go together
    advice = []
    for name in least:
        rest = [other for other in least if other != name]
        there = sorted({properties[k][name] for k in having(rest)})
        given = " and ".join(f"{other}={wanted[other]!r}" for other in rest)
        text = f"{name} can be {' or '.join(map(repr, there))}"
        advice.append(f"with {given}, {text}" if rest else text)
    raise LoweringError(
        f"{graph.name}: no plan has {dict(wanted)} at N = {graph.n} on {target.arch.name}: "
        f"{'; '.join(advice)}"
    )


__all__ = ["Lowered", "choose", "emit", "enumerate_plans", "kernel_name", "lower", "run_passes"]

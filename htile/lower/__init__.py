"""From a traced graph to the source of its kernel: passes, plans, choice, emission.

The modules here make up a plan. The packages `passes`, `choice` and `emission` are the steps around
it, and `products` has all three for functions with matrix products.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import NamedTuple

from ..errors import LoweringError, UnsupportedError
from ..frontend.dtypes import FLOAT8_BY_INSTRUCTION
from ..frontend.graph import Graph
from ..frontend.ops import REDUCTIONS, SCANS, Op
from .choice.default import choose
from .choice.enumeration import enumerate_plans
from .emission.emit import emit
from .emission.names import kernel_name
from .passes.simplify import run_passes
from .plan import Plan, Target, check_names

__all__ = ["Lowered", "choose", "emit", "enumerate_plans", "plans_for", "printed", "run_passes"]

MAX_N = 2**30


class Lowered(NamedTuple):
    """A kernel before it is compiled; `function` is the name of its host function in `source`."""

    traced: Graph
    graph: Graph
    plan: Plan
    source: str
    function: str


def printed(traced: Graph, plan: Plan) -> Lowered:
    """The kernel of a plan, whose graph is `traced` after the passes."""
    return Lowered(traced, plan.graph, plan, emit(plan), kernel_name(plan.graph))


def plans_for(
    graph: Graph, target: Target, wanted: Mapping[str, object] | None = None
) -> list[Plan]:
    """Every sensible plan.

    `wanted` keeps only plans with these values of `Numerics` and `Placement` fields. Raises
    LoweringError if no plan is left, if no plan has room for the rows or reductions, or if the
    architecture does not convert float8. Raises UnsupportedError if scans, or results over all
    rows, need rows in registers and no plan holds them there.
    """
    if graph.n > MAX_N:
        raise LoweringError(
            f"{graph.name}: rows of {graph.n} elements; the limit is 2^30, because columns are "
            "numbered in 32 bits. Reduce parts of a row as rows, and combine what they give"
        )
    float8 = next((n for n in graph if n.value.dtype in FLOAT8_BY_INSTRUCTION), None)
    if float8 and not target.arch.has_float8:
        name = str(float8.value.dtype).removeprefix("torch.")
        message = f"{graph.name}: {target.arch.name} does not convert {name}; sm_89 and later do"
        raise LoweringError(message, float8.loc)
    plans = enumerate_plans(graph, target)
    if not plans and (scan := next((node for node in graph if node.op in SCANS), None)):
        what = f"a {scan.op.value} of rows of {graph.n} elements"
        raise UnsupportedError(
            f"{what}: {target.arch.name} does not hold them in registers. Pass parts of a row as "
            "rows, x.unflatten(-1, (parts, -1)), and add what the parts before have in total",
            scan.loc,
        )
    if not plans and (ranked := next((n for n in graph if n.op is Op.KTHVALUE), None)):
        raise UnsupportedError(
            f"an element by its rank in rows of {graph.n} elements: {target.arch.name} does not "
            "hold them in registers. In longer rows bisection finds one, as in "
            "examples/gallery/top_p.py",
            ranked.loc,
        )
    if not plans and graph.over_rows:
        over = graph.over_rows[0]
        name = "sum" if over.over is Op.SUM else "amax"
        raise UnsupportedError(
            f"{graph.name}: a {over.over.value} over rows of {graph.n} elements, which "
            f"{target.arch.name} does not hold in registers, is not supported yet: return the row "
            f"and reduce it outside, y.flatten(0, -2).{name}(0)",
            graph[over.id].loc,
        )
    if not plans:
        count = sum(node.op in REDUCTIONS for node in graph)
        raise LoweringError(
            f"{graph.name}: {count} reductions need more shared memory than a thread block of "
            f"{target.arch.name} has; compute some of them in a function of their own"
        )
    return _matching(graph, target, plans, wanted) if wanted else plans


def _matching(
    graph: Graph, target: Target, plans: list[Plan], wanted: Mapping[str, object]
) -> list[Plan]:
    """The plans that have all that is wanted. Raises LoweringError where there are none."""
    check_names(wanted)
    properties = [plan.properties() for plan in plans]

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

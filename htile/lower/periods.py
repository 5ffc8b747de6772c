"""Values that repeat along a row, so that a thread computes them for one of its chunks only.

The columns of a group are numbered by `index & (size - 1)`. A value computed from such numbers,
from values per row and from constants repeats after `size` columns. If the chunks of a thread lie
whole periods apart, they all have the same values. The angles of a rotary embedding, for example,
are the same in every head.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .choice.instructions import sweep_costs
from .patterns import Function
from .steps import Compute

if TYPE_CHECKING:
    from .plan import Plan

LEAST = 16  # instructions for an element of all such values; fewer are not worth the text


def once(plan: Plan) -> frozenset[int]:
    """The values that a thread with a held row computes for one chunk, and repeats."""
    return frozenset(step.id for step in _steps(plan))


def instructions_saved(plan: Plan) -> tuple[float, float]:
    """The instructions saved for an element of the row, and how many of these are for MUFU."""
    if not plan.work.periods or not (steps := _steps(plan)):
        return 0.0, 0.0
    costs = sweep_costs(plan.graph, steps, ())
    return tuple(cost * (1 - 1 / plan.chunks) for cost in costs)


def _steps(plan: Plan) -> tuple[Compute, ...]:
    num = plan.numerics
    if num.in_loops or plan.chunks == 1 or not (found := plan.work.periods):
        return ()
    apart = num.vec_size * num.threads_per_row  # columns between the chunks of a thread
    steps = [step for sweep in plan.sweeps.all for step in sweep.computes]
    steps = [s for s in steps if s.id in found and s.function is not Function.COLUMNS]
    steps = tuple([s for s in steps if apart % found[s.id] == 0])
    return steps if sweep_costs(plan.graph, steps, ())[0] >= LEAST else ()


def read_by_others(plan: Plan, ids: frozenset[int]) -> frozenset[int]:
    """Those of these values that are read by something computed for every chunk."""
    graph = plan.graph
    read = {output.id for output in graph.outputs}
    for sweep in plan.sweeps.all:
        read |= {i for step in sweep.computes if step.id not in ids for i in step.inputs}
        read |= {id for reduce in sweep.reduces for id in reduce.operands(graph)}
    return ids & read

"""About how many instructions a thread takes for values that its row has once, beside elements.

Every thread of a row computes them. So they cost the more, the fewer elements each thread has.
"""

from __future__ import annotations

from functools import cache

import torch

from ..frontend.graph import Graph
from ..frontend.ops import Op
from .plan import Plan
from .steps import Compute
from .vectors import WARP
from .work import LEAVES, OP_COSTS, Sweeps

TAKEN = 8  # instructions for what is at an index: its address, the load, and what converts it
STORED = 3  # instructions for a result that a row has once


def value_costs(plan: Plan) -> int:
    """Those of all that is computed and stored once a row, and of the ranks of rows."""
    return _ranks(plan) + _values(plan.sweeps, plan.graph) + _steps(plan.graph, plan.work.before)


def _ranks(plan: Plan) -> int:
    """Those of the rounds in which the threads of a row find ranks."""
    if not plan.work.chains or plan.numerics.in_loops:
        return 0
    num = plan.numerics
    lanes, elements = min(num.threads_per_row, WARP), plan.elements_per_thread
    own = sum([chain.rounds(lanes, elements) for chain in plan.work.chains])
    is_several = num.threads_per_row > WARP or num.cluster_n > 1
    return own + is_several * sum([chain.rounds(WARP, 1) for chain in plan.work.chains])


@cache
def _values(sweeps: Sweeps, graph: Graph) -> int:
    """Those between exchanges and behind them."""
    steps = [step for sweep in sweeps.all for step in (*sweep.computes, *sweep.then)]
    stored = [o for sweep in sweeps.all for o in sweep.stores if not graph[o.id].value.spread]
    return _steps(graph, steps) + STORED * len(stored)


def _steps(graph: Graph, steps) -> int:
    return sum([_step(graph, step) for step in steps if isinstance(step, Compute)])


def _step(graph: Graph, step: Compute) -> int:
    """Those of one value; 64 bits take twice as many. The compiler computes with numbers itself."""
    node = graph[step.id]
    if node.value.spread or node.op is Op.RESHAPE or node.op in LEAVES:
        return 0
    if node.op is Op.TAKE:
        return TAKEN
    keys = (node.op, step.function), step.function, node.op
    found = next((OP_COSTS[key] for key in keys if key in OP_COSTS), (1, 0))[0]
    is_wide = any(graph[id].value.dtype is torch.int64 for id in (node.id, *node.inputs))
    return found * (2 if is_wide else 1)

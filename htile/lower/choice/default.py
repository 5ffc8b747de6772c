"""Which of a graph's plans is the default.

Its numerics are those that the cost model expects to take the least time. They have to serve every
number of rows and every alignment, because bits must not depend on these. So they are judged by
many aligned rows and by few, in the geometric mean of both. Where nothing is reduced all numerics
give the same bits, so few rows may have other numerics than many.

The model has errors. So the numerics that were measured to be fast (`preference`) are taken if they
are expected to take about as long. How much longer they may take depends on whether they were
measured for such functions. The placement is the one that `preference` prefers among those of these
numerics. The model decides only where it tells placements apart: for loops over shifted rows, for
staged columns, for shifted rows of maps with columns, and for aligned held rows of functions unlike
the measured ones. Loops over aligned rows keep the preferred placement: with the one of least
expected time, the three losses of `grpo` took 1.12 to 1.16 times as long (one H200, 2026-11-28).
"""

from __future__ import annotations

from dataclasses import replace

from ...frontend.ops import Op
from ..over_rows import preferred, without_sums
from ..passes.rewrite import rewrite
from ..plan import ONE_KERNEL_N, ROWS, Numerics, Plan, Target
from ..reductions import VERY_LONG_N
from ..work import Work
from .cost import cost, is_computing
from .enumeration import plans_of_work
from .preference import closest_first

# The weight of the logarithm of the time of many rows; that of few rows has the rest. It is larger
# where instructions count: if rows are shifted, or take as long to compute as to move.
MANY_WEIGHT, COUNTING_WEIGHT = 0.7, 0.8
# The same for aligned rows of maps, where few rows have numerics of their own. Among numerics that
# the model expects to be about as fast for many rows, those of less latency are faster: with 0.95
# in place of 1, 30 cells of the fitting half that changed take 0.989 of the time, and with 0.7 68
# cells take 1.001 (one H200, 2026-11-28).
OWN_WEIGHT = 0.95
FEW_ROWS = 16
# A key is a number of `ROWS`. The value is how many rows such a batch is taken to have.
FEW = {1: FEW_ROWS, 64: 128}
SOME_ROWS = 512  # The same, of those in between few and many.
MANY_BYTES = 256 << 20  # of all rows, where they are many
# Numerics that take more than SLOW times as long as others for many rows are not asked how long
# they take for few, unless they are the preferred ones.
SLOW = 1.25
# Preferred numerics are taken if they are expected to take at most ABOUT times as long as the best,
# and if they pad rows by at most PADDED, a share of the row. Rows that are shifted or padded by
# more were not measured. For functions that were not measured, the limit is ALIKE times as long.
ABOUT, PADDED, ALIKE = 1.25, 0.04, 1.02
# Functions were measured that have at most so many rows, columns and results, and that take at most
# so many instructions for an element of a row that is held. Elements of rows and results had 16
# bits or more, so there were no masks. Rows were read to their end, and nothing was read that an
# index chooses.
MEASURED_TENSORS, MEASURED_INSTRUCTIONS, MEASURED_ITEM_BYTES = 2, 12, 2
# Loops over aligned rows have staged columns if they are expected to take at most so many times as
# long as with late ones. The model expects too much of them: of 25 pairs of the ten kernels and the
# fitting half, the 20 that it expects at 1.06 or less are faster, and the other five, which it
# expects at 1.15 or more, are slower (one H200, 2026-11-28).
STAGED = 1.08
# The model decides how shifted maps load one column, and several columns where rows have at most so
# many elements. In longer rows it expects too much of early columns: four functions of two columns
# took 1.06 to 1.12 times as long at 15001 elements (one H200, 2026-12-01).
SEVERAL_COLUMNS_N = 8192
MEASURED_BYTES = 8  # Rows were measured that are accessed in so many bytes or more.


def choose(plans: list[Plan]) -> Plan:
    """The default among plans of one graph and target."""
    if plans[0].numerics.groups:
        return preferred(plans, _usual(plans[0]))
    ordered = closest_first(plans)
    numerics = _choose_numerics(ordered)
    placed = [plan for plan in ordered if plan.numerics == numerics]
    if not _is_modelled(placed[0].target):
        return placed[0]
    rows = _usual_rows(placed[0])
    first = _placed(placed, rows)
    if numerics.in_loops or first.placement.shifted or _is_like_measured(first.work):
        return first
    if first.target.n <= ONE_KERNEL_N:  # Such rows have one kernel for all numbers of rows.
        rows = _many(first)
    best = min(placed, key=lambda plan: cost(plan, rows).time)
    return best if cost(first, rows).time > ALIKE * cost(best, rows).time else first


def _placed(plans: list[Plan], rows: int) -> Plan:
    """The placement that so many rows have, of plans with the same numerics.

    plans: the preferred first.
    """
    first = plans[0]
    is_modelled = first.numerics.in_loops or _has_modelled_columns(first.work)
    if is_modelled and first.placement.shifted:
        return min(plans, key=lambda plan: cost(plan, rows).time)
    if not first.numerics.in_loops:
        return first
    if first.placement.columns == "staged":
        late = [plan for plan in plans if plan.placement.columns == "late"]
        late = [plan for plan in late if _divided(plan) == _divided(first)]
        is_few = first.target.rows in FEW  # for which staged columns of loops were not measured
        if late and (is_few or cost(first, rows).time > STAGED * cost(late[0], rows).time):
            return late[0]
    return first


def _has_modelled_columns(work: Work) -> bool:
    """Whether the model tells apart the ways to load columns, if nothing is reduced."""
    most = 1 if work.graph.n > SEVERAL_COLUMNS_N else len(work.columns)
    return work.is_map and 0 < len(work.columns) <= most


def _divided(plan: Plan) -> tuple[str, int, int]:
    """Where the row of a loop lives, and how its shares are divided over CTAs."""
    return plan.placement.loader, plan.placement.shares, plan.placement.abreast


def _is_modelled(target: Target) -> bool:
    """Whether costs are known. They are not for GPUs without clusters, nor for long rows."""
    return target.arch.max_cluster > 1 and target.n <= VERY_LONG_N


def _usual_rows(plan: Plan) -> int:
    """How many rows a batch is taken to have, of a class of numbers of rows."""
    return FEW.get(plan.target.rows) or (_many(plan) if plan.target.rows == ROWS[-1] else SOME_ROWS)


def _usual(plan: Plan) -> Numerics | None:
    """The numerics of many rows, without the results that are reduced over all of them."""
    graph = without_sums(plan.graph)
    if graph is None:
        return None
    target = replace(plan.target, align=16, lead=1, broadcast=(), aliases=(), rows=ROWS[-1])
    work = Work(rewrite(graph), plan.work.fastmath)
    plans = plans_of_work(work, target)
    return choose(plans).numerics if plans else None


def _choose_numerics(ordered: list[Plan]) -> Numerics:
    """The numerics that the default has, of those of these plans, the preferred first."""
    target, work = ordered[0].target, ordered[0].work
    if not _is_modelled(target):
        return ordered[0].numerics
    # The bits of a map depend on no numerics, so its own leading dimensions may count.
    leading = {} if work.is_map else {"lead": 1, "broadcast": ()}
    many_aligned = replace(target, align=16, aliases=(), rows=ROWS[-1], **leading)
    has_own = work.is_map and target.n > ONE_KERNEL_N  # for each class of numbers of rows
    if has_own and target.rows in FEW:
        return min(ordered, key=lambda plan: cost(plan, FEW[target.rows]).time).numerics
    if not has_own and target != many_aligned:
        known = {plan.numerics for plan in ordered}
        every = plans_of_work(work, many_aligned)
        ordered = closest_first([plan for plan in every if plan.numerics in known])
    if not ordered[0].placement.shifted:  # these numerics were measured before columns were staged
        ordered = [plan for plan in ordered if plan.placement.columns != "staged"]
    usual, rows = ordered[0].numerics, _many(ordered[0])
    placed: dict[Numerics, list[Plan]] = {}
    for plan in ordered:
        placed.setdefault(plan.numerics, []).append(plan)
    many = {num: cost(_placed(plans, rows), rows).time for num, plans in placed.items()}
    longest = SLOW * min(many.values())
    asked = [numerics for numerics, time in many.items() if time <= longest or numerics == usual]
    if has_own:  # rows that are shifted or joined are not few
        weight = 1 if ordered[0].placement.shifted or target.joined > 1 else OWN_WEIGHT
    else:
        quickest = _placed(placed[min(many, key=many.__getitem__)], rows)
        counts = ordered[0].placement.shifted or is_computing(quickest, rows, 1.0)
        weight = COUNTING_WEIGHT if counts else MANY_WEIGHT

    def mean(numerics: Numerics) -> float:
        # Few rows have placements of their own, of which one is about as fast as the best of these.
        few = min([cost(plan, FEW_ROWS).time for plan in placed[numerics]])
        return many[numerics] ** weight * few ** (1 - weight)

    means = {numerics: mean(numerics) for numerics in asked}
    best = min(means, key=means.__getitem__)
    about = ABOUT if _is_like_measured(work) else ALIKE
    is_about_as_fast = means[usual] <= about * means[best]
    return usual if is_about_as_fast and _has_measured_rows(placed[usual][0]) else best


def _is_like_measured(work: Work) -> bool:
    """Whether `preference` was measured on such functions."""
    tensors = work.rows, work.columns, work.writes
    is_small = max(map(len, tensors)) <= MEASURED_TENSORS and not work.chains
    reads_chosen = any(node.op in (Op.TAKE, Op.GATHER, Op.LOOKUP) for node in work.graph)
    sizes = [each.dtype.itemsize for each in (*work.rows, *work.writes)]
    is_whole = not (reads_chosen or work.ends) and min(sizes, default=0) >= MEASURED_ITEM_BYTES
    return is_small and is_whole and work.held.costs[0] <= MEASURED_INSTRUCTIONS


def _has_measured_rows(plan: Plan) -> bool:
    """Whether it was measured on such rows."""
    padded = plan.numerics.step * plan.chunks
    is_short = plan.numerics.vec_size * plan.work.narrowest < MEASURED_BYTES
    return not (plan.placement.shifted or is_short) and padded <= (1 + PADDED) * plan.graph.n


def _many(plan: Plan) -> int:
    """How many rows fill a GPU, and keep its memory busy for a while."""
    return max(ROWS[-1], MANY_BYTES // (plan.graph.n * max(1, plan.work.row_bytes)))

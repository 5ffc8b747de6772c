"""About how many registers ptxas gives a thread: it decides how many thread blocks are resident.

The constants are fitted to 695 compiled plans of the fitting half. The numbers of a tuple are
registers: of any thread, and for each element of what its comment names.
"""

from __future__ import annotations

from ...build.arch import MAX_REGISTERS
from ...frontend.graph import Input
from ..plan import Plan
from ..steps import Home
from ..stretches import may_read_by_vectors

HELD = (15, 0.65, 0.22, 0.04, 0.3, 0.1)  # loaded, held, instruction, column, result
# An element takes so many registers fewer for each of several columns that are read by vectors. It
# is fitted to 102 compiled plans with staged columns, of which 13 have several.
READ_BY_VECTORS = 0.1
MOST_COUNTED = 50  # More instructions than these need no more registers.
# A held row that is shifted has both pieces of each vector on its way at once. They take twice the
# registers of the row, beside BESIDE_PIECES others of the thread. They are counted where that
# leaves room for FEW_BLOCKS thread blocks or fewer, because one block less is a long wait there.
# Counted everywhere, 29 of 224 cells of the fitting half change and take .99 of the time, in place
# of 7 that take .95 (`docs/traps.md`).
BESIDE_PIECES, FEW_BLOCKS = 13, 3
# A thread of a loop works on one chunk at a time, or on several (`unroll`), up to MOST_AT_ONCE.
LOOPED_SHARED = (20, 0.3, 0.6)  # word of a chunk that is worked on; column that is prefetched
LOOPED_REREAD = (24, 0.32, 0.46, 1.3)  # the same; word; what is prefetched
UNROLLED_SHARED = (15, 0.83, 0.2)  # word; what is prefetched
UNROLLED_REREAD = (12, 0.6, 1.0)  # word; what is prefetched
MOST_AT_ONCE = 4
# A held row may take this many times the registers that are spared for it. The compiler finds room.
SQUEEZED = 1.25


def estimated_registers(plan: Plan) -> float:
    """About how many registers a thread would use if it could have any number."""
    place, sweeps = plan.placement, plan.sweeps
    if not plan.numerics.in_loops:
        needed = _held_registers(plan)
        spared = allowed(plan, place.blocks) if place.blocks else MAX_REGISTERS
        needed = min(needed, spared) if needed <= SQUEEZED * spared else needed
        return max(needed, _of_pieces(plan)) if place.shifted else needed
    vec, words, ahead = plan.numerics.vec_size, sweeps.words, max(1, place.prefetch)
    of_columns = plan.work.column_bytes / 4
    loaded = plan.work.row_bytes / 4 + of_columns
    at_once = words * min(MOST_AT_ONCE, place.unroll)
    if plan.rows_home is Home.REREAD:
        if plan.is_unrolled:
            fixed, of_word, of_ahead = UNROLLED_REREAD
            needed = fixed + vec * (of_word * words + of_ahead * loaded * ahead)
        else:
            fixed, of_chunk, of_word, of_ahead = LOOPED_REREAD
            needed = of_chunk * at_once + of_word * words + of_ahead * loaded * ahead
            needed = fixed + vec * needed
    elif plan.is_unrolled:
        fixed, of_word, of_ahead = UNROLLED_SHARED
        needed = fixed + vec * (of_word * words + of_ahead * loaded * place.prefetch)
        if plan.rows_home is Home.PACKED:
            needed += plan.turns * plan.elements_per_thread * plan.work.row_bytes / 4
    else:
        fixed, of_chunk, of_ahead = LOOPED_SHARED
        needed = fixed + vec * (of_chunk * at_once + of_ahead * of_columns * ahead)
    return min(needed, allowed(plan, place.blocks)) if place.blocks > 1 else needed


def _held_registers(plan: Plan) -> float:
    """Registers of a thread that holds its elements of a row."""
    work, sweeps, is_late = plan.work, plan.sweeps, plan.placement.columns != "early"
    fixed, of_loaded, of_held, of_instruction, of_column, of_result = HELD
    least = min(1.0, 1 / plan.numerics.vec_size)  # two elements of 16 bits take one register
    words = 0.0
    for i in (*work.rows, *(() if is_late else work.columns)):
        words += max(i.dtype.itemsize / 4, least)
    if work.lookups:  # Rows of tables are converted to float32 when they are loaded.
        words += sum([max(1.0, i.dtype.itemsize / 4) for i in looked_up(plan)])
    each = of_loaded * words + of_held * work.held_words(sweeps, is_late)
    each += of_instruction * min(MOST_COUNTED, sweeps.costs[0] - sweeps.counting_costs)
    if len(work.columns) > 1 and may_read_by_vectors(plan):
        of_column -= READ_BY_VECTORS
    each += of_column * len(work.columns) + of_result * len(work.writes)
    return fixed + plan.elements_per_thread * each


def _of_pieces(plan: Plan) -> float:
    """The least registers of a thread whose held rows are shifted; 0 where many blocks fit."""
    words = sum([i.dtype.itemsize / 4 for i in plan.work.rows])
    needed = BESIDE_PIECES + 2 * words * plan.elements_per_thread
    return needed if needed > allowed(plan, FEW_BLOCKS + 1) else 0.0


def allowed(plan: Plan, blocks: int) -> int:
    """The most registers of a thread, if so many thread blocks are to fit."""
    return min(MAX_REGISTERS, plan.target.arch.registers // (plan.placement.num_threads * blocks))


def looked_up(plan: Plan) -> list[Input]:
    """The tables whose rows are loaded, each as often as a row of it is."""
    work = plan.work
    if plan.rows_home is Home.REGISTERS:
        return [work.source(node) for node in work.lookups]
    computed = [step.id for loop in plan.sweeps.loops for step in loop.computes]
    return [work.source(node) for node in work.lookups for id in computed if id == node.id]

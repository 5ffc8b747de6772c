"""What it takes to move shifted rows (`htile/copy/shifted.py`), beside what other rows take."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from ..frontend.dynamic import ACCESS_BYTES
from ..frontend.graph import Output
from .steps import Home
from .stretches import STAGED_N, is_light, may_read_by_vectors
from .work import Work

if TYPE_CHECKING:
    from .plan import Plan

# Instructions for an element of a shifted row that is loaded, and for one that is stored, by where
# the row lives; and of a thread, for each row that is loaded or stored. From global memory a loop
# loads single vectors, whose words are selected. Elsewhere warps branch on the shift. They were
# counted in the machine code (SASS) of sm_90a.
EACH = {
    Home.REGISTERS: (0.55, 0.9), Home.PACKED: (0.55, 0.9), Home.SHARED: (0.7, 1.2),
    Home.REREAD: (2.1, 2.8),
}  # fmt: skip
OF_THREAD = 17, 25
# How many vectors of a thread are waited for together, if loops find rows on chip.
ON_THEIR_WAY = {Home.SHARED: 3, Home.PACKED: 5}
# The most bytes of a row in registers that a CTA stages, if vectors have 16.
STAGED_BYTES = 48 << 10
# How many times as long shifted rows take as the parts of their time say: in loops by where the
# rows live, and for held rows beside columns that are loaded late. Chosen on 78 cells of long odd
# rows of the fitting half (one H200, 2026-11-28): the regret is 1.042 with these, and 1.084
# without.
LONGER_LOOPS, LONGER_LATE = {Home.SHARED: 1.3, Home.PACKED: 1.2, Home.REREAD: 1.1}, 1.1
# The same for long held rows beside staged columns: where a thread has too few elements to read
# them by vectors, and where it reads several columns so. Chosen on 123 timings of norms of odd
# rows: the ten kernels, the fitting half and two other functions (H200, 2026-11-28). They are for
# what most of these have: at most MEASURED_ROWS rows, of 16 bits, and light elements.
LONGER_FEW, BY_VECTORS, MEASURED_ROWS = 1.1, 0.96, 2


def longer(plan: Plan) -> float:
    """How many times as long a plan of shifted rows takes as the parts of its time say."""
    if plan.rows_home is not Home.REGISTERS:
        return LONGER_LOOPS[plan.rows_home]
    if plan.placement.columns == "staged":
        return _longer_staged(plan)
    waits = plan.late_columns and plan.placement.columns == "late" and plan.rows_per_block == 1
    return LONGER_LATE if waits else 1.0


def _longer_staged(plan: Plan) -> float:
    """The same for a plan with staged columns."""
    work = plan.work
    is_measured = plan.graph.n > STAGED_N and len(work.rows) <= MEASURED_ROWS
    if not is_measured or work.is_wide or not is_light(plan):
        return 1.0
    if not may_read_by_vectors(plan):
        return LONGER_FEW
    return BY_VECTORS if len(work.columns) > 1 else 1.0


def shifting(work: Work, home: Home) -> tuple[float, int]:
    """The additional instructions of shifted rows: for each element, and of a thread.

    home: where the rows live.
    """
    loads, stores = len(work.rows), len(work.writes)
    of_thread = OF_THREAD[0] * loads + OF_THREAD[1] * stores
    if home is Home.REREAD:
        loads = sum([len(loop.rows) for loop in work.loops.loops])
    each_load, each_store = EACH[home]
    return each_load * loads + each_store * stores, of_thread


def staged_bytes(results: Iterable[Output], vec_size: int, vectors: int, threads: int) -> int:
    """Bytes of shared memory through which shifted rows are stored from registers.

    vectors: how many of a result each thread has.

    There is memory for each number of bytes that a vector of a result has.
    """
    staged = min(vectors, max(1, STAGED_BYTES // (threads * ACCESS_BYTES)))
    return staged * threads * vec_size * sum({o.dtype.itemsize for o in results})

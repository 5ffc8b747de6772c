"""What it takes to move shifted rows (`htile/copy/shifted.py`), beside what other rows take."""

from __future__ import annotations

from ..frontend.dynamic import ACCESS_BYTES
from .steps import Home
from .work import Work

# Instructions for an element of a shifted row that is loaded, and for one that is stored, by where
# the row lives; and of a thread, for each row that is loaded or stored. From global memory a loop
# loads single vectors, whose words are selected. Elsewhere warps branch on the shift. They were
# counted in the machine code (SASS) of sm_90a.
EACH = {
    Home.REGISTERS: (0.55, 0.9), Home.PACKED: (0.55, 0.9), Home.SHARED: (0.7, 1.2),
    Home.REREAD: (2.1, 2.8),
}  # fmt: skip
OF_THREAD = 17, 25
# Vectors of a thread that are waited for together, if loops find rows on chip.
ON_THEIR_WAY = {Home.SHARED: 3, Home.PACKED: 5}
# A CTA stages so many bytes of a row at most that it has in registers, if vectors have 16.
STAGED_BYTES = 48 << 10


def shifting(work: Work, home: Home) -> tuple[float, int]:
    """Instructions more if rows are shifted: for each element, and of a thread.

    home: where the rows live.
    """
    loads, stores = len(work.rows), len(work.writes)
    of_thread = OF_THREAD[0] * loads + OF_THREAD[1] * stores
    if home is Home.REREAD:
        loads = sum([len(loop.rows) for loop in work.loops.loops])
    each_load, each_store = EACH[home]
    return each_load * loads + each_store * stores, of_thread


def staged_bytes(work: Work, vec_size: int, vectors: int, threads: int) -> int:
    """Bytes of shared memory through which shifted rows are stored that threads have in registers.

    vectors: how many each thread has.

    There is memory for each number of bytes that a vector of a result has.
    """
    staged = min(vectors, max(1, STAGED_BYTES // (threads * ACCESS_BYTES)))
    return staged * threads * vec_size * sum({o.dtype.itemsize for o in work.writes})

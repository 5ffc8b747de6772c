"""From what a graph asks of a kernel to the steps of one plan: the only place that lists them."""

from __future__ import annotations

from collections.abc import Sequence

from ..frontend.graph import Input, Role
from ..frontend.ops import Op
from .patterns import ancestors
from .reductions import Reduce
from .steps import ChunkLoop, Fence, Home, Load, OwnMaxima, Prefetch, Reload, Step, Store
from .sweeps import Sweep, Sweeps
from .work import Work


def list_steps(
    work: Work,
    sweeps: Sweeps,
    rows: Home,
    late_columns: Sequence[Input] = (),
    in_place: bool = False,
    waits: bool = False,
    prefetched: bool = True,
    staged: Sequence[Input] = (),
) -> tuple[Step, ...]:
    """The steps of a kernel whose rows live at `rows` between the exchanges.

    In REGISTERS a row is held. In SHARED or global memory (REREAD) it is worked on in loops over
    its chunks, each of which brings what it needs of the row and of the columns again.

    late_columns: of a held row, the columns that are loaded by the sweep that first reads them, and
        not while the rows are in flight. They take no registers before.
    in_place: an output is the memory of an input, so a held row is computed whole before anything
        is stored. A loop needs no such care: a thread stores a chunk after it has read all of it,
        and for the last time.
    waits: all threads of a row read one element of an input, and one of them will overwrite it,
        because an output is the same memory.
    prefetched: whether what a loop reads from global memory is loaded ahead of its use.
    staged: the columns that loops find in shared memory.
    """
    held = rows is Home.REGISTERS
    late = late_columns if held else work.columns
    loads = [
        Load(i, rows if i.role is Role.ROW else Home.REGISTERS)
        for i in work.loaded
        if i not in late
    ]
    read = ancestors(work.graph, [work.graph[i.end] for i in work.rows if i.end is not None])
    first = [load for load in loads if load.input.id in read]  # they tell where rows end
    steps: list[Step] = [*first, *work.ends, *(load for load in loads if load not in first)]
    early = work.early if held else work.early_in_loops
    if early and prefetched and not held:  # they wait for an index that is loaded
        steps += [Prefetch(reads) for sweep in sweeps.loops[:1] if (reads := sweep.reads(rows))]
    steps += early
    takes = any(work.graph[step.id].op is Op.TAKE for step in early)
    if waits or (in_place and takes):  # tables are no memory of results
        steps.append(Fence())
    for sweep in _stored_at_the_end(sweeps.all) if held and in_place else sweeps.all:
        body: list[Step] = [] if held or not sweep.rows else [Reload(sweep.rows, rows)]
        body += [Load(i) for i in sweep.columns if i in late]
        body += [OwnMaxima(part) for part in sweep.parts if part.maxima]
        body += [*sweep.computes, *map(Store, sweep.stores)]
        if sweep.is_loop:
            backwards = not sweep.parts and rows is Home.REREAD and sweep is not sweeps.loops[0]
            padding = _padding(sweep, rows)
            reads = tuple([i for i in sweep.reads(rows) if i not in staged])
            body = [ChunkLoop(tuple(body), sweep.parts, backwards, padding, reads)]
            waits = [k for k, s in enumerate(steps) if isinstance(s, Reduce) and s.exchanges]
            loops = [k for k, s in enumerate(steps) if isinstance(s, ChunkLoop)]
            if prefetched and reads and waits and waits[-1] > loops[-1]:
                steps.insert(waits[-1], Prefetch(reads))  # they start to load before the exchange
        steps += [*body, *sweep.then]
    return tuple(steps)


def _stored_at_the_end(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """The sweeps of a held row, with all that is computed for results before the first store."""
    last = [sweep for sweep in sweeps if sweep.stores]
    computes = {step.id: step for sweep in last for step in sweep.computes}
    whole = Sweep(
        tuple(computes[id] for id in sorted(computes)),
        columns=tuple(sorted((i for sweep in last for i in sweep.columns), key=lambda i: i.id)),
        stores=tuple(output for sweep in last for output in sweep.stores),
    )
    return [*(sweep for sweep in sweeps if not sweep.stores), whole]


def _padding(sweep: Sweep, rows: Home) -> float:
    """What a row holds behind its end where a loop reads it from global memory.

    If the loop reduces that row and does nothing else, it is the identity, so that no select is
    needed.
    """
    is_alone = len(sweep.parts) == 1 and not sweep.computes and not sweep.stores
    if rows is not Home.REREAD or not is_alone or not sweep.rows:
        return 0.0
    return sweep.parts[0].kind.identity if sweep.rows[0].dtype.is_floating_point else 0.0

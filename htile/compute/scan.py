"""Scans of a row: each element combined with all that come before it.

A thread scans each of its vectors, and the lanes of a warp scan the totals of these vectors, chunk
by chunk, by shuffles. Then the warps of a row exchange what they have of each chunk, behind one
barrier for all chunks (`htile/compute/exchange.py`), and the lanes of each warp scan those words,
in the order of the columns. So every element is combined with what comes before its warp, its lane
and its vector.

Nothing that lies behind an element counts in it, so padding behind the end of a row never does.

The order of every sum depends on four numbers alone: how many elements a vector has, how many
vectors a thread, how many threads a row, and how many CTAs.
"""

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric

from htile.compute.exchange import exchange, from_word, slots_of, to_word
from htile.compute.operands import Vector, make_vector, select
from htile.compute.reduce import ADD, MUL, combine, identity, warp_reduce

WARP = 32  # lanes


def lane_scan(value: Numeric, op: cute.ReductionOp, lane: Int32, lanes: int) -> Numeric:
    """What each lane of a group has, combined with what the lanes before it have.

    lanes: how many lanes a group has, a power of two. lane: which of its group this is.
    """
    step = 1
    while step < lanes:
        before = cute.arch.shuffle_sync_up(value, step)
        value = select(lane >= step, combine(op, before, value), value)
        step *= 2
    return value


def _lane_before(value: Numeric, first: Numeric | float, lane: Int32, lanes: int) -> Numeric:
    """What the lane before this one has; `first` in the first lane of a group."""
    if lanes == 1:
        return type(value)(first)
    return select(lane > 0, cute.arch.shuffle_sync_up(value, 1), first)


def _last_lane(value: Numeric, lanes: int) -> Numeric:
    """What the last lane of this lane's group has."""
    if lanes == 1:
        return value
    segments = (WARP - lanes) << 8 | (WARP - 1)
    return cute.arch.shuffle_sync(value, lanes - 1, mask_and_clamp=segments)


def row_scan(
    x: Vector,
    op: cute.ReductionOp,
    vec_size: int,
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    share: int | Int32 = 0,
) -> Vector:
    """Each element combined with all before it in the row, in the order of the columns.

    x: what a thread has of the row: vectors of `vec_size` neighbouring elements, each of a chunk.
        It is of Float32, Int32 or Int64; TypeError is raised for others.
    op: ADD or MUL.
    threads_per_row: how many threads of a CTA work on a share of the row.
    reduction_buffer: of shape (rows, (warps_per_row, cluster_n), slots), with a slot for each
        vector of a thread. It is not needed where one warp has the row.
    mbar_ptr, phase: as for `htile.compute.reduce.cluster_reduce`.
    share: which share of the row the CTA has. Those of lower numbers come before it.
    """
    if x.dtype not in (Float32, Int32, Int64):
        raise TypeError(f"row_scan takes Float32, Int32 and Int64, not {x.dtype}")
    if op not in (ADD, MUL):
        raise ValueError(f"row_scan takes ADD and MUL, not {op}")
    elements = [x[i] for i in range(cute.size(x.shape))]
    vectors = [elements[i : i + vec_size] for i in range(0, len(elements), vec_size)]
    for vector in vectors:
        for i in range(1, vec_size):
            vector[i] = combine(op, vector[i - 1], vector[i])
    lanes = min(threads_per_row, WARP)
    lane = cute.arch.lane_idx() % lanes
    nothing = x.dtype(identity(op, x.dtype))
    upto = [lane_scan(vector[-1], op, lane, lanes) for vector in vectors]
    before = [_lane_before(value, nothing, lane, lanes) for value in upto]
    crosses = reduction_buffer is not None
    totals = [_last_lane(value, lanes) for value in (upto if crosses else upto[:-1])]
    if crosses:
        before_warp = _before_warps(totals, op, reduction_buffer, mbar_ptr, phase, share)
    else:
        before_warp = _before_chunks(totals, op)
    for k, vector in enumerate(vectors):
        first = before[k]
        if before_warp[k] is not None:
            first = combine(op, before_warp[k], first)
        vector[:] = [combine(op, first, element) for element in vector]
    return make_vector([element for vector in vectors for element in vector], x.shape, x.dtype)


def _before_chunks(totals: list[Numeric], op: cute.ReductionOp) -> list[Numeric | None]:
    """What comes before each chunk, from the totals of those before the last; None of the first."""
    before = [None]
    for total in totals:
        before.append(total if before[-1] is None else combine(op, before[-1], total))
    return before


def _before_warps(
    totals: list[Numeric],
    op: cute.ReductionOp,
    buffer: cute.Tensor,
    mbar_ptr: cute.Pointer | None,
    phase: int | Int32,
    share: int | Int32,
) -> list[Numeric]:
    """For each chunk what comes before this warp's part of it, of what all warps have in total.

    The lanes of a warp have the words of its share in the order of the columns: those of the first
    chunk, warp after warp, then those of the next. The warps count as a power of two, so that the
    words of a chunk lie in one round of at most 32 of them.
    """
    dtype, chunks = type(totals[0]), len(totals)
    slots = slots_of(buffer, chunks)
    words = tuple((to_word(total, buffer.element_type),) for total in totals)
    exchange(words, slots, mbar_ptr, phase, abreast=1)
    warps, shares = buffer.shape[1]
    row, warp = cute.arch.warp_idx() // warps, cute.arch.warp_idx() % warps
    lane = cute.arch.lane_idx()
    nothing = dtype(identity(op, dtype))
    places = 1 << (warps - 1).bit_length()
    carried = None if shares == 1 else _before_share(buffer, dtype, op, row, share, chunks)
    found, last = [], chunks * places
    for start in range(0, last, WARP):
        chunk, of_chunk = (start + lane) // places, lane % places
        is_there = None
        if start + WARP > last:
            is_there = chunk < chunks
        if places > warps:
            is_warp = of_chunk < warps
            is_there = is_warp if is_there is None else is_there & is_warp
        if is_there is not None:
            chunk, of_chunk = select(is_there, chunk, 0), select(is_there, of_chunk, 0)
        value = from_word(buffer[row, (of_chunk, share), chunk], dtype)
        if is_there is not None:
            value = select(is_there, value, nothing)
        width = min(WARP, 1 << (last - start - 1).bit_length())
        upto = lane_scan(value, op, lane, width)
        before = _lane_before(upto, nothing, lane, WARP)
        found.append(before if carried is None else combine(op, carried, before))
        if start + WARP < last:
            total = _last_lane(upto, WARP)
            carried = total if carried is None else combine(op, carried, total)
    return [
        cute.arch.shuffle_sync(found[k * places // WARP], k * places % WARP + warp)
        for k in range(chunks)
    ]


def _before_share(
    buffer: cute.Tensor,
    dtype: type[Numeric],
    op: cute.ReductionOp,
    row: Int32,
    share: Int32,
    chunks: int,
) -> Numeric:
    """What all shares before this one have in total, in every lane."""
    warps, shares = buffer.shape[1]
    lane = cute.arch.lane_idx()
    nothing = dtype(identity(op, dtype))
    of_share = warps * chunks
    found = nothing
    for start in range(0, (shares - 1) * of_share, WARP):  # the last share comes before none
        place = start + lane
        of = place // of_share
        is_before = of < share
        of, inside = select(is_before, of, 0), place % of_share
        word = buffer[row, (inside % warps, of), inside // warps]
        found = combine(op, found, select(is_before, from_word(word, dtype), nothing))
    return warp_reduce(found, op, WARP)

"""Scans of a row: each element combined with all that come before it.

A thread scans each of its vectors, and the lanes of a warp scan the totals of these vectors, chunk
by chunk, by shuffles. Then the warps of a row exchange what they have of each chunk, behind one
barrier for all chunks (`htile/compute/exchange.py`), and the lanes of each warp scan those words,
in the order of the columns. So every element is combined with what comes before its warp, its lane
and its vector.

Nothing that lies behind an element counts in it, so padding behind the end of a row never does.

A scan from the end is the same with the columns counted from the end: elements, lanes, chunks,
warps and shares are taken in the opposite order. Padding comes first there, and has to be the
identity.

The order of every sum depends on four numbers alone: how many elements a vector has, how many
vectors a thread, how many threads a row, and how many CTAs.
"""

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric

from htile.compute.exchange import exchange, from_word, slots_of, to_word
from htile.compute.log_add import LOGADD
from htile.compute.operands import Vector, make_vector, select
from htile.compute.reduce import ADD, MAX, MIN, MUL, combine, identity, warp_reduce
from htile.utils import WARP, Static


def lane_scan(
    value: Numeric, op: cute.ReductionOp, lane: Int32, lanes: int, from_end: bool = False
) -> Numeric:
    """What each lane of a group has, combined with what the lanes before it have.

    lanes: how many lanes a group has, a power of two. lane: which of its group this is.
    from_end: combined with what the lanes behind it have.
    """
    step = 1
    while step < lanes:
        before, is_there = _lane_apart(value, step, lane, lanes, from_end)
        value = select(is_there, combine(op, before, value), value)
        step *= 2
    return value


def _lane_apart(
    value: Numeric, step: int, lane: Int32, lanes: int, from_end: bool
) -> tuple[Numeric, Boolean]:
    """What the lane has that is `step` lanes before this one, and whether its group has such a one.

    from_end: of the lane that is so many behind it.
    """
    if from_end:
        return cute.arch.shuffle_sync_down(value, step), lane < lanes - step
    return cute.arch.shuffle_sync_up(value, step), lane >= step


def _lane_before(
    value: Numeric, first: Numeric | float, lane: Int32, lanes: int, from_end: bool = False
) -> Numeric:
    """What the lane before this one has, or behind it; `first` where the group has none there."""
    if lanes == 1:
        return type(value)(first)
    before, is_there = _lane_apart(value, 1, lane, lanes, from_end)
    return select(is_there, before, first)


def last_lane(value: Numeric, lanes: int, from_end: bool = False) -> Numeric:
    """What the last lane of this lane's group has, or the first one, which is last from the end."""
    if lanes == 1:
        return value
    segments = (WARP - lanes) << 8 | (WARP - 1)
    return cute.arch.shuffle_sync(value, 0 if from_end else lanes - 1, mask_and_clamp=segments)


def _counted(place: int | Int32, count: int, from_end: bool) -> int | Int32:
    """A place among so many, counted from the first one or from the last one."""
    return count - 1 - place if from_end else place


def row_scan(
    x,
    op,
    vec_size: int,
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    share: int | Int32 = 0,
    from_end=False,
):
    """Each element combined with all before it in the row, in the order of the columns.

    x: what a thread has of the row: vectors of `vec_size` neighbouring elements, each of a chunk.
        It is of Float32, Int32 or Int64; TypeError is raised for others. Or a tuple of such.
    op: ADD, MUL, MAX, MIN or, of Float32, LOGADD; a tuple with one for each of `x`, if that is a
        tuple. ValueError is raised for others.
    threads_per_row: how many threads of a CTA work on a share of the row.
    reduction_buffer: of shape (rows, (warps_per_row, cluster_n), slots), with a slot for each
        vector of a thread, for one value of `x` after the other. It is not needed where one warp
        has the row.
    mbar_ptr, phase: as for `htile.compute.reduce.cluster_reduce`.
    share: which share of the row the CTA has. Those of lower numbers come before it.
    from_end: whether each element is combined with all behind it; a tuple as `op`. What lies behind
        the end of the row holds the identity there.
    """
    if not isinstance(x, tuple):
        args = threads_per_row, reduction_buffer, mbar_ptr, phase, share
        return row_scan((x,), (op,), vec_size, *args, (from_end,))[0]
    from_end = from_end or (False,) * len(x)
    for value, each in zip(x, op, strict=True):
        if value.dtype not in (Float32, Int32, Int64):
            raise TypeError(f"row_scan takes Float32, Int32 and Int64, not {value.dtype}")
        if each not in (ADD, MUL, MAX, MIN, LOGADD):
            raise ValueError(f"row_scan takes ADD, MUL, MAX, MIN and LOGADD, not {each}")
        if each is LOGADD and value.dtype is not Float32:
            raise ValueError(f"row_scan takes LOGADD of Float32, not of {value.dtype}")
    lanes = min(threads_per_row, WARP)
    parts = [_OfWarp(*each, vec_size, lanes) for each in zip(x, op, from_end, strict=True)]
    if reduction_buffer is None:
        before = [_before_chunks(part.totals[:-1], part.op) for part in parts]
    else:
        totals = [part.totals for part in parts]
        _exchange(totals, reduction_buffer, mbar_ptr, phase)
        before = [
            _before_warps(part, reduction_buffer, k * len(part.totals), share)
            for k, part in enumerate(parts)
        ]
    return tuple(part.behind(each) for part, each in zip(parts, before, strict=True))


class _OfWarp(Static):
    """What the lanes of a warp that work on one row have scanned of a value.

    totals: what these lanes have of each chunk in total. From the end, the last chunk is first.
    """

    def __init__(self, x: Vector, op: cute.ReductionOp, from_end: bool, vec_size: int, lanes: int):
        self.shape, self.dtype, self.op, self.from_end = x.shape, x.dtype, op, from_end
        elements = self._in_order([x[i] for i in range(cute.size(x.shape))])
        self.vectors = [elements[i : i + vec_size] for i in range(0, len(elements), vec_size)]
        for vector in self.vectors:
            for i in range(1, vec_size):
                vector[i] = combine(op, vector[i - 1], vector[i])
        lane = cute.arch.lane_idx() % lanes
        nothing = x.dtype(identity(op, x.dtype))
        upto = [lane_scan(vector[-1], op, lane, lanes, from_end) for vector in self.vectors]
        self.before = [_lane_before(value, nothing, lane, lanes, from_end) for value in upto]
        self.totals = [last_lane(value, lanes, from_end) for value in upto]

    def _in_order(self, elements: list[Numeric]) -> list[Numeric]:
        """The elements of a thread in the order of the scan, and those of a scan in their own."""
        return elements[::-1] if self.from_end else elements

    def behind(self, before: list[Numeric | None]) -> Vector:
        """Each element combined with what its warp has before it, and with that before the warp.

        before: the latter for each chunk; None if there is nothing.
        """
        found = []
        for vector, in_warp, of_others in zip(self.vectors, self.before, before, strict=True):
            first = in_warp if of_others is None else combine(self.op, of_others, in_warp)
            found += [combine(self.op, first, element) for element in vector]
        return make_vector(self._in_order(found), self.shape, self.dtype)


def _exchange(
    totals: list[list[Numeric]],
    buffer: cute.Tensor,
    mbar_ptr: cute.Pointer | None,
    phase: int | Int32,
) -> None:
    """Bring the totals of each warp, of each value and chunk, to all CTAs of the row."""
    words = tuple((to_word(total, buffer.element_type),) for each in totals for total in each)
    exchange(words, slots_of(buffer, len(words)), mbar_ptr, phase, abreast=1)


def _before_chunks(totals: list[Numeric], op: cute.ReductionOp) -> list[Numeric | None]:
    """What comes before each chunk in a warp, from the totals of all but the last one."""
    before = [None]
    for total in totals:
        before.append(total if before[-1] is None else combine(op, before[-1], total))
    return before


def _before_warps(
    part: _OfWarp, buffer: cute.Tensor, slot: int, share: int | Int32
) -> list[Numeric]:
    """For each chunk what comes before this warp's part of it, of what all warps have in total.

    The lanes of a warp have the words of its share in the order of the columns: those of the first
    chunk, warp after warp, then those of the next. The warps count as a power of two, so that the
    words of a chunk lie in one round of at most 32 of them.

    slot: that of the first chunk.
    """
    op, from_end, chunks = part.op, part.from_end, len(part.totals)
    dtype = type(part.totals[0])
    warps, shares = buffer.shape[1]
    row, warp = cute.arch.warp_idx() // warps, cute.arch.warp_idx() % warps
    lane = cute.arch.lane_idx()
    nothing = dtype(identity(op, dtype))
    places = 1 << (warps - 1).bit_length()
    carried = None
    if shares > 1:
        carried = _before_share(part, buffer, slot, row, share)
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
        of_chunk = _counted(of_chunk, warps, from_end)
        value = from_word(buffer[row, (of_chunk, share), slot + chunk], dtype)
        if is_there is not None:
            value = select(is_there, value, nothing)
        width = min(WARP, 1 << (last - start - 1).bit_length())
        upto = lane_scan(value, op, lane, width)
        before = _lane_before(upto, nothing, lane, WARP)
        found.append(before if carried is None else combine(op, carried, before))
        if start + WARP < last:
            total = last_lane(upto, WARP)
            carried = total if carried is None else combine(op, carried, total)
    warp = _counted(warp, warps, from_end)
    return [
        cute.arch.shuffle_sync(found[k * places // WARP], k * places % WARP + warp)
        for k in range(chunks)
    ]


def _before_share(
    part: _OfWarp, buffer: cute.Tensor, slot: int, row: Int32, share: Int32
) -> Numeric:
    """What all shares before this one have in total, in every lane."""
    op, from_end, dtype = part.op, part.from_end, type(part.totals[0])
    warps, shares = buffer.shape[1]
    lane, share = cute.arch.lane_idx(), _counted(share, shares, from_end)
    nothing = dtype(identity(op, dtype))
    of_share = warps * len(part.totals)
    found = nothing
    for start in range(0, (shares - 1) * of_share, WARP):  # the last share comes before none
        place = start + lane
        of = place // of_share
        is_before = of < share
        of, inside = _counted(select(is_before, of, 0), shares, from_end), place % of_share
        warp = _counted(inside % warps, warps, from_end)
        word = buffer[row, (warp, of), slot + inside // warps]
        found = combine(op, found, select(is_before, from_word(word, dtype), nothing))
    return warp_reduce(found, op, WARP)

"""How the warps of a row hand each other what they have, through the reduction buffer.

The buffer has the shape (rows, (warps_per_row, cluster_n), slots) of `ReduceLayout`. An element of
it is a word of 32 or 64 bits: what one warp has of one share of a row, for one reduction. A warp
leaves its words in the buffers of all CTAs of the row, and then every lane reads what it combines.

In all functions here `slots` are views of the buffer, (rows, (warps_per_row, cluster_n)), one for
each reduction. `abreast` counts the groups of threads of a CTA that work on one row at the same
time, each on as many shares: the shares of one group come before those of the next.
"""

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric, const_expr

from htile.compute.operands import select
from htile.utils import WARP, bits32, elem_pointer, pack64, store_shared_remote, unpack64

BARRIERS = 16  # of a CTA. The first one is for all of its threads.
# Threads of a CTA. A multiprocessor has 64 barriers, so that four CTAs may set all 16 aside, and no
# more than four of so many threads fit on it.
LARGE_CTA = 512


def slots_of(buffer: cute.Tensor, count: int) -> tuple[cute.Tensor, ...]:
    """The first `count` slots of a buffer (rows, peers) or (rows, peers, slots)."""
    if cute.rank(buffer) == 2:
        if count != 1:
            raise ValueError(f"{count} values need a buffer of {count} slots, got one slot")
        return (buffer,)
    if buffer.shape[2] < count:
        raise ValueError(f"{count} values need {count} slots, the buffer has {buffer.shape[2]}")
    return tuple(buffer[None, None, i] for i in range(count))


def slots_from(buffer: cute.Tensor, first: int | Int32, count: int) -> cute.Tensor:
    """So many slots of a buffer (rows, peers, slots), as a buffer of their own."""
    layout = cute.make_layout((*buffer.shape[:2], count), stride=buffer.layout.stride)
    return cute.make_tensor(buffer[None, None, first].iterator, layout)


def to_word(value: Numeric, dtype: type[Numeric]) -> Numeric:
    """The bits of a scalar as an element of a buffer of `dtype`."""
    if value.dtype.width > dtype.width:
        raise TypeError(f"a buffer of {dtype} does not hold {value.dtype}: make it Int64")
    if dtype is type(value):
        return value
    if dtype is Int64:
        return bits32(value).to(Int64)
    return value.bitcast(dtype)


def from_word(word: Numeric, dtype: type[Numeric]) -> Numeric:
    """The scalar of `dtype` that `to_word` made a word of."""
    if dtype is type(word):
        return word
    if isinstance(word, Int64):
        return word.to(Int32) if dtype is Int32 else word.to(Int32).bitcast(dtype)
    return word.bitcast(dtype)


def peers(
    slot: cute.Tensor, dtype: type[Numeric], abreast: int, identity: Numeric | float
) -> list[Numeric]:
    """What this lane combines of what the warps of its row have left in a slot.

    Up to 32 warps have a lane each. If they are 2**k, lanes repeat. A lane without a warp has the
    identity. A lane has several of more than 32 warps, 32 apart.
    """
    row = _row(slot, abreast)
    found = [
        (from_word(slot[row, peer], dtype), is_there) for peer, is_there in _peers_of_lane(slot)
    ]
    return [
        value if is_there is None else select(is_there, value, dtype(identity))
        for value, is_there in found
    ]


class PeerList:
    """What this lane merges of the words, in order, that one warp of its row has left.

    The k-th of a warp's words is in the k-th slot. Lanes that have the same warp have every second
    word, or every fourth and so on, each others.

    first, apart: the place of this lane's first word, and how much further each next one is.
    """

    def __init__(self, buffer, where: tuple, is_there, count: int, identity: float):
        self.buffer, self.where, self.is_there = buffer, where, is_there
        self.count, self.identity = count, identity
        width = lanes_of_peers(slots_of(buffer, count)[0])
        self.apart, self.first = 32 // width, cute.arch.lane_idx() // width
        self.length = -(-count // self.apart)

    def word(self, place: Int32, most: int) -> Numeric:
        """The word of a place, which is at most `most`; beyond the last one the identity."""
        here = None if most < self.count else place < self.count
        word = self.buffer[(*self.where, place if here is None else select(here, place, 0))]
        for holds in (here, self.is_there):
            word = word if holds is None else select(holds, word, type(word)(self.identity))
        return word

    def words(self) -> list[Numeric]:
        """All of this lane's words."""
        starts = range(0, self.count, self.apart)
        return [self.word(self.first + k, k + self.apart - 1) for k in starts]


def lists_of_peers(
    buffer: cute.Tensor, count: int, abreast: int, identity: float
) -> list[PeerList]:
    """What this lane merges of the `count` words, in order, that each warp of its row has left."""
    slot = slots_of(buffer, count)[0]
    row = _row(slot, abreast)
    found = _peers_of_lane(slot)
    return [PeerList(buffer, (row, peer), there, count, identity) for peer, there in found]


def peer_places(slot: cute.Tensor) -> list[tuple[tuple, Boolean | None]]:
    """Where each of `peers` comes from: (warp of its share, share, the last share it may be of).

    The last is a Python number, for all lanes. Behind each place: whether there is such a warp;
    None if there is for all lanes.
    """
    warps_per_row, cluster_n = slot.shape[1]
    places = []
    for i, (peer, is_there) in enumerate(_peers_of_lane(slot)):
        last = min((32 * i + 31) // warps_per_row, cluster_n - 1)
        places.append(((peer % warps_per_row, peer // warps_per_row, last), is_there))
    return places


def _row(slot: cute.Tensor, abreast: int) -> Int32:
    """The row of this warp, of those in a slot."""
    warps_per_row, _ = slot.shape[1]
    return cute.arch.warp_idx() // (warps_per_row * abreast)


def _peers_of_lane(slot: cute.Tensor) -> list[tuple[Int32, Boolean | None]]:
    """The places of `peers` among all warps of the row, and whether each has a warp.

    None means that it has one for all lanes.
    """
    count, width = cute.size(slot.shape[1]), lanes_of_peers(slot)
    lane = cute.arch.lane_idx() % width
    found = []
    for first in range(0, count, width):
        is_there = None if first + width <= count else lane + first < count
        place = lane + first if is_there is None else select(is_there, lane + first, 0)
        found.append((place, is_there))
    return found


def lanes_of_peers(slot: cute.Tensor) -> int:
    """How many neighbouring lanes have all that `peers` reads of a slot: 2**k, 32 at most."""
    count = cute.size(slot.shape[1])
    return min(1 << (count - 1).bit_length(), 32)


def _first_place(slot: cute.Tensor, shares: int, abreast: int) -> tuple:
    """Where this warp's words belong: its row, its warp of a share, the first of its `shares`."""
    warps_per_row, _ = slot.shape[1]
    warp = cute.arch.warp_idx()
    group = warp // warps_per_row
    return group // abreast, warp % warps_per_row, group % abreast * shares


@cute.jit
def barrier_of_row(row, rows: cutlass.Constexpr, threads: cutlass.Constexpr):
    """Wait for all `threads` that work on one of the `rows` of a CTA: the one of this number.

    Rows do not wait for each other, if there is a barrier for each. For the number of a barrier in
    a register ptxas sets all 16 aside, so a small CTA has its numbers written out.
    """
    if const_expr(rows == 1 or rows >= BARRIERS):
        cute.arch.barrier()
    elif const_expr(rows * threads >= LARGE_CTA):
        cute.arch.barrier(barrier_id=1 + row, number_of_threads=threads)
    else:
        for k in cutlass.range_constexpr(rows):
            if row == k:
                cute.arch.barrier(barrier_id=1 + k, number_of_threads=threads)


@cute.jit
def begin_barriers(barriers, count: cutlass.Constexpr, arrivals: cutlass.Constexpr):
    """Set up `count` mbarriers in shared memory, each of which waits for so many arrivals."""
    tidx, _, _ = cute.arch.thread_idx()
    if tidx < count:
        cute.arch.mbarrier_init(barriers + tidx, arrivals)
    cute.arch.mbarrier_init_fence()


def wait_for_share(tidx: Int32, num_threads: int, threads: int) -> None:
    """Wait for all threads of a CTA that work on this thread's row, or on its share of one.

    num_threads: of the CTA. threads: of each share.
    """
    if threads <= WARP:
        cute.arch.sync_warp()
    else:
        barrier_of_row(tidx // threads, num_threads // threads, threads)


@cute.jit
def _exchange_block(words: tuple, slots: tuple, abreast: cutlass.Constexpr):
    """Lane 0 of each warp leaves the warp's words. One barrier is for all slots."""
    row, warp, first = _first_place(slots[0], len(words[0]), abreast)
    rows, (warps_per_row, _) = slots[0].shape
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(words)):
            for s in cutlass.range_constexpr(len(words[i])):
                slots[i][row, (warp, first + s)] = words[i][s]
    barrier_of_row(row, rows, WARP * warps_per_row * abreast)


@cute.jit
def _exchange_cluster(words: tuple, slots: tuple, mbar_ptr, phase, abreast: cutlass.Constexpr):
    """Lane c of each warp sends the warp's words to CTA c. One transaction is for all slots."""
    warps_per_row, cluster_n = slots[0].shape[1]
    shares = len(words[0]) * abreast
    row, warp, first = _first_place(slots[0], len(words[0]), abreast)
    lane = cute.arch.lane_idx()
    rows = slots[0].shape[0]
    itemsize = slots[0].element_type.width // 8
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(
                mbar_ptr, rows * warps_per_row * cluster_n * len(words) * itemsize
            )
    rank = cute.arch.block_idx_in_cluster()
    if lane < cluster_n // shares:
        for i in cutlass.range_constexpr(len(words)):
            for s in cutlass.range_constexpr(len(words[i])):
                coord = (row, (warp, rank * shares + first + s))
                store_shared_remote(words[i][s], elem_pointer(slots[i], coord), mbar_ptr, lane)
    cute.arch.mbarrier_wait(mbar_ptr, phase)


def exchange(
    words: tuple[tuple, ...],
    slots: tuple[cute.Tensor, ...],
    mbar_ptr: cute.Pointer | None,
    phase: int | Int32,
    abreast: int,
) -> None:
    """Bring each warp's words to every CTA of its row, and wait until all are there.

    words: for each slot a tuple, with a word for each share that the warp works on.
    mbar_ptr: the mbarrier of a cluster's transaction, whose parity is `phase`; None where one CTA
        has the row, which takes a block barrier.
    """
    if mbar_ptr is None:
        _exchange_block(words, slots, abreast)
    else:
        _exchange_cluster(words, slots, mbar_ptr, phase, abreast)


def exchange_pairs(
    values: tuple[tuple, ...],
    reduction_buffer: cute.Tensor,
    mbar_ptr: cute.Pointer | None,
    phase: int | Int32,
    abreast: int,
    identity: tuple[float, float],
) -> tuple[list, int]:
    """Exchange pairs of Float32, through a buffer of Int64.

    values: for each slot a tuple, with a pair for each share that the warp works on.
    identity: the pair that a lane without a warp gets, in every slot.

    Returns for each slot a list of the pairs that this lane combines (see `peers`), and how many
    neighbouring lanes have all of them.
    """
    slots = slots_of(reduction_buffer, len(values))
    words = tuple(tuple(pack64(*pair) for pair in pairs) for pairs in values)
    exchange(words, slots, mbar_ptr, phase, abreast)
    beyond = pack64(*map(Float32, identity))
    found = [[unpack64(word) for word in peers(slot, Int64, abreast, beyond)] for slot in slots]
    pairs = [
        [(low.bitcast(Float32), high.bitcast(Float32)) for low, high in each] for each in found
    ]
    return pairs, lanes_of_peers(slots[0])

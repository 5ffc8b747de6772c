"""How the warps of a row find its first keys together: what `topk` is made of in long rows.

All warps agree on a *bound* that at least as many keys of the row are no smaller than as are asked
for. The keys that are no smaller, the *candidates*, are hardly more than these. They are listed in
shared memory, where each finds its rank by counting those that are larger.

The bound is that of the largest keys of some groups of lanes. Where many of the first keys are of
one group, more keys are no smaller than it than the list has places for. Then the bits of the best
bound are found one after the other, each by a count over the row. If still more are no smaller,
because they are equal but for their indices, the first keys are found one after the other, each by
a maximum over the row of the keys below the one before.

No two keys of a row are equal, so the result does not depend on who compares what.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64
from cutlass._mlir.dialects import llvm
from cutlass.memory import SmemAllocator

from htile.compute.candidates import ElementKeys, Keys
from htile.compute.exchange import (
    barrier_of_row,
    exchange,
    lanes_of_peers,
    peer_places,
    peers,
    slots_from,
    slots_of,
    to_word,
)
from htile.compute.keys import Key, as_key
from htile.compute.operands import select
from htile.compute.reduce import (
    ADD,
    MAX,
    MIN,
    block_reduce,
    cluster_reduce,
    combine_lanes,
    combine_terms,
    how_many,
    identity,
    warp_reduce,
)
from htile.utils import WARP, Static, elem_pointer, store_shared_remote

LOWEST = identity(MAX, Int32)
BITS = 32
BUNDLE = 8  # keys of a thread of which the largest is compared first
LEAST_PLACES = 64  # of the list
# The slots of the exchange buffer. Candidates are counted once for each bound. Counts for bits and
# maxima below each other take the last two in turns.
TOPS, COUNTED, LISTED, IN_TURNS, SLOTS = 0, 1, 3, 4, 6
TURNS = 2


def places_of(count: int) -> int:
    """How many candidates have a place, where so many keys are asked for.

    Rows whose elements are rounded have many equal ones, and more candidates for them.
    """
    return max(LEAST_PLACES, 4 << (count - 1).bit_length())


def groups_of_warp(count: int, warps: int) -> int:
    """Into how many groups each warp's keys are divided: a row has twice as many as ranks."""
    groups = 1
    while groups * warps < 2 * count:
        groups *= 2
    return groups


def first_together(
    keys: Keys | ElementKeys,
    count: int,
    zero_bits: int,
    threads_per_row: int,
    reduction_buffer: cute.Tensor,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    abreast: int = 1,
    is_there: bool | Boolean = True,
    smaller: bool = False,
    index_bits: int = 0,
) -> FoundTogether:
    """The `count` largest keys of a row in order.

    keys: those of this thread. What is no element of the row has the lowest number of the dtype.
    zero_bits: so many of the lowest bits of every element are zero.
    threads_per_row, reduction_buffer, mbar_ptr, phase, abreast: as for `row_reduce`, but more than
        one warp has the row, a thread has one share of it, and a CTA of a cluster has one row. The
        buffer is of Int64, and has SLOTS slots.
    is_there: whether there is such a row. If not, nothing is looked for, and all keys found are -1,
        whose index is 0.
    smaller, index_bits: as `in_order` was given them for these keys.
    """
    across = reduction_buffer, mbar_ptr, phase, abreast
    search = _Search(keys, count, zero_bits, threads_per_row, across)
    if is_there is not True:
        _fill(search)
    total, own, before = search.list_from(search.bound(), 0)
    if is_there is not True and search.ctas == 1:
        total = own = select(is_there, total, 0)
    _put_in_order(search, *_listed_by_best(search, total, own, before))
    return FoundTogether(search.ranked, search.row, smaller, index_bits)


class FoundTogether(Static):
    """The first keys in order, in the shared memory of each CTA of the row.

    Each one is loaded where it is used, so that no thread has registers for all of them.

    smaller, index_bits: as for `in_order`, which made the keys that were compared.
    """

    def __init__(self, ranked: cute.Tensor, row: Int32, smaller: bool, index_bits: int):
        self.ranked, self.row = ranked, row
        self.smaller, self.index_bits = smaller, index_bits

    def __getitem__(self, k: int | Int32) -> Int64:
        """The key of a rank."""
        return as_key(self.ranked[k, self.row], self.smaller, self.index_bits)


@cute.jit
def _listed_by_best(search: cutlass.Constexpr, total: Int32, own: Int32, before: Int32):
    """List candidates by the best bound, if they are too many by the first one."""
    if total > search.places:
        bound = _best_bound(search)
        search.start_list()
        search.wait()
        total, own, before = search.list_from(bound, 1)
    else:
        search.skip_counting(1)
    return total, own, before


@cute.jit
def _best_bound(search: cutlass.Constexpr):
    """The largest number that `count` numbers of the row are no smaller than."""
    found = Int32(LOWEST)
    for k in cutlass.range(search.bits, unroll=1):
        found = search.with_bit(found, k)
    return found


@cute.jit
def _put_in_order(search: cutlass.Constexpr, total: Int32, own: Int32, before: Int32):
    """Find the first keys: among the candidates, or among all keys if these are too many."""
    if total <= search.places:
        search.gather(total, own, before)
        _rank(search, total)
    else:
        search.skip_gathering()
        _take_in_turns(search)
    search.wait()


class _Search(Static):
    """What stays the same for one row, and its shared memory.

    threads, warps: of this CTA, that work on the row. ctas: that have a share of it.
    row, rank: which row of this CTA, and which CTA of the cluster. thread, warp: which of the row.
    groups, own_groups: into how many groups each warp's keys are divided, and each thread's.
    largest: of each bundle of `size` numbers.
    tops: the largest number of each group. counter: how many candidates this CTA has.
    listed: what is kept of these. gathered: the candidates of all CTAs. ranked: the first keys.
    """

    def __init__(self, keys, count: int, zero_bits: int, threads_per_row: int, across: tuple):
        self.keys, self.count, self.zero_bits = keys, count, zero_bits
        self.buffer, self.mbar_ptr, self.phase, self.abreast = across
        self.dtype, self.places = keys.dtype, places_of(count)
        self.rows, (_, shares) = self.buffer.shape[:2]
        self.threads, self.ctas = threads_per_row * self.abreast, shares // self.abreast
        self.warps = self.threads // WARP
        self.numbers = keys.numbers()
        most = WARP * _power_below(len(self.numbers))
        self.groups = min(groups_of_warp(count, self.warps * self.ctas), most)
        tidx, _, _ = cute.arch.thread_idx()
        self.row, self.thread = tidx // self.threads, tidx % self.threads
        self.warp, self.lane = self.thread // WARP, cute.arch.lane_idx()
        self.rank = cute.arch.block_idx_in_cluster() if self.ctas > 1 else 0
        self.own_groups = max(1, self.groups // WARP)
        self.size = min(BUNDLE, len(self.numbers) // self.own_groups)
        starts = range(0, len(self.numbers), self.size)
        self.largest = [combine_terms(self.numbers[i : i + self.size], MAX) for i in starts]
        self._allocate()

    def _allocate(self):
        smem = SmemAllocator()

        def lists(dtype, size):
            layout = cute.make_layout((size, self.rows))
            return smem.allocate_tensor(dtype, layout, byte_alignment=16)

        self.tops = lists(Int32, self.warps * self.ctas * self.groups)
        self.counter = lists(Int32, 1)
        # The words of a key lie apart: for one of 64 bits, each element would take two registers.
        self.listed = [lists(Int32, self.places) for _ in range(self.dtype.width // BITS)]
        self.gathered = lists(self.dtype, self.places)
        self.ranked = lists(self.dtype, self.count)

    # The bound

    def bound(self) -> Int32:
        """A number that those of so many groups are no smaller than; its lowest bits are zero."""
        lanes = max(1, WARP // self.groups)  # of a group
        tops = [
            self.keys.rank(combine_terms(self.largest[i :: self.own_groups], MAX))
            for i in range(self.own_groups)
        ]
        tops = [warp_reduce(top, MAX, lanes) for top in tops]
        self.start_list()
        self._leave(tops, lanes)
        return _with_count(self._tops_of_lane(), self.count, BITS - self.zero_bits)

    def _leave(self, tops: list[Int32], lanes: int):
        """Bring the largest number of each group of so many lanes to each CTA of the row."""
        beside = WARP // lanes
        first = (self.rank * self.warps + self.warp) * self.groups
        if self.ctas == 1:
            for i, top in enumerate(tops):
                place = first + i * beside + self.lane // lanes
                _store_if(self.lane % lanes == 0, self.tops, (place, self.row), top)
            self.wait()
            return
        self.wait()  # for the counter, before anyone counts
        self._expect(TOPS, self.tops.shape[0] * 4)
        for i in range(self.groups):
            top = cute.arch.shuffle_sync(tops[i // beside], i % beside * lanes)
            pointer = elem_pointer(self.tops, (first + i, self.row))
            _send_if(self.lane < self.ctas, top, pointer, self.mbar_ptr + TOPS, self.lane)
        cute.arch.mbarrier_wait(self.mbar_ptr + TOPS, self.phase)

    def _tops_of_lane(self) -> list[Int32]:
        """What this lane has of the largest numbers of all groups.

        Where they are many, some groups are taken for one.
        """
        size, found = self.tops.shape[0], []
        for first in range(0, size, WARP):
            if first + WARP <= size:
                found.append(self.tops[self.lane + first, self.row])
            else:
                is_there = self.lane + first < size
                top = self.tops[select(is_there, self.lane + first, 0), self.row]
                found.append(select(is_there, top, LOWEST))
        few = -(-2 * self.count // WARP)
        return [combine_terms(found[i::few], MAX) for i in range(min(few, len(found)))]

    # The list

    def start_list(self):
        """Count from 0, once all threads of the row have passed a barrier."""
        _store_if(self.thread == 0, self.counter, (0, self.row), Int32(0))

    def list_from(self, bound: Int32, k: Int32) -> tuple[Int32, Int32, Int32]:
        """List the keys whose numbers are no smaller than the k-th bound.

        Returns how many the row has, this CTA, and the CTAs before it.
        """
        for i, largest in enumerate(self.largest):
            _list_bundle(self, self.keys.is_candidate(largest, bound), i, bound)
        self.wait()
        own = self.counter[0, self.row]
        if self.ctas == 1:
            return own, own, Int32(0)
        word = to_word(select(self.warp == 0, own, 0), self.buffer.element_type)
        slots = slots_of(slots_from(self.buffer, COUNTED + k, 1), 1)
        exchange(((word,),), slots, self.mbar_ptr + COUNTED + k, self.phase, self.abreast)
        counts = peers(slots[0], Int32, self.abreast, 0)
        of_shares = [place[1] for place, _ in peer_places(slots[0])]
        before = [
            select(share // self.abreast < self.rank, count, 0)
            for share, count in zip(of_shares, counts, strict=True)
        ]
        width = lanes_of_peers(slots[0])
        return combine_lanes(counts, ADD, width), own, combine_lanes(before, ADD, width)

    def skip_counting(self, k: Int32):
        """Leave the mbarrier of `list_from` as if no warp had a word."""
        if self.ctas > 1:
            self._expect(COUNTED + k, 0)

    def gather(self, total: Int32, own: Int32, before: Int32):
        """Bring the candidates of all CTAs to each."""
        if self.ctas == 1:
            _gather(self, own, before)
            self.wait()
            return
        self._expect(LISTED, total * (self.dtype.width // 8))
        _gather(self, own, before)
        cute.arch.mbarrier_wait(self.mbar_ptr + LISTED, self.phase)

    def skip_gathering(self):
        """Leave the mbarrier of `gather` as if no CTA had a candidate."""
        if self.ctas > 1:
            self._expect(LISTED, 0)

    def _expect(self, slot: int, size: int | Int32):
        _expect(self.mbar_ptr + slot, size)

    def wait(self):
        """Wait for all threads of this CTA that work on the row."""
        barrier_of_row(self.row, self.rows, self.threads)

    # All keys

    @property
    def bits(self) -> int:
        """How many upper bits of the best bound are found; below them all numbers are alike."""
        return _evenly(BITS - self.zero_bits)

    def with_bit(self, found: Int32, k: Int32) -> Int32:
        """What has been found of the best bound, with its next bit: after k bits."""
        candidate = found + (Int32(1) << (BITS - 1 - k))
        below = how_many([self.keys.is_before(number, candidate) for number in self.numbers])
        below = cute.arch.warp_redux_sync(below, "add")
        own = len(self.numbers) * WARP - below
        return select(self._over_row(own, ADD, k) >= self.count, candidate, found)

    def _over_row(self, value, op, k: Int32):
        """What all warps of the row have of a value together, in the k-th round."""
        slot = IN_TURNS + k % TURNS
        slots = slots_from(self.buffer, slot, 1)
        if self.mbar_ptr is None:
            return block_reduce((value,), (op,), slots, self.abreast)[0]
        phase = k // TURNS % 2  # of every row, because each mbarrier is used evenly often for one
        return cluster_reduce((value,), (op,), slots, self.mbar_ptr + slot, phase, self.abreast)[0]

    @property
    def rounds(self) -> int:
        """How many maxima are found."""
        return _evenly(self.count)

    def largest_until(self, limit: Key, k: Int32) -> Key:
        """The largest key of the row that is no larger than a limit, in the k-th round."""
        lowest = self.dtype(identity(MAX, self.dtype))
        largest = lowest
        for e in range(len(self.numbers)):
            key = self.keys.of_words([_opaque(word) for word in self.keys.words(e)])
            largest = cutlass.max(largest, select(key <= limit, key, lowest))
        return self._over_row(warp_reduce(largest, MAX), MAX, k)


def _evenly(rounds: int) -> int:
    """So many rounds, and a few more: each of the mbarriers is used an even number of times."""
    return -(-rounds // (2 * TURNS)) * 2 * TURNS


def _power_below(n: int) -> int:
    """The largest power of two that is not above a number."""
    return 1 << (n.bit_length() - 1)


def _opaque(word: Int32) -> Int32:
    """The same word. LLVM computes nothing of it before a loop, which would take registers."""
    words, text = [word.ir_value()], "mov.b32 $0, $1;"
    return Int32(llvm.inline_asm(Int32.mlir_type, words, text, "=r,r", has_side_effects=True))


@cute.jit
def _with_count(numbers: list, count: cutlass.Constexpr, bits: cutlass.Constexpr) -> Int32:
    """The largest number, of so many upper bits, that `count` of a warp's are no smaller than."""
    found = Int32(LOWEST)
    for k in cutlass.range(bits, unroll=1):
        candidate = found + (Int32(1) << (BITS - 1 - k))
        own = how_many([number >= candidate for number in numbers])
        found = select(cute.arch.warp_redux_sync(own, "add") >= count, candidate, found)
    return found


@cute.jit
def _list_bundle(search: cutlass.Constexpr, has_candidates, i: cutlass.Constexpr, bound: Int32):
    """List what is kept of the candidates of a bundle, if there is room, and count them."""
    if has_candidates:
        first, last = i * search.size, min((i + 1) * search.size, len(search.numbers))
        found = [search.keys.is_candidate(x, bound) for x in search.numbers[first:last]]
        count = how_many(found)
        counter = elem_pointer(search.counter, (0, search.row))
        place = cute.arch.atomic_add(counter, count, sem="relaxed", scope="cta")
        if place + count <= search.places:
            for e in cutlass.range_constexpr(last - first):
                if found[e]:
                    words = search.keys.words(first + e)
                    for word, listed in zip(words, search.listed, strict=True):
                        listed[place, search.row] = word
                    place = place + 1


@cute.jit
def _gather(search: cutlass.Constexpr, own: Int32, before: Int32):
    """Send the candidates of this CTA to all CTAs of the row, each to its place."""
    for i in cutlass.range(search.thread, own * search.ctas, search.threads, unroll=1):
        words = [listed[i // search.ctas, search.row] for listed in search.listed]
        key = search.keys.of_words(words)
        place = before + i // search.ctas
        if cutlass.const_expr(search.ctas == 1):
            search.gathered[place, search.row] = key
        else:
            pointer = elem_pointer(search.gathered, (place, search.row))
            store_shared_remote(key, pointer, search.mbar_ptr + LISTED, i % search.ctas)


@cute.jit
def _take_in_turns(search: cutlass.Constexpr):
    """Put the first of all keys in order, each the largest below the one before."""
    limit = search.dtype(identity(MIN, search.dtype))
    for k in cutlass.range(search.rounds, unroll=1):
        found = search.largest_until(limit, k)
        limit = found - 1
        if (search.thread == 0) & (k < search.count):
            search.ranked[k, search.row] = found


@cute.jit
def _rank(search: cutlass.Constexpr, total: Int32):
    """Put each of the first candidates in its place."""
    for first in cutlass.range_constexpr(0, search.places, search.threads):
        place = search.thread + first
        if place < total:
            key, larger = search.gathered[place, search.row], Int32(0)
            for i in cutlass.range(total, unroll=4):
                is_larger = search.gathered[i, search.row] > key
                larger = larger + select(is_larger, Int32(1), Int32(0))
            if larger < search.count:
                search.ranked[larger, search.row] = key


@cute.jit
def _fill(search: cutlass.Constexpr):
    """Let all keys that are found be -1 at first."""
    for k in cutlass.range(search.thread, search.count, search.threads, unroll=1):
        search.ranked[k, search.row] = search.dtype(-1)


@cute.jit
def _store_if(holds, tensor: cute.Tensor, place: tuple, value):
    if holds:
        tensor[place] = value


@cute.jit
def _send_if(holds, value, pointer: cute.Pointer, mbar_ptr: cute.Pointer, rank):
    if holds:
        store_shared_remote(value, pointer, mbar_ptr, rank)


@cute.jit
def _expect(mbar_ptr: cute.Pointer, size):
    """One thread of the CTA says how many bytes an mbarrier waits for."""
    if cute.arch.warp_idx() == 0:
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(mbar_ptr, size)

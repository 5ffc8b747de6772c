"""The first keys of what a warp has of a row, where that is many keys: few of them are sorted.

The largest key of each of some groups of keys is found, and of these largest ones that of the rank
that is asked for. As many keys are no smaller than it, so all first ones are among those that are
not: the *candidates*, which are hardly more. They are found by one comparison for each key, and
brought together in shared memory. Where they are more than have a place there, because many keys
are equal but for their indices, all keys are sorted.

Of floats the elements themselves are compared. Only of candidates keys are made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64
from cutlass.memory import SmemAllocator

from htile.compute.keys import Key, joined, last_below, ordered, unordered
from htile.compute.operands import select
from htile.compute.reduce import ADD, MAX, combine_terms, identity
from htile.compute.scan import lane_scan, last_lane
from htile.utils import unpack64

BITS = 32  # keys that a word tells candidates among
PIECE = 4  # keys of a thread that lie side by side in shared memory


@dataclass(frozen=True)
class Keys:
    """A thread's keys, all as `htile.compute.keys.in_order` makes them. What is compared of them
    is the upper word, which is in their order."""

    keys: list[Key]

    @property
    def dtype(self) -> type:
        return type(self.keys[0])

    def numbers(self) -> list[Int32]:
        return [key if isinstance(key, Int32) else (key >> 32).to(Int32) for key in self.keys]

    @staticmethod
    def rank(number: Int32) -> Int32:
        """A number as an integer in the order of the keys."""
        return number

    @staticmethod
    def is_candidate(number: Int32, bound: Int32) -> Boolean:
        return number >= bound

    @staticmethod
    def is_before(number: Int32, bound: Int32) -> Boolean:
        """Whether a number is smaller than a bound."""
        return number < bound

    def words(self, e: int) -> tuple[Int32, ...]:
        """What is kept of a key: words of 32 bits, the lower one first."""
        return _words(self.keys[e])

    @staticmethod
    def of_words(words: Sequence[Int32]) -> Key:
        """The key of which these were kept."""
        return _of_words(words)


@dataclass(frozen=True)
class ElementKeys:
    """The same of floats, of which the largest comes first. The elements are compared.

    low: the lower words of their keys of Int64; the bits above those of an index are set.
    index_bits: how many of the lowest bits of a key of 32 bits are those of its index; 0 if keys
        have 64 bits.
    """

    elements: list[Float32]
    low: list[Int32]
    index_bits: int

    @property
    def dtype(self) -> type:
        return Int32 if self.index_bits else Int64

    @property
    def keys(self) -> list[Key]:
        return [self.of_words(self.words(e)) for e in range(len(self.elements))]

    def numbers(self) -> list[Float32]:
        return self.elements

    @staticmethod
    def rank(number: Float32) -> Int32:
        return ordered(number)

    @staticmethod
    def is_candidate(number: Float32, bound: Int32) -> Boolean:
        """NaN is one, whatever the bound; so is every number, if the bound is NaN."""
        return Boolean(number < unordered(bound)) == Boolean(False)

    @staticmethod
    def is_before(number: Float32, bound: Int32) -> Boolean:
        """NaN never is, and of the bounds above infinity every number is."""
        return Boolean(number <= last_below(bound))

    def words(self, e: int) -> tuple[Int32, ...]:
        """The bits of the element beside those of the index, in whose place a NaN may have bits."""
        bits, index = self.elements[e].bitcast(Int32), self.low[e]
        if self.index_bits:
            return ((bits | (1 << self.index_bits) - 1) & index,)
        return index, bits

    def of_words(self, words: Sequence[Int32]) -> Key:
        if self.index_bits:
            (word,), low = words, (1 << self.index_bits) - 1
            upper = ordered((word & ~low).bitcast(Float32))
            return (upper & ~low) | (word & low)
        index, bits = words
        return joined(index, ordered(bits.bitcast(Float32)))


def _words(key: Key) -> tuple[Int32, ...]:
    return (key,) if isinstance(key, Int32) else unpack64(key)


def _of_words(words: Sequence[Int32]) -> Key:
    return words[0] if len(words) == 1 else joined(*words)


@dataclass(frozen=True)
class Search:
    """What is looked for, and by whom.

    count: how many keys. lanes: how many lanes work on a row, which find the same. threads: of the
    thread block. sort, rounds: the functions of `htile.compute.ranks` that give the first of the
    keys of a lane in order, and those of the lists of all lanes.
    """

    count: int
    lanes: int
    threads: int
    sort: Callable
    rounds: Callable

    @property
    def groups(self) -> int:
        """Into how many groups a lane's keys are divided: all lanes have twice as many as ranks."""
        groups = 1
        while groups * self.lanes < 2 * self.count:
            groups *= 2
        return groups

    @property
    def places(self) -> int:
        """How many candidates of a row have a place: a multiple of the lanes."""
        return max(self.lanes, 2 << (self.count - 1).bit_length())

    def first(self, keys: list[Key]) -> list[Key]:
        """The first keys in order, of all keys of the lanes."""
        return self.rounds(self.sort(keys, self.count), self.count, self.lanes)

    def bound(self, keys: Keys, numbers: list) -> Int32:
        """A rank that as many numbers of the lanes as are asked for are no smaller than."""
        groups = self.groups
        largest = [keys.rank(combine_terms(numbers[i::groups], MAX)) for i in range(groups)]
        low = groups * self.lanes - 1  # these bits make them differ
        place = (cute.arch.lane_idx() % self.lanes) * groups
        differing = [(rank & ~low) | (place + i) for i, rank in enumerate(largest)]
        return self.rounds(self.sort(differing, groups), self.count, self.lanes)[-1] & ~low


def first_of_many(keys: Keys, search: Search) -> list[Key]:
    """The first keys of each group of lanes, in order, in each of its lanes."""
    numbers, lanes = keys.numbers(), search.lanes
    bound = search.bound(keys, numbers)
    masks = [_mask(keys, numbers[i : i + BITS], bound) for i in range(0, len(numbers), BITS)]
    own = sum([cute.arch.popc(mask) for mask in masks], Int32(0))
    so_far = lane_scan(own, ADD, cute.arch.lane_idx() % lanes, lanes)
    total = last_lane(so_far, lanes)
    are_few = cute.arch.vote_all_sync(total <= search.places)
    scratch = _Scratch(keys.dtype, len(numbers), search)
    return _first(keys, search, scratch, masks, so_far - own, total, are_few)


def _mask(keys: Keys, numbers: list, bound: Int32) -> Int32:
    """A bit for each number, which is set if it is that of a candidate."""
    mask = Int32(0)
    for i, number in enumerate(numbers):
        bit = 1 << i if i < BITS - 1 else -(1 << i)
        mask = mask | select(keys.is_candidate(number, bound), Int32(bit), Int32(0))
    return mask


class _Scratch:
    """Shared memory for the keys of each thread, and for the candidates of each group of lanes."""

    def __init__(self, dtype: type, elements: int, search: Search):
        smem, threads = SmemAllocator(), search.threads
        pieces = cute.make_layout((PIECE, threads, -(-elements // PIECE)))
        lists = cute.make_layout((search.places, threads // search.lanes))
        self.staged = smem.allocate_tensor(dtype, pieces, byte_alignment=16)
        self.listed = smem.allocate_tensor(dtype, lists, byte_alignment=16)


@cute.jit
def _first(
    keys: cutlass.Constexpr, search: cutlass.Constexpr, scratch: cutlass.Constexpr,
    masks, place: Int32, total: Int32, are_few: Boolean,
):  # fmt: skip
    """The first keys, of the candidates or of all keys."""
    found = [keys.dtype(0)] * search.count
    if are_few:
        found = _first_of_candidates(keys, search, scratch, masks, place, total)
    else:
        found = search.first(keys.keys)
    return found


def _first_of_candidates(keys, search, scratch, masks, place, total) -> list[Key]:
    tidx, _, _ = cute.arch.thread_idx()
    row, lane = tidx // search.lanes, cute.arch.lane_idx() % search.lanes
    mine, listed = scratch.staged[None, tidx, None], scratch.listed[None, row]
    for e in range(len(keys.numbers())):
        mine[e % PIECE, e // PIECE] = _of_words(keys.words(e))
    cute.arch.sync_warp()  # the list of another row has been read
    for k, mask in enumerate(masks):
        place = _list(mine, listed, mask, BITS * k, place)
    cute.arch.sync_warp()
    dtype = listed.element_type
    places = [lane + first for first in range(0, search.places, search.lanes)]
    words = [keys.of_words(_words(listed[i])) for i in places]
    lowest = dtype(identity(MAX, dtype))
    return search.first([select(i < total, w, lowest) for i, w in zip(places, words, strict=True)])


@cute.jit
def _list(
    staged: cute.Tensor, listed: cute.Tensor, mask: Int32, first: cutlass.Constexpr, place: Int32
) -> Int32:
    """List the keys whose bits are set, the first of which is key `first`, from a place on."""
    while mask != 0:
        e = cute.arch.popc(~mask & (mask - 1)) + first
        listed[place] = staged[e % PIECE, e // PIECE]
        place = place + 1
        mask = mask & (mask - 1)
    return place

"""The first keys of a row in order, all by one exchange: what `topk` and `sort` are made of.

A thread sorts the first of its own keys. The lanes of a warp then hold as many rounds as keys are
asked for: the largest of what they have left wins, and the lane that had it goes on to its next
one. Where a row has several warps, each finds its own first keys, leaves them in the reduction
buffer, and all warps hold the same rounds again over what all have left there. For many ranks they
look for them together (`htile.compute.together`).

No two keys of a row are equal, so the result does not depend on who compares what.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32, Int64

from htile.compute.candidates import ElementKeys, Keys, Search, first_of_many
from htile.compute.exchange import PeerList, exchange, lists_of_peers, slots_of
from htile.compute.keys import Key
from htile.compute.operands import select
from htile.compute.reduce import MAX, identity, warp_reduce

MOST_LOADED = 4  # keys of another warp that a lane loads before it needs them


def first_of_row(
    keys: list[Key] | ElementKeys,
    count: int,
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    abreast: int = 1,
    listing_threads: int = 0,
) -> list[Key]:
    """The `count` largest keys of a row in order, in every thread.

    keys: those of this thread, all as `in_order` makes them. What is no element of the row has the
        lowest number of the dtype. Or `ElementKeys`, if candidates are listed.
    reduction_buffer, mbar_ptr, phase, abreast: as for `row_reduce`; the buffer is of Int64, and has
        a slot for each key that is found.
    listing_threads: the threads of the thread block, if they list candidates and sort no others
        (`htile.compute.candidates`); else 0.
    """
    dtype = keys.dtype if isinstance(keys, ElementKeys) else type(keys[0])
    lanes = min(threads_per_row, 32)
    if listing_threads:
        listed = keys if isinstance(keys, ElementKeys) else Keys(keys)
        search = Search(count, lanes, listing_threads, _first_sorted, _rounds)
        found = first_of_many(listed, search)
    else:
        found = _rounds(_first_sorted(keys, count), count, lanes)
    if mbar_ptr is None and threads_per_row <= 32:
        return found
    words = tuple((key if dtype is Int64 else key.to(Int64),) for key in found)
    exchange(words, slots_of(reduction_buffer, count), mbar_ptr, phase, abreast)
    lists = lists_of_peers(reduction_buffer, count, abreast, identity(MAX, dtype))

    def typed(word: Int64) -> Key:
        return word if dtype is Int64 else word.to(Int32)

    if len(lists) == 1 and lists[0].length > MOST_LOADED:
        return _rounds_of_peers(lists[0], typed)
    return _rounds(_merged([[*map(typed, each.words())] for each in lists], count), count, 32)


def _rounds_of_peers(peer: PeerList, typed: Callable[[Int64], Key]) -> list[Key]:
    """`_rounds` of a warp, of which each lane loads its next key when it needs that one."""
    place, found = peer.first, []
    for k in range(peer.count):
        key = typed(peer.word(place, k * peer.apart + peer.apart - 1))
        found.append(warp_reduce(key, MAX))
        place = select(_is(key, found[-1]), place + peer.apart, place)
    return found


def _rounds(left: list[Key], count: int, lanes: int) -> list[Key]:
    """The `count` largest keys of each group of lanes, of which each has its own in order."""
    dtype, found = type(left[0]), []
    lowest = dtype(identity(MAX, dtype))
    for k in range(count):
        best = warp_reduce(left[0], MAX, lanes)
        found.append(best)
        has_won = _is(left[0], best)
        rest = min(len(left), count - 1 - k)
        following = [*left[1:], lowest]
        left = [select(has_won, following[i], left[i]) for i in range(rest)]
    return found


def _is(key: Key, best: Key) -> Boolean:
    """Whether it is this key, of which the lower word alone tells."""
    return key == best if isinstance(key, Int32) else key.to(Int32) == best.to(Int32)


# Networks of comparisons, inside a thread. None stands for a key that is lower than all others.


def _both(a: Key | None, b: Key | None) -> tuple[Key | None, Key | None]:
    """The larger and the smaller of two keys."""
    if a is None or b is None:
        return (b if a is None else a), None
    if isinstance(a, Int32):
        return cutlass.max(a, b), cutlass.min(a, b)
    is_larger = a > b
    return select(is_larger, a, b), select(is_larger, b, a)


def _first_sorted(keys: list[Key], count: int) -> list[Key]:
    """The `count` largest keys in order, or all if they are fewer: runs are sorted, and merged."""
    run = 1 << (min(count, len(keys)) - 1).bit_length()
    runs = [_sorted(keys[i : i + run])[:count] for i in range(0, len(keys), run)]
    return _merged(runs, count)


def _merged(lists: list[list[Key]], count: int) -> list[Key]:
    """The `count` largest keys in order of several lists that are in order."""
    while len(lists) > 1:
        pairs = zip(lists[::2], lists[1::2], strict=False)
        rest = lists[-1:] if len(lists) % 2 else []
        lists = [_merge(a, b, count) for a, b in pairs] + rest
    return lists[0][:count]


def _merge(a: list[Key], b: list[Key], count: int) -> list[Key]:
    """The same of two lists, by a bitonic merge."""
    most = min(len(a) + len(b), count)
    width = 1 << (most - 1).bit_length()
    a, b = ([*each[:width], *[None] * (width - len(each))] for each in (a, b))
    keys = [_both(x, y)[0] for x, y in zip(a, reversed(b), strict=True)]
    step = width // 2
    while step:
        for i in range(width):
            if not i & step:
                keys[i], keys[i + step] = _both(keys[i], keys[i + step])
        step //= 2
    return keys[:most]


def _sorted(keys: list[Key]) -> list[Key]:
    """Keys in order, the largest first: Batcher's merge exchange (Knuth, volume 3, 5.2.2 M)."""
    keys, n = list(keys), len(keys)
    first = 1 << (n - 1).bit_length() >> 1
    p = first
    while p:
        q, r, d = first, 0, p
        while True:
            for i in range(n - d):
                if i & p == r:
                    keys[i], keys[i + d] = _both(keys[i], keys[i + d])
            if q == p:
                break
            q, r, d = q // 2, p, q - p
        p //= 2
    return keys

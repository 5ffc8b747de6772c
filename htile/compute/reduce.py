"""Row reductions: thread-local halving tree, warp shuffles, then one exchange through shared
memory between the warps of a row (a block barrier) or the CTAs of a cluster (one transaction).

The order of every sum depends only on the element count, threads_per_row and the cluster.
"""

import math
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr
from cutlass._mlir.dialects import vector as _vector

from htile.compute.math import Product, exp_bounded
from htile.utils import bits32, elem_pointer, pack64, store_shared_remote, unpack64

ADD, MUL = cute.ReductionOp.ADD, cute.ReductionOp.MUL
MAX, MIN = cute.ReductionOp.MAX, cute.ReductionOp.MIN


@dataclass(frozen=True)
class ReduceLayout:
    """The reduction buffer: (rows, (warps_per_row, cluster_n), stage), order (1, 0, 2)."""

    num_warps: int
    warps_per_row: int
    cluster_n: int = 1
    stage: int = 1
    dtype: type = Float32

    @property
    def shape(self):
        """(num_warps // warps_per_row, (warps_per_row, cluster_n), stage)."""
        rows = self.num_warps // self.warps_per_row
        return (rows, (self.warps_per_row, self.cluster_n), self.stage)

    @property
    def num_bytes(self) -> int:
        """Bytes of shared memory that the buffer takes."""
        return self.num_warps * self.cluster_n * self.stage * self.dtype.width // 8

    def make_layout(self) -> cute.Layout:
        """The CuTe layout; peers of one row are contiguous, stages are apart."""
        return cute.make_ordered_layout(self.shape, order=(1, 0, 2))

    def allocate(self, smem) -> cute.Tensor:
        """Allocate the buffer from a SmemAllocator."""
        return smem.allocate_tensor(self.dtype, self.make_layout(), byte_alignment=8)


def identity(op, dtype):
    """The Python number that leaves `op` unchanged in `dtype`."""
    if op in (ADD, MUL):
        value = 0 if op is ADD else 1
        return float(value) if dtype.is_float else value
    if dtype.is_float:
        return -math.inf if op is MAX else math.inf
    low = -(1 << (dtype.width - 1)) if dtype.signed else 0
    high = (1 << (dtype.width - (1 if dtype.signed else 0))) - 1
    return low if op is MAX else high


def combine(op, a, b):
    """One step of a reduction on two scalars or vectors; max and min hand NaN on, as torch's do.

    b may be a `Product` where they are added.
    """
    if isinstance(b, Product):
        return b.plus(a)
    if isinstance(a, cute.TensorSSA) and op in (MAX, MIN):
        pairs = [combine(op, a[i], b[i]) for i in range(cute.size(a.shape))]
        return make_vector(pairs, a.shape, a.dtype)
    if op is ADD:
        return a + b
    if op is MUL:
        return a * b
    if isinstance(a, Float32):
        return (cute.arch.fmax if op is MAX else cute.arch.fmin)(a, b, nan=True)
    return (cutlass.max if op is MAX else cutlass.min)(a, b)


def make_vector(values, shape, dtype) -> cute.TensorSSA:
    """A vector of `shape` from as many scalars."""
    words = [dtype(v).ir_value() for v in values]
    kind = cutlass._mlir.ir.VectorType.get([len(words)], words[0].type)
    return cute.TensorSSA(_vector.from_elements(kind, words), shape, dtype)


def _added_halves(x: Product):
    """The first step of the tree; of an odd number of elements all of them."""
    n = cute.size(x.a.shape)
    if n % 2:
        return x.rounded()
    low, high = (x.map(lambda v, i=i: v.reshape((n // 2, 2))[None, i]) for i in (0, 1))
    return high.plus(low.rounded())


def thread_reduce(x, op):
    """Reduce a vector within the thread by a halving tree: element i with i + n/2, and so on.

    x may be a `Product` where it is added up.
    """
    if isinstance(x, Product):
        return thread_reduce(_added_halves(x), op)
    if not isinstance(x, cute.TensorSSA):
        return x
    n = cute.size(x.shape)
    x = x.reshape((n,))
    while op in (ADD, MUL) and n % 2 == 0:  # vector steps: packed f32x2 where there are such
        n //= 2
        halves = x.reshape((n, 2))
        low, high = halves[None, 0], halves[None, 1]
        x = (low + high if op is ADD else low * high).reshape((n,))
    terms = [x[i] for i in range(n)]
    while len(terms) > 1:
        half = len(terms) // 2
        rest = terms[2 * half :]
        terms = [combine(op, terms[i], terms[i + half]) for i in range(half)] + rest
    return terms[0]


def warp_reduce(value, op, threads_in_group: int = 32):
    """Butterfly over groups of `threads_in_group` lanes; every lane gets its group's result."""
    return cute.arch.warp_reduction(
        value, lambda a, b: combine(op, a, b), threads_in_group=threads_in_group
    )


def _to_buffer(value, dtype):
    """Bits of a scalar as an element of the buffer."""
    if value.dtype.width > dtype.width:
        raise TypeError(f"a buffer of {dtype} does not hold {value.dtype}: make it Int64")
    if dtype is type(value):
        return value
    if dtype is Int64:
        return bits32(value).to(Int64)
    return value.bitcast(dtype)


def _from_buffer(word, dtype):
    """The scalar of `dtype` that `_to_buffer` stored."""
    if dtype is type(word):
        return word
    if isinstance(word, Int64):
        return word.to(Int32) if dtype is Int32 else word.to(Int32).bitcast(dtype)
    return word.bitcast(dtype)


def _peers(slot, dtype, abreast):
    """The partials of this thread's row that this lane combines: one, or several strided by 32.

    Lanes repeat when there are fewer than 32 peers, so the butterfly needs no identity.
    """
    warps_per_row, cluster_n = slot.shape[1]
    peers = warps_per_row * cluster_n
    row = cute.arch.warp_idx() // (warps_per_row * abreast)
    lane = cute.arch.lane_idx()
    if peers <= 32:
        return [_from_buffer(slot[row, lane % peers], dtype)]
    return [_from_buffer(slot[row, lane + 32 * i], dtype) for i in range(peers // 32)]


def _combine_peers(slot, op, dtype, abreast):
    """Reduce one slot over all warps and CTAs of the row; every thread gets the result."""
    return combine_lanes(_peers(slot, dtype, abreast), op, min(cute.size(slot.shape[1]), 32))


def combine_lanes(terms, op, width: int):
    """Reduce what each of `width` lanes has, as many terms."""
    while len(terms) > 1:
        half = len(terms) // 2
        terms = [combine(op, terms[i], terms[i + half]) for i in range(half)]
    return warp_reduce(terms[0], op, width)


def _first_place(slot, shares, abreast):
    """Row, warp of the share and first share among the CTA's of what this warp has, of `shares`."""
    warps_per_row, _ = slot.shape[1]
    warp = cute.arch.warp_idx()
    group = warp // warps_per_row
    return group // abreast, warp % warps_per_row, group % abreast * shares


@cute.jit
def _exchange_block(words: tuple, slots: tuple, abreast: cutlass.Constexpr):
    """Lane 0 of each warp leaves its words, of each slot one a share; one barrier for all slots."""
    row, warp, first = _first_place(slots[0], len(words[0]), abreast)
    if cute.arch.lane_idx() == 0:
        for i in cutlass.range_constexpr(len(words)):
            for s in cutlass.range_constexpr(len(words[i])):
                slots[i][row, (warp, first + s)] = words[i][s]
    cute.arch.barrier()


@cute.jit
def _exchange_cluster(words: tuple, slots: tuple, mbar_ptr, phase, abreast: cutlass.Constexpr):
    """Lane c of each warp sends the warp's words, of each slot one a share, to CTA c; one
    transaction for all slots."""
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


def _slots(buffer, count: int):
    """The first `count` slots of a buffer (rows, peers) or (rows, peers, stage)."""
    if cute.rank(buffer) == 2:
        if count != 1:
            raise ValueError(f"{count} values need a buffer of {count} slots, got one slot")
        return (buffer,)
    if buffer.shape[2] < count:
        raise ValueError(f"{count} values need {count} slots, the buffer has {buffer.shape[2]}")
    return tuple(buffer[None, None, i] for i in range(count))


def _exchange(words: tuple, slots: tuple, mbar_ptr, phase, abreast):
    """Each warp's words to where all of the row are; of one CTA where there is no mbarrier."""
    if mbar_ptr is None:
        _exchange_block(words, slots, abreast)
    else:
        _exchange_cluster(words, slots, mbar_ptr, phase, abreast)


def _reduce_across(values, ops, buffer, mbar_ptr, phase, abreast):
    """Combine per-warp scalars over a row's warps and CTAs, with one barrier or transaction.

    values: for each slot a tuple of one scalar for each share of the warp's.
    """
    slots = _slots(buffer, len(values))
    kinds = [type(v[0]) for v in values]
    words = tuple(tuple(_to_buffer(w, buffer.element_type) for w in v) for v in values)
    _exchange(words, slots, mbar_ptr, phase, abreast)
    return tuple(
        _combine_peers(s, op, k, abreast) for s, op, k in zip(slots, ops, kinds, strict=True)
    )


def row_reduce(
    x,
    op,
    threads_per_row: int,
    reduction_buffer=None,
    mbar_ptr=None,
    phase=0,
    init_val=None,
    hook_fn=None,
    abreast=1,
):
    """Reduce over a row: vectors or scalars of each thread -> the row's value in every thread.

    `x` and `op` may be tuples of equal length: slot i of the buffer serves value i, and all share
    one barrier. A value may be a tuple too, of one for each share of the row that the thread works
    on; the cluster of the buffer's shape counts shares. abreast: how many groups of threads of the
    CTA work on a row, each on as many shares, those of one before those of the next. Before a slot
    is used again all threads that read it must have passed a barrier, in a cluster one of the
    cluster; `phase` is then the parity of the mbarrier: 0, 1, 0...
    `init_val` is combined once with the result; `hook_fn()` runs before the exchange.
    """
    if not isinstance(x, tuple):
        init = None if init_val is None else (init_val,)
        return row_reduce(
            (x,), (op,), threads_per_row, reduction_buffer, mbar_ptr, phase, init, hook_fn, abreast
        )[0]
    if len(x) != len(op):
        raise ValueError(f"{len(x)} values need as many ops, got {len(op)}")
    x = tuple(v if isinstance(v, tuple) else (v,) for v in x)
    for v in (v for shares in x for v in shares):
        if v.dtype not in (Float32, Int32, Int64):
            raise TypeError(f"row_reduce takes Float32, Int32 and Int64, not {v.dtype}")
    lanes = min(threads_per_row, 32)
    values = tuple(
        tuple(warp_reduce(thread_reduce(v, o), o, lanes) for v in shares)
        for shares, o in zip(x, op, strict=True)
    )
    if hook_fn is not None:
        hook_fn()
    if mbar_ptr is not None or threads_per_row > 32:
        values = _reduce_across(values, op, reduction_buffer, mbar_ptr, phase, abreast)
    else:
        values = tuple(v for (v,) in values)
    if init_val is not None:
        values = tuple(combine(o, v, i) for o, v, i in zip(op, values, init_val, strict=True))
    return values


def select(condition, a, b):
    """a where the condition holds, else b; of Float32."""
    return Float32(cutlass.select_(condition, a, b))


def exp_diff(x, reference):
    """exp(x - reference); a reference of -inf (nothing seen yet) counts as 0, so that the
    result is 0 and not NaN. NaN and +inf references give NaN, as torch's softmax does."""
    safe = select(reference == -Float32.inf, Float32(0.0), reference)
    return exp_bounded(x - safe)


def about_finite(peak, total):
    """The sum of exp(x - peak) as logsumexp takes it: of exp(x) where the maximum is infinite,
    0 where all x are -inf, inf where one is inf."""
    total = select(peak == -Float32.inf, Float32(0.0), total)
    return select(peak == Float32.inf, Float32.inf, total)


def exchange_pairs(values, reduction_buffer, mbar_ptr, phase, abreast):
    """For each slot pairs of Float32 of this warp, one for each of its shares -> for each slot
    those of all warps of the row that this lane combines, and how many lanes have all.

    The buffer is of Int64. abreast: see `row_reduce`.
    """
    slots = _slots(reduction_buffer, len(values))
    words = tuple(tuple(pack64(*pair) for pair in pairs) for pairs in values)
    _exchange(words, slots, mbar_ptr, phase, abreast)
    found = [[unpack64(word) for word in _peers(slot, Int64, abreast)] for slot in slots]
    pairs = [
        [(low.bitcast(Float32), high.bitcast(Float32)) for low, high in each] for each in found
    ]
    return pairs, min(cute.size(slots[0].shape[1]), 32)


def online_softmax_reduce(
    x, threads_per_row: int, reduction_buffer=None, mbar_ptr=None, phase=0, hook_fn=None, abreast=1
):
    """Row maximum m, sum of exp(x - m), and the vector exp(x - m), with one exchange.

    The buffer is of Int64, one slot: (maximum, sum) travel as one word. A row of -inf alone
    gives (-inf, NaN, NaN), as x - m is NaN there.
    """
    lanes = min(threads_per_row, 32)
    peak = warp_reduce(thread_reduce(x, MAX), MAX, lanes)
    is_row = const_expr(mbar_ptr is None and threads_per_row <= 32)
    exp = exp_bounded(x - peak) if is_row else exp_diff(x, peak)
    total = warp_reduce(thread_reduce(exp, ADD), ADD, lanes)
    if hook_fn is not None:
        hook_fn()
    if is_row:
        return peak, total, exp
    pairs = [(peak, total)]
    row_peak, row_total = _combine_pairs(pairs, reduction_buffer, mbar_ptr, phase, abreast)
    return row_peak, row_total, exp * exp_bounded(peak - row_peak)


def softmax_pair_reduce(
    pairs, threads_per_row: int, reduction_buffer=None, mbar_ptr=None, phase=0, abreast=1
):
    """Row maximum m and sum of exp(x - m), with one exchange, of each thread's own: its maximum,
    and its sum relative to that (to 0 where it is -inf), a pair for each share that it works on.

    The buffer is of Int64, one slot. A row of -inf alone gives (-inf, NaN). abreast: see
    `row_reduce`.
    """
    lanes = min(threads_per_row, 32)
    is_row = const_expr(mbar_ptr is None and threads_per_row <= 32)
    found = []
    for peak, total in pairs:
        warp_peak = warp_reduce(peak, MAX, lanes)
        scale = exp_bounded(peak - warp_peak) if is_row else exp_diff(peak, warp_peak)
        found.append((warp_peak, warp_reduce(total * scale, ADD, lanes)))
    if is_row:
        return found[0]
    return _combine_pairs(found, reduction_buffer, mbar_ptr, phase, abreast)


def _combine_pairs(pairs, reduction_buffer, mbar_ptr, phase, abreast):
    """Each warp's maximum and sum relative to it, of each share -> the row's, with one exchange."""
    (pairs,), width = exchange_pairs((pairs,), reduction_buffer, mbar_ptr, phase, abreast)
    peaks, totals = zip(*pairs, strict=True)
    row_peak = peaks[0]
    for other in peaks[1:]:
        row_peak = combine(MAX, row_peak, other)
    row_peak = warp_reduce(row_peak, MAX, width)
    row_total = totals[0] * exp_bounded(peaks[0] - row_peak)
    for p, t in zip(peaks[1:], totals[1:], strict=True):
        row_total = cute.math.fma(t, exp_bounded(p - row_peak), row_total)
    return row_peak, warp_reduce(row_total, ADD, width)

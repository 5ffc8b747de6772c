"""Row reductions: within a thread, within a warp, and over the warps of a CTA or of a cluster.

A thread adds its elements by halving trees. The lanes of a warp combine by a butterfly of
shuffles. The warps of a row exchange what they have through shared memory: behind one block barrier
(`block_reduce`), or by one transaction of the cluster (`cluster_reduce`). `row_reduce` does all.

The order in which this module adds depends on three numbers alone: how many elements a thread has,
how many threads a row has, and how many CTAs. Of a held row's sums it gets one vector of each
thread. `htile.compute.trees` tells the order in which that was added up.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Int64, Numeric
from cutlass.memory import SmemAllocator

from htile.compute.exchange import exchange, lanes_of_peers, peers, slots_of, to_word
from htile.compute.keys import Indexed, joined
from htile.compute.log_add import LOGADD, log_add
from htile.compute.operands import Vector, make_vector, select
from htile.compute.products import Product

ADD, MUL = cute.ReductionOp.ADD, cute.ReductionOp.MUL
MAX, MIN = cute.ReductionOp.MAX, cute.ReductionOp.MIN


@dataclass(frozen=True)
class ReduceLayout:
    """The reduction buffer, of shape (rows, (warps_per_row, cluster_n), stage).

    The order (1, 0, 2) puts the peers of a row beside each other and the slots apart.

    num_warps: how many warps a CTA has. warps_per_row: how many work on one share of a row.
    cluster_n: how many shares a row has. stage: how many slots, one for each reduction.
    """

    num_warps: int
    warps_per_row: int
    cluster_n: int = 1
    stage: int = 1
    dtype: type[Numeric] = Float32

    @property
    def shape(self) -> tuple:
        """(num_warps // warps_per_row, (warps_per_row, cluster_n), stage)."""
        rows = self.num_warps // self.warps_per_row
        return (rows, (self.warps_per_row, self.cluster_n), self.stage)

    def make_layout(self) -> cute.Layout:
        """The CuTe layout of the buffer."""
        return cute.make_ordered_layout(self.shape, order=(1, 0, 2))

    def allocate(self, smem: SmemAllocator) -> cute.Tensor:
        """Allocate the buffer in shared memory."""
        return smem.allocate_tensor(self.dtype, self.make_layout(), byte_alignment=8)


def identity(op: cute.ReductionOp, dtype: type[Numeric]) -> float | int:
    """The Python number that `op` combines with any x of `dtype` to x."""
    if op in (ADD, MUL):
        value = 0 if op is ADD else 1
        return float(value) if dtype.is_float else value
    if dtype.is_float:
        return math.inf if op is MIN else -math.inf
    low = -(1 << (dtype.width - 1)) if dtype.signed else 0
    high = (1 << (dtype.width - (1 if dtype.signed else 0))) - 1
    return low if op is MAX else high


def combine(
    op: cute.ReductionOp, a: Vector | Numeric | Product, b: Vector | Numeric | Product | Indexed
):
    """One step of a reduction, on two scalars or two vectors.

    A maximum or minimum of a NaN is NaN, as in torch. Where `op` is ADD, both may be `Product`s.
    Where it is MAX, `b` may be `Indexed`: then the first element of `a` stands for all.
    """
    if isinstance(a, Product):
        a = a.rounded()
    if isinstance(b, Product):
        return b.plus(a)
    if isinstance(b, Indexed):
        first = combine(op, a[0], thread_reduce(b, op))
        rest = [a[i] for i in range(1, cute.size(a.shape))]
        return make_vector([first, *rest], a.shape, a.dtype)
    if isinstance(a, cute.TensorSSA) and op in (MAX, MIN):
        pairs = [combine(op, a[i], b[i]) for i in range(cute.size(a.shape))]
        return make_vector(pairs, a.shape, a.dtype)
    if op is ADD:
        return a + b
    if op is MUL:
        return a * b
    if op is LOGADD:
        return log_add(a, b)
    if isinstance(a, Float32):
        return (cute.arch.fmax if op is MAX else cute.arch.fmin)(a, b, nan=True)
    return (cutlass.max if op is MAX else cutlass.min)(a, b)


def _added_halves(x: Product) -> Vector:
    """The first step of the tree over a product; all of it where the number of terms is odd."""
    n = cute.size(x.shape)
    if n % 2:
        return x.rounded()
    low, high = (x.map(lambda v, i=i: v.reshape((n // 2, 2))[None, i]) for i in (0, 1))
    return high.plus(low.rounded())


def thread_reduce(x: Vector | Product | Indexed | Numeric, op: cute.ReductionOp) -> Numeric:
    """Reduce a vector within the thread, by a halving tree: element i with i + n / 2, and so on.

    `x` may be a `Product` where `op` is ADD, and `Indexed` where it is MAX. A scalar stays as it
    is.
    """
    if isinstance(x, Product):
        return thread_reduce(_added_halves(x), op)
    if isinstance(x, Indexed):
        return x.reduced(thread_reduce(x.elements, op))
    if not isinstance(x, cute.TensorSSA):
        return x
    n = cute.size(x.shape)
    x = x.reshape((n,))
    while op in (ADD, MUL) and n % 2 == 0:  # steps on vectors: sm_100 adds two numbers at once
        n //= 2
        halves = x.reshape((n, 2))
        low, high = halves[None, 0], halves[None, 1]
        x = (low + high if op is ADD else low * high).reshape((n,))
    return combine_terms([x[i] for i in range(n)], op)


def combine_terms(terms: list, op: cute.ReductionOp):
    """Reduce scalars, vectors or products by a halving tree.

    One that has no partner waits for the next step.
    """
    while len(terms) > 1:
        half = len(terms) // 2
        rest = terms[2 * half :]
        terms = [combine(op, terms[i], terms[i + half]) for i in range(half)] + rest
    return terms[0]


def add_up(terms: list[Numeric]) -> Numeric:
    """The sum of scalars, by a halving tree, which is exact for 2 ** k equal ones."""
    return combine_terms(terms, ADD)


def how_many(conditions: Iterable[Boolean]) -> Int32:
    """How many of a thread's conditions hold. Four counts do not wait for each other."""
    counts = [Int32(0)] * 4
    for i, holds in enumerate(conditions):
        counts[i % 4] = counts[i % 4] + select(holds, Int32(1), Int32(0))
    return sum(counts[1:], counts[0])


def warp_reduce(value: Numeric, op: cute.ReductionOp, threads_in_group: int = 32) -> Numeric:
    """Reduce a scalar over each group of `threads_in_group` lanes.

    Every lane gets the result of its group. The lanes combine by a butterfly. The largest or
    smallest integer of a whole warp takes one instruction for 32 bits instead.
    """
    if threads_in_group == 32 and op in (MAX, MIN) and isinstance(value, Int32 | Int64):
        return _extreme_of_warp(value, "max" if op is MAX else "min")
    return cute.arch.warp_reduction(
        value, lambda a, b: combine(op, a, b), threads_in_group=threads_in_group
    )


def _extreme_of_warp(x: Int32 | Int64, kind: str) -> Int32 | Int64:
    """The largest ("max") or smallest ("min") integer of a warp.

    Of 64 bits the upper words decide, and the lower ones of those that have the same upper word.
    """
    if isinstance(x, Int32):
        return cute.arch.warp_redux_sync(x, kind)
    low, high = x.to(Int32), (x >> 32).to(Int32)
    found = cute.arch.warp_redux_sync(high, kind)
    low = select(high == found, low, 0 if kind == "max" else -1)
    return joined(cute.arch.warp_redux_sync(low, f"u{kind}"), found)


def combine_lanes(terms: list[Numeric], op: cute.ReductionOp, width: int) -> Numeric:
    """Reduce the terms of each group of `width` lanes, which have equally many each."""
    return warp_reduce(combine_terms(terms, op), op, width)


def block_reduce(values, ops, reduction_buffer: cute.Tensor, abreast: int = 1):
    """Combine what the warps of a row have where one CTA has the row, behind one barrier.

    values: a scalar that all lanes of a warp have, or a tuple of several with an op each. Where the
        warp works on several shares of the row, a value is itself a tuple, with a scalar for each.
    ops: the ADD, MUL, MAX or MIN of each value.
    reduction_buffer: of shape (rows, (warps_per_row, shares), slots) as `ReduceLayout` makes it, or
        one slot of it. Value i takes slot i. Before a slot is used again, all threads must have
        passed a barrier.
    abreast: how many groups of threads work on one row at the same time, each on as many shares.

    Returns what the row has, in every thread: a scalar, or a tuple with one for each value.
    """
    return _reduce_across(values, ops, reduction_buffer, None, 0, abreast)


def cluster_reduce(
    values,
    ops,
    reduction_buffer: cute.Tensor,
    mbar_ptr: cute.Pointer,
    phase: int | Int32 = 0,
    abreast: int = 1,
):
    """Combine what the warps of a row have over the CTAs of a cluster, by one transaction.

    values, ops, abreast: as for `block_reduce`.
    reduction_buffer: of shape (rows, (warps_per_row, cluster_n), slots), or one slot of it. Each
        CTA of the cluster has such a buffer, and each gets what all have. Before a slot is used
        again, all threads of the cluster must have passed a barrier of the cluster.
    mbar_ptr: the mbarrier of the transaction, which all CTAs have initialised.
    phase: the mbarrier's parity: 0 in its first use, then 1, 0 and so on.

    Returns what the row has, in every thread: a scalar, or a tuple with one for each value.
    """
    return _reduce_across(values, ops, reduction_buffer, mbar_ptr, phase, abreast)


def _reduce_across(values, ops, buffer, mbar_ptr, phase, abreast):
    """`cluster_reduce`, or `block_reduce` without an mbarrier."""
    if not isinstance(ops, tuple):
        return _reduce_across((values,), (ops,), buffer, mbar_ptr, phase, abreast)[0]
    values = tuple(v if isinstance(v, tuple) else (v,) for v in values)
    slots = slots_of(buffer, len(values))
    words = tuple(tuple(to_word(w, buffer.element_type) for w in v) for v in values)
    exchange(words, slots, mbar_ptr, phase, abreast)
    return tuple(
        combine_lanes(
            peers(slot, type(v[0]), abreast, identity(op, type(v[0]))), op, lanes_of_peers(slot)
        )
        if isinstance(op, cute.ReductionOp)
        else op.of_row(slot, abreast)
        for slot, v, op in zip(slots, values, ops, strict=True)
    )


def row_reduce(
    x,
    op,
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    init_val=None,
    hook_fn: Callable[[], None] | None = None,
    abreast: int = 1,
):
    """Reduce over a row: every thread gives a vector or a scalar, and gets what the row has.

    x, op: one of each, or tuples of equal length. Value i takes slot i of the buffer, and all share
        one barrier. A value may itself be a tuple, with a vector for each share of the row that the
        thread works on. Vectors are of Float32, Int32 or Int64; TypeError is raised for others. An
        op is ADD, MUL, MAX or MIN, or an object with `of_warp` and `of_row` like `RowMean`.
    threads_per_row: how many threads of a CTA work on one share.
    reduction_buffer: as for `block_reduce` and `cluster_reduce`. It is not needed where one warp
        has the row.
    mbar_ptr, phase: as for `cluster_reduce`; no mbarrier where one CTA has the row.
    init_val: is combined with the result, once.
    hook_fn: is called before the exchange.
    abreast: as for `block_reduce`.
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
        tuple(
            warp_reduce(thread_reduce(v, o), o, lanes)
            if isinstance(o, cute.ReductionOp)
            else o.of_warp(v, lanes)
            for v in shares
        )
        for shares, o in zip(x, op, strict=True)
    )
    if hook_fn is not None:
        hook_fn()
    if mbar_ptr is not None:
        values = cluster_reduce(values, op, reduction_buffer, mbar_ptr, phase, abreast)
    elif threads_per_row > 32:
        values = block_reduce(values, op, reduction_buffer, abreast)
    else:
        values = tuple(v for (v,) in values)
    if init_val is not None:
        values = tuple(combine(o, v, i) for o, v, i in zip(op, values, init_val, strict=True))
    return values

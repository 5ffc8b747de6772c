"""A row's maximum and the sum of exponentials below it, with one exchange instead of two.

Every warp, or every thread in a loop, sums relative to a maximum of its own. Such a pair of numbers
travels as one word of 64 bits, and each sum is moved to the maximum of the row when that is known:
M. Milakov and N. Gimelshein, Online normalizer calculation for softmax (2018), section 3.1.
"""

import math
from collections.abc import Callable

import cutlass.cute as cute
from cutlass import Float32, Int32, const_expr

from htile.compute.exchange import exchange_pairs
from htile.compute.operands import Vector, select
from htile.compute.powers import exp_bounded
from htile.compute.reduce import ADD, MAX, combine, thread_reduce, warp_reduce


def exp_diff(x: Vector | Float32, reference: Float32) -> Vector | Float32:
    """exp(x - reference), where a reference of -inf, which says that nothing was seen, counts as 0.

    The result is then 0 and not NaN. References of NaN and +inf give NaN, as in torch's softmax.
    """
    safe = select(reference == -Float32.inf, Float32(0.0), reference)
    return exp_bounded(x - safe)


def about_finite(peak: Float32, total: Float32) -> Float32:
    """The sum of exp(x - peak) as logsumexp takes it: of exp(x) where the maximum is infinite.

    That is 0 where all x are -inf, and inf where one is inf.
    """
    total = select(peak == -Float32.inf, Float32(0.0), total)
    return select(peak == Float32.inf, Float32.inf, total)


def online_softmax_reduce(
    x: Vector,
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    hook_fn: Callable[[], None] | None = None,
    abreast: int = 1,
) -> tuple[Float32, Float32, Vector]:
    """The row's maximum m, the sum of exp(x - m), and the vector exp(x - m).

    The buffer is of Int64 and has one slot; it and the other arguments are as for `row_reduce`. A
    row of -inf alone gives (-inf, NaN, NaN), because x - m is NaN there.
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
    pairs: list[tuple[Float32, Float32]],
    threads_per_row: int,
    reduction_buffer: cute.Tensor | None = None,
    mbar_ptr: cute.Pointer | None = None,
    phase: int | Int32 = 0,
    abreast: int = 1,
) -> tuple[Float32, Float32]:
    """The row's maximum m and the sum of exp(x - m), of what each thread has summed in a loop.

    pairs: for each share that the thread works on, its maximum and its sum relative to that. The
        sum is relative to 0 where the maximum is -inf.

    The buffer is of Int64 and has one slot; it and the other arguments are as for `row_reduce`. A
    row of -inf alone gives (-inf, NaN).
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


def _combine_pairs(pairs, reduction_buffer, mbar_ptr, phase, abreast) -> tuple[Float32, Float32]:
    """The row's pair of the pairs that each warp has, one for each share of its own."""
    (pairs,), width = exchange_pairs(
        (pairs,), reduction_buffer, mbar_ptr, phase, abreast, (-math.inf, 0.0)
    )
    peaks, totals = zip(*pairs, strict=True)
    row_peak = peaks[0]
    for other in peaks[1:]:
        row_peak = combine(MAX, row_peak, other)
    row_peak = warp_reduce(row_peak, MAX, width)
    row_total = totals[0] * exp_bounded(peaks[0] - row_peak)
    for p, t in zip(peaks[1:], totals[1:], strict=True):
        row_total = cute.math.fma(t, exp_bounded(p - row_peak), row_total)
    return row_peak, warp_reduce(row_total, ADD, width)

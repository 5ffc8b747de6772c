"""The device functions of random numbers: Philox, and its words as numbers between 0 and 1.

Philox4x32-10 is a function of a counter and a key (Salmon, Moraes, Dror and Shaw, Parallel random
numbers: as easy as 1, 2, 3, SC 2011). The constants are those of section 5.3 there.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, Uint64
from cutlass._mlir.dialects import arith, llvm

from htile.compute.exponents import MANTISSA
from htile.compute.logarithms import LN2
from htile.compute.operands import Vector, elementwise, like, make_vector
from htile.compute.products import fma, polynomial

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85  # what the words of the key grow by from round to round
TOGETHER = 4  # elements; with all of a thread at once their words would be live at once too
BELOW_ONE = 1 - 2.0**-24  # the largest float32 below 1
# log(1 + f) is f + f * f times the polynomial with these coefficients for -1/4 <= f <= 1/2, to a
# relative error of 2 ** -24.8, by Lawson's algorithm.
LOG1P = (
    -0.50000060, 0.33333549, -0.24993442, 0.19977076, -0.16822812, 0.14983919, -0.12067371,
    0.054132468,
)  # fmt: skip
THREE_QUARTERS = 0x3F400000  # the bits of 0.75


@elementwise
def philox(counter, key, subsequence, word=0):
    """One of the four words of a counter of 128 bits, an unsigned one of 32 bits, as Int64.

    Operands are Int64. The low and the high half of `counter` are words 0 and 1 of the counter,
    those of `subsequence` words 2 and 3. Calls for several words of the same operands compile to
    the rounds of one.
    """
    size, found = cute.size(counter.shape), []
    for k in range(0, size, TOGETHER):
        columns = range(k, min(k + TOGETHER, size))
        part = (
            make_vector([x[i] for i in columns], (len(columns),), Int64)
            for x in (counter, key, subsequence)
        )
        words = _words(*part)[word].to(Int64)
        found += [words[i] for i in range(len(columns))]
    return make_vector(found, counter.shape, Int64)


@elementwise
def word(index, key, subsequence, vec=1):
    """Word index % 4 of counter index // 4, as `philox`.

    vec: how many elements, from the first on, have an index that is a multiple of it and those that
        follow; so do the next ones. If it is a multiple of 4, a counter serves four elements, whose
        keys and subsequences must be the same.
    """
    size, found = cute.size(index.shape), []
    step = 4 if vec % 4 == 0 and size % 4 == 0 else 1
    firsts = range(0, size, step)
    for k in range(0, len(firsts), TOGETHER):
        columns = firsts[k : k + TOGETHER]
        index_, key_, subsequence_ = (
            make_vector([x[i] for i in columns], (len(columns),), Int64)
            for x in (index, key, subsequence)
        )
        counter = like(index_, arith.shrsi(index_, cute.full_like(index_, 2)))
        words = [each.to(Int64) for each in _words(counter, key_, subsequence_)]
        if step == 1:
            which = index_ & cute.full_like(index_, 3)
            low, high = (
                cute.where(which == cute.full_like(which, k), words[k], words[k + 1])
                for k in (0, 2)
            )
            words = [cute.where(which < cute.full_like(which, 2), low, high)]
        found += [each[i] for i in range(len(columns)) for each in words]
    return make_vector(found, index.shape, Int64)


def _words(counter: Vector, key: Vector, subsequence: Vector) -> tuple[Vector, ...]:
    """The four words, in Uint32."""
    a, b = _halves(counter)
    c, d = _halves(subsequence)
    first, second = _halves(key)
    for k in range(ROUNDS):
        if k:
            first, second = (x + _uint32(x, w) for x, w in zip((first, second), WEYL, strict=True))
        (high_a, low_a), (high_c, low_c) = (
            _product(x, m) for x, m in zip((a, c), MULTIPLIERS, strict=True)
        )
        a, b, c, d = high_c ^ b ^ first, low_c, high_a ^ d ^ second, low_a
    return a, b, c, d


def _uint32(like: Vector, number: int) -> Vector:
    return cute.full_like(like, Uint32(number))


def _halves(x: Vector) -> tuple[Vector, Vector]:
    """The low and the high 32 bits."""
    return x.to(Uint32), like(x, arith.shrui(x, cute.full_like(x, 32))).to(Uint32)


def _product(x: Vector, number: int) -> tuple[Vector, Vector]:
    """The high and the low half of the 64 bits of a product: one instruction."""
    wide = x.to(Uint64)
    wide = wide * cute.full_like(wide, Uint64(number))
    low, high = _halves(wide)
    return high, low


@elementwise
def uniform(word):
    """(w + 0.5) * 2 ** -32 as Float32, of the low 32 bits w of an Int64: from 2 ** -33 on, below 1.

    It takes 3 instructions. One fma does what torch does in two roundings, because a product by a
    power of two is exact.
    """
    number = word.to(Uint32).to(Float32)
    scale, half = (cute.full_like(number, x) for x in (2.0**-32, 2.0**-33))
    number = cute.math.fma(number, scale, half)
    return like(number, llvm.intr_minnum(number, cute.full_like(number, BELOW_ONE)))


@elementwise
def exponential(word):
    """-log((w + 0.5) * 2 ** -32) as Float32, of the low 32 bits w of an Int64, to 2 ulp.

    One logarithm serves numbers below and above 1/2. Above, it is of 1 - t.
    """
    bits = word.to(Int32)
    is_high = bits < 0
    lower = (bits ^ like(bits, arith.shrsi(bits, cute.full_like(bits, 31)))).to(Float32)
    t = fma(lower, 2.0**-32, 2.0**-33)
    number = cute.where(is_high, 1.0 - t, t).bitcast(Int32).reshape(t.shape)
    exponent = (number - THREE_QUARTERS) & ~MANTISSA
    # The number over its power of two, less 1, is from -1/4 to 1/2. Of 1 - t it has no rounding.
    high = cute.where(exponent < 0, fma(t, -2.0, 1.0), -t)
    low = (number - exponent).bitcast(Float32).reshape(t.shape) - 1.0
    rest = cute.where(is_high, high, low)
    logarithm = fma(polynomial(rest, LOG1P), rest * rest, rest)
    return -fma(exponent.to(Float32), LN2 * 2.0**-23, logarithm)

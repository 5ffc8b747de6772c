"""Keys: an element and its index as one int64, so that one maximum finds both.

The upper 32 bits of a key order the elements: NaN is the largest, and 0.0 and -0.0 are one. Of
equal elements the lower 32 bits decide. They are the complement of the index, so the largest key
is that of the first of the largest elements. With `smaller` they are the index, so the smallest key
is that of the first of the smallest elements.

`Indexed` makes one key of all elements of a thread, where a maximum over the row is all that reads
their keys.

A *packed* key is an int32: the lowest bits of its element, which are known to be zero, give way to
those of its index.
"""

from __future__ import annotations

from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Numeric
from cutlass._mlir.dialects import llvm

from htile.compute.exponents import MAGNITUDE
from htile.compute.operands import SIGN, Operand, Vector, lift, make_vector, select

Key = Int64 | Int32
INFINITY = 0x7F800000  # the number of the largest float; those of NaN are above


def key(x: Operand, index: Operand, smaller: bool = False) -> Vector | Numeric:
    """The keys of elements of Float32 or Int32 at indices of 0 to 2**31 - 1."""
    (x,), is_vector = lift(x)
    (index,), are_vector = lift(index)
    shape = x.shape if is_vector else index.shape
    words = []
    for i in range(cute.size(shape)):
        low = index[i if are_vector else 0].to(Int32)
        element = x[i if is_vector else 0]
        words.append(low if smaller else low ^ -1)
        words.append(ordered(element) if x.dtype is Float32 else element)
    keys = make_vector(words, (len(words),), Int32).bitcast(Int64).reshape(shape)
    return keys if is_vector or are_vector else keys[0]


class Indexed:
    """The keys of elements, which a maximum over the row alone reads.

    A thread makes the key of the first of its largest elements, and of no other.
    """

    def __init__(self, elements: Operand, index: Vector):
        """elements: of Float32 or Int32. index: of Int32, ascending from element to element."""
        self.elements, self.index = elements, index

    @property
    def dtype(self) -> type[Numeric]:
        """The dtype of keys."""
        return Int64

    @property
    def shape(self) -> tuple:
        """The shape of the keys."""
        return self.index.shape

    def map(self, function: Callable[[Operand], Vector]) -> Indexed:
        """The keys of what `function` makes of the elements, at the same indices."""
        return Indexed(function(self.elements), self.index)

    def reshape(self, shape: tuple) -> Indexed:
        """The same keys in another shape."""
        return Indexed(self.elements.reshape(shape), self.index.reshape(shape))

    def reduced(self, largest: Float32 | Int32) -> Int64:
        """The largest of these keys, which is that of the first of the largest elements.

        largest: the largest element, or NaN if any is NaN.
        """
        size = cute.size(self.shape)
        elements, index = self.elements.reshape((size,)), self.index.reshape((size,))
        is_float = isinstance(largest, Float32)
        below = _next_below(largest) if is_float else None
        first = index[size - 1]
        for i in reversed(range(size - 1)):
            # No NaN is at most `below`, and an element that is not is a largest one.
            is_less = elements[i] <= below if is_float else elements[i] < largest
            first = select(is_less, first, index[i])
        return joined(first.to(Int32) ^ -1, ordered(largest) if is_float else largest)


def indexed(elements: Operand, index: Vector) -> Indexed:
    """The keys of elements for a maximum over the row."""
    return Indexed(elements, index)


def _next_below(x: Float32) -> Float32:
    """The last float below a number; infinity below NaN, and NaN below -infinity.

    `last_below` of the same number's rank differs from it where the number is zero: it is -0.0,
    which every zero is at most. So it would not tell the zeros that are largest elements from
    those below them.
    """
    negative = Float32(0.0) - x  # of both zeros it is 0.0
    bits = negative.bitcast(Int32)
    below = (bits + select(bits < 0, Int32(-1), Int32(1))) ^ SIGN
    return select(x == x, below.bitcast(Float32), Float32(float("inf")))


def ordered(x: Float32) -> Int32:
    """A number that is in the order of the floats."""
    x = _one_nan(x + 0.0)  # -0.0 + 0.0 is 0.0
    return _turned(x.bitcast(Int32))


def unordered(rank: Int32) -> Float32:
    """The float that `ordered` made this number of; any NaN of the numbers of NaN."""
    return _turned(rank).bitcast(Float32)


def _one_nan(x: Float32) -> Float32:
    """The same number; of every NaN the one of the bits 0x7FFFFFFF, as PTX promises of max.NaN.

    LLVM would take max.NaN of a number and itself for that number.
    """
    words = [x.ir_value(), x.ir_value()]
    return Float32(llvm.inline_asm(Float32.mlir_type, words, "max.NaN.f32 $0, $1, $2;", "=f,f,f"))


def last_below(rank: Int32) -> Float32:
    """The last float below the one of a rank; of the ranks of NaN it is infinity.

    There is a rank of -0.0, so -0.0 is the last below 0.0. A search that counts elements with it
    finds zeros at that rank, which no element has, and `unordered` makes a zero of it, too.
    """
    return unordered(cutlass.min(rank - 1, INFINITY))


def _turned(bits: Int32) -> Int32:
    """Bits of a float as an integer in the order of the floats, and back.

    Of negative floats the one with larger bits is less.
    """
    return bits ^ ((bits >> 31) & MAGNITUDE)


def key_index(keys: Operand, smaller: bool = False) -> Vector | Numeric:
    """The indices in keys, as Int64."""
    return _parts(keys, lambda low, high: (low if smaller else low ^ -1).to(Int64))


def key_value(keys: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """The elements in keys, of Float32 or Int32."""
    if dtype is Int32:
        return _parts(keys, lambda low, high: high)
    return _parts(keys, lambda low, high: unordered(high))


def _parts(keys: Operand, function) -> Vector | Numeric:
    """What a function makes of the lower and the upper word of each key."""
    (keys,), is_vector = lift(keys)
    size = cute.size(keys.shape)
    words = keys.reshape((size,)).bitcast(Int32)
    found = [function(words[2 * i], words[2 * i + 1]) for i in range(size)]
    return make_vector(found, keys.shape, found[0].dtype) if is_vector else found[0]


def in_order(keys: Vector, smaller: bool, index_bits: int) -> Vector:
    """Keys of Int64 so that the first one is the largest, packed if an index has `index_bits`.

    smaller: whether the first key is the smallest. index_bits: 0 if keys do not fit 32 bits.
    """
    if not index_bits:
        return keys ^ -1 if smaller else keys
    size = cute.size(keys.shape)
    words = keys.reshape((size,)).bitcast(Int32)
    low = (1 << index_bits) - 1
    packed = [(words[2 * i + 1] & ~low) | (words[2 * i] & low) for i in range(size)]
    packed = [word ^ -1 for word in packed] if smaller else packed
    return make_vector(packed, keys.shape, Int32)


def as_key(key: Key, smaller: bool, index_bits: int) -> Int64:
    """The key that `in_order` made this one of. A NaN may have other bits."""
    if not index_bits:
        return key ^ -1 if smaller else key
    key = key ^ -1 if smaller else key
    low = (1 << index_bits) - 1
    ordered = (key & ~low) | ((key >> 31) & low)  # of a negative float the lower bits are turned
    return joined((key & low) if smaller else (key | ~low), ordered)


def joined(low: Int32, high: Int32) -> Int64:
    """A key of its lower and its upper word."""
    return make_vector([low, high], (2,), Int32).bitcast(Int64)[0]

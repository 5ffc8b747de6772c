"""Elements that a wide element of memory bundles: taken apart, and put together."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Float16, Float32, Int32, Int64, Numeric

from htile.compute.conversion import convert
from htile.compute.operands import Operand, Vector, lift, make_vector


def unbundle(x: Vector, which: int, count: int, dtype: type[Numeric]) -> Vector:
    """One of the `count` elements of `dtype` in each wide element; float32 for 16-bit floats.

    Of pairs of bfloat16 it takes one instruction, because float32 has their bits in its upper half.
    """
    if dtype is BFloat16 and x.dtype is Int32:
        flat = x.reshape((cute.size(x.shape),))
        words = flat << 16 if which == 0 else flat & -65536
        return Vector(words.ir_value(), flat.shape, Int32).bitcast(Float32).reshape(x.shape)
    size = cute.size(x.shape)
    elements = x.reshape((size,)).bitcast(dtype)
    found = make_vector([elements[k * count + which] for k in range(size)], x.shape, dtype)
    return convert(found, Float32) if dtype in (BFloat16, Float16) else found


def bundle(*parts: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """A wide element of the same element of each part, which becomes one of `dtype`.

    It is a scalar if all parts are.
    """
    values, is_vector = lift(*parts)
    size, count = cute.size(values[0].shape), len(values)
    mixed = [values[k % count][k // count] for k in range(size * count)]
    narrow = make_vector(mixed, (size * count,), values[0].dtype)
    narrow = narrow if narrow.dtype is dtype else convert(narrow, dtype)
    wide = Int32 if count * dtype.width == 32 else Int64
    bundles = narrow.bitcast(wide).reshape(values[0].shape)
    return bundles if is_vector else bundles[0]

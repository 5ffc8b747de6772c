"""Conversions between dtypes, in registers and on the way to memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Int64, Numeric
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects import vector as mlir_vector

from htile.compute.operands import Operand, Vector, lift, make_vector

_TO_FLOAT32 = {Int32: "llvm.nvvm.i2f.rn", Int64: "llvm.nvvm.ll2f.rn"}


def convert(x: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """x as `dtype`.

    Floats become integers towards zero. Numbers become Boolean as x != 0, so NaN becomes True.
    Integers become bfloat16 by way of float32, as in torch. (The largest float16 is below 2 ** 24,
    up to which float32 has every integer, so there one rounding gives the same.)
    """
    (vector,), any_vector = lift(x)
    if dtype is Boolean and vector.dtype is not Boolean:
        # `.to(Boolean)` is inverted for floats (CuTe-DSL 4.8.1), and takes bit 0 of integers.
        result = vector != 0
    elif vector.dtype is BFloat16 and dtype is Float32 and cute.size(vector.shape) % 2 == 0:
        result = _widen(vector)
    elif vector.dtype in _TO_FLOAT32 and dtype in (Float32, BFloat16):
        values = [_to_float32(vector[i]) for i in range(cute.size(vector.shape))]
        result = make_vector(values, vector.shape, Float32).to(dtype)
    else:
        result = vector.to(dtype)
    return result if any_vector else result[0]


def _to_float32(x: Int32 | Int64) -> Float32:
    """An integer rounded to float32, even if a rounding to bfloat16 follows.

    `.to(Float32)` does not do: from sm_90 on the compiler joins the two roundings to one, and
    2 ** 24 + 2 ** 16 + 1 becomes another bfloat16 than in torch.
    """
    name = _TO_FLOAT32[x.dtype]
    return Float32(llvm.call_intrinsic(Float32.mlir_type, name, [x.ir_value()], [], []))


def _widen(x: Vector) -> Vector:
    """bfloat16 as float32, whose upper half has its bits.

    This takes one instruction an element, where `.to` takes 1.5.
    """
    words = x.bitcast(Int32)
    low, high = words << 16, words & -65536
    bits = mlir_vector.interleave(low.ir_value(), high.ir_value())
    return Vector(bits, cute.size(x.shape), Int32).bitcast(Float32).reshape(x.shape)


def round_to(x: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """A float32 or an integer rounded to a 16-bit dtype (half to even), as float32."""
    return convert(convert(x, dtype), Float32)


def to_stored(y: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """What a tensor of `dtype` is to hold for the vector, scalar or Python number `y`.

    Unlike `convert`, it leaves a scalar a scalar: a Boolean that went through a vector would be
    stored as 255.
    """
    if isinstance(y, bool | int | float):
        return dtype(y)
    if y.dtype is dtype:
        return y
    if dtype is Boolean:
        return y != y.dtype(0)
    if dtype is BFloat16 and y.dtype in _TO_FLOAT32:
        return convert(y, dtype)
    return y.to(dtype)

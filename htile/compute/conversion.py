"""Conversions between dtypes, in registers and on the way to memory."""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import (
    BFloat16,
    Boolean,
    Float8E4M3FN,
    Float8E5M2,
    Float8E8M0FNU,
    Float32,
    Int8,
    Int16,
    Int32,
    Int64,
    Numeric,
    Uint8,
)
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects import vector as mlir_vector

from htile.compute.exponents import nearest_power, power_of
from htile.compute.operands import Operand, Vector, lift, make_vector

_TO_FLOAT32 = {Int32: "llvm.nvvm.i2f.rn", Int64: "llvm.nvvm.ll2f.rn"}
_FLOAT8 = (Float8E4M3FN, Float8E5M2, Float8E8M0FNU)
_PAIRS = {Float8E4M3FN: "e4m3x2", Float8E5M2: "e5m2x2"}  # what PTX calls two of them
_PACKED = {Int8: "s8", Uint8: "u8"}  # what PTX calls the bytes that it packs
_E5M2_OVERFLOW = 61440.0  # the least magnitude that float8_e5m2 rounds to infinity


def convert(x: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """x as `dtype`.

    Floats become integers towards zero. Beyond the range of 8 bits they become its end, and NaN
    becomes 0 there; integers lose their upper bits. Beyond the range of float8_e4m3fn numbers and
    infinities become its end, beyond that of float8_e5m2 an infinity, and beyond that of
    float8_e8m0fnu NaN. Numbers become Boolean as x != 0, so NaN becomes True.
    Integers become bfloat16 by way of float32, as in torch. (The largest float16 is below 2 ** 24,
    up to which float32 has every integer, so there one rounding gives the same.)
    """
    (vector,), any_vector = lift(x)
    is_8_bits = dtype in _FLOAT8 or dtype in _PACKED
    if vector.dtype is Float8E8M0FNU:
        vector = _from_e8m0(vector)
    elif vector.dtype in _FLOAT8 or (is_8_bits and vector.dtype.is_float):
        vector = vector.to(Float32)
    if dtype in _FLOAT8 and not vector.dtype.is_float:
        vector = convert(vector, Float32)
    if dtype is Boolean and vector.dtype is not Boolean:
        # `.to(Boolean)` is inverted for floats (CuTe-DSL 4.8.1), and takes bit 0 of integers.
        result = vector != 0
    elif vector.dtype is BFloat16 and dtype is Float32 and cute.size(vector.shape) % 2 == 0:
        result = _widen(vector)
    elif vector.dtype in _TO_FLOAT32 and dtype in (Float32, BFloat16):
        values = [_to_float32(vector[i]) for i in range(cute.size(vector.shape))]
        result = make_vector(values, vector.shape, Float32).to(dtype)
    elif dtype in _PACKED and vector.dtype is Float32:
        result = _packed(vector, dtype)
    elif dtype in _PACKED and vector.dtype is Boolean:
        one, zero = (cute.full(vector.shape, number, dtype) for number in (1, 0))
        result = cute.where(vector, one, zero)
    elif dtype is Float8E5M2:
        result = _to_e5m2(vector)
    elif dtype is Float8E4M3FN:
        result = _to_float8(vector, dtype)
    elif dtype is Float8E8M0FNU:
        result = _to_e8m0(vector)
    else:
        result = vector.to(dtype)
    return result if any_vector else result[0]


def _to_float8(x: Vector, dtype: type[Numeric]) -> Vector:
    """float32 as float8, half to even, with the largest number in place of infinity.

    `.to(dtype)` does not do: the compiler joins it to a conversion before it, and what was an int8
    keeps its bits.
    """
    size, name = cute.size(x.shape), _PAIRS[dtype]
    elements = [x[i] for i in range(size)] + [Float32(0.0)] * (size % 2)
    pairs = []
    for low, high in zip(elements[::2], elements[1::2], strict=True):
        arguments = [high.ir_value(), low.ir_value()]
        text = f"cvt.rn.satfinite.{name}.f32 $0, $1, $2;"
        pairs.append(Int16(llvm.inline_asm(Int16.mlir_type, arguments, text, "=h,f,f")))
    found = make_vector(pairs, (len(pairs),), Int16).bitcast(dtype)
    if size % 2:
        found = make_vector([found[i] for i in range(size)], (size,), dtype)
    return found.reshape(x.shape)


def _to_e5m2(x: Vector) -> Vector:
    """float32 as float8_e5m2. The instruction gives its largest number where infinity is due."""
    flat = x.reshape((cute.size(x.shape),))
    found = _to_float8(flat, Float8E5M2).bitcast(Int8)
    plus, minus = (cute.full(flat.shape, bits, Int8) for bits in (0x7C, 0xFC - 256))
    overflows = cute.math.absf(flat) >= _E5M2_OVERFLOW
    found = cute.where(overflows, cute.where(flat > 0, plus, minus), found)
    return found.bitcast(Float8E5M2).reshape(x.shape)


def _to_e8m0(x: Vector) -> Vector:
    """float32 as float8_e8m0fnu, as torch does it. (The instruction, of sm_100, rounds up.)"""
    return nearest_power(x).to(Int8).bitcast(Float8E8M0FNU).reshape(x.shape)


def _from_e8m0(x: Vector) -> Vector:
    """float8_e8m0fnu as float32. The bytes are exponents."""
    flat = x.reshape((cute.size(x.shape),))
    return power_of(flat.bitcast(Int8).to(Int32) & 0xFF).reshape(x.shape)


def _packed(x: Vector, dtype: type[Numeric]) -> Vector:
    """float32 as integers of 8 bits, saturating: 1.5 instructions an element."""
    size = cute.size(x.shape)
    words = [_to_int32(x[i]) for i in range(size)] + [Int32(0)] * (-size % 4)
    name = _PACKED[dtype]
    packed = Int32(0)
    fours = []
    for k in range(0, len(words), 4):
        for low, high in (words[k + 2 : k + 4], words[k : k + 2]):
            arguments = [high.ir_value(), low.ir_value(), packed.ir_value()]
            text = f"cvt.pack.sat.{name}.s32.b32 $0, $1, $2, $3;"
            packed = Int32(llvm.inline_asm(Int32.mlir_type, arguments, text, "=r,r,r,r"))
        fours.append(packed)
    found = make_vector(fours, (len(fours),), Int32).bitcast(dtype)
    if size % 4:
        found = make_vector([found[i] for i in range(size)], (size,), dtype)
    return found.reshape(x.shape)


def _to_int32(x: Float32) -> Int32:
    """A float as the integer towards zero. Beyond 32 bits it is the end of the range; NaN is 0."""
    return Int32(
        llvm.call_intrinsic(Int32.mlir_type, "llvm.nvvm.f2i.rz", [x.ir_value()], [], [])
    )


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

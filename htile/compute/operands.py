"""How an elementwise device function takes its operands: vectors, scalars and constants in any mix.

Every function of `htile.compute.math` takes vectors (`cute.TensorSSA`), scalars (`Float32`,
`Int32`, `Int64`, `Boolean`) and Python constants. The vectors of one call have one shape.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Numeric, as_numeric
from cutlass._mlir import ir
from cutlass._mlir.dialects import vector as mlir_vector

Vector = cute.TensorSSA
SIGN = -(1 << 31)  # the bit of a float32's sign
# A number up to 2 ** 22 in magnitude that is added to ROUNDER is rounded to a whole one, which the
# low bits of the sum have.
ROUNDER = 1.5 * 2.0**23
Operand = Vector | Numeric | bool | int | float


def like(vector: Vector, value: ir.Value) -> Vector:
    """A raw MLIR value as a vector of the shape and dtype of `vector`."""
    return Vector(value, vector.shape, vector.dtype)


def bits_of(x: Vector) -> Vector:
    """The bits of floats, as Int32."""
    return x.bitcast(Int32).reshape(x.shape)


def float_of(bits: Vector) -> Vector:
    """The floats that have these bits."""
    return bits.bitcast(Float32).reshape(bits.shape)


def nearest_float(number: float) -> float:
    """The float32 that is nearest to a number."""
    return struct.unpack("f", struct.pack("f", number))[0]


def make_vector(values: list, shape: tuple, dtype: type[Numeric]) -> Vector:
    """A vector of `shape` from as many scalars or Python numbers."""
    words = [dtype(v).ir_value() for v in values]
    kind = ir.VectorType.get([len(words)], words[0].type)
    return Vector(mlir_vector.from_elements(kind, words), shape, dtype)


def select(condition: cutlass.Boolean, a: Numeric | float, b: Numeric | float) -> Numeric:
    """`a` where the condition holds, else `b`: scalars of one dtype, without a branch.

    A Python number takes the dtype of the other. Two of them become Float32.
    """
    dtype = next((type(x) for x in (a, b) if isinstance(x, Numeric)), Float32)
    return dtype(cutlass.select_(condition, dtype(a), dtype(b)))


def lift(*operands: Operand) -> tuple[list[Vector], bool]:
    """The operands as vectors of one shape and dtype, and whether any of them was a vector.

    A scalar becomes a vector of one element, which compiles to the same instructions. A Python
    constant takes the dtype of the other operands.
    """
    vectors = [x for x in operands if isinstance(x, Vector)]
    shape = vectors[0].shape if vectors else (1,)
    typed = [x for x in operands if not isinstance(x, bool | int | float)]
    dtypes = {as_numeric(x).dtype if not isinstance(x, Vector) else x.dtype for x in typed}
    if not dtypes:
        kinds = {type(x) for x in operands}
        dtypes = {Float32 if float in kinds else as_numeric(operands[0]).dtype}
    (dtype,) = dtypes  # the operands of one operation have one dtype, because tracing adds casts
    lifted = [x if isinstance(x, Vector) else cute.full(shape, x, dtype) for x in operands]
    return lifted, bool(vectors)


def elementwise(function: Callable[..., Vector]) -> Callable[..., Vector | Numeric]:
    """Let a function of vectors of one shape and dtype take every mix of operands.

    The result is a scalar where no operand is a vector.
    """

    @functools.wraps(function)
    def call(*operands: Operand, **options: bool) -> Vector | Numeric:
        vectors, any_vector = lift(*operands)
        result = function(*vectors, **options)
        return result if any_vector else result[0]

    return call

"""The device functions of the elementwise operations that no Python operator says.

An operand is a vector (`cute.TensorSSA`), a scalar (`Float32`, `Int32`, `Int64`, `Boolean`) or a
Python constant, in any mix. The vectors of one call have one shape, and the result has it too. All
operands have one dtype; functions of floats take Float32. Every function is inlined, and options
are keywords. Counts of instructions are of SASS, for one element, on sm_90a.

Emitted kernels say `from htile.compute import math`, and then `math.exp(x)`. The functions
themselves are in this module and in `powers`, `logarithms`, `angles`, `exponents`, `division`,
`near`, `products`, `conversion`, `bits` and `random`.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Numeric
from cutlass._mlir.dialects import llvm

from htile.compute.angles import cos, cos_bounded, sin, sin_bounded
from htile.compute.bits import bits, float_of, invert, lshift, rshift
from htile.compute.bundles import bundle, unbundle
from htile.compute.conversion import convert, round_to
from htile.compute.division import (
    div,
    div_bounded,
    div_number,
    div_shared,
    floordiv,
    mod,
    reciprocal,
)
from htile.compute.exponents import ceil_log2, exponent, floor_log2, ldexp
from htile.compute.keys import indexed, key, key_index, key_value
from htile.compute.logarithms import (
    log,
    log1p,
    log1p_bounded,
    log2,
    log2_bounded,
    log10,
    log10_bounded,
    log_bounded,
)
from htile.compute.near import (
    div_near,
    exp_near,
    expm1_near,
    gelu_near,
    log1p_near,
    log2_near,
    log10_near,
    log_near,
    pow_near,
    sigmoid_near,
    tanh_near,
)
from htile.compute.operands import Operand, Vector, elementwise, lift, like
from htile.compute.powers import (
    exp,
    exp2,
    exp_bounded,
    exp_quotient,
    expm1,
    pow,
    pow_scalar,
    rsqrt,
    sigmoid,
    sqrt,
)
from htile.compute.products import Product, fma, fms, fnma, product
from htile.compute.random import exponential, philox, uniform, word

# fmt: off
__all__ = [
    "Product", "abs", "bits", "bundle", "ceil", "ceil_log2", "convert", "cos", "cos_bounded", "div",
    "div_bounded", "div_near", "div_number", "div_shared", "eq", "erf", "exp", "exp2",
    "exp_bounded", "exp_near", "exp_quotient", "expm1", "expm1_near", "exponent", "exponential",
    "float_of", "floor", "floor_log2", "floordiv", "fma", "fms", "fnma", "ge", "gelu_near", "gt",
    "indexed", "invert", "key", "key_index", "key_value", "ldexp", "le", "log", "log1p",
    "log1p_bounded", "log1p_near", "log2", "log2_bounded", "log2_near", "log10", "log10_bounded",
    "log10_near", "log_bounded", "log_near", "logical_and", "logical_not", "logical_or",
    "logical_xor", "lshift", "lt", "maximum", "minimum", "mod", "ne", "neg", "negative_zero",
    "philox", "pow", "pow_near", "pow_scalar", "product", "reciprocal", "round", "round_to",
    "rshift", "rsqrt", "sigmoid", "sigmoid_near", "sign", "sin", "sin_bounded", "sqrt", "tanh",
    "tanh_near", "trunc", "unbundle", "uniform", "where", "word",
]
# fmt: on

# Sign and rounding


@elementwise
def neg(x):
    """-x of integers and of floats. The sign bit changes, so -0.0 comes of 0.0."""
    return -x


@elementwise
def abs(x):
    """The magnitude of floats and of integers."""
    return cute.math.absf(x) if x.dtype.is_float else like(x, cute.math.absi(x))


@elementwise
def sign(x):
    """-1, 0 or 1. NaN and -0.0 give 0, as in torch."""
    one = cute.full_like(x, 1)
    return cute.where(x > 0, one, cute.where(x < 0, -one, cute.full_like(x, 0)))


@elementwise
def floor(x):
    """The nearest whole number that is not larger."""
    return cute.math.floor(x)


@elementwise
def ceil(x):
    """The nearest whole number that is not smaller."""
    return cute.math.ceil(x)


@elementwise
def trunc(x):
    """The nearest whole number that is not larger in magnitude."""
    return cute.math.trunc(x)


@elementwise
def round(x):
    """The nearest whole number, half to even, as torch.round."""
    return cute.math.roundeven(x)


def negative_zero() -> Float32:
    """-0.0. CuTe-DSL 4.8.1 takes the 0.0 of the same kernel for it, because the two are equal."""
    return Int32(-(1 << 31)).bitcast(Float32)


# Functions of the device library


@elementwise
def tanh(x, fastmath=False):
    """The hyperbolic tangent. With `fastmath` it is one `tanh.approx`, of 11 bits."""
    return cute.math.tanh(x, fastmath=fastmath)


@elementwise
def erf(x):
    """The error function: 20 instructions, no branch."""
    return cute.math.erf(x)


# Comparisons and choice


@elementwise
def maximum(a, b):
    """The larger, or NaN if either is NaN: one instruction."""
    # cute.math.max takes 4 (two compares, two selects), with and without propagate_nan.
    return like(a, llvm.intr_maximum(a, b)) if a.dtype.is_float else cute.math.max(a, b)


@elementwise
def minimum(a, b):
    """The smaller, or NaN if either is NaN: one instruction."""
    return like(a, llvm.intr_minimum(a, b)) if a.dtype.is_float else cute.math.min(a, b)


@elementwise
def eq(a, b):
    """a == b, which is False with NaN."""
    return a == b


@elementwise
def ne(a, b):
    """a != b, which is True with NaN."""
    return a != b


@elementwise
def lt(a, b):
    """a < b, which is False with NaN."""
    return a < b


@elementwise
def le(a, b):
    """a <= b, which is False with NaN."""
    return a <= b


@elementwise
def gt(a, b):
    """a > b, which is False with NaN."""
    return a > b


@elementwise
def ge(a, b):
    """a >= b, which is False with NaN."""
    return a >= b


@elementwise
def logical_not(x):
    """not x, of Booleans. (`~` of a vector does not trace.)"""
    return x ^ True


@elementwise
def logical_and(a, b):
    """a and b, of Booleans."""
    return a & b


@elementwise
def logical_or(a, b):
    """a or b, of Booleans."""
    return a | b


@elementwise
def logical_xor(a, b):
    """Either a or b but not both, of Booleans."""
    return a ^ b


def where(condition: Operand, a: Operand, b: Operand) -> Vector | Numeric:
    """a where the condition holds, else b, by a select and no branch."""
    (a, b), any_vector = lift(a, b)
    if isinstance(condition, Vector) and not any_vector:
        shape = condition.shape
        a, b = (cute.full(shape, x[0], x.dtype) for x in (a, b))
    elif not isinstance(condition, Vector):
        condition = cute.full(a.shape, condition, Boolean)
        if not any_vector:
            return cute.where(condition, a, b)[0]
    return cute.where(condition, a, b)

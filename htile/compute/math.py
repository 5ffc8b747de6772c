"""The device functions of the elementwise operations that no Python operator says.

An operand is a vector (`cute.TensorSSA`), a scalar (`Float32`, `Int32`, `Int64`, `Boolean`) or a
Python constant, in any mix; vectors of one call have one shape. Every function inlines;
options are keywords. Counts of instructions are of SASS, an element, on sm_90a.
"""

from __future__ import annotations

import functools
import math
import struct
from collections.abc import Callable

import cutlass.cute as cute
from cutlass import BFloat16, Boolean, Float32, Int32, Numeric, as_numeric
from cutlass._mlir.dialects import llvm
from cutlass._mlir.dialects import vector as mlir_vector

Vector = cute.TensorSSA
Operand = Vector | Numeric | bool | int | float
LOG2_E = math.log2(math.e)


def _like(like: Vector, value) -> Vector:
    """A raw MLIR value as a vector of the shape and dtype of `like`."""
    return Vector(value, like.shape, like.dtype)


def _lift(*operands: Operand) -> tuple[list[Vector], bool]:
    """The operands as vectors of one shape and dtype, and whether any of them was a vector.

    Scalars become vectors of one element, which compile to the same instructions. A Python
    constant takes the dtype of the others.
    """
    vectors = [x for x in operands if isinstance(x, Vector)]
    shape = vectors[0].shape if vectors else (1,)
    typed = [x for x in operands if not isinstance(x, bool | int | float)]
    dtypes = {as_numeric(x).dtype if not isinstance(x, Vector) else x.dtype for x in typed}
    if not dtypes:
        kinds = {type(x) for x in operands}
        dtypes = {Float32 if float in kinds else as_numeric(operands[0]).dtype}
    (dtype,) = dtypes  # operands of one operation have one dtype: tracing adds casts
    lifted = [x if isinstance(x, Vector) else cute.full(shape, x, dtype) for x in operands]
    return lifted, bool(vectors)


def _elementwise(function: Callable[..., Vector]) -> Callable[..., Vector | Numeric]:
    """Let `function`, written for vectors of one shape and dtype, take every mix of operands."""

    @functools.wraps(function)
    def call(*operands: Operand, **options: bool) -> Vector | Numeric:
        vectors, any_vector = _lift(*operands)
        result = function(*vectors, **options)
        return result if any_vector else result[0]

    return call


# ---- one operand: sign and rounding -------------------------------------------------------------


@_elementwise
def neg(x):
    """-x, of floats (the sign bit: -0.0 for 0.0) and of integers."""
    return -x


@_elementwise
def abs(x):
    """The magnitude of floats and of integers."""
    return cute.math.absf(x) if x.dtype.is_float else _like(x, cute.math.absi(x))


@_elementwise
def sign(x):
    """-1, 0 or 1; 0 for NaN and for -0.0, as torch."""
    one = cute.full_like(x, 1)
    return cute.where(x > 0, one, cute.where(x < 0, -one, cute.full_like(x, 0)))


@_elementwise
def floor(x):
    """The next whole number towards minus infinity."""
    return cute.math.floor(x)


@_elementwise
def ceil(x):
    """The next whole number towards plus infinity."""
    return cute.math.ceil(x)


@_elementwise
def trunc(x):
    """The next whole number towards zero."""
    return cute.math.trunc(x)


@_elementwise
def round(x):
    """The nearest whole number, half to even, as torch.round."""
    return cute.math.roundeven(x)


# ---- one operand: roots, exponentials, logarithms -----------------------------------------------


@_elementwise
def sqrt(x):
    """The correctly rounded square root."""
    return cute.math.sqrt(x)


@_elementwise
def rsqrt(x):
    """1 / sqrt(x), 2 ulp, of subnormals too: `rsqrt.approx`, 4 instructions."""
    return cute.math.rsqrt(x)


@_elementwise
def exp(x):
    """e ** x, 2 ulp over the whole range, subnormal results included; 8 instructions."""
    return cute.math.exp(x)


@_elementwise
def exp_bounded(x):
    """e ** x in 2 instructions, for x <= 0 as in `x - max`: results below 2 ** -126 become 0.

    The relative error grows as 2 ** -24 * |x|, while the result shrinks as e ** -|x|.
    """
    return cute.math.exp2(x * LOG2_E, fastmath=True)


@_elementwise
def exp2(x, fastmath=False):
    """2 ** x, 2 ulp, with subnormal results; `fastmath` flushes them and takes 1 instruction."""
    return cute.math.exp2(x, fastmath=fastmath)


@_elementwise
def expm1(x):
    """e ** x - 1, without cancellation near 0."""
    return cute.math.expm1(x)


@_elementwise
def log(x, fastmath=False):
    """The natural logarithm; with `fastmath` its absolute, not relative error is small near 1."""
    return cute.math.log(x, fastmath=fastmath)


@_elementwise
def log2(x, fastmath=False):
    """The logarithm to base 2; `fastmath` as for `log`."""
    return cute.math.log2(x, fastmath=fastmath)


@_elementwise
def log10(x, fastmath=False):
    """The logarithm to base 10; `fastmath` as for `log`."""
    # cute.math.log10's own fastmath takes 5 instructions.
    return log2(x, fastmath=True) * math.log10(2) if fastmath else cute.math.log10(x)


@_elementwise
def log1p(x):
    """log(1 + x), without cancellation near 0."""
    return cute.math.log1p(x)


@_elementwise
def sin(x, fastmath=False):
    """The sine; the exact one branches to a slow path for |x| > 105615."""
    return cute.math.sin(x, fastmath=fastmath)


@_elementwise
def cos(x, fastmath=False):
    """The cosine; the exact one branches to a slow path for |x| > 105615."""
    return cute.math.cos(x, fastmath=fastmath)


@_elementwise
def tanh(x, fastmath=False):
    """The hyperbolic tangent; `fastmath` is one `tanh.approx` of 11 bits."""
    return cute.math.tanh(x, fastmath=fastmath)


@_elementwise
def erf(x):
    """The error function; 20 instructions, no branch."""
    return cute.math.erf(x)


@_elementwise
def sigmoid(x, fastmath=False):
    """1 / (1 + e ** -x); `fastmath` takes `exp_bounded`: 4 instructions instead of 10."""
    return _rcp(1.0 + (exp_bounded(-x) if fastmath else exp(-x)))


@_elementwise
def logical_not(x):
    """not x, of Booleans (`~` of a vector does not trace)."""
    return x ^ True


# ---- two operands -------------------------------------------------------------------------------


@_elementwise
def _rcp(x):
    """1 / x, 1 ulp; 0 for |x| > 2 ** 126, inf for subnormal x."""
    return cute.math.rcp(x, approx=True, ftz=True)


def div(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b, correctly rounded where a and the result are normal, else within an ulp.

    Without the slow path of `div.rn`, a call that costs live registers and a stack frame: 6
    instructions an element for a divisor that the row shares, 19 otherwise. Very large and small
    divisors are scaled, the dividend with them, so that no reciprocal is denormal.
    """
    (b,), any_vector = _lift(b)
    magnitude = cute.math.abs(b)
    scale = cute.where(magnitude > 2.0**125, cute.full_like(b, 2.0**-64), cute.full_like(b, 1.0))
    scale = cute.where(magnitude < 2.0**-64, cute.full_like(b, 2.0**64), scale)
    b = b * scale
    rough = _rcp(b)
    error = cute.math.fma(-b, rough, cute.full_like(b, 1.0))
    reciprocal = cute.math.fma(rough, error, rough)
    reciprocal = cute.where(error == error, reciprocal, rough)  # 0, infinity, NaN
    if not any_vector:
        b, reciprocal, scale = b[0], reciprocal[0], scale[0]
    return _corrected(a * scale, b, reciprocal)


def reciprocal(count):
    """1 / count as IEEE rounds it, of one number of elements or chunks, a Float32.

    A compiler knows such a number in unrolled code, and rounds so; rcp.approx does not. One
    correction does for all but a mantissa of ones (P. Markstein, IA-64 and Elementary Functions).
    """
    near = cute.arch.rcp_approx(count)
    return cute.math.fma(cute.math.fma(-count, near, Float32(1.0)), near, near)


def div_bounded(a: Operand, b: Operand) -> Vector | Numeric:
    """a / b in 2 instructions, 2 ulp, for 2 ** -126 <= |b| <= 2 ** 126."""
    return a * _rcp(b)  # of b before it is broadcast: one reciprocal if b is a scalar


@_elementwise
def exp_share(x, total):
    """e ** x / total in 2 instructions, for x <= 0 and 1 <= total <= 2 ** 30, for 16-bit results.

    The relative error is below 2 ** -16: that of the logarithm, 2 ** -22 * log2(total), and
    2 ** -24 * |x|. Results below 2 ** -126 become 0. A total of 0, infinity or NaN, of rows of such
    numbers, gives what the division would.
    """
    scaled = cute.math.fma(x, cute.full_like(x, LOG2_E), -cute.math.log2(total, fastmath=True))
    return cute.math.exp2(scaled, fastmath=True)


def negative_zero() -> Float32:
    """-0.0, for which CuTe-DSL 4.8.1 takes a 0.0 of the same kernel: it finds constants by `==`."""
    return Int32(-(1 << 31)).bitcast(Float32)


def div_number(a: Operand, number: float) -> Vector | Numeric:
    """a / number as `div`, in 5 instructions, for 2 ** -100 <= |number| <= 2 ** 100."""
    (number,) = struct.unpack("f", struct.pack("f", number))
    (reciprocal,) = struct.unpack("f", struct.pack("f", 1 / number))
    if math.frexp(number)[0] in (0.5, -0.5):  # a power of two
        return a * reciprocal
    return _corrected(a, number, reciprocal)


@_elementwise
def _corrected(a, b, reciprocal):
    """a / b from the rounded reciprocal of b.

    The quotient is off by an ulp at most; its exact remainder corrects it (Markstein, IBM J. Res.
    Dev. 34-1, 1990). An infinite one has no remainder (NaN), and a zero keeps its sign.
    """
    quotient = a * reciprocal
    remainder = cute.math.fma(-b, quotient, a)
    corrected = cute.math.fma(remainder, reciprocal, quotient)
    return cute.where(cute.math.abs(corrected) > 0.0, corrected, quotient)


@_elementwise
def floordiv(a, b):
    """torch.floor_divide: exact, so 1.0 // 0.1 is 9; integers divided by 0 give any value.

    About 98 instructions for floats, and branches; 36 for integers, 9 by a constant.
    """
    if not a.dtype.is_float:
        return _integer_floordiv(a, b)[0]
    quotient = a / b
    mod = cute.math.rem(a, b)
    whole = (a - mod) / b
    whole = cute.where((mod != 0.0) & ((b < 0.0) != (mod < 0.0)), whole - 1.0, whole)
    below = cute.math.floor(whole)
    below = cute.where(whole - below > 0.5, below + 1.0, below)  # (a - mod) / b was rounded
    zero = cute.math.copysign(cute.full_like(a, 0.0), quotient)
    result = cute.where(whole != 0.0, below, zero)
    return cute.where(b == 0.0, quotient, result)


@_elementwise
def mod(a, b):
    """torch.remainder: fmod moved to the divisor's sign; integers modulo 0 give any value.

    Not the DSL's `%`, whose result has the sign of a. About 67 instructions for floats, and
    branches; 34 for integers, 9 by a constant.
    """
    if not a.dtype.is_float:
        return _integer_floordiv(a, b)[1]
    rest = cute.math.rem(a, b)
    return cute.where((rest != 0.0) & ((b < 0.0) != (rest < 0.0)), rest + b, rest)


def _integer_floordiv(a: Vector, b: Vector) -> tuple[Vector, Vector]:
    """The quotient towards minus infinity, and the remainder.

    LLVM may conclude from a division that b is not 0, and drop a test of b that the user wrote
    around it; and INT_MIN / -1 is undefined there too. So neither divisor is divided by.
    """
    one = cute.full_like(b, 1)
    divisor = cute.where((b == 0) | (b == -1), one, b)
    quotient = a // divisor
    return cute.where(b == -1, -a, quotient), a - quotient * divisor


def pow(a: Operand, b: Operand) -> Vector | Numeric:
    """a ** b as torch on CUDA, which computes some constant exponents by other means."""
    if isinstance(b, int | float) and not isinstance(a, int | float):
        match float(b):
            case 0.5:
                return sqrt(a)
            case -0.5:
                return rsqrt(a)
            case 1.0:
                return a
            case 2.0:
                return a * a
            case 3.0:
                return a * a * a
            case -1.0:
                return div(1.0, a)
            case -2.0:
                return div(1.0, a * a)
    return _pow(a, b)


@_elementwise
def _pow(a, b):
    """a ** b of the device library: about 80 instructions."""
    return cute.math.pow(a, b)


@_elementwise
def maximum(a, b):
    """The larger, NaN if either is NaN: one instruction an element."""
    # cute.math.max lowers to 4 (two compares, two selects), with and without propagate_nan.
    return _like(a, llvm.intr_maximum(a, b)) if a.dtype.is_float else cute.math.max(a, b)


@_elementwise
def minimum(a, b):
    """The smaller, NaN if either is NaN: one instruction an element."""
    return _like(a, llvm.intr_minimum(a, b)) if a.dtype.is_float else cute.math.min(a, b)


@_elementwise
def eq(a, b):
    """a == b; False with NaN."""
    return a == b


@_elementwise
def ne(a, b):
    """a != b; True with NaN."""
    return a != b


@_elementwise
def lt(a, b):
    """a < b; False with NaN."""
    return a < b


@_elementwise
def le(a, b):
    """a <= b; False with NaN."""
    return a <= b


@_elementwise
def gt(a, b):
    """a > b; False with NaN."""
    return a > b


@_elementwise
def ge(a, b):
    """a >= b; False with NaN."""
    return a >= b


@_elementwise
def logical_and(a, b):
    """a and b, of Booleans."""
    return a & b


@_elementwise
def logical_or(a, b):
    """a or b, of Booleans."""
    return a | b


@_elementwise
def logical_xor(a, b):
    """Either a or b, of Booleans."""
    return a ^ b


# ---- products that are added ---------------------------------------------------------------------


class Product:
    """a * b, of Float32, that a sum over the row alone takes: it is added by fma, unrounded.

    No compiler makes an fma of its own accord (`build/compile.py`), so what is one is said. The
    factors are vectors, or scalars and numbers until `map` has made vectors of them.
    """

    dtype = Float32

    def __init__(self, a: Operand, b: Operand):
        self.a, self.b = a, b

    def map(self, function: Callable[[Operand], Vector]) -> Product:
        """Of both factors."""
        return Product(function(self.a), function(self.b))

    def reshape(self, shape) -> Product:
        """Both factors in another shape."""
        return self.map(lambda factor: factor.reshape(shape))

    def rounded(self) -> Vector:
        """As a vector."""
        return self.a * self.b

    def plus(self, c: Vector) -> Vector:
        """a * b + c, rounded once."""
        return cute.math.fma(self.a, self.b, c)


def product(a: Operand, b: Operand) -> Product:
    """a * b for a sum over the row."""
    return Product(a, b)


@_elementwise
def fma(a, b, c):
    """a * b + c, rounded once."""
    return cute.math.fma(a, b, c)


@_elementwise
def fms(a, b, c):
    """a * b - c, rounded once."""
    return cute.math.fma(a, b, -c)


@_elementwise
def fnma(a, b, c):
    """c - a * b, rounded once."""
    return cute.math.fma(-a, b, c)


# ---- choice and conversion ----------------------------------------------------------------------


def where(condition: Operand, a: Operand, b: Operand) -> Vector | Numeric:
    """a where the condition holds, else b: a select, no branch."""
    (a, b), any_vector = _lift(a, b)
    if isinstance(condition, Vector) and not any_vector:
        shape = condition.shape
        a, b = (cute.full(shape, x[0], x.dtype) for x in (a, b))
    elif not isinstance(condition, Vector):
        condition = cute.full(a.shape, condition, Boolean)
        if not any_vector:
            return cute.where(condition, a, b)[0]
    return cute.where(condition, a, b)


def convert(x: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """x as dtype: floats to integers towards zero, numbers to Boolean as x != 0 (NaN is True)."""
    (vector,), any_vector = _lift(x)
    if dtype is Boolean and vector.dtype is not Boolean:
        result = vector != 0  # `.to(Boolean)` is miscompiled for floats and takes bit 0 of integers
    elif vector.dtype is BFloat16 and dtype is Float32 and cute.size(vector.shape) % 2 == 0:
        result = _widen(vector)
    else:
        result = vector.to(dtype)
    return result if any_vector else result[0]


def _widen(x: Vector) -> Vector:
    """bfloat16 as float32, an instruction an element (`.to`: 1.5): the upper half of its bits."""
    words = x.bitcast(Int32)
    low, high = words << 16, words & -65536
    bits = mlir_vector.interleave(low.ir_value(), high.ir_value())
    return Vector(bits, cute.size(x.shape), Int32).bitcast(Float32).reshape(x.shape)


def round_to(x: Operand, dtype: type[Numeric]) -> Vector | Numeric:
    """float32 rounded to the nearest value of a narrower dtype (half to even), as float32."""
    return convert(convert(x, dtype), Float32)

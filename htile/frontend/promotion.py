"""Operands and their dtypes: torch's promotion, constants, and the checks that go with them.

Every floating type is computed in float32. Promotion inserts CONVERT, which declares nothing. CAST,
which rounds and declares, comes from the user's `.to`, and from what torch itself rounds.
"""

from __future__ import annotations

import math
from functools import cache

import torch

from ..errors import DtypeError, TraceError
from .dtypes import FLOAT8, STORAGE
from .ops import Op, Value, Varies, compute_dtype, dtype_name, join_stored, not_computed
from .tensor import Length, Tensor, constant, fail, node

Number = bool | int | float
NO_OPERAND = "expected a tensor of the row or a Python number, got {}"
INFINITE = 2.0**128 - 2.0**103  # the smallest number that float32 rounds to infinity
BOOL, INT64, FLOAT = torch.bool, torch.int64, torch.float32
BYTES = (torch.int8, torch.uint8)


def operand(x: object) -> Tensor | Number:
    """An operand as it was given: a symbolic tensor or a Python number, nothing else."""
    if isinstance(x, (Tensor, bool, int, float)):
        return x
    if type(x).__module__ == "numpy":
        if hasattr(x, "item") and getattr(x, "shape", None) == ():
            return x.item()
        fail(TraceError, "a numpy array inside a traced function: pass it as a tensor argument")
    fail(TraceError, NO_OPERAND.format(type(x).__name__))


@cache
def _promoted(kinds: frozenset) -> torch.dtype:
    # sorted: tensors with an axis, tensors without, numbers, as torch ranks them
    ranked = sorted(kinds, key=lambda k: -k[1])
    samples = [
        k(1) if ndim < 0 else torch.empty((1,) * ndim, dtype=k, device="meta") for k, ndim in ranked
    ]
    joined = samples[0]
    for sample in samples:
        dtype = torch.result_type(joined, sample)
        joined = torch.empty((1,) * max(0, ranked[0][1]), dtype=dtype, device="meta")
    return FLOAT if dtype.is_floating_point else dtype


def _kind(x: Tensor | Number) -> tuple[type | torch.dtype, int]:
    if isinstance(x, Length):
        return int, -1
    return (x._value.dtype, x.ndim) if isinstance(x, Tensor) else (type(x), -1)


def result_dtype(*operands: Tensor | Number) -> torch.dtype:
    """What torch promotes these to; every floating type is float32."""
    kinds = frozenset(map(_kind, operands))
    float8 = next((dtype for dtype, _ in kinds if dtype in FLOAT8), None)
    dtype = float8 or _promoted(kinds)
    if dtype not in (BOOL, torch.int32, INT64, FLOAT):  # int8 and uint8 together are int16
        stored = dtype if dtype in STORAGE else next(d for d, _ in kinds if d in STORAGE)
        fail(DtypeError, not_computed(stored))
    return dtype


def byte_dtype(*operands: Tensor | Number) -> torch.dtype | None:
    """The integers of 8 bits that torch promotes these to; None where that is another dtype."""
    kinds = frozenset(map(_kind, operands))
    dtypes = {dtype for dtype, _ in kinds}
    if dtypes.isdisjoint(BYTES) or not dtypes.isdisjoint(FLOAT8):
        return None
    dtype = _promoted(kinds)
    return dtype if dtype in BYTES else None


def number(x: Number, dtype: torch.dtype) -> Number:
    """The Python number as a dtype holds it; an integer that does not fit raises."""
    kind = bool if dtype is BOOL else float if dtype.is_floating_point else int
    try:
        value = kind(x)
    except (OverflowError, ValueError):
        fail(DtypeError, f"the number {x} does not fit {dtype_name(dtype)}")
    if kind is float and type(x) is int and not -(2**63) <= x < 2**64:
        fail(DtypeError, f"the number {x} does not fit 64 bits: write it as a float")
    if kind is float and abs(value) >= INFINITE:
        return math.copysign(math.inf, value)
    if kind is int and not torch.iinfo(dtype).min <= value <= torch.iinfo(dtype).max:
        fail(DtypeError, f"the number {x} does not fit {dtype}: {_fitting(x)}")
    return value


def byte(x: Number, dtype: torch.dtype) -> int:
    """The number as an integer of 8 bits holds it: -1 is 255 of uint8, as in torch."""
    try:
        return torch.empty((), dtype=dtype, device="cpu").fill_(x).item()
    except (RuntimeError, OverflowError):
        fail(DtypeError, f"the number {x} does not fit {dtype}: convert the tensor first, x.int()")


def _fitting(x: int) -> str:
    """What to write for an integer that a dtype of integers does not hold."""
    if -(2**63) <= x < 2**63:
        return "convert the tensor first, x.long()"
    same_bits = f"for its 64 bits write {x - 2**64}; " if 0 <= x < 2**64 else ""
    return f"{same_bits}for a number of this size convert the tensor, x.float(), and write {x:.17g}"


def scalar(like: Tensor, x: Number, dtype: torch.dtype) -> Tensor:
    """A number as a constant of a dtype."""
    return constant(like, number(x, dtype), Value((), Varies.SCALAR, dtype))


def as_stored(value: Number, dtype: torch.dtype) -> Number:
    """The number as a tensor of a dtype holds it."""
    held = torch.empty((), dtype=dtype, device="cpu")  # torch.tensor is symbolic while tracing
    return held.fill_(number(value, supported(dtype))).item()


def filled(
    x: Tensor, value: Number, dtype: torch.dtype | None = None, inner: tuple | None = None
) -> Tensor:
    """A constant of the shape and the dtype of `x`, unless others are given."""
    v = x._value
    computed = v.dtype if dtype is None else supported(dtype)
    if computed in BYTES:
        return cast(filled(x, byte(value, computed), torch.int32, inner), computed)
    if computed in STORAGE:
        fail(DtypeError, f"a constant of {computed}: write it in float32 and convert the result")
    stored = v.stored if dtype is None else dtype
    shown = Value(inner or v.inner, Varies.SCALAR, computed, stored, v.spread)
    return constant(x, as_stored(value, stored or computed), shown)


def supported(dtype: object) -> torch.dtype:
    """The dtype that a dtype is computed in; raises with the user's line."""
    if not isinstance(dtype, torch.dtype):
        fail(TraceError, f"expected a torch dtype, got {dtype!r}")
    try:
        return compute_dtype(dtype)
    except DtypeError as error:
        fail(DtypeError, error.message)


def convert(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` in another dtype, as promotion does it: nothing is declared."""
    if x._value.dtype is dtype:
        return x
    return not_zero(x) if dtype is BOOL else node(Op.CONVERT, x, arg=dtype)


def promoted(x: Tensor, dtype: torch.dtype, operands: tuple) -> Tensor:
    """`x`, one of the operands, in the dtype that they have together.

    Where only values without an axis are floating, the dtype declared for them decides, as in
    torch: int64 times a bfloat16 value per row is bfloat16.
    """
    if dtype is FLOAT is not x._value.dtype and x._value.inner:
        floats = [v for o in operands if isinstance(o, Tensor) and (v := o._value).dtype is FLOAT]
        if floats and all(v.stored is not None and not v.inner for v in floats):
            return cast(x, join_stored(floats))
    return convert(x, dtype)


def together(
    *operands_: object, floating: bool = False, like: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The operands as tensors of one dtype, torch's promotion (or float32).

    like: a tensor of their graph; needed where all may be numbers.
    """
    given = tuple(operand(x) for x in operands_)
    dtype = FLOAT if floating else result_dtype(*given)
    like = next(x for x in (like, *given) if isinstance(x, Tensor))
    return tuple(
        promoted(x, dtype, given) if isinstance(x, Tensor) else scalar(like, x, dtype)
        for x in given
    )


def real(x: object, what: str = "") -> Tensor:  # a check is called with `what`
    """`x` in float32: torch takes integers and masks to its functions of reals."""
    return together(x, floating=True)[0]


def into(x: Tensor, v: Value) -> Tensor:
    """`x` in the dtype of another value, and declared as that is: what an assignment does."""
    if v.stored is not None and x._value.stored is not v.stored:
        return cast(x, v.stored)
    if v.dtype in BYTES:
        return cast(x, v.dtype)
    return convert(x, v.dtype) if x._value.stored is v.stored else node(Op.CONVERT, x, arg=v.dtype)


def put_into(value: Tensor, x: Tensor, what: str) -> Tensor:
    """`value` as elements of `x`, which an assignment makes of it. what: that assignment."""
    if not torch.can_cast(value._value.dtype, x._value.dtype):
        fail(DtypeError, f"{what} cannot put {value._value.dtype} into {x._value.dtype}: convert "
             "the value, or x before")  # fmt: skip
    return into(value, x._value)


def alike(what: str, *operands_: object) -> None:
    """Refuse values of several dtypes, where torch does not promote."""
    values = [x._value for x in operands_ if isinstance(x, Tensor)]
    if len({v.dtype for v in values}) > 1 or len({v.stored for v in values} - {None}) > 1:
        fail(DtypeError, f"{what} takes values of one dtype: convert them, y.to(x.dtype)")


def refuse(what: str, x: Tensor, remedy: str) -> None:
    """Raise that a dtype does not take an operation."""
    fail(DtypeError, f"{what} of {dtype_name(x._value.dtype)} is not defined: {remedy}")


def floating(x: Tensor, what: str) -> Tensor:
    """`x`, which must be floating: torch defines `what` for nothing else."""
    if x._value.dtype is not FLOAT:
        refuse(what, x, "convert it first, x.float()")
    return x


def numeric(x: Tensor, what: str) -> Tensor:
    """`x`, which must not be bool."""
    if x._value.dtype is BOOL:
        refuse(what, x, "convert it first, x.int() or x.float(); ~x inverts a mask")
    return x


def not_zero(x: Tensor) -> Tensor:
    """`x` as bool."""
    return x if x._value.dtype is BOOL else node(Op.NE, x, scalar(x, 0, x._value.dtype))


def in_32_bits(x: object, other: object = 0) -> object:
    """Integers of 8 bits as int32, for a comparison with `other`; anything else as it is.

    A Python integer that has no place in the dtype is left to be refused: torch wraps it.
    """
    if not isinstance(x, Tensor) or x._value.dtype not in BYTES:
        return x
    limits = torch.iinfo(x._value.dtype)
    is_beyond = type(other) is int and not limits.min <= other <= limits.max
    return x if is_beyond else cast(x, torch.int32)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x.to(dtype)`: declares the dtype; to a narrower one it rounds."""
    computed, v = supported(dtype), x._value
    if dtype is BOOL:
        return not_zero(in_32_bits(x))
    if computed is v.dtype and (computed is not FLOAT or v.stored is dtype is FLOAT):
        return x
    return node(Op.CAST, x, arg=dtype)

"""Everything that is known of a dtype: its names, and what it is computed in."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ..errors import DtypeError


class Dtype(NamedTuple):
    """A dtype of tensors in memory.

    name: HTile's short name.
    computed: the dtype that values of it are computed in; its own for one of `STORAGE`; None where
        HTile does not take it.
    cute: the name of CuTe-DSL's type of its elements.
    """

    dtype: torch.dtype
    name: str
    computed: torch.dtype | None
    cute: str


DTYPES = {
    known.dtype: known
    for known in (
        Dtype(torch.float32, "f32", torch.float32, "Float32"),
        Dtype(torch.bfloat16, "bf16", torch.float32, "BFloat16"),
        Dtype(torch.float16, "f16", torch.float32, "Float16"),
        Dtype(torch.int32, "i32", torch.int32, "Int32"),
        Dtype(torch.int64, "i64", torch.int64, "Int64"),
        Dtype(torch.bool, "bool", torch.bool, "Boolean"),
        Dtype(torch.float8_e4m3fn, "e4m3", torch.float8_e4m3fn, "Float8E4M3FN"),
        Dtype(torch.float8_e5m2, "e5m2", torch.float8_e5m2, "Float8E5M2"),
        Dtype(torch.float8_e8m0fnu, "e8m0", torch.float8_e8m0fnu, "Float8E8M0FNU"),
        Dtype(torch.int8, "i8", torch.int8, "Int8"),
        Dtype(torch.uint8, "u8", torch.uint8, "Uint8"),
        Dtype(torch.float64, "f64", None, "Float64"),
        Dtype(torch.int16, "i16", None, "Int16"),
    )
}

HALVES = (torch.bfloat16, torch.float16)  # which tensor cores multiply
E8M0 = torch.float8_e8m0fnu  # powers of two and NaN: a byte has the exponent, from -127 to 127
FLOAT8_BY_INSTRUCTION = frozenset({torch.float8_e4m3fn, torch.float8_e5m2})
FLOAT8 = FLOAT8_BY_INSTRUCTION | {E8M0}
STORAGE = FLOAT8 | {torch.int8, torch.uint8}
"""Dtypes of 8 bits: a value of one is loaded, stored and converted; integers become int32 first."""


def dtype_name(dtype: torch.dtype) -> str:
    """The short name of a dtype that HTile takes (`bf16`), torch's own name of any other."""
    known = DTYPES.get(dtype)
    return known.name if known and known.computed else str(dtype).removeprefix("torch.")


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype that a stored dtype is computed in: float32 for floating types of 16 bits or more.

    Raises DtypeError for a dtype that HTile does not take.
    """
    known = DTYPES.get(dtype)
    if known and known.computed:
        return known.computed
    names = ", ".join(str(d).removeprefix("torch.") for d, k in DTYPES.items() if k.computed)
    raise DtypeError(f"dtype {dtype_name(dtype)} is not supported; HTile takes {names}")

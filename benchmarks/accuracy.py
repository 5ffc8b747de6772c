"""How exact the elementwise functions are: their largest error over every float32 number.

`python -m benchmarks.accuracy` needs a GPU. It compares HTile's functions and torch's own with
torch's in float64. Operands are float32; results are float32, and 16-bit dtypes, for which HTile
has shorter functions. A function of two operands gets a dense sample: random pairs of numbers of
every magnitude, and all pairs of edge cases.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from itertools import product
from math import inf, nan, pi, sqrt

import torch

import htile

from .instructions import ONE, TWO, of_row

N = 4096  # elements of a row
CHUNK = 1 << 26  # numbers that are compared at a time
PAIRS = 1 << 30  # random pairs of a function of two operands
SMALLEST = 2.0**-126  # the smallest normal number

# What torch computes in float64 by a formula that loses digits, by one that does not.
STABLE: dict[str, Callable] = {
    "gelu": lambda x: x * 0.5 * torch.erfc(-x / sqrt(2)),
    "gelu, tanh": lambda x: x * torch.sigmoid(2 * sqrt(2 / pi) * (x + 0.044715 * x**3)),
    "softplus": lambda x: x.clamp(min=0) + torch.log1p(torch.exp(-x.abs())),
    "logsigmoid": lambda x: x.clamp(max=0) - torch.log1p(torch.exp(-x.abs())),
    "mish": lambda x: x * _tanh_of_softplus(x),
}
# Of a dtype: its binary digits after the point, its least exponent, and that beyond its greatest.
FORMATS = {
    torch.float32: (23, -126, 128),
    torch.bfloat16: (7, -126, 128),
    torch.float16: (10, -14, 16),
}
NARROW = {"bf16": torch.bfloat16, "fp16": torch.float16}
# The functions that have a shorter form for 16 bits, and some that are made of them.
SHORTER = (
    "exp", "expm1", "log", "log2", "log10", "log1p", "sqrt", "sigmoid", "tanh", "silu", "gelu",
    "gelu, tanh", "softplus", "logsigmoid", "mish", "elu", "x / 3", "x / y", "pow(x, 1.75)",
)  # fmt: skip
EDGES = [
    sign * x
    for sign in (1.0, -1.0)
    for x in (
        0.0, 2.0**-149, 2.0**-127, SMALLEST, 1e-30, 2.0**-24, 0.1, 0.5, 1 - 2.0**-24, 1.0,
        1 + 2.0**-23, 1.5, 2 - 2.0**-23, 2.0, 3.0, 7.0, 10.0, 88.0, 126.0, 127.0, 2.0**24,
        2.0**31, 1e30, 2.0**126, 2.0**127, (2 - 2.0**-23) * 2.0**127, inf, nan,
    )
]  # fmt: skip


def _tanh_of_softplus(x: torch.Tensor) -> torch.Tensor:
    """With e = exp(-|x|), which does not overflow."""
    e = torch.exp(-x.abs())
    above = (1 + 2 * e) / (1 + 2 * e + 2 * e * e)
    below = e * (e + 2) / (e * (e + 2) + 2)
    return torch.where(x > 0, above, below)


def errors(got: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The error of numbers in ulp of their dtype, of the float64 ones that they stand for.

    It is infinite where one is NaN and the other is not. A number too large for the dtype counts
    as the power of two beyond the largest one, and so does an infinity.
    """
    digits, least, beyond = FORMATS[got.dtype]
    exponent = torch.frexp(expected.nan_to_num(1.0, inf, -inf))[1] - 1
    exponent = torch.where(expected.isinf(), beyond, exponent).clamp(least, beyond - 1)
    limit = 2.0**beyond
    difference = (got.double().clamp(-limit, limit) - expected.clamp(-limit, limit)).abs()
    found = torch.ldexp(difference, digits - exponent)
    is_wrong = got.isnan() != expected.isnan()
    return torch.where(is_wrong, inf, torch.where(expected.isnan(), 0.0, found))


def all_numbers() -> Iterator[tuple[torch.Tensor, ...]]:
    """Every float32 number, in tensors of rows."""
    for start in range(-(1 << 31), 1 << 31, CHUNK):
        bits = torch.arange(start, start + CHUNK, device="cuda", dtype=torch.int32)
        yield (bits.view(torch.float32).view(-1, N),)


def pairs() -> Iterator[tuple[torch.Tensor, ...]]:
    """All pairs of edge cases, then random pairs.

    Half of these have any bits. The others have magnitudes from 2 ** -12 to 2 ** 12.
    """
    edges = torch.tensor(list(product(EDGES, EDGES)), device="cuda", dtype=torch.float32)
    repeats = -(-N // len(edges))
    yield tuple(x.repeat(repeats)[:N].view(1, N).contiguous() for x in edges.T)
    generator = torch.Generator("cuda").manual_seed(1)
    for k in range(PAIRS // CHUNK):
        shape, bits = (CHUNK // N, N), []
        for _ in range(2):
            any_bits = torch.randint(
                -(1 << 31), 1 << 31, shape, device="cuda", dtype=torch.int32, generator=generator
            )
            if k % 2:
                exponent = ((any_bits >> 8) & 0x7FFFFF) % 24 + 115
                any_bits = any_bits & -0x7F800001 | exponent << 23
            bits.append(any_bits.view(torch.float32))
        yield tuple(bits)


def largest(
    name: str, function: Callable, operands: int, dtype: torch.dtype
) -> dict[str, dict[str, float]]:
    """The largest error of HTile and of torch in results of a dtype, and where it is.

    Errors of results or operands below 2 ** -126 in magnitude are apart ("subnormal"), because
    some functions take such a number for 0.
    """
    reference = STABLE.get(name, function)
    if dtype is not torch.float32:
        function = _rounded(function, dtype)
    kernel = htile.rowwise(of_row(function, operands))
    found = {
        (who, where): (0.0, ()) for who in ("htile", "torch") for where in ("normal", "subnormal")
    }
    for args in all_numbers() if operands == 1 else pairs():
        expected = reference(*(x.double() for x in args))
        is_normal = expected.abs() >= SMALLEST
        is_normal |= expected.isnan()
        for x in args:
            is_normal &= (x.abs() >= SMALLEST) | (x == 0) | x.isnan()
        is_normal |= expected == 0
        for who, call in (("htile", kernel), ("torch", function)):
            error = errors(call(*args), expected)
            for where, inside in (("normal", is_normal), ("subnormal", ~is_normal)):
                here = torch.where(inside, error, 0.0).view(-1)
                worst, at = here.max(0)
                if worst.item() > found[who, where][0]:
                    place = tuple(x.reshape(-1)[at].item() for x in args)
                    found[who, where] = (worst.item(), place)
    result: dict[str, dict] = {"htile": {}, "torch": {}}
    for (who, where), (worst, place) in found.items():
        result[who][where] = worst
        result[who][f"{where} at"] = [x.hex() for x in place]
    return result


def _rounded(function: Callable, dtype: torch.dtype) -> Callable:
    return lambda *args: function(*args).to(dtype)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.accuracy", description=__doc__)
    parser.add_argument("names", nargs="*", help="functions (all of them)")
    parser.add_argument("--json", help="a file for the figures")
    options = parser.parse_args()
    print("Largest error in ulp of the result's dtype; (of results or operands below 2 ** -126)")
    print(f"{'function':14}  {'dtype':5}  {'htile':>20}  {'torch':>20}  at")
    found: dict[str, dict] = {}
    for operands, functions in ((1, ONE), (2, TWO)):
        for name, function in functions.items():
            if options.names and name not in options.names:
                continue
            dtypes = {"fp32": torch.float32} | (NARROW if name in SHORTER else {})
            for short, dtype in dtypes.items():
                result = largest(name, function, operands, dtype)
                found.setdefault(name, {})[short] = result
                columns = [f"{r['normal']:9.2f} ({r['subnormal']:8.3g})" for r in result.values()]
                at = ", ".join(result["htile"]["normal at"])
                line = f"{name:14}  {short:5}  {columns[0]:>20}  {columns[1]:>20}  {at}"
                print(line, flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=1)


if __name__ == "__main__":
    main()

"""How many instructions each elementwise function takes, and a scan: counted in the machine code.

`python -m benchmarks.instructions` prints them for an element, those of the special function units
(MUFU) apart. No GPU is needed. A kernel with 32 elements a thread is compared with one of 16, so
that only what an element takes is counted. What it takes to load, convert and store one is taken
away.
"""

from __future__ import annotations

import argparse
import struct
from collections.abc import Callable

import torch
import torch.nn.functional as F

import htile
from tests.primitives.device_code import sections

N = 4096
MUFU = 0x108  # the operation, in the low 9 bits of an instruction, of the special function units
NOP = 0x118
BYTES = 16  # of an instruction

ONE: dict[str, Callable] = {
    "exp": torch.exp,
    "exp2": torch.exp2,
    "expm1": torch.expm1,
    "log": torch.log,
    "log2": torch.log2,
    "log10": torch.log10,
    "log1p": torch.log1p,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "erf": torch.erf,
    "erfc": torch.erfc,
    "ndtr": lambda x: torch.special.ndtr(x),
    "lgamma": torch.lgamma,
    "digamma": torch.digamma,
    "lgamma(softplus)": lambda x: torch.lgamma(F.softplus(x)),
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "x / 3": lambda x: x / 3.0,
    "pow(x, 1.75)": lambda x: x**1.75,
    "pow(3.5, x)": lambda x: 3.5**x,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu, tanh": lambda x: F.gelu(x, approximate="tanh"),
    "softplus": F.softplus,
    "logsigmoid": F.logsigmoid,
    "mish": F.mish,
    "elu": F.elu,
    "floor": torch.floor,
    "round": torch.round,
    "sign": torch.sign,
    "abs": torch.abs,
    "signbit": lambda x: torch.signbit(x).float(),
    "x // 3": lambda x: x // 3.0,
    "x % 3": lambda x: x % 3.0,
    "cumsum": lambda x: x.cumsum(-1),
    "cumsum in int64": lambda x: x.cumsum(-1, dtype=torch.int64),
    "cumprod": lambda x: x.cumprod(-1),
    "cummax": lambda x: x.cummax(-1).values,
    "logcumsumexp": lambda x: x.logcumsumexp(-1),
}
TWO: dict[str, Callable] = {
    "x / y": lambda x, y: x / y,
    "x // y": lambda x, y: x // y,
    "x % y": lambda x, y: x % y,
    "x ** y": lambda x, y: x**y,
    "maximum": torch.maximum,
    "copysign": torch.copysign,
    "atan2": torch.atan2,
    "where": lambda x, y: torch.where(x > y, x, 0.0),
}


def counted(cubin: bytes) -> tuple[int, int]:
    """The instructions of a kernel, and those of them for MUFU."""
    code = b"".join(content for name, content in sections(cubin) if name.startswith(b".text"))
    found = struct.unpack(f"<{len(code) // 8}Q", code)[::2]
    kinds = [word & 0x1FF for word in found if word & 0x1FF != NOP]
    return len(kinds), kinds.count(MUFU)


def of_element(
    function: Callable, inputs: int, arch: str = "sm_90a", dtype: torch.dtype = torch.float32
) -> tuple[float, float]:
    """Instructions for an element, and those for MUFU, of a function of rows of a dtype."""
    args = [torch.empty(64, N, device="meta", dtype=dtype) for _ in range(inputs)]
    counts = []
    for threads in (N // 32, N // 16):
        plan = {"threads_per_row": threads, "num_threads": threads, "form": "held", "cluster_n": 1}
        plan["loader"] = "direct"
        kernel = htile.rowwise(function).with_plan(**plan).inspect(*args, arch=arch)
        counts.append(counted(kernel.cubin))
    (many, special), (few, less) = counts
    return (many - few) / 16, (special - less) / 16


def table(names: list[str], dtype: torch.dtype) -> dict[str, tuple[float, float]]:
    """Of each of these functions, without what it takes to load, convert and store."""
    found = {}
    for inputs, every in ((1, ONE), (2, TWO)):
        functions = {name: every[name] for name in names if name in every}
        if not functions:
            continue
        plain, _ = of_element(_added_one if inputs == 1 else _added, inputs, dtype=dtype)
        for name, function in functions.items():
            count, special = of_element(of_row(function, inputs), inputs, dtype=dtype)
            found[name] = count - (plain - 1), special
    return found


def _added_one(x):
    return 1.0 + x


def _added(x, y):
    return x + y


def of_row(function: Callable, inputs: int) -> Callable:
    """As a function of plain parameters, which HTile wants."""
    if inputs == 1:
        return lambda x: function(x)
    return lambda x, y: function(x, y)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.instructions", description=__doc__)
    every = [*ONE, *TWO]
    parser.add_argument("names", nargs="*", help="functions (all of them)", metavar="FUNCTION")
    names = parser.parse_args().names or every
    if unknown := {*names} - {*every}:
        parser.error(f"unknown functions {', '.join(unknown)}; there are {', '.join(every)}")
    print("Instructions of an element on sm_90a, + those for MUFU, by the dtype of rows")
    print(f"{'function':14}  {'float32':>14}  {'bfloat16':>14}")
    exact, short = table(names, torch.float32), table(names, torch.bfloat16)
    for name in exact:
        both = exact[name], short[name]
        columns = [f"{count - special:.1f} + {special:.1f}" for count, special in both]
        print(f"{name:14}  {columns[0]:>14}  {columns[1]:>14}")


if __name__ == "__main__":
    main()

"""How many instructions each elementwise function takes: counted in the machine code of a kernel.

`python -m benchmarks.instructions` prints them for an element, those of the special function units
(MUFU) apart. No GPU is needed. A kernel with 16 elements a thread is compared with one of 8, so
that only what an element takes is counted. What it takes to load, convert and store one is taken
away.
"""

from __future__ import annotations

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
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "reciprocal": torch.reciprocal,
    "x / 3": lambda x: x / 3.0,
    "pow(x, 1.75)": lambda x: x**1.75,
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
    "x // 3": lambda x: x // 3.0,
    "x % 3": lambda x: x % 3.0,
}
TWO: dict[str, Callable] = {
    "x / y": lambda x, y: x / y,
    "x // y": lambda x, y: x // y,
    "x % y": lambda x, y: x % y,
    "x ** y": lambda x, y: x**y,
    "maximum": torch.maximum,
    "where": lambda x, y: torch.where(x > y, x, 0.0),
}


def counted(cubin: bytes) -> tuple[int, int]:
    """The instructions of a kernel, and those of them for MUFU."""
    code = b"".join(content for name, content in sections(cubin) if name.startswith(b".text"))
    found = struct.unpack(f"<{len(code) // 8}Q", code)[::2]
    kinds = [word & 0x1FF for word in found if word & 0x1FF != NOP]
    return len(kinds), kinds.count(MUFU)


def of_element(function: Callable, inputs: int, arch: str = "sm_90a") -> tuple[float, float]:
    """Instructions for an element, and those for MUFU, of a function of one row, in float32."""
    args = [torch.empty(64, N, device="meta") for _ in range(inputs)]
    counts = []
    for threads in (N // 16, N // 8):
        plan = {"threads_per_row": threads, "num_threads": threads, "loader": "direct"}
        kernel = htile.rowwise(function).with_plan(**plan).inspect(*args, arch=arch)
        counts.append(counted(kernel.cubin))
    (many, special), (few, less) = counts
    return (many - few) / 8, (special - less) / 8


def table() -> dict[str, tuple[float, float]]:
    """Of each function, without what it takes to load and store."""
    found = {}
    for inputs, functions in ((1, ONE), (2, TWO)):
        plain, _ = of_element(_added_one if inputs == 1 else _added, inputs)
        for name, function in functions.items():
            count, special = of_element(of_row(function, inputs), inputs)
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
    print(f"{'function':14}  instructions   MUFU   of an element, float32, sm_90a")
    for name, (count, special) in table().items():
        print(f"{name:14}  {count - special:12.1f}  {special:5.1f}")


if __name__ == "__main__":
    main()

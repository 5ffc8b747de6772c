"""Row functions of the generator that the tests use, of any length: `PROGRAMS`."""

from __future__ import annotations

from dataclasses import replace

import torch

from benchmarks.kernels import LENIENT, Kernel
from tests.generated.programs import Arg, Program, program

from .variant import BOUNDED, POSITIVE, Parameter, kernel_of

COUNT = 24
ROLES = {"row": "row", "column": "column", "per_row": "per-row"}


def _fits(p: Program) -> bool:
    """Whether it is of float rows of the cell's dtype, and gives something that a kernel writes."""
    args = p.args
    return (
        args[0].dtype in (torch.bfloat16, torch.float16, torch.float32)
        and all(a.role in ROLES and a.kind != "grid" for a in args)
        and sum(a.role == "row" for a in args) <= 3
        and len(p.lines) >= 4
    )


def _parameter(a: Arg, first: torch.dtype) -> Parameter:
    """Arguments of the first one's dtype are of the cell's dtype."""
    values = POSITIVE if a.kind == "positive" else BOUNDED
    return Parameter(ROLES[a.role], None if a.dtype is first else a.dtype, values)


def _programs() -> dict[str, Kernel]:
    """The first programs that fit, by seed; none is passed over for its speed."""
    found: dict[str, Kernel] = {}
    seed = 0
    while len(found) < COUNT:
        p = program(seed, "all", is_first=True)
        seed += 1
        if not _fits(p):
            continue
        parameters = tuple(_parameter(a, p.args[0].dtype) for a in p.args)
        function = replace(p, n=0, lead=()).function()
        found[function.__name__] = kernel_of(function, parameters, LENIENT)
    return found


PROGRAMS = _programs()

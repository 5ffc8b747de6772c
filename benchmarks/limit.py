"""The limit kernel: the same bytes as a kernel's rows in as many reads and writes, and no work.

Columns are left out, and so are values per row where rows are written: 2 % of the bytes at N = 64,
nothing at 4096. Of rows that are only read they are 8 % at N = 64, and Triton's kernel moves them.
Where torch and Triton have more than one such kernel, the fastest of the cell is the limit.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.contenders import Absent
from benchmarks.kernels import Kernel


@dataclass(frozen=True)
class Candidate:
    """One way to move the bytes; `right` says, after a call, whether it moved them."""

    name: str
    call: Callable[[], object]
    right: Callable[[], bool]


def candidates(kernel: Kernel, args: tuple) -> list[Candidate]:
    """Every limit kernel for these arguments; their outputs are allocated here, once.

    Raises Absent for a mix of reads and writes that has none.
    """
    pairs = zip(kernel.roles, args, strict=True)
    rows = [t for role, t in pairs if role == "row"]
    outs = [torch.empty_like(rows[0]) for _ in range(kernel.writes)]
    mix = len(rows), len(outs)
    if mix == (1, 0):
        return _reads(kernel, args, rows[0])
    if mix == (1, 1):
        x, out = rows[0], outs[0]
        return [Candidate("copy_", lambda: out.copy_(x), lambda: torch.equal(out, x))]
    if mix == (2, 1):
        (a, b), out = rows, outs[0]
        call = lambda: torch.add(a, b, out=out)  # noqa: E731 (a value of the record, like the rest)
        return [Candidate("add", call, lambda: torch.equal(out, a + b))]
    if mix == (2, 2):
        return _two_copies(rows, outs)
    raise Absent(f"no limit kernel for {mix[0]} reads and {mix[1]} writes")


def _reads(kernel: Kernel, args: tuple, x: torch.Tensor) -> list[Candidate]:
    given = [t for role, t in zip(kernel.roles, args, strict=True) if role == "per-row"]
    triton = _triton(x)
    if triton is None or len(given) != 1:  # torch's write a value a row, and read none
        return [
            Candidate(name, functools.partial(function, x, -1), lambda: True)
            for name, function in (("amax", torch.amax), ("sum", torch.sum))
        ]
    (value,), flat = given, x.view(-1).view(torch.int32)
    peaks = flat.new_empty(-(-flat.numel() // triton.BLOCK))
    copies = value.new_empty((kernel.values, len(value)), dtype=torch.float32)

    def right():
        copied = torch.equal(copies, value.float().expand_as(copies))
        return copied and bool(peaks.max() == flat.max())

    return [Candidate("triton read", lambda: triton.read(flat, peaks, value, copies), right)]


def _two_copies(rows: list[torch.Tensor], outs: list[torch.Tensor]) -> list[Candidate]:
    def right():
        return all(torch.equal(o, r) for o, r in zip(outs, rows, strict=True))

    found = [Candidate("foreach_copy", lambda: torch._foreach_copy_(outs, rows), right)]
    triton = _triton(rows[0])
    if triton is not None:
        flat = [t.view(-1).view(torch.int32) for t in (*rows, *outs)]
        found.append(Candidate("triton two copies", lambda: triton.copy_two(*flat), right))
    return found


def _triton(x: torch.Tensor):
    """The Triton kernels, or None where Triton is not installed or x is no whole of int32."""
    if x.nbytes % 4 or x.device.type != "cuda":
        return None
    try:
        from benchmarks import triton_limit
    except ImportError:
        return None
    return triton_limit


def fastest(found: list[Candidate], measure: Callable) -> Candidate:
    """The one of the least median time, each checked first; `measure` is as `timing.interleave`."""
    for candidate in found:
        candidate.call()
        if not candidate.right():
            raise RuntimeError(f"wrong: {candidate.name} did not move the bytes")
    if len(found) == 1:
        return found[0]
    times = measure({candidate.name: candidate.call for candidate in found}, 7)
    return min(found, key=lambda candidate: median(times[candidate.name]))

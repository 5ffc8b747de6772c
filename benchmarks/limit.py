"""The limit kernel: the same bytes as a kernel's rows in as many reads and writes, and no work.

Columns are left out, and so are values per row where rows are written: 2 % of the bytes at N = 64,
nothing at 4096. Of rows that are only read they are 8 % at N = 64, and Triton's kernel moves them.
Where torch and Triton have more than one such kernel, the fastest of the cell is the limit.

For rows of other numbers or of several dtypes the limit is a copy of as many bytes in all, or a
read of as many where no row is written. `of_mix` reads and writes as many bytes of each.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from benchmarks.kernels import Kernel

ALIKE = 0.02  # Reads and writes whose bytes differ by less, as a share, are those of a copy.
MIX_BLOCKS = (2048, 4096, 8192)  # int32 of the larger tensor that a program of a mix has


@dataclass(frozen=True)
class Candidate:
    """One way to move the bytes; `right` says, after a call, whether it moved them."""

    name: str
    call: Callable[[], object]
    right: Callable[[], bool]


def candidates(kernel: Kernel, args: tuple) -> list[Candidate]:
    """Every limit kernel for these arguments; their outputs are allocated here, once."""
    pairs = zip(kernel.roles, args, strict=True)
    rows = [t for role, t in pairs if role == "row"]
    results = kernel.results(args)
    written = [t for t in results if t.shape == rows[0].shape]
    mix = len(rows), len(written)
    if not written:
        return _reads(kernel, args, rows, values=len(results))
    if len({t.dtype for t in (*rows, *written)}) > 1:
        return [copy_of(sum(t.nbytes for t in (*rows, *written)), rows[0].device)]
    outs = [torch.empty_like(rows[0]) for _ in written]
    if mix == (1, 1):
        x, out = rows[0], outs[0]
        return [Candidate("copy_", lambda: out.copy_(x), lambda: torch.equal(out, x))]
    if mix == (2, 1):
        (a, b), out = rows, outs[0]
        call = lambda: torch.add(a, b, out=out)  # noqa: E731 (a value of the record, like the rest)
        return [Candidate("add", call, lambda: torch.equal(out, a + b))]
    if mix == (2, 2):
        return _two_copies(rows, outs)
    return [copy_of(sum(mix) * rows[0].nbytes, rows[0].device)]


def copy_of(count: int, device: torch.device) -> Candidate:
    """A copy that moves so many bytes: half of them are read, and half are written."""
    x = torch.zeros(max(count // 8, 1), dtype=torch.int32, device=device)
    out = torch.empty_like(x)
    call = lambda: out.copy_(x)  # noqa: E731
    return Candidate("copy_ of as many bytes", call, lambda: torch.equal(out, x))


def of_mix(read: int, written: int, device: torch.device) -> list[Candidate]:
    """Kernels that read and write so many bytes, which make a launch of one kernel.

    They read all before they write, as a row function does that reduces its row. Where as many are
    written as are read, a copy is one of them. Without Triton there is a copy of as many in all.
    """
    x = torch.arange(max(read // 4, 1), dtype=torch.int32, device=device)
    out = torch.empty(max(written // 4, 1), dtype=torch.int32, device=device)
    found, triton = [], _triton(x)
    if abs(read - written) <= ALIKE * max(read, written) or triton is None:
        found.append(copy_of(read + written, device))
    for block in MIX_BLOCKS if triton is not None else ():

        def right(block=block):
            programs, reads, writes = triton.shares(x.numel(), out.numel(), block)
            first = torch.arange(programs, device=device) * reads  # x ascends
            peaks = (first + reads - 1).clamp(max=x.numel() - 1).int()
            peaks[first >= x.numel()] = -(2**31)  # the last programs have nothing to read
            return torch.equal(out, peaks.repeat_interleave(writes)[: out.numel()])

        call = functools.partial(triton.mix, x, out, block)
        found.append(Candidate(f"triton mix of {block}", call, right))
    return found


def _reads(kernel: Kernel, args: tuple, rows: list[torch.Tensor], values: int) -> list[Candidate]:
    x = rows[0]
    if len(rows) > 1 or x.nbytes % 4:
        count = max(sum(t.nbytes for t in rows) // 4, 1)
        x = torch.zeros(count, dtype=torch.int32, device=x.device)
    given = [t for role, t in zip(kernel.roles, args, strict=True) if role == "per-row"]
    triton = _triton(x)
    found = []
    if triton is None or len(given) != 1:  # torch's write a value a row, and read none
        found = [
            Candidate(name, functools.partial(function, x, -1), lambda: True)
            for name, function in (("amax", torch.amax), ("sum", torch.sum))
            if len(rows) == 1 and x.ndim == 2
        ]
    if triton is None:
        return found or [copy_of(x.nbytes, x.device)]
    value = given[0] if len(given) == 1 else x.new_zeros(len(rows[0]), dtype=torch.float32)
    flat = x.view(-1).view(torch.int32)
    peaks = flat.new_empty(-(-flat.numel() // triton.BLOCK))
    copies = value.new_empty((values, len(value)), dtype=torch.float32)

    def right():
        copied = torch.equal(copies, value.float().expand_as(copies))
        return copied and bool(peaks.max() == flat.max())

    for eviction in ("", "evict_first"):
        call = functools.partial(triton.read, flat, peaks, value, copies, eviction)
        found.append(Candidate(f"triton read {eviction}".strip(), call, right))
    return found


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

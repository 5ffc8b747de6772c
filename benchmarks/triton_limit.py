"""Limit kernels that torch has none of, in Triton: rows that are only read, two copies in a launch,
and any mix of bytes that are read and written.

Rows are flat, contiguous int32. Imported only where Triton is installed.
"""

import triton
import triton.language as tl

BLOCK = 4096  # 16 KB of each tensor a program


@triton.jit
def _read(x, peaks, given, copies, count, rows, BLOCK: tl.constexpr, ROWS: tl.constexpr,
          COPIES: tl.constexpr, EVICTION: tl.constexpr):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    index = program * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(
        x + index, mask=index < count, other=-2147483648, eviction_policy=EVICTION
    )
    row = program * ROWS + tl.arange(0, ROWS)
    value = tl.load(given + row, mask=row < rows).to(tl.float32)
    for k in tl.static_range(COPIES):
        tl.store(copies + k * rows + row, value, mask=row < rows)
    tl.store(peaks + program, tl.max(values, axis=0))


@triton.jit
def _copy_two(a, b, c, d, count, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    first = tl.load(a + index, mask=index < count)
    second = tl.load(b + index, mask=index < count)
    tl.store(c + index, first, mask=index < count)
    tl.store(d + index, second, mask=index < count)


@triton.jit
def _mix(x, out, count, results, reads, writes, READS: tl.constexpr, WRITES: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, READS)
    index = program * reads + place
    values = tl.load(x + index, mask=(place < reads) & (index < count), other=-2147483648)
    peak = tl.max(values, axis=0)
    place = tl.arange(0, WRITES)
    index = program * writes + place
    tl.store(out + index, peak + place * 0, mask=(place < writes) & (index < results))


def read(x, peaks, given, copies, eviction):
    """Read x, and copy a value of each row to each of the results.

    peaks: (ceil(x.numel() / BLOCK),), gets the maximum of every BLOCK neighbors of x.
    given: (M,), of any dtype, into each row of copies (results, M), float32.
    eviction: "evict_first" for a cache that drops x before what else it holds, or "".
    """
    programs, rows = peaks.numel(), given.numel()
    share = triton.next_power_of_2(triton.cdiv(rows, programs))
    _read[(programs,)](
        x, peaks, given, copies, x.numel(), rows, BLOCK=BLOCK, ROWS=share, COPIES=len(copies),
        EVICTION=eviction, num_warps=8,
    )  # fmt: skip


def copy_two(a, b, c, d):
    """a into c and b into d, all of one size."""
    _copy_two[(triton.cdiv(a.numel(), BLOCK),)](a, b, c, d, a.numel(), BLOCK=BLOCK, num_warps=8)


def shares(count, results, block):
    """Into how many programs a mix is divided, and how many int32 each reads and writes.

    Each has at most `block` of the larger tensor, in whole runs of 16: Triton's accesses are wide
    then.
    """
    programs = triton.cdiv(max(count, results), block)
    return programs, *(16 * triton.cdiv(triton.cdiv(n, programs), 16) for n in (count, results))


def mix(x, out, block):
    """Read x, and write to each program's share of out the largest of what the program has read."""
    count, results = x.numel(), out.numel()
    programs, reads, writes = shares(count, results, block)
    _mix[(programs,)](
        x, out, count, results, reads, writes, READS=triton.next_power_of_2(reads),
        WRITES=triton.next_power_of_2(writes), num_warps=8 if block > 2048 else 4,
    )  # fmt: skip

"""Rows of tables on a GPU: every length, dtype and alignment, any index, captured graphs."""

import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.errors import UnsupportedError
from htile.lower import enumerate_plans
from htile.testing import assert_close
from tests.generated.movements import program

from .matrix import BF16, F16, F32, assert_same_bits, job, rows_of, run, seed, short

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

I32, I64, BOOL = torch.int32, torch.int64, torch.bool
LENGTH = 37  # rows of the tables
SIZES = (64, 66, 1003, 1024, 4096, 4098, 16384, 65536, 131072)
BATCHES = (7, 300)
DTYPES = (BF16, F32)


@htile.rowwise
def rotary(x, pos: htile.PerRow, table: htile.Shared):
    cos, sin = table[pos].chunk(2)
    a, b = x.chunk(2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin))


@htile.rowwise
def normed(x, pos: htile.PerRow, table: htile.Shared):
    y = x + table[pos]
    return y * torch.rsqrt((y * y).mean() + 1e-6), torch.softmax(y, -1)


@htile.rowwise
def after(x, pos: htile.PerRow, table: htile.Shared):
    column = torch.arange(x.shape[-1])
    first = torch.where(x == x.amax(), column, x.shape[-1]).amin() % table.shape[0]
    return x * table[first] + table[pos], table[first, 1]


@htile.rowwise
def looked_up(pos: htile.PerRow, table: htile.Shared):
    row = table[pos]
    return row, row[-1]


@htile.rowwise
def weighted(ids: htile.Inner[1], share: htile.Inner[1], table: htile.Shared):
    return (share[:, None] * table[ids]).sum(0), (table[ids[0]] * table[ids[-1]]).sum()


FUNCTIONS = (rotary, normed, after, looked_up, weighted)


def table_of(n, dtype, device, shift=0, pitch=0):
    """A table between other numbers: `shift` elements behind an aligned address, and rows that are
    `pitch` elements further apart than they are long."""
    width = n + pitch
    size = shift + (LENGTH + 2) * width
    whole = torch.arange(size, device=device).remainder(31).sub(15).div(8).to(dtype)
    aligned = 16 // dtype.itemsize  # the row in front keeps the alignment
    first = shift + -(-width // aligned) * aligned
    return whole[first:][: LENGTH * width].view(LENGTH, width)[:, :n]


def positions(m, device, dtype=I64):
    """Both ends, and negative ones."""
    pos = (torch.arange(m, device=device) * 17 + LENGTH - 1) % (2 * LENGTH) - LENGTH
    return pos.to(dtype)


def arguments(f, n, dtype, m, device, pos=I64, **where):
    table = table_of(n, dtype, device, **where)
    if f is looked_up:
        return positions(m, device, pos), table
    if f is weighted:
        ids = positions(3 * m, device, pos).view(m, 3)
        return ids, torch.linspace(-1, 1, 3 * m, device=device).view(m, 3), table
    x = torch.randn(m, n, device=device).to(dtype)
    return x, positions(m, device, pos), table


PLACES = ((1, 0), (0, 1), (2, 0), (4, 4), (0, 8))  # shift and pitch
MOVED = [(f, n, dtype, *place) for f in (rotary, normed, looked_up) for n in (64, 4096, 16384)
         for dtype in DTYPES for place in PLACES]  # fmt: skip
MIXED = ((BF16, F32), (F32, BF16), (BF16, F16))  # of the row and of the table
FORCED = [(normed, 1003, BF16), (normed, 4096, BF16), (normed, 16384, F32), (rotary, 128, BF16),
          (after, 16384, BF16)]  # fmt: skip
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
OF_DTYPES = (F16, I32, I64, BOOL, torch.int8, torch.uint8, *FLOAT8)
SEEDS = range(150)
LEADS = ((5,), (40,), (3, 7), (2, 1, 9))


def named(each):
    """The name of a function or of a dtype, for the names of tests."""
    return getattr(each, "__name__", short(each))


def sizes_of(f):
    return [n for n in SIZES if f is not rotary or n % 2 == 0]


def plans(f, n, dtype, arch, m=133):
    """The function with each plan forced that there is."""
    kernel = f.inspect(*arguments(f, n, dtype, m, "cpu"), arch=arch)
    for plan in enumerate_plans(kernel.graph, kernel.plan.target):
        yield f.with_plan(**plan.properties()), plan


def prepared(number, device="meta", filled=False):
    p = program(number, "all", tables=True)
    return p, p.function(), p.arguments(device, LEADS[number % len(LEADS)], filled)


def jobs(arch):
    for f in FUNCTIONS:
        for n in sizes_of(f):
            for dtype in DTYPES:
                for m in (*BATCHES, 1):
                    yield job(f, arguments(f, n, dtype, m, "cpu"), arch)
        yield job(f, arguments(f, 1024, BF16, 7, "cpu", I32), arch)
    for f, n, dtype, shift, pitch in MOVED:
        yield job(f, arguments(f, n, dtype, 7, "cpu", shift=shift, pitch=pitch), arch)
    for of_row, of_table in MIXED:
        for n in (1003, 4096):
            x, pos, table = arguments(normed, n, of_row, 7, "cpu")
            yield job(normed, (x, pos, table.to(of_table)), arch)
    for n in (64, 1003):
        for dtype in OF_DTYPES:
            yield job(looked_up, (positions(7, "cpu"), table_of(n, F32, "cpu").to(dtype)), arch)
    for case in FORCED:
        for forced, _ in plans(*case, arch):
            yield job(forced, arguments(*case, 133, "cpu"), arch)
    for number in SEEDS:
        try:
            _, f, args = prepared(number)
            yield job(f, args, arch)
        except UnsupportedError:
            continue  # the test says so


@pytest.mark.parametrize("m", BATCHES)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize(("f", "n"), [(f, n) for f in FUNCTIONS for n in sizes_of(f)], ids=named)
def test_oracle(f, n, dtype, m, device):
    seed(f.__name__, n, dtype, m)
    args = arguments(f, n, dtype, m, device)
    result = run(f, *args)
    assert_close(f, result, *args)
    one = [a[2:3].clone() if a is not args[-1] else a for a in args]
    assert_same_bits(run(f, *one), rows_of(result, slice(2, 3)), "a row by itself")


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_indices_of_32_bits(f, device):
    seed(f.__name__)
    args = arguments(f, 1024, BF16, 7, device, I32)
    result = run(f, *args)
    wide = [a.long() if a.dtype is I32 else a for a in args]
    assert_same_bits(result, run(f, *wide))


@pytest.mark.parametrize(("f", "n", "dtype", "shift", "pitch"), MOVED, ids=named)
def test_tables_that_begin_anywhere(f, n, dtype, shift, pitch, device):
    """They have the bits of an aligned copy."""
    seed(f.__name__, n, dtype)
    args = arguments(f, n, dtype, 7, device, shift=shift, pitch=pitch)
    aligned = (*args[:-1], args[-1].contiguous().clone())
    assert_same_bits(run(f, *args), run(f, *aligned), (shift, pitch))


@pytest.mark.parametrize("n", (1003, 4096))
@pytest.mark.parametrize("dtypes", MIXED, ids=lambda pair: "-".join(map(short, pair)))
def test_a_table_of_another_dtype(dtypes, n, device):
    seed(dtypes, n)
    x, pos, table = arguments(normed, n, dtypes[0], 7, device)
    args = x, pos, table.to(dtypes[1])
    assert_close(normed, run(normed, *args), *args)


FAR = (0, LENGTH - 1, -LENGTH, -1, LENGTH, -LENGTH - 1, LENGTH + 1, 10**9, 2**31, -(2**31) - 1,
       2**32, 2**40, -(2**40), 2**63 - 1, -(2**63))  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("n", (64, 66, 1003, 4096, 16384, 131072))
def test_beyond_the_ends_nothing_is_read(n, dtype, device):
    """Also of tables that are shifted, and just before the first row and behind the last one."""
    pos = torch.tensor(FAR, device=device).repeat(20)
    row, last = run(looked_up, pos, table_of(n, dtype, device))
    table = table_of(n, dtype, device)
    is_there = (pos >= -LENGTH) & (pos < LENGTH)
    assert torch.equal(row[is_there], table[pos[is_there]])
    assert torch.equal(last[is_there].to(dtype), table[pos[is_there], -1])
    assert row[~is_there].isnan().all() and last[~is_there].isnan().all()


@pytest.mark.parametrize("dtype", OF_DTYPES, ids=short)
@pytest.mark.parametrize("n", (64, 1003))
def test_tables_of_every_dtype(n, dtype, device):
    pos = torch.tensor((0, 5, -1, -LENGTH, LENGTH, 2**40, -LENGTH - 1), device=device)
    table = table_of(n, F32, device).to(dtype)
    row, last = run(looked_up, pos, table)
    expected = table.float()[pos.clamp(-LENGTH, LENGTH - 1)]
    expected[-3:] = torch.nan if dtype.is_floating_point else 0
    assert row.dtype is dtype
    torch.testing.assert_close(row.float(), expected, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(last.float(), expected[:, -1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("f", "n", "dtype"), FORCED, ids=named)
def test_every_plan(f, n, dtype, arch, device):
    seed(f.__name__, n, dtype)
    args = arguments(f, n, dtype, 133, device)
    results = {}
    for forced, plan in plans(f, n, dtype, arch):
        result = run(forced, *args)
        if plan.numerics not in results:
            results[plan.numerics] = result
            assert_close(forced, result, *args)
        assert_same_bits(result, results[plan.numerics], plan)
    assert results


@pytest.mark.parametrize("number", SEEDS)
def test_random_functions(number, device):
    try:
        p, f, args = prepared(number, device, filled=True)
        result = run(f, *args)
    except UnsupportedError as error:
        assert "pieces" in error.message or "across the rows" in error.message
        return
    try:
        assert_close(f, result, *args)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None


def test_another_table_and_other_indices_in_calls_that_repeat(device):
    """No kernel is compiled for a table of another length, and none for other indices."""
    x, pos, table = arguments(rotary, 1024, BF16, 7, device)
    for length in (LENGTH, 5, LENGTH, 30, 1):
        part = table[:length]
        for step in range(4):
            at = (pos + step) % length
            assert_close(rotary, run(rotary, x, at, part), x, at, part)


def test_a_captured_call_sees_new_indices(device):
    x, pos, table = arguments(normed, 4096, BF16, 300, device)
    run(normed, x, pos, table)
    out = pytree.tree_map(torch.empty_like, normed(x, pos, table))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        normed(x, pos, table, out=out)
    for step in range(3):
        pos.copy_((pos + step + 1) % LENGTH - LENGTH * (step % 2))
        graph.replay()
        assert_close(normed, out, x, pos, table)
    pos.fill_(LENGTH)
    graph.replay()
    assert out[0].isnan().all()


def test_rows_more_than_4_gib_away(device):
    """The offset of a row is of 64 bits."""
    free, _ = torch.cuda.mem_get_info()
    if free < 6 << 30:
        pytest.fail("the test needs 6 GiB of the GPU's memory")
    table = torch.zeros(2**32 // 2048 + 4, 1024, dtype=BF16, device=device)
    for k in (2**31 // 1024, 2**32 // 2048, len(table) - 1):
        table[k] = k % 100
    pos = torch.tensor((2**31 // 1024, 2**32 // 2048, -1, 7), device=device)
    row, last = run(looked_up, pos, table)
    assert torch.equal(row, table[pos]) and torch.equal(last.to(BF16), table[pos, -1])

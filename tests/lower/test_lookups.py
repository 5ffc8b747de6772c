"""Rows of tables in plans and in compiled kernels: when they are loaded, and how wide."""

import re
from collections import Counter

import pytest
import torch

import htile
from htile.frontend.ops import Op
from htile.lower import printed
from htile.lower.choice.enumeration import enumerate_plans
from htile.lower.plan import Form, Target
from htile.lower.steps import ChunkLoop, Compute, Fence, Reduce
from htile.lower.work import Work
from htile.run.kernel import Kernel
from tests.lower.cases import ARCH, BF16, F32, TABLES, rows, table_kernel
from tests.lower.test_compile import check
from tests.primitives.device_memory import APART, Memory
from tests.primitives.ptx_device import launch


def accesses(kernel):
    """How many loads and stores of global memory have so many bytes."""
    found = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", kernel.ptx)
    return Counter(int(count or 1) * int(bits) // 8 for count, bits in found)


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a", "sm_100a", "sm_120a"))
@pytest.mark.parametrize("n", (128, 1003, 4096, 65536))
@pytest.mark.parametrize("name", TABLES)
def test_they_compile_without_a_stack(name, n, arch):
    if (name, n) == ("table_rotary", 1003):
        n = 1006  # which has halves
    check(table_kernel(name, n, arch=arch))


def plans_of(name, n, arch="sm_90a", rows_=1, **more):
    graph = table_kernel(name, n).graph
    return enumerate_plans(graph, Target(n, ARCH[arch], rows=rows_, **more))


@pytest.mark.parametrize("n", (96, 4098, 16384, 131072))
def test_plans_of_every_form_compile(n):
    """The first and the last one of each form, number of shares and loader."""
    seen = {}
    for rows_ in (1, 256):
        for plan in plans_of("table_norm", n, rows_=rows_):
            num, place = plan.numerics, plan.placement
            kind = num.form, num.cluster_n > 1, place.loader, place.shares > 1, place.prefetch > 0
            seen.setdefault(kind, [plan, plan])[1] = plan
    forms = {kind[0] for kind in seen}
    assert forms == {Form.HELD} if n < 8192 else forms > {Form.HELD}
    for first, last in seen.values():
        for plan in {id(first): first, id(last): last}.values():
            assert Kernel(printed(plan.graph, plan), "sm_90a").resources.stack == 0


@pytest.mark.parametrize(("shift", "pitch", "widest"), (
    (0, 0, 16), (0, 8, 16), (4, 0, 8), (0, 4, 8), (1, 0, 16), (0, 1, 16),
))  # fmt: skip
def test_the_width_of_loads(shift, pitch, widest):
    """Where a table lies on less than 8 bytes, its rows are shifted in registers."""
    kernel = table_kernel("table_norm", 4096, shift=shift, pitch=pitch)
    assert kernel.plan.placement.shifted == (shift == 1 or pitch == 1)
    assert max(accesses(kernel)) == widest
    check(kernel)


def test_a_row_of_float32_is_loaded_once():
    """x and a row of the table are loaded, and a result is stored; the index is of 8 bytes too."""
    kernel = table_kernel("table_norm", 4096, F32)
    vectors = kernel.plan.elements_per_thread // 4
    assert accesses(kernel) == {16: 3 * vectors, 8: 1}


def test_the_strides_of_a_table_are_of_64_bits():
    """The index times the stride, added to the address; nothing of it wraps at 32 bits."""
    ptx = table_kernel("table_norm", 128).ptx
    assert re.search(r"(?:mul\.lo|mad\.lo)\.s64|mul\.wide", ptx)
    assert "cute.sym_int64()" in table_kernel("table_norm", 128).source


def steps_of(name, form, **fields):
    plans = [p for p in plans_of(name, 16384) if p.numerics.form is form]
    return next(p for p in plans if all(getattr(p.placement, k) == v for k, v in fields.items()))


def test_rows_at_known_indices_are_in_flight_with_the_rows():
    plan = steps_of("table_after", Form.HELD)
    graph = plan.graph
    lookups = [s for s in plan.steps if isinstance(s, Compute) and graph[s.id].op is Op.LOOKUP]
    reduces = [k for k, step in enumerate(plan.steps) if isinstance(step, Reduce)]
    early, late = sorted(plan.steps.index(step) for step in lookups)
    assert early < reduces[0] and late > reduces[1], "one is at an index that is reduced first"
    text = printed(graph, plan).source
    assert text.index("look_up(") < text.index("loader.finish()")


@pytest.mark.parametrize("form", (Form.LOOPS, Form.STREAMED))
def test_loops_load_a_chunk_wherever_they_read_it(form):
    plan = next(p for p in plans_of("table_norm", 300000) if p.numerics.form is form)
    loops = [step for step in plan.steps if isinstance(step, ChunkLoop)]
    assert len(loops) == 2
    for loop in loops:
        ops = [plan.graph[s.id].op for s in loop.steps if isinstance(s, Compute)]
        assert Op.LOOKUP in ops
    outside = [plan.graph[s.id].op for s in plan.steps if isinstance(s, Compute)]
    assert Op.LOOKUP not in outside
    text = printed(plan.graph, plan).source
    assert text.count("chunk.look_up(") >= 2 and "ctx.look_up(" not in text


def test_nothing_waits_for_tables_in_place():
    """A result is no table, so no thread reads what another overwrites."""
    plan = plans_of("table_norm", 4096, aliases=(("out", "x"),))[0]
    assert not any(isinstance(step, Fence) for step in plan.steps)


def test_bytes_of_a_row_count_those_of_the_table():
    work = Work(table_kernel("table_rotary", 128, F32).graph)
    assert work.bytes_per_row == (128 * 4 + 8 + 128 * 4, 128 * 4)
    assert len(work.lookups) == 2 and not work.columns


def test_the_text_does_not_depend_on_the_length_of_a_table():
    assert table_kernel("table_alone", 128, length=3).source == table_kernel(
        "table_alone", 128, length=70000).source  # fmt: skip


def test_a_part_of_a_table_has_its_own_length():
    @htile.rowwise
    def part(x, pos: htile.PerRow, table: htile.Shared):
        return x + table[2:7][pos]

    (x,) = rows((2, 64))
    kernel = part.inspect(x, torch.empty(2, device="meta").long(), *rows((9, 64)))
    assert "table_of(mTable, (2, 0), (0, 1), 64, axis=0, step=1, count=5)" in kernel.source
    check(kernel)


@pytest.mark.parametrize("dtype", (torch.int32, torch.int64, torch.bool, torch.int8, torch.uint8,
                                   torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
                                   torch.float16),
                         ids=str)  # fmt: skip
@pytest.mark.parametrize("n", (64, 1003))
def test_tables_of_every_dtype_compile(dtype, n):
    @htile.rowwise
    def picked(x, pos: htile.PerRow, table: htile.Shared):
        row = table[pos]
        return row, row[1], x

    pos = torch.empty(2, dtype=torch.int32, device="meta")
    check(picked.inspect(*rows((2, n), dtype=BF16), pos, *rows((9, n), dtype=dtype)))


# ---- what all rows share -------------------------------------------------------------------------


def shared_numbers(x, s: htile.Shared):
    return x * s[0] + s[1] - s[-1]


def shared_heads(x, w: htile.Shared):
    return (x.view(w.shape) * w).flatten(), w[1] * x[: w.shape[-1]]


def shared_rows(x, w: htile.Shared):
    scale, shift = w.unbind()
    return torch.softmax(x * scale + shift, -1)


def shared_pairs(x, w: htile.Shared):
    cos, sin = w[0, :, 0], w[0, :, 1]
    a, b = x.chunk(2)
    return torch.cat((a * cos, b * sin)) * w[1, 0, 0]


OF_SHARED = {
    "three numbers": (shared_numbers, (3,)),
    "weights of heads": (shared_heads, (8, 128)),
    "two rows": (shared_rows, (2, 1024)),
    "pairs": (shared_pairs, (2, 512, 2)),
}


@pytest.mark.parametrize("moved", (False, True), ids=("aligned", "by an element"))
@pytest.mark.parametrize("name", OF_SHARED)
def test_what_all_rows_share_compiles(name, moved):
    fn, shape = OF_SHARED[name]
    whole = torch.empty(*shape[:-1], shape[-1] + 8, dtype=BF16)
    w = whole[..., moved : shape[-1] + moved]
    kernel = htile.rowwise(fn).inspect(torch.empty(4, 1024, dtype=BF16), w, arch="sm_90a")
    assert not any(i.role.value == "table" for i in kernel.graph.inputs)
    check(kernel)


def test_a_function_may_have_no_row_and_no_row_of_results():
    @htile.rowwise
    def product(a: htile.PerRow, b: htile.PerRow, table: htile.Shared):
        return (table[a] * table[b]).sum()

    indices = torch.empty(5, 6, device="meta").long()
    for n in (96, 1003, 16384):
        kernel = product.inspect(indices, indices, *rows((9, n)))
        assert f"ctx.setup(expand(mOut, 1, {n})" in kernel.source.replace("\n        ", "")
        check(kernel)


COLUMNS, TABLE_ROWS = 64, 7


def of_two_rows(x, i: htile.PerRow, j: htile.PerRow, table: htile.Shared, mask: htile.Static):
    return x * torch.where(mask(torch.arange(x.shape[-1])), table[i], table[j])


# Masks of columns, and the columns that are read of the row that is chosen where they hold, and of
# the other one.
MASKS = {
    "below": (lambda c: c < 16, (0, 16), (16, 64)),
    "up to": (lambda c: c <= 16, (0, 17), (17, 64)),
    "from": (lambda c: c >= 40, (40, 64), (0, 40)),
    "above": (lambda c: c > 40, (41, 64), (0, 41)),
    "one": (lambda c: c == 5, (5, 6), None),
    "all but one": (lambda c: c != 5, None, (5, 6)),
    "between": (lambda c: (c >= 9) & (c < 23), (9, 23), None),
    "beside": (lambda c: (c < 9) | (c >= 23), None, (9, 23)),
    "not": (lambda c: ~(c < 16), (16, 64), (0, 16)),
    "none": (lambda c: (c < 9) & (c > 23), (0, 0), None),
    "beyond the largest integer": (lambda c: c.int() + (2**31 - 1) < 0, None, None),
    "nothing known": (lambda c: c % 2 == 0, None, None),
}


def arguments_of_two_rows(m=5):
    i, j = torch.randint(TABLE_ROWS, (2, m))
    return torch.randn(m, COLUMNS), i, j, torch.randn(TABLE_ROWS, COLUMNS)


@pytest.mark.parametrize("name", MASKS)
def test_columns_that_no_result_needs_are_not_loaded(name):
    mask, *expected = MASKS[name]
    f = htile.rowwise(of_two_rows)
    kernel = f.inspect(*arguments_of_two_rows(), mask=mask, arch="sm_90a")
    assert [node.arg for node in kernel.graph if node.op is Op.LOOKUP] == expected
    needed = mask(torch.arange(COLUMNS))
    for span, of_row in zip(expected, (needed, ~needed), strict=True):
        first, end = span or (0, COLUMNS)
        assert not of_row[:first].any() and not of_row[end:].any()


@pytest.mark.parametrize("name", MASKS)
def test_results_where_columns_are_not_loaded(name, monkeypatch):
    """The PTX runs on numpy. Vectors of four columns may begin or end inside of what is needed."""
    torch.manual_seed(0)
    mask, *spans = MASKS[name]
    read = set()  # the elements of the table, which is the fourth tensor

    def load(self, addresses, size, load=Memory.load):
        for address in addresses.tolist():
            if address // APART == 4:
                read.update(range(address % APART // 4, (address % APART + size) // 4))
        return load(self, addresses, size)

    monkeypatch.setattr(Memory, "load", load)
    f = htile.rowwise(of_two_rows)
    args = x, i, j, table = arguments_of_two_rows()
    kernel = f.inspect(*args, mask=mask, arch="sm_90a")
    out = torch.zeros_like(x)
    blocks = -(-x.shape[0] // kernel.plan.rows_per_block)
    launch(kernel.ptx, (blocks, 1), [*args, out], is_emitted=True)
    chosen = torch.where(mask(torch.arange(COLUMNS)), table[i], table[j])
    assert torch.equal(out, x * chosen)
    assert torch.equal(out, f(*args, mask=mask))
    needed = set()
    for indices, span in zip((i, j), spans, strict=True):
        first, end = span or (0, COLUMNS)
        vectors = range(first // 4 * 4, -(-end // 4) * 4)
        needed |= {row * COLUMNS + column for row in indices.tolist() for column in vectors}
    assert read == needed


def test_columns_of_a_part_are_counted_from_its_start():
    def halves(x, i: htile.PerRow, table: htile.Shared):
        turned = torch.where(torch.arange(x.shape[-1]) < 40, table[i], x)
        a, b = turned.chunk(2)
        return torch.cat((a - b, a + b))

    x, i, _, table = arguments_of_two_rows()
    graph = htile.rowwise(halves).inspect(x, i, table, arch="sm_90a").graph
    assert [node.arg for node in graph if node.op is Op.LOOKUP] == [None, (0, 8)]


def test_columns_are_loaded_that_another_result_needs():
    def both(x, i: htile.PerRow, table: htile.Shared):
        row = table[i]
        return torch.where(torch.arange(x.shape[-1]) < 16, row, x), row.sum()

    x, i, _, table = arguments_of_two_rows()
    graph = htile.rowwise(both).inspect(x, i, table, arch="sm_90a").graph
    assert [node.arg for node in graph if node.op is Op.LOOKUP] == [None]

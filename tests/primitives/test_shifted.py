"""Shifted rows: how vectors are cut where a row ends, and kernels whose rows begin anywhere."""

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("cutlass")

from cutlass import BFloat16

import htile
from examples import load
from htile.config import ElementwiseTileConfig
from htile.copy import shifted
from htile.copy.layout import RowLayout
from htile.lower import shifting
from htile.lower.steps import Home
from tests.primitives.row_device import launch

BF16 = torch.bfloat16
softmax, _ = load("softmax")
rmsnorm, _ = load("rmsnorm")
layernorm, _ = load("layernorm")


@pytest.mark.parametrize("n", [1, 7, 8, 9, 250, 1001, 1003, 4096, 20011])
@pytest.mark.parametrize(("vec", "threads", "shares"), [(8, 8, 1), (8, 64, 1), (4, 128, 4)])
def test_the_layout_says_which_elements_are_in_the_row(n, vec, threads, shares):
    chunks = -(-n // (vec * threads * shares))
    layout = RowLayout(n, vec, threads, chunks, shares)
    columns = np.arange(shares * chunks * threads * vec).reshape(shares, chunks, threads, vec)
    inside = columns < n
    for k in range(chunks):
        assert layout.is_whole(k) == inside[:, k].all()
        ends = inside[:, k].any(-1) & ~inside[:, k].all(-1)
        assert ends.any() <= layout.may_end_in(k) <= bool(n % vec)
        parts = layout.exact_parts(k)
        assert [i for first, last in parts for i in range(first, last)] == list(range(vec))
        for first, last in parts:
            assert (last - first).bit_count() == 1
            part = inside[:, k, :, first:last]
            assert (part.all(-1) == part.any(-1)).all(), "in the row as a whole, or not at all"
    for share in range(shares):
        for warp in range(max(threads // 32, 1)):
            lanes = slice(32 * warp, 32 * warp + layout.lanes)
            assert layout.of_warp(warp, share) == inside[share, :, lanes].sum()


def rows_at(values, offset, pitch):
    """The same rows, `offset` elements behind an aligned address and `pitch` elements apart.

    Their memory has nothing more than the aligned 16 bytes that the last element is in.
    """
    rows, n = values.shape
    size = (offset + (rows - 1) * pitch + n) * values.element_size()
    memory = torch.full((-(-size // 16) * 16,), 0x55, dtype=torch.uint8).view(values.dtype)
    view = memory.as_strided((rows, n), (pitch, 1), offset)
    view.copy_(values)
    return view


def run(kernel, arguments, results, rows, reverse=False):
    """Run a kernel, and assert that it writes nothing beside its results."""
    beside = []
    for result in results:
        memory = torch.empty(0, dtype=result.dtype).set_(result.untyped_storage())
        is_beside = torch.ones(len(memory), dtype=torch.bool)
        is_beside.as_strided(result.shape, result.stride(), result.storage_offset()).fill_(False)
        beside.append((memory, is_beside, memory.clone()))
    launch(kernel, [*arguments, *results], rows, reverse)
    for memory, is_beside, before in beside:
        assert torch.equal(memory[is_beside], before[is_beside])


def as_memory(vector):
    """A vector of all rows, in whole pieces of 16 bytes."""
    return rows_at(vector[None], 0, len(vector))[0]


def arguments_of(function, rows, n):
    """Rows, and vectors and numbers beside them, as the kernel takes them; the same for a call."""
    torch.manual_seed(n)
    x = torch.randn(rows, n).to(BF16)
    vectors = {softmax: 0, rmsnorm: 1, layernorm: 2}[function]
    columns = [as_memory(torch.randn(n).to(BF16)) for _ in range(vectors)]
    numbers = {softmax: [], rmsnorm: [1e-6], layernorm: [1e-5]}[function]
    return x, columns, numbers


HELD = {"form": "held", "loader": "direct", "cluster_n": 1}
STAGED = {"columns": "staged"}
LOOPS = {"form": "loops", "threads_per_row": 128, "cluster_n": 2, "shares": 1}
# function, rows, N, the plan, and for how many rows it is made if not for these
CASES = {
    "8 rows a warp": (softmax, 37, 261, {**HELD, "threads_per_row": 4, "num_threads": 128}, 0),
    "a row a warp": (layernorm, 3, 1237, {**HELD, "threads_per_row": 32, "num_threads": 128}, 0),
    "two rows a block": (rmsnorm, 3, 1003, {**HELD, "threads_per_row": 64, "num_threads": 128}, 0),
    "one vector a thread": (softmax, 3, 1021, {**HELD, "threads_per_row": 128}, 0),
    "threads between powers": (softmax, 2, 2473, {**HELD, "threads_per_row": 160}, 0),
    "a cluster": (rmsnorm, 1, 8195, {**HELD, "threads_per_row": 128, "cluster_n": 4}, 0),
    "in shared memory": (layernorm, 1, 8203, {**LOOPS, "loader": "shared"}, 0),
    "packed": (softmax, 2, 8203, {**LOOPS, "loader": "packed"}, 0),
    "read again": (softmax, 1, 8203, {**LOOPS, "loader": "direct"}, 0),
    "chunks in a loop": (rmsnorm, 1, 17411, {**LOOPS, "loader": "shared", "cluster_n": 1}, 0),
    "shares side by side": (
        layernorm, 1, 16391,
        {**LOOPS, "loader": "shared", "cluster_n": 4, "shares": 4, "abreast": 2}, 1024,
    ),
    "staged columns": (layernorm, 2, 2473, {**HELD, "threads_per_row": 64, **STAGED}, 0),
    "a cluster with a staged column": (
        rmsnorm, 1, 8195, {**HELD, "threads_per_row": 128, "cluster_n": 4, **STAGED}, 0,
    ),
    "staged columns by vectors": (
        layernorm, 2, 8203, {**HELD, "threads_per_row": 128, **STAGED}, 0,
    ),
    "staged columns of a cluster by vectors": (
        layernorm, 1, 16391, {**HELD, "threads_per_row": 128, "cluster_n": 2, **STAGED}, 0,
    ),
    "staged columns and packed rows": (
        layernorm, 1, 8203, {**LOOPS, "loader": "packed", **STAGED}, 0,
    ),
    "staged columns of shares": (
        rmsnorm, 1, 16391,
        {**LOOPS, "loader": "packed", "cluster_n": 4, "shares": 4, "abreast": 2, **STAGED}, 1024,
    ),
    "packed shares": (
        softmax, 1, 16391,
        {**LOOPS, "loader": "packed", "cluster_n": 4, "shares": 4, "abreast": 2}, 1024,
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_rows_that_begin_anywhere(case):
    """Right at every alignment, with the same bits; nothing beside a row is written.

    No load leaves the pieces that have an element of the rows, and no warp has to run before
    another one.
    """
    function, rows, n, plan, like = CASES[case]
    x, columns, numbers = arguments_of(function, rows, n)
    expected = function(x, *columns)
    found = []
    for offset in range(8) if n < 3000 else (0, 1, 3, 6):
        for pitch in (n, n + 5) if offset == 3 and rows > 1 else (n,):
            given = rows_at(x, offset, pitch)
            result = rows_at(torch.zeros_like(x), offset, pitch)
            many = given
            if like:  # of the same addresses
                size = offset + like * pitch
                many = torch.empty(size, dtype=BF16).as_strided((like, n), (pitch, 1), offset)
            kernel = function.with_plan(**plan).inspect(many, *columns, arch="sm_90a")
            assert kernel.plan.placement.shifted
            assert bool(kernel.plan.stretches) == ("by vectors" in case)
            run(kernel, [given, *columns, *numbers], [result], rows, reverse=offset % 2 == 1)
            found.append(result.clone())
    error = (found[0].double() - expected.double()).abs().max() / expected.abs().max()
    assert error <= 2**-8, "one unit in the last place"
    for other in found[1:]:
        assert torch.equal(other.view(torch.int16), found[0].view(torch.int16))


def weighted(x, w, b):
    """A sum that needs all elements of a column behind an exchange."""
    h = F.gelu(x - x.mean(-1, keepdim=True))
    s = (w * h).sum(-1, keepdim=True)
    return h * s + s * b


@pytest.mark.parametrize("n", [2473, 5000])
def test_an_exchange_needs_all_of_a_staged_column(n):
    """Computed a vector at a time. Rows of 5000 elements are aligned, and so not shifted."""
    torch.manual_seed(n)
    x = torch.randn(2, n).to(BF16)
    w, b = (as_memory(torch.randn(n).to(BF16)) for _ in range(2))
    rows, result = rows_at(x, 0, n), rows_at(torch.zeros_like(x), 0, n)
    plans = htile.rowwise(weighted).with_plan(form="held", cluster_n=1, **STAGED)
    kernel = next(
        kernel
        for threads in (64, 128, 160, 256, 320)
        if (kernel := plans.with_plan(threads_per_row=threads).inspect(rows, w, b, arch="sm_90a"))
        and kernel.plan.stretches
    )
    staged = {i.id for i in kernel.plan.staged_columns}
    assert any(staged & {*stretch.whole} for stretch in kernel.plan.stretches)
    run(kernel, [rows, w, b], [result], 2)
    expected = weighted(x.double(), w.double(), b.double())
    error = (result.double() - expected).abs().max() / expected.abs().max()
    assert error <= 2**-8, "one unit in the last place"


@pytest.mark.parametrize("plan", [HELD, {**LOOPS, "loader": "packed"}], ids=["held", "loops"])
def test_rows_that_share_a_piece_are_overwritten_in_turn(plan):
    """A row's last bytes lie in the first piece of the next, which is loaded when they are new."""
    n = 1003 if plan is HELD else 8203
    x, _, _ = arguments_of(softmax, 5, n)
    rows, apart = rows_at(x, 3, n), rows_at(torch.zeros_like(x), 3, n)
    kernel = softmax.with_plan(**plan).inspect(rows, arch="sm_90a")
    run(kernel, [rows], [apart], 5)
    run(kernel, [rows], [rows], 5)
    assert torch.equal(rows, apart)


def test_views_of_whole_vectors_have_the_bits_of_aligned_rows():
    x, _, _ = arguments_of(softmax, 3, 1000)
    found = []
    for offset in (0, 1, 2, 3, 5):
        given, result = rows_at(x, offset, 1008), rows_at(torch.zeros_like(x), offset, 1008)
        kernel = softmax.inspect(given, arch="sm_90a")
        assert kernel.plan.placement.shifted == (offset > 0)
        run(kernel, [given], [result], 3)
        found.append(result.clone())
    assert all(torch.equal(each, found[0]) for each in found)


@pytest.mark.parametrize("reverse", [False, True])
def test_results_of_several_dtypes(reverse):
    """Each is staged in memory of its own; those of the same size wait for each other."""

    @htile.rowwise
    def of_many_dtypes(x):
        return torch.exp(x.float()), x > 0, x * 2, -x

    x, _, _ = arguments_of(softmax, 3, 1001)
    given = rows_at(x, 1, 1001)
    kernel = of_many_dtypes.inspect(given, arch="sm_90a")
    assert kernel.plan.placement.shifted and kernel.plan.placement.num_threads > 32
    expected = of_many_dtypes(x)
    results = [rows_at(torch.zeros_like(each), 0, 1001) for each in expected]
    run(kernel, [given], results, 3, reverse)
    for found, wanted in zip(results, expected, strict=True):
        assert torch.allclose(found.double(), wanted.double(), rtol=1e-6)


def test_a_result_that_is_staged_in_parts():
    """Rows of 18 vectors of 16 bytes for each of 256 threads are more than is staged at a time."""
    function = htile.rowwise(lambda x: (x - x.max()).float())
    x, _, _ = arguments_of(softmax, 1, 17411)
    expected = function(x)
    for offset in (0, 1):
        given, result = rows_at(x, 3, 17411), rows_at(torch.zeros_like(expected), offset, 17411)
        kernel = function.with_plan(**HELD, threads_per_row=256).inspect(given, arch="sm_90a")
        assert kernel.resources.dynamic_shared < 17411 * 4 and kernel.plan.placement.shifted
        run(kernel, [given], [result], 1, reverse=offset == 1)
        assert torch.equal(result, expected)


def test_rows_of_a_block_are_staged_in_parts_of_their_own_memory():
    """A row waits for its own threads only, so its second part must not reach another row's first.

    13 vectors of each of 256 threads are more than is staged at a time: 6 go before 7.
    """
    x, _, _ = arguments_of(softmax, 8, 3319)
    expected = softmax(x)
    held = softmax.with_plan(**HELD, threads_per_row=32, num_threads=256)
    kernel = held.inspect(x, arch="sm_90a")
    assert kernel.plan.placement.shifted and kernel.plan.chunks == 13
    for offset in (0, 1):
        given, result = rows_at(x, 0, 3319), rows_at(torch.zeros_like(x), offset, 3319)
        run(kernel, [given], [result], 8, reverse=offset == 1)
        assert (result.double() - expected.double()).abs().max() <= 2**-8 * expected.max()


def test_rows_of_bytes():
    function = htile.rowwise(lambda x, y: x & y)
    rows = [torch.rand(3, 1003) > 0.3 for _ in range(2)]
    expected = function(*rows)
    for offset in (0, 1, 7, 14):
        given = [rows_at(each, offset, 1003) for each in rows]
        result = rows_at(torch.zeros_like(expected), offset, 1003)
        kernel = function.inspect(*given, arch="sm_90a")
        assert kernel.plan.placement.shifted
        run(kernel, given, [result], 3)
        assert torch.equal(result, expected)


def kernel(function, n, offset=0, arch="sm_90a", **plan):
    """A kernel of rows of n elements, in memory `offset` elements behind 16 whole bytes."""
    x = torch.empty(1024 * n + 16, dtype=BF16)[offset : offset + 1024 * n].view(1024, n)
    args = (x,) if function is softmax else (x, torch.empty(n, dtype=BF16))
    return function.with_plan(**plan).inspect(*args, arch=arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("function", [softmax, rmsnorm], ids=["softmax", "rmsnorm"])
def test_shifted_kernels_access_16_bytes(function, arch):
    """Only the ends of what a thread block stores of a row go element by element."""
    loops = [{"form": "loops", "loader": loader, "shares": 1} for loader in ("shared", "packed")]
    for n, offset, plan in ((1001, 0, {}), (1000, 1, {}), *((9001, 0, loop) for loop in loops)):
        found = kernel(function, n, offset, arch, **plan)
        assert found.plan.placement.shifted and found.resources.stack == 0
        loads = re.findall(r"ld\.global\S*\.(v4\.b32|b16)", found.ptx)
        stores = re.findall(r"st\.global\S*\.(v4\.b32|b16)", found.ptx)
        assert loads.count("v4.b32") >= 2 * found.plan.chunks and set(loads) == {"v4.b32"}
        assert "cp.async.cg" not in found.ptx
        assert stores.count("v4.b32") == found.plan.chunks
        assert stores.count("b16") == 1


def test_a_shift_takes_few_instructions():
    """What elements more take, over those of aligned rows: of four branches, one runs."""

    @htile.rowwise
    def double(x):
        return x + x

    def code(n, threads):
        x = torch.empty(64, n, dtype=BF16, device="meta")
        plan = {"threads_per_row": threads, "num_threads": 128, "cluster_n": 1, "form": "held"}
        kernel = double.with_plan(**plan).inspect(x)
        in_branches = len(re.findall(r"\b(?:shf\.r\.wrap|prmt)\.b32", kernel.ptx))
        return kernel.resources.code_bytes // 16, in_branches

    def more(n, less):
        (most, branches), (least, others) = code(n, 128), code(less, 128)
        return most - least, branches - others

    shifted, in_branches = more(8193, 4097)
    aligned, _ = more(8192, 4096)
    assert in_branches == 4 * 2 * 4 * 4  # vectors, loads and stores, branches, words
    assert (shifted - aligned - in_branches * 3 / 4) / 32 <= 1.75


def test_plans_know_what_kernels_do():
    assert shifting.STAGED_BYTES == shifted.STAGED_BYTES
    on_their_way = {Home.SHARED: shifted.TO_TILE, Home.PACKED: shifted.TO_REGISTERS}
    assert on_their_way == shifting.ON_THEIR_WAY


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_column_of_vectors_below_4_bytes_keeps_rows_from_being_shifted(dtype):
    """Two elements of a vector beside int64 are two bytes of a Boolean column."""
    whole = torch.empty(64 * 256 + 1, dtype=torch.int64)[1:].view(64, 256)
    half = torch.empty(64 * 256 + 1, dtype=BF16)[1:].view(64, 256)
    column = torch.empty(256, dtype=dtype)
    function = htile.rowwise(lambda x, y, c: torch.where(c > 0, x + y, y))
    place = function.inspect(half, whole, column, arch="sm_90a").plan.placement
    assert place.copy_bytes == 2 and place.shifted == (dtype is not torch.bool)


def test_what_is_refused():
    config = ElementwiseTileConfig(BFloat16, 1001, shifted=True)
    assert config.num_blocks_N(8) == 4 and not config.is_even(8)
    with pytest.raises(ValueError, match="make it 1, or set shifted=True"):
        ElementwiseTileConfig(BFloat16, 1001).num_blocks_N(8)

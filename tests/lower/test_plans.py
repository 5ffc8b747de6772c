"""Plans: numerics that hang on N and dtypes alone, placements within the architecture's limits."""

import itertools
import math
import time
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import LoweringError
from htile.frontend.graph import Builder, Output, Role
from htile.frontend.ops import COLLECTIVES, INFER, REDUCTIONS, Op, Value, Varies
from htile.frontend.reference import EVALUATE
from htile.lower import plans_for
from htile.lower.choice.cost import cost
from htile.lower.choice.default import FEW_ROWS, choose
from htile.lower.choice.enumeration import enumerate_plans
from htile.lower.choice.held import MOST_HELD_CODE
from htile.lower.choice.loops import UNROLLED_CHUNKS
from htile.lower.choice.preference import closest_first
from htile.lower.emission.emit import emit
from htile.lower.emission.expressions import EMIT
from htile.lower.plan import ONE_KERNEL_N, ROWS, Form, Numerics, Target
from htile.lower.reductions import OF_OP, VERY_LONG_N
from htile.lower.steps import ChunkLoop, Load
from htile.lower.vectors import vector_size
from tests.lower.cases import ARCH, BF16, EXAMPLES, F32, example_kernel, kernel_of
from tests.lower.staging import staged_bytes

SIZES = [1, 3, 17, 64, 127, 128, 1000, 1024, 3584, 4096, 5120, 8191, 16384]  # of the GPU tests
ALIGNMENTS = [16, 8, 4, 2]

# Bytes of shared memory that one thread block may use (CUDA C++ Programming Guide, table of
# technical specifications per compute capability).
SHARED_KIB = {
    "sm_80": 163, "sm_86": 99, "sm_89": 99, "sm_90a": 227, "sm_100a": 227, "sm_103a": 227,
    "sm_120a": 99, "sm_121a": 99,
}  # fmt: skip


def graph_of(name, n, dtype=BF16):
    return example_kernel(name, n, dtype).graph


def plans_of(graph, arch="sm_90a", align=16, rows=1):
    return enumerate_plans(graph, Target(graph.n, ARCH[arch], align, rows=rows))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_every_plan_is_within_the_limits(name, dtype):
    for n in SIZES:
        graph = graph_of(name, n, dtype)
        for arch in ARCH:
            for align in ALIGNMENTS:
                for plan in plans_of(graph, arch, align):
                    check_plan(plan, arch)


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_plan_of_long_rows_is_within_the_limits(name):
    seen = set()
    for n in (12000, 20001, 65536, 262144, (1 << 20) + 8):
        graph = graph_of(name, n, BF16)
        for arch in ARCH:
            for align in (16, 2):
                for rows in ROWS:
                    for plan in plans_of(graph, arch, align, rows):
                        check_plan(plan, arch)
                        seen.add(
                            (is_streamed(plan), rows, plan.placement.shares, plan.placement.abreast)
                        )
    assert {shares for _, rows, shares, _ in seen if rows == 1} == {1}
    assert seen >= {(False, 1024, 1, 1), (False, 1024, 2, 1), (False, 1024, 4, 2)}
    if name == "softmax":
        assert (False, 1024, 8, 4) in seen


def is_streamed(plan):
    return plan.numerics.form is Form.STREAMED


def power_of_two(number):
    return number > 0 and number & (number - 1) == 0


CLUSTERS = {arch: arch.startswith(("sm_90", "sm_10")) for arch in ARCH}


@pytest.mark.parametrize(("n", "dtype"), [(172036, F32), (120918, BF16), (86498, BF16)])
def test_no_plan_has_more_threads_than_a_cta_may_have(n, dtype):
    """Short vectors leave registers for two groups of many threads each."""

    def distances(x, y):
        return (x - y).abs().mean(), (x - y).abs().max()

    for function in (distances, lambda x, y: F.silu(x) * y):
        for m in (8, 64, 256, 4096):
            args = (torch.empty(m, n, dtype=dtype, device="meta") for _ in range(2))
            found = kernel_of(function, *args).plan
            for plan in enumerate_plans(found.graph, found.target):
                check_plan(plan, "sm_90a")


def check_plan(plan, arch):
    num, place, n = plan.numerics, plan.placement, plan.graph.n
    assert n % num.vec_size == 0 or place.shifted, "only shifted rows end inside a vector"
    assert power_of_two(num.vec_size)
    assert power_of_two(num.threads_per_row) or num.threads_per_row % 32 == 0
    assert place.num_threads % 32 == 0
    assert num.cluster_n in (1, 2, 4, 8, 16) and (num.cluster_n == 1 or CLUSTERS[arch])
    assert num.cluster_n == 1 or plan.rows_per_block == 1, "one row a cluster"
    assert num.cluster_n % place.shares == 0
    assert 32 <= place.num_threads <= 1024
    assert num.threads_per_row <= place.num_threads
    assert plan.rows_per_block * plan.placement.abreast * num.threads_per_row == place.num_threads
    assert plan.turns * plan.placement.abreast == place.shares
    held = plan.elements_per_thread
    assert held * num.threads_per_row * num.cluster_n >= n, "the row has a place"
    less = (held - num.vec_size) * num.threads_per_row * num.cluster_n
    assert less < n, "and no more than it needs"
    if num.in_loops:
        assert 1 <= place.unroll <= plan.chunks
        assert 0 <= place.prefetch <= plan.chunks * plan.turns
        assert place.prefetch in (0, place.unroll) or plan.is_unrolled, "a group of a loop"
    else:
        assert held <= 255 and (place.shares, place.prefetch) == (1, 0)
        assert held * place.num_threads <= 65536, "registers of a multiprocessor"
    assert place.copy_bytes == plan.target.align
    inputs = [i for i in plan.graph.inputs if i.role is Role.ROW]
    shared = plan.rows_per_block * max(1, num.threads_per_row // 32) * plan.sweeps.slots * 8
    shared *= num.cluster_n if num.cluster_n > 1 or num.threads_per_row > 32 else 0
    if place.loader == "shared":
        tile = held * num.threads_per_row * plan.rows_per_block * place.shares
        shared += sum(tile * i.dtype.itemsize for i in inputs)
        narrowest = min(num.vec_size * i.dtype.itemsize for i in inputs)
        access = 16 if place.shifted else place.copy_bytes
        assert min(narrowest, access) >= 4, "cp.async copies 4, 8 or 16 bytes"
    elif place.loader == "packed":
        assert num.in_loops and place.shifted and plan.is_unrolled
    else:
        assert place.loader == "direct"
    if place.shifted:
        assert num.in_loops or place.loader == "direct", "rows come through registers anyway"
    shared += staged_bytes(plan)
    assert shared <= SHARED_KIB[arch] * 1024


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_numerics_hang_on_n_and_dtypes_alone(name, dtype):
    for n in SIZES:
        graph = graph_of(name, n, dtype)
        for arch in ARCH:  # which counts where a row may be spread over a cluster
            chosen = [
                choose(plans_of(graph, arch, align, rows))
                for align, rows in zip([*ALIGNMENTS, 1], itertools.cycle(ROWS), strict=False)
            ]
            found = {plan.numerics for plan in chosen}
            is_free = chosen[0].work.is_map and n > ONE_KERNEL_N  # bits hang on nothing there
            assert len(found) == 1 or is_free, f"N = {n}, {arch}: {found}"


@pytest.mark.parametrize("n", [2048, 2056, 4096, 7864, 14336, 50264])
def test_few_rows_of_a_map_are_divided_over_many_ctas(n):
    """Nothing is reduced, so no bits change. Rows of 2048 elements have one kernel."""
    graph = graph_of("swiglu", n)
    chosen = {rows: choose(plans_of(graph, rows=rows)) for rows in ROWS}
    ctas = {rows: plan.numerics.cluster_n for rows, plan in chosen.items()}
    if n <= ONE_KERNEL_N:
        assert {plan.numerics for plan in chosen.values()} == {chosen[1].numerics}
        assert ctas[1] == 1
    else:
        assert ctas[1] >= 2 and ctas[1] >= ctas[64] >= ctas[1024]
    usual = closest_first(plans_of(graph))[0]
    assert cost(chosen[1], FEW_ROWS).time <= cost(usual, FEW_ROWS).time


@pytest.mark.parametrize("m", [1, 2, 7, 4096, 1 << 20])
@pytest.mark.parametrize("name", EXAMPLES)
def test_nothing_hangs_on_the_batch(name, m):
    function, arguments = EXAMPLES[name]
    inspected = function.inspect(*arguments(m, 1000, BF16, "meta"))
    expected = example_kernel(name, 1000)
    assert inspected.source == expected.source
    assert str(inspected.plan) == str(expected.plan)


SOFTMAX, MOMENTS = ("softmax",), ("moments",)
# The first plan, written down: a change of these is a change of every result's bits.
NUMERICS = {
    ("softmax", 1, BF16): (1, 1),
    ("softmax", 64, BF16): (8, 8),
    ("softmax", 64, F32): (4, 8),
    ("softmax", 127, BF16): (1, 16),
    ("log_softmax", 127, BF16): (1, 16),
    ("softmax", 1000, BF16): (8, 64),
    ("softmax", 4096, BF16): (8, 256),
    ("softmax", 4096, F32): (4, 512),
    ("softmax", 8191, BF16): (8, 256),
    ("softmax", 16384, BF16): (8, 256, 4, Form.HELD, SOFTMAX),
    ("log_softmax", 16384, BF16): (8, 256, 4, Form.LOOPS, SOFTMAX),
    ("norm_softmax", 16384, BF16): (8, 256),
    ("norm_softmax", 32768, BF16): (8, 256, 2, Form.LOOPS, MOMENTS + SOFTMAX),
    ("norm_softmax", 131072, BF16): (8, 256, 8, Form.LOOPS, SOFTMAX),
    ("layernorm", 16384, BF16): (8, 128, 4, Form.LOOPS, MOMENTS),
    ("rmsnorm", 32768, BF16): (8, 256, 8, Form.LOOPS),
    ("rmsnorm_residual", 32768, BF16): (8, 256, 8, Form.LOOPS),
    ("rmsnorm", 8192, BF16): (8, 512),
    ("rmsnorm", 262144, BF16): (8, 256, 16, Form.LOOPS),
    ("softmax", 1 << 20, BF16): (8, 512, 8, Form.STREAMED, SOFTMAX),
    ("layernorm", 1 << 22, BF16): (8, 512, 8, Form.STREAMED, MOMENTS),
    ("rmsnorm", 16384, BF16): (8, 256, 4, Form.LOOPS),
    ("softmax", 32768, BF16): (8, 256, 4, Form.HELD, SOFTMAX),
    ("softmax", 65536, BF16): (8, 256, 8, Form.HELD, SOFTMAX),
    ("softmax", 131072, BF16): (8, 256, 16, Form.LOOPS, SOFTMAX),
    ("softmax", 65536, F32): (4, 256, 8, Form.HELD, SOFTMAX),
    ("layernorm", 131072, BF16): (8, 256, 16, Form.LOOPS),
    ("swiglu", 65536, BF16): (8, 256, 8),
    ("swiglu", 262144, BF16): (8, 512, 16, Form.LOOPS),
    ("softmax", 262144, BF16): (8, 256, 16, Form.LOOPS, SOFTMAX),
    ("rmsnorm_residual", 4096, BF16): (8, 256),
    ("rmsnorm", 8191, BF16): (8, 128),
}


@pytest.mark.parametrize(("name", "n", "dtype"), NUMERICS)
def test_the_default_numerics(name, n, dtype):
    numerics = choose(plans_of(graph_of(name, n, dtype), rows=ROWS[-1])).numerics
    assert replace(numerics, merged=False, folded=0) == Numerics(*NUMERICS[name, n, dtype])


@pytest.mark.parametrize(
    ("dtypes", "n", "expected"),
    [
        ([BF16], 4096, 8),
        ([BF16], 4094, 2),
        ([BF16], 4095, 8),
        ([BF16], 255, 1),
        ([F32], 4095, 4),
        ([F32], 4094, 2),
        ([torch.bool, F32], 4095, 4),
        ([torch.bool, F32], 4094, 2),
        ([torch.int64, BF16], 4095, 1),
        ([F32], 4096, 4),
        ([BF16, F32], 4096, 4),
        ([torch.int64, BF16], 4096, 2),
        ([BF16], 12, 4),
        ([BF16], 1, 1),
    ],
)
def test_the_vector_is_16_bytes_of_the_widest_row(dtypes, n, expected):
    x, y = (torch.empty(4, n, dtype=d, device="meta") for d in (dtypes * 2)[:2])
    kernel = kernel_of(lambda x, y: (x + y).to(BF16), x, y)
    assert kernel.plan.numerics.vec_size == vector_size(kernel.graph) == expected


def test_columns_count_as_rows_do():
    x, w = (torch.empty(shape, dtype=d, device="meta") for shape, d in (((4, 64), BF16), (64, F32)))
    assert kernel_of(lambda x, w: (x * w).to(BF16), x, w).plan.numerics.vec_size == 4


@pytest.mark.parametrize("name", EXAMPLES)
def test_both_loaders_exist(name):
    for n in (1000, 4096):
        assert {p.placement.loader for p in plans_of(graph_of(name, n))} == {"shared", "direct"}


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_too_narrow_for_cp_async_is_loaded_directly(name):
    short_and_odd = plans_of(graph_of(name, 255))
    assert {p.placement.loader for p in short_and_odd} == {"direct"}
    assert not any(p.placement.shifted for p in short_and_odd)


@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_that_begin_anywhere_are_shifted(name):
    """Their numerics are those of aligned rows of as many elements."""
    for n, align in ((4096, 2), (4096, 4), (4095, 16)):
        plans = plans_of(graph_of(name, n), align=align)
        assert all(p.placement.shifted for p in plans)
        assert {p.placement.loader for p in plans} == {"direct"}
        aligned = {p.numerics for p in plans_of(graph_of(name, n))}
        assert {p.numerics for p in plans} == aligned
        assert {num.vec_size for num in aligned} == {8}
    assert not any(p.placement.shifted for p in plans_of(graph_of(name, 4096), align=8))


@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
def test_results_of_several_sizes_have_the_numerics_of_aligned_rows(arch):
    """What they are stored through must not keep any plan from being there."""

    def of_many_sizes(x, y):
        return (x - x.max()).float(), x * 2, x > y

    for count, n in ((1, 20000), (2, 8192), (3, 16384), (3, 20000)):
        x = torch.empty(ROWS[-1], n, dtype=BF16, device="meta")
        graph = kernel_of(lambda x, y: of_many_sizes(x, y)[:count], x, x).graph  # noqa: B023
        shifted = plans_of(graph, arch, align=2)
        assert all(p.placement.shifted for p in shifted)
        assert {p.numerics for p in shifted} == {p.numerics for p in plans_of(graph, arch)}


def test_a_view_of_little_alignment_is_shifted_and_goes_straight_to_registers():
    whole = torch.empty(ROWS[-1], 4104, dtype=BF16)
    function, _ = EXAMPLES["softmax"]
    for offset, align in ((0, 16), (4, 8), (2, 4), (1, 2)):
        plan = function.inspect(whole[:, offset : offset + 4096]).plan
        assert plan.placement.copy_bytes == align
        assert plan.placement.shifted == (align < 8)
        assert plan.placement.loader == ("direct" if align < 8 else "shared")
        assert plan.numerics == Numerics(8, 256)


def test_the_row_stride_counts_as_alignment():
    function, _ = EXAMPLES["softmax"]
    for stride, align in ((4096, 16), (4100, 8), (4098, 4), (4097, 2)):
        view = torch.empty(4, stride, dtype=BF16)[:, :4096]
        assert function.inspect(view).plan.placement.copy_bytes == align
        assert function.inspect(view[:1]).plan.placement.copy_bytes == 16


def test_a_vector_that_is_less_than_16_bytes_asks_for_no_more():
    """x has vectors of 8 bytes beside the float32 y; an address of 8 is as good as 16."""
    x = torch.empty(4 * 4096 + 4, dtype=BF16)[4:].view(4, 4096)
    y = torch.empty(4, 4096)
    assert kernel_of(lambda x, y: x + y, x, y).plan.placement.copy_bytes == 16


def test_alignment_is_held_against_the_vectors_of_the_kernel():
    """y is not used, so the vectors of x are 16 bytes, and an address of 8 does not do."""
    x = torch.empty(4 * 4096 + 4, dtype=BF16)[4:].view(4, 4096)
    assert x.data_ptr() % 16 == 8
    plan = kernel_of(lambda x, y: x * 2, x, torch.empty(4, 4096)).plan
    assert plan.numerics.vec_size == 8
    assert plan.placement.copy_bytes == 8


@pytest.mark.parametrize("arch", ARCH)
@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_up_to_16384_fit_every_architecture(name, arch):
    for dtype in (BF16, F32):
        assert plans_of(graph_of(name, 16384, dtype), arch)


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.parametrize("n", [1 << 18, (1 << 22) + 1])
def test_rows_that_fit_nothing_are_streamed(name, n):
    for arch in ("sm_80", "sm_120a"):
        function, arguments = EXAMPLES[name]
        kernel = function.inspect(*arguments(4, n, F32, "meta"), arch=arch)
        assert is_streamed(kernel.plan) and kernel.plan.placement.loader == "direct"
        assert "cutlass.range(" in kernel.source


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_what_is_streamed_hangs_on_no_alignment(name, dtype):
    """A row that shared memory holds is worked on as such, even if it is read past it."""
    for n in (12000, 20001, 65536, 131073, 1 << 20, 1 << 22):
        graph = graph_of(name, n, dtype)
        for arch in ARCH:
            found = [{p.numerics for p in plans_of(graph, arch, align)} for align in ALIGNMENTS]
            assert all(numerics == found[0] for numerics in found)
            kept = [p for p in plans_of(graph, arch) if p.placement.loader == "shared"]
            assert not any(map(is_streamed, kept))
        plan = choose(plans_of(graph))
        sizes = [i.dtype.itemsize for i in graph.inputs if i.role is Role.ROW]
        tile = plan.elements_per_thread * plan.numerics.threads_per_row * sum(sizes)
        must = plan.numerics.in_loops and tile > 226 * 1024
        assert is_streamed(plan) == must or n > VERY_LONG_N


def test_sums_of_many_chunks_have_two_levels_where_rows_are_streamed():
    seen = set()
    for n in (65537, 131072, 1 << 20, 1 << 22, (1 << 22) + 1):
        for plan in plans_of(graph_of("norm_softmax", n, F32)):
            streamed, many = is_streamed(plan), plan.chunks > 32
            seen.add((streamed, many))
            loops = [step for step in plan.steps if isinstance(step, ChunkLoop)]
            folds = [len(plan.folds(loop)) for loop in loops]
            assert (plan.numerics.folded, folds) == ((16, [1, 1, 0]) if streamed and many else
                                            (0, [0] * len(loops)))  # fmt: skip
    assert seen == {(False, False), (False, True), (True, False), (True, True)}


def test_a_mean_and_squares_take_two_chunks_at_once_where_those_are_whole_and_few():
    for n, in_pairs in ((32768, True), (65536, True), (49152, False), (20000, False)):
        for plan in plans_of(graph_of("layernorm", n), rows=ROWS[-1]):
            if plan.numerics.in_loops:
                whole = n % (8 * plan.numerics.threads_per_row * plan.numerics.cluster_n) == 0
                few = plan.chunks <= UNROLLED_CHUNKS and plan.chunks % 2 == 0
                assert ("in_pairs=True" in emit(plan)) == (whole and few) == plan.numerics.merged
        assert choose(plans_of(graph_of("layernorm", n), rows=ROWS[-1])).numerics.merged == in_pairs


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
@pytest.mark.parametrize("name", EXAMPLES)
def test_rows_of_2048_elements_have_one_kernel_from_two_rows_on(name, dtype):
    for n in (64, 100, 1024, 2048):
        texts = {emit(choose(plans_of(graph_of(name, n, dtype), rows=rows))) for rows in ROWS}
        assert len(texts) == 1


def test_a_row_that_is_only_read_has_two_groups_of_threads_in_few_ctas():
    kernel = kernel_of(lambda x: torch.logsumexp(x, -1), torch.empty(2, 131072, dtype=BF16))
    shares = {1: (1, 1), 64: (8, 2), 256: (16, 2), 1024: (16, 2)}
    for rows, expected in shares.items():
        plan = choose(plans_of(kernel.graph, rows=rows))
        assert (plan.placement.shares, plan.placement.abreast) == expected
        assert plan.numerics.cluster_n == 16


def test_few_rows_go_straight_to_registers_and_many_have_ctas_of_two():
    graph = graph_of("softmax", 4096)
    placed = {rows: choose(plans_of(graph, rows=rows)) for rows in ROWS}
    assert [plan.placement.loader for plan in placed.values()] == ["direct"] * 2 + ["shared"] * 2
    assert [plan.rows_per_block for plan in placed.values()] == [1, 1, 1, 2]
    assert len({plan.numerics for plan in placed.values()}) == 1


def test_only_float_sums_have_two_levels():
    def f(x):
        return x.sum(), x.amax(), (x > 0).sum(), x.prod()

    plan = kernel_of(f, torch.empty(4, 1 << 22, device="meta")).plan
    (loop,) = (step for step in plan.steps if isinstance(step, ChunkLoop))
    assert plan.folds(loop) == loop.parts[:1]


def wide(*rows):
    total = sum(rows)
    return (*(row / total.sum() for row in rows), total)


@pytest.mark.parametrize("n", [64, 1000, 4096, 8192, 20000])
def test_there_is_a_plan_however_many_arguments(n):
    """Of 40 rows at once; what no thread holds is spilled, not refused."""
    names = [f"x{k}" for k in range(40)]
    scope = {"wide": wide}
    exec(f"def many({', '.join(names)}): return wide({', '.join(names)})", scope)
    x = torch.empty(4, n, dtype=BF16, device="meta")
    kernel = kernel_of(scope["many"], *[x] * 40)
    assert kernel.plan.placement.num_threads * 64 <= 65536


@pytest.mark.parametrize("dtype", [BF16, F32, torch.int64], ids=str)
@pytest.mark.parametrize("rows", [17, 40])
def test_there_is_a_plan_for_many_rows_beside_columns(rows, dtype):
    """Of so many bytes an element that no share of a row fits three times into an SM."""
    names = [f"x{k}" for k in range(rows)]
    text = f"wide({', '.join(names)})[0] * weight + bias"
    scope = {"wide": wide}
    exec(f"def many({', '.join(names)}, weight, bias): return {text}", scope)
    x, w = (torch.empty(*shape, dtype=dtype, device="meta") for shape in ((4, 65536), (65536,)))
    assert kernel_of(scope["many"], *[x] * rows, w, w).plan.elements_per_thread


def sums_of(count, n, dtype=BF16):
    """A graph of `count` sums behind one barrier."""
    one = torch.int64 if dtype is torch.int64 else None
    b = Builder("sums", n)
    x = b.add_input("x", Role.ROW, dtype, Value((n,), Varies.ROW, one or F32, None, True))
    scaled = [b.add(Op.MUL, (x, b.add_const(k, Value((), Varies.SCALAR, one or F32)))) for k in
              range(2, count + 2)]  # fmt: skip
    found = [b.add(Op.SUM, (y,)) for y in scaled]
    total = found[0]
    for other in found[1:]:
        total = b.add(Op.ADD, (total, other))
    return b.finish([Output("out", total, one or F32, (), False)], None)


@pytest.mark.parametrize("dtype", [BF16, torch.int64], ids=str)
@pytest.mark.parametrize("n", [4096, 8192, 65537, 131072, 1 << 22])
def test_many_reductions_fit_every_plan(n, dtype):
    """Their buffer is in shared memory whatever the loader; a thread initializes each mbarrier."""
    graph = sums_of(150, n, dtype)
    for name, arch in ARCH.items():
        plans = enumerate_plans(graph, Target(n, arch, rows=1024))
        assert plans
        for plan in plans:
            num, place = plan.numerics, plan.placement
            slots = plan.sweeps.slots
            assert num.cluster_n == 1 or slots <= place.num_threads
            if num.threads_per_row > 32 or num.cluster_n > 1:
                size = 8 if dtype is torch.int64 else 4
                warps = place.num_threads // 32 // plan.placement.abreast
                used = slots * (warps * num.cluster_n * size + 8)
                if place.loader == "shared":
                    tile = plan.elements_per_thread * num.threads_per_row * dtype.itemsize
                    used += plan.rows_per_block * place.shares * tile
                assert used <= SHARED_KIB[name] * 1024, plan


def test_what_no_plan_holds_says_so():
    graph, small = sums_of(150, 1 << 18), replace(ARCH["sm_86"], shared_bytes=2048)
    with pytest.raises(LoweringError, match=r"150 reductions need more shared memory .* sm_86"):
        plans_for(graph, Target(1 << 18, small))
    x = torch.empty(2, 2**30 + 8, dtype=BF16, device="meta")
    with pytest.raises(LoweringError, match=r"rows of 1073741832 elements; the limit is 2\^30"):
        kernel_of(lambda x: x / x.sum(), x)


def test_a_plan_that_does_not_exist_says_so():
    function, arguments = EXAMPLES["softmax"]
    x = arguments(4, 4096, BF16, "meta")
    with pytest.raises(LoweringError, match=r"softmax: no plan has \{'loader': 'magic'\}"):
        function.with_plan(loader="magic").inspect(*x)
    with pytest.raises(LoweringError, match=r"a plan has no 'colour'; it has .*vec_size"):
        function.with_plan(colour=3).inspect(*x)


@pytest.mark.parametrize("loader", ["shared", "direct"])
@pytest.mark.parametrize("threads", [64, 128, 256, 512])
def test_plans_can_be_forced(loader, threads):
    plan = example_kernel("softmax", 4096, threads_per_row=threads, loader=loader).plan
    assert (plan.numerics.threads_per_row, plan.placement.loader) == (threads, loader)


def test_one_plan_is_the_default_and_all_differ():
    for name in EXAMPLES:
        graph = graph_of(name, 4096)
        target = Target(4096, ARCH["sm_90a"])
        plans = enumerate_plans(graph, target)
        assert choose(plans) in plans and choose(plans[::-1]) is choose(plans)
        lowered, default = choose(plans_for(graph, target)), choose(plans)
        assert (lowered.numerics, lowered.placement) == (default.numerics, default.placement)
        assert len({(p.numerics, p.placement) for p in plans}) == len(plans) >= 10


def test_fastmath_changes_no_numerics():
    graph = graph_of("capped_softmax", 4096)
    target = Target(4096, ARCH["sm_90a"])
    exact, fast = (
        choose(plans_for(graph, replace(target, fastmath=fast))) for fast in (False, True)
    )
    assert exact.numerics == fast.numerics and exact.steps != fast.steps


def test_bytes_of_a_row():
    plan = example_kernel("capped_softmax", 1000).plan
    assert plan.bytes_per_row() == (2 * 1000 + 4, 2 * 1000 + 4)
    plan = example_kernel("rmsnorm_residual", 1000, F32).plan
    assert plan.bytes_per_row() == (8000, 8000)  # the weight is shared by all rows


def test_every_row_is_loaded_once():
    for name in EXAMPLES:
        plan = example_kernel(name, 1000).plan
        loads = [step.input for step in plan.steps if isinstance(step, Load)]
        scalars = [i for i in plan.graph.inputs if i.role in (Role.SCALAR, Role.TAKEN, Role.TABLE)]
        assert sorted(loads + scalars, key=lambda i: i.id) == list(plan.graph.inputs)


LEAVES = {Op.INPUT, Op.CONST, Op.INDEX, Op.LENGTH}


@pytest.mark.parametrize(
    ("table", "ops"),
    [
        (INFER, set(Op)),
        (EMIT, set(Op)),
        (EVALUATE, set(Op) - LEAVES),
        (OF_OP, COLLECTIVES),
    ],
    ids=["INFER", "EMIT", "EVALUATE", "OF_OP"],
)
def test_tables_are_total(table, ops):
    assert set(table) == set(ops)


@pytest.mark.parametrize("op", sorted(REDUCTIONS - {Op.MEAN}, key=lambda op: op.value), ids=str)
def test_the_identity_changes_no_result(op):
    logical = op in (Op.ANY, Op.ALL)
    values = torch.tensor([False, True]) if logical else torch.tensor([-3.5, 2.0, 0.0])
    identity = torch.tensor([OF_OP[op].identity]).to(values.dtype)
    rule = EVALUATE[op]
    alone = rule((values,), None, values.dtype)
    padded = rule((torch.cat([values, identity]),), None, values.dtype)
    assert torch.equal(alone, padded)


PADDED = {
    "a maximum": (lambda x: x.max(), F32, -math.inf),
    "a minimum of float16": (lambda x: x.min(), torch.float16, math.inf),
    "a product": (lambda x: x.prod(), F32, 1.0),
    "a pair": (lambda x: torch.logsumexp(x, -1), BF16, -math.inf),
    "a sum": (lambda x: x.sum(), F32, 0.0),
    "whole numbers": (lambda x: x.max(), torch.int32, 0.0),
    "two reductions": (lambda x: (x.sum(), x.max()), F32, 0.0),
    "a pair and a sum": (lambda x: torch.logsumexp(x, -1) - x.mean(), BF16, 0.0),
    "of an expression": (lambda x: (x * 2).max(), F32, 0.0),
    "read and stored": (lambda x: (x + 1, x.max()), F32, 0.0),
}


@pytest.mark.parametrize("name", PADDED)
def test_a_row_that_is_reduced_alone_holds_the_identity_behind_its_end(name):
    """And needs no select, but shifted rows do, and so does every other operand."""
    function, dtype, expected = PADDED[name]
    for n in (300001, 300032):  # of odd and of whole vectors
        kernel = kernel_of(function, torch.empty(3, n, dtype=dtype, device="meta"))
        loop = next(step for step in kernel.plan.steps if isinstance(step, ChunkLoop))
        assert loop.padding == expected and kernel.plan.is_ragged
        is_padded = bool(expected) and not kernel.plan.placement.shifted
        assert ("padding=" in kernel.source) == ("padded=True" in kernel.source) == is_padded


def test_a_column_that_is_reduced_alone_gets_a_select():
    x, w = (torch.empty(*shape, 300001, device="meta") for shape in ((3,), ()))
    source = kernel_of(lambda x, w: x * w.max(), x, w).source
    assert "padded" not in source and "padding" not in source


@pytest.mark.parametrize("n", [8193, 30000, 140000])
def test_every_plan_says_what_it_does(n):
    """One that joins a maximum and a sum in one exchange too."""
    x = torch.empty(4096, n, dtype=torch.bfloat16, device="meta")
    for function in (lambda x: torch.logsumexp(x, -1), lambda x: torch.log_softmax(x, -1)):
        kernel = kernel_of(function, x)
        plans = enumerate_plans(kernel.graph, kernel.plan.target)
        assert any(plan.numerics.joint for plan in plans)
        for plan in plans:
            assert str(plan).count("reduce ") == plan.stages


def wide_norm(x, w):
    return x * torch.rsqrt((x * x).mean() + 1e-6) * (1 + w)


@pytest.mark.parametrize("n", [4096, 11352, 50264, 100008])
def test_the_default_is_the_preferred_plan_or_one_that_costs_less(n):
    """Rows whose preferred plan pads much have numbers of threads that pad them less."""
    args = torch.empty(8, n, dtype=BF16, device="meta"), torch.empty(n, device="meta")
    found = htile.rowwise(wide_norm).inspect(*args).plan
    plans = enumerate_plans(found.graph, replace(found.target, rows=ROWS[-1]))
    usual, plan = closest_first(plans)[0], choose(plans)
    times = [[cost(p, rows).time for rows in (1 << 16, FEW_ROWS)] for p in (usual, plan)]
    if plan != usual:
        assert any(less < most for most, less in zip(*times, strict=True))
    threads = plan.numerics.threads_per_row
    own, other = (
        padded(n, q.vec_size, q.cluster_n, q.threads_per_row)
        for q in (plan.numerics, usual.numerics)
    )
    assert own <= 1.05 or own <= other, f"{threads} threads pad the row"
    for arch in ("sm_80", "sm_120a"):  # whose costs are not known
        plans = enumerate_plans(plan.graph, replace(plan.target, arch=ARCH[arch]))
        assert choose(plans) is closest_first(plans)[0]


def padded(n, vec, cluster, threads):
    """How often the row's vectors are worked on: its own and those that pad it."""
    vectors = math.ceil(n / (vec * cluster))
    return math.ceil(vectors / threads) * threads / vectors


@pytest.mark.parametrize("n", [2056, 6152, 14008, 50264, 100008, 200008])
def test_some_plan_pads_a_row_by_little(n):
    """Numbers of threads that are multiples of 32 divide rows that powers of two do not."""
    found = htile.rowwise(wide_norm).inspect(
        torch.empty(4096, n, dtype=BF16, device="meta"), torch.empty(n, device="meta")
    )
    plans = enumerate_plans(found.graph, found.plan.target)
    between = [p.numerics for p in plans if not power_of_two(p.numerics.threads_per_row)]
    assert between
    for num in between:
        below = 1 << (num.threads_per_row.bit_length() - 1)
        own, *others = (
            padded(n, num.vec_size, num.cluster_n, t)
            for t in (num.threads_per_row, below, 2 * below)
        )
        assert own < min(others)
    every = {p.numerics for p in plans}
    assert min(padded(n, q.vec_size, q.cluster_n, q.threads_per_row) for q in every) <= 1.06


def test_choosing_takes_few_milliseconds():
    """The least of some runs, for a function of 30 nodes; 6 ms where nothing else runs."""

    def deep(x, y):
        for _ in range(3):
            x = torch.softmax(x * 1.5 + y, -1) + F.silu(x)
        return x - x.mean()

    args = (torch.empty(8, 40864, device="meta") for _ in range(2))
    plan = htile.rowwise(deep).inspect(*args).plan
    plans = enumerate_plans(plan.graph, plan.target)

    def took():
        start = time.process_time()
        choose(plans)
        return time.process_time() - start

    assert len(plan.graph) >= 30 and len(plans) > 20
    assert min(took() for _ in range(20)) < 0.014


@pytest.mark.parametrize("n", [1, 7, 8192, 65536])
def test_every_plan_has_a_cost_even_if_no_row_is_read(n):
    """Of a function of values per row alone, a plan in loops has no loop."""
    functions = (lambda x, t: t * 2.0, lambda x, t: x.amax() + t, lambda x, t: x * t)
    x, t = torch.empty(8, n, device="meta"), torch.empty(8, 1, device="meta")
    for function in functions:
        graph = htile.rowwise(function).inspect(x, t).graph
        for plan in plans_of(graph, rows=ROWS[-1]):
            for rows in (1, 1 << 20):
                parts = vars(cost(plan, rows)).values()
                assert all(part >= 0 for part in parts), plan


def test_thread_blocks_of_maps_that_compute_much_start_apart():
    def computing(x):
        return torch.tanh(x) * torch.log1p(torch.exp(-x)) + F.gelu(x)

    def light(x):
        return x * 2

    def reduced(x):
        return computing(x) / x.sum()

    def plan_of(function, m, n=24576, **more):
        return htile.rowwise(function).inspect(torch.empty(m, n, dtype=BF16, device="meta"), **more)

    found = plan_of(computing, 4096)
    assert found.plan.placement.apart and found.plan.ctas > 1
    assert "apart=True" in found.source and "in no cluster" in str(found.plan)
    plans = enumerate_plans(found.graph, found.plan.target)
    assert {plan.placement.apart for plan in plans if plan.ctas > 1} == {True}
    assert not any(plan.placement.apart for plan in plans if plan.ctas == 1)
    others = plan_of(computing, 64), plan_of(light, 4096), plan_of(reduced, 4096)
    assert not any(each.plan.placement.apart for each in others)
    in_place = replace(found.plan.target, aliases=(("out", "x"),))
    assert not any(plan.placement.apart for plan in enumerate_plans(found.graph, in_place))


def test_a_grid_of_thread_blocks_that_start_apart_has_one_axis():
    from cutlass import BFloat16

    from htile.config import ElementwiseTileConfig

    sizes = {"N": 24576, "cluster_n": 4, "num_threads": 128, "threads_per_row": 128}
    together = ElementwiseTileConfig(BFloat16, stage=0, **sizes)
    apart = ElementwiseTileConfig(BFloat16, stage=0, apart=True, **sizes)
    assert (together.grid(7), together.cluster) == ([7, 4, 1], [1, 4, 1])
    assert (apart.grid(7), apart.cluster) == ([28, 1, 1], None)
    with pytest.raises(ValueError, match="apart from each other exchange nothing, got stage=1"):
        ElementwiseTileConfig(BFloat16, stage=1, apart=True, **sizes)


def pairs(x):
    return F.softplus(x[None, :] - x[:, None]).sum()


@pytest.mark.parametrize("n", [24, 40])
def test_more_threads_hold_rows_whose_elements_take_much_code(n):
    """Each element of a row is one of n pairs, and each of these takes about 25 instructions."""
    kernel = kernel_of(pairs, torch.empty(3, n, requires_grad=True))
    for each in (kernel, kernel.backward):
        work, numerics = each.plan.work, each.plan.numerics
        elements = numerics.chunks(n) * numerics.vec_size
        assert work.held.costs[0] > 20 * n
        assert elements == numerics.vec_size or work.held.costs[0] * elements <= MOST_HELD_CODE
        assert each.resources.stack == 0

"""Real compiles without a GPU: what every example uses on every architecture."""

import hashlib
import math
import os
import re
import shutil
import struct
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import htile
from htile.build import compile as compiler
from htile.build.arch import ARCHS, arch_named, arch_of_capability
from htile.build.artifact import as_compiled
from htile.build.compile import _compile, build, load_source
from htile.errors import CompileError
from htile.lower import enumerate_plans, printed
from htile.lower.plan import Target
from tests.digests.cells import Cell
from tests.lower.cases import ARCH, BF16, EXAMPLES, F16, F32, example_kernel, kernel_of, rows
from tests.lower.staging import staged_bytes

REPO = Path(__file__).parents[2]
# Bytes that one thread block may use, as the CUDA C++ Programming Guide has it, in KiB.
SHARED_KIB = {"sm_80": 163, "sm_90a": 227, "sm_100a": 227, "sm_120a": 99}
COMPILED = ["sm_80", "sm_90a", "sm_100a", "sm_120a"]
CASES = [(name, 4096, BF16, arch) for name in EXAMPLES for arch in COMPILED]
CASES += [(name, 1000, F32, "sm_90a") for name in EXAMPLES]
CASES += [(name, 8191, F16, "sm_90a") for name in EXAMPLES]
CASES += [(name, 16384, dtype, "sm_120a") for name in EXAMPLES for dtype in (BF16, F32)]
CASES += [(name, 1, BF16, "sm_80") for name in ("softmax", "rmsnorm_residual", "capped_softmax")]
LONG = ("softmax", "log_softmax", "layernorm", "rmsnorm", "norm_softmax")
LONG += ("causal_softmax", "cross_entropy")
CASES += [(name, 1 << 22, BF16, arch) for name in LONG for arch in COMPILED]
CASES += [(name, (1 << 22) + 1, F32, arch) for name in LONG for arch in ("sm_80", "sm_90a")]


def check(kernel):
    """Assert what holds for every kernel that is compiled."""
    used, plan = kernel.resources, kernel.plan
    assert used.stack == 0
    assert 0 < used.registers <= 255
    assert used.registers * used.threads <= 65536, "or the launch fails"
    assert used.threads == plan.placement.num_threads
    assert used.static_shared in (0, 1024), "what the driver reserves, from sm_90 on"
    shared = used.dynamic_shared
    assert shared <= SHARED_KIB[kernel.arch] * 1024
    tile = 0
    if plan.placement.loader == "shared":
        elements = plan.elements_per_thread * used.threads
        tile = sum(elements * i.dtype.itemsize for i in plan.graph.inputs if i.role.value == "row")
    tile += staged_bytes(plan)
    warps = used.threads // 32 * plan.numerics.cluster_n
    # at most 8 bytes for a warp and a slot, and an mbarrier for a slot
    buffer = (warps + 1) * plan.slots * 8
    assert tile <= shared <= tile + buffer + 64
    assert re.search(rf"^\.target {kernel.arch}\b", kernel.ptx, re.M)
    assert re.findall(r"\.entry", kernel.ptx) == [".entry"], "one kernel"
    assert re.search(rf"\.reqntid {used.threads}\b", kernel.ptx)


@pytest.mark.parametrize(("name", "n", "dtype", "arch"), CASES)
def test_examples_compile_without_a_stack(name, n, dtype, arch):
    check(example_kernel(name, n, dtype, arch))


@pytest.mark.parametrize("loader", ["shared", "direct"])
@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_zeros_of_both_signs_in_one_kernel(zeros, loader):
    """CuTe-DSL finds constants by `==`, and a kernel that loads directly has a 0.0 of its own."""

    @htile.rowwise
    def signed(x):
        return x * zeros[0], torch.where(x > 1, x, zeros[1]), x / zeros[1]

    kernel = signed.with_plan(loader=loader).inspect(torch.empty(4, 96, device="meta"))
    multiplied = set(re.findall(r"mul\.rn\.f32\s.*, (0f[08]0000000);", kernel.ptx))
    positive, negative = "0f00000000", "0f80000000"
    assert (positive if math.copysign(1, zeros[0]) > 0 else negative) in multiplied
    assert kernel.ptx.count(negative) >= 1 and kernel.ptx.count(positive) >= 1
    if math.copysign(1, zeros[0]) < 0:
        assert positive not in multiplied


@pytest.mark.parametrize("n", [1000, 32768, 1 << 20])
@pytest.mark.parametrize("name", ["softmax", "rmsnorm_residual", "swiglu"])
def test_nothing_is_touched_before_the_kernel_before_has_ended(name, n):
    """Wherever rows are held or streamed, global memory is touched only after the wait."""
    lines = example_kernel(name, n).ptx.splitlines()
    (wait,) = (k for k, line in enumerate(lines) if "griddepcontrol.wait" in line)
    touched = re.compile(r"\b(ld\.global|st\.global|cp\.async\.c[ag]|prefetch|red\.|atom\.)")
    first = min(k for k, line in enumerate(lines) if touched.search(line))
    (entry,) = (k for k, line in enumerate(lines) if ".entry" in line)
    assert entry < wait < first
    branches = [line for line in lines[entry:wait] if re.search(r"\b(bra|ret|exit)\b", line)]
    assert not [line for line in branches if not line.strip().startswith("@")], branches
    assert sum("griddepcontrol.launch_dependents" in line for line in lines) == 1
    assert "griddepcontrol" not in example_kernel(name, n, arch="sm_80").ptx


@pytest.mark.parametrize("n", [32768, 131080, 1 << 20])
@pytest.mark.parametrize("name", ["softmax", "swiglu"])
def test_who_arrives_at_the_barrier_of_a_cluster_waits(name, n):
    """Without a reduction there is nothing to wait for, and no mbarrier to initialize."""
    kernel = example_kernel(name, n)
    assert kernel.plan.numerics.cluster_n > 1
    for what in ("arrive", "wait"):
        assert kernel.ptx.count(f"barrier.cluster.{what}") == min(1, kernel.plan.stages)
    slots = kernel.plan.sweeps.slots  # a thread initializes the mbarrier of each
    assert kernel.ptx.count("mbarrier.init") == min(1, slots)


@pytest.mark.parametrize(("name", "loops"), [("softmax", 2), ("layernorm", 1)])
def test_a_streamed_row_takes_one_exponential_an_element_and_one_a_chunk(name, loops):
    """Of four chunks of 8 in the body of each loop, and of the last four behind it. The row takes
    one more for a warp, and one for each of the four pairs of other warps that a lane combines."""
    ptx = example_kernel(name, 1 << 22).ptx
    exponentials = 8 * (8 + 1) + 1 + 4 + 8 * 8 if loops == 2 else 0
    assert len(re.findall(r"ex2\.approx\.ftz\.f32", ptx)) == exponentials
    assert "div.rn" not in ptx


def test_leading_dimensions_cost_nothing_where_rows_are_equally_far_apart():
    from tests.primitives.device_code import machine_instructions  # it imports CuTe-DSL

    def instructions(x):
        kernel = EXAMPLES["softmax"][0].inspect(x, arch="sm_90a")
        return machine_instructions(kernel.artifact.cubin)

    x = torch.empty(64, 8, 8, 3 * 128, dtype=BF16, device="meta")
    one = instructions(x.view(-1, 384)[:, :128])
    equally = x[..., 128:256], x[:1, ..., :128], x[:, :1, :, :128].contiguous(), x[0, ..., :128]
    assert [instructions(each) for each in equally] == [one] * 4
    apart = x.transpose(0, 1)[..., :128], x[::2, ..., :128].transpose(1, 2), x[:, ::2, :, :128]
    assert min(instructions(each) for each in apart) > one + 20


def test_registers_are_not_spilled_for_thread_blocks():
    """A text that asks for more blocks than registers allow is compiled for fewer, or for none."""
    from cutlass import cute

    kernel = example_kernel("layernorm", 131072)
    asked = kernel.plan.placement.blocks
    assert asked > 1 and f"\nblocks = {asked}  #" in kernel.source
    assert kernel.resources.stack == 0
    more = kernel.source.replace(f"\nblocks = {asked}  #", "\nblocks = 8  #")
    spilled = _compile(cute, load_source(more), more, kernel.lowered.function, kernel.arch)
    assert spilled.resources.stack > 0 and (spilled.blocks, spilled.level) == (8, 3)
    built = build(more, kernel.lowered.function, kernel.arch)
    assert built.resources.stack == 0
    assert f"\nblocks = {built.blocks}  # of an SM; 8 would spill registers\n" in built.source


def test_a_text_is_compiled_again_only_where_it_spills(monkeypatch):
    """It is for other thread blocks first, then at a lower level; the smallest stack is kept."""
    some = build(*request())

    def blocks_tried(name, n, stacks):
        """What `_build` asks for, and which artifact it keeps, if they have these stacks."""
        kernel = example_kernel(name, n)
        used = some.resources
        made = [replace(some, resources=replace(used, stack=stack), ptx=str(k))
                for k, stack in enumerate(stacks)]  # fmt: skip
        asked = []

        def compile(cute, module, source, function, arch, level=3):
            asked.append(module.get("blocks") if level == 3 else (module["blocks"], level))
            return made[len(asked) - 1]

        monkeypatch.setattr(compiler, "_compile", compile)
        kept = compiler._build(kernel.source, kernel.lowered.function, kernel.arch)
        assert kept.seconds is not None
        return asked, made.index(kept)

    fit = 65536 // (some.resources.registers * some.resources.threads)
    assert fit > 2 and blocks_tried("softmax", 4096, [8]) == ([None], 0)
    assert blocks_tried("layernorm", 8191, [8, 4, 0]) == ([0, fit - 1, 1], 2)
    assert blocks_tried("layernorm", 131072, [0]) == ([6], 0)
    assert blocks_tried("layernorm", 131072, [8, 4, 0]) == ([6, 5, 0], 2)
    assert blocks_tried("layernorm", 131072, [8, 4, 16, 4, 5]) == ([6, 5, 0, 1, (6, 2)], 1)
    assert blocks_tried("softmax", 1 << 22, [8, 16, 0]) == ([1, 0, (1, 2)], 2)


def test_most_thread_blocks_that_spill_nothing(monkeypatch):
    """They are found by halving, between what the compiler likes and what has spilled."""
    kernel = example_kernel("layernorm", 131072)
    some = build(*request())
    used = replace(some.resources, registers=128, threads=128, stack=0)  # 4 blocks fit

    def kept(asked, most):
        """What is tried of a text that asks for so many blocks, and how many are kept."""
        tried = []

        def compile(cute, module, source, function, arch, level=3):
            blocks = module["blocks"]
            tried.append(blocks if level == 3 else (blocks, level))
            stack = 8 * (blocks > most)
            return replace(some, resources=replace(used, stack=stack), blocks=blocks)

        monkeypatch.setattr(compiler, "_compile", compile)
        source = re.sub(r"^blocks = \d+", f"blocks = {asked}", kernel.source, flags=re.MULTILINE)
        return tried, compiler._build(source, kernel.lowered.function, kernel.arch).blocks

    assert kept(6, 6) == ([6], 6)
    assert kept(6, 5) == ([6, 5], 5)
    assert kept(6, 4) == ([6, 5, 0], 0)
    assert kept(12, 8) == ([12, 11, 0, 7, 9, 8], 8)
    assert kept(12, 10) == ([12, 11, 0, 7, 9, 10], 10)
    assert kept(12, 4) == ([12, 11, 0, 7, 5], 0)


def test_one_thread_block_more_is_worth_a_small_stack(monkeypatch):
    """A text says what a second one may spill, if as many are asked for. A third spills nothing."""
    aligned = example_kernel("capped_softmax", 4096)
    assert "\nworth = (0, 0)  #" in aligned.source
    kernel = example_kernel("norm_softmax", 6007)
    asks = re.compile(r"^blocks = (\d+) .*\nworth = \(96, 0\)  #", flags=re.MULTILINE)
    assert int(asks.search(kernel.source)[1]) > 0
    some = build(*request())

    def kept(asked, stacks, shared=0):
        """What is tried and kept, if so many thread blocks of 256 threads have these stacks."""
        source = re.sub(r"^blocks = \d+", f"blocks = {asked}", kernel.source, flags=re.MULTILINE)
        tried = []

        def compile(cute, module, source, function, arch, level=3):
            tried.append(module["blocks"] if level == 3 else (module["blocks"], level))
            blocks = module["blocks"] or 1
            used = replace(some.resources, threads=256, registers=256 // blocks // 8 * 8,
                           stack=stacks[blocks - 1], dynamic_shared=shared)  # fmt: skip
            return replace(some, resources=used, blocks=module["blocks"])

        monkeypatch.setattr(compiler, "_compile", compile)
        return tried, compiler._build(source, kernel.lowered.function, kernel.arch).blocks

    assert kept(2, [0, 104]) == ([2, 0], 0)
    assert kept(2, [0, 96, 8]) == ([2, 0, 3], 2)
    assert kept(3, [0, 96, 8]) == ([3, 2, 0], 2)
    assert kept(3, [0, 0, 8]) == ([3, 2], 2)
    assert kept(1, [0, 0, 0, 0]) == ([1, 2, 3], 3)
    assert kept(1, [0, 8]) == ([1, 2], 1)
    assert kept(1, [0, 0, 0], shared=100 << 10) == ([1, 2], 2)
    assert kept(1, [0, 0, 0], shared=200 << 10) == ([1], 1)


@pytest.mark.parametrize(
    ("name", "n", "fields"),
    [
        ("softmax", 16384, {"form": "loops"}),
        ("swiglu", 16384, {"form": "held"}),  # nothing is reduced
        ("softmax", 4096, {"threads_per_row": 64, "num_threads": 256}),
        ("softmax", 8192, {"threads_per_row": 1024}),
    ],
)
def test_other_kernels_spill_nothing_for_a_thread_block_more(name, n, fields):
    assert "\nworth" not in example_kernel(name, n, **fields).source


def test_a_text_says_when_registers_suffice_for_more_thread_blocks():
    text = "blocks = 2  # of an SM, for which registers are spared"
    assert as_compiled(text, 3, 3) == "blocks = 3  # of an SM; registers suffice for more than 2"


def with_a_slope(x):
    position = torch.arange(x.shape[-1] - 1, -1, -1, device=x.device)
    return (x - 0.1 * position).softmax(-1)


@pytest.mark.parametrize(("n", "most"), [(50257, 64), (40001, 64), (28672, 64)])
def test_what_depends_on_columns_is_computed_in_each_loop(n, most):
    """The first loop does not keep it for the second one, which would take many registers."""
    looped = htile.rowwise(with_a_slope).with_plan(form="loops")
    kernel = looped.inspect(torch.empty(512, n, dtype=BF16, device="meta"), arch="sm_90a")
    assert kernel.plan.is_unrolled
    assert kernel.source.count("counted_from(zero0)") == 1
    assert kernel.resources.stack == 0 and kernel.resources.registers <= most


def test_random_words_are_kept_for_the_second_loop():
    """They take more instructions than registers."""

    def noisy(x, seed: int):
        return htile.dropout(x, 0.1, seed).softmax(-1)

    kernel = kernel_of(noisy, torch.empty(512, 200000, dtype=F32, device="meta"), 3)
    assert kernel.plan.numerics.in_loops and "counted_from" not in kernel.source


def test_a_kernel_shows_what_was_compiled(monkeypatch, tmp_path):
    """Once it is compiled, plan, source and page say for how many thread blocks that was."""

    def spills(cute, module, source, function, arch, level=3):
        """Report a stack for every number of thread blocks that is asked for."""
        compiled = real(cute, module, source, function, arch, level)
        stack = 8 if module["blocks"] else 0
        return replace(compiled, resources=replace(compiled.resources, stack=stack))

    real = compiler._compile
    monkeypatch.setattr(compiler, "_compile", spills)
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path))
    for fresh in (True, False):
        monkeypatch.setattr(compiler, "_ARTIFACTS", compiler.Recent(4))
        kernel = example_kernel("layernorm", 131080)
        asked = kernel.plan.placement.blocks
        assert asked > 0 and f"\nblocks = {asked}  # of an SM, for which" in kernel.source
        page = str(kernel)
        assert kernel.plan.placement.blocks == kernel.artifact.blocks == 0
        line = f"\nblocks = 0  # of an SM; {asked} would spill registers\n"
        assert line in kernel.source and line in page
        assert line in (kernel.save(tmp_path / "dump") / "kernel.py").read_text()
        assert (kernel.artifact.seconds is None) == (not fresh), "the disk cache keeps it"
        assert kernel.lowered.plan.placement.blocks == asked


@pytest.mark.parametrize("m", [3, 256, 1024])
@pytest.mark.parametrize(
    ("dtype", "n"), [(F32, 65536), (BF16, 200000), (torch.int32, 262144), (F32, 300001)]
)
@pytest.mark.parametrize("reduce", [torch.sum, torch.amax])
def test_rows_that_are_read_compile_for_every_batch(reduce, dtype, n, m):
    """Thread blocks work on several shares of a row, in loops that are not unrolled."""
    kernel = kernel_of(lambda x: reduce(x, -1), torch.empty(m, n, dtype=dtype, device="meta"))
    assert kernel.plan.placement.shares > 1 or m == 3
    assert kernel.plan.is_unrolled == (n <= 200000)
    assert kernel.resources.stack == 0


@pytest.mark.parametrize("m", [3, 64, 256])
@pytest.mark.parametrize(
    ("function", "dtype"),
    [
        (lambda x: x.any(), torch.bool),
        (lambda x: x.sum(), torch.bool),
        (lambda x: (x.min(), x.max(), x.sum()), torch.float16),
        (lambda x: (x.sum(), (x * x).sum(), (x * x * x).sum()), F32),
    ],
)
def test_what_is_gathered_of_shares_is_not_spilled(function, dtype, m):
    for n in (300016, 1 << 20):
        kernel = kernel_of(function, torch.empty(m, n, dtype=dtype, device="meta"))
        assert kernel.resources.stack == 0, (n, kernel.plan.placement)


@pytest.mark.parametrize("n", [37, 4096, 32768, 100000])
def test_sums_of_products_of_what_is_no_row(n):
    def function(x):
        peak = x.amax()
        filled = peak.expand(x.shape)
        return (x * peak).sum(), filled.sum(), (filled * 3.0).sum(), (x * 0.5).sum()

    kernel = kernel_of(function, torch.empty(3, n, dtype=BF16, device="meta"))
    assert kernel.resources.stack == 0 and kernel.source.count("math.product(") == 3


def of_a_vector(w, p: htile.PerRow):
    return w.logsumexp(-1) * p, w.topk(2).values + p


def of_a_repeated_vector(w, p: htile.PerRow):
    return w.repeat_interleave(2).sort().values[3] + p


@pytest.mark.parametrize("f", (of_a_vector, of_a_repeated_vector))
def test_what_rows_have_beside_a_vector(f):
    """No row is loaded or stored in vectors, and in the backward pass no vector either."""
    w, p = (torch.empty(size, device="meta", requires_grad=True) for size in (40, 8))
    kernel = htile.rowwise(f).inspect(w, p, arch="sm_90a")
    for each in (kernel, kernel.training.forward, kernel.backward):
        assert each.resources.stack == 0


@pytest.mark.parametrize("exponent", (4.0, 5.0, 6.0, 7.0))
def test_powers_that_are_products_are_counted_as_such(exponent):
    """The compiler makes products of them: the plan does not expect the device library's power."""
    kernel = kernel_of(lambda x: (x - 1.0) ** exponent, torch.empty(64, 4096, device="meta"))
    count, special = kernel.plan.sweeps.costs
    assert count <= 8 and special == 0 and "lg2" not in kernel.ptx
    of_any = kernel_of(lambda x: (x - 1.0) ** 4.5, torch.empty(64, 4096, device="meta"))
    assert of_any.plan.sweeps.costs[0] > 50


def test_a_weight_of_a_chunk_does_not_hang_on_whether_its_number_is_static():
    """It is 1 / count rounded: a constant behind a loop, and in it an estimate, corrected once."""
    kernel = example_kernel("layernorm", 1 << 22)
    assert kernel.plan.chunks == 128 and not kernel.plan.is_unrolled
    approximated = re.findall(r"rcp\.approx\.ftz\.f32\s+(%r\d+), (%r\d+);", kernel.ptx)
    assert len(approximated) == 4
    for near, _ in approximated:
        step = rf"fma\.rn\.f32\s+(%r\d+), %r\d+, {near}, 0f3F800000;"
        (rest,) = re.findall(step, kernel.ptx)
        assert re.search(rf"fma\.rn\.f32\s+%r\d+, {rest}, {near}, {near};", kernel.ptx)
    for count in (125, 126, 127):
        (weight,) = struct.unpack(">I", struct.pack(">f", 1 / count))
        assert f"0f{weight:08X}" in kernel.ptx


CONTRACTED_N, CONTRACTED_ON = (1003, 32768, (1 << 20) + 1), ("sm_80", "sm_90a", "sm_100a")


@pytest.mark.parametrize("n", CONTRACTED_N)
@pytest.mark.parametrize("name", EXAMPLES)
def test_no_compiler_is_free_to_contract(name, n, pytestconfig):
    """Each operation says how it rounds, and ptxas fuses none that does.

    Every function has each length and each architecture, and so has every length each architecture.
    All three together are there with `--full-product`.
    """
    turn = [*EXAMPLES].index(name) + CONTRACTED_N.index(n)
    every = pytestconfig.getoption("--full-product")
    for arch in CONTRACTED_ON if every else [CONTRACTED_ON[turn % len(CONTRACTED_ON)]]:
        ptx = example_kernel(name, n, arch=arch).ptx
        assert not re.findall(r"\b(?:mul|add|sub)(?:\.ftz)?\.f32(?:x2)?\b", ptx)


@pytest.mark.parametrize("name", EXAMPLES)
def test_resources_against_another_source(name, tmp_path):
    """The section header of the code has them on sm_80, and cuobjdump prints them."""
    kernel = example_kernel(name, 4096, arch="sm_80")
    used = kernel.resources
    assert used.registers == registers_of_section(kernel.cubin)
    if tool := shutil.which("cuobjdump"):
        (tmp_path / "kernel.cubin").write_bytes(kernel.cubin)
        command = [tool, "-res-usage", str(tmp_path / "kernel.cubin")]
        text = subprocess.run(command, capture_output=True, text=True).stdout
        found = {key: int(number) for key, number in re.findall(r"(REG|STACK|SHARED):(\d+)", text)}
        assert found == {"REG": used.registers, "STACK": used.stack, "SHARED": used.static_shared}


def registers_of_section(cubin):
    return text_header(cubin)[7] >> 24


def barriers_of_section(cubin):
    """How many of its 16 barriers a thread block has set aside."""
    return text_header(cubin)[2] >> 20 & 31


def text_header(cubin):
    """The header of the only section of code, as a tuple of an ELF section's ten fields."""
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQIIQQ", cubin, table + k * size) for k in range(count)]
    start = headers[names][4]
    (text,) = (h for h in headers if cubin[start + h[0] :].startswith(b".text."))
    return text


@pytest.mark.parametrize("n", [1000, 1003, 1536])
def test_barriers_leave_room_for_other_thread_blocks(n):
    """A multiprocessor has 64 barriers, which must not limit the thread blocks that fit on it."""
    kernel = example_kernel("softmax", n)
    several = {}
    for plan in enumerate_plans(kernel.graph, kernel.plan.target):
        rows, threads = plan.rows_per_block, plan.placement.num_threads
        if rows > 1 and threads // rows > 32 and not plan.numerics.in_loops:
            several.setdefault((rows, threads), plan)
    assert {rows for rows, _ in several} >= {2, 4}
    for (rows, threads), plan in several.items():
        one = printed(kernel.lowered.traced, plan)
        cubin = build(one.source, one.function, kernel.arch).cubin
        barriers = barriers_of_section(cubin)
        assert barriers >= 1 and barriers * (2048 // threads) <= 64, (rows, threads, barriers)


@pytest.mark.parametrize("name", EXAMPLES)
def test_forced_plans_compile_without_a_stack(name):
    """The plans are the extremes: the most and fewest elements a thread, and most rows a block."""
    for n in (1000, 4096):
        graph = example_kernel(name, n).graph
        plans = enumerate_plans(graph, Target(n, ARCH["sm_90a"]))
        plans.sort(key=lambda p: (p.elements_per_thread, p.placement.num_threads))
        chosen = [plans[0], plans[-1], max(plans, key=lambda p: p.rows_per_block)]
        for plan in chosen:
            fields = {f: getattr(plan.placement, f) for f in plan.placement.__slots__}
            threads = plan.numerics.threads_per_row
            kernel = example_kernel(name, n, threads_per_row=threads, **fields)
            assert kernel.plan.placement == plan.placement
            check(kernel)


@pytest.mark.parametrize("align", [16, 8, 4, 2])
def test_every_alignment_compiles(align):
    whole = torch.empty(4, 4104, dtype=BF16)
    offset = 0 if align == 16 else align // 2
    view = whole[:, offset : offset + 4096]
    kernel = EXAMPLES["rmsnorm_residual"][0].inspect(view, torch.empty(4096, dtype=BF16), view)
    assert kernel.plan.placement.copy_bytes == align
    check(kernel)
    accesses = re.findall(r"(?:ld|st)\.global(?:\.v(\d))?\.b(\d+)", kernel.ptx)
    copies = r"cp\.async\.c[ag]\.shared\.global\S* \[[^]]*\], \[[^]]*\], (\d+)()"
    accesses += re.findall(copies, kernel.ptx)
    sizes = {int(count or 1) * int(bits) // 8 if bits else int(count) for count, bits in accesses}
    assert kernel.plan.placement.shifted == (align < 8)
    assert max(sizes) == (16 if align < 8 else align)


# ---- functions of every kind ---------------------------------------------------------------------


def only_per_row(x, t: htile.PerRow):
    return t * 2


def no_row_is_read(x, t: htile.PerRow):
    return torch.zeros_like(x) + t


def no_row_is_so_long(x, t: htile.PerRow):
    return (torch.arange(1500) * t).sum(-1)


def a_number_a_row(x):
    return torch.zeros_like(x) + x.sum()


def constant_sum(x):
    return x * torch.ones_like(x).sum()


def constant_mean(x):
    return x + torch.full_like(x, 3.0).mean()


def constant_function(x):
    return x + torch.exp(torch.full_like(x, 2.0))


def bare_input(x):
    return x


def twice_the_same(x):
    return x, x


def booleans(x):
    return (x > 0).sum(), (x > 0).any(), (x > 0).all(), x > 0


def counts_beside_sums(x):
    return (x > 0).sum(), x.sum(), x.amax()


def integers(i):
    return i.sum(), i.amax(), i // 2, i % 3, i.float().mean()


def masked(m, x):
    return torch.where(m, x, torch.zeros_like(x)), m.sum()


def mask_alone(m):
    return ~m, m.any()


def mask_column(x, m):
    return torch.where(m, x, -x)


def mask_per_row(x, m: htile.PerRow):
    return torch.where(m, x, -x)


def device_scalars(x, a, b: htile.Scalar):
    return x * a + b


def column_sum(x, w, t):
    return x * w.sum() + t


def casts(x):
    return (x.to(torch.float16) * 3).to(torch.float32), x.to(torch.int32), x.bfloat16().float()


def everything_at_once(x):
    return x.prod(), x.std(), x.norm(), x.logsumexp(-1), x.amin(-1, keepdim=True)


def one_element(x, w):
    return x * w + x.sum(-1, keepdim=True), x.amax()


def many_rows(a, b, c, d, e, f):
    return torch.softmax(a + b + c, -1) * d + e * f.mean()


def rows_that_are_off(x, p: htile.PerRow):
    return torch.where(p.unsqueeze(-1).bool(), x.round(), -1.0)


def pairs_of_a_number_a_row(x, n: htile.PerRow):
    on = (x > n).all().expand(x.shape).float()
    return torch.stack((on[1::2], on[0::2]), -1).flatten()


X = rows((4, 1000))[0]
PER_ROW, BOOL = torch.empty(4, device="meta"), torch.empty(4, 1000, dtype=torch.bool, device="meta")
INT32, INT64 = (BOOL.to(dtype) for dtype in (torch.int32, torch.int64))
KINDS = {
    "only per-row": (only_per_row, X, PER_ROW),
    "no row is read": (no_row_is_read, X, PER_ROW),
    "no row is so long": (no_row_is_so_long, X, PER_ROW),
    "a number a row": (a_number_a_row, X),
    "constant sum": (constant_sum, X),
    "constant mean": (constant_mean, X),
    "constant function": (constant_function, X),
    "bare input": (bare_input, X),
    "twice the same": (twice_the_same, X),
    "booleans": (booleans, X),
    "counts beside sums": (counts_beside_sums, X),
    "int32": (integers, INT32),
    "int64": (integers, INT64),
    "masked": (masked, BOOL, X),
    "mask alone": (mask_alone, BOOL),
    "mask column": (mask_column, X, BOOL[0]),
    "mask per-row": (mask_per_row, X, BOOL[:, 0].contiguous()),
    "device scalars": (device_scalars, X, PER_ROW[0], PER_ROW[:1]),
    "column sum": (column_sum, X, X[0], X[:, :1].contiguous()),
    "casts": (casts, X),
    "everything at once": (everything_at_once, X),
    "one element": (one_element, X[:, :1].contiguous(), X[0, :1].contiguous()),
    "many rows": (many_rows, X, X, X, X.float(), X, X),
    "rows that are off": (rows_that_are_off, X, PER_ROW),
    "pairs of a number a row": (pairs_of_a_number_a_row, X, PER_ROW),
    "broadcast rows": (many_rows, X, X[:1], X[:1], X.float(), X, X),
}


@pytest.mark.parametrize("name", KINDS)
def test_functions_of_every_kind_compile(name):
    fn, *args = KINDS[name]
    check(kernel_of(fn, *args))


# ---- build ---------------------------------------------------------------------------------------


def request(name="softmax", n=4096, arch="sm_90a"):
    lowered = example_kernel(name, n, arch=arch).lowered
    return lowered.source, lowered.function, arch


def test_a_kernel_is_built_once():
    first, again = build(*request()), build(*request())
    assert first is again
    other = build(*request(arch="sm_80"))
    assert other is not first and other.arch == "sm_80"
    assert first.object[:4] == b"\x7fELF" and first.cubin[:4] == b"\x7fELF"


def test_artifacts_that_are_remembered_are_bounded(monkeypatch):
    """Those used last stay; a kernel that is loaded stays loaded."""
    monkeypatch.setattr(compiler, "_ARTIFACTS", compiler.Recent(2))
    built = {n: build(*request(n=n)) for n in (48, 80)}
    assert build(*request(n=48)) is built[48]
    loaded = compiler.load(built[80])
    build(*request(n=96))
    assert len(compiler._ARTIFACTS) == 2 and build(*request(n=48)) is built[48]
    again = build(*request(n=80))
    assert again is not built[80] and again == built[80], "from the disk cache"
    assert compiler.load(again) is loaded


def test_threads_build_one_after_another():
    requests, results = [request(n=n) for n in (48, 80)] * 2, []
    threads = [threading.Thread(target=lambda r=r: results.append(build(*r))) for r in requests]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and len({id(a) for a in results}) == 2


HASH = """
import hashlib, sys
from tests.lower.test_compile import request
from htile.build.compile import build
artifact = build(*request("capped_softmax"))
print(hashlib.sha256(artifact.object + artifact.cubin + artifact.ptx.encode()).hexdigest())
"""


def run_python(code, cwd, **variables):
    env = os.environ | {"PYTHONPATH": str(REPO)} | variables
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, env=env, capture_output=True, text=True
    )
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_objects_are_the_same_in_every_process(tmp_path):
    artifact = build(*request("capped_softmax"))
    content = artifact.object + artifact.cubin + artifact.ptx.encode()
    here = hashlib.sha256(content).hexdigest()
    there = run_python(HASH, tmp_path, PYTHONHASHSEED="7", HTILE_CACHE_DIR="")
    assert there.strip() == here


BUILD_ALL = """
import os
from tests.lower.test_compile import request
from htile.build import compile
requests = [request(n=n, arch=arch) for n in (96, 160) for arch in ("sm_80", "sm_90a")]
artifacts = compile.build_all(requests + requests[:1], workers=2)
assert [(a.source, a.function, a.arch) for a in artifacts] == requests
assert all(a.object[:4] == b"\\x7fELF" for a in artifacts)
def refuse(*args):
    raise AssertionError("built twice")
compile._build = refuse
assert [compile.build(*r) for r in requests] == artifacts
compile._import_cute = compile.ProcessPoolExecutor = refuse
assert compile.build_all(requests) == artifacts and compile.build_all([]) == []
compile._ARTIFACTS = compile.Recent(256)
assert [a.object for a in compile.build_all(requests)] == [a.object for a in artifacts]
print(os.listdir("."))
"""


def test_build_all_keeps_what_its_workers_built(tmp_path):
    """No process begins for what this process or the disk cache has."""
    assert run_python(BUILD_ALL, tmp_path) == "[]\n", "and leaves no file behind"


# A child that waits for ever is ended by its alarm.
FORKED = """
import os, signal, sys, threading, time
from htile.build import compile
from htile.build.recent import Recent
from htile.run.shortcuts import shortcut
from tests.lower.test_compile import request

def forked(action):
    pid = os.fork()
    if pid == 0:
        signal.alarm(60)
        action()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def is_held():
    if compile._LOCK.acquire(blocking=False):
        compile._LOCK.release()
        return False
    return True

def held(lock, action):
    release = threading.Event()
    def hold():
        with lock:
            entered.set()
            release.wait()
    entered, holder = threading.Event(), threading.Thread(target=hold)
    holder.start()
    entered.wait()
    code = forked(action)
    release.set()
    holder.join()
    return code

table = Recent(4)
print(held(table._lock, lambda: table.keep(1, 2)))
print(held(shortcut._LOCK, lambda: shortcut.clear(table, "more")))
here, there = request(n=96), request(n=160)
for was_imported in (False, True):
    compile._ARTIFACTS = Recent(256)
    assert ("cutlass" in sys.modules) == was_imported
    builder = threading.Thread(target=compile.build, args=here)
    builder.start()
    while not is_held():
        time.sleep(0.001)
    print(forked(lambda: compile.build(*there)))
    builder.join()
"""


def test_a_process_forked_while_another_thread_holds_a_lock_goes_on(tmp_path):
    assert run_python(FORKED, tmp_path, HTILE_CACHE_DIR="").split() == ["0"] * 4


WITHOUT_CUTE = """
import sys
class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("cutlass", "cuda"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Blocked())
import torch, htile
from htile.build.compile import build_all
from examples.softmax import arguments, softmax
x = torch.randn(3, 64)
assert torch.allclose(softmax(x), torch.softmax(x, -1), atol=1e-6)
kernel = softmax.inspect(x)
assert "max" in str(kernel.graph) and "stage 1" in str(kernel.plan)
assert "def softmax" in kernel.source
assert "not compiled: compiling a kernel needs CuTe-DSL" in str(kernel)
request = kernel.source, kernel.lowered.function, kernel.arch
for use in (lambda: kernel.ptx, lambda: kernel.resources, lambda: build_all([request])):
    try:
        use()
    except htile.CompileError as error:
        assert "nvidia-cutlass-dsl>=4.8,<4.9" in error.message, error
    else:
        raise AssertionError("compiled without CuTe-DSL")
print("cutlass" in sys.modules)
"""


def test_without_cute_dsl_all_but_compiling_works(tmp_path):
    assert run_python(WITHOUT_CUTE, tmp_path, HTILE_CACHE_DIR="") == "False\n"


def test_what_cute_dsl_refuses_is_a_compile_error():
    source, function, arch = request()
    line = "    # stage 1: max\n"
    assert line in source  # a value that changes its type in a dynamic branch
    broken = source.replace(line, "    q = 1\n    if x[0] > 0.0:\n        q = Float32(0.0)\n")
    with pytest.raises(CompileError):
        build(broken, function, arch)


# ---- architectures -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["sm_70", "sm_90b", "sm_90aa", "sm_90aaa", "sm_", "hopper", ""])
def test_an_unknown_architecture_says_which_are_known(name):
    with pytest.raises(CompileError, match=r"unknown architecture .*; HTile knows sm_80, .*sm_90a"):
        EXAMPLES["softmax"][0].inspect(torch.empty(2, 64, device="meta"), arch=name)


def test_names_and_capabilities():
    for capability, arch in ARCHS.items():
        assert arch_of_capability(capability) is arch
        assert arch_named(arch.name) is arch_named(arch.name.removesuffix("a")) is arch
    with pytest.raises(CompileError, match=r"compute capability 7\.5 are not supported"):
        arch_of_capability((7, 5))


@pytest.mark.parametrize("rows", [1, 4096])
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_six_stages_of_a_long_row_are_not_written_out(arch, rows, monkeypatch):
    """It takes at most 3 s on an idle machine. Written out it was 233 KB of code, and took 22 s."""
    monkeypatch.setenv("HTILE_CACHE_DIR", "")
    kernel = Cell("norm_softmax_norm", 300040, rows, BF16, arch).kernel()
    assert kernel.plan.work.stages == 6
    start = time.process_time()
    used = kernel.resources
    assert time.process_time() - start < 5  # of this process, beside others on two slow cores
    assert used.code_bytes < 48 << 10 and not used.stack


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.bool, torch.int32, F32], ids=str)
def test_a_float8_of_what_was_an_integer_is_converted(dtype):
    """The compiler joined the two conversions, and left the bits of an int8 as they were."""

    @htile.rowwise
    def f(x):
        y = x.float()
        return y.to(torch.float8_e4m3fn), (y * 2).to(torch.float8_e5m2)

    kernel = f.inspect(torch.empty(64, 1024, dtype=dtype, device="meta"), arch="sm_90a")
    pairs = kernel.plan.elements_per_thread // 2
    assert kernel.ptx.count("e4m3x2.f32") == kernel.ptx.count("e5m2x2.f32") == pairs

"""Random functions without a GPU: the reference against the oracle, plans, text, real compiles."""

import contextlib
import statistics
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch.utils import _pytree as pytree

from htile.build.arch import arch_named
from htile.errors import UnsupportedError
from htile.frontend.graph import Role
from htile.frontend.ops import MOVEMENTS, SCANS, Op
from htile.frontend.reference import evaluate
from htile.frontend.roles import classify
from htile.lower import choose
from htile.lower.choice.enumeration import plans_of_work
from htile.lower.plan import ROWS
from htile.lower.work import Work
from tests.request_of import request_of

from .measure import check
from .programs import draw_program, program

REPO = Path(__file__).parents[2]
FOUND = ()  # seeds that once failed; a change of programs.py makes other programs of them
SEEDS = (*range(300), *FOUND)
ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
LEAVES = (Op.INPUT, Op.CONST, Op.INDEX, Op.LENGTH)
COMPILED = (*range(4, 14), 18, 96)
STACK = {Op.SIN, Op.COS}  # libdevice reduces huge arguments in local memory

_kernels = {}


def kernel_of(seed):
    if seed not in _kernels:
        p = program(seed)
        _kernels[seed] = p.function().inspect(*p.arguments(), arch=ARCHS[seed % 4])
    return _kernels[seed]


@pytest.mark.parametrize("seed", SEEDS)
def test_reference_is_the_oracle(seed):
    p = program(seed)
    f, args = p.function(), p.arguments()
    try:
        check(p, f, f(*args), args, fair=True)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None


@pytest.mark.parametrize("seed", SEEDS)
def test_reference_of_rows_of_any_length_is_the_oracle(seed):
    """Traced for longer rows; and the graph after the passes is as the one before."""
    p = program(seed)
    f, args = p.function(dynamic_n=True), p.arguments()
    try:
        result = f(*args)
    except UnsupportedError as error:  # parts of rows, and torch.arange(1, n + 1)
        assert "dynamic_n=True" in error.message and error.loc is not None, p
        return
    try:
        check(p, f, result, args, fair=True)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{p}") from None
    request = request_of(f, args)
    graph, call = request.specialization.graph, request.call
    if any(each.view is not None for each in (*graph.inputs, *graph.outputs)):
        return
    named = dict(zip(f._signature.names, args, strict=True))
    placed = evaluate(graph, named, call.lead, length=call.length)
    pairs = zip(pytree.tree_leaves(placed), pytree.tree_leaves(result), strict=True)
    for found, expected in pairs:
        torch.testing.assert_close(found, expected, equal_nan=True)


def test_most_programs_have_rows_of_any_length():
    graphs = []
    for seed in SEEDS:
        p = program(seed)
        with contextlib.suppress(UnsupportedError):
            f = p.function(dynamic_n=True)
            graphs.append(f.inspect(*p.arguments(filled=False)).graph)
    assert len(graphs) > 0.8 * len(SEEDS)
    lengths = [any(node.op is Op.LENGTH for node in graph) for graph in graphs]
    assert 0.1 < sum(lengths) / len(graphs) < 0.9
    multiples = {graph.multiple for graph in graphs}
    assert multiples >= {1, 8} and None in multiples, "rows of one element have a length"


@pytest.mark.parametrize("seed", COMPILED)
def test_kernels_of_rows_of_any_length_compile(seed):
    p = program(seed)
    with contextlib.suppress(UnsupportedError):
        kernel = p.function(dynamic_n=True).inspect(*p.arguments(), arch=ARCHS[seed % 4])
        assert 0 < kernel.resources.registers <= 255


def test_plans_and_text():
    """Every program has a plan; its text is the same from a new trace, and it is Python."""
    for seed in SEEDS:
        p, kernel = program(seed), kernel_of(seed)
        again = p.function().inspect(*p.arguments(), arch=kernel.arch)
        assert again.source == kernel.source and str(again.plan) == str(kernel.plan), p
        compile(kernel.source, f"emitted_{seed}.py", "exec")


def test_bits_hang_on_n_dtypes_and_architecture_alone():
    """Whatever the alignment, the batch, its dimensions and aliases: the same numerics."""
    for seed in SEEDS:
        kernel = kernel_of(seed)
        target = kernel.plan.target
        work = Work(kernel.graph, target.fastmath)  # the same for every call
        for name in ("sm_80", "sm_90a"):
            calls = [
                replace(target, arch=arch_named(name), align=align, rows=rows, aliases=aliases)
                for align in (16, 8, 4, 2, 1)
                for rows in ROWS
                for aliases in ((), (("out", "x"),))
            ]
            found = {choose(plans_of_work(work, call)).numerics for call in calls}
            assert len(found) == 1, f"{found}\n{program(seed)}"


def test_text_is_lint_clean(tmp_path):
    for seed in SEEDS:
        (tmp_path / f"emitted_{seed}.py").write_text(kernel_of(seed).source)
    command = [sys.executable, "-m", "ruff", "check", "--no-cache", "--config"]
    run = subprocess.run(
        [*command, str(REPO / "pyproject.toml"), str(tmp_path)], capture_output=True, text=True
    )
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.parametrize("seed", COMPILED)
def test_compiles_without_a_stack(seed):
    kernel = kernel_of(seed)
    used = kernel.resources
    assert used.threads == kernel.plan.placement.num_threads
    assert used.registers * used.threads <= 65536
    assert not used.stack or STACK & {node.op for node in kernel.graph}, program(seed)


@hypothesis.settings(
    derandomize=True, database=None, deadline=None, max_examples=40,
    suppress_health_check=list(hypothesis.HealthCheck),
)  # fmt: skip
@hypothesis.given(st.randoms(use_true_random=False))
def test_what_hypothesis_draws(rng):
    """The same, from choices that hypothesis can make simpler when one fails."""
    p = draw_program(rng)
    f, args = p.function(), p.arguments()
    hypothesis.note(str(p))
    check(p, f, f(*args), args, fair=True)
    f.inspect(*args)


def test_a_seed_is_the_same_program():
    assert program(7) == program(7) and program(7) != program(8)
    first, again = program(7).arguments(), program(7).arguments()
    pairs = zip(first, again, strict=True)
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in pairs)


# ---- what the seeds cover -----------------------------------------------------------------------


def ragged(plan) -> bool:
    """Whether the tile is wider than the row."""
    threads = plan.numerics.threads_per_row * plan.numerics.cluster_n
    return plan.elements_per_thread * threads != plan.graph.n


def share(condition) -> float:
    found = [condition(kernel_of(seed)) for seed in SEEDS]
    return sum(found) / len(found)


def test_shares():
    graphs = [kernel_of(seed).graph for seed in SEEDS]
    # test_movements.py has these, rows of any length LENGTH, test_matrices.py MATMUL. No kernel has
    # STOP and CUSTOM. Only derivatives have SUM_FROM_END, test_order_statistics.py has KTHVALUE,
    # test_cumulative.py the other scans, and test_gathers.py GATHER.
    elsewhere = MOVEMENTS - {Op.RESHAPE} | {Op.LOOKUP, Op.LENGTH, Op.STOP, Op.CUSTOM, Op.MATMUL}
    elsewhere |= SCANS - {Op.CUMSUM, Op.CUMPROD} | {Op.KTHVALUE, Op.GATHER}
    assert {node.op for graph in graphs for node in graph} == set(Op) - elsewhere
    sizes = [sum(node.op not in LEAVES for node in graph) for graph in graphs]
    assert statistics.median(sizes) >= 8
    assert share(lambda kernel: kernel.plan.stages >= 2) >= 0.3
    assert share(lambda kernel: ragged(kernel.plan)) >= 0.2
    assert share(lambda kernel: len(kernel.graph.outputs) > 1) >= 0.4
    assert share(lambda kernel: len({o.is_row for o in kernel.graph.outputs}) == 2) >= 0.1


def test_every_role_and_dtype():
    roles, dtypes, results, inner = set(), set(), set(), set()
    for seed in SEEDS:
        p = program(seed)
        call = classify(p.function()._signature, tuple(p.arguments()))
        roles |= {spec.role for spec in call.specs}
        dtypes |= {(spec.role, spec.dtype) for spec in call.specs}
        results |= {output.dtype for output in kernel_of(seed).graph.outputs}
        inner |= {o.inner for o in kernel_of(seed).graph.outputs if not o.is_row}
    every = {torch.bfloat16, torch.float16, torch.float32, torch.int32, torch.int64, torch.bool}
    of_bytes = {torch.float8_e4m3fn, torch.int8, torch.uint8}
    assert roles == set(Role) - {Role.TAKEN, Role.TABLE, Role.MATRIX}  # of placed graphs; products
    assert {dtype for role, dtype in dtypes if role is Role.ROW} == every | of_bytes
    assert {dtype for role, dtype in dtypes if role is Role.PER_ROW} >= every
    assert results == every | of_bytes | {torch.float8_e5m2}
    assert inner == {(), (1,)}


def test_every_shape():
    programs = [program(seed) for seed in SEEDS]
    assert {len(p.lead) for p in programs} == {0, 1, 2, 3, 4}
    assert {layout for p in programs for a in p.args for layout in a.layout[:1]} == {
        "plain", "strided", "expanded", "broadcast", "partial", "transposed",
    }  # fmt: skip
    assert {p.n % 16 for p in programs} == set(range(16))


@pytest.mark.parametrize(
    "spelling",
    ("softmax", "layer_norm", "rms_norm", "normalize", "logsumexp", "keepdim=True", "where",
     "masked_fill", ".prod(", ".var(", "norm(p=", "count_nonzero", ".half()", ".int()", " // ",
     " % ", "lerp", "addcmul", "gelu", "[..., None]", "SCALE", "alpha", "torch.arange(", "gather",
     "one_hot", "torch.tensor(", ".shape[-1]]", " << ", " >> ", "~", "bitwise_xor",
     "htile.philox", "htile.uniform", "htile.exponential", "htile.dropout", ".cumsum(",
     "htile.random_words", ".topk(", ".argm", ".indices", ".chunk(2)", "torch.stack(",
     ".amax(-1, k"),
)  # fmt: skip
def test_spellings_occur(spelling):
    assert sum(spelling in program(seed).text for seed in SEEDS) >= 3

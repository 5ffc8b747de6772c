"""Results that are reduced over all rows: plans, what they compile to, and what is refused."""

from dataclasses import replace

import pytest
import torch

import htile
from htile.build.compile import load
from htile.errors import UnsupportedError
from htile.lower import choose, enumerate_plans
from htile.lower.over_rows import parts_of, workspace_bytes
from tests.lower.backward import backward_kernel, rmsnorm_backward, totals
from tests.lower.cases import ARCH, BF16, F16, F32, kernel_of, rows

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
SIZES = (64, 1000, 1003, 4096, 6144, 8192)


def without_sum(dy, x, weight, eps: float = 1e-6):
    return rmsnorm_backward(dy, x, weight, eps)[0]


@pytest.mark.parametrize("name", ["rmsnorm_backward", "layernorm_backward"])
@pytest.mark.parametrize("n", SIZES)
@pytest.mark.parametrize("arch", ARCHS)
def test_it_compiles_without_a_stack(name, n, arch):
    kernel = backward_kernel(name, n, arch=arch)
    assert kernel.resources.stack == 0
    place = kernel.plan.placement
    assert kernel.resources.threads == place.num_threads
    assert f"{name}_combine(" in kernel.source


@pytest.mark.parametrize(("n", "dtype"), [(1, F32), (3, F16), (4096, F32), (2048, F16)])
def test_results_over_rows_alone_compile(n, dtype):
    kernel = kernel_of(totals, *rows((2, n), dtype=dtype))
    assert kernel.resources.stack == 0
    assert [parts.dtype for parts in parts_of(kernel.plan)] == [F32, F32, F32, torch.int64]


def added_heads(x, d: htile.Static):
    return htile.sum_rows(x.float().view(-1, d).sum(0))


@pytest.mark.parametrize(
    ("n", "d"), [(96, 3), (1000, 8), (2048, 64), (8192, 64), (4096, 2048), (1003, 17)]
)
@pytest.mark.parametrize("arch", ARCHS)
def test_sums_of_groups_are_added_up_behind_those_of_rows(n, d, arch):
    """17 does not divide 1003, and 59 groups of it are 1003 elements."""
    x = torch.empty(8, n, dtype=BF16, device="meta")
    kernel = htile.rowwise(added_heads).inspect(x, d, arch=arch)
    (parts,) = parts_of(kernel.plan)
    assert parts.output.inner == (d,) and parts.output.groups == n // d
    assert f"{d}, parts, groups={n // d})" in kernel.source
    assert len(kernel.graph.inputs) == 1 and kernel.resources.stack == 0
    assert workspace_bytes(kernel.plan) >= kernel.plan.parts * n * 4


@pytest.mark.parametrize(("n", "d"), [(2048, 64), (8192, 64), (1024, 128)])
def test_the_gradient_of_a_weight_that_heads_share_takes_whole_rows(n, d):
    @htile.rowwise
    def normed(x, w: htile.Shared):
        return torch.nn.functional.rms_norm(x.view(-1, d), (d,), w, 1e-6).flatten()

    x = torch.empty(8, n, dtype=BF16, device="meta", requires_grad=True)
    w = torch.empty(d, dtype=BF16, device="meta", requires_grad=True)
    kernel = normed.inspect(x, w, arch="sm_90a").backward
    assert kernel.resources.stack == 0 and len(kernel.graph.inputs) == 4
    assert len(kernel.source.splitlines()) < 150


def test_sums_of_groups_beside_elements_of_them():
    """What is read of single groups as well is placed as it was, or as whole rows: it compiles."""

    def mixed(x):
        heads = x.float().view(4, -1)
        total = htile.sum_rows(heads.sum(0))
        return total, htile.max_rows(heads.amax(0)), heads[0] - heads[3]

    kernel = kernel_of(mixed, *rows((2, 512), dtype=BF16))
    assert kernel.resources.stack == 0
    assert [len(parts.output.inner) for parts in parts_of(kernel.plan)]


@pytest.mark.parametrize("n", [16384, 32768])
def test_long_rows_are_held_in_clusters(n):
    kernel = backward_kernel("rmsnorm_backward", n)
    assert kernel.plan.numerics.cluster_n > 1 and kernel.plan.rows_per_block == 1
    assert kernel.resources.stack == 0


@pytest.mark.parametrize("n", [20001, 44008, 61448, 60013, 100352])
def test_all_clusters_run_at_a_time(n):
    """A GPU has room for as many clusters again for each further CTA of a multiprocessor."""
    kernel = backward_kernel("rmsnorm_backward", n)
    every = enumerate_plans(kernel.graph, kernel.plan.target)
    assert {16, kernel.plan.numerics.cluster_n} <= {plan.numerics.cluster_n for plan in every}
    for plan in every:
        at_a_time = plan.target.arch.loop_ctas // plan.numerics.cluster_n
        assert plan.numerics.groups == at_a_time * plan.placement.blocks * plan.rows_per_block


@pytest.mark.parametrize("n", [1000, 1003, 4096])
def test_numerics_depend_on_neither_rows_nor_alignment(n):
    plain = htile.rowwise(rmsnorm_backward)
    found = set()
    for m in (1, 3, 5000, 100000):
        for wide, first in ((n, 0), (n + 1, 1)):
            x = torch.empty(m, wide, dtype=BF16, device="meta")[:, first:]
            found.add(plain.inspect(x, x, x[0]).plan.numerics)
    (numerics,) = found
    assert numerics.groups % ARCH["sm_90a"].loop_ctas == 0


@pytest.mark.parametrize("n", [64, 1003, 4096, 6144, 8192])
@pytest.mark.parametrize("arch", ARCHS)
def test_row_results_keep_their_numerics(n, arch):
    given = rows((2, n), (2, n), (n,))
    summed = kernel_of(rmsnorm_backward, *given, arch=arch).plan.numerics
    plain = kernel_of(without_sum, *given, arch=arch).plan.numerics
    assert replace(summed, groups=0) == plain


def test_every_plan_of_given_numerics_adds_in_the_same_groups():
    kernel = backward_kernel("rmsnorm_backward", 4096)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    chosen = choose(plans)
    assert chosen.properties() == kernel.plan.properties()
    same = [plan for plan in plans if plan.numerics == kernel.plan.numerics]
    assert {plan.placement.loader for plan in same} == {"shared", "direct"}
    assert {plan.rows_per_block for plan in same} == {2}
    assert all(plan.numerics.groups and not plan.numerics.in_loops for plan in plans)


def test_the_workspace_does_not_grow_with_the_rows():
    plan = backward_kernel("layernorm_backward", 4096).plan
    first, second = parts_of(plan)
    assert (first.start, second.start) == (0, 120 * 4096 * 4)
    assert workspace_bytes(plan) == 2 * 120 * 4096 * 4
    assert (plan.numerics.groups, plan.parts) == (240, 120)


def test_the_plan_says_what_is_added_up():
    text = str(backward_kernel("rmsnorm_backward", 4096).plan)
    assert "240 groups of rows, 120 parts" in text
    assert "add up    out1 (f32) = sum of" in text


def test_the_kernel_is_shown_and_loads_without_a_gpu():
    kernel = backward_kernel("rmsnorm_backward", 4096)
    page = str(kernel)
    assert "_combine" in page and "120 parts" in page
    assert load(kernel.artifact) is not None
    assert kernel.cost().time > 0
    assert "rmsnorm_backward" in kernel.graph_dot() and kernel.graph_json()
    kernel.plan_svg()


def test_names_of_the_user_are_no_names_of_the_kernel():
    def scaled(parts, grid: float, block: float, row_loop: float):
        return htile.sum_rows(parts * grid * block * row_loop)

    assert kernel_of(scaled, *rows((2, 64)), 2.0, 3.0, 4.0).resources.stack == 0


@pytest.mark.parametrize("n", (1000, 2000))
def test_a_sum_of_no_row_compiles(n):
    """Of values of rows and of indices, of which there are as many as a row has, or more."""

    def of_no_row(x, t: htile.PerRow):
        return htile.sum_rows((torch.arange(n) * t).sum(-1)), htile.sum_rows(torch.arange(n) * t)

    x, t = torch.empty(4, 1000, device="meta"), torch.empty(4, device="meta")
    assert kernel_of(of_no_row, x, t).resources.stack == 0


def test_rows_that_no_plan_holds_are_refused():
    def doubled(x):
        return htile.sum_rows(2 * x)

    with pytest.raises(UnsupportedError, match=r"rows of 1000000 .*return the row") as found:
        kernel_of(doubled, *rows((2, 1000000)))
    assert "sum_rows" in found.value.loc.text


def test_rows_that_all_repeat_are_refused():
    def product(x, y):
        return htile.sum_rows(x * y)

    with pytest.raises(UnsupportedError, match="expand one of them"):
        kernel_of(product, *rows((1, 4, 64), (3, 1, 64)))


def test_a_result_beside_shows_how_many_rows_there_are():
    def product(x, y):
        return htile.sum_rows(x * y), x + y

    assert kernel_of(product, *rows((1, 4, 64), (3, 1, 64))).resources.stack == 0

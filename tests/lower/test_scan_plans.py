"""Plans of scans: rows are held, a place of the exchange buffer for each vector, and what is
refused; and real compiles without a GPU."""

from dataclasses import replace

import pytest
import torch

import htile
from htile.build.arch import ARCHS
from htile.build.compile import build
from htile.errors import UnsupportedError
from htile.frontend.derive import derive
from htile.frontend.ops import Op
from htile.frontend.tangents import tangents
from htile.lower import choose, enumerate_plans, plans_for, printed, run_passes
from htile.lower.passes.limits import limit_loads
from htile.lower.plan import ROWS, Form, Target
from htile.lower.steps import Home
from tests.gradients import called
from tests.lower.cases import ARCH, BF16, F32, GRADIENTS, SCANS, scan_backward, scan_kernel
from tests.lower.test_compile import COMPILED, check

I32 = torch.int32
LENGTHS = (1, 7, 8, 64, 256, 1000, 1003, 4096, 8192)


def graph_of(name, n, dtype=F32):
    return scan_kernel(name, n, dtype).graph


@pytest.mark.parametrize("n", [64, 1003, 8192, 65536])
@pytest.mark.parametrize("name", SCANS)
def test_rows_are_held(name, n):
    if name == "scan_groups" and n % 8:
        return
    graph = graph_of(name, n)
    plans = enumerate_plans(graph, Target(graph.n, ARCH["sm_90a"]))
    assert plans and {plan.numerics.form for plan in plans} == {Form.HELD}
    assert all(plan.placement.shares == 1 for plan in plans)


@pytest.mark.parametrize("dtype", [F32, BF16, I32])
@pytest.mark.parametrize("name", ["scan_alone", "scan_inverse"])
@pytest.mark.parametrize("n", LENGTHS)
def test_numerics_are_those_of_every_batch_and_alignment(name, n, dtype):
    graph, found = graph_of(name, n, dtype), set()
    for rows in ROWS:
        for align in (16, 4):
            target = Target(n, ARCH["sm_90a"], rows=rows, align=align)
            found.add(choose(enumerate_plans(graph, target)).numerics)
    assert len(found) == 1


def test_places_of_the_exchange_buffer():
    """Reductions and scans take theirs one after the other; a scan one for each vector."""
    kernel = scan_kernel("scan_inverse", 4096, threads_per_row=128)
    plan = kernel.plan
    reduces = plan.sweeps.reduces
    assert [reduce.is_scan for reduce in reduces] == [False, True, False] and plan.chunks == 8
    assert [plan.slot(reduce) for reduce in reduces] == [0, 1, 9] and plan.slots == 10
    assert "stage=10" in kernel.source and "slot=9" in kernel.source


def test_scans_of_one_stage_share_an_exchange():
    plan = scan_kernel("scan_groups", 4096).plan
    (scan,) = [reduce for reduce in plan.sweeps.reduces if reduce.is_scan]
    assert len(scan.results) == 8 and plan.slots == plan.sweeps.slots + 8 * plan.chunks


def test_what_is_scanned_waits_in_registers():
    plan = scan_kernel("scan_alone", 4096).plan
    (scan,) = [node.id for node in plan.graph if node.op is Op.CUMSUM]
    assert plan.homes == {scan: Home.REGISTERS}


def test_what_no_element_of_a_scan_shows_is_not_loaded():
    """Where a scan is hidden from a column on, nothing comes of what lies behind it."""

    @htile.rowwise
    def f(x, end: htile.PerRow):
        return torch.where(torch.arange(x.shape[-1]) < end, x.cumsum(-1), 0.0)

    args = torch.empty(2, 4096, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    (row, _) = f.inspect(*args).graph.inputs
    assert row.end is not None


@pytest.mark.parametrize("op", [Op.CUMSUM, Op.SUM_FROM_END])
def test_what_is_summed_from_the_end_is_loaded(op):
    """Where a sum from the end is hidden from a column on, what lies behind it is in the sums."""

    @htile.rowwise
    def f(x, end: htile.PerRow):
        return torch.where(torch.arange(x.shape[-1]) < end, x.cumsum(-1), 0.0)

    args = torch.empty(2, 4096, device="meta"), torch.empty(2, dtype=torch.int64, device="meta")
    graph = f.inspect(*args).graph
    nodes = tuple(replace(node, op=op) if node.op is Op.CUMSUM else node for node in graph)
    inputs = tuple(replace(i, end=None) for i in graph.inputs)
    (row, _) = limit_loads(replace(graph, inputs=inputs, nodes=nodes)).inputs
    assert (row.end is None) == (op is Op.SUM_FROM_END)


def test_scans_both_ways_share_an_exchange():
    f = htile.rowwise(lambda x, y: (x.cumsum(-1) * y).cumsum(-1).sum() + (x * y).cumsum(-1))
    x = torch.empty(2, 4096, device="meta", requires_grad=True)
    kernel = f.inspect(x, torch.empty_like(x, requires_grad=True), arch="sm_90a").backward
    assert "from_end=(False, True)" in kernel.source or "from_end=(True, False)" in kernel.source


def test_odd_rows_are_shifted():
    """So that a scan has few vectors; a sum of such rows of float32 has vectors of one element."""
    assert scan_kernel("scan_alone", 1003).plan.numerics.vec_size == 4
    summed = htile.rowwise(lambda x: x.sum()).inspect(torch.empty(2, 1003, device="meta"))
    assert summed.plan.numerics.vec_size == 1


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120a"])
def test_rows_that_are_not_held_are_refused(arch):
    n = 1 << 20
    message = f"a cumsum of rows of {n} elements: {arch} does not hold them"
    with pytest.raises(UnsupportedError, match=message) as caught:
        scan_kernel("scan_alone", n, arch=arch)
    assert caught.value.loc.text == "return x.cumsum(-1)"


def test_short_rows_of_many_inputs_are_divided():
    """Rows that one thread block does not hold take a cluster, although they are short."""

    @htile.rowwise
    def f(x, y):
        a, b = x.cumsum(-1), (x * y).cumprod(-1)
        return a * b.sum(), torch.where(a > 3, b, y)

    args = [torch.empty(4, 8191, device="meta", dtype=I32)] * 2
    plan = f.inspect(*args, arch="sm_90a").plan
    assert plan.numerics.cluster_n > 1
    with pytest.raises(UnsupportedError, match="sm_80 does not hold them"):
        f.inspect(*args, arch="sm_80")


@pytest.mark.parametrize("dtype", [F32, BF16, I32, torch.bool])
@pytest.mark.parametrize("n", LENGTHS)
def test_scans_compile_without_a_stack(n, dtype):
    check(scan_kernel("scan_alone", n, dtype))


@pytest.mark.parametrize("name", SCANS)
@pytest.mark.parametrize("arch", COMPILED)
def test_scans_compile_on_all_gpus(name, arch):
    for n, dtype in ((64, F32), (4096, BF16), (8192, F32)):
        check(scan_kernel(name, n, dtype, arch))


@pytest.mark.parametrize("n", [32768, 50000, 131072, 262144])
def test_scans_of_long_rows_compile(n):
    kernel = scan_kernel("scan_inverse", n)
    assert kernel.plan.numerics.cluster_n > 1
    check(kernel)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("n", (1, 7, 64, 1000, 1003, 4096, 8192, 32768, 131072))
@pytest.mark.parametrize("name", ["sums", "products"])
def test_gradients_compile_without_a_stack(name, n, dtype):
    check(scan_backward(name, n, dtype))


@pytest.mark.parametrize("name", GRADIENTS)
@pytest.mark.parametrize("arch", COMPILED)
def test_gradients_compile_on_all_gpus(name, arch):
    for n, dtype in ((64, F32), (4096, BF16), (8192, F32)):
        check(scan_backward(name, n, dtype, arch))


@pytest.mark.parametrize("n", (64, 1003, 8192))
def test_more_derivatives_of_products_compile_without_a_stack(n):
    """The gradient of second order, and the tangents."""
    call = called(htile.rowwise(GRADIENTS["products"]), torch.empty(2, n))
    joint = derive(call.graph, ("x",), ("out",))
    twice = derive(joint, ("x", "d_out"), ("d_x",))
    for graph in (twice, tangents(call.graph, ("x",)).graph):
        plans = plans_for(run_passes(graph), Target(n, ARCH["sm_90a"]))
        kernel = printed(graph, choose(plans))
        assert build(kernel.source, kernel.function, "sm_90a").resources.stack == 0


def test_every_architecture_has_plans():
    for arch in ARCHS.values():
        assert enumerate_plans(graph_of("scan_alone", 8192), Target(8192, arch))


PARTS_OF_SCANS = {
    "ranked": lambda x: x.cumsum(-1)[:6].sort(-1, descending=True).values,
    "largest": lambda x: x.logcumsumexp(-1)[3:9].amax(-1),
    "of products": lambda x: (0.1 * x).exp().cumprod(-1)[:5].topk(2).values,
}


@pytest.mark.parametrize("n", [9, 16])
@pytest.mark.parametrize("name", ["ranked", "of products"])
def test_a_scan_whose_largest_elements_are_looked_for_is_cut_alike_everywhere(name, n):
    """An element has other bits in another cut, and would not be equal to the largest one."""
    f = htile.rowwise(PARTS_OF_SCANS[name])
    graph = f.inspect(torch.randn(4, n, requires_grad=True), arch="sm_90a").backward.graph
    keys = [graph[node.inputs[0]] for node in graph if node.op is Op.KEY]
    assert {key.value.inner for key in keys if key.op is not Op.INPUT} in ({()}, {(graph.n,)})


def test_a_scan_of_integers_is_cut_as_its_results_are():
    """Its elements are the same in every cut."""

    def parts(x):
        up_to = x.int().cumsum(-1)
        return torch.where(up_to[:250] == up_to.amax(), x[:250], 0.0), up_to

    assert htile.rowwise(parts).inspect(torch.randn(4, 1000), arch="sm_90a").graph.n == 250

"""Rows of any length: their kernels compile, serve a bucket, and read where their rows end."""

from __future__ import annotations

import re

import pytest
import torch

import htile
from htile.frontend.dynamic import capacity_of
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from htile.lower import enumerate_plans
from tests.lower.cases import (
    ANY_LENGTH,
    ARCH,
    BF16,
    F32,
    any_length_arguments,
    any_length_kernel,
    example_kernel,
    rows,
)
from tests.lower.test_compile import COMPILED, check
from tests.request_of import request_of

NAMES = [f.__name__ for f in ANY_LENGTH]
BUCKETS = [(1, F32), (33, BF16), (1000, BF16), (1003, F32), (20000, BF16)]
LONG = [(131072, BF16), (50257, BF16), (1 << 20, F32)]  # in loops; scans of 2^20 have no plan


@pytest.mark.parametrize("arch", COMPILED)
@pytest.mark.parametrize("name", NAMES)
def test_they_compile_on_every_architecture(name, arch):
    for n, dtype in BUCKETS[2:4]:
        check(any_length_kernel(name, n, dtype, arch))


@pytest.mark.parametrize(("n", "dtype"), BUCKETS[:2] + BUCKETS[4:] + LONG)
@pytest.mark.parametrize("name", NAMES)
def test_short_and_long_rows_compile(name, n, dtype):
    if name == "any_scan" and n > 131072:
        with pytest.raises(htile.UnsupportedError, match="does not hold them"):
            any_length_kernel(name, n, dtype)
        return
    if name == "any_ranks" and n == 1:
        with pytest.raises(htile.ShapeError, match="of 1 elements"):
            any_length_kernel(name, n, dtype)
        return
    kernel = any_length_kernel(name, n, dtype)
    assert kernel.resources.registers > 0


def test_rows_that_begin_anywhere_compile():
    """In views with an offset, rows of whole vectors are shifted."""
    f = htile.rowwise(next(iter(ANY_LENGTH)), dynamic_n=True)
    x = torch.empty(4, 4097, dtype=BF16)
    kernel = f.inspect(x[:, 1:], arch="sm_90a")
    assert kernel.plan.placement.shifted and kernel.resources.stack == 0
    assert not f.inspect(x[:, :4096].clone(), arch="sm_90a").plan.placement.shifted
    assert kernel.plan.numerics == f.inspect(x[:, :4096].clone(), arch="sm_90a").plan.numerics


def test_capacities():
    lengths = (1, 2, 48, 64, 65, 96, 97, 128, 129, 192, 193, 4097, 50257)
    assert [capacity_of(n) for n in lengths] == [
        1, 64, 64, 64, 96, 96, 128, 128, 192, 192, 256, 6144, 65536,
    ]  # fmt: skip
    for n in range(65, 5000):
        assert n <= capacity_of(n) < 1.5 * n


@pytest.mark.parametrize("name", NAMES)
def test_one_text_for_a_bucket(name):
    """Of rows of whole vectors, and of others; the text names no length but the capacity."""
    for bucket in ((776, 1000, 1024), (769, 777, 1023)):
        texts = {any_length_kernel(name, n).source for n in bucket}
        assert len(texts) == 1
        (text,) = texts
        assert "N <= 1024" in text
        assert not re.search(rf"\b({bucket[0]}|{bucket[1]})\b", text)
    assert any_length_kernel(name, 1032).source not in texts


def test_every_tensor_has_the_rows_length():
    """The symbol of every row and every column is one, so that the host function compares them."""
    kernel = any_length_kernel("any_rmsnorm", 1000)
    assert kernel.source.count("(m, n), 8)") == 4 and kernel.source.count("((n,), 8)") == 0
    assert kernel.source.count("(n,), 8)") == 1 and "cute.sym_int(divisibility=8)" in kernel.source


def test_no_plan_takes_a_row_to_fill_its_threads():
    """Every plan masks, and none merges chunks in pairs: that is for rows without padding."""
    for name in NAMES:
        kernel = any_length_kernel(name, 4096)
        plans = enumerate_plans(kernel.graph, kernel.plan.target)
        assert plans and all(plan.is_ragged and not plan.numerics.merged for plan in plans)
    assert not example_kernel("layernorm", 4096).plan.is_ragged


def test_the_length_is_read_once_and_narrow():
    graph = any_length_kernel("any_statistics", 1000).graph
    lengths = [node for node in graph if node.op is Op.LENGTH]
    assert len(lengths) == 1 and lengths[0].value.dtype is torch.int32


def test_loads_end_where_a_mask_says_so_too():
    def masked(x, n: htile.PerRow):
        inside = torch.arange(x.shape[-1]) < n
        return torch.where(inside, x, -torch.inf).softmax(-1)

    x, n = *rows((4, 1000)), torch.empty(4, dtype=torch.int32, device="meta")
    kernel = htile.rowwise(masked, dynamic_n=True).inspect(x, n, arch="sm_90a")
    (row,) = (i for i in kernel.graph.inputs if i.role is Role.ROW)
    assert row.end is not None and "end=" in kernel.source
    check(kernel)


def test_a_mean_is_a_sum_over_the_length_or_a_mean():
    """As for rows of a length that is fixed: which of the two it is, other readers decide."""

    def average(x):
        return (x * x).mean(), (x + 1).sum() / x.shape[-1]

    def centered(x):
        return x - x.sum() / x.shape[-1]

    ops = []
    for f in (average, centered):
        graph = htile.rowwise(f, dynamic_n=True).inspect(*rows((4, 1000))).graph
        ops.append([node.op for node in graph if node.op in (Op.SUM, Op.MEAN)])
    assert ops == [[Op.SUM, Op.SUM], [Op.MEAN]]


def test_tuned_plans_are_those_of_the_bucket():
    """A plan is kept for a graph: that of rows of any length is another one."""
    from htile.tune.kept import of_graph

    f = next(iter(ANY_LENGTH))
    graphs = []
    for n, dynamic_n in ((1024, True), (1000, True), (1001, True), (1024, False)):
        function = htile.rowwise(f, dynamic_n=dynamic_n)
        request = request_of(function, any_length_arguments(f, 2, n))
        graphs.append(of_graph(request.specialization.graph))
    assert graphs[0] == graphs[1] != graphs[2] and graphs[3] not in graphs[:3]
    assert "multiple" not in graphs[3]


def test_plans_are_for_the_capacity():
    for arch in COMPILED:
        kernel = any_length_kernel("any_layernorm", 50000, arch=arch)
        assert kernel.plan.target.n == 65536 and kernel.plan.target.arch == ARCH[arch]
        assert "N <= 65536" in str(kernel.plan) and "N <= 65536" in repr(kernel)
        assert "N <= 65536" in str(kernel.graph)

"""Ranks that all warps of a row find together: what they take of a CTA, and how they are stored."""

from __future__ import annotations

import re

import pytest
import torch

import htile
from htile.compute import exchange, together
from htile.lower import enumerate_plans, ranks
from tests.lower.cases import ARCH

ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


@htile.rowwise
def first(x, k: htile.Static):
    return x.topk(k)


@htile.rowwise
def scaled(x):
    """Of the elements more is made than results, and of the indices nothing."""
    found = x.topk(12)
    return found.values.softmax(-1), found.indices.int(), x - found.values[3]


@htile.rowwise
def in_part(x):
    found = x.topk(16)
    return found.values[2:14], found.indices.float()


@htile.rowwise
def of_groups(x, size: htile.Static):
    return x.view(-1, size).amax(-1).topk(12)


@htile.rowwise
def converted(x, dtype: htile.Static):
    return x.topk(12).values.to(dtype)


@htile.rowwise
def beside_sums(x, y):
    found = x.topk(64).values
    return found, htile.sum_rows(torch.where(x >= found[-1], x * y, 0.0)), htile.sum_rows(x * y)


def kernel_of(f, n, *others, dtype=torch.bfloat16, arch="sm_90a"):
    return f.inspect(torch.empty(8, n, dtype=dtype, device="meta"), *others, arch=arch)


def test_numbers_that_both_sides_know():
    assert ranks.SLOTS_TOGETHER == together.SLOTS
    assert ranks.LEAST_PLACES == together.LEAST_PLACES
    assert ranks.ROWS_TOGETHER == exchange.BARRIERS - 1
    for count in range(ranks.FEW_RANKS + 1, 65):
        chain = ranks.Chain(tuple(range(count)), (0,), False, 0)
        for warps in (2, 3, 4, 8, 20, 32, 128):
            groups = warps * together.groups_of_warp(count, warps)
            lists = 4 * groups + (2 * together.places_of(count) + count) * 8 + 4
            assert chain.scratch(32 * warps, 32 * warps, 1, 8) == lists + ranks.ALIGNED


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(("n", "k"), ((1000, 9), (8192, 64), (32000, 20), (50257, 50)))
def test_who_looks_for_ranks_together(n, k, arch):
    """The warps of rows that are held, which spill nothing."""
    kernel = kernel_of(first, n, k, arch=arch)
    are_held = n <= 8192 or ARCH[arch].max_cluster > 1
    spans_warps = n > 1000
    told = f"the {k} largest of key0, of all warps together"
    assert (told in kernel.plan_text) == (are_held and spans_warps)
    assert not are_held or kernel.resources.stack == 0


@pytest.mark.parametrize(("n", "k"), ((4096, 9), (8192, 64), (65536, 6), (151936, 50)))
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=str)
def test_shared_memory(n, k, dtype):
    """A plan knows what the lists take: no less, and hardly more."""
    kernel = kernel_of(first, n, k, dtype=dtype)
    num, place = kernel.plan.numerics, kernel.plan.placement
    assert not num.in_loops
    (chain,) = kernel.plan.work.chains
    row = num.threads_per_row, num.cluster_n
    assert chain.are_together(*row)
    lists = chain.scratch(place.num_threads, *row, kernel.plan.elements_per_thread)
    buffer = kernel.plan.slots * (place.num_threads // 32 * num.cluster_n * 8 + 8)
    beside = ranks.ALIGNED + 64 + 8 * kernel.plan.slots  # for alignment, and for mbarriers
    most = kernel.plan.tile_bytes + lists + buffer + 64
    assert most - beside <= kernel.resources.dynamic_shared <= most


def test_rows_beside_each_other_have_barriers():
    """More rows in a CTA than it has barriers would wait for each other where they part ways."""
    kernel = kernel_of(first, 1024, 9)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    held = [plan for plan in plans if not plan.numerics.in_loops]
    rows = {
        plan.placement.num_threads // plan.numerics.threads_per_row
        for plan in held
        if plan.numerics.threads_per_row > 32
    }
    assert 1 < max(rows) <= ranks.ROWS_TOGETHER


@pytest.mark.parametrize(("n", "size"), ((1024, 4), (4096, 4), (8192, 8), (8192, 128)))
def test_groups_have_one_key_each(n, size):
    """Each warp looks for them on its own, because one lane of a group has its key."""
    source = kernel_of(of_groups, n, size, dtype=torch.float32).source
    assert "together=True" not in source and "elements=" not in source


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("n", (1280, 10240, 14336))
def test_lists_beside_sums_over_rows_fit(n, arch):
    args = [torch.empty(500, n, device="meta") for _ in range(2)]
    kernel = beside_sums.inspect(*args, arch=arch)
    assert kernel.resources.dynamic_shared <= ARCH[arch].shared_bytes


@pytest.mark.parametrize(
    "dtype", (torch.int8, torch.uint8, torch.float8_e5m2, torch.float8_e4m3fn, torch.int32), ids=str
)
def test_what_saturates_or_rounds_is_converted_before_it_is_stored(dtype):
    source = kernel_of(converted, 8192, dtype, dtype=torch.float32).source
    assert "store_ranked" not in source and source.count("math.convert(") >= 12


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16, torch.float32), ids=str)
def test_floats_are_rounded_as_they_are_stored(dtype):
    source = kernel_of(converted, 8192, dtype, dtype=torch.float32).source
    assert "ctx.store_ranked(mOut0, ranks0, 0, 12, math.key_value, Float32)" in source


def test_ranks_are_stored_side_by_side():
    """As many threads as there are ranks store them, and none has registers for all."""
    source = kernel_of(first, 8192, 50).source
    assert len(re.findall(r"ctx\.store_ranked\(", source)) == 2
    assert "store_row_values" not in source and "= math.key_" not in source
    assert kernel_of(first, 8192, 50).resources.registers <= 128


def test_only_results_are_left_out():
    """Elements of which more is made are there, and indices that are only stored are not."""
    source = kernel_of(scaled, 8192).source
    assert "ctx.store_ranked(mOut1_0, ranks0, 0, 12, math.key_index, False)" in source
    assert source.count("= math.key_value(") == 12 and "= math.key_index(" not in source


def test_part_of_the_ranks():
    source = kernel_of(in_part, 8192).source
    assert "ctx.store_ranked(mOut0_0, ranks0, 2, 12, math.key_value, Float32)" in source
    assert source.count("= math.key_index(") == 16, "a float is made of each index first"

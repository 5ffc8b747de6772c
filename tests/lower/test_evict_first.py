"""Kernels that read rows and write none load them so that the caches drop them first."""

from __future__ import annotations

import re

import pytest
import torch

import htile
from htile.copy.vector import EVICT_FIRST, EVICT_NORMAL
from htile.lower.plan import MOST_EVICTED_FIRST

BF16, I64 = torch.bfloat16, torch.int64
M = 4096
DROPPED, KEPT = r"ld\.global\.L2::cache_hint\.\S+", r"ld\.global\.(?!L2)\S+"


def kernel_of(f, *shapes, arch="sm_90a"):
    """The kernel of a call with tensors of these shapes; what has no dtype is bfloat16."""
    given = [shape if isinstance(shape[0], torch.dtype) else (BF16, *shape) for shape in shapes]
    tensors = [torch.empty(shape, dtype=dtype, device="meta") for dtype, *shape in given]
    return htile.rowwise(f).inspect(*tensors, arch=arch)


def total(x):
    return x.sum(-1)


def weighted(x, w: htile.Shared):
    return (x * w).sum(-1)


def loss(x, label: htile.PerRow):
    return torch.nn.functional.cross_entropy(x, label)


READS = {
    "held": (total, [(M, 4096)]),
    "odd rows": (total, [(M, 4097)]),
    "short rows": (total, [(M, 64)]),
    "in loops": (total, [(M, 131072)]),
    "odd rows in loops": (total, [(M, 50257)]),
    "two rows": (lambda x, y: (x - y).abs().amax(-1), [(M, 2048), (M, 2048)]),
    "rows of two dtypes": (lambda x, k: (x * (k > 0)).mean(-1), [(M, 2048), (I64, M, 2048)]),
    "numbers of groups": (lambda x: x.view(-1, 64).amax(-1), [(M, 4096)]),
}


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("name", READS)
def test_rows_that_are_only_read_are_dropped_first(name, arch):
    f, shapes = READS[name]
    kernel = kernel_of(f, *shapes, arch=arch)
    read, _ = kernel.plan.bytes_per_row()
    assert kernel.plan.evict_first_rows == MOST_EVICTED_FIRST // read
    assert f"evict_first_rows={MOST_EVICTED_FIRST // read}" in kernel.source
    if kernel.plan.placement.loader != "shared":  # cp.async has no such form
        assert re.search(DROPPED, kernel.ptx) and not re.search(KEPT, kernel.ptx)


def test_rows_of_larger_tensors_are_dropped_in_their_turn():
    """One kernel has both policies, and takes one by the number of rows."""
    kernel = kernel_of(total, (M, 4096))
    for policy in (EVICT_FIRST, EVICT_NORMAL):
        assert str(policy) in kernel.ptx
    assert re.search(rf"setp\.lt\.s32\s.*, {MOST_EVICTED_FIRST // 8192 + 1};", kernel.ptx)


@pytest.mark.parametrize("n", [2048, 2049])
def test_what_all_rows_share_is_kept(n):
    kernel = kernel_of(weighted, (M, n), (n,))
    assert re.search(DROPPED, kernel.ptx) and re.search(KEPT, kernel.ptx)


def test_one_element_of_a_row_and_its_index_are_kept():
    kernel = kernel_of(loss, (M, 1000), (I64, M))
    assert re.search(DROPPED, kernel.ptx)
    assert {"ld.global.b64", "ld.global.b16"} <= set(re.findall(KEPT, kernel.ptx))


OTHERS = {
    "a row is written": (lambda x: x * 2, [(M, 4096)]),
    "a row is written too": (lambda x, y, z: (x * y * z).softmax(-1), [(M, 512)] * 3),
    "a fourth as much is written": (lambda x: x.view(-1, 4).amax(-1), [(M, 4096)]),
    "rows repeat": (lambda x, y: (x * y).sum(-1), [(64, 64, 512), (64, 1, 512)]),
    "indices choose from the row": (lambda x, i: x[i].sum(-1), [(M, 512), (I64, M, 512)]),
    "elements of a rank": (lambda x: x.topk(8), [(M, 4096)]),
    "sums over the rows": (lambda x: htile.sum_rows(x), [(M, 512)]),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_rows_are_kept(name):
    f, shapes = OTHERS[name]
    kernel = kernel_of(f, *shapes)
    assert not kernel.plan.evict_first_rows and "evict_first_rows" not in kernel.source
    assert not re.search(DROPPED, kernel.ptx)


@pytest.mark.parametrize("n", [24000, 24001])
def test_rows_that_loops_read_again_are_kept(n):
    """The second loop is to find them in the cache."""
    f = htile.rowwise(lambda x: ((x - x.amax(-1)) * x).sum(-1))
    f = f.with_plan(form="loops", loader="direct")
    kernel = f.inspect(torch.empty(M, n, device="meta"), arch="sm_90a")
    assert kernel.plan.bytes_read_again() and not kernel.plan.evict_first_rows

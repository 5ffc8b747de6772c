"""Loops over shifted rows, whose pieces come through shared memory while a row is worked on."""

import re

import pytest
import torch

pytest.importorskip("cutlass")

import htile
from htile.lower.over_rows import parts_of, workspace_bytes
from tests.primitives.row_device import launch
from tests.primitives.test_shifted import rows_at

BF16, F32 = torch.bfloat16, torch.float32


@htile.rowwise
def summed(x, y):
    return x * (x * y).sum(-1) + y, htile.sum_rows(x * y)


@htile.rowwise
def scaled(x, y):
    return x * y, htile.sum_rows(x)


@htile.rowwise
def added(x, y):
    return htile.sum_rows(x * y)


# function, N, threads of a row, CTAs of a row. Only rows of `summed` exchange something. Rows of
# `added` are not stored either.
CASES = {
    "rows in a warp": (summed, 261, 16, 1),
    "rows of warps": (summed, 1237, 64, 1),
    "two rows": (summed, 4799, 128, 1),
    "a last vector that ends in one more piece": (summed, 1535, 64, 1),
    "a cluster": (summed, 20011, 128, 4),
    "rows in a warp, alone": (scaled, 261, 8, 1),
    "two rows, alone": (scaled, 4799, 128, 1),
    "two CTAs, alone": (scaled, 20011, 640, 2),
    "rows in a warp, added": (added, 261, 8, 1),
    "two rows, added": (added, 4799, 128, 1),
}


def right(function, x, y):
    """In float64 what is stored of each row, or None, and what is added up over rows."""
    x, y = x.double(), y.double()
    if function is summed:
        return x * (x * y).sum(-1, keepdim=True) + y, x * y
    return (x * y, x) if function is scaled else (None, x * y)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("offset", "reverse", "late"),
    [(0, False, True), (1, True, False), (5, False, False), (6, True, True)],
)
def test_a_thread_block_and_the_rows_of_its_loop(case, offset, reverse, late):
    """Its groups have three rows each, the last one has two, and all are right at any alignment.

    Shared memory holds NaNs before. No warp has to run before another one, and no copy has to
    arrive before it is waited for, or after.
    """
    function, n, threads, ctas = CASES[case]
    like = torch.empty(3, n, dtype=BF16, device="meta")
    kernel = function.inspect(like, like, arch="sm_90a")
    plan = kernel.plan
    assert (plan.numerics.threads_per_row, plan.numerics.cluster_n) == (threads, ctas)
    assert plan.placement.shifted and plan.placement.loader == "shared"

    groups, of_block = plan.numerics.groups, plan.rows_per_block
    m = 2 * groups + max(1, of_block - 1)
    torch.manual_seed(n + offset)
    x, y = (rows_at(torch.randn(m, n).to(BF16), first, n) for first in (offset, 7 - offset))
    result = rows_at(torch.zeros(m, n, dtype=BF16), offset, n)
    workspace = torch.zeros(workspace_bytes(plan), dtype=torch.int8)
    results = [workspace] if function is added else [result, workspace]
    launch(kernel, [x, y, *results], m, reverse, blocks=1, late=late)

    worked_on = [row for row in range(m) if row % groups < of_block]
    rows, terms = right(function, x[worked_on], y[worked_on])
    if rows is not None:
        error = (result[worked_on].double() - rows).abs() / rows.abs().amax(-1, keepdim=True)
        assert error.max() <= 2**-8, "one unit in the last place"
        others = torch.ones(m, dtype=torch.bool)
        others[worked_on] = False
        assert not result[others].any()
    (parts,) = parts_of(plan)
    found = workspace[parts.start :].view(F32)[:n].double()
    assert (found - terms.sum(0)).abs().max() <= 2**-20 * terms.abs().sum(0).max()


@htile.rowwise
def masked(x, keep):
    y = torch.where(keep, x, 0.0)
    return y * y.sum(), htile.sum_rows(y)


@pytest.mark.parametrize(("dtype", "sizes"), [(BF16, {16, 8}), (F32, {16, 4})])
def test_pieces_of_several_sizes(dtype, sizes):
    """A mask has as many elements in a piece as the row beside it, and so fewer bytes."""
    n = 1003
    like = torch.empty(3, n, dtype=dtype, device="meta"), torch.empty(3, n, dtype=torch.bool)
    kernel = masked.inspect(like[0], like[1].to("meta"), arch="sm_90a")
    plan = kernel.plan
    assert plan.placement.shifted and plan.placement.loader == "shared"
    copied = re.findall(r"cp\.async\.c[ag]\.shared\.global \[[^]]*\], \[[^]]*\], (\d+)", kernel.ptx)
    assert {int(size) for size in copied} == sizes

    m, groups = plan.numerics.groups + 1, plan.numerics.groups
    torch.manual_seed(0)
    x, keep = rows_at(torch.randn(m, n).to(dtype), 3, n), rows_at(torch.rand(m, n) > 0.4, 5, n)
    result = rows_at(torch.zeros(m, n, dtype=dtype), 1, n)
    workspace = torch.zeros(workspace_bytes(plan), dtype=torch.int8)
    launch(kernel, [x, keep, result, workspace], m, blocks=1, late=False)

    worked_on = [row for row in range(m) if row % groups < plan.rows_per_block]
    terms = torch.where(keep[worked_on], x[worked_on].double(), 0.0)
    rows = terms * terms.sum(-1, keepdim=True)
    error = (result[worked_on].double() - rows).abs() / rows.abs().amax(-1, keepdim=True)
    assert error.max() <= (2**-8 if dtype is BF16 else 2**-20)
    (parts,) = parts_of(plan)
    found = workspace[parts.start :].view(F32)[:n].double()
    assert (found - terms.sum(0)).abs().max() <= 2**-20 * terms.abs().sum(0).max()

"""Chunks that are in the row for every thread are worked on as if the row filled its threads."""

import re

import pytest
import torch

import htile
from htile.copy.layout import RowLayout
from tests.lower.cases import example_kernel

pytest.importorskip("cutlass")

# A share of 5 chunks of 128 threads, of 8: the last share has three whole chunks.
CLUSTER = {"threads_per_row": 128, "cluster_n": 8, "shares": 1}


def selects(ptx):
    """Selects of floats, which put what a reduction ignores in the place of padding."""
    return len(re.findall(r"\bselp\.f32", ptx))


def test_only_chunks_that_may_end_are_compared():
    layout = RowLayout(39120, 8, 128, 5, 8)
    assert [layout.is_whole(k) for k in range(5)] == [True, True, True, False, False]
    plan = {**CLUSTER, "form": "loops", "loader": "shared", "cluster_n": 8}
    filled = example_kernel("rmsnorm", 40960, arch="sm_90a", **plan)
    padded = example_kernel("rmsnorm", 39120, arch="sm_90a", **plan)
    more = selects(padded.ptx) - selects(filled.ptx)
    assert 0 < more <= 2 * 8, "of the elements of two chunks"


@pytest.mark.parametrize("form", ["held", "loops"])
def test_columns_of_whole_chunks_are_not_compared(form):
    loader = "shared" if form == "loops" else "direct"
    kernel = example_kernel("softmax", 39120, arch="sm_90a", form=form, loader=loader, **CLUSTER)
    found = re.findall(r"\bsetp\.\S+\s+%p\d+, (%r\d+), (3\d{4});", kernel.ptx)
    compared = {(register, round(int(limit), -1)) for register, limit in found}
    assert 0 < len(compared) <= 2 * 2, "of the last two chunks, once or twice each"


@pytest.mark.parametrize("n", [1000, 1024])
def test_products_are_added_without_being_rounded(n):
    """Also where a row does not fill its threads: padding is a product of zeros."""
    function = htile.rowwise(lambda x, y: (x * y).sum())
    x = torch.empty(64, n, dtype=torch.bfloat16, device="meta")
    plan = {"form": "held", "threads_per_row": 32, "num_threads": 128}
    ptx = function.with_plan(**plan).inspect(x, x, arch="sm_90a").ptx
    # Half of a thread's 32 products are rounded: those that another one is added to.
    assert len(re.findall(r"\bfma\.rn\.f32", ptx)) == len(re.findall(r"\bmul\.rn\.f32", ptx)) == 16

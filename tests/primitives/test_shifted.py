"""Shifted rows: how vectors are cut where a row ends, and kernels whose rows begin anywhere."""

import re

import numpy as np
import pytest
import torch

pytest.importorskip("cutlass")

from cutlass import BFloat16

import htile
from examples import load
from htile.config import ElementwiseTileConfig
from htile.copy.layout import RowLayout

BF16 = torch.bfloat16
softmax, _ = load("softmax")
rmsnorm, _ = load("rmsnorm")


@pytest.mark.parametrize("n", [1, 7, 8, 9, 250, 1001, 1003, 4096, 20011])
@pytest.mark.parametrize(("vec", "threads", "shares"), [(8, 8, 1), (8, 64, 1), (4, 128, 4)])
def test_the_layout_says_which_elements_are_in_the_row(n, vec, threads, shares):
    chunks = -(-n // (vec * threads * shares))
    layout = RowLayout(n, vec, threads, chunks, shares)
    columns = np.arange(shares * chunks * threads * vec).reshape(shares, chunks, threads, vec)
    inside = columns < n
    for k in range(chunks):
        assert layout.is_whole(k) == inside[:, k].all()
        ends = inside[:, k].any(-1) & ~inside[:, k].all(-1)
        assert ends.any() <= layout.may_end_in(k) <= bool(n % vec)
        parts = layout.exact_parts(k)
        assert [i for first, last in parts for i in range(first, last)] == list(range(vec))
        for first, last in parts:
            assert (last - first).bit_count() == 1
            part = inside[:, k, :, first:last]
            assert (part.all(-1) == part.any(-1)).all(), "in the row as a whole, or not at all"
    for share in range(shares):
        for warp in range(max(threads // 32, 1)):
            lanes = slice(32 * warp, 32 * warp + layout.lanes)
            assert layout.of_warp(warp, share) == inside[share, :, lanes].sum()


def kernel(function, n, offset=0, arch="sm_90a", **plan):
    """A kernel of rows of n elements, in memory `offset` elements behind 16 whole bytes."""
    x = torch.empty(1024 * n + 16, dtype=BF16)[offset : offset + 1024 * n].view(1024, n)
    args = (x,) if function is softmax else (x, torch.empty(n, dtype=BF16))
    return function.with_plan(**plan).inspect(*args, arch=arch)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("function", [softmax, rmsnorm], ids=["softmax", "rmsnorm"])
def test_shifted_kernels_access_16_bytes(function, arch):
    """Only the ends of what a warp stores go element by element."""
    for n, offset in ((1001, 0), (1000, 1)):
        for loader in ("direct", "shared"):
            found = kernel(function, n, offset, arch, loader=loader)
            assert found.plan.placement.shifted and found.resources.stack == 0
            loads = re.findall(r"ld\.global\S*\.(v4\.b32|b16)", found.ptx)
            stores = re.findall(r"st\.global\S*\.(v4\.b32|b16)", found.ptx)
            copies = re.findall(r"cp\.async\.cg\S* \[[^]]*\], \[[^]]*\], (\d+)", found.ptx)
            rows = copies if loader == "shared" else loads
            assert rows and set(rows) <= {"v4.b32", "16"}
            assert stores.count("v4.b32") >= found.plan.chunks
            assert stores.count("b16") == found.plan.chunks


def test_a_shift_takes_few_instructions():
    """What elements more take, over those of aligned rows: of four branches, one runs."""

    @htile.rowwise
    def double(x):
        return x + x

    def code(n, threads):
        x = torch.empty(64, n, dtype=BF16, device="meta")
        plan = {"threads_per_row": threads, "num_threads": 128, "cluster_n": 1, "form": "held"}
        kernel = double.with_plan(**plan).inspect(x)
        in_branches = len(re.findall(r"\b(?:shf\.r\.wrap|prmt)\.b32", kernel.ptx))
        return kernel.resources.code_bytes // 16, in_branches

    def more(n, less):
        (most, branches), (least, others) = code(n, 128), code(less, 128)
        return most - least, branches - others

    shifted, in_branches = more(8193, 4097)
    aligned, _ = more(8192, 4096)
    assert in_branches == 4 * 2 * 4 * 4  # vectors, loads and stores, branches, words
    assert (shifted - aligned - in_branches * 3 / 4) / 32 <= 4


def test_outputs_of_every_dtype_are_staged_in_the_same_bytes():
    """A warp that stores one output must not write where another stores the other."""

    @htile.rowwise
    def of_two_dtypes(x):
        return torch.exp(x.float()), x > 0

    found = of_two_dtypes.inspect(torch.empty(64, 1001, dtype=BF16, device="meta"), arch="sm_90a")
    place = found.plan.placement
    assert place.shifted and place.num_threads > 32
    steps = set(re.findall(r"mad\.lo\.s32\s+%r\d+, %r\d+, (\d+), %r\d+;", found.ptx))
    assert steps == {"528"}, "16 bytes for each lane, and for one more"


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32])
def test_a_column_of_vectors_below_4_bytes_keeps_rows_from_being_shifted(dtype):
    """Two elements of a vector beside int64 are two bytes of a Boolean column."""
    whole = torch.empty(64 * 256 + 1, dtype=torch.int64)[1:].view(64, 256)
    half = torch.empty(64 * 256 + 1, dtype=BF16)[1:].view(64, 256)
    column = torch.empty(256, dtype=dtype)
    function = htile.rowwise(lambda x, y, c: torch.where(c > 0, x + y, y))
    place = function.inspect(half, whole, column, arch="sm_90a").plan.placement
    assert place.copy_bytes == 2 and place.shifted == (dtype is not torch.bool)


def test_what_is_refused():
    config = ElementwiseTileConfig(BFloat16, 1001, shifted=True)
    assert config.num_blocks_N(8) == 4 and not config.is_even(8)
    with pytest.raises(ValueError, match="make it 1, or set shifted=True"):
        ElementwiseTileConfig(BFloat16, 1001).num_blocks_N(8)

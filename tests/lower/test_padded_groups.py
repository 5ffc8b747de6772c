"""Groups of rows that end inside of the last group: padded to whole groups, and cut back."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import UnsupportedError
from htile.lower.passes.ways import place_well
from htile.testing import assert_close
from tests.lower.placing import assert_placed_right, placed_and_values
from tests.lower.test_compile import check
from tests.primitives.row_device import launch_pieces
from tests.primitives.test_shifted import rows_at

BF16 = torch.bfloat16
LENGTHS = (100, 101, 136, 1000, 1001, 5000)


def padded(x, size, value=0.0):
    """The groups of a row, the last one padded."""
    return F.pad(x, (0, -x.shape[-1] % size), value=value).view(-1, size)


def scaled(x):
    groups = padded(x, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return (groups / scale).flatten()[: x.shape[-1]], scale.flatten()


def centered(x):
    groups = padded(x, 64)
    centered = (groups - groups.mean(-1, keepdim=True)).flatten()[: x.shape[-1]]
    return centered, (centered * centered).sum(), centered.abs().amax(), (centered + 1).mean()


def softmax_of_groups(x):
    return padded(x, 16, value=float("-inf")).softmax(-1).flatten()[: x.shape[-1]]


def normalized_before(x, weight):
    y = F.layer_norm(x, x.shape[-1:], weight)
    groups = padded(y, 128)
    return (groups - groups.amax(-1, keepdim=True)).flatten()[: x.shape[-1]], y.sum()


def dequantized(x, scale: htile.Inner[1]):
    return x * scale.repeat_interleave(32)[: x.shape[-1]]


def at_indices(x):
    scale = padded(x, 32).abs().amax(-1) + 1
    return x / scale[torch.arange(x.shape[-1]) // 32], x * scale[torch.arange(x.shape[-1]) >> 5]


def of_joined(x):
    zeros = torch.zeros(-x.shape[-1] % 32)
    groups = torch.cat((x, zeros)).unflatten(-1, (-1, 32))
    return (groups * groups.square().mean(-1, keepdim=True)).flatten()[: x.shape[-1]]


def of_two(x, y):
    groups = padded(x * y, 32)
    scale = groups.amax(-1, keepdim=True) - groups.amin(-1, keepdim=True)
    return (groups * scale).reshape(-1)[: x.shape[-1]] + x, scale[:, 0], groups.flatten()


FUNCTIONS = (scaled, centered, softmax_of_groups, normalized_before, dequantized, at_indices,
             of_joined, of_two)  # fmt: skip


def arguments(f, n, dtype=torch.float32, rows=3):
    g = torch.Generator().manual_seed(n)

    def drawn(*shape):
        return (torch.randint(-64, 65, shape, generator=g) / 16).to(dtype)

    more = {normalized_before: (n,), dequantized: (rows, -(-n // 32)), of_two: (rows, n)}.get(f)
    return (drawn(rows, n),) if more is None else (drawn(rows, n), drawn(*more))


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("f", FUNCTIONS)
def test_the_placed_graph_is_the_oracle(f, n):
    placed = assert_placed_right(f, arguments(f, n), place_well, 1e-12)
    if n > 128:  # the groups of a shorter row may be pieces of their own
        assert placed.n > n
        assert len(placed) < 80, "no group is written out"
        names = [output.name for output in placed.outputs]
        assert len({*names}) == len(names), "each result is one piece"


def less_the_largest(groups):
    return (groups - groups.amax(-1, keepdim=True)).flatten()


def padded_before(x):
    return less_the_largest(F.pad(x, (-x.shape[-1] % 8, 0)).view(-1, 8))[-x.shape[-1] :]


def cut_at_both_ends(x):
    return less_the_largest(padded(x, 8))[1 : x.shape[-1]]


def rolled(x):
    return less_the_largest(padded(x, 8))[: x.shape[-1]].roll(1)


def transposed(x):
    return padded(x, 16).T.flatten()[: x.shape[-1]]


def of_two_sizes(x):
    return [less_the_largest(padded(x, size))[: x.shape[-1]] for size in (16, 8)]


def cut_twice(x):
    values = less_the_largest(padded(x, 32))
    return values[: x.shape[-1] - 3], values[: x.shape[-1]]


# Functions whose results are cut otherwise, and lengths at which they are placed.
OTHERS = {
    padded_before: (12, 40, 136, 1000), cut_at_both_ends: (12, 40, 65, 1001),
    rolled: (12, 40, 65, 136, 1001), transposed: (12, 40, 65), of_two_sizes: (12, 40),
    cut_twice: (12, 40, 136, 1001),
}  # fmt: skip


@pytest.mark.parametrize(("f", "n"), [(f, n) for f, lengths in OTHERS.items() for n in lengths])
def test_no_piece_lies_beside_a_result(f, n):
    """The interpreter raises IndexError where one does."""
    placed = assert_placed_right(f, arguments(f, n), place_well, 0)
    ends = [output.view.there(placed.n) for output in placed.outputs if output.view is not None]
    assert all(0 <= first < end for first, end in filter(None, ends))


def shorter(x):
    end = 2 * x.shape[-1] // 5
    return x * 2, x[:end] * 3, x[:end].sum()


def in_parts(x):
    end = x.shape[-1] // 3
    return x[:end].softmax(-1), x[end:].softmax(-1), x[end:].amax()


def three_parts(x):
    n = x.shape[-1]
    return [part.square() for part in x.split((n // 2, n // 4, n - n // 2 - n // 4))]


def last_ones(x):
    return x[x.shape[-1] // 2 :] - x.mean(), x


def beside_a_shorter_row(x, y):
    return x * 2, y.softmax(-1), x.mean() - y.amax()


OF_LENGTHS = (shorter, in_parts, three_parts, last_ones, beside_a_shorter_row)


@pytest.mark.parametrize("n", [257, 1001, 4099])
@pytest.mark.parametrize("f", OF_LENGTHS)
def test_results_of_several_lengths_are_not_cut(f, n):
    """Each is computed of whole rows, and stored up to its own end."""
    x = arguments(f, n)
    x += arguments(f, n // 3 + 1) if f is beside_a_shorter_row else ()
    placed = assert_placed_right(f, x, place_well, 1e-12)
    assert len(placed) < 40, "no result is written out"


def rolled_beside(x, y):
    return y.roll(1).amax(), x.amax()


def padded_beside(x, y):
    return F.pad(y, (2, 2)).float().mean(), x.float().mean()


def joined_beside(x, y):
    return torch.cat((x, y)).amax(), x


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.float32])
@pytest.mark.parametrize("lengths", [(140, 75), (257, 100), (257, 200)])
@pytest.mark.parametrize("f", (rolled_beside, padded_beside, joined_beside))
def test_joined_rows_beside_longer_ones(f, lengths, dtype):
    """Joined rows of 8 bits are no choice by the column. Placing them once began anew for ever."""
    g = torch.Generator().manual_seed(5)
    x = tuple(torch.randint(100, (3, n), generator=g).to(dtype) for n in lengths)
    try:
        placed = assert_placed_right(f, x, place_well, 1e-6)
    except UnsupportedError as error:
        assert dtype is not torch.float32 and (f is joined_beside or lengths[0] == 257)
        assert "pieces of 1 element, at most 64 are written out" in str(error)
    else:
        assert len(placed) < 60 or dtype is not torch.float32


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("f", (shorter, in_parts, last_ones))
def test_results_of_several_lengths_on_the_simulator(f, dtype):
    """Which raises where a kernel reads beside the memory of x, or writes beside a result."""
    rows, n, function = 3, 257, htile.rowwise(f)
    (x,) = arguments(f, n, dtype, rows)
    given = rows_at(x, 0, n)
    kernel = function.inspect(given, arch="sm_90a")
    results = [torch.full_like(each, 77) for each in function(x)]
    named = {f"out{k}": each for k, each in enumerate(results)}
    launch_pieces(kernel, {"x": given} | named, rows)
    assert_close(function, tuple(results), given)


def averaged(x):
    return F.avg_pool1d((x * x)[None], 5, 1, 2)[0], x


def largest_near(x):
    return F.max_pool1d(x[None], 3, 1, 1)[0] - x


def smoothed(x):
    return F.conv1d(F.pad(x[None], (2, 2)), torch.ones(1, 1, 5))[0]


@pytest.mark.parametrize("n", [63, 64, 100, 128, 129])
@pytest.mark.parametrize("f", (averaged, largest_near, smoothed))
def test_windows_of_short_rows_are_not_written_out(f, n):
    """A window that reaches over both ends of a row does not cut it into single elements.

    These graphs had 5 nodes for each element of a row, and those of gradients 10.
    """
    placed = assert_placed_right(f, arguments(f, n), place_well, 1e-12)
    assert len(placed) < 60
    x = torch.empty(64, n, requires_grad=True)
    assert len(htile.rowwise(f).inspect(x, arch="sm_90a").backward.graph) < 180


def test_a_mean_keeps_its_digits_beside_a_large_first_element():
    """The kernel of rows that are wider than the row, on the simulator."""

    def mean(x):
        return x.mean(), padded(x, 128).amax(-1)

    x = torch.rand(1, 400) / 1000
    x[0, 0] = 1000.0
    kernel = htile.rowwise(mean).inspect(x, arch="sm_90a")
    assert kernel.graph.n == 512
    found, largest = torch.zeros(1), torch.zeros(1, 4)
    launch_pieces(kernel, {"x": x, "out0": found, "out1": largest}, 1)
    torch.testing.assert_close(found.double(), x.double().mean(-1), rtol=5e-7, atol=0)


def test_the_mean_of_equal_elements_is_that_element():
    def centered(x):
        deviation = x - x.mean()
        return deviation, padded(deviation, 128).amax(-1)

    placed, values = placed_and_values(centered, (torch.full((3, 1000), 0.1),), place_well)
    assert placed.n == 1024
    for found in values:
        assert not found.any()


@pytest.mark.parametrize("number", [float("inf"), float("-inf"), float("nan"), 3e38])
def test_the_mean_of_rows_that_begin_with_a_large_number(number):
    def mean(x):
        return x.mean(), padded(x, 128).amax(-1)

    x = torch.ones(1, 1000)
    x[0, 0] = number
    with np.errstate(invalid="ignore"):  # inf - inf
        _, (found, _) = placed_and_values(mean, (x,), place_well)
    np.testing.assert_allclose(found, x.double().mean(-1), rtol=1e-12)


def halved(x):
    values, scale = scaled(x)
    return values.to(torch.bfloat16), scale.float()


def sums(x, y):
    groups = padded(x * y, 32)
    rest = (groups - groups.amax(-1, keepdim=True)).flatten()[: x.shape[-1]]
    return rest, htile.sum_rows(rest * x), htile.sum_rows(rest.square().sum())


@pytest.mark.parametrize("n", [1000, 1001])
def test_loops_over_rows_load_and_store_the_row_alone(n):
    x = torch.empty(640, n, dtype=BF16, device="meta")
    kernel = htile.rowwise(sums).inspect(x, x, arch="sm_90a")
    assert kernel.resources.stack == 0
    assert kernel.graph.n == 1024
    ahead = re.findall(r"RowsAhead\(.*\)", kernel.source)  # of rows that end at a vector
    assert [f"ends=({n}, {n})" in each for each in ahead] == ([True] if n % 8 == 0 else [])
    assert ahead or kernel.source.count(f"there=(0, {n})") == 2
    assert f"cute.ReductionOp.ADD, mOut1_0, {n}, parts)" in kernel.source


SIMULATED = {
    "whole vectors": (400, 0, {}), "torn vectors": (401, 0, {}), "apart": (400, 5, {}),
    "several rows a block": (1000, 0, {"num_threads": 256, "threads_per_row": 64}),
}  # fmt: skip


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("case", SIMULATED)
def test_nothing_is_read_or_written_beside_a_row(case, dtype):
    """The kernel runs on the simulator, which raises where it reads beside the memory of x."""
    n, apart, plan = SIMULATED[case]
    rows, function = 3, htile.rowwise(halved)
    (x,) = arguments(scaled, n, dtype, rows)
    given = rows_at(x, 0, n + apart)
    result = rows_at(torch.full((rows, n), 77, dtype=BF16), 0, n)
    scale = torch.zeros(rows, -(-n // 32))
    kernel = function.with_plan(**plan).inspect(given, arch="sm_90a")
    memory = torch.empty(0, dtype=BF16).set_(result.untyped_storage())
    behind = memory[rows * n :].clone()
    launch_pieces(kernel, {"x": given, "out0": result, "out1": scale}, rows)
    assert_close(function, (result, scale), given)
    assert torch.equal(memory[rows * n :], behind)


def quantized(x):
    groups = padded(x, 32)
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return (groups / scale).round().flatten()[: x.shape[-1]].to(torch.int8), scale.flatten()


@pytest.mark.parametrize("arch", ("sm_80", "sm_90a", "sm_100a", "sm_120a"))
@pytest.mark.parametrize("n", [1000, 1001, 20000, 100001])
def test_they_compile_without_a_stack(n, arch):
    x = torch.empty(64, n, dtype=BF16, device="meta")
    check(htile.rowwise(quantized).inspect(x, arch=arch))


@pytest.mark.parametrize(("n", "size"), [(1000, 16), (1004, 8), (1001, 16)])
def test_results_are_stored_in_wide_accesses(n, size):
    """Vectors end where a result does, if they can; else they are put together to whole ones."""
    kernel = htile.rowwise(halved).inspect(torch.empty(64, n, dtype=BF16), arch="sm_90a")
    stores = re.findall(r"st\.global(?:\.v(\d))?\.b(\d+)", kernel.ptx)
    assert max(int(count or 1) * int(bits) // 8 for count, bits in stores) == size

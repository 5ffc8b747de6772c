"""The first keys of rows, as kernels find them: their PTX runs on numpy."""

import numpy as np
import pytest
import torch

import htile
from tests.primitives.ptx_device import launch

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
ROWS = 3  # of each kind


def ranked(k, largest):
    """A kernel's function, with the values and the indices of the first k."""

    def f(x):
        found = x.topk(k, largest=largest)
        return found.values, found.indices.int()

    return f


def rows(n, dtype, kinds):
    return torch.cat([_of_kind(kind, n, np.random.default_rng(n)) for kind in kinds]).to(dtype)


def _of_kind(kind, n, rng):
    if kind == "many":
        x = rng.standard_normal((ROWS, n))
    elif kind == "ties":
        x = rng.integers(-3, 4, (ROWS, n)) / 2.0
    elif kind == "special":
        x = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0, -1.0], (ROWS, n))
    elif kind == "one":
        x = np.full((ROWS, n), -np.inf)
    elif kind == "near":  # all but a few bits of the numbers are equal
        x = 1 + rng.integers(0, 64, (ROWS, n)) * 2.0**-23
    else:  # the first ones lie together
        x = np.tile(-np.arange(n), (ROWS, 1)) * 1.0
    return torch.from_numpy(x.astype(np.float32))


def first(x, k, largest):
    """Their indices, by numpy: NaN is the largest, and of equal ones the first comes first."""
    x = x.float().numpy() + 0.0
    ordered = np.where(np.isnan(x), np.inf, x), np.isnan(x)
    sign = -1 if largest else 1
    index = np.arange(x.shape[1])
    order = [np.lexsort((index, sign * a, sign * b)) for a, b in zip(*ordered, strict=True)]
    return np.stack(order)[:, :k]


def check(f, x, k, largest, plan, reverse=False):
    kernel = htile.rowwise(f).with_plan(**plan).inspect(x, arch="sm_90a")
    values, indices = torch.zeros(len(x), k), torch.zeros(len(x), k, dtype=torch.int32)
    blocks = -(-len(x) // kernel.plan.rows_per_block)
    arguments = [x, values, indices]
    executed = launch(kernel.ptx, (blocks, 1), arguments, is_emitted=True, reverse=reverse)
    expected = torch.from_numpy(first(x, k, largest))
    assert torch.equal(indices.long(), expected)
    chosen = x.float().gather(1, expected)
    assert torch.equal(values.nan_to_num(7.5), chosen.nan_to_num(7.5))
    return kernel, executed


KINDS = ("many", "ties", "special", "one", "near", "together")
PLANS = [
    # threads of a row, elements of a thread, ranks
    (8, 32, 8), (8, 16, 3), (16, 16, 8), (32, 16, 20), (32, 64, 8), (16, 32, 32), (8, 48, 5),
    (64, 32, 8), (128, 16, 3),
]  # fmt: skip


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
@pytest.mark.parametrize(("threads", "elements", "k"), PLANS)
def test_the_first_of_many(threads, elements, k, dtype):
    n = threads * elements
    plan = {"threads_per_row": threads, "form": "held", "num_threads": max(64, threads)}
    kernel, _ = check(ranked(k, True), rows(n, dtype, KINDS), k, True, plan)
    is_listed = dtype is F32 or elements >= 32
    assert ("candidates=True, elements=x" in kernel.source) == is_listed
    assert ("popc.b32" in kernel.ptx) == is_listed


@pytest.mark.parametrize(
    ("n", "threads", "dtype", "most"),
    [(256, 8, BF16, 22), (256, 8, F32, 31), (4096, 128, BF16, 16), (4096, 128, F32, 20)],
)
def test_instructions_of_ranks(n, threads, dtype, most):
    """Of the machine for an element, about, of 8 ranks. Sorted, they took 24, 47, 22 and 39."""
    plan = {"threads_per_row": threads, "form": "held", "num_threads": 128}
    whole = rows(n, dtype, ["many"] * 6)[:16]  # of thread blocks that have a row for all threads
    kernel, executed = check(ranked(8, True), whole, 8, True, plan)
    assert executed / kernel.plan.elements_per_thread < most


@pytest.mark.parametrize("largest", (True, False))
@pytest.mark.parametrize("n", (250, 256, 300))
def test_the_smallest_and_rows_that_do_not_fill_their_threads(n, largest):
    plan = {"threads_per_row": 8, "form": "held", "num_threads": 64}
    kernel, _ = check(ranked(8, largest), rows(n, F32, KINDS), 8, largest, plan)
    assert "popc.b32" in kernel.ptx, "candidates are listed"


def test_integers_and_pieces():
    """Those of pieces are keys of both; their indices are not in the order of a thread's keys."""

    def of_integers(x):
        found = x.topk(8)
        return found.values, found.indices.int()

    plan = {"threads_per_row": 8, "form": "held", "num_threads": 64}
    x = torch.randint(-(2**31), 2**31, (4, 256), dtype=torch.int32)
    x[1], x[2] = x[1] % 3, -(2**31)
    kernel = htile.rowwise(of_integers).with_plan(**plan).inspect(x, arch="sm_90a")
    values, indices = (torch.zeros(4, 8, dtype=torch.int32) for _ in range(2))
    launch(kernel.ptx, (1, 1), [x, values, indices], is_emitted=True)
    expected = torch.sort(x, dim=-1, descending=True, stable=True).indices[:, :8]
    assert torch.equal(indices.long(), expected) and "candidates=True" in kernel.source

    def of_pieces(x, y):
        return torch.cat((x, y)).topk(8).indices.int()

    x, y = rows(128, F32, KINDS), rows(128, F32, KINDS[::-1])
    kernel = htile.rowwise(of_pieces).with_plan(**plan).inspect(x, y, arch="sm_90a")
    indices = torch.zeros(len(x), 8, dtype=torch.int32)
    launch(kernel.ptx, (-(-len(x) // 8), 1), [x, y, indices], is_emitted=True)
    assert torch.equal(indices.long(), torch.from_numpy(first(torch.cat((x, y), 1), 8, True)))
    assert "candidates=True" in kernel.source


@pytest.mark.parametrize(
    ("threads", "n", "k", "dtype", "largest"),
    (
        (64, 512, 9, F32, True), (64, 512, 9, BF16, False), (64, 777, 33, F32, False),
        (128, 1000, 20, BF16, True), (128, 1000, 64, F16, True),
    ),
)  # fmt: skip
def test_warps_look_for_many_together(threads, n, k, dtype, largest):
    """Whichever warp lists its candidates first, the first keys are the same."""
    plan = {"threads_per_row": threads, "form": "held", "num_threads": threads}
    x = rows(n, dtype, KINDS)[::ROWS]  # one of each kind
    for reverse in (False, True):
        kernel, _ = check(ranked(k, largest), x, k, largest, plan, reverse)
        assert "together=True" in kernel.source and "atom.shared" in kernel.ptx


def test_few_keys_are_sorted():
    plan = {"threads_per_row": 32, "form": "held", "num_threads": 64}
    kernel, _ = check(ranked(8, True), rows(256, F32, KINDS), 8, True, plan)
    assert "popc.b32" not in kernel.ptx

"""Elements by rank: argmax, argmin, max and min with indices, topk and sort, against numpy."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import htile
from htile.errors import DtypeError, ShapeError, UnsupportedError
from htile.frontend.ops import Op
from htile.frontend.reference import evaluate
from htile.lower.ranks import chains
from htile.testing import oracle

INF, NAN = math.inf, math.nan
BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64 = torch.int32, torch.int64
DTYPES = (F32, BF16, F16, I32)


def random(*shape, dtype=F32, seed=0):
    """Many elements are equal, and some are infinite or NaN."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randint(-6, 7, shape, generator=generator)
    if dtype is I32:
        return torch.where(x == 6, 2**31 - 1, torch.where(x == -6, -(2**31), x)).to(I32)
    x = x.float() / 4
    x = torch.where(x == 1.5, INF, torch.where(x == -1.5, -INF, x))
    x[torch.rand(shape, generator=generator) < 0.02] = NAN
    x[torch.rand(shape, generator=generator) < 0.05] = -0.0
    return x.to(dtype)


def order(x, descending):
    """The indices in order: of equal elements the first one first, NaN as the largest."""
    keys = x.double().numpy() if x.dtype is not I32 else x.numpy().astype(np.float64)
    ranks = np.where(np.isnan(keys), 1e300, np.clip(keys, -1e200, 1e200)) + 0.0
    return torch.from_numpy(np.argsort(-ranks if descending else ranks, axis=-1, kind="stable"))


def first(x, is_largest):
    """The index of the extreme; of NaN if there is one."""
    keys = x.double() if is_largest else -x.double()
    return order(keys, True)[..., 0]


@htile.rowwise
def extremes(x):
    high, low = x.max(-1), x.min(dim=-1)
    return x.argmax(), torch.argmin(x, -1), high.indices, high.values, low[1], low[0]


@htile.rowwise
def ranked(x, k: htile.Static):
    v, i = x.topk(k)
    small = torch.topk(x, k, largest=False)
    return v, i, small.values, small.indices


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("n", (1, 2, 7, 64, 1003))
def test_extremes(n, dtype):
    x = random(9, n, dtype=dtype, seed=n)
    a, b, i, v, j, w = extremes(x)
    assert torch.equal(a, first(x, True)) and torch.equal(b, first(x, False))
    assert torch.equal(i, a) and torch.equal(j, b) and a.dtype is I64
    for found, expected in ((v, x.amax(-1)), (w, x.amin(-1))):
        torch.testing.assert_close(found, expected.to(found.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "k"), ((1, 1), (2, 2), (7, 3), (64, 64), (1003, 8)))
def test_topk(n, k, dtype):
    x = random(9, n, dtype=dtype, seed=n + k)
    v, i, w, j = ranked(x, k)
    for values, indices, descending in ((v, i, True), (w, j, False)):
        expected = order(x, descending)[:, :k]
        assert torch.equal(indices, expected)
        assert values.dtype is (I32 if dtype is I32 else F32) and values.shape == (9, k)
        expected = x.gather(1, expected).to(values.dtype)
        torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
        found = x.topk(k, largest=descending).values  # which ties do not change
        torch.testing.assert_close(values, found.to(values.dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("descending", (False, True))
def test_sort(descending):
    @htile.rowwise
    def f(x):
        values, indices = x.sort(descending=descending)
        return values, indices, torch.argsort(x, descending=descending)

    x = random(5, 40)
    values, indices, again = f(x)
    expected = order(x, descending)
    assert torch.equal(indices, expected) and torch.equal(again, expected)
    torch.testing.assert_close(values, x.gather(1, expected), rtol=0, atol=0, equal_nan=True)


def test_along_every_axis():
    """Of stacks and of groups, with and without the axis, as torch.vmap has it."""

    @htile.rowwise
    def f(x: htile.Inner[2], y):
        grouped = y.view(4, -1)
        top = grouped.topk(2, sorted=True)
        return (
            x.argmax(0), x.argmin(-1, keepdim=True), x.argmax(), x.max(0).indices.float() * x[0],
            x.topk(2, dim=0).values, top.values, top.indices, top.values.sum(-1).topk(2).indices,
            grouped.max(-1, keepdim=True).indices, y.argmax(keepdim=True), y.argmin(0),
        )  # fmt: skip

    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(6, 3, 40, generator=generator), torch.randn(6, 64, generator=generator)
    for found, expected in zip(f(x, y), oracle(f, x, y), strict=True):
        assert found.shape == expected.shape
        assert torch.equal(found.double(), expected.double())


def test_of_one_number_a_row():
    @htile.rowwise
    def f(x, s: htile.PerRow):
        return x.sum() * 0 + s.argmax() + s[..., None].topk(1).indices.sum() + s.topk(1).values

    x = torch.ones(3, 5)
    assert torch.equal(f(x, torch.arange(3.0)), torch.arange(3.0))


NARROW = {  # int64 that is known to fit 32 bits
    "places of places": lambda x: x.argsort().argsort(),
    "sorted places": lambda x: x.topk(5).indices.sort().values,
    "the places back": lambda x: x.argsort(descending=True).flip(-1).sort().indices,
    "the largest place": lambda x: x.topk(5).indices.max(-1),
    "of groups": lambda x: x.view(4, 8).argsort(-1).argsort(0).view(-1).argmin(),
    "columns": lambda x: torch.arange(x.shape[-1]).topk(3).values + (x > 0).sum() * 0,
    "a mask": lambda x: (x > 0).long().argmax(),
    "narrower integers": lambda x: (x * 4).int().long().max(-1),
}


@pytest.mark.parametrize("name", NARROW)
def test_int64_that_fits_32_bits_is_ranked(name):
    x = torch.stack([torch.randperm(32, generator=torch.Generator().manual_seed(k)) - 9.0
                     for k in range(3)])  # fmt: skip
    f = htile.rowwise(NARROW[name])
    found, expected = f(x), [NARROW[name](row) for row in x]
    if isinstance(found, torch.Tensor):
        found, expected = (found,), [(each,) for each in expected]
    for mine, theirs in zip(found, zip(*expected, strict=True), strict=True):
        theirs = torch.stack(theirs)
        assert mine.dtype is theirs.dtype is I64 and torch.equal(mine, theirs)


def test_the_places_of_places_make_the_kernel_that_they_make_in_int32():
    x = torch.empty(2, 16, device="meta")
    narrow, wide = (
        htile.rowwise(f).inspect(x, arch="sm_90a").source
        for f in (lambda x: x.argsort().argsort(), lambda x: x.argsort().int().argsort())
    )
    assert re.sub(r"#.*", "", narrow) == re.sub(r"#.*", "", wide)


def test_what_is_ranked_may_change_afterwards():
    """The indices are those of the tensor as it was."""

    @htile.rowwise
    def f(x):
        y = x * 2
        best = y.max(-1)
        y *= -1
        return best.indices, best.values, y

    x = torch.randn(4, 50)
    i, v, y = f(x)
    assert torch.equal(i, x.argmax(-1)) and torch.equal(v, (2 * x).amax(-1))
    assert torch.equal(y, -2 * x)


def test_stages():
    """A maximum and its index are one stage, and so are all elements of a rank in a held row.

    Loops find one after the other.
    """
    x = torch.empty(64, 256, dtype=BF16, device="meta")
    assert extremes.inspect(x).plan.stages == 1
    kernel = ranked.inspect(x, 5)
    assert kernel.plan.stages == 1 and kernel.plan.sweeps.slots == 10
    kernel = ranked.inspect(torch.empty(64, 400001, dtype=BF16, device="meta"), 5)
    assert kernel.plan.stages == 5 and kernel.plan.sweeps.slots == 10


def test_the_graph_of_a_kernel_means_the_same():
    """There the columns are numbered in int32."""
    x = random(9, 64)
    expected = extremes(x)
    found = evaluate(extremes.inspect(x).graph, {"x": x}, (9,))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


def test_a_long_row_is_read_once():
    @htile.rowwise
    def f(x):
        return x.argmax()

    kernel = f.inspect(torch.empty(64, 400001, dtype=F32, device="meta"))
    assert len(kernel.plan.sweeps.loops) == 1


def test_columns_stay_in_int32():
    x = torch.empty(64, 256, dtype=BF16, device="meta")
    indices = [node for node in extremes.inspect(x).graph if node.op is Op.INDEX]
    assert [node.value.dtype for node in indices] == [I32]


def chains_of(f, *args, **options):
    kernel = f.inspect(*args, **options)
    return kernel, chains(kernel.graph)


def test_chains():
    """Elements of 16 bits and their indices are keys of 32 bits, unless something is computed."""

    @htile.rowwise
    def f(x, y, s):
        return (
            x.topk(3).values, (-x).topk(3, largest=False).values, (x * 2).topk(3).values,
            y.topk(2).values, x.float().masked_fill(s > 0, -torch.inf).topk(4).indices,
            s.topk(5).values, s.int().topk(2).values, x.argmax(),
        )  # fmt: skip

    def bits(n):
        tensors = [torch.empty(8, n, dtype=dtype, device="meta") for dtype in (BF16, F16, F32)]
        found = chains_of(f, *tensors)[1]
        return {(len(c.results), c.smaller, c.index_bits): len(c.keys) for c in found}

    expected = {
        (3, False, 16): 1, (3, True, 16): 1, (3, False, 0): 1, (4, False, 16): 1,
        (5, False, 0): 1, (2, False, 0): 1,
    }  # fmt: skip
    assert bits(8192) == expected | {(2, False, 13): 1}
    assert bits(16384) == expected


def test_chains_of_pieces():
    """A row in pieces has one chain, and groups have one each."""

    @htile.rowwise
    def f(x, y):
        groups = x.view(4, -1)
        best = groups.topk(2).values.sum(-1)
        hidden = torch.where((best > 1)[:, None], groups, -torch.inf).flatten()
        return hidden.topk(8).indices, y.topk(3).values

    x, y = torch.randn(5, 256), torch.randn(5, 64)
    kernel, found = chains_of(f, x, y)
    sizes = sorted((len(c.results), len(c.keys)) for c in found)
    assert sizes == [(2, 1)] * 4 + [(3, 1), (8, 4)]
    assert kernel.plan.stages == 2 and kernel.source.count("ctx.ranks(") == 6
    assert kernel.plan.sweeps.slots == 4 * 2 + 3 + 8
    for a, b in zip(f(x, y), oracle(f, x, y), strict=True):
        assert torch.equal(a.double(), b.double())


def test_one_of_many_is_no_chain():
    @htile.rowwise
    def f(x):
        highest = x.amax(-1)
        return torch.where(x < highest, x, -(2**63)).amax(-1), x.int().topk(1).values

    x = torch.tensor([[3, 3, 1, 2]])
    assert not chains_of(f, x)[1] and f(x)[0].item() == 2


ARCHS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")


@pytest.mark.parametrize("arch", ARCHS)
def test_compiles(arch):
    kernel = ranked.inspect(torch.empty(64, 128, dtype=BF16, device="meta"), 4, arch=arch)
    assert kernel.resources.stack == 0


PLANS = (
    (8, 8, F32, {}), (256, 8, BF16, {"threads_per_row": 8}), (1000, 8, F16, {}),
    (256, 9, F32, {"threads_per_row": 32}), (4096, 8, BF16, {"threads_per_row": 512}),
    (4096, 16, F32, {"threads_per_row": 256}), (10007, 8, I32, {"form": "held"}),
    (16384, 8, BF16, {"form": "held", "cluster_n": 8}),
)  # fmt: skip
WITHOUT_CLUSTERS = ("sm_80", "sm_120a")


@pytest.mark.parametrize(
    ("n", "k", "dtype", "plan", "arch"),
    [
        (*each, arch)
        for each in PLANS
        for arch in ARCHS
        if arch not in WITHOUT_CLUSTERS or "cluster_n" not in each[-1]
    ],
)
def test_compiles_for_every_plan(n, k, dtype, plan, arch):
    """Whole warps compare by `redux`, and k keys of a row take one barrier.

    Where they list candidates, they first find a bound, and in another branch sort all keys. Where
    the warps of a row look for many together, `redux` counts for the bits of both bounds, finds the
    largest key up to a limit of a warp and of all, and the largest key of a warp if that is a group
    of its own. A row of one CTA takes 8 barriers.
    """

    @htile.rowwise
    def f(x):
        return tuple(x.topk(k, largest=False))

    x = torch.empty(4096, n, dtype=dtype, device="meta")
    kernel = f.with_plan(**plan).inspect(x, arch=arch)
    assert kernel.resources.stack == 0
    num, text = kernel.plan.numerics, kernel.ptx
    is_several = num.threads_per_row > 32 or num.cluster_n > 1
    words = 1 if dtype in (BF16, F16) else 2
    whole = num.threads_per_row >= 32
    if "together=True" in kernel.source:
        warps = num.threads_per_row // 32 * num.cluster_n
        assert text.count("redux.sync") == 4 + (warps >= 2 * k)
        assert text.count("bar.sync") == (8 if num.cluster_n == 1 else 5)
        return
    own = words + words + 1 if "candidates=True" in kernel.source else words
    assert text.count("redux.sync") == whole * k * (own + words * is_several)
    if num.cluster_n == 1:
        assert text.count("bar.sync") + text.count("barrier.sync") == is_several


def test_instructions():
    """An element takes a comparison of 64 bits, and the making of its key."""

    @htile.rowwise
    def f(x):
        return x.argmax()

    kernel = f.inspect(torch.empty(4096, 4096, dtype=F32, device="meta"))
    elements = kernel.plan.elements_per_thread
    text = kernel.ptx
    assert text.count("max.s64") <= elements + 12
    lines = [line for line in text.splitlines() if line.startswith("\t") and line.endswith(";")]
    assert len(lines) <= 12 * elements + 200


def test_a_stage_of_ranks_is_told_and_drawn():
    @htile.rowwise
    def f(x):
        return (x * x.softmax(-1)).topk(2).values, x.amax(), x.topk(3, largest=False).indices

    kernel = f.inspect(torch.empty(64, 256, dtype=BF16, device="meta"))
    text = kernel.plan_text
    assert "stage 1: max0 = max of x; ranks0 = the 3 smallest of key0, slot 0" in text
    assert re.search(r"stage 3: ranks1 = the 2 largest of key1, slot \d", text)
    assert "# stage 1: max, the 3 smallest" in kernel.source
    drawn = re.sub(r"<[^>]+>", "", kernel.plan_svg())
    assert "ranks0 = the 3 smallest of key0" in drawn and "max0 = max(x)" in drawn
    assert kernel.graph_svg() and kernel.graph_dot() and kernel.graph_json()


def test_elements_side_by_side_are_stored_together():
    """They have one address and one branch; those of other rows of the result have their own."""

    @htile.rowwise
    def f(x, s: htile.PerRow):
        top = x.view(4, -1).topk(2)
        return top.values, x.topk(3).indices, s + 1

    args = torch.empty(3, 5, 384, device="meta"), torch.empty(3, 5, device="meta")
    kernel = f.inspect(*args)
    text = kernel.source
    assert text.count("ctx.store_row_values(") == 5 and text.count("ctx.store_row_value(") == 1
    assert "(0, 1, 2), (key_index" in text
    assert text.count(" = view_of(") == 9 and kernel.resources.stack == 0  # and of the four groups


def wrong(f):
    return htile.rowwise(f)


def test_refused():
    x = torch.ones(3, 100)
    with pytest.raises(DtypeError, match=r"argmax of bool: .*write x\.int"):
        wrong(lambda x: x.argmax())(x.bool())
    with pytest.raises(DtypeError, match="not computed in"):
        wrong(lambda x: x.topk(2).indices)(x.to(torch.float8_e4m3fn))
    with pytest.raises(UnsupportedError, match="at most 64"):
        wrong(lambda x: x.topk(65).values)(x)
    with pytest.raises(UnsupportedError, match="at most 64"):
        wrong(lambda x: x.sort().values)(x)
    for k in (0, 101, -1, 2.0):
        with pytest.raises(ShapeError, match="from 1 to 100"):
            wrong(lambda x, k=k: x.topk(k).values)(x)
    with pytest.raises(ShapeError, match="dim=1"):
        wrong(lambda x: x.topk(2, 1).values)(x)


def test_ranks_of_groups_count_each_group_once():
    """The keys of a group are equal in all of its columns."""

    @htile.rowwise
    def f(x):
        best = x.view(8, 32).topk(2).values.sum(-1)
        return best.topk(4).indices, best.argmax()

    kernel = f.inspect(torch.empty(64, 256, device="meta"))
    assert "group=32)" in kernel.source and kernel.source.count("ctx.ranks(") == 1


def test_the_first_of_a_mask():
    """torch has it of x.max(dim) and x.min(dim), and not of argmax."""
    f = htile.rowwise(lambda x: (*(x > 0).max(-1), *(x > 5).min(0), *(x > 9).view(2, -1).max(-1)))
    x = torch.randn(6, 8)
    rows = [(*(r > 0).max(-1), *(r > 5).min(0), *(r > 9).view(2, -1).max(-1)) for r in x]
    for found, expected in zip(f(x), zip(*rows, strict=True), strict=True):
        assert found.dtype is expected[0].dtype and torch.equal(found, torch.stack(expected))

"""Functions that compute each element by itself take several of many rows as one."""

import re

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.build.arch import arch_named
from htile.frontend.dynamic import ACCESS_BYTES
from htile.frontend.reference import evaluate
from htile.lower.joining import joined, rows_together
from htile.run.launch import Launch
from htile.run.shortcuts.shortcut import CallWriter, _shortcut
from tests.request_of import request_of

BF16, F32 = torch.bfloat16, torch.float32
M = 4096  # many rows


@htile.rowwise
def gated(x, y, scale: float = 0.5):
    return F.silu(x) * y * scale, torch.where(y > 0, x, torch.zeros_like(x))


@htile.rowwise
def widened(x):
    return x.float() ** 2


def rows(n, *lead, dtype=BF16, count=2):
    return [torch.empty(*(lead or (M,)), n, dtype=dtype, device="meta") for _ in range(count)]


def graph_of(f, *args):
    return request_of(f, args).specialization.graph


# Lengths whose vectors are shorter than 16 bytes, and how many such rows are whole vectors.
@pytest.mark.parametrize(
    ("n", "dtype", "expected"),
    [
        (67, BF16, 8), (66, BF16, 4), (68, BF16, 2), (72, BF16, 1), (2, BF16, 4), (1, BF16, 1),
        (255, BF16, 8), (1002, BF16, 4), (1004, BF16, 2), (67, F32, 4), (1001, F32, 4),
        (1002, F32, 2), (1004, F32, 1), (131073, F32, 1),
    ],
)  # fmt: skip
def test_the_fewest_rows_that_are_whole_vectors(n, dtype, expected):
    assert request_of(gated, rows(n, dtype=dtype)).joined == expected
    assert n * expected % (ACCESS_BYTES // dtype.itemsize) == 0 or expected == 1


@htile.rowwise
def logit(x):
    return torch.logit(x, 1e-6)


# An element of `gated` takes a few instructions for ten bytes, and one of `logit` 24 for four.
@pytest.mark.parametrize(
    ("f", "count", "n", "expected"),
    [(gated, 2, 1001, 1), (logit, 1, 257, 8), (logit, 1, 1001, 8), (logit, 1, 16384 + 1, 1)],
)
def test_shifted_rows_are_joined_where_they_wait_for_instructions(f, count, n, expected):
    assert rows_together(graph_of(f, *rows(n, count=count))) == expected


def test_the_widest_element_says_how_long_a_vector_is():
    assert request_of(widened, rows(67, count=1)).joined == 4  # the result is float32


@htile.rowwise
def with_column(x, w):
    return x * w


@htile.rowwise
def with_value(x, s: htile.PerRow):
    return x * s


@htile.rowwise
def with_place(x):
    return x * torch.arange(x.shape[-1])


@htile.rowwise
def with_sum(x):
    return x - x.sum()


@htile.rowwise
def with_neighbour(x):
    return x + x.roll(1, -1)


@htile.rowwise
def with_halves(x):
    a, b = x.chunk(2, -1)
    return a * b


@htile.rowwise
def with_one_number(x):
    return x * 2, x[0]


@pytest.mark.parametrize(
    ("f", "more"),
    [
        (with_column, lambda n: [torch.empty(n, device="meta")]),
        (with_value, lambda n: [torch.empty(M, device="meta")]),
        (with_place, lambda n: []),
        (with_sum, lambda n: []),
        (with_neighbour, lambda n: []),
        (with_halves, lambda n: []),
        (with_one_number, lambda n: []),
    ],
    ids=lambda f: getattr(f, "__name__", ""),
)
def test_whatever_hangs_on_a_row_or_a_column_is_not_joined(f, more):
    n = 66 if f is with_halves else 67
    request = request_of(f, (*rows(n, count=1), *more(n)))
    assert request.may_join == 1 and request.joined == 1


def test_only_many_rows_that_follow_each_other():
    whole = rows(67)
    assert request_of(gated, whole).joined == 8
    assert request_of(gated, [t.view(8, -1, 67) for t in whole]).joined == 8
    for args in (
        rows(67, 1016),  # few rows
        rows(67, M + 4),  # no multiple of 8
        rows(67, 1024, 4),
        [rows(68)[0][:, :67], whole[1]],  # apart in memory
        [rows(67, 2 * M)[0][::2], whole[1]],
        [rows(67, 1)[0].expand(M, -1), whole[1]],
        [rows(67, 1)[0], whole[1]],
        [torch.empty(67, M, dtype=BF16, device="meta").t(), whole[1]],
    ):
        assert request_of(gated, args).joined == 1, args[0].shape
    beside = torch.empty(M * 67 + 1, dtype=BF16)[1:].view(M, 67)  # it begins anywhere
    request = request_of(gated, (beside, beside))
    assert request.joined == 1 and request.begins_anywhere
    out = (*rows(67, count=1), rows(68, count=1)[0][:, :67])
    assert request_of(gated, whole, out).joined == 1
    assert request_of(gated, whole, rows(67)).joined == 8


def test_a_plan_that_is_wanted():
    """It takes rows together if such a plan does. So what a kernel shows can be wanted again."""
    args = rows(67)
    plan = gated.inspect(*args).plan
    assert plan.target.joined == 8
    again = gated.with_plan(**plan.properties()).inspect(*args).plan
    assert again.target.joined == 8 and again.properties() == plan.properties()
    single = gated.with_plan(vec_size=1).inspect(*args).plan
    assert single.target.joined == 1 and single.numerics.vec_size == 1
    with pytest.raises(htile.LoweringError, match="vec_size can be 1"):
        gated.with_plan(vec_size=7).inspect(*args)


def test_elements_of_one_byte():
    x = torch.empty(M, 67, dtype=torch.uint8, device="meta")
    kernel = bits.inspect(x, x)
    assert kernel.plan.target.joined == 16 and kernel.plan.numerics.vec_size == 16


@htile.rowwise
def bits(x, y):
    return (x & y) | 1


class Host:
    """A launch that has been remembered, whose kernel notes that it ran."""

    def __init__(self, f, *args):
        request = request_of(f, args)
        lowered = request.lower(arch_named("sm_90a"))
        self.ran, target = 0, lowered.plan.target
        self.launch = Launch(
            self.kernel, lowered.source, (), (), lowered.graph.structure, torch.device("cpu"),
            target.align == ACCESS_BYTES and not request.begins_anywhere, joined=target.joined,
        )  # fmt: skip
        watched = f._captures.watched()
        self.call = _shortcut(CallWriter, request, None, f._captures, watched, self.launch)

    def kernel(self, *tensors):
        self.ran += 1

    def takes(self, *args) -> bool:
        self.ran = 0
        self.call(*args)
        return self.ran > 0


def on_cpu(n, *lead):
    """Tensors of so many rows, of which all but one leading dimension lie over each other."""
    return torch.zeros(*lead, n, dtype=BF16)


def test_which_calls_a_shortcut_takes():
    """The host function refuses what is no multiple, or does not follow; the rest is up to it."""
    joined = Host(gated, on_cpu(67, 1024), on_cpu(67, 1024))
    assert joined.launch.joined == 8
    assert joined.takes(on_cpu(67, 1032), on_cpu(67, 1032))
    assert not joined.takes(on_cpu(67, 1016), on_cpu(67, 1016))  # few rows have another kernel
    alone = Host(gated, on_cpu(67, 1025), on_cpu(67, 1025))
    assert alone.launch.joined == 1
    assert alone.takes(on_cpu(67, 1027), on_cpu(67, 1027))
    assert not alone.takes(on_cpu(67, 1024), on_cpu(67, 1024))
    apart = Host(gated, on_cpu(68, 1024)[:, :67], on_cpu(67, 1024))
    assert apart.takes(on_cpu(68, 1024)[:, :67], on_cpu(67, 1024))
    assert not apart.takes(on_cpu(67, 1024), on_cpu(67, 1024))
    repeated = Host(gated, on_cpu(67, 1), on_cpu(67, 1024))
    assert repeated.takes(on_cpu(67, 1), on_cpu(67, 1024))
    assert not repeated.takes(on_cpu(67, 1024), on_cpu(67, 1024))


def test_a_shortcut_takes_no_more_rows_than_a_kernel_counts():
    lead = 1 << 13, 1 << 13
    request = request_of(doubled, (torch.empty(*lead, 2, dtype=BF16, device="meta"),))
    assert request.joined == 4
    lowered = request.lower(arch_named("sm_90a"))
    launch = Launch(print, lowered.source, (), (), None, torch.device("meta"), True, joined=4)
    watched = doubled._captures.watched()
    writer = CallWriter(request, None, doubled._captures, watched, launch)
    (test,) = [line for line in writer.rows_read() if line.startswith("if")]
    found = [int(number) for number in re.findall(r"\b\d+\b", test.split(":")[0])]
    assert max(found) == 2**31, test


@htile.rowwise
def doubled(x):
    return x * 2


@htile.rowwise
def named(x):
    return {"x": x * 2}


def test_a_result_with_the_name_of_an_argument():
    apart, whole = rows(68, count=1)[0][:, :67], rows(67, count=1)[0]
    assert request_of(named, (apart,), (whole,)).joined == 1
    assert request_of(named, (whole,), (apart,)).joined == 1
    assert request_of(named, (whole,), (whole,)).joined == 8


def test_joined_rows_that_were_shifted_need_no_shift():
    plans = [logit.inspect(*rows(1001, m, count=1)).plan for m in (M, M + 1)]
    found = [(plan.target.joined, plan.placement.shifted) for plan in plans]
    assert found == [(8, False), (1, True)]


@htile.rowwise
def polynomial(x, coefficients: htile.Shared):
    c = coefficients
    return (c[0] * x + c[1]) * x + c[2]


@pytest.mark.parametrize(
    ("lead", "counted"),
    [((M,), "mOut.shape[0] // 8"), ((64, 64), "cute.size(mOut.shape[:2]) // 8")],
    ids=str,
)
def test_the_grid_has_a_thread_block_for_each_joined_row(lead, counted):
    """Also where the kernel itself takes the elements of a vector, and joins the rows."""
    x = torch.empty(*lead, 67, dtype=BF16, device="meta")
    kernel = polynomial.inspect(x, torch.empty(3, device="meta"), arch="sm_90a")
    assert kernel.plan.target.joined == 8
    assert f"grid=config.grid({counted})" in kernel.source, kernel.source


@pytest.mark.parametrize("n", [66, 67, 1002])
def test_the_graph_of_joined_rows_computes_the_same(n):
    graph = graph_of(gated, *rows(n))
    count = rows_together(graph)
    longer = joined(graph, count)
    x, y = (torch.randn(16, n) for _ in range(2))
    expected = evaluate(graph, {"x": x, "y": y, "scale": 0.5}, (16,))
    given = {"x": x.view(-1, n * count), "y": y.view(-1, n * count), "scale": 0.5}
    found = evaluate(longer, given, (16 // count,))
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a.view(16, n), b)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_100a", "sm_120a"])
@pytest.mark.parametrize("lead", [(M,), (64, 64)], ids=str)
def test_its_kernel_moves_16_bytes_at_a_time(lead, arch):
    kernel = gated.inspect(*rows(67, *lead), arch=arch)
    assert kernel.plan.target.joined == 8 and kernel.plan.numerics.vec_size == 8
    assert "8 rows of 67 are one" in kernel.plan_text
    if arch == "sm_90a":
        assert "ld.global.nc.v4" in kernel.ptx or "ld.global.v4" in kernel.ptx, kernel.ptx
        assert "st.global.v4" in kernel.ptx

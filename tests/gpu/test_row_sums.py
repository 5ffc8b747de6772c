"""Sums and maxima over all rows on a GPU: values, bits, streams, graphs, other results."""

import math

import pytest
import torch

import htile
from htile.errors import ArgumentError
from htile.testing import assert_close, float32_errors
from tests.lower.backward import layernorm_backward, rmsnorm_backward, totals

pytestmark = pytest.mark.gpu

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = (BF16, F16, F32)
SIZES = (64, 1000, 1003, 4096, 6144, 8192)
SHORT = (1, 2, 3, 5, 8, 24, 100, 130)
LONG = (16384, 20001, 32768)  # in clusters, where the GPU has them
MANY = 5000
DRAWS = 5  # of data, over which torch's own error is the largest

rmsnorm, layernorm = htile.rowwise(rmsnorm_backward), htile.rowwise(layernorm_backward)
every = htile.rowwise(totals)


@htile.rowwise
def added(x):
    return htile.sum_rows(x)


@htile.rowwise
def without_sum(dy, x, weight, eps: float = 1e-6):
    return rmsnorm_backward(dy, x, weight, eps)[0]


@htile.rowwise
def layernorm_without_sums(dy, x, weight, bias, eps: float = 1e-5):
    return layernorm_backward(dy, x, weight, bias, eps)[0]


@htile.rowwise
def losses(x, y: htile.PerRow):
    loss = torch.logsumexp(x, -1) - x[y]
    return htile.sum_rows(loss), htile.max_rows(loss), loss


@htile.rowwise
def in_parts(x):
    a, b = x[0::2], x[1::2]
    return htile.sum_rows(torch.stack((-b, a), -1).flatten()), htile.sum_rows(a * b), x.amax()


def data(m, n, dtype, count=1, seed=0):
    torch.manual_seed(seed)
    made = [torch.randn(m, n, device="cuda").to(dtype) for _ in range(count)]
    return made if count > 1 else made[0]


def groups(f, *args):
    """How many groups the rows of a call are dealt to."""
    return f.inspect(*args).plan.numerics.groups


@htile.rowwise
def added_heads(x, d: htile.Static):
    return htile.sum_rows(x.view(-1, d).sum(0))


@htile.rowwise
def head_norm(x, w: htile.Shared):
    return torch.nn.functional.rms_norm(x.view(-1, w.shape[0]), w.shape, w, 1e-6).flatten()


def in_order(x, plan, heads=1):
    """The sum of float32 rows in the order that the plan says, by additions of torch.

    heads: into how many groups of columns each part is divided, which are added up, too.
    """
    count, rows = plan.numerics.groups, plan.rows_per_block
    total = x.new_zeros(count, x.shape[-1])
    for start in range(0, len(x), count):
        some = x[start : start + count]
        total[: len(some)] += some
    parts = total.view(plan.parts, rows, -1)
    distance = rows // 2
    while distance:
        parts = parts[:, :distance] + parts[:, distance : 2 * distance]
        distance //= 2
    parts = parts[:, 0].reshape(plan.parts * heads, -1)
    height = 16 if heads == 1 else 64
    terms = parts.new_zeros(height, parts.shape[-1])
    for start in range(0, len(parts), height):
        some = parts[start : start + height]
        terms[: len(some)] += some
    while len(terms) > 1:
        terms = terms[: len(terms) // 2] + terms[len(terms) // 2 :]
    return terms[0]


# ---- values --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", SIZES)
def test_backward_passes(n, dtype):
    dy, x = data(MANY, n, dtype, 2)
    w, b = data(2, n, dtype)
    assert_close(rmsnorm, rmsnorm(dy, x, w), dy, x, w)
    assert_close(layernorm, layernorm(dy, x, w, b), dy, x, w, b)


@pytest.mark.parametrize("n", LONG)
def test_long_rows(n):
    if torch.cuda.get_device_capability()[0] not in (9, 10):
        pytest.skip("such rows need clusters")
    dy, x = data(700, n, BF16, 2)
    w = data(1, n, BF16)[0]
    assert_close(rmsnorm, rmsnorm(dy, x, w), dy, x, w)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", (*SHORT, 1000, 1003, 4096))
def test_every_kind_of_result(n, dtype):
    x = data(MANY, n, dtype)
    results = every(x)
    # torch's error of few numbers may be small by chance
    errors = [float32_errors(every, data(MANY + k, n, dtype)) for k in range(DRAWS)]
    assert_close(every, results, x, torch_errors=[*map(max, *errors)])
    assert torch.equal(results[2], x.float().amax(0))
    assert torch.equal(results[3], (x > 0).sum(0))


@pytest.mark.parametrize("n", [64, 1003, 4096])
@pytest.mark.parametrize("far", [0, 1, -1, "twice", "one"])
def test_numbers_of_rows_about_the_number_of_groups(n, far):
    probe = data(2, n, F32)
    count = groups(every, probe)
    m = {"twice": 2 * count + 1, "one": 1}.get(far) or count + far
    x = data(m, n, F32)
    results = every(x)
    errors = [float32_errors(every, data(m + k, n, F32)) for k in range(DRAWS)]
    assert_close(every, results, x, torch_errors=[*map(max, *errors)])
    assert torch.equal(results[2], x.amax(0))
    assert torch.equal(results[3], (x > 0).sum(0))


def test_no_rows():
    x = data(0, 64, BF16)
    assert torch.equal(added(x), torch.zeros(64, device="cuda"))
    out = torch.ones(64, device="cuda")
    added(x, out=out)
    assert not out.any()
    with pytest.raises(ArgumentError, match="there are none"):
        every(x)


@pytest.mark.parametrize("n", [64, 1000, 4096])
def test_leading_dimensions_and_rows_that_lie_anyhow(n):
    dy, x = data(600, n + 8, BF16, 2)
    w = data(1, n, BF16)[0]
    for first in (0, 1, 8):
        views = [each[:, first : first + n] for each in (dy, x)]
        assert_close(rmsnorm, rmsnorm(*views, w), *views, w)
    shaped = [each[:, :n].reshape(20, 30, n) for each in (dy, x)]
    assert_close(rmsnorm, rmsnorm(*shaped, w), *shaped, w)
    strided = [each.transpose(0, 1) for each in shaped]
    assert_close(rmsnorm, rmsnorm(*strided, w), *strided, w)
    repeated = shaped[0][:1], shaped[1]
    assert_close(rmsnorm, rmsnorm(*repeated, w), *repeated, w)
    one = [each[0, 0] for each in shaped]
    assert_close(rmsnorm, rmsnorm(*one, w), *one, w)


@pytest.mark.parametrize("n", [1000, 32000])
def test_numbers_of_each_row(n):
    x = data(3000, n, BF16)
    y = torch.randint(n, (3000,), device="cuda")
    assert_close(losses, losses(x, y), x, y)


def test_parts_of_rows():
    x = data(3000, 1024, BF16)
    assert_close(in_parts, in_parts(x), x)


def test_nan_and_infinities():
    x = data(3000, 256, F32)
    x[1234, 5], x[2999, 6], x[0, 7], x[17, 8], x[900, 8] = math.nan, math.inf, -math.inf, 1e38, 3e38
    total, _, largest, _ = every(x)
    assert torch.equal(total.isnan(), torch.arange(256, device="cuda") == 5)
    assert total[6] == math.inf and total[7] == -math.inf and total[8] == math.inf
    assert torch.equal(largest.nan_to_num(nan=-1), x.amax(0).nan_to_num(nan=-1))
    assert largest[5].isnan()


def test_rows_beyond_the_last_do_not_count():
    """Memory behind the rows is NaN, and neither groups without a row nor padding may show it."""
    for n in (3, 1000, 1003, 4096):
        x = torch.full((4000, n), math.nan, device="cuda")
        x[:777] = data(777, n, F32)
        assert_close(every, every(x[:777]), x[:777])


# ---- bits ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [3, 64, 1000, 1003, 4096, 8192])
@pytest.mark.parametrize("m", [1, 100, MANY])
def test_the_order_is_the_one_that_is_promised(n, m):
    x = data(m, n, F32)
    assert torch.equal(added(x), in_order(x, added.inspect(x).plan))


@pytest.mark.parametrize(("n", "d"), [(96, 3), (1000, 8), (2048, 64), (8192, 128), (1003, 17)])
@pytest.mark.parametrize("m", [1, 100, MANY])
def test_groups_are_added_up_in_the_order_that_is_promised(n, d, m):
    x = data(m, n, F32)
    plan = added_heads.inspect(x, d).plan
    assert torch.equal(added_heads(x, d), in_order(x, plan, n // d))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("n", "d"), [(128, 64), (2048, 64), (1024, 128), (8192, 64), (600, 8), (96, 3)]
)
def test_gradients_of_a_weight_that_heads_share(n, d, dtype):
    x, g = data(MANY, n, dtype, 2)
    w = data(1, d, dtype)[0]
    x.requires_grad_(), w.requires_grad_()
    found = torch.autograd.grad(head_norm(x, w), (x, w), g)
    again = torch.autograd.grad(head_norm(x, w), (x, w), g)
    assert all(map(torch.equal, found, again))
    wide = [each.detach().double().requires_grad_() for each in (x, w)]
    rows = torch.nn.functional.rms_norm(wide[0].view(MANY, -1, d), (d,), wide[1], 1e-6)
    exact = torch.autograd.grad(rows.flatten(1), wide, g.double())
    eps = torch.finfo(dtype).eps
    for a, b in zip(found, exact, strict=True):
        assert a.dtype is dtype and a.shape == b.shape
        assert (a.double() - b).norm() <= max(eps, 4e-6) * b.norm()


@pytest.mark.parametrize("n", [64, 1000, 1003, 4096, 8192])
def test_bits_do_not_depend_on_runs_layouts_or_rows_of_zeros(n):
    dy, x = data(MANY, n, BF16, 2)
    w = data(1, n, BF16)[0]
    first = rmsnorm(dy, x, w)[1]
    for _ in range(3):
        assert torch.equal(rmsnorm(dy, x, w)[1], first)
    wide = [torch.empty(MANY, n + 1, dtype=BF16, device="cuda")[:, 1:].copy_(t) for t in (dy, x)]
    assert torch.equal(rmsnorm(*wide, w)[1], first)
    for more in (1, 300, 20000):
        longer = [torch.cat((t, torch.zeros(more, n, dtype=BF16, device="cuda"))) for t in (dy, x)]
        assert torch.equal(rmsnorm(*longer, w)[1].view(torch.int32), first.view(torch.int32))
    for loader in ("shared", "direct"):
        try:
            other = rmsnorm.with_plan(loader=loader)(dy, x, w)[1]
        except htile.LoweringError:
            continue  # shifted rows are not loaded so
        assert torch.equal(other, first)


@pytest.mark.parametrize("n", [64, 1000, 1003, 4096, 6144, 8192])
@pytest.mark.parametrize("m", [1, MANY])
def test_results_of_rows_keep_their_bits(n, m):
    dy, x = data(m, n, BF16, 2)
    w, b = data(2, n, BF16)
    assert torch.equal(rmsnorm(dy, x, w)[0], without_sum(dy, x, w))
    assert torch.equal(layernorm(dy, x, w, b)[0], layernorm_without_sums(dy, x, w, b))


# ---- calls ---------------------------------------------------------------------------------------


def test_two_streams():
    dy, x = data(MANY, 4096, BF16, 2)
    w = data(1, 4096, BF16)[0]
    expected = rmsnorm(dy, x, w)[1]
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for _ in range(20):
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(rmsnorm(dy, x, w)[1])
    torch.cuda.synchronize()
    assert all(torch.equal(each, expected) for each in found)


def test_calls_behind_each_other_and_behind_other_kernels():
    w = data(1, 1000, BF16)[0]
    for seed in range(20):
        dy, x = data(300 + 100 * seed, 1000, BF16, 2, seed)
        first = rmsnorm(dy * 2, x, w)[1]
        second = rmsnorm(dy, x, w)[1] * 2
        assert torch.allclose(first, second, rtol=1e-5, atol=1e-4)


def test_out():
    dy, x = data(MANY, 4096, BF16, 2)
    w = data(1, 4096, BF16)[0]
    dx, dw = rmsnorm(dy, x, w)
    whole = torch.zeros(4096 * 3, device="cuda")
    out = torch.empty_like(x), whole[4097 : 2 * 4096 + 1]
    assert rmsnorm(dy, x, w, out=out) is out
    assert torch.equal(out[0], dx) and torch.equal(out[1], dw)
    assert not whole[:4097].any() and not whole[2 * 4096 + 1 :].any()
    copied = x.clone()
    rmsnorm(dy, copied, w, out=(copied, out[1]))
    assert torch.equal(copied, dx) and torch.equal(out[1], dw)


def test_a_cuda_graph_is_replayed_with_new_data():
    dy, x = data(MANY, 4096, BF16, 2)
    w = data(1, 4096, BF16)[0]
    rmsnorm(dy, x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = rmsnorm(dy, x, w)
        again = rmsnorm(dy, x, w)[1] * 2
    for seed in range(3):
        for old, new in zip((dy, x), data(MANY, 4096, BF16, 2, seed + 1), strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        expected = rmsnorm(dy, x, w)
        assert all(map(torch.equal, results, expected))
        assert torch.equal(again, expected[1] * 2)


def test_a_kernel_that_was_compiled_ahead():
    dy, x = data(50, 512, BF16, 2)
    w = data(1, 512, BF16)[0]
    compiled = rmsnorm.compile(dy, x, w)
    assert compiled.resources.stack == 0
    assert_close(rmsnorm, rmsnorm(dy, x, w), dy, x, w)


def test_it_is_tuned(tmp_path, monkeypatch):
    monkeypatch.setenv("HTILE_CACHE_DIR", str(tmp_path))
    fresh = htile.rowwise(rmsnorm_backward)
    dy, x = data(20000, 2048, BF16, 2)
    w = data(1, 2048, BF16)[0]
    before = rmsnorm(dy, x, w)
    fresh.tune(dy, x, w, seconds=5, progress=False)
    assert all(map(torch.equal, fresh(dy, x, w), before))


def test_many_rows():
    """More rows than 16 bits count, of few elements: each group has many."""
    x = data(3_000_000, 8, F32)
    assert_close(added, added(x), x)

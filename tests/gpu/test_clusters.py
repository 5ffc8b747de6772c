"""Rows longer than one CTA holds: clusters of 2 to 16, rows kept in registers or read again."""

import itertools
import math
from collections import Counter, defaultdict

import pytest
import torch
import torch.nn.functional as F

import htile
from benchmarks.kernels import cross_entropy, cross_entropy_arguments
from htile.lower import choose, enumerate_plans
from htile.lower.plan import ROWS, Form
from htile.lower.reductions import VERY_LONG_N
from htile.testing import assert_close, float32_errors

from .matrix import (
    BF16,
    EXAMPLES,
    F16,
    F32,
    assert_same_bits,
    job,
    rows_of,
    run,
    seed,
    shifted,
    short,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("compiles_nothing")]

NAMES = (
    "softmax", "rmsnorm_residual", "layernorm", "norm_softmax", "capped_softmax", "log_softmax",
)  # fmt: skip
SIZES = (16385, 20000, 32768, 65536, 65537, 131072, 131073, 262144)
DTYPES = (BF16, F16, F32)
BATCHES = (64, 3, 1, 0)
FORCED = (32768, 65536)
CLUSTERS = (2, 4, 8, 16)


IN_F16 = (20000, 65537)  # the lengths that float16 has too
CASES = [
    (name, n, dtype)
    for name in NAMES for n in SIZES for dtype in (DTYPES if n in IN_F16 else (BF16, F32))
]  # fmt: skip
STREAMED = (1 << 21, (1 << 22) + 1)
EXCHANGED = (20003, 32768)  # kept in shared memory, where a mean and the squares are one exchange
OF_SHARES = (12000, 20003, 32768, 65536, 300040)
OF_MANY_CHUNKS = 66 * 32768  # in two levels, of whose last chunk nothing is left to the end


@htile.rowwise
def labelled(x, label: htile.PerRow, weight):
    """A value per row in, two out."""
    y = x * weight + label
    top = y.amax()
    return torch.exp(y - top), top, (x > 0).sum()


def labelled_arguments(m, n, dtype, device):
    x, weight = torch.randn(m, n, device=device), torch.randn(n, device=device)
    return x.to(dtype), torch.arange(m, device=device) % 3, weight.to(dtype)


def _rows(count):
    def arguments(m, n, dtype, device):
        return tuple(torch.randn(m, n, device=device).to(dtype) for _ in range(count))

    return arguments


@htile.rowwise
def readings(x):
    return x.sum(), x.amax(), (x > 0).sum(), (x > 3).any()


@htile.rowwise
def scaled_moments(x):
    """The loop that stores gathers a mean and the squares about it."""
    y = x / (x.abs().sum() + 1)
    mean = y.mean()
    return y, mean, (y - mean).square().sum()


@htile.rowwise
def spread_of_exponentials(x):
    """What follows a maximum and its sum of exponentials is about that sum."""
    e = torch.exp(x - x.amax())
    return (e - e.sum() / x.shape[-1]).square().sum()


@htile.rowwise
def weighted_softmax(x, weight):
    """A product that two read: rounded for both, in every loop."""
    return torch.softmax(x * weight, -1)


@htile.rowwise
def weighted_norm(x, weight):
    """The same in a mean and the squares about it, and in what is stored."""
    return F.layer_norm(x * weight, x.shape[-1:])


def _weighted(m, n, dtype, device):
    x, weight = torch.randn(m, n, device=device), torch.randn(n, device=device)
    return x.to(dtype), weight.to(dtype)


SHARED_NAMES = ("layernorm", "rmsnorm_residual", "log_softmax", "norm_softmax")
SHARED = {name: EXAMPLES[name] for name in SHARED_NAMES}
SHARED |= {f.__name__: (f, _rows(1)) for f in (readings, scaled_moments, spread_of_exponentials)}


@htile.rowwise
def sum_and_logsumexp(x):
    """A pair that is gathered ahead of its sum."""
    return x.sum(), torch.logsumexp(x, -1)


@htile.rowwise
def deviations(x):
    """A mean, and the squares about it, in one exchange."""
    mean = x.mean()
    return mean, ((x - mean) ** 2).sum()


def _ascending(m, n, dtype, device):
    """Rows that ascend, so that a sum is moved to new maxima to the end."""
    (x,) = _rows(1)(m, n, dtype, device)
    return ((x + torch.linspace(0, 8, n, device=device)).to(dtype),)


SHARED["sum_and_logsumexp"] = sum_and_logsumexp, _ascending
SHARED["deviations"] = deviations, _rows(1)
WEIGHTED = {f.__name__: (f, _weighted) for f in (weighted_softmax, weighted_norm)}
SHARED |= WEIGHTED
SHARED["labelled"] = labelled, labelled_arguments
SHARED["cross_entropy"] = cross_entropy, cross_entropy_arguments


# Every function has half of the lengths in each dtype, because all plans of each are compiled.
SHARED_CASES = [
    (name, n, (BF16, F32)[(i + k) % 2])
    for i, name in enumerate(SHARED) for k, n in enumerate(OF_SHARES)
]  # fmt: skip
SHARED_CASES += [("sum_and_logsumexp", OF_MANY_CHUNKS, dtype) for dtype in (BF16, F32)]


def many_rows(n):
    """As many as have several shares of a row a CTA."""
    return ROWS[-1] if n <= VERY_LONG_N else 64


def _order(numerics):
    return numerics.cluster_n, numerics.threads_per_row, numerics.form is Form.STREAMED


def shared(name, n, dtype, arch):
    """The function with all plans of three numerics, one share of a row a CTA and several."""
    f, arguments = SHARED[name]
    kernel = f.inspect(*arguments(many_rows(n), n, dtype, "meta"), arch=arch)
    plans = enumerate_plans(kernel.graph, kernel.plan.target)
    numerics = {p.numerics for p in plans if p.placement.shares > 1}
    assert numerics
    picked = {pick(numerics, key=_order) for pick in (min, max)}
    for num in picked | numerics & {kernel.plan.numerics}:
        for plan in plans:
            place = plan.placement
            if plan.numerics == num:
                key = {name: getattr(place, name) for name in ("loader", "shares", "num_threads")}
                yield (num, *key.values()), f.with_plan(**num.properties(), **key)


@htile.rowwise
def centered(x):
    mean = x.mean()
    return x - mean, mean, ((x - mean) ** 2).sum()


@htile.rowwise
def residual_norm(x, residual):
    h = x + residual
    return F.layer_norm(h, h.shape), h


@htile.rowwise
def twice_centered(x):
    """Two sums and the squares about their means, one after the other."""
    y = F.layer_norm(x, x.shape)
    return F.layer_norm(y * y, x.shape), y


@htile.rowwise
def residual_softmax(x, residual):
    return torch.softmax(x + residual, -1)


@htile.rowwise
def exp_sum(x):
    m = x.max()
    return torch.exp(x - m).sum(), m


def _cross_entropy_arguments(m, n, dtype, device):
    return *_rows(1)(m, n, dtype, device), torch.zeros(m, device=device)


# What gathers two reductions in one loop.
ONLINE = {name: EXAMPLES[name] for name in ("softmax", "log_softmax", "norm_softmax")}
ONLINE |= {
    "centered": (centered, _rows(1)),
    "residual_norm": (residual_norm, _rows(2)),
    "twice_centered": (twice_centered, _rows(1)),
    "residual_softmax": (residual_softmax, _rows(2)),
    "exp_sum": (exp_sum, _rows(1)),
    "scaled_moments": (scaled_moments, _rows(1)),
    "spread_of_exponentials": (spread_of_exponentials, _rows(1)),
    "cross_entropy": (cross_entropy, _cross_entropy_arguments),
}
HEAVY = ("softmax", "cross_entropy", "centered", "residual_norm")


# Where 0 behind the end of a row, in place of the identity, would be seen in negative rows.
BEHIND = {
    "sum_and_max": lambda x: (x.sum(), x.max(), (-x).min()),
    "max": lambda x: x.max(),
    "logsumexp_and_mean": lambda x: torch.logsumexp(x, -1) - x.mean(),
    "logsumexp": lambda x: torch.logsumexp(x, -1),
    "softmax": lambda x: torch.softmax(x, -1),
    "max_of_column": lambda x, w: x * w.max(),
}
BEHIND = {name: htile.rowwise(f) for name, f in BEHIND.items()}
RAGGED = (12000, 20001, 50257, 300001)
HUGE = (1000, 12000, 65536, 1 << 20)


def negative(name, m, n, dtype, device):
    """Rows, and a column if the function takes one, with no element above -1."""
    row, column = -1 - torch.rand(m, n, device=device), -1 - torch.rand(n, device=device)
    return tuple(x.to(dtype) for x in (row, column)[: 1 + (name == "max_of_column")])


def huge(n, dtype, device):
    """Rows whose products are far apart: neighbours in float32 differ by more than exp bears."""
    x, weight = _weighted(5, n, dtype, device)
    return x * 1e25, weight


def plans(name, n, dtype, arch):
    """(the function with that plan, the plan): the best of each cluster, form and loader."""
    f, arguments = EXAMPLES[name]
    kernel = f.inspect(*arguments(3, n, dtype, "meta"), arch=arch)
    found = defaultdict(list)
    for plan in enumerate_plans(kernel.graph, kernel.plan.target):
        num = plan.numerics
        if num.cluster_n > 1:
            found[num.cluster_n, num.in_loops, plan.placement.loader].append(plan)
    for some in found.values():
        plan = choose(some)
        yield f.with_plan(**plan.properties()), plan


def jobs(arch):
    """The default plan of every case, aligned and not; and every kind of plan, forced."""
    for name, n, dtype in CASES:
        f, arguments = EXAMPLES[name]
        for m in BATCHES:
            yield job(f, arguments(m, n, dtype, "meta"), arch)
    for (f, arguments), n, dtype in itertools.product(MOVED.values(), FORCED, DTYPES):
        args = arguments(5, n, dtype, "meta")
        for elements in (0, *OFFSETS):
            moved = [shifted(a, elements) if a.ndim > 1 and elements else a for a in args]
            yield job(f, moved, arch)
    for name in ALIGNED:
        for n in FORCED:
            for dtype in (BF16, F32):
                for forced, _ in plans(name, n, dtype, arch):
                    yield job(forced, EXAMPLES[name][1](3, n, dtype, "meta"), arch)
    for name in NAMES:
        for n in STREAMED:
            for dtype in (BF16, F32):
                yield job(EXAMPLES[name][0], EXAMPLES[name][1](5, n, dtype, "meta"), arch)
    for f, arguments in ONLINE.values():
        for n in STREAMED:
            for dtype in (BF16, F32):
                args = arguments(5, n, dtype, "meta")
                yield job(f, args, arch)
                yield job(f, [shifted(a, 1) if a.ndim > 1 else a for a in args], arch)
        for n, m, dtype in itertools.product(EXCHANGED, (4, 12), (BF16, F32)):
            yield job(f, arguments(m, n, dtype, "meta"), arch)
    for name, f in BEHIND.items():
        for n, m, dtype in itertools.product(RAGGED, (3, 300), (BF16, F32)):
            yield job(f, negative(name, m, n, dtype, "meta"), arch)
    for name, n, dtype in SHARED_CASES:
        for _, forced in shared(name, n, dtype, arch):
            yield job(forced, SHARED[name][1](many_rows(n), n, dtype, "meta"), arch)
    for n, dtype in itertools.product(HUGE, (BF16, F32)):
        yield job(weighted_softmax, huge(n, dtype, "meta"), arch)


ALIGNED = ("softmax", "rmsnorm_residual")
MOVED = {name: EXAMPLES[name] for name in ALIGNED} | WEIGHTED
OFFSETS = (4, 2, 1)


@pytest.mark.parametrize(("name", "n", "dtype"), CASES, ids=short)
def test_long_rows(device, name, n, dtype):
    """Right, and each row the same bits in every batch."""
    f, arguments = EXAMPLES[name]
    seed(name, n, dtype)
    args = arguments(max(BATCHES), n, dtype, device)
    errors = float32_errors(f, *args)
    whole = run(f, *args)
    assert_close(f, whole, *args, torch_errors=errors)
    for m in BATCHES:
        part = [a[:m] if _is_rows(a, len(args[0])) else a for a in args]
        assert_same_bits(run(f, *part), rows_of(whole, slice(0, m)), m)


def _is_rows(tensor, m) -> bool:
    return tensor.shape[0] == m and (tensor.ndim > 1 or tensor.shape == (m,))


@pytest.mark.parametrize("dtype", [BF16, F32], ids=short)
@pytest.mark.parametrize("n", HUGE)
def test_a_maximum_of_products_is_certain(device, n, dtype):
    """Were it rounded for the maximum and not for the difference, exp would be 0 or infinite."""
    seed("huge", n, dtype)
    args = huge(n, dtype, device)
    result = run(weighted_softmax, *args)
    assert_close(weighted_softmax, result, *args)
    assert (result.amax(-1) == 1).all()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=short)
@pytest.mark.parametrize("n", FORCED)
@pytest.mark.parametrize("name", ALIGNED)
def test_every_cluster(device, arch, name, n, dtype):
    """Clusters of 2 to 16, rows kept and read again, both loaders: right, and equal by numerics."""
    seed(name, n, dtype)
    args = EXAMPLES[name][1](67, n, dtype, device)
    errors = float32_errors(EXAMPLES[name][0], *args)
    results, reached = {}, Counter()
    for forced, plan in plans(name, n, dtype, arch):
        result = run(forced, *args)
        reached[plan.numerics.cluster_n, plan.numerics.in_loops, plan.placement.loader] += 1
        assert_close(forced, result, *args, torch_errors=errors)
        assert_same_bits(result, results.setdefault(plan.numerics, result), plan)
    print(dict(reached))
    clusters = {cluster for cluster, *_ in reached}
    assert clusters >= {c for c in CLUSTERS if c >= (8 if n == 65536 else 4)}, reached
    assert {loader for *_, loader in reached} == {"shared", "direct"}
    assert {in_loops for _, in_loops, _ in reached} >= {True}


@pytest.mark.parametrize("elements", OFFSETS)
@pytest.mark.parametrize("dtype", DTYPES, ids=short)
@pytest.mark.parametrize("n", FORCED)
@pytest.mark.parametrize("name", MOVED)
def test_alignment_changes_no_bit(device, name, n, dtype, elements):
    f, arguments = MOVED[name]
    seed(name, n, dtype)
    args = arguments(5, n, dtype, device)
    moved = [shifted(a, elements) if a.ndim > 1 else a for a in args]
    assert moved[0].data_ptr() % 16 == elements * dtype.itemsize % 16
    assert_same_bits(run(f, *moved), run(f, *args), elements)


@pytest.mark.parametrize("value", [math.nan, -math.inf, math.inf], ids=str)
@pytest.mark.parametrize("n", [32768, 65537, 131072])
@pytest.mark.parametrize("dtype", [BF16, F32], ids=short)
@pytest.mark.parametrize("name", ["softmax", "log_softmax"])
def test_special_values_in_the_lanes_of_each_cta(device, name, dtype, n, value):
    """One of them in a row of its own: at the first, last and middle column of each CTA's share."""
    f, _ = EXAMPLES[name]
    seed(name, n)
    columns = sorted(
        {min(max(n * k // 16 + shift, 0), n - 1) for k in range(17) for shift in (-1, 0, 1, 777)}
    )
    x = torch.randn(len(columns) + 3, n, device=device).to(dtype)
    x[range(len(columns)), columns] = value
    x[-3], x[-2] = -math.inf, math.nan
    x[-1] = -math.inf
    x[-1, n // 2 + 5] = 1.0  # all CTAs but one see nothing but -inf
    result = run(f, x)
    assert_close(f, result, x)
    rows = result if name == "softmax" else result[0]
    if value == -math.inf:
        assert rows[: len(columns)].isnan().sum() == 0
    else:
        assert rows[: len(columns)].isnan().any(-1).all()
    assert rows[-3:-1].isnan().all()
    assert not rows[-1].isnan().any()


@pytest.mark.parametrize("dtype", [BF16, F32], ids=short)
@pytest.mark.parametrize("n", STREAMED)
@pytest.mark.parametrize("name", NAMES)
def test_rows_that_fit_no_cluster_are_streamed(device, name, n, dtype):
    f, arguments = EXAMPLES[name]
    seed(name, n, dtype)
    args = arguments(5, n, dtype, device)
    assert f.inspect(*args).plan.placement.loader == "direct"
    result = run(f, *args)
    assert_close(f, result, *args)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=short)
@pytest.mark.parametrize("n", STREAMED)
@pytest.mark.parametrize("name", ONLINE)
def test_loops_over_streamed_rows_carry_reductions_of_two_stages(device, name, n, dtype):
    """Right, and each row the same bits in every batch and at every alignment."""
    f, arguments = ONLINE[name]
    seed(name, n, dtype)
    args = arguments(5, n, dtype, device)
    plan = f.inspect(*args).plan
    assert plan.numerics.form is Form.STREAMED and plan.sweeps.carries_two_stages
    result = run(f, *args)
    assert_close(f, result, *args)
    for m in (3, 1):
        part = [a[:m] for a in args]
        assert_same_bits(run(f, *part), rows_of(result, slice(0, m)), m)
    moved = [shifted(a, 1) if a.ndim > 1 else a for a in args]
    assert_same_bits(run(f, *moved), result)


def special_rows(n, dtype, device):
    """A row of each kind that sums and maxima of parts of it could get wrong."""
    inf, middle = math.inf, n // 2 + 5
    x = torch.randn(12, n, device=device)
    x[0], x[1], x[2] = -inf, inf, math.nan
    x[3, 0] = x[4, n - 1] = x[5, middle] = inf
    x[6, middle] = -inf
    x[7, middle], x[7, 0] = inf, -inf
    x[8, n - 1] = math.nan
    x[9] = -inf
    x[9, middle] = 1.0  # all threads but one see nothing but -inf
    x[10] = 1e6
    x[11] = 200.0  # exp of it is infinite, and no thread but one knows why
    x[11, middle] = inf
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=short)
@pytest.mark.parametrize("n", (*STREAMED, *EXCHANGED))
@pytest.mark.parametrize("name", ONLINE)
def test_special_values_in_rows_of_many_threads(device, name, n, dtype):
    f, arguments = ONLINE[name]
    x = special_rows(n, dtype, device)
    others = arguments(len(x), n, dtype, "meta")[1:]
    args = [x, *(torch.zeros(a.shape, dtype=a.dtype, device=device) for a in others)]
    result = run(f, *args)
    assert_close(f, result, *args)
    if name == "centered":
        assert not result[0][10].any() and not result[2][10].any(), "a constant row is its mean"


@pytest.mark.parametrize("name", HEAVY)
def test_heavy_tails_of_streamed_rows(device, name):
    """Most of a sum is a few terms of it, and the many that are tiny beside it count too."""
    f, arguments = ONLINE[name]
    n = STREAMED[-1]
    seed(name)
    args = [4 * a if a.ndim > 1 else a for a in arguments(8, n, F32, device)]
    assert_close(f, run(f, *args), *args)


def test_no_sum_of_a_streamed_row_is_biased(device):
    """The mean relative error over rows; in one level it is -2.4e-6."""
    seed("biased")
    x = 4 * torch.randn(16, STREAMED[-1], device=device)
    total, peak = run(exp_sum, x)
    exact = torch.exp(x.double() - peak.double()[:, None]).sum(-1)
    assert_same_bits(peak, x.amax(-1))
    assert ((total.double() - exact) / exact).mean().abs() < 2e-7


@pytest.mark.parametrize("n", (STREAMED[-1], *EXCHANGED))
def test_a_mean_far_from_0_costs_no_digits_of_the_deviations(device, n):
    """The squares about the mean that was computed, not about a better one."""
    for offset in (1e3, 1e6):
        seed(offset, n)
        x = torch.randn(4, n, device=device) + offset
        _, mean, squares = run(centered, x)
        exact = (x.double() - mean.double()[:, None]).square().sum(-1)
        assert ((squares.double() - exact) / exact).abs().max() < 2e-6


@pytest.mark.parametrize("n", (STREAMED[-1], *EXCHANGED))
def test_means_of_some_threads_that_are_not_the_others(device, n):
    """The first lane of each warp, or one thread, has other numbers than the rest."""
    lane, column = torch.arange(n, device=device) % 256 < 8, torch.arange(n, device=device)
    x = torch.full((6, n), 1.1, device=device)
    x[0, lane], x[1, lane], x[3, :8] = 1e6, 0.0, 0.0
    x[2] = torch.where(lane, 0.0, 3.3)
    x[4] = torch.randn(n, device=device) + 100 * lane
    x[5] = torch.where(column < 8, 1e37, 0.0)
    _, mean, squares = run(centered, x)
    exact = x.double().mean(-1)
    assert ((mean.double() - exact).abs() <= 3e-7 * x.double().abs().mean(-1)).all()
    assert squares[5] == math.inf
    about = (x.double() - mean.double()[:, None])[:5].square().sum(-1)
    assert ((squares[:5].double() - about) / about).abs().max() < 1e-6


@pytest.mark.parametrize("dtype", [BF16, F32], ids=short)
@pytest.mark.parametrize("n", RAGGED)
@pytest.mark.parametrize("name", BEHIND)
def test_nothing_behind_the_end_of_a_row_counts(device, name, n, dtype):
    f = BEHIND[name]
    for m in (3, 300):
        seed(name, n, dtype, m)
        args = negative(name, m, n, dtype, device)
        assert_close(f, run(f, *args), *args)


@pytest.mark.parametrize(("name", "n", "dtype"), SHARED_CASES, ids=short)
def test_shares_of_a_row(device, arch, name, n, dtype):
    """Right, and the same bits with one share a CTA and with several, in clusters and without."""
    f, arguments = SHARED[name]
    seed(name, n, dtype)
    args = arguments(many_rows(n) + 1, n, dtype, device)
    results = {key: run(forced, *args) for key, forced in shared(name, n, dtype, arch)}
    first = {num: result for (num, _, shares, _), result in results.items() if shares == 1}
    assert len(results) > len(first) == len({key[0] for key in results})
    for key, result in results.items():
        assert_same_bits(result, first[key[0]], key)
    last = [a[-40:] if _is_rows(a, len(args[0])) else a for a in args]
    errors = float32_errors(f, *[a[-400:] if _is_rows(a, len(args[0])) else a for a in args])
    for result in first.values():
        assert_close(f, rows_of(result, slice(-40, None)), *last, torch_errors=errors)

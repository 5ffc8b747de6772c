"""Sums that follow maxima come of one exchange with them, and are as exact as torch's."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.compute.moves import Move
from htile.frontend.ops import Op
from htile.lower.following import following
from htile.lower.reductions import FOLLOWING, assign_stages
from tests.lower.cases import F32, kernel_of
from tests.lower.test_shares import (
    INF,
    NAN,
    agreement,
    collision,
    divergence,
    expectation,
    soft_cross_entropy,
)
from tests.primitives.row_device import launch

N = 8216
LEAST = torch.finfo(F32).min


def entropy(x):
    logp = x.log_softmax(-1)
    return -(logp.exp() * logp).sum()


def soft_actor(x, y):
    return (x.softmax(-1) * (0.2 * x.log_softmax(-1) - y)).sum()


def variance(x, y):
    p = x.softmax(-1)
    mean = (p * y).sum()
    return mean, (p * (y * y)).sum() - mean * mean, x.amin()


FUNCTIONS = {f.__name__: f for f in (
    entropy, divergence, soft_cross_entropy, soft_actor, expectation, collision, agreement,
    variance,
)}  # fmt: skip
PLANS = {
    "shares in shared memory": {"form": "loops", "threads_per_row": 128, "cluster_n": 2,
                                "loader": "shared", "shares": 1},
    "one block": {"form": "loops", "threads_per_row": 256, "cluster_n": 1, "loader": "shared"},
    "read again": {"form": "loops", "threads_per_row": 128, "cluster_n": 1, "loader": "direct"},
    "held": {"form": "held", "threads_per_row": 256, "cluster_n": 2, "joint": "following",
             "loader": "direct"},
}  # fmt: skip


def given():
    """Rows of x and y, with what a thread, a warp or all of the row may have."""
    g = torch.Generator().manual_seed(0)
    x, y = (3 * torch.randn(12, N, generator=g) for _ in range(2))
    x[1, :3000] = -INF  # so that some threads have nothing else
    x[2, :3000] = y[2, :3000] = -INF
    x[3, :3000], y[3, 1000:5000] = LEAST, LEAST
    x[4, :3000] -= 90.0  # so that all sums move
    x[5, :3000] -= 500.0
    x[5, 3000:6000] -= 300.0
    x[6, 7] = 800.0
    x[7], y[7] = 2.5, -1.5
    x[8, 4], x[9, 5], x[10], y[11, 6] = NAN, INF, -INF, INF
    return x, y


def by_torch(function, *rows):
    results = [function(*row) for row in zip(*rows, strict=True)]
    several = [each if isinstance(each, tuple) else (each,) for each in results]
    return [torch.stack(each) for each in zip(*several, strict=True)]


ALL = [("shares in shared memory", name) for name in FUNCTIONS]
SOME = [(plan, name) for plan in [*PLANS][1:] for name in ("entropy", "divergence", "variance")]


@pytest.mark.parametrize(("plan", "name"), ALL + SOME)
def test_kernels_compute_what_torch_does(plan, name):
    function = FUNCTIONS[name]
    rows = given()[: function.__code__.co_argcount]
    kernel = htile.rowwise(function).with_plan(**PLANS[plan]).inspect(*rows, arch="sm_90a")
    assert kernel.plan.numerics.joint == (FOLLOWING.name,)
    assert kernel.plan.sweeps.exchanges == 1
    expected = by_torch(function, *(x.double() for x in rows))
    theirs = by_torch(function, *rows)
    found = [torch.zeros(12) for _ in expected]
    launch(kernel, [*rows, *found], 12)
    for one, exact, other in zip(found, expected, theirs, strict=True):
        fits = ~(exact.isfinite() & (exact.abs() > 1e38))  # in float32
        assert torch.equal(one[fits].isnan(), exact[fits].isnan())
        is_infinite, is_finite = exact.isinf(), exact.isfinite() & fits
        assert torch.equal(one[is_infinite], exact[is_infinite].float())
        error, of_torch = ((each.double() - exact).abs()[is_finite] for each in (one, other))
        size = exact.abs()[is_finite]
        assert (error <= 2 * of_torch.nan_to_num() + 2e-6 * (1 + size)).all()


def terms_of(function, *arguments):
    """How the sums of the second stage move, if all do."""
    graph = kernel_of(function, *[torch.empty(8, 1000, device="meta")] * len(arguments)).graph
    stages = assign_stages(graph)
    reduced = [node.id for node in graph if node.op in (Op.MAX, Op.MIN, Op.SUM)]
    return following(graph, *([id for id in reduced if stages[id] == k] for k in (1, 2)))


def test_how_sums_move():
    found = terms_of(divergence, "x", "y")
    x, y = (found.maxima.index(id) for id in sorted(found.maxima, reverse=True))
    by_powers = {move.powers: move for move in found.moves if not move.slopes}
    assert by_powers == {(x,): Move((x,)), (y,): Move((y,))}
    (move,) = [move for move in found.moves if move.slopes]
    assert move.powers == (x,) and found.moves[move.base] == Move((x,))
    assert move.slopes[x] == -move.slopes[y] > 0
    assert terms_of(collision, "x").moves == (Move((0,)), Move((0, 0)))


def two_terms(x, y):
    e = (x - x.max()).exp()
    return e.sum(), (e * ((x - x.max()) * (y - y.max()))).sum(), (y - y.max()).exp().sum()


def of_sum_that_is_not_there(x):
    e = (x - x.max()).exp()
    return (e * (x - x.max())).sum()


def of_elements(x, y):
    e = (x - x.max()).exp()
    return e.sum(), (e * y * (x - x.max())).sum()


def beside_another(x):
    e = (x - x.max()).exp()
    return e.sum(), (e * x).sum(), (x - x.max()).abs().sum()


def of_another_sum(x, y):
    e = (x - x.max()).exp()
    return e.sum(), (e * (y / y.sum())).sum()


def of_a_minimum(x, y):
    e = (x - x.max()).exp()
    return e.sum(), (e * (y - y.min())).sum()


@pytest.mark.parametrize(
    "function",
    [
        two_terms, of_sum_that_is_not_there, of_elements, beside_another, of_another_sum,
        of_a_minimum, F.softmax,
    ],
)
def test_other_sums_do_not_move(function):
    if function is F.softmax:
        assert terms_of(lambda x: F.softmax(x, -1), "x") is None
    else:
        count = function.__code__.co_argcount
        assert terms_of(function, *"xy"[:count]) is None


@pytest.mark.parametrize("plan", ["shares in shared memory", "held"])
def test_a_column_is_loaded_where_sums_need_it(plan):
    def weighted(x, w: htile.Shared):
        return (x.softmax(-1) * w).sum()

    x, y = given()
    rows, column = x[:2], y[0].contiguous()
    late = {"columns": "late"} if plan == "held" else {}
    f = htile.rowwise(weighted).with_plan(**PLANS[plan], **late)
    found = torch.zeros(2)
    launch(f.inspect(rows, column, arch="sm_90a"), [rows, column, found], 2)
    expected = (rows.double().softmax(-1) * column.double()).sum(-1)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_an_element_that_needs_the_maximum_is_held_with_it():
    """So a row that is held, and whose shares are returned, takes two exchanges."""
    def both(x):
        p = x.softmax(-1)
        return p, (p * x.log_softmax(-1)).sum()

    f = htile.rowwise(both)
    x = torch.empty(64, N, device="meta")
    with pytest.raises(htile.LoweringError, match="joint"):
        f.with_plan(**PLANS["held"]).inspect(x, arch="sm_90a")
    kernel = f.with_plan(**PLANS["one block"]).inspect(x, arch="sm_90a")
    assert kernel.plan.sweeps.exchanges == 1


@pytest.mark.parametrize("plan", ["shares in shared memory", "held"])
def test_further_stages_have_places_of_their_own(plan):
    """The exchange before them takes fewer places of the buffer than two exchanges would."""
    def of_what_follows(x, y):
        p = x.softmax(-1)
        mean = (p * y).sum()
        shifted = y - mean
        return mean, (shifted * shifted).sum(), (shifted.softmax(-1) * x).sum()

    rows = [each[:2] for each in given()]
    kernel = htile.rowwise(of_what_follows).with_plan(**PLANS[plan]).inspect(*rows, arch="sm_90a")
    places = sorted(
        (kernel.plan.slot(reduce), reduce.slots)
        for reduce in kernel.plan.sweeps.reduces if reduce.exchanges
    )  # fmt: skip
    ends = [slot + count for slot, count in places]
    assert [slot for slot, _ in places] == [0, *ends[:-1]] and ends[-1] == kernel.plan.slots
    found = [torch.zeros(2) for _ in range(3)]
    launch(kernel, [*rows, *found], 2)
    expected = by_torch(of_what_follows, *(x.double() for x in rows))
    for one, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(one.double(), exact, rtol=1e-5, atol=1e-5)


def test_terms_that_share_operands_are_read_once():
    """Forty doublings of a value that waits for a maximum: without a record, 2 ** 40 readings."""

    def doubled(x):
        y = x / x.abs().max()
        for _ in range(40):
            y = y * y - y
        return y.sum()

    x = torch.empty(4, 64, device="meta")
    assert htile.rowwise(doubled).inspect(x, arch="sm_90a").plan.stages >= 2


def test_many_exponentials_of_one_term_do_not_follow():
    """A sum of so high a power takes an exchange of its own."""

    def power(x):
        e = torch.exp(x - x.max())
        for _ in range(30):
            e = e * e
        return e.sum()

    x = torch.empty(4, 64, device="meta")
    assert htile.rowwise(power).inspect(x, arch="sm_90a").plan.stages == 2

"""Sums and maxima of a softmax's shares are taken beside the sum of its exponentials."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.frontend.ops import Op
from htile.frontend.reference import evaluate
from tests.generated.movements import interpreted
from tests.lower.cases import F32, kernel_of

N = 1000
INF, NAN = math.inf, math.nan


def meta(n=N, dtype=F32):
    return torch.empty(64, n, dtype=dtype, device="meta")


def entropy(x):
    p = x.softmax(-1)
    return -(p * p.log()).sum()


def entropy_of_logarithm(x):
    logp = x.log_softmax(-1)
    return -(logp.exp() * logp).sum()


def entropy_of_masked(x):
    return torch.special.entr(x.softmax(-1)).sum()


def divergence(x, y):
    return F.kl_div(y.log_softmax(-1), x.softmax(-1), reduction="sum")


def divergence_of_logarithms(x, y):
    logp, logq = x.log_softmax(-1), y.log_softmax(-1)
    return F.kl_div(logq, logp, reduction="sum", log_target=True)


def difference_of_logarithms(x, y):
    p, q = x.softmax(-1), y.softmax(-1)
    return (p * (p.log() - q.log())).sum()


def soft_cross_entropy(x, y):
    return -(y.softmax(-1) * x.log_softmax(-1)).sum()


def soft_actor(x, y):
    p = x.softmax(-1)
    return (p * (0.2 * p.log() - y)).sum()


def expected_column(x):
    return (x.softmax(-1) * torch.arange(x.shape[-1])).sum()


def expectation(x, y):
    return (x.softmax(-1) * y).sum()


def negative_expectation(x, y):
    return (-x.softmax(-1) * y).sum()


def softmax_backward(x, y):
    p = x.softmax(-1)
    return p * (y - (p * y).sum())


def collision(x):
    return (x.softmax(-1) ** 2).sum()


def agreement(x, y):
    return (x.softmax(-1) * y.softmax(-1)).sum()


def confidence(x):
    return x.softmax(-1).max()


def most_likely(x):
    return tuple(x.softmax(-1).max(-1))


def at_least_half_as_likely(x):
    p = x.softmax(-1)
    return torch.where(p < 0.5 * p.max(), 0.0, p)


ONE_ROW = (
    entropy, entropy_of_logarithm, entropy_of_masked, expected_column, collision, confidence,
    most_likely, at_least_half_as_likely,
)  # fmt: skip
TWO_ROWS = (
    divergence, divergence_of_logarithms, difference_of_logarithms, soft_cross_entropy, soft_actor,
    expectation, negative_expectation, softmax_backward, agreement,
)  # fmt: skip
FUNCTIONS = {function.__name__: function for function in ONE_ROW + TWO_ROWS}


def kernel(function, **more):
    return kernel_of(function, *[meta()] * (2 if function in TWO_ROWS else 1), **more)


def rows(case, count, seed=0):
    """Rows of float64 whose elements are also float32, and that are the case."""
    g = torch.Generator().manual_seed(seed)
    x, y = (3 * torch.randn(6, N, generator=g) for _ in range(2))
    if case == "masked alike":
        x[:, 5:300] = y[:, 5:300] = -INF
    elif case == "masked by the least number":
        x[:, 5:300] = torch.finfo(F32).min
        y[:, 100:400] = torch.finfo(F32).min
    elif case == "one of all":
        x[:, 7] = 500.0
    elif case == "equal":
        x[:], y[:] = 2.5, -1e30
    elif case == "large":
        x, y = 1e4 + x, 1e30 * y
    elif case == "small":
        x, y = 1e-3 * x, 1e-30 * y
    elif case == "not numbers":
        x[0, 3], x[1, 4], x[2], y[3, 5], y[4, 6], y[5] = NAN, INF, -INF, NAN, INF, -INF
    return [x.double(), y.double()][:count]


CASES = (
    "usual", "masked alike", "masked by the least number", "one of all", "equal", "large", "small",
    "not numbers",
)  # fmt: skip


def by_torch(function, x, y=None):
    """What torch computes of each row, in the dtype of the rows."""
    rows = zip(x, *([] if y is None else [y]), strict=True)
    results = [function(*row) for row in rows]
    if isinstance(results[0], tuple):
        return tuple(torch.stack(each) for each in zip(*results, strict=True))
    return torch.stack(results)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_there_are_two_exchanges(name):
    found = kernel(FUNCTIONS[name])
    assert found.plan.stages == 2
    totals = [node for node in found.graph if node.op is Op.DIV and node.value.spread]
    returns_shares = name in ("softmax_backward", "at_least_half_as_likely")
    assert len(totals) == returns_shares, "an element is divided only where it is returned"


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_computes_what_torch_does(name, case):
    function = FUNCTIONS[name]
    given = rows(case, 2 if function in TWO_ROWS else 1)
    graph = kernel(function).graph
    tensors = dict(zip([i.name for i in graph.inputs], given, strict=True))
    found = evaluate(graph, tensors, (6,), torch.float64)
    expected = by_torch(function, *given)
    largest = max(1.0, *(x[x.isfinite()].abs().clamp(max=1e30).max().item() for x in given))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * largest, equal_nan=True)


@pytest.mark.parametrize("case", CASES[:-1])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_graph_is_as_exact_as_torch_in_float32(name, case):
    function = FUNCTIONS[name]
    given = rows(case, 2 if function in TWO_ROWS else 1)
    graph = kernel(function).graph
    short = [x.float() for x in given]
    tensors = dict(zip([i.name for i in graph.inputs], short, strict=True))
    found = evaluate(graph, tensors, (6,), F32)
    expected, theirs = by_torch(function, *[x.double() for x in short]), by_torch(function, *short)
    found, expected, theirs = (
        each[0] if isinstance(each, tuple) else each for each in (found, expected, theirs)
    )
    is_finite = expected.abs() < 1e37
    error, of_torch = ((each.double() - expected).abs()[is_finite] for each in (found, theirs))
    of_torch = of_torch.nan_to_num()  # torch finds 0 * log(0) where a share is too small
    largest = expected.abs().where(is_finite, 0.0).max()
    assert (error <= 2 * of_torch + 2e-6 * (1 + largest)).all()


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: (x.softmax(-1) * (y - x.softmax(-1).max() * 2)).sum(),
        lambda x, y: (torch.where(y > 0, x.softmax(-1), 0.0) * x.log_softmax(-1)).sum(),
        lambda x, y: (x.softmax(-1) * (y * x.log_softmax(-1))).sum(),
        lambda x, y: (x.softmax(-1) * (x.softmax(-1) + y)).sum(),
    ],
)
def test_what_waits_for_the_total_stays_as_it_is(function):
    """These are not sums of a share times an element that is there before the total."""
    found = kernel_of(lambda x, y: function(x, y), meta(), meta())
    given = rows("usual", 2)
    tensors = dict(zip([i.name for i in found.graph.inputs], given, strict=True))
    result = evaluate(found.graph, tensors, (6,), torch.float64)
    torch.testing.assert_close(result, by_torch(function, *given), rtol=1e-9, atol=1e-12)
    assert found.plan.stages == 3


def test_a_product_that_is_normalized_is_kept_in_place_of_its_factors():
    def kept(x, y):
        product = x.softmax(-1) * y.softmax(-1)
        return product / product.sum()

    def read_beside_the_share(x, y):
        p = x.softmax(-1)
        product = p * y
        return product - p * product.sum()

    assert kernel_of(kept, meta(), meta()).plan.stages == 3
    assert kernel_of(read_beside_the_share, meta(), meta()).plan.stages == 2


def test_the_largest_share_equals_an_element():
    """`p == p.max()` holds at the maximum, because both are one device function of s."""
    def is_largest(x):
        p = x.softmax(-1)
        return p == p.max(), p

    text = kernel_of(is_largest, meta()).source
    assert text.count("math.div_bounded(") == 2 and "math.div(" not in text


def test_logarithms_that_cancel_are_subtracted_in_parts():
    """log(p) - log(p + q) is small where both are large, and they are not rounded before."""
    def jensen_shannon(x, y):
        p, q = x.softmax(-1), y.softmax(-1)
        m = torch.log(0.5 * p + 0.5 * q)
        return (p * (p.log() - m) + q * (q.log() - m)).sum()

    graph = kernel_of(jensen_shannon, meta(), meta()).graph
    logarithms = [graph[node.inputs[0]] for node in graph if node.op is Op.LOG]
    assert sum(operand.value.spread for operand in logarithms) == 1, "that of p + q"
    g = torch.Generator().manual_seed(1)
    x, y = (torch.randn(16, 19783, generator=g) for _ in range(2))
    graph = kernel_of(jensen_shannon, meta(19783), meta(19783)).graph
    found = evaluate(graph, {"x": x, "y": y}, (16,), F32)
    expected, theirs = (by_torch(jensen_shannon, x.to(d), y.to(d)) for d in (torch.float64, F32))
    error, of_torch = ((each.double() - expected).abs().max() for each in (found, theirs))
    assert error <= of_torch


@pytest.mark.parametrize("function", [divergence, difference_of_logarithms])
@pytest.mark.parametrize("n", [N, 50257])
def test_totals_of_a_divergence_are_divided_before_their_logarithm(function, n):
    """log(a) - log(b) would have the errors of two logarithms of about 10."""
    graph = kernel_of(function, meta(n), meta(n)).graph
    assert [graph[node.inputs[0]].op for node in graph if node.op is Op.LOG] == [Op.DIV]
    g = torch.Generator().manual_seed(n)
    x, y = (torch.randn(32, n, generator=g) for _ in range(2))
    found = evaluate(graph, {"x": x, "y": y}, (32,), F32)
    expected = by_torch(function, x.double(), y.double())
    epsilon = torch.finfo(F32).eps
    assert (found.double() - expected).abs().max() <= 4 * epsilon, "of a result of about 1"


RANKED = {
    "shares": lambda x: x.softmax(-1).topk(4),
    "logarithms": lambda x: x.log_softmax(-1).topk(4),
    "exponentials of logarithms": lambda x: x.log_softmax(-1).exp().topk(4),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", RANKED)
def test_the_largest_shares_are_those_of_the_largest_elements(name, case):
    function = RANKED[name]
    found = kernel_of(lambda x: tuple(function(x)), meta(dtype=torch.bfloat16))
    assert found.plan.stages == 2
    keys = [found.graph[node.inputs[0]] for node in found.graph if node.op is Op.KEY]
    assert [key.op for key in keys] == [Op.INPUT]
    x = rows(case, 1)[0].bfloat16().double()
    graph = replace(found.graph, structure=pytree.tree_structure((0,) * 8))
    results = evaluate(graph, {"x": x}, (6,), torch.float64)
    values, indices = (torch.stack(each, 1) for each in (results[:4], results[4:]))
    # Shares that are 0 by rounding are ranked by their elements, as shares of more digits would be.
    x_or_nan = x.where(~x.softmax(-1).isnan(), NAN)
    order = x_or_nan.sort(dim=-1, descending=True, stable=True)[1][:, :4]
    expected = (x.softmax(-1) if name == "shares" else x.log_softmax(-1)).gather(1, order)
    expected = expected.exp() if name == "exponentials of logarithms" else expected
    torch.testing.assert_close(values, expected, rtol=1e-9, atol=1e-300, equal_nan=True)
    assert torch.equal(indices, order)


@pytest.mark.parametrize(("count", "dtype"), [(4, F32), (40, torch.bfloat16)])
def test_many_shares_and_those_of_long_elements_are_ranked_themselves(count, dtype):
    """Their elements were measured to take as long, or longer."""
    found = kernel_of(lambda x: tuple(x.softmax(-1).topk(count)), meta(dtype=dtype)).graph
    assert all(found[node.inputs[0]].op is Op.DIV for node in found if node.op is Op.KEY)


def test_shares_that_something_else_reads_are_ranked_themselves():
    """So what is compared with the fourth share finds four."""
    def above_fourth(x):
        p = x.softmax(-1)
        return torch.where(p >= p.topk(4).values[-1], p, 0.0)

    graph = kernel_of(above_fourth, meta()).graph
    assert all(graph[node.inputs[0]].op is Op.DIV for node in graph if node.op is Op.KEY)


def of_pieces(x, y):
    p = x.softmax(-1)
    return p.topk(2).values[1], torch.cat((p, y)).argmax()


def of_groups(x):
    p = x.view(2, -1).softmax(-1)
    return p.topk(2, -1).values.sum(), p.argmax()


def of_two_softmaxes(x, y):
    p, q = x.softmax(-1), y.softmax(-1)
    return p.topk(2).values[1], torch.cat((p, q)).topk(2).values[1]


def of_all_and_groups(x):
    p = x.view(4, -1).softmax(-1)
    return p.view(-1).topk(2).values[1], p.topk(2, -1).values.sum()


@pytest.mark.parametrize("function", [of_pieces, of_groups, of_two_softmaxes, of_all_and_groups])
def test_keys_that_something_else_reads_are_of_shares(function):
    names = "xy"[: function.__code__.co_argcount]
    g = torch.Generator().manual_seed(0)
    given = [torch.randn(6, 64, generator=g).bfloat16() for _ in names]
    lowered = kernel_of(function, *[meta(64, torch.bfloat16)] * len(names))
    named = dict(zip(names, given, strict=True))
    found = interpreted(lowered.graph, lowered.traced, named, (6,))
    for one, exact in zip(found, by_torch(function, *(x.double() for x in given)), strict=True):
        torch.testing.assert_close(torch.tensor(one).double(), exact.double(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y, z: (x.softmax(-1) * (0.3 * (y - z))).sum(),
        lambda x, y, z: (x.softmax(-1) * ((y - z) + x)).sum(),
        lambda x, y, z: (x.softmax(-1) * ((y - z) - x.log_softmax(-1))).sum(),
    ],
)
def test_elements_that_cancel_are_subtracted_first(function):
    graph = kernel_of(lambda x, y, z: function(x, y, z), *[meta()] * 3).graph
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(6, N, generator=g) for _ in range(2))
    given = x, 1e4 + y, 1e4 + y + 1e-2 * torch.randn(6, N, generator=g)
    found = evaluate(graph, dict(zip("xyz", given, strict=True)), (6,), F32)
    rows = zip(*(each.double() for each in given), strict=True)
    expected = torch.stack([function(*row) for row in rows])
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=1e-6)


def test_nan_in_place_of_a_logarithm_stays_where_the_user_wants_it():
    def f(x, y, z: htile.PerRow):
        e = x - x.max()
        log = torch.where(z > 0, NAN, e.exp().sum().log())
        return ((e - log).exp() * y).sum()

    graph = kernel_of(f, meta(), meta(), torch.empty(64, device="meta")).graph
    given = *rows("usual", 2), torch.tensor([1.0, -1.0, 2.0, 0.0, -3.0, 1.0]).double()
    found = evaluate(graph, dict(zip("xyz", given, strict=True)), (6,), torch.float64)
    expected = torch.stack([f(*row) for row in zip(*given, strict=True)])
    assert expected.isnan().any() and not expected.isnan().all()
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12, equal_nan=True)


def test_one_share_that_is_nan_is_found():
    """Only that of an infinite element is NaN, where 0 stands for an infinite maximum."""

    def f(x):
        m = x.max()
        e = x - torch.where(m.abs() == INF, 0.0, m)
        found = (e.exp() / e.exp().sum()).topk(2)
        return found.values[1], found.indices[0]

    graph = kernel_of(f, meta(64, torch.bfloat16)).graph
    x = torch.randn(6, 64, generator=torch.Generator().manual_seed(0)).bfloat16().double()
    x[0, 5] = INF
    _, found = evaluate(graph, {"x": x}, (6,), torch.float64)
    assert torch.equal(found, by_torch(f, x)[1])

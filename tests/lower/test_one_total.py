"""A softmax, a log_softmax and a logsumexp of the same elements exponentiate each of them once."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from htile.frontend.ops import Op
from htile.frontend.reference import evaluate
from tests.generated.movements import interpreted
from tests.lower.cases import kernel_of
from tests.lower.test_shares import CASES, by_torch, meta, rows


def both(x):
    return x.log_softmax(-1), x.softmax(-1)


def all_three(x):
    return x.softmax(-1), x.logsumexp(-1), x.log_softmax(-1)


def total_first(x):
    return x.logsumexp(-1), x.softmax(-1).max()


def entropy(x):
    return -(x.softmax(-1) * x.log_softmax(-1)).sum()


def two_rows(x, y):
    return (x.softmax(-1) * (x.log_softmax(-1) - y.log_softmax(-1))).sum(), y.softmax(-1)


def with_bonus(x, y):
    p = F.softmax(x, dim=-1)
    return (p * (0.2 * F.log_softmax(x, dim=-1) - y)).sum()


def kept_axis(x):
    return x - x.logsumexp(-1, keepdim=True), x.softmax(-1)


def own_axis(x):
    e = (x - x.max(dim=-1, keepdim=True).values).exp()
    return x.logsumexp(-1), e / e.sum(-1, keepdim=True)


FUNCTIONS = (both, all_three, total_first, entropy, two_rows, with_bonus, kept_axis, own_axis)


def graph_of(function):
    return kernel_of(function, *[meta()] * function.__code__.co_argcount).graph


@pytest.mark.parametrize("function", FUNCTIONS)
def test_each_element_is_exponentiated_once(function):
    exponentials = [n for n in graph_of(function) if n.op is Op.EXP and n.value.spread]
    assert len(exponentials) == (2 if function is two_rows else 1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_graph_computes_what_torch_does(function, case):
    given = rows(case, function.__code__.co_argcount)
    graph = graph_of(function)
    tensors = dict(zip([i.name for i in graph.inputs], given, strict=True))
    found = evaluate(graph, tensors, (6,), torch.float64)
    expected = by_torch(function, *given)
    largest = max(1.0, *(x[x.isfinite()].abs().clamp(max=1e30).max().item() for x in given))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * largest, equal_nan=True)


def in_groups(x):
    parts = x.view(16, -1)
    return (parts.softmax(-1) * parts.log_softmax(-1)).sum(-1), parts.logsumexp(-1)


def by_the_row(x):
    """The maximum of the row does not tell the total of a group that has no infinity."""
    largest = x.max()
    safe = torch.where(largest.abs() == torch.inf, 0.0, largest)
    total = torch.exp(x - safe).view(16, -1).sum(-1)
    return total.log() + safe, torch.exp(x - largest).view(16, -1).sum(-1)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("function", [in_groups, by_the_row])
def test_totals_of_groups(function, case):
    (x,) = rows(case, 1)
    x = x[:, :512]
    lowered = kernel_of(function, meta(512))
    exponentials = [n for n in lowered.graph if n.op is Op.EXP and n.value.spread]
    assert len(exponentials) == (1 if function is in_groups else 2)
    found = interpreted(lowered.graph, lowered.traced, {"x": x}, (6,))
    for one, exact in zip(found, by_torch(function, x), strict=True):
        one = torch.tensor(one).double()
        torch.testing.assert_close(one, exact, rtol=1e-6, atol=1e-6, equal_nan=True)

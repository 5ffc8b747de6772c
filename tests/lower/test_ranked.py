"""Gradients of elements by their rank: a choice among ranks, without what a rank says already."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.frontend.graph import Role
from htile.frontend.ops import Op
from htile.frontend.reference import EVALUATE, evaluate
from htile.lower.passes.simplify import run_passes
from htile.lower.ranks import chains
from tests.generated.movements import MEANT, interpreted
from tests.lower.cases import kernel_of


def gates(x):
    return x.topk(4).values.softmax(-1)


def smallest(x):
    return x.topk(3, largest=False).values.exp().sum()


def both(x):
    return x.topk(3).values.sum() * x.topk(2, largest=False).values.prod()


def ordered(x):
    return (x.sort().values * torch.arange(x.shape[-1])).sum()


def beside(x):
    found = x.topk(4)
    return F.softmax(x, -1)[found.indices[1]] * found.values[2], found.values[0] - x


def limited(x):
    return torch.where(x < x.topk(4).values[-1], -torch.inf, x).softmax(-1)


def of_pieces(x):
    """An element is in both pieces of the row, so it may have two ranks."""
    return (torch.cat((x, x)).topk(5).values * torch.arange(5)).sum()


def of_pieces_mixed(x):
    a, b = x.chunk(2)
    return (torch.cat((a + b, a * b)).topk(6).values * torch.arange(6)).sum()


def of_groups(x):
    return x.view(8, -1).topk(2).values.sum(-1).topk(3).values.tanh()


def twice(x):
    return (x.topk(3).values * x.topk(4).values[1:]).sum()


# Operations that generated movements do not have.
NAMED = {Op.GE: np.greater_equal, Op.DIV: np.divide, Op.EXP: np.exp, Op.TANH: np.tanh}
FUNCTIONS = (
    gates, smallest, both, ordered, beside, limited, of_pieces, of_pieces_mixed, of_groups,
)  # fmt: skip


def rows(n):
    """Rows of few values, so most of them have equals."""
    torch.manual_seed(n)
    return torch.randint(-4, 5, (3, n)).float() / 2


def second_key(x):
    """The key of the second largest element of each row, as a kernel and `interpreted` have it."""
    keys = EVALUATE[Op.KEY]((x, torch.arange(x.shape[-1])), False, torch.int64)
    key = keys.sort(-1, descending=True).values[:, 1]
    value = EVALUATE[Op.KEY_VALUE]((key,), torch.float32, torch.float32)
    index = EVALUATE[Op.KEY_INDEX]((key,), False, torch.int64)
    return key, value.double() - 1j * index


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_same_numbers(f, monkeypatch):
    for op, meant in NAMED.items():
        monkeypatch.setitem(MEANT, op, meant)
    traced = kernel_of(f, rows(32)).backward.lowered.traced
    placed = run_passes(traced)
    given = {}
    for i in traced.inputs:
        lead = (3,) if i.role in (Role.ROW, Role.PER_ROW) else ()
        given[i.name] = torch.randn(*lead, *traced[i.id].value.inner)
    given["x"] = rows(32)
    saved = [i.name for i in traced.inputs if i.dtype is torch.int64]  # of `beside`
    keys, numbers = (dict.fromkeys(saved, key) for key in second_key(given["x"]))
    expected = pytree.tree_leaves(evaluate(traced, given | keys, (3,)))
    given |= numbers
    for found, each in zip(interpreted(placed, traced, given, (3,)), expected, strict=True):
        np.testing.assert_allclose(found, each.double().numpy(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("f", [gates, smallest, ordered], ids=lambda f: f.__name__)
def test_each_rank_takes_one_comparison_and_one_choice(f):
    graph = kernel_of(f, rows(32)).backward.graph
    ranks = sum(len(chain.results) for chain in chains(graph))
    assert ranks > 2
    assert sum(node.op is Op.EQ and node.value.spread for node in graph) <= ranks
    kept = [node for node in graph if node.op is Op.ADD and node.value.spread]
    assert len(kept) <= 2, "ranks are chosen among, and not added up"


@pytest.mark.parametrize("f", [*FUNCTIONS, twice], ids=lambda f: f.__name__)
def test_gradients(f):
    x = torch.randn(3, 32, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    results = pytree.tree_leaves(htile.rowwise(f)(x))
    exact = pytree.tree_leaves(torch.vmap(f)(wide))
    cotangents = [torch.randn(each.shape) for each in results]
    (found,) = torch.autograd.grad(results, x, cotangents)
    (expected,) = torch.autograd.grad(exact, wide, [each.double() for each in cotangents])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def masked(x, length: htile.PerRow):
    return torch.where(torch.arange(x.shape[-1]) < length, x, -torch.inf).topk(2).values


def masked_median(x, length: htile.PerRow):
    return torch.where(torch.arange(x.shape[-1]) < length, x, 0.0).quantile(0.5)


def mask_beside(x, length: htile.PerRow):
    below = torch.arange(x.shape[-1]) < length
    return x.topk(3).values, torch.where(below, x, 0.0) * 2, torch.where(length > 5, x, 0.0)


def chosen_row(x, length: htile.PerRow):
    return torch.where(x.sum() > length, x, x * x).sort().values[2]


@pytest.mark.parametrize("n", (40, 1000))
@pytest.mark.parametrize("f", (masked, masked_median, mask_beside, chosen_row))
def test_gradients_of_rows_that_end(f, n):
    """What nobody reads once ranks are known is dropped before rows are told where to end."""
    x = torch.randn(4, n, requires_grad=True)
    wide, length = x.detach().double().requires_grad_(), torch.tensor([5, 9, 0, n])
    results = pytree.tree_leaves(htile.rowwise(f)(x, length))
    exact = pytree.tree_leaves(torch.vmap(f)(wide, length))
    cotangents = [torch.randn(each.shape) for each in results]
    (found,) = torch.autograd.grad(results, x, cotangents)
    (expected,) = torch.autograd.grad(exact, wide, [each.double() for each in cotangents])
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    graph = htile.rowwise(f).inspect(x, length).backward.graph
    read = {i for node in graph for i in node.inputs}
    read |= {output.id for output in graph.outputs} | {i.end for i in graph.inputs}
    assert read >= {node.id for node in graph if node.op is not Op.INPUT}

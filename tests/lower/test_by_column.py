"""Parts that are joined where they come from: whole rows, of which the column's number chooses."""

from __future__ import annotations

from itertools import accumulate
from math import gcd

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.errors import UnsupportedError
from htile.frontend.graph import Graph, Role
from htile.frontend.ops import MOVEMENTS, Op
from htile.frontend.reference import evaluate
from htile.frontend.roles import classify
from htile.frontend.trace import trace
from htile.lower.passes.by_column import choose_by_column, reduce_by_column
from htile.lower.passes.simplify import drop_slopes, run_passes
from htile.lower.passes.space import place
from tests.generated.movements import MEANT, interpreted
from tests.lower.cases import kernel_of

BF16, F32, F64, I32 = torch.bfloat16, torch.float32, torch.float64, torch.int32
# Beside those that generated programs have.
NAMED = {Op.GE: np.greater_equal, Op.DIV: np.divide, Op.ABS: np.abs}


def first(x):
    x[:4] += 1
    return x


def first_of_cat(x):
    return torch.cat([x[:1] * 2, x[1:]])


def last(x):
    x[-3:] *= 3
    return x, x.amax()


def middle(x):
    x[3:90] *= -1
    return x * 2, x.sum()


def several(x):
    for start in range(0, 40, 9):
        x[start : start + 4] += x[start : start + 4] * start
    return x


def one_in_another(x):
    y = x[2:60]
    y[3:40] += 1
    y[5:7].mul_(4)
    x[4:9] -= y[2:7]
    return x


def counted(x):
    x[2:9] *= torch.arange(7)
    x[20:61] = torch.where(torch.arange(41) > 5, x[20:61], torch.arange(20, 61))
    return x


def with_others(x, w, t: htile.PerRow):
    x[:4] *= w[:4]
    x[6:9] = t - x[6:9]
    x[9:20] = t.expand(11) + w[9:20]
    return x, (x * w).sum()


def with_numbers(x, w, t: htile.PerRow):
    x[:3] *= torch.tensor([1.0, -2.0, 3.0])
    x[3:5] = x[7:8]
    return torch.cat((t[None], x[1:61], w[61:67], torch.zeros(len(x) - 67)))


def one_element_of_another_column(x):
    return torch.cat((x[5:6], x[1:9] + x[70:71], x[9:]))


def of_what_is_reduced(x):
    x[:5] -= x[:5].amax()
    x[7:] += x.sum()
    return x - x.amax(), x[:3].sum()


def of_a_scan(x):
    s = x.cumsum(-1)
    s[:3] = 1 - s[:3]
    return s


def without_zeros(x):
    x[1:6] //= torch.arange(1, 6)
    x[9:] %= 5
    return x


def elsewhere(x):
    return torch.cat((x[100:], -x[:100]))


def of_two_parts(x):
    x[:4] += x[4:8]
    return x - x.amax()


def before(x):
    return torch.cat((torch.zeros(1), x[:-1])), x.roll(-3, -1) - x.roll(3, -1)


def far_before(x):
    return x.roll(len(x) // 2 + 5, -1) * 2, torch.cat((x[len(x) - 2 :], x[2:]))


def of_neighbours(x, w):
    y = (x * w - x.amax()).roll(1, -1)
    return y + x, y.roll(1, -1).sum()


def of_a_difference(x):
    step = x[1:] - x[:-1]
    return torch.cat((step[:1], (step[1:] + step[:-1]) * 2, step[-1:]))


def of_a_matrix(x: htile.Inner[2]):
    row = x[1]
    row[:3] += x[0, :3]
    return row + x[0], row.amax()


FUNCTIONS = (
    first, first_of_cat, last, middle, several, one_in_another, counted, with_others, with_numbers,
    one_element_of_another_column, of_what_is_reduced, of_a_scan, without_zeros, of_a_matrix,
    elsewhere, of_two_parts, before, far_before, of_neighbours, of_a_difference,
)  # fmt: skip


def arguments(f, n, dtype=F32, rows=3):
    """Integers, so that all sums are exact."""
    g = torch.Generator().manual_seed(n)
    shapes = {"x": (rows, 2, n) if f is of_a_matrix else (rows, n), "w": (n,), "t": (rows,)}
    names = htile.rowwise(f)._signature.names
    made = {name: torch.randint(-9, 10, shapes[name], generator=g) for name in names}
    return {name: each.to(dtype) for name, each in made.items()}


def traced_of(f, named) -> tuple[Graph, tuple[int, ...]]:
    call = classify(htile.rowwise(f)._signature, tuple(named.values()))
    return drop_slopes(trace(f, call.specs, call.n)), call.lead


def joined_rows(graph) -> list[int]:
    """Into how many pieces the rows are cut that are joined of parts."""
    found = []
    for node in (node for node in graph if node.op is Op.CAT and len(node.value.inner) == 1):
        ends = accumulate(graph[i].value.inner[0] for i in node.inputs)
        found.append(node.value.inner[0] // gcd(*ends))
    return found


def in_torch(f, named):
    """What the function gives in float64, row by row, in torch and without HTile."""
    lead = len(named["x"])
    wide = {name: each.to(F64) for name, each in named.items()}
    rows = [{k: v if k == "w" else v[m].clone() for k, v in wide.items()} for m in range(lead)]
    found = [pytree.tree_leaves(f(**row)) for row in rows]
    return [torch.stack(each) for each in zip(*found, strict=True)]


def are_torch(graphs, f, traced, named, lead, rtol=0.0):
    """Assert that placed graphs compute what torch does."""
    with np.errstate(divide="ignore", invalid="ignore"):  # beside its columns a part is anything
        for graph in graphs:
            results = interpreted(graph, traced, named, lead)
            for found, exact in zip(results, in_torch(f, named), strict=True):
                assert found.shape == exact.shape
                np.testing.assert_allclose(found, exact.numpy(), rtol=rtol, equal_nan=False)


@pytest.mark.parametrize("n", [131, 4096, 4099])
@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f.__name__)
def test_the_placed_graph_is_torch(f, n, monkeypatch):
    for op, meant in NAMED.items():
        monkeypatch.setitem(MEANT, op, meant)
    named = arguments(f, n)
    traced, lead = traced_of(f, named)
    chosen = choose_by_column(traced)
    assert chosen is not traced and not joined_rows(chosen)
    are_torch((place(chosen), run_passes(traced)), f, traced, named, lead)
    assert run_passes(traced).n == n and len(chosen) < 100, "no part of the row is written out"


@pytest.mark.parametrize("dtype", [F32, BF16, I32])
@pytest.mark.parametrize("f", [f for f in FUNCTIONS if f not in (with_numbers, without_zeros)],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_a_choice_changes_no_bit(f, dtype):
    named = arguments(f, 4099, dtype)
    if dtype.is_floating_point:
        named = {name: torch.randn(each.shape).to(dtype) for name, each in named.items()}
    traced, lead = traced_of(f, named)
    chosen = choose_by_column(traced)
    assert chosen is not traced
    results = [pytree.tree_leaves(evaluate(graph, named, lead)) for graph in (traced, chosen)]
    for expected, found in zip(*results, strict=True):
        assert found.dtype is expected.dtype and torch.equal(found, expected)


def test_one_join_is_one_choice():
    traced, _ = traced_of(first, {"x": torch.ones(2, 4096)})
    ops = [node.op for node in choose_by_column(traced)]
    assert ops.count(Op.WHERE) == 1 and not MOVEMENTS.intersection(ops)


def test_nested_joins_are_one_choice():
    """A part of a row that was joined before is the part that lies there."""

    def f(x):
        x[:4] += 1
        x[:4] *= 2
        return x

    traced, _ = traced_of(f, {"x": torch.ones(2, 4096)})
    assert [node.op for node in choose_by_column(traced)].count(Op.WHERE) == 1


def half(x):
    x[: len(x) // 2] += 1
    return x.softmax(-1)


def quarters(x):
    a, b, c, d = x.chunk(4)
    return torch.cat((a, b * 2, c, d + 1))


def by_themselves(x):
    x[:4] += 1
    return x[:4] * 2, x[4:]


def of_another_scan(x):
    return x.cumsum(-1).roll(100, -1)


def random_numbers(x):
    x[:100] += htile.uniform(htile.philox(torch.arange(100), 7)[0])
    return x


@pytest.mark.parametrize("f", [half, quarters, by_themselves, of_another_scan,
                               random_numbers])  # fmt: skip
def test_what_is_left_as_it_is(f):
    """Few pieces, parts that nothing reads together, and what is no part of one row."""
    traced, _ = traced_of(f, {"x": torch.ones(2, 4096)})
    assert choose_by_column(traced) is traced


def test_floats_of_eight_bits_are_not_chosen():
    x = torch.ones(2, 4096).to(torch.float8_e4m3fn)
    traced, _ = traced_of(lambda x: torch.cat((x[4:8], x[4:])), {"x": x})
    assert choose_by_column(traced) is traced


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_integers_of_eight_bits_are_chosen(dtype):
    def moved(x):
        return torch.cat((x[4:8], x[4:])), x.roll(3, -1)

    x = torch.arange(2 * 301).to(dtype).view(2, 301)
    traced, lead = traced_of(moved, {"x": x})
    for graph in (choose_by_column(traced), run_passes(traced)):
        assert graph is not traced
    found = htile.rowwise(moved)(x)
    for one, exact in zip(found, (torch.cat((x[:, 4:8], x[:, 4:]), 1), x.roll(3, -1)), strict=True):
        assert one.dtype is dtype and torch.equal(one, exact)
    are_torch((run_passes(traced),), moved, traced, {"x": x}, lead)
    assert kernel_of(moved, x).resources.stack == 0


def test_a_row_that_is_returned_in_pieces_keeps_them():
    """Sums of whole rows and 129 of 130 columns agree only where the joins cut the rows too."""

    def f(x):
        x[8:] += x.sum()
        x[:109] += 1
        return x[:1], x[1:]

    traced, lead = traced_of(f, {"x": torch.ones(2, 130)})
    with pytest.raises(UnsupportedError):
        place(choose_by_column(traced))
    found = interpreted(run_passes(traced), traced, {"x": torch.ones(2, 130)}, lead)
    assert [each.shape for each in found] == [(2, 1), (2, 129)]


def test_a_refusal_names_the_line_that_cuts():
    """A row of a table is not read beyond its ends."""

    def f(x, at: htile.PerRow, table: htile.Shared):
        x[3:103] += table[at]
        return x

    with pytest.raises(UnsupportedError, match="pieces") as caught:
        kernel_of(f, torch.ones(3, 4096), torch.zeros(3, dtype=torch.int64), torch.ones(5, 100))
    assert caught.value.loc.text == "x[3:103] += table[at]"


def test_random_numbers_of_a_part():
    """They are numbered from the part's own start, wherever it lies."""

    def f(x):
        x[3:103] += htile.uniform(htile.philox(torch.arange(100), 7)[0])
        return x

    kernel = kernel_of(f, torch.ones(3, 4096))
    assert kernel.graph.n == 4096 and kernel.resources.stack == 0
    (found,) = pytree.tree_leaves(evaluate(kernel.graph, {"x": torch.ones(3, 4096)}, (3,)))
    expected = torch.ones(3, 4096)
    expected[:, 3:103] += htile.uniform(htile.philox(torch.arange(100), 7)[0])
    assert torch.equal(found, expected)


@pytest.mark.parametrize("n", [4096, 65537, 131072])
@pytest.mark.parametrize("f", [first_of_cat, counted, with_others, several],
                         ids=lambda f: f.__name__)  # fmt: skip
def test_kernels_compile(f, n):
    kernel = kernel_of(f, *arguments(f, n, BF16).values())
    assert kernel.resources.stack == 0 and kernel.graph.n == n
    assert kernel.backward.cubin and kernel.backward.graph.n == n


def below_a_mean(x):
    return x - x[4:99].mean()


def of_both_ends(x):
    return x * x[3:90].amax() + x[90:].amin() - x[:7].sum()


def of_products(x, w):
    y = x[1:100] * w[1:100] - 1
    return x + y.sum(), y[2:9].amax()


def of_signs(x):
    positive = x > 0
    number = positive[5:77].any() * 2 + positive[2:4].all()
    return x * number, torch.where(positive[1:30], 1, -1).prod() + x[-2:].sum()


def of_integers(x):
    y = x.to(torch.int32)
    return x + y[7:20].amax(), y[9:50].amin() - y[1:].sum()


def of_steps(x):
    steps = (x[1:] - x[:-1]).abs()
    return x + steps.sum(), x - steps.amax()


REDUCED = below_a_mean, of_both_ends, of_products, of_signs, of_integers, of_steps


@pytest.mark.parametrize("n", [131, 4096, 4099])
@pytest.mark.parametrize("f", REDUCED, ids=lambda f: f.__name__)
def test_a_part_is_reduced_beside_its_row(f, n, monkeypatch):
    for op, meant in NAMED.items():
        monkeypatch.setitem(MEANT, op, meant)
    named = arguments(f, n)
    traced, lead = traced_of(f, named)
    with pytest.raises(UnsupportedError):
        place(traced)
    placed = run_passes(traced)
    are_torch((place(reduce_by_column(traced)), placed), f, traced, named, lead, rtol=1e-6)
    assert placed.n == n and len(placed) < 60


@pytest.mark.parametrize("value", [123.456, 1e-30, -7.7e33, torch.inf, -torch.inf, torch.nan])
def test_the_mean_of_equal_elements_of_a_part_is_that_element(value):
    def below(x):
        y = x[1:4002]
        return y.mean(), ((y - y.mean()) ** 2).mean(), x * 1

    x = torch.full((2, 4099), value)
    x[:, 0], x[:, 4002:] = torch.nan, torch.inf
    traced, lead = traced_of(below, {"x": x})
    with pytest.raises(UnsupportedError):
        place(traced)
    mean, square, _ = evaluate(run_passes(traced), {"x": x}, lead)
    assert mean.isnan().all() if x[0, 1].isnan() else torch.equal(mean, x[:, 1])
    if x[0, 1].isfinite():
        assert torch.equal(square, torch.zeros(2))


def test_a_part_that_is_reduced_alone_is_all_that_is_read():
    traced, _ = traced_of(lambda x: x[4:68].sum(), {"x": torch.ones(2, 4099)})
    assert run_passes(traced).n == 64


def test_a_gradient_of_what_is_added_to_a_part():
    def f(x, t: htile.PerRow):
        x[4:200] += t
        return x

    x, t = torch.randn(3, 300), torch.randn(3, requires_grad=True)
    cotangent = torch.randn(3, 300)
    htile.rowwise(f)(x, t).backward(cotangent)
    torch.testing.assert_close(t.grad, cotangent[:, 4:200].sum(-1))
    assert kernel_of(f, x.requires_grad_(), t).backward.graph.n == 300


def softmax(x):
    x[:4] += 1
    return x.softmax(-1)


DIFFERENTIATED = (
    softmax, first_of_cat, last, several, one_in_another, counted, with_others, with_numbers,
    of_a_scan,
)  # fmt: skip


@pytest.mark.parametrize("f", DIFFERENTIATED, ids=lambda f: f.__name__)
def test_a_choice_changes_no_bit_of_gradients(f):
    named = {name: torch.randn(each.shape) for name, each in arguments(f, 4099).items()}
    traced = drop_slopes(kernel_of(f, *named.values()).backward.lowered.traced)
    chosen, lead = choose_by_column(traced), named["x"].shape[:1]
    assert chosen is not traced
    given = {}
    for i in traced.inputs:
        of_rows = lead if i.role in (Role.ROW, Role.PER_ROW) else ()
        given[i.name] = torch.randn(*of_rows, *traced[i.id].value.inner)
    results = [pytree.tree_leaves(evaluate(graph, given, lead)) for graph in (traced, chosen)]
    for expected, found in zip(*results, strict=True):  # NaN where a saved maximum is no element
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("f", DIFFERENTIATED, ids=lambda f: f.__name__)
def test_gradients(f):
    named = {name: torch.randn(each.shape) for name, each in arguments(f, 300).items()}
    mine = {name: each.clone().requires_grad_() for name, each in named.items()}
    wide = {name: each.double().requires_grad_() for name, each in named.items()}
    results = pytree.tree_leaves(htile.rowwise(f)(*mine.values()))
    exact = in_torch(f, wide)
    cotangents = [torch.randn(each.shape) for each in results]
    found = torch.autograd.grad(results, [*mine.values()], cotangents)
    theirs = torch.autograd.grad(exact, [*wide.values()], [each.double() for each in cotangents])
    for a, b in zip(found, theirs, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=1e-4, atol=1e-4)
    assert kernel_of(f, *named.values()).backward.graph.n == 300, "the row is in no pieces"


def discounted(x):
    total = 0.0
    for k in reversed(range(x.shape[-1])):
        total = x[k] + 0.97 * total
    return total


def returns(x):
    y, total = torch.zeros_like(x), 0.0
    for k in reversed(range(x.shape[-1])):
        total = x[k] + 0.97 * total
        y[k] = total
    return y


@pytest.mark.parametrize("n", [65, 128])
@pytest.mark.parametrize("f", [discounted, returns])
def test_gradients_of_elements_that_are_read_one_by_one(f, n):
    x = torch.randn(3, n, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    y, exact = htile.rowwise(f)(x), torch.vmap(f)(wide)
    cotangent = torch.randn(y.shape)
    (found,) = torch.autograd.grad(y, x, cotangent)
    (expected,) = torch.autograd.grad(exact, wide, cotangent.double())
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)


def test_too_many_elements_name_the_gradient():
    y = htile.rowwise(discounted)(torch.randn(3, 257, requires_grad=True))
    with pytest.raises(UnsupportedError, match=r"the gradient of discounted: .* 257 pieces"):
        y.sum().backward()


def ranks(x, grade):
    more = grade[:, None] > grade[None, :]
    return (F.softplus(x[None, :] - x[:, None]) * more).sum()


@pytest.mark.parametrize("n", [16, 17, 24, 33])
def test_gradients_of_all_pairs(n):
    """Each of the two sums of a gradient is of rows, and no number is computed for each pair."""
    grade = torch.randint(0, 4, (3, n)).float()
    x = torch.randn(3, n, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    htile.rowwise(ranks)(x, grade).sum().backward()
    torch.vmap(ranks)(wide, grade.double()).sum().backward()
    torch.testing.assert_close(x.grad.double(), wide.grad, rtol=1e-5, atol=1e-5)
    assert len(kernel_of(ranks, x, grade).backward.graph) < 50 * n


@pytest.mark.parametrize("n", [65, 100])
def test_too_many_pairs_are_told_to_be_padded(n):
    x = torch.randn(3, n)
    with pytest.raises(UnsupportedError, match="pass rows that are padded to a power of two"):
        htile.rowwise(ranks)(x, x)

    def masked(x, grade):
        i = torch.arange(x.shape[-1]) < n
        more = (grade[:, None] > grade[None, :]) & i[:, None] & i[None, :]
        return torch.where(more, F.softplus(x[None, :] - x[:, None]), 0.0).sum()

    padded, exact = F.pad(x, (0, 128 - n)), torch.vmap(ranks)(x.double(), x.double())
    found = htile.rowwise(masked)(padded, padded)
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=0)

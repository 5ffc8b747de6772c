"""The elements that a mask chooses, `x[mask]`: what torch computes of each row by itself."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import htile
from htile import DtypeError, ShapeError, TraceError, UnsupportedError
from htile.testing import assert_close
from tests.generated.movements import interpreted
from tests.lower.cases import F32, kernel_of

INF = torch.inf


def mean_of_positive(x):
    return x[x > 0].mean()


def statistics(x):
    chosen = x[x > -1]
    same = chosen.mean(axis=0), chosen.var(0, correction=0, keepdims=True)
    return chosen.var(), chosen.std(unbiased=False), *torch.std_mean(chosen), *same


def extremes(x):
    return x[x > -1].amax(), x[x > -1].min(), torch.max(x[x > -1]), x[x > -1].amin(0, keepdim=True)


def counts(x):
    chosen = x[x.abs() < 1]
    return chosen.numel(), chosen.shape[0], chosen.size(0), (chosen > 0).sum()


def by_rank(x):
    chosen = x[x > -0.5]
    lowest = torch.quantile(x[x < 1].float(), 0.25, keepdim=True)
    return chosen.median(), chosen.float().quantile(0.9), lowest


def truths(x):
    chosen = x[x < 1]
    return (chosen > 0).any(), (chosen < 0.5).all(), (chosen > 0).float().mean()


def products_and_norms(x):
    chosen = x[x.abs() < 1]
    return chosen.prod(), chosen.norm(), torch.linalg.vector_norm(chosen, 1), chosen.sum(-1, True)


def written_twice(x):
    return (x[x > 0].log() * x[x > 0]).sum()


def logarithms(x):
    """Elements that are not chosen have no logarithm."""
    return torch.log(x[x > 0]).mean()


def beside_numbers_of_the_row(x):
    return (x[x > 0] / x.abs().amax() - x.std() * x[x > 0].sum()).sum()


def difference_to_an_element(x):
    """The mask never chooses x[0] itself, whose logarithm would be infinite here."""
    return (x[x > x[0]] - x[0]).log().sum()


def entropy_of_chosen(x):
    p = x[x > -0.5].softmax(-1)
    return -(p * p.log()).sum(), x[x > -0.5].logsumexp(0)


def loss_of_chosen(x, y):
    mask = y > 0
    return F.mse_loss(x[mask], y[mask]), F.smooth_l1_loss(x[mask], y[mask], reduction="sum")


def changed_in_place(x):
    chosen = x[x > 0]
    other = chosen
    chosen *= 2
    chosen.clamp_(max=3.0)
    return other.sum()


def doubled(x):
    x = x.clone()
    x[x > 0] *= 2
    return x


def standardized_where_chosen(x, y):
    mask = y > 0
    x = x.clone()
    x[mask] = (x[mask] - x[mask].mean()) / (x[mask].std() + 1e-5)
    return x


def sorted_into_zeros(x):
    y = torch.zeros_like(x)
    y[x > 0] = x[x > 0].softmax(-1)
    return y


def cumulative(x):
    y = torch.zeros_like(x)
    y[x > 0] = x[x > 0].cumsum(0)
    return y


def selected_by_torch(x, y):
    return torch.masked_select(x, y > 0).sum(), x.masked_select(y > 0).mean()


def of_groups(x):
    groups = x[: x.shape[-1] // 4 * 4].view(4, -1)
    return groups[groups > 0].mean()


def of_some_columns(x):
    return x[torch.arange(x.shape[-1]) % 2 == 0].sum()


def of_integers(x):
    k = (x * 10).int()
    long = k.long()
    return k[k > 0].sum(), k[k > 0].amax(), k[k > -100].min(), long[k > 0].amin(), long[k > 0].max()


ONE_ROW = (
    mean_of_positive, statistics, extremes, by_rank, counts, truths, products_and_norms,
    written_twice, logarithms, beside_numbers_of_the_row, difference_to_an_element,
    entropy_of_chosen, changed_in_place, doubled, sorted_into_zeros, cumulative, of_groups,
    of_some_columns, of_integers,
)  # fmt: skip
TWO_ROWS = (loss_of_chosen, standardized_where_chosen, selected_by_torch)
FUNCTIONS = {function.__name__: function for function in ONE_ROW + TWO_ROWS}
WITHOUT_GRADIENT = ("counts", "truths", "of_integers")
DIFFERENTIABLE = sorted({*FUNCTIONS}.difference(WITHOUT_GRADIENT))
LENGTHS = (8, 100, 1000)


def rows(name, n):
    return random_rows(n, 2 if FUNCTIONS[name] in TWO_ROWS else 1)


def random_rows(n, count):
    """Random rows that begin with 0, 0.5, 0.25 and 0.75, so that no mask chooses nothing."""
    g = torch.Generator().manual_seed(n)
    given = [torch.randn(6, n, generator=g) for _ in range(count)]
    for row in given:
        row[:, 1:4] = torch.tensor([0.5, 0.25, 0.75])
    given[0][:, 0] = 0.0
    return given


def leaves(result):
    return [torch.as_tensor(each) for each in (result if isinstance(result, tuple) else (result,))]


def by_row(function, given):
    """What torch computes of each row."""
    results = [leaves(function(*row)) for row in zip(*given, strict=True)]
    return [torch.stack(each) for each in zip(*results, strict=True)]


@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_results_are_those_of_each_row(name, n):
    given = rows(name, n)
    f = htile.rowwise(FUNCTIONS[name])
    assert_close(f, f(*given), *given)
    expected = by_row(FUNCTIONS[name], [row.double() for row in given])
    for one, other in zip(leaves(f(*given)), expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)


def gradients(results, args, seed=0):
    """Those of a sum of the results that have a gradient, each element with a random weight."""
    g = torch.Generator().manual_seed(seed)
    weights = [torch.randn(each.shape, generator=g) for each in results]
    pairs = zip(results, weights, strict=True)
    total = sum((each * w.to(each)).sum() for each, w in pairs if each.requires_grad)
    return torch.autograd.grad(total, args, allow_unused=True, materialize_grads=True)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_gradients_are_those_of_each_row(name):
    given = [row.requires_grad_() for row in rows(name, 100)]
    exact = [row.detach().double().requires_grad_() for row in given]
    found = leaves(htile.rowwise(FUNCTIONS[name])(*given))
    expected = by_row(FUNCTIONS[name], exact)
    assert [a.requires_grad for a in found] == [b.requires_grad for b in expected]
    wanted = gradients(expected, exact)
    for one, other in zip(gradients(found, given), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", WITHOUT_GRADIENT)
def test_numbers_of_elements_and_truths_have_no_gradient(name):
    given = [row.requires_grad_() for row in rows(name, 100)]
    results = leaves(htile.rowwise(FUNCTIONS[name])(*given))
    assert not any(each.requires_grad for each in results)


# what shares elements, changes them, and stands beside them


def an_alias(x):
    c = x[x > 0]
    d, e = c.view(-1), +c
    c.mul_(3)
    return d.sum() + c.sum() + e.sum()


def the_result_of_a_change(x):
    c = x[x > 0]
    d = c.add_(1)
    d *= 2
    return c.sum(), d.prod()


def a_function_in_place(x):
    c = x[x > 0] - 0.5
    z = F.hardtanh(c, 0.0, 1.0, inplace=True)
    z += 1
    return c.detach().sum() + 0 * x.sum()


def under_no_grad(x):
    c = x[x > 0] * 1
    with torch.no_grad():
        c *= 2
    return (c * c).sum()


def a_weight_without_gradient(x):
    mask = x > 0
    with torch.no_grad():
        weight = x[mask].softmax(0)
    return (weight * x[mask]).sum()


def a_change_without_gradient(x):
    x = x.clone()
    with torch.no_grad():
        x[x > 0] *= 2
    return x * x


def comparisons_in_place(x):
    c = x[x > 0]
    c.gt_(0.5)
    return (c + c).sum(), c.mean(), c.amax()


def integers_in_place(x):
    c = (x * 10).int()[x > 0]
    c += (x * 10).long()[x > 0]
    return c.sum(), c.amax()


def a_logarithm_of_no_integers(x):
    k = (x * 10).long()
    return k[k > 1000].logsumexp(0), k[k > 0].logsumexp(0)


def divisions_of_integers(x):
    k = (x * 3).int()
    quotients = (12 // k[k != 0]).sum(), (k.sum() // k[k != 0]).sum(), (k[k != 0] % k[k != 0]).sum()
    return *quotients, (7 % k[k != 0]).sum(), (k[k > 100] // (k > 100).sum()).sum()


def division_in_place(x):
    k = (x * 3).int()
    k[k != 0] = 12 // k[k != 0]
    k[k > 1] %= k[k > 1] - 1
    return k


def of_turned_rows(x):
    z = x.flip(0)
    total, deviation = (z[z > 0] * 2).sum(), z[z > 0].std()
    z[z > 0] *= 2
    return total, deviation, (x[x.flip(0) > 0] - x.mean()).sum(), z


def by_keyword(x):
    larger = torch.max(x[x > 0], other=x[x > 0].exp() - 2)
    total, variance = torch.sum(input=x[x > 0]), torch.var(input=x[x > -1])
    return larger.sum(), total, variance, torch.logsumexp(input=x[x > 0], dim=0)


def weighted_losses(x, y):
    mask, target, weight = x > 0, (y > 0).to(y.dtype), y.detach().abs()
    return (
        F.binary_cross_entropy(x[mask].sigmoid(), target[mask], weight=weight[mask]),
        F.binary_cross_entropy_with_logits(x[mask], target[mask], weight=weight[mask]),
        F.mse_loss(x[mask], y[mask], weight=weight[mask], reduction="sum"),
        F.kl_div(x[mask], y[mask].softmax(0), reduction="batchmean"),
    )


def dtypes_of_others(x, y):
    return x[x > 0].to(y).sum(), x[x > 0].type_as(y).mean()


def chosen_twice(x):
    c = x[x > -1]
    d = c[c > 0.3]
    e = x[x > -1]
    e[e > 0.3] = 0.1
    e[e < 0] *= 3
    return d.log().sum(), d.norm(), c.masked_select(c > 0).sum(), e.sum()


def filled_and_summed(x):
    c, d, e = x[x > 0], x[x > 0], x[x > 0]
    c.zero_(), d.fill_(2.0), e.cumsum_(0)
    return c.sum(), d.sum(), e.mean() if e.is_floating_point() else c


def products_of_two(x, y):
    return torch.dot(x[x > 0], y[x > 0]), x[x > 0].dot(x[x > 0]), x[x > 0].nanmean()


CHANGES = {f.__name__: f for f in (
    an_alias, the_result_of_a_change, a_function_in_place, under_no_grad,
    a_weight_without_gradient, a_change_without_gradient, comparisons_in_place, integers_in_place,
    a_logarithm_of_no_integers, divisions_of_integers, division_in_place, of_turned_rows,
    by_keyword, weighted_losses, dtypes_of_others, chosen_twice, filled_and_summed,
    products_of_two,
)}  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_changes_and_what_stands_beside_are_torchs(name):
    function = CHANGES[name]
    count = function.__code__.co_argcount
    given = [row.requires_grad_() for row in random_rows(50, count)]
    exact = [row.detach().double().requires_grad_() for row in given]
    found, expected = leaves(htile.rowwise(function)(*given)), by_row(function, exact)
    for one, other in zip(found, expected, strict=True):
        assert one.is_floating_point() or one.dtype is other.dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=1e-4, atol=1e-5)
    if any(each.requires_grad for each in found):
        wanted = gradients(expected, exact)
        for one, other in zip(gradients(found, given), wanted, strict=True):
            torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def test_an_alias_that_may_have_changed_raises():
    def f(x):
        c = x[x > 0]
        d = c.contiguous()
        c += 1
        return d.sum()

    with pytest.raises(TraceError, match="may share memory"):
        htile.rowwise(f)(torch.ones(2, 8))


# The interpreter has no casts to integers and no elements by rank.
@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {"of_integers", "by_rank"}))
def test_the_graph_of_the_kernel_computes_the_same(name):
    given = rows(name, 1000)
    metas = [torch.empty(64, 1000, dtype=F32, device="meta") for _ in given]
    kernel = kernel_of(FUNCTIONS[name], *metas)
    named = dict(zip([i.name for i in kernel.traced.inputs], given, strict=True))
    found = interpreted(kernel.graph, kernel.traced, named, (6,))
    expected = by_row(FUNCTIONS[name], [row.double() for row in given])
    for one, other in zip(found, expected, strict=True):
        one = torch.as_tensor(one).double().reshape(other.shape)
        torch.testing.assert_close(one, other.double(), rtol=1e-7, atol=1e-7)


def test_where_nothing_is_chosen():
    """Results are torch's; of extremes, which torch refuses, -inf is the most and inf the least."""
    def of_none(x):
        chosen = x[x > 100]
        return chosen.sum(), chosen.prod(), chosen.mean(), chosen.var(), chosen.norm(), \
            chosen.logsumexp(0), chosen.numel(), chosen.amax(), chosen.amin(), chosen.median()

    found = [each[0].item() for each in htile.rowwise(of_none)(torch.ones(2, 8))]
    assert str(found) == str([0.0, 1.0, torch.nan, torch.nan, 0.0, -INF, 0, -INF, INF, torch.nan])


def test_what_is_not_chosen_reaches_nothing():
    x = torch.tensor([[1.0, 2.0, torch.nan, INF, -INF, 3.0]])
    f = htile.rowwise(lambda x: (
        x[x.abs() < 10].mean(), x[x.abs() < 10].exp().sum(), x[x.abs() < 10].median(),
        x[~(x.abs() < 10)].median()))  # fmt: skip
    x.requires_grad_()
    mean, total, median, of_others = f(x)
    assert median.item() == 2.0 and of_others.isnan().all()
    torch.testing.assert_close(mean.item(), 2.0)
    (gradient,) = torch.autograd.grad(mean + total, x)
    assert gradient[0, 2:5].tolist() == [0.0] * 3
    torch.testing.assert_close(gradient[0, :2], 1 / 3 + x.detach()[0, :2].exp())


def test_a_gradient_of_a_number_does_not_see_what_is_not_chosen():
    """d log(x - c) / dc is infinite at 0, which stands in the place of other elements."""
    def f(x, c):
        return (x[x > 1] - c).log().sum()

    x = torch.tensor([[2.0, 0.5, 3.0]])
    c = torch.zeros(1, requires_grad=True)
    wrapped = htile.rowwise(f)
    (gradient,) = torch.autograd.grad(wrapped(x, c[:, None]).sum(), c)
    torch.testing.assert_close(gradient, torch.tensor([-1 / 2 - 1 / 3]))


def test_rows_of_any_length():
    f = htile.rowwise(dynamic_n=True)(mean_of_positive)
    for n in (8, 40):
        x = rows("mean_of_positive", n)[0]
        assert_close(f, f(x), x)


def added_to_one_number(x):
    total = x.sum()
    total += x[x > 0]
    return total


REFUSED = {
    "returned": (lambda x: x[x > 0], UnsupportedError, "x[mask] has no fixed length"),
    "beside a row": (lambda x: x[x > 0] + x, ShapeError, "choose its elements too, y[mask]"),
    "of another mask": (lambda x: x[x > 0] + x[x > 1], ShapeError, "with the same mask"),
    "put into one number": (
        lambda x: x.sum().add_(x[x > 0]), ShapeError, "a value of another length"),
    "added to one number": (added_to_one_number, ShapeError, "reduce them first"),
    "a mask of another shape": (
        lambda x: x.masked_select((x > 0)[:3]), ShapeError, "with a mask of shape (3,)"),
    "integers that become floats": (
        lambda x: x.int()[x > 0].div_(2).sum(), DtypeError, "cannot put"),
    "of masks of zeros with two signs": (
        lambda x: x[1 / (x * 0.0) > 0] * x[1 / (x * -0.0) > 0], ShapeError, "the same mask"),
    "a weighted mean": (
        lambda x: F.mse_loss(x[x > 0], x[x > 0], weight=x[x > 0]), UnsupportedError,
        "with a weight and reduction='mean'"),
    "an index": (lambda x: x[x[x > 0].long()], UnsupportedError, "x[y[mask]]"),
    "a scan in place of an order": (
        lambda x: x[x > 0].cummax(0).values, UnsupportedError, "x.cummax of x[mask]"),
    "a median with its place": (
        lambda x: x[x > 0].median(-1).values, UnsupportedError, "other arguments"),
    "sorted": (lambda x: x[x > 0].sort().values, UnsupportedError, "x.sort of x[mask]"),
    "with indices": (lambda x: x[x > 0].max(-1).values, UnsupportedError, "x[mask].amax(dim)"),
    "an element": (lambda x: x[x > 0][0], UnsupportedError, "an index that is no mask of them"),
    "a neighbour": (lambda x: x[x > 0].diff().sum(), UnsupportedError, "x.diff of x[mask]"),
    "joined": (lambda x: torch.cat((x[x > 0], x)), UnsupportedError, "torch.cat of x[mask]"),
    "a length": (lambda x: x * len(x[x > 0]), UnsupportedError, "mask.sum() for len(x[mask])"),
    "visited": (lambda x: sum(x[x > 0]), UnsupportedError, "iter(x[mask])"),
    "an attribute": (lambda x: x[x > 0].T, UnsupportedError, "x[mask].T is not supported"),
    "the least norm": (lambda x: x[x > 0].norm(-1), UnsupportedError, "of order -1 of x[mask]"),
    "other arguments": (lambda x: x[x > 0].mean(1, 2, 3), UnsupportedError, "other arguments"),
    "of whole rows": (
        lambda x: x.view(2, 4)[torch.arange(2) > 0], UnsupportedError, "a mask of the shape of x"),
    "beside an index": (
        lambda x: x.view(2, 4)[0, torch.arange(4) > 0], UnsupportedError, "beside other indices"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_needs_their_number_or_order_is_refused(name):
    function, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        htile.rowwise(function)(torch.ones(2, 8))
    assert message in caught.value.message
    assert caught.value.loc is not None


def test_elements_are_assigned_to_those_of_the_same_mask():
    def swapped(x):
        y = x.clone()
        y[x > 1] = x[x > 0]
        return y

    with pytest.raises(ShapeError, match="both have to be the same"):
        htile.rowwise(swapped)(torch.ones(2, 8))

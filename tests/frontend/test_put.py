"""Elements that are put at indices are those of torch: `scatter` and its relatives."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import DtypeError, ShapeError, TraceError, UnsupportedError
from htile.testing import assert_close
from tests.gradients import check

M, N = 5, 24
PLACES = (0, 7, 23)


def shares(x):
    found = x.topk(3)
    return torch.zeros_like(x).scatter_(-1, found.indices, found.values.softmax(-1))


def best_groups(x):
    best = x.view(4, 6).amax(-1).topk(2).indices
    chosen = torch.zeros(4, dtype=torch.bool).scatter(-1, best, True)
    return torch.where(chosen[:, None], x.view(4, 6), 0.0).view(-1)


FUNCTIONS = {
    "a number": lambda x: x.scatter(-1, torch.tensor(PLACES), 2.0),
    "values": lambda x, y: x.scatter(0, torch.tensor(PLACES), y[:3]),
    "the shares of the largest": shares,
    "groups that are chosen": best_groups,
    "into groups": lambda x, y: x.view(4, 6).scatter(
        1, torch.arange(4)[:, None] + torch.arange(2), y[:8].view(4, 2)),
    "along the first axis": lambda x, y: x.view(4, 6).scatter(
        0, torch.arange(6).view(1, 6) % 4, y[:6].view(1, 6)),
    "a source that is longer": lambda x, y: x.scatter(-1, torch.tensor(PLACES), y),
    "sums at equal places": lambda x, y: x.scatter_add(-1, torch.tensor([1, 4, 1]), y[:3]),
    "sums of groups": lambda x: torch.zeros_like(x[:4]).scatter_add(-1, torch.arange(24) % 4, x),
    "sums of many in a few": lambda x: torch.zeros_like(x[:3]).scatter_add(
        0, (x > 0).long() + (x > 1).long(), x),
    "rows of many in a few": lambda x: x[:2].index_add(0, (x > 0).long(), x, alpha=0.5),
    "products": lambda x, y: x.scatter_reduce(0, torch.tensor([1, 4, 1]), y[:3], "prod"),
    "the larger": lambda x, y: x.scatter_reduce(0, torch.tensor([1, 4]), y[:2], "amax"),
    "the smaller": lambda x, y: x.scatter_reduce(0, torch.tensor([1, 4]), y[:2], reduce="amin"),
    "means": lambda x, y: x.scatter_reduce(0, torch.tensor([1, 4, 1]), y[:3], "mean"),
    "means of others": lambda x, y: x.scatter_reduce(
        0, torch.tensor([1, 4, 1]), y[:3], "mean", include_self=False),
    "the largest other": lambda x, y: x.scatter_reduce(
        0, torch.tensor([1, 4, 1]), y[:3], "amax", include_self=False),
    "the product of others": lambda x, y: x.view(4, 6).scatter_reduce(
        0, torch.arange(12).view(2, 6) % 3, y[:12].view(2, 6), "prod", include_self=False),
    "filled": lambda x: x.index_fill(0, torch.tensor(PLACES), -1.0),
    "filled from the end": lambda x: x.index_fill(0, torch.tensor([-1, 2]), 0.5),
    "filled columns": lambda x: x.view(4, 6).index_fill(1, torch.tensor([0, 4]), 0.5),
    "copied": lambda x, y: x.index_copy(0, torch.tensor(PLACES), y[:3]),
    "added": lambda x, y: x.index_add(0, torch.tensor([1, 4, 1]), y[:3], alpha=0.5),
    "added rows": lambda x, y: x.view(4, 6).index_add(0, torch.tensor([0, 2]), y[:12].view(2, 6)),
    "chosen elements": lambda x: x.index_select(0, torch.tensor(PLACES)),
}  # fmt: skip
WITHOUT_GRADIENT = {"a source that is longer"}  # in torch


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_and_gradients(name):
    f = htile.rowwise(FUNCTIONS[name])
    torch.manual_seed(0)
    args = [torch.randn(M, N) for _ in f._signature.names]
    assert_close(f, f(*args), *args)
    if name not in WITHOUT_GRADIENT:
        check(f, *args, tolerance=1e-7)


def test_integers_and_masks_keep_their_dtype():
    @htile.rowwise
    def f(x):
        found = x.topk(3).indices
        ranks = torch.zeros(N, dtype=torch.int32).scatter_(-1, found, torch.arange(3).int() + 1)
        return ranks, torch.zeros(N, dtype=torch.bool).scatter(-1, found, True)

    x = torch.randn(M, N)
    ranks, mask = f(x)
    expected = torch.zeros(M, N, dtype=torch.int32)
    expected.scatter_(1, x.topk(3).indices, torch.arange(1, 4, dtype=torch.int32).expand(M, 3))
    assert torch.equal(ranks, expected) and torch.equal(mask, expected > 0)


REDUCED = ("sum", "prod", "mean", "amax", "amin")


@pytest.mark.parametrize("include_self", [True, False])
@pytest.mark.parametrize("reduce", REDUCED)
def test_many_elements_are_combined_in_a_few(reduce, include_self):
    """Also where no element has an index, and of integers."""

    def f(x, seg):
        return torch.zeros(9).scatter_reduce(0, seg, x, reduce, include_self=include_self)

    x, seg = torch.rand(4, 97) + 0.5, torch.randint(0, 8, (4, 97))
    found = htile.rowwise(f)(x, seg)
    of_float64 = torch.zeros(4, 9).double()
    expected = of_float64.scatter_reduce(1, seg, x.double(), reduce, include_self=include_self)
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-6)
    wide = x.clone().requires_grad_(), x.double().requires_grad_()
    weights = torch.linspace(-1, 1, 36).view(4, 9)
    of_float64.scatter_reduce(1, seg, wide[1], reduce, include_self=include_self).mul(
        weights).sum().backward()  # fmt: skip
    htile.rowwise(f)(wide[0], seg).mul(weights).sum().backward()
    torch.testing.assert_close(wide[0].grad.double(), wide[1].grad, rtol=1e-4, atol=1e-5)
    if reduce == "mean":
        return

    def of_integers(c, seg):
        return c[:9].scatter_reduce(0, seg, c, reduce, include_self=include_self)

    c = torch.randint(-50, 50, (4, 97))
    expected = c[:, :9].scatter_reduce(1, seg, c, reduce, include_self=include_self)
    assert torch.equal(htile.rowwise(of_integers)(c, seg), expected)


def test_a_softmax_of_segments():
    """As libraries of graphs write it, in one kernel of as many lines for any row."""

    def f(x, seg):
        largest = x.detach().new_zeros(8).scatter_reduce_(0, seg, x.detach(), "amax",
                                                          include_self=False)  # fmt: skip
        e = (x - largest[seg]).exp()
        return e / (e.new_zeros(8).scatter_add_(0, seg, e) + 1e-16)[seg]

    x, seg = torch.randn(4, 1000), torch.randint(0, 8, (4, 1000))
    wide = x.double()
    expected = torch.zeros_like(wide)
    for k in range(8):
        inside = wide.masked_fill(seg != k, -torch.inf).softmax(-1)
        expected = torch.where(seg == k, inside, expected)
    torch.testing.assert_close(htile.rowwise(f)(x, seg).double(), expected, rtol=1e-5, atol=1e-7)
    kernel = htile.rowwise(f).inspect(x.requires_grad_(), seg, arch="sm_90a")
    assert max(len(k.source.splitlines()) for k in (kernel, kernel.backward)) < 700


@pytest.mark.parametrize("n", [9, 24, 64])
def test_a_short_row_of_indices_is_looked_at_as_a_whole(n):
    """No element is put by itself, so no thread loads all of them."""
    f = htile.rowwise(lambda x, seg: torch.zeros(8).scatter_add(0, seg, x))
    x, seg = torch.randn(4, n), torch.randint(0, 8, (4, n))
    exact = torch.zeros(4, 8).double().scatter_add(1, seg, x.double())
    torch.testing.assert_close(f(x, seg).double(), exact, rtol=1e-5, atol=1e-6)
    assert len(f.inspect(x, seg, arch="sm_90a").graph.inputs) == 2


@pytest.mark.parametrize("n", [64, 65, 300])
def test_counts_of_many_elements(n):
    """In a few places, by sums at indices and by classes of one hot."""

    @htile.rowwise
    def f(x):
        bins = (x > -1).long() + (x > 1).long()
        ones = torch.ones(x.shape[-1], dtype=torch.int64)
        counts = torch.zeros(4, dtype=torch.int64).scatter_add(0, bins, ones)
        return counts, F.one_hot(bins, 3).sum(0)

    x = torch.randn(M, n)
    counts, hot = f(x)
    expected = torch.stack([(x <= -1).sum(-1), ((x > -1) & (x <= 1)).sum(-1), (x > 1).sum(-1)], -1)
    assert torch.equal(counts[:, :3], expected) and not counts[:, 3].any()
    assert torch.equal(hot, expected)


def test_what_is_filled_with_a_number_of_a_call_can_be_changed():
    @htile.rowwise
    def smoothed(x, label: htile.PerRow, eps: htile.Scalar):
        shares = torch.full_like(x, eps)
        shares[label] = 1 - eps
        return -(shares * x.log_softmax(-1)).sum()

    x, label = torch.randn(M, N), torch.arange(M)
    shares = torch.full((M, N), 0.1).scatter(1, label[:, None], 0.9)
    expected = -(shares * x.log_softmax(-1)).sum(-1)
    torch.testing.assert_close(smoothed(x, label, 0.1), expected)


def test_a_number_is_one_of_the_dtype_before_it_is_added():
    f = htile.rowwise(lambda x: torch.arange(9).scatter(0, x.topk(2).indices, 1.5, reduce="add"))
    x = torch.randn(M, 9)
    expected = torch.arange(9).repeat(M, 1).scatter(1, x.topk(2).indices, 1.5, reduce="add")
    assert torch.equal(f(x), expected)


def test_an_index_of_each_row_that_is_beyond_the_row_puts_nothing():
    @htile.rowwise
    def f(x, at: htile.Inner[1]):
        return x.scatter(-1, at, 7.0)

    x = torch.zeros(3, 4)
    at = torch.tensor([[0, 3], [4, 1], [-1, 2**40]])
    assert torch.equal(f(x, at), torch.tensor([[7.0, 0, 0, 7], [0, 7, 0, 0], [0, 0, 0, 0]]))


def test_the_argument_is_not_written():
    @htile.rowwise
    def f(x):
        return x.scatter_(-1, x.argmax(-1, keepdim=True), 0.0)

    x = torch.tensor([[1.0, 2, 3]])
    assert torch.equal(f(x), torch.tensor([[1.0, 2, 0]])) and x[0, 2] == 3


REFUSED = {
    "of many indices": (UnsupportedError, "by 65 indices: at most 64",
                        lambda x: x.scatter(0, torch.arange(65), 1.0)),
    "by floats": (DtypeError, "by an index of", lambda x: x.scatter(0, x[:2], 1.0)),
    "by a list": (TraceError, "an index is a tensor", lambda x: x.index_fill(0, [1, 2], 0.0)),
    "of a list": (TraceError, "an index is a tensor", lambda x: x.index_select(0, [1, 2])),
    "by a number": (ShapeError, r"write index\[None\]", lambda x: x.scatter(0, x.argmax(), 0.0)),
    "into a number": (ShapeError, "into a value of shape",
                      lambda x: x.sum().scatter(0, torch.tensor(0), 0.0)),
    "into 8 bits": (DtypeError, "convert it first", lambda x: x.to(torch.uint8).scatter(
        0, torch.arange(2), 1, reduce="add")),
    "by shares of integers": (DtypeError, "write an integer", lambda x: torch.arange(9).index_add(
        0, torch.arange(2), torch.arange(2), alpha=0.5)),
    "of other sizes": (ShapeError, "must be those of x",
                       lambda x: x.view(2, 50).scatter(1, torch.zeros(1, 3).long(), 1.0)),
    "of fewer values": (ShapeError, "one value for each index",
                        lambda x: x.scatter(0, torch.arange(3), x[:2])),
    "of floats into integers": (DtypeError, "cannot put torch.float32 into torch.int64",
                                lambda x: torch.arange(9).scatter(0, torch.arange(3), x[:3])),
    "by medians": (UnsupportedError, "sum, prod, mean, amax or amin",
                 lambda x: x.scatter_reduce(0, torch.arange(3), x[:3], "median")),
    "of parts that do not fit": (ShapeError, r"take those of shape \(2, 50\)",
                                 lambda x: x.view(2, 50).index_add(0, torch.arange(2), x[:2])),
    "of one value that is several": (ShapeError, "index_fill takes one value",
                                     lambda x: x.index_fill(0, torch.arange(2), x[:2])),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    kind, words, function = REFUSED[name]
    with pytest.raises(kind, match=words):
        htile.rowwise(function)(torch.randn(2, 100))

"""Elements of int64 by rank, whose keys would have more than 64 bits, against numpy."""

import numpy as np
import pytest
import torch
from torch.utils import _pytree as pytree

import htile
from htile.errors import DtypeError
from htile.frontend.reference import evaluate
from htile.lower.passes.simplify import run_passes
from tests.generated.movements import interpreted
from tests.gradients import called

LOWEST, HIGHEST = torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max


def random(*shape):
    """Many elements are equal, some are far apart, and some are the least and the largest ones."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-4, 5, shape, generator=generator) * 2**40
    kind = torch.randint(20, shape, generator=generator)
    x = torch.where(kind == 0, LOWEST, torch.where(kind == 1, HIGHEST, x))
    return x + (kind == 2)  # which float32 would not tell from its neighbours


def order(x, descending):
    """The indices in order, of equal elements the first one first."""
    keys = ~x.numpy() if descending else x.numpy()  # -LOWEST would be LOWEST
    return torch.from_numpy(np.argsort(keys, axis=-1, kind="stable"))


def taken(x, indices):
    return x.gather(-1, indices), indices


def extremes(x):
    return x.argmax(), x.argmin(), *x.max(-1), *x.min(-1), x.argmax(keepdim=True)


def ranked(x):
    return *x.topk(5), *x.topk(3, largest=False), x.sort().values[1]


def in_order(x):
    return *x.sort(), *x.sort(descending=True), x.median(), x.kthvalue(4).values


def of_groups(x):
    groups = x.view(4, -1)
    return groups.argmax(-1), *groups.topk(2), *groups.min(0)


def expected(f, x):
    up, down = order(x, False), order(x, True)
    if f is extremes:
        largest, least = down[:, 0], up[:, 0]
        values = x.amax(-1), x.amin(-1)
        return largest, least, values[0], largest, values[1], least, largest[:, None]
    if f is ranked:
        return *taken(x, down[:, :5]), *taken(x, up[:, :3]), x.gather(-1, up[:, 1:2])[:, 0]
    if f is in_order:
        ascending, descending = taken(x, up), taken(x, down)
        middle = ascending[0][:, (x.shape[1] - 1) // 2]
        return *ascending, *descending, middle, ascending[0][:, 3]
    groups = x.view(len(x), 4, -1)
    down = order(groups, True)
    least = order(groups.mT, False)[..., 0]
    across = groups.gather(1, least[:, None])[:, 0]
    return down[..., 0], *taken(groups, down[..., :2]), across, least


@pytest.mark.parametrize(("f", "n"), [
    (extremes, 1), (extremes, 7), (extremes, 1003), (ranked, 64), (ranked, 1003), (in_order, 9),
    (of_groups, 64), (of_groups, 100),
], ids=lambda each: getattr(each, "__name__", each))  # fmt: skip
def test_elements_and_indices(f, n):
    x = random(9, n)
    rowwise = htile.rowwise(f)
    exact = expected(f, x)
    for found, each in zip(pytree.tree_leaves(rowwise(x)), exact, strict=True):
        assert found.dtype is torch.int64 and torch.equal(found, each)
    kernel = rowwise.inspect(x, arch="sm_90a")
    assert kernel.resources.stack == 0
    if f is extremes:  # the results of others have several pieces
        for found, each in zip(evaluate(kernel.graph, {"x": x}, (9,)), exact, strict=True):
            assert torch.equal(found, each)


@pytest.mark.parametrize("f", [ranked, in_order, of_groups])
def test_the_graph_of_a_kernel_means_the_same(f):
    x = torch.randint(-40, 50, (9, 60), generator=torch.Generator().manual_seed(1)) * 2**40
    call = called(htile.rowwise(f), x)
    found = interpreted(run_passes(call.graph), call.graph, {"x": x}, (9,))
    for one, each in zip(found, expected(f, x), strict=True):
        np.testing.assert_array_equal(one, each.numpy())


def test_rows_of_any_length():
    f = htile.rowwise(dynamic_n=True)(extremes)
    for n in (70, 100):
        for found, each in zip(f(random(5, n)), expected(extremes, random(5, n)), strict=True):
            assert torch.equal(found, each)


def test_a_rank_in_the_middle_of_a_long_row_is_refused():
    for f in (lambda x: x.median(), lambda x: x.sort().values[50], lambda x: x.kthvalue(50)):
        with pytest.raises(DtypeError, match=r"int64 at a rank .* write x\.int") as caught:
            htile.rowwise(f)(random(3, 101))
        assert "lambda" in caught.value.loc.text

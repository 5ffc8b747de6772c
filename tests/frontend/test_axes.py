"""Functions whose meaning depends on the axes of what they are given are torch's."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import ShapeError, UnsupportedError
from htile.testing import assert_close
from tests.gradients import check

M, N = 5, 12
INF = float("inf")
norm = torch.linalg.norm


def layer_norms(x):
    return torch.native_layer_norm(x.view(3, 4), (4,), None, None, 1e-5)


def divergence(x, y):
    given = x.view(3, 4).log_softmax(-1), y.view(3, 4).softmax(-1)
    return tuple(F.kl_div(*given, reduction=how) for how in ("batchmean", "mean", "sum"))


FUNCTIONS = {
    "native layer norm": lambda x: layer_norms(x)[0],
    "its moments": lambda x: layer_norms(x)[1:],
    "divergence": divergence,
    "divergence of rows": lambda x, y: F.kl_div(
        x.log_softmax(-1), y.softmax(-1), reduction="batchmean"
    ),
    "norms of a matrix": lambda x: tuple(
        norm(x.view(3, 4), order) for order in (1, -1, INF, -INF, "fro", None)
    ),
    "norms of matrices": lambda x: tuple(
        norm(x.view(3, 2, 2), order, dim=dim, keepdim=keep)
        for order in (1, -1, INF, -INF, "fro") for dim in ((0, 2), (2, 0)) for keep in (False, True)
    ),
    "norms of a row": lambda x: tuple(norm(x, order) for order in (1, 2, 3.0, 0, INF, -INF)),
    "norms of groups": lambda x: tuple(norm(x.view(3, 4), order, dim=-1) for order in (1, 2, INF)),
    "norms of elements": lambda x: torch.linalg.vector_norm(x.view(3, 4), 1),
}  # fmt: skip


WITHOUT_GRADIENT = {"its moments", "norms of a row"}  # in torch, and the norm of order 0


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    f = htile.rowwise(FUNCTIONS[name])
    torch.manual_seed(0)
    args = [torch.randn(M, N) for _ in f._signature.names]
    assert_close(f, f(*args), *args)
    if name not in WITHOUT_GRADIENT:
        check(f, *args, tolerance=1e-7)


def test_norms_that_are_refused():
    for order, words in ((2, "of order 2 of a matrix"), ("nuc", "of order 'nuc'")):
        with pytest.raises(UnsupportedError, match=words):
            htile.rowwise(lambda x, order=order: norm(x.view(3, 4), order))(torch.ones(2, N))
    with pytest.raises(ShapeError, match="along 3 axes"):
        htile.rowwise(lambda x: norm(x.view(3, 2, 2), 1))(torch.ones(2, N))


def without_nan(x):
    groups = x.view(3, 4)
    return (
        *groups.nanmedian(1), *groups.nanmedian(0, keepdim=True), groups.nanquantile(0.4, 0),
        groups.nanquantile(torch.tensor([0.4, 0.7]), 1), x.view(2, 2, 3).nanmedian(-2).values,
    )  # fmt: skip


def test_ranks_that_each_group_has_of_its_own():
    x = torch.randn(M, N)
    x[0, 3], x[1, 5:7], x[2, 4:7] = torch.nan, torch.nan, torch.nan
    for result, exact in zip(
        htile.rowwise(without_nan)(x), zip(*map(without_nan, x), strict=True), strict=True
    ):
        torch.testing.assert_close(result, torch.stack(exact))
    with pytest.raises(UnsupportedError, match="whose rank each group has of its own"):
        htile.rowwise(lambda x: x.view(2, -1).nanmedian(1).values)(torch.ones(3, 200))

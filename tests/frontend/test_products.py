"""Products of rows and small matrices, held against the oracle, and their kernels."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import UnsupportedError
from htile.testing import assert_close
from tests.gradients import check, check_tangents


@htile.rowwise
def dots(x, y):
    return x @ y, torch.dot(x, y), x.matmul(y), torch.matmul(x, y) * x


@htile.rowwise
def of_a_row(matrix: htile.Inner[2], x):
    return matrix @ x, torch.mv(matrix, x), matrix.mv(x)


@htile.rowwise
def into_a_row(share: htile.Inner[1], v: htile.Inner[2]):
    return torch.softmax(share, -1) @ v, share.matmul(v)


@htile.rowwise
def of_matrices(a: htile.Inner[2], b: htile.Inner[2]):
    return a @ b, torch.mm(a, b), (a @ a.mT) @ b


@htile.rowwise
def projected(x, weight: htile.Inner[2]):
    return torch.relu(x) @ weight


@htile.rowwise
def einsums_of_rows(x, y):
    return (
        torch.einsum("i,i->", x, y), torch.einsum("i,i->i", x, y), torch.einsum("i,i", x, y),
        torch.einsum("...i,...i->...", x, y), torch.einsum("i->", x), torch.einsum("a", x),
        torch.einsum("i , i", [x, y]), torch.inner(x, y), torch.vdot(x, y),
        torch.linalg.vecdot(x, y), torch.outer(x[:3], y), torch.ger(y[:2], x[:2]),
    )  # fmt: skip


@htile.rowwise
def einsums_of_matrices(a: htile.Inner[2], b: htile.Inner[2]):
    return (
        torch.einsum("ij,jk->ik", a, b), torch.einsum("ij,jk", a, b), torch.einsum("ij->ji", b),
        torch.einsum("kj,nk->nj", b, a), torch.einsum("ij,jk->k", a, b), torch.einsum("ij->j", b),
        torch.einsum("ij,jk,lk->il", a, b, b), torch.einsum("j,jk->k", a[0], b),
        torch.einsum("ij,kj->ikj", b, b[:2]), torch.linalg.vecdot(b, b[:1], dim=0),
    )  # fmt: skip


@htile.rowwise
def sums_along_axes(a: htile.Inner[2], b: htile.Inner[2]):
    return (
        torch.tensordot(a, b, 1), torch.tensordot(a, a), torch.tensordot(b, a, ([0], [1])),
        torch.tensordot(a, a, dims=((1, 0), (1, 0))), torch.tensordot(a, b, ([-1], [0])),
        torch.tensordot(a[0], b, ((0,), (0,))), torch.tensordot(a, b[0], dims=0),
        torch.linalg.multi_dot([a, b, b.T]), torch.linalg.multi_dot((a[0], b, b.T, a[0])),
        *[torch.linalg.matrix_power(a @ a.T, n) for n in (1, 2, 5)],
        (a @ a.mT).matrix_power(3),
    )  # fmt: skip


@htile.rowwise
def of_a_few(a: htile.Inner[3], b: htile.Inner[3]):
    return (
        a @ b, torch.bmm(a, b), a.matmul(b[0]), a[0] @ b, a @ b[0, :, 0], a[0, 0] @ b, a[:1] @ b,
        a @ b[:1], torch.baddbmm(a @ b, a, b), torch.baddbmm(a[:, :, :1], a, b, beta=0.5, alpha=2),
        torch.einsum("...ij,...jk->...ik", a, b), torch.einsum("...ij,jk->...k", a, b[0]),
        torch.einsum("z...,z...", a, a), torch.einsum("...ij,...jk", a, b),
        torch.einsum("...j,kj->...", a, a[0]), torch.einsum("...->", b),
    )  # fmt: skip


@htile.rowwise
def by_small_weights(x, weight: htile.Inner[2], bias: htile.Inner[1]):
    y = F.linear(x, weight, bias)
    return y, F.linear(x, weight), F.linear(x, weight[:1]), F.linear(weight, weight)


@htile.rowwise
def added_products(a: htile.Inner[2], b: htile.Inner[2]):
    c = a @ b
    return (
        torch.addmm(c, a, b), c.addmm(a, b, beta=2, alpha=0.5), torch.addmm(c[0], a, b, alpha=-1),
        torch.addmm(c, a, b, beta=0), torch.addmv(a[:, 0], a, b[:, 0]),
    )  # fmt: skip


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


CASES = {
    "rows": (dots, (5, 40), (5, 40)),
    "a row and a vector": (dots, (5, 40), (40,)),
    "rows of one": (dots, (5, 1), (5, 1)),
    "a matrix of each row": (of_a_row, (5, 3, 16), (5, 16)),
    "a matrix that is shared": (of_a_row, (7, 16), (5, 16)),
    "a matrix of one row": (of_a_row, (5, 1, 16), (5, 16)),
    "a mixture": (into_a_row, (5, 4), (5, 4, 24)),
    "a mixture of 64": (into_a_row, (5, 64), (5, 64, 96)),
    "matrices": (of_matrices, (5, 3, 3), (5, 3, 20)),
    "a matrix for a stack": (of_matrices, (4, 4), (5, 4, 8)),
    "a layer": (projected, (5, 16), (16, 100)),
    "a long row": (projected, (5, 100), (100, 8)),
    "a long row and a column": (projected, (5, 65), (65, 1)),
    "a long row and 64 columns": (projected, (5, 65), (65, 64)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", CASES)
def test_product(name, dtype):
    f, first, second = CASES[name]
    args = random(*first, dtype=dtype), random(*second, dtype=dtype, seed=1)
    results = f(*args)
    assert_close(f, results, *args)
    given = results if isinstance(results, tuple) else (results,)
    # what comes of the row's last axis by a reduction is float32, as everywhere; rows are as x
    is_row = [r.dim() > 1 and f is not of_a_row for r in given]
    assert [r.dtype for r in given] == [dtype if row else torch.float32 for row in is_row]
    assert f.inspect(*args).source


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_einsum(dtype):
    for f, first, second in (
        (einsums_of_rows, (5, 40), (5, 40)), (einsums_of_rows, (5, 40), (40,)),
        (einsums_of_matrices, (5, 3, 4), (5, 4, 20)), (einsums_of_matrices, (3, 4), (5, 4, 20)),
    ):  # fmt: skip
        args = random(*first, dtype=dtype), random(*second, dtype=dtype, seed=1)
        assert_close(f, f(*args), *args)
        assert f.inspect(*args).source


OTHERS = {
    "a few matrices": (of_a_few, (5, 4, 3, 6), (5, 4, 6, 2)),
    "a few long matrices": (of_a_few, (5, 2, 3, 4), (5, 2, 4, 70)),
    "small weights": (by_small_weights, (5, 16), (5, 3, 16), (5, 3)),
    "small weights of all rows": (by_small_weights, (5, 100), (4, 100), (4,)),
    "products along axes": (sums_along_axes, (5, 3, 4), (5, 4, 7)),
    "products that are added": (added_products, (5, 3, 4), (5, 4, 7)),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_products(name):
    f, *shapes = OTHERS[name]
    for dtype in (torch.float32, torch.bfloat16):
        args = [random(*shape, dtype=dtype, seed=k) for k, shape in enumerate(shapes)]
        assert_close(f, f(*args), *args)
        kernel = f.inspect(*[a.to("meta") for a in args], arch="sm_90a")
        assert kernel.resources.stack == 0


@pytest.mark.parametrize("name", OTHERS)
def test_derivatives(name):
    f, *shapes = OTHERS[name]
    args = [random(*shape, seed=k) for k, shape in enumerate(shapes)]
    check(f, *args)
    check_tangents(f, *args)


def test_addmm_without_its_first():
    """Torch does not read what is multiplied by the number 0, so an infinity does not matter."""
    @htile.rowwise
    def f(a: htile.Inner[2]):
        return torch.addmm(a / 0.0, a, a, beta=0)

    a = random(2, 3, 3)
    torch.testing.assert_close(f(a), a @ a)


@htile.rowwise
def after_a_product(x, t: htile.Shared):
    y = x @ t
    return y * 2, torch.relu(y)[:2], y.view(2, -1).sum(0), y.sum(), y.softmax(-1)


@pytest.mark.parametrize("k", [24, 65, 1000])
def test_a_product_is_a_row_whatever_is_written_out(k):
    """From 65 elements on the sums of columns are joined; below, the rows of `t` are added."""
    x, t = random(5, k, dtype=torch.bfloat16), random(k, 8, dtype=torch.bfloat16, seed=1)
    results = after_a_product(x, t)
    assert_close(after_a_product, results, x, t)
    number = torch.float32
    assert [r.dtype for r in results] == [x.dtype, x.dtype, x.dtype, number, x.dtype]
    assert after_a_product.inspect(x, t).source


def test_a_product_with_few_columns_stands_on_the_left_of_a_matrix():
    @htile.rowwise
    def f(x, t: htile.Shared, weight: htile.Matrix):
        return ((x @ t).to(torch.bfloat16)) @ weight

    x, t = random(4, 100), random(100, 8, seed=1) / 10
    weight = random(8, 32, dtype=torch.bfloat16, seed=2)
    exact = (x.double() @ t.double()).to(torch.bfloat16).double() @ weight.double()
    torch.testing.assert_close(f(x, t, weight).double(), exact, rtol=1e-2, atol=1e-2)


def test_einsum_of_large_matrices():
    @htile.rowwise
    def f(x, weight: htile.Inner[2]):
        return torch.einsum("k,kn->n", x, weight)

    with pytest.raises(UnsupportedError, match="at most 64 elements of each"):
        f(random(5, 65), random(65, 66))
    x, weight = random(5, 64), random(64, 66, seed=1)
    torch.testing.assert_close(f(x, weight), x @ weight, rtol=1e-4, atol=1e-4)

    @htile.rowwise
    def of_a_matrix(x, weight: htile.Matrix):
        return torch.einsum("k,nk->n", x, weight)

    x, weight = x.bfloat16(), weight.T.bfloat16()
    exact = x.double() @ weight.T.double()
    torch.testing.assert_close(of_a_matrix(x, weight).double(), exact, rtol=1e-2, atol=1e-2)


def test_a_product_of_large_matrices():
    with pytest.raises(UnsupportedError, match="at most 64 elements of each"):
        projected(random(5, 65), random(65, 66))
    assert projected(random(5, 64), random(64, 66)).shape == (5, 66)


@pytest.mark.parametrize("k", (1, 2, 16))
def test_a_long_row_by_a_matrix_of_few_columns(k):
    """The long axis stays that of the columns; each column of the matrix is a reduction."""

    @htile.rowwise
    def f(x, w: htile.Shared):
        return x @ w, x.view(4, -1) @ w[:250]

    x, w = torch.randn(3, 1000), torch.randn(1000, k)
    row, matrix = f(x, w)
    torch.testing.assert_close(row, x @ w, rtol=1e-5, atol=1e-4)
    torch.testing.assert_close(matrix, x.view(3, 4, 250) @ w[:250], rtol=1e-5, atol=1e-4)
    assert f.inspect(x, w).plan.stages == 1

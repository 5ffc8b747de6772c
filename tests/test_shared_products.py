"""Functions whose row kernels need the same product: it is multiplied once in a forward pass."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

import htile
from htile.run.products.gradients import TrainedProducts
from htile.run.products.kernels import ProductKernel
from htile.testing import assert_close
from tests.products import BF16
from tests.request_of import request_of
from tests.test_matrices import run_steps
from tests.test_product_gradients import check, leaves


def heads(x, W: htile.Matrix):
    q, k, v = (x @ W).split((256, 128, 128))
    q, k = (F.rms_norm(part.view(-1, 64), (64,)).flatten() for part in (q, k))
    return q, k, v


def peaks(x, W: htile.Matrix):
    z = x @ W
    return z, z.view(-1, 64).amax(-1)


def of_a_tile(x, W: htile.Matrix):
    z = x @ W
    groups = z.view(-1, 128)
    return z, (groups / groups.abs().amax(-1, keepdim=True)).flatten()


def of_groups(x, W: htile.Matrix):
    z = x @ W
    return z.view(8, -1).softmax(-1).flatten(), z.view(-1, 8).sum(-1)


def ranked(x, W: htile.Matrix):
    best = (x @ W).topk(2)
    return best.values, (torch.arange(8)[:, None] == best.indices).any(-1)


def halves(x, W: htile.Matrix):
    whole = x @ W
    return F.silu(whole[:304]), whole[304:]


def unaligned(x, W: htile.Matrix):
    whole = x @ W
    return F.silu(whole[:300]), whole[300:]


def again(x, W: htile.Matrix):
    z = x @ W
    return z[:384] * 2, z.sum()


def between(x, W: htile.Matrix, V: htile.Matrix):
    z = x @ W
    h = z.view(-1, 64).softmax(-1).flatten().to(x.dtype)
    return h @ V + z.sum(), z.view(8, -1).amax(-1)


def beside(x, W: htile.Matrix, V: htile.Matrix, r):
    z = x @ W
    return z.softmax(-1) + x @ V, z.view(-1, 8).amax(-1), z.amax() * r


CASES = {  # the function, N, the kernels, and the products among them
    "heads": (heads, 512, 2, 1), "peaks": (peaks, 512, 2, 1), "of a tile": (of_a_tile, 512, 1, 1),
    "of groups": (of_groups, 512, 3, 1), "ranked": (ranked, 8, 2, 1),
    "halves": (halves, 400, 2, 2), "unaligned": (unaligned, 400, 2, 1),
    "between": (between, 512, 3, 2), "beside": (beside, 512, 5, 2),
}  # fmt: skip
by_name = pytest.mark.parametrize("name", CASES)


def arguments(f, n, k=32, m=6):
    made = torch.Generator().manual_seed(0)
    shapes = {"x": (m, k), "W": (k, n), "V": (n, n) if f is between else (k, n), "r": (m, 24)}
    return [torch.randn(shapes[name], generator=made).to(BF16) / 4
            for name in htile.rowwise(f)._signature.names]  # fmt: skip


@by_name
def test_a_product_is_multiplied_once(name):
    body, n, count, products = CASES[name]
    f = htile.rowwise(body)
    kernels = f.inspect(*arguments(body, n, 1024, 4096), arch="sm_90a").kernels
    assert len(kernels) == count
    assert sum(isinstance(kernel, ProductKernel) for kernel in kernels) == products


@by_name
def test_what_reads_a_stored_product_computes_the_same(name):
    body, n, _, _ = CASES[name]
    f, args = htile.rowwise(body), arguments(body, n)
    made = run_steps(f, args)
    structure = request_of(f, args).specialization.traced.structure
    assert_close(f, pytree.tree_unflatten(made, structure), *args)


@pytest.mark.parametrize("name", [name for name in CASES if name not in ("ranked", "of a tile")])
def test_gradients(name):
    body, n, _, _ = CASES[name]
    check(htile.rowwise(body), arguments(body, n), 0.03, m=6)


@pytest.mark.parametrize("name", ["heads", "of groups", "beside"])
def test_a_product_is_multiplied_once_where_it_is_differentiated(name, monkeypatch):
    body, n, _, products = CASES[name]
    multiply, names = TrainedProducts.product, []

    def counted(self, step, product, found):
        names.append(product.name)
        return multiply(self, step, product, found)

    monkeypatch.setattr(TrainedProducts, "product", counted)
    htile.rowwise(body)(*leaves(arguments(body, n)))
    assert len(names) == products


def test_a_compiled_call_has_the_bits_of_an_eager_one():
    f, args = htile.rowwise(of_groups), leaves(arguments(of_groups, 512))
    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    for found, right in zip(compiled(*args), f(*args), strict=True):
        assert found.equal(right)


def test_few_columns_and_short_rows_are_multiplied_again():
    """Both are kernels over tiles, and to store the product takes longer than to multiply."""
    for k, products in ((128, 2), (4096, 1)):
        kernels = htile.rowwise(again).inspect(*arguments(again, 1024, k, 64)).kernels
        assert sum(isinstance(kernel, ProductKernel) for kernel in kernels) == products


def test_torch_multiplies_once_too():
    """Rows of 20 elements do not begin at multiples of 16 bytes."""
    shown = htile.rowwise(halves).inspect(*arguments(halves, 400, 20, 64))
    assert len(shown.by_torch) == 1

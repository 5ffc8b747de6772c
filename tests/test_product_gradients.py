"""Gradients of functions with matrix products on the CPU, against autograd in float64."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import htile
from htile.errors import GradientError
from htile.run.products import chunks as product_chunks
from htile.run.products.chunks import TrainedStep
from htile.run.products.derivatives import gradient_of
from htile.run.products.gradients import TrainedProducts
from tests import products
from tests.products import BF16, F16, FUNCTIONS, arguments
from tests.test_matrices import request_of

M, N, K = 20, 40, 24  # sizes of which a chunk has 8 rows, or fewer, if it is as small as can be
CLOSE = 0.006  # of a gradient's norm: two roundings to bfloat16, each of at most 1 / 256
MANY = 10**9


@htile.rowwise
def everything(x, W: htile.Matrix, bias, scale: htile.PerRow, factor, residual):
    z = torch.tanh(F.linear(x, W, bias) * scale) * factor + residual
    return z, (z * z).mean()


@htile.rowwise
def summed(x, W: htile.Matrix):
    z = F.linear(x, W)
    return torch.sigmoid(z), htile.sum_rows(z * z)


@htile.rowwise
def counted(x, W: htile.Matrix):
    z = F.linear(x, W)
    return torch.tanh(z), htile.sum_rows(z > 0), htile.max_rows(z.detach())


@htile.rowwise
def twice(x, y, W: htile.Matrix):
    return torch.tanh(F.linear(x, W)) * torch.tanh(F.linear(y, W))


@htile.rowwise
def cross_entropy(h, head: htile.Matrix, label: htile.PerRow, ignored: int = -100):
    z, is_kept = F.linear(h, head), label != ignored
    return torch.where(is_kept, z.logsumexp(-1) - z[torch.where(is_kept, label, 0)], 0.0)


def of_everything(m=M):
    made = torch.Generator().manual_seed(3)
    shapes = (m, K), (N, K), (N,), (m,), (), (m, N)
    values = [torch.randn(shape, generator=made) for shape in shapes]
    values[1] /= math.sqrt(K)
    return [v if v.ndim in (0, 1) and v.shape != (N,) else v.to(BF16) for v in values]


@pytest.fixture(params=["chunks", "stored"])
def way(request, monkeypatch):
    """Both ways to gradients of products, whatever the sizes are."""
    monkeypatch.setattr(product_chunks, "FLOPS_PER_BYTE", MANY if request.param == "chunks" else 0)
    monkeypatch.setattr(product_chunks, "STORED_SHARE", MANY)
    monkeypatch.setattr(product_chunks, "CHUNK_BYTES", 1)
    return request.param


@pytest.fixture
def in_chunks(monkeypatch):
    monkeypatch.setattr(product_chunks, "FLOPS_PER_BYTE", MANY)
    monkeypatch.setattr(product_chunks, "CHUNK_BYTES", 1)


def leaves(args, dtype=None):
    """New arguments that require grad where they are floating."""
    return [v.detach().to(dtype or v.dtype).clone().requires_grad_() if v.is_floating_point() else v
            for v in args]  # fmt: skip


def cotangents_of(results, seed=1):
    made = torch.Generator().manual_seed(seed)
    return [torch.randn(r.shape, generator=made).to(r.dtype) for r in results]


def exact(f, args, dims, cotangents):
    """Gradients in float64 of the function as it is written; `dims` as torch.vmap has them."""
    wide = leaves(args, torch.float64)
    results = pytree.tree_leaves(torch.vmap(f._fn, in_dims=dims)(*wide))
    given = [(r, g.double()) for r, g in zip(results, cotangents, strict=True) if g is not None]
    floating = [v for v in wide if v.is_floating_point()]
    return torch.autograd.grad([r for r, _ in given], floating, [g for _, g in given],
                               allow_unused=True)  # fmt: skip


def dims_of(f, args, m=M):
    return tuple(None if kind is htile.Matrix or v.ndim == 0 or len(v) != m else 0
                 for kind, v in zip(f._signature.kinds, args, strict=False))  # fmt: skip


def check(f, args, close=CLOSE, m=M):
    ours = leaves(args)
    results = pytree.tree_leaves(f(*ours))
    cotangents = cotangents_of(results)
    floating = [v for v in ours if v.is_floating_point()]
    found = torch.autograd.grad(results, floating, cotangents)
    expected = exact(f, args, dims_of(f, args, m), cotangents)
    for v, a, b in zip(floating, found, expected, strict=True):
        assert a.dtype is v.dtype and a.shape == v.shape
        assert (a.double() - b).norm() <= close * b.norm() + 1e-6


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
def test_gradients(f, way):
    """Of mlp the reference does not round what is between the products."""
    check(f, arguments(f, M, N, K), 0.02 if f is products.mlp else CLOSE)


def test_gradients_of_every_kind_of_argument(way):
    check(everything, of_everything())


def test_gradients_of_one_matrix_in_two_products(way):
    x, W = arguments(products.linear, M, N, K)
    check(twice, (x, x.flip(0), W))


@pytest.mark.parametrize("m", [1, 7, 8, 9, 16])
def test_numbers_of_rows_about_those_of_chunks(m, way):
    check(everything, of_everything(m), m=m)
    check(products.nll, arguments(products.nll, m, N, K), m=m)


def test_no_rows(way):
    for f, args in ((everything, of_everything()), (products.mlp, arguments(products.mlp, M, N, K)),
                    (products.nll, arguments(products.nll, M, N, K))):  # fmt: skip
        ours = leaves([v[:0] if v.ndim and len(v) == M else v for v in args])
        results = pytree.tree_leaves(f(*ours))
        floating = [v for v in ours if v.is_floating_point()]
        for v, g in zip(floating, torch.autograd.grad(results, floating, cotangents_of(results)),
                        strict=True):  # fmt: skip
            assert g.shape == v.shape and g.dtype is v.dtype and not g.any()


def test_leading_dimensions_and_rows_that_repeat(way):
    x, W, bias, scale, factor, residual = of_everything()
    whole = leaves((x, W, bias, scale, factor, residual[:1].expand_as(residual)))
    apart = leaves((x.unflatten(0, (4, 5)), W, bias, scale.unflatten(0, (4, 5)), factor,
                    residual[0]))  # fmt: skip
    for args in (whole, apart):
        rows, means = everything(*args)
        (rows.float().sum() + means.sin().sum()).backward()
    for a, b in zip(whole[:5], apart[:5], strict=True):
        assert a.grad.equal(b.grad.reshape(a.shape))
    error = whole[5].grad.double().sum(0) - apart[5].grad.double()
    assert error.norm() <= CLOSE * apart[5].grad.double().norm()


def test_some_results_have_cotangents_and_they_lie_anyhow(way):
    args = of_everything()
    given = (torch.ones((), dtype=BF16).expand(M, N), None), (None, torch.randn(2 * M)[::2]), (
        torch.randn(N, M).to(BF16).t(), torch.ones(1).expand(M))  # fmt: skip
    for cotangents in given:
        ours = leaves(args)
        results = everything(*ours)
        pairs = [(r, g) for r, g in zip(results, cotangents, strict=True) if g is not None]
        found = torch.autograd.grad([r for r, _ in pairs], ours, [g for _, g in pairs],
                                    allow_unused=True)  # fmt: skip
        expected = exact(everything, args, dims_of(everything, args), cotangents)
        for a, b in zip(found, expected, strict=True):
            assert (a.double() - b).norm() <= CLOSE * b.norm() + 1e-6


@pytest.mark.parametrize("m", [M, 128, 129, 257])
def test_a_sum_over_rows_is_one_over_all_chunks(m, way):
    x, W = arguments(products.linear, m, N, K)
    ours, wide = leaves((x, W)), leaves((x, W), torch.float64)
    rows, total = summed(*ours)
    z = F.linear(*wide)
    torch.testing.assert_close(total.double(), (z * z).sum(0), rtol=1e-5, atol=0)
    g, of_total = cotangents_of((rows, total))
    found = torch.autograd.grad((rows, total), ours, (g, of_total))
    expected = torch.autograd.grad(
        (z.sigmoid(), (z * z).sum(0)), wide, (g.double(), of_total.double())
    )
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= CLOSE * b.norm()


@pytest.mark.parametrize("m", [128, 129, 257])
def test_sums_over_rows_without_gradients_beside_one_with(m):
    x, W = leaves(arguments(products.linear, m, N, K))
    rows, count, most = counted(x, W)
    z = F.linear(x.double(), W.double())
    assert rows.requires_grad and not count.requires_grad
    assert count.equal((z > 0).sum(0))
    torch.testing.assert_close(most.double(), z.amax(0), rtol=1e-5, atol=0)


RANKS = {
    "median": lambda z, y: z - y.median(),
    "kthvalue": lambda z, y: z / (1 + y.kthvalue(3, -1).values ** 2),
    "quantile": lambda z, y: z * y.quantile(0.3),
    "sort": lambda z, y: z[:8] * y[:8].sort().values,
    "one of a sort": lambda z, y: z - y.sort().values[1],
    "topk": lambda z, y: z * y.topk(3).values.softmax(-1)[1],
    "groups": lambda z, y: z[:4] * y[:8].view(2, 4).sort(-1).values[1],
    "row and rank": lambda z, y: z + y * y.median(),
    "element": lambda z, y: z * y[y.argmax()],
    "index": lambda z, y: z * y.argmin() + y,
}


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.vmap
@pytest.mark.parametrize("n", [8, 65, 300])
@pytest.mark.parametrize("of", RANKS.values(), ids=RANKS)
def test_gradients_through_ranks_beside_a_product(of, n, way):
    """All elements of a row differ, so each rank is that of one element."""

    @htile.rowwise
    def ranked(x, W: htile.Matrix, y):
        return of(F.linear(x, W), y)

    made = torch.Generator().manual_seed(n)
    y = torch.stack([torch.randperm(n, generator=made) for _ in range(M)]) / n - 0.4
    check(ranked, (*arguments(products.linear, M, n, K), y), 2 * CLOSE)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of torch.vmap
@pytest.mark.parametrize("n", [8, 65])
def test_gradients_through_ranks_of_a_left_operand(n, way):
    @htile.rowwise
    def before(x, W: htile.Matrix):
        return F.linear((x / (1 + x.float().abs().quantile(0.9))).to(x.dtype), W)

    @htile.rowwise
    def behind(x, W: htile.Matrix):
        return F.linear(x, W) / (1 + x.float().abs().kthvalue(3, -1).values)

    made = torch.Generator().manual_seed(n)
    x = torch.stack([torch.randperm(K, generator=made) + 1.0 for _ in range(M)]) / K
    W = torch.randn(n, K, generator=made) / K**0.5
    for f in (before, behind):
        check(f, (x.to(BF16), W.to(BF16)), 2 * CLOSE)


@pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)
def test_bits_of_results_and_of_gradients(f, in_chunks):
    """Results are those of a call without gradients, and gradients the same in every pass."""
    args = arguments(f, M, N, K)
    ours = leaves(args)
    results = pytree.tree_leaves(f(*ours))
    for a, b in zip(results, pytree.tree_leaves(f(*args)), strict=True):
        assert a.requires_grad and a.equal(b)
    floating, given = [v for v in ours if v.is_floating_point()], cotangents_of(results)
    first, again = (torch.autograd.grad(results, floating, given, retain_graph=True)
                    for _ in range(2))  # fmt: skip
    assert all(a.equal(b) for a, b in zip(first, again, strict=True))


def test_only_what_is_asked_for_is_computed(in_chunks, monkeypatch):
    made = []

    def counted(a, b, *more):
        made.append((a.shape[0], b.shape[1]))
        return multiplied(a, b, *more)

    multiplied = product_chunks.multiplied
    monkeypatch.setattr(product_chunks, "multiplied", counted)
    x, head, labels = arguments(products.nll, M, N, K)
    for wanted, shape in ((x, (8, K)), (head, (N, K))):
        ours = [v.clone().requires_grad_() if v is wanted else v for v in (x, head)]
        made.clear()
        products.nll(*ours, labels).sum().backward()
        assert made[:2] == [shape] * 2 and len(made) == 3


def test_labels_that_are_ignored_or_outside(in_chunks):
    """A loss that leaves rows out, in the function or behind it, has torch's gradients."""
    x, head, labels = arguments(products.nll, M, N, K)
    labels[::3] = -100
    wide = leaves((x, head), torch.float64)
    expected = F.cross_entropy(F.linear(*wide), labels % N, reduction="none")[labels != -100].sum()
    expected.backward()
    for loss in (lambda *args: cross_entropy(*args, labels).sum(),
                 lambda *args: products.nll(*args, labels)[labels != -100].sum()):  # fmt: skip
        ours = leaves((x, head))
        found = loss(*ours)
        found.backward()
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=0)
        for a, b in zip(ours, wide, strict=True):
            assert (a.grad.double() - b.grad).norm() <= CLOSE * b.grad.norm()
    assert products.nll(x, head, labels)[::3].isnan().all()


class Largest(TorchDispatchMode):
    """How many elements the largest tensor has that is computed."""

    found = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        tensors = [v for v in pytree.tree_leaves(made) if isinstance(v, torch.Tensor)]
        self.found = max(self.found, *(v.numel() for v in tensors), 0)
        return made


def test_logits_are_never_there(way):
    m, vocabulary, k = 64, 1000, 16
    ours = leaves(arguments(products.nll, m, vocabulary, k))
    kept = []
    with (
        Largest() as largest,
        torch.autograd.graph.saved_tensors_hooks(lambda v: kept.append(v) or v, lambda v: v),
    ):
        products.nll(*ours).sum().backward()
    most = max(largest.found, *(v.numel() for v in kept))
    assert most == (vocabulary * k if way == "chunks" else m * vocabulary)
    if way == "chunks":
        assert {v.data_ptr() for v in kept} == {v.data_ptr() for v in ours}


def of(f, args, needed):
    """The steps of a call, and the gradients of those with products."""
    trained = TrainedProducts(request_of(f, args))
    steps = [step for step in trained.steps if isinstance(step, TrainedStep)]
    return [(step, gradient_of(step.step, frozenset(needed) & {*step.names})) for step in steps]


def test_which_products_are_stored():
    """Those of layers; not logits, nor those that take no longer to compute than to read."""

    def stored(f, m, n, k, needed):
        made = of(f, meta_arguments(f, m, n, k), needed)
        return [step._is_stored(gradient) for step, gradient in made]

    both = {"x", "W"}
    assert stored(products.gelu, 8192, 14336, 4096, both) == [True]
    assert stored(products.gelu, 8192, 14336, 256, both) == [False]
    assert stored(products.swiglu, 8192, 14336, 4096, {"x", "gate", "up"}) == [True]
    assert stored(products.linear, 8192, 14336, 4096, both) == [False]  # it is not read
    for rows in (1024, 8192, 100000):
        assert stored(products.nll, rows, 128256, 4096, {"h", "head"}) == [False]
    assert stored(products.nll, 16, 128256, 4096, {"h", "head"}) == [True]


def meta_arguments(f, m, n, k):
    """Arguments as those of `arguments`, without memory."""
    small = arguments(f, 2, 3, 5)
    sizes = {2: m, 3: n, 5: k}
    return [torch.empty([sizes[s] for s in v.shape], dtype=v.dtype, device="meta") for v in small]


def test_chunks_are_bounded_and_cover_all_rows():
    args = meta_arguments(products.nll, 8192, 32000, 1024)
    ((step, _),) = of(products.nll, args, {"h", "head"})
    row_bytes = 6 * 32000
    chunks = step._chunks(row_bytes)
    assert [k for c in chunks for k in range(c.start, c.stop)] == [*range(8192)]
    sizes = {c.stop - c.start for c in chunks[:-1]}
    assert len(sizes) == 1 and not sizes.pop() % 128
    most = max(c.stop - c.start for c in chunks) * row_bytes
    assert product_chunks.CHUNK_BYTES * 0.8 < most <= product_chunks.CHUNK_BYTES
    args = meta_arguments(products.nll, 8192, 128256, 4096)
    ((step, _),) = of(products.nll, args, {"h", "head"})
    most = max(c.stop - c.start for c in step._chunks(6 * 128256)) * 6 * 128256
    assert 0.9 * args[1].nbytes < most <= args[1].nbytes


@pytest.mark.parametrize("f", [products.gelu, products.nll, products.mlp],
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_gradients_of_second_order(f, way):
    args = arguments(f, M, N, K)

    def second(f, values):
        floating = [v for v in values if v.is_floating_point()]
        first = torch.autograd.grad(f(*values).double().square().sum(), floating, create_graph=True)
        return torch.autograd.grad(sum(g.double().square().sum() for g in first), floating)

    found = second(f, leaves(args))
    whole = torch.vmap(f._fn, in_dims=dims_of(f, args))
    expected = second(whole, leaves(args, torch.float64))
    for a, b in zip(found, expected, strict=True):
        assert (a.double() - b).norm() <= 0.03 * b.norm()


def test_what_a_backward_pass_refuses(way):
    x, W, bias = leaves(arguments(products.gelu, M, N, K))
    with pytest.raises(GradientError, match="vectorize=False"):
        torch.autograd.grad(products.gelu(x, W, bias), x, torch.ones(3, M, N, dtype=BF16),
                            is_grads_batched=True)  # fmt: skip
    result = products.gelu(x, W, bias)
    with torch.no_grad():
        W.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        result.sum().backward()


def test_autocast_and_checkpoints_change_nothing(way):
    args = arguments(products.swiglu, M, N, K, F16)
    plain, cast, again = leaves(args), leaves(args), leaves(args)
    products.swiglu(*plain).float().square().sum().backward()
    with torch.autocast("cpu", BF16):
        products.swiglu(*cast).float().square().sum().backward()
    checkpoint(products.swiglu, *again, use_reentrant=False).float().square().sum().backward()
    for a, *others in zip(plain, cast, again, strict=True):
        assert all(a.grad.equal(b.grad) for b in others)


def test_a_gradient_that_is_a_cotangent_is_not_written_to(in_chunks):
    """Nothing is added to a cotangent in its own memory."""

    @htile.rowwise
    def added(x, W: htile.Matrix):
        return (F.linear(x, W) + x).float()

    x, W = arguments(products.linear, M, K, K)
    ours, g = leaves((x, W)), torch.randn(M, K)
    before = g.clone()
    torch.autograd.grad(added(*ours), ours, g)
    assert g.equal(before)
    check(added, (x, W))

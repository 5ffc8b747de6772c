"""Rows whose elements the indices of another row choose: `x[ids]`, `torch.gather`, long flips.

Values are torch's own, of the same function in float64.
"""

from __future__ import annotations

import time

import pytest
import torch

import htile
from htile.errors import ArgumentError, DtypeError, ShapeError, UnsupportedError
from htile.frontend.ops import Op
from tests.gradients import check, check_tangents

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
I32, I64, BOOL = torch.int32, torch.int64, torch.bool
M, N = 5, 100

ROWS = {
    "gather": lambda x, ids: x.gather(-1, ids),
    "take_along_dim": lambda x, ids: x.take_along_dim(ids, -1),
    "index": lambda x, ids: x[ids],
    "from the end": lambda x, ids: x[ids - N],
    "of a computed row": lambda x, ids: (x * x.sigmoid() + 1)[ids],
    "of a normalized row": lambda x, ids: x.softmax(-1)[ids],
    "normalized": lambda x, ids: x[ids].softmax(-1),
    "reduced": lambda x, ids: (x - x[ids]).abs().mean(),
    "twice": lambda x, ids: x[ids][ids],
    "and one of them": lambda x, ids: x[ids][x.argmax()],
    "fewer": lambda x, ids: x[ids[:70]].sum(),
    "in groups": lambda x, ids: x[ids].view(-1, 4).sum(-1),
    "of a shape": lambda x, ids: x[ids.view(4, 25)].amax(-1),
    "an index that comes of a reduction": lambda x, ids: x[(ids + x.argmax()) % N],
    "an index that comes of a scan": lambda x, ids: x[((x > 0).cumsum(-1) - 1).clamp(min=0)],
    "of numbers": lambda x, ids: torch.ones(N)[ids] * x,
    "of columns": lambda x, ids: (torch.arange(N) * 2)[ids] * x,
    "of a part": lambda x, ids: x[10:][ids % 90],
    "of parts": lambda x, ids: (x[1:] * x[:-1] - x[::2].sum())[ids % 99],
    "of a part of a part": lambda x, ids: (x[::2][5:] + torch.arange(45))[ids % 45],
    "beside one element": lambda x, ids: (x[:1] * x - x[-1:])[ids],
    "beside one column": lambda x, ids: (x + torch.arange(1, 2))[ids],
    "one of them": lambda x, ids: x[ids][0] * x + x.flip(-1)[3],
    "a few of them": lambda x, ids: x[ids][:3].sum() + x[ids][::33].sum() + x[ids].sum(),
    "moved": lambda x, ids: x[ids].roll(3, -1) + x.flip(-1).roll(1, -1),
    "at one place": lambda x, ids: x[torch.full((N,), 5)] * x + x[ids * 0 + x.argmax()],
    "a permutation": lambda x, ids: x[torch.arange(N) * 7 % N],
    "turned": lambda x, ids: x.flip(-1),
    "turned and normalized": lambda x, ids: (x + x.flip(0)).softmax(-1),
    "neighbours of a turned row": lambda x, ids: x.flip(-1)[1:] - x.flip(-1)[:-1],
    "a turned computed row": lambda x, ids: (x.exp().flip(-1) * x).sum(),
}
FUNCTIONS = {name: htile.rowwise(f) for name, f in ROWS.items()}


def arguments(dtype=F32, index=I64):
    torch.manual_seed(0)
    return torch.randn(M, N).to(dtype), torch.randint(N, (M, N), dtype=index)


def exact(f, *args):
    wide = [each.double() if each.is_floating_point() else each for each in args]
    return torch.vmap(f)(*wide)


@pytest.mark.parametrize("dtype", (F32, BF16, F16), ids=str)
@pytest.mark.parametrize("name", ROWS)
def test_values(name, dtype):
    x, ids = arguments(dtype)
    found, right = FUNCTIONS[name](x, ids), exact(ROWS[name], x, ids)
    tolerance = {F32: 1e-6, BF16: 2**-8, F16: 2**-11}[found.dtype]
    torch.testing.assert_close(found.double(), right.double(), rtol=tolerance, atol=tolerance)


def test_they_are_one_operation():
    x, ids = arguments()
    for name in ("gather", "normalized", "turned"):
        graph = FUNCTIONS[name].inspect(x, ids, arch="sm_90a").graph
        assert [node.op for node in graph].count(Op.GATHER) == 1


@pytest.mark.parametrize("index", (I32, I64), ids=str)
@pytest.mark.parametrize("dtype", (F32, I32, I64, torch.uint8, torch.float8_e4m3fn, BOOL), ids=str)
def test_dtypes(dtype, index):
    """torch's gather takes int64 alone; an index of int32 goes in brackets."""
    x, ids = arguments(index=index)
    x = x > 0 if dtype is BOOL else (x * 50).to(dtype)
    found = FUNCTIONS["index"](x, ids)
    assert found.dtype is dtype
    assert torch.equal(found.float(), x.float().gather(-1, ids.long()))


@pytest.mark.parametrize("dtype", (F32, BF16, I64, BOOL), ids=str)
def test_beyond_the_ends(dtype):
    x, ids = arguments()
    nothing = torch.nan if dtype.is_floating_point else 0
    x = (x * 50).to(dtype) if dtype is not BOOL else x > 0
    ids[:, ::3], ids[:, 1::3] = N, -N - 1
    found = FUNCTIONS["index"](x, ids)
    right = x.gather(-1, ids.clamp(0, N - 1)).float()
    right[:, ::3] = right[:, 1::3] = nothing
    assert torch.equal(found.float().nan_to_num(7.5), right.nan_to_num(7.5))


SHORT = {
    "a row": lambda x, ids: x[ids],
    "a computed row": lambda x, ids: x.softmax(-1)[ids] * x,
    "a scan": lambda x, ids: x.cumsum(-1)[ids],
    "numbers": lambda x, ids: torch.stack((x.sum(), x.amax(), x[0]))[ids % 3] - x,
    "segments": lambda x, ids: x - torch.full((4,), -torch.inf, dtype=x.dtype).scatter_reduce(
        0, ids % 4, x, "amax")[ids % 4],
    "twice": lambda x, ids: x[ids][ids],
}  # fmt: skip


@pytest.mark.parametrize("n", (8, 13, 64))
@pytest.mark.parametrize("name", SHORT)
def test_indices_that_a_short_row_holds(name, n):
    """They are looked up together, as those of a long row are, not one by one."""
    torch.manual_seed(n)
    x, ids = torch.randn(M, n), torch.randint(n, (M, n))
    f = htile.rowwise(SHORT[name])
    torch.testing.assert_close(f(x, ids).double(), exact(SHORT[name], x, ids), rtol=1e-6, atol=1e-6)
    if name in ("a row", "a computed row", "twice"):
        graph = f.inspect(x, ids, arch="sm_90a").graph
        assert Op.TAKE not in [node.op for node in graph] and len([*graph]) < 40
    check(f, x, ids)


@pytest.mark.parametrize("n", (20, 64, 100, 4096))
def test_a_short_table_is_in_registers(n):
    """Selects choose from it for rows of every length; a load for each element is not measured."""

    @htile.rowwise
    def decoded(x, ids, table: htile.Shared):
        return x * table[ids] + torch.arange(8)[ids % 8]

    x, ids = torch.empty(64, n, device="meta"), torch.empty(64, n, dtype=I64, device="meta")
    graph = decoded.inspect(x, ids, torch.empty(16, device="meta"), arch="sm_90a").graph
    assert Op.GATHER not in [node.op for node in graph]


def test_a_softmax_of_segments_of_a_short_row_is_a_small_kernel():
    """It had 3484 operations, and 255 registers, when indices were looked up one by one."""

    @htile.rowwise
    def of_segments(x, ids):
        most = torch.full((8,), -torch.inf).scatter_reduce(0, ids, x, "amax")
        share = torch.exp(x - most[ids])
        return share / torch.zeros(8).index_add(0, ids, share)[ids]

    x, ids = (torch.empty(4096, 64, dtype=dtype, device="meta") for dtype in (F32, I64))
    kernel = of_segments.inspect(x, ids, arch="sm_90a")
    assert len([*kernel.graph]) < 200 and kernel.resources.registers <= 128
    assert not kernel.resources.stack


def test_a_vector_that_all_rows_share():
    """A codebook of 256 numbers, and a permutation."""

    @htile.rowwise
    def decoded(codes, book: htile.Shared, scale: htile.PerRow):
        return book[codes.long()] * scale

    @htile.rowwise
    def permuted(x, order: htile.Shared):
        return x[order]

    torch.manual_seed(0)
    codes = torch.randint(256, (M, N), dtype=torch.uint8)
    book, scale, x, order = torch.randn(256), torch.rand(M), torch.randn(M, N), torch.randperm(N)
    assert torch.equal(decoded(codes, book, scale), book[codes.long()] * scale[:, None])
    assert torch.equal(permuted(x, order), x[:, order])


@pytest.mark.parametrize("n", (8, 64, 65, 200))
def test_indices_that_all_rows_share(n):
    """Without an annotation they may choose of a shorter table: elsewhere they could be labels."""

    def biased(x, bucket, bias: htile.Inner[1]):
        return x * bias[bucket]

    def ordered(x, order: htile.Shared):
        return x[order], x[order].softmax(-1)

    torch.manual_seed(0)
    x, bias = torch.randn(M, n), torch.randn(M, 4)
    bucket, order = torch.arange(n) % 4, torch.randperm(n)
    assert torch.equal(htile.rowwise(biased)(x, bucket, bias), x * bias[:, bucket])
    for few in (order, order[:3]):
        found, normalized = htile.rowwise(ordered)(x, few)
        assert torch.equal(found, x[:, few])
        torch.testing.assert_close(normalized, x[:, few].softmax(-1))
    for labels in (order, order[:3]):
        with pytest.raises(ShapeError, match=r"label: htile\.PerRow .*label: htile\.Shared"):
            htile.rowwise(lambda x, label: x.logsumexp(-1) - x[label])(x, labels)


@pytest.mark.parametrize("shape", ((3, M, N), (1, M, N), (3, 1, N)))
def test_leading_dimensions(shape):
    torch.manual_seed(0)
    x, ids = torch.randn(shape), torch.randint(N, (3, M, 80))
    right = x.expand(3, M, N).gather(-1, ids)
    assert torch.equal(FUNCTIONS["gather"](x, ids), right)


# ---- derivatives --------------------------------------------------------------------------------

@pytest.mark.parametrize("name", [name for name in ROWS if name != "and one of them"])
def test_gradients(name):
    x, ids = arguments()
    check(FUNCTIONS[name], x, ids)
    check_tangents(FUNCTIONS[name], x, ids)


@pytest.mark.parametrize("name", ("normalized", "reduced", "a turned computed row"))
def test_gradients_of_gradients(name):
    def penalty(f, x):
        y = f(x).square().sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    x, ids = arguments()
    found = penalty(lambda x: FUNCTIONS[name](x, ids), x.clone().requires_grad_())
    right = penalty(lambda x: torch.vmap(ROWS[name])(x, ids), x.double().requires_grad_())
    bound = 1e-5 * right.abs().max().item()
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=bound)


@htile.rowwise
def weighted(x):
    return x.exp()


@weighted.backward
def weighted_backward(out, d_out):
    return out * (d_out - d_out.mean())


def test_a_row_of_another_function_with_its_own_backward_pass():
    """That pass gets whole rows, so its rows are taken from one by one."""
    x, ids = arguments()
    with pytest.raises(UnsupportedError, match="computed elementwise"):
        htile.rowwise(lambda x, ids: weighted(x)[ids])(x, ids)


def test_shared_indices_in_a_backward_pass():
    @htile.rowwise
    def permuted(x, order: htile.Shared, back: htile.Shared):
        return x[order]

    permuted.backward(lambda back, d_out: d_out[back])
    torch.manual_seed(0)
    x, order, g = torch.randn(M, N, requires_grad=True), torch.randperm(N), torch.randn(M, N)
    permuted(x, order, order.argsort()).backward(g)
    assert torch.equal(x.grad, g[:, order.argsort()])


def test_computed_indices_are_traced_in_a_moment():
    @htile.rowwise
    def f(x):
        i = torch.arange(N)
        for _ in range(40):
            i = (i * 3 + (i >> 2)) % N
        return x[i]

    begin = time.process_time()
    f(torch.randn(M, N))
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("n", (16, 64, 65, 300))
@pytest.mark.parametrize("dtype", (BF16, F16, F32, I32, BOOL))
def test_what_is_indexed_decides_the_dtype_without_rows_of_floats(n, dtype):
    """It does not depend on the length of a codebook; a row of floats decides first."""

    def decoded(codes, book: htile.Shared):
        return book[codes]

    def scaled(codes, book: htile.Shared, x):
        return book[codes] * x

    torch.manual_seed(n)
    book, codes = torch.randn(n).mul(3).to(dtype), torch.randint(n, (M, 400), dtype=I32)
    found = htile.rowwise(decoded)(codes, book)
    assert found.dtype is dtype and torch.equal(found, book[codes.long()])
    x = torch.randn(M, 400).to(F16)
    found = htile.rowwise(scaled)(codes, book, x)
    assert found.dtype is F16
    right = book[codes.long()].double() * x
    torch.testing.assert_close(found.double(), right, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("n", (40, 64, 65, 300))
def test_the_order_of_a_computed_row_changes_no_dtype(n):
    """A row of integers times a vector is in float32, and so are its elements."""

    def of_rows(c, order: htile.Shared, s: htile.PerRow):
        return c * s, (c * s)[order]

    def of_columns(c, order: htile.Shared, w):
        return c * w, (c * w)[order]

    torch.manual_seed(n)
    c, order = torch.randint(1000, (M, n), dtype=I32), torch.randperm(n)
    for f, factor in ((of_rows, torch.randn(M)), (of_columns, torch.randn(n))):
        factor = factor.to(BF16)
        there, moved = htile.rowwise(f)(c, order, factor)
        right = c.double() * (factor[:, None] if f is of_rows else factor).double()
        assert there.dtype is F32 and moved.dtype is F32
        torch.testing.assert_close(moved.double(), right[:, order], rtol=1e-6, atol=0)


def test_gradients_of_a_codebook():
    @htile.rowwise
    def loss(codes, book: htile.Shared, x):
        return (book[codes] - x).square().sum() + book.sum()

    torch.manual_seed(0)
    check(loss, torch.randint(256, (M, N)), torch.randn(256), torch.randn(M, N))


@pytest.mark.parametrize("dtype", (F32, BF16), ids=str)
@pytest.mark.parametrize("shape", ((M, N), (1, N), (3, M, N), (3, 1, N)))
def test_training(shape, dtype):
    """Rows that repeat over others get the sum of what these add."""
    torch.manual_seed(0)
    x, ids = torch.randn(shape).to(dtype), torch.randint(N, (*shape[:-2], M, 80))
    x.requires_grad_()
    FUNCTIONS["gather"](x, ids).float().square().sum().backward()
    right = x.detach().double().requires_grad_()
    right.expand(*ids.shape[:-1], N).gather(-1, ids).square().sum().backward()
    bound = {F32: 1e-6, BF16: 2**-8}[dtype]
    assert x.grad.dtype is dtype
    torch.testing.assert_close(x.grad.double(), right.grad, rtol=bound, atol=bound)


def test_transforms():
    x, ids = arguments()
    f = FUNCTIONS["reduced"]
    g = torch.func.grad(lambda x: f(x, ids).sum())(x)
    torch.testing.assert_close(torch.vmap(torch.func.grad(lambda x, i: f(x, i)))(x, ids), g)


# ---- calls --------------------------------------------------------------------------------------


def test_results_in_the_memory_of_arguments():
    """Of the row that is gathered from an element may be read after its place was written."""
    x, ids = arguments()
    with pytest.raises(ArgumentError, match="would be overwritten before they are read"):
        FUNCTIONS["index"](x, ids, out=x)
    numbers, right = torch.arange(N).expand(M, N).contiguous() * 2, ids * 2
    FUNCTIONS["index"](numbers, ids, out=ids)
    assert torch.equal(ids, right)


def test_torch_compile():
    x, ids = arguments()
    compiled = torch.compile(
        lambda x, ids: FUNCTIONS["gather"](x, ids) + 1, backend="aot_eager", fullgraph=True
    )
    assert torch.equal(compiled(x, ids), x.gather(-1, ids) + 1)


REFUSED = {
    "a scan": (lambda x, ids: x.cumsum(-1)[ids], UnsupportedError, "computed elementwise"),
    "a turned scan": (lambda x, ids: x.cumsum(-1).flip(-1) * x, UnsupportedError, "elementwise"),
    "a joined row": (lambda x, ids: torch.cat((x, x))[ids], UnsupportedError, "elementwise"),
    "floats": (lambda x, ids: x[ids.float()], DtypeError, "an index is an integer"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name):
    f, kind, words = REFUSED[name]
    with pytest.raises(kind, match=words) as error:
        htile.rowwise(f)(*arguments())
    assert "test_gathers.py" in str(error.value)


def test_rows_of_any_length():
    with pytest.raises(UnsupportedError, match="any length"):
        htile.rowwise(ROWS["index"], dynamic_n=True)(*arguments())


def test_a_backward_pass_that_gathers_from_a_computed_row():
    @htile.rowwise
    def f(x, ids):
        return x.exp()

    @f.backward
    def f_backward(out, ids, d_out):
        return out[ids] * d_out

    x, ids = arguments()
    with pytest.raises(UnsupportedError, match="gathers elements of a row that is computed"):
        f(x.requires_grad_(), ids).sum().backward()

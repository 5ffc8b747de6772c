"""Heads of a row that are multiplied with one matrix: `x.view(4, 16) @ W` and other spellings."""

import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import HTileError, ShapeError, UnsupportedError
from htile.run.products import chunks as product_chunks
from htile.testing import assert_close
from tests.products import BF16, F16
from tests.test_matrices import run_steps
from tests.test_product_gradients import CLOSE, MANY

M, H, D, N = 5, 4, 16, 24


def stacked(x, W):
    """The products as they are spelled out."""
    return torch.stack([head @ W for head in x.view(H, D)])


# The first function is a short spelling, the second one is written out.
SAME = {
    "@": (lambda x, W, b: x.view(H, D) @ W, lambda x, W, b: stacked(x, W)),
    "matmul": (lambda x, W, b: torch.matmul(x.view(H, D), W), lambda x, W, b: stacked(x, W)),
    "mm": (lambda x, W, b: torch.mm(x.view(H, D), W), lambda x, W, b: stacked(x, W)),
    "addmm": (lambda x, W, b: torch.addmm(b, x.view(H, D), W), lambda x, W, b: b + stacked(x, W)),
    "F.linear": (lambda x, W, b: F.linear(x.view(H, D), W.T), lambda x, W, b: stacked(x, W)),
    "F.linear, a bias": (
        lambda x, W, b: F.linear(x.view(H, D), W.T, b),
        lambda x, W, b: torch.stack([F.linear(head, W.T, b) for head in x.view(H, D)]),
    ),
    "einsum": (
        lambda x, W, b: torch.einsum("hd,dn->hn", x.view(H, D), W),
        lambda x, W, b: stacked(x, W),
    ),
    "einsum, turned": (
        lambda x, W, b: torch.einsum("nd,h...d->nh...", W.T, x.view(H, D)),
        lambda x, W, b: stacked(x, W).T,
    ),
    "einsum of a row": (
        lambda x, W, b: torch.einsum("d,dn->n", x[:D], W),
        lambda x, W, b: x[:D] @ W,
    ),
    "norms": (
        lambda x, W, b: (x.view(H, D) @ W).norm(dim=-1),
        lambda x, W, b: torch.stack([(head @ W).norm() for head in x.view(H, D)]),
    ),
    "normalized": (
        lambda x, W, b: F.rms_norm(x.view(H, D) @ W, (N,), b),
        lambda x, W, b: torch.stack([F.rms_norm(h @ W, (N,), b) for h in x.view(H, D)]),
    ),
    "flattened": (
        lambda x, W, b: (x.view(H, D) @ W).flatten(),
        lambda x, W, b: torch.cat([head @ W for head in x.view(H, D)]),
    ),
    "summed over heads": (
        lambda x, W, b: (x.view(H, D) @ W).sum(0),
        lambda x, W, b: stacked(x, W).sum(0),
    ),
    "of two axes": (
        lambda x, W, b: x.view(2, H // 2, D) @ W,
        lambda x, W, b: torch.stack([torch.stack([h @ W for h in y])
                                     for y in x.view(2, H // 2, D)]),
    ),
    "one": (lambda x, W, b: x[None, :D] @ W, lambda x, W, b: (x[:D] @ W)[None]),
    "of alternating elements": (
        lambda x, W, b: x.view(D, H).T @ W,
        lambda x, W, b: torch.stack([x[k::H] @ W for k in range(H)]),
    ),
    "rounded": (
        lambda x, W, b: F.gelu(x).view(H, D).to(BF16) @ W,
        lambda x, W, b: stacked(F.gelu(x).to(BF16), W),
    ),
    "einsum, rounded": (
        lambda x, W, b: torch.einsum("hd,dn->hn", F.gelu(x).view(H, D).to(BF16), W),
        lambda x, W, b: stacked(F.gelu(x).to(BF16), W),
    ),
}  # fmt: skip
every_spelling = pytest.mark.parametrize("name", SAME)


def function_of(body, in_float32=False):
    @htile.rowwise
    def f(x, W: htile.Matrix, b):
        made = body(x, W, b)
        return made.float() if in_float32 else made

    return f


def given(dtype=BF16, rows=M):
    """A row of heads, a matrix (D, N) and a bias."""
    made = torch.Generator().manual_seed(2)
    x, W, b = (torch.randn(s, generator=made) for s in ((rows, H * D), (D, N), (N,)))
    return x.to(dtype), (W / D**0.5).to(dtype), b.to(dtype)


def without_lines(text: object) -> str:
    """A text without comments, which name lines of this file."""
    return "\n".join(line.partition(" # ")[0].rstrip() for line in str(text).splitlines())


@every_spelling
def test_a_spelling_is_the_stack_of_the_products_of_its_heads(name):
    """The graphs, the plans, the emitted kernels and the bits of results are the same."""
    short, long = map(function_of, SAME[name])
    args = given()
    a, b = (f.inspect(*args, arch="sm_90a") for f in (short, long))
    assert without_lines(a.graph) == without_lines(b.graph)
    assert a.plan_text == b.plan_text and not a.by_torch
    texts = [[without_lines(kernel.source) for kernel in each.kernels] for each in (a, b)]
    assert texts[0] == texts[1]
    assert short(*args).equal(long(*args))


# What torch gives in float64 for all rows together, outside of HTile.
EXACT = {
    "@": lambda z, b: z,
    "matmul": lambda z, b: z,
    "mm": lambda z, b: z,
    "addmm": lambda z, b: z + b,
    "F.linear": lambda z, b: z,
    "F.linear, a bias": lambda z, b: z + b,
    "einsum": lambda z, b: z,
    "einsum, turned": lambda z, b: z.mT,
    "einsum of a row": lambda z, b: z[:, 0],
    "norms": lambda z, b: z.norm(dim=-1),
    "normalized": lambda z, b: F.rms_norm(z, (N,), b, eps=2.0**-23),
    "flattened": lambda z, b: z.flatten(1),
    "summed over heads": lambda z, b: z.sum(1),
    "of two axes": lambda z, b: z.unflatten(1, (2, -1)),
    "one": lambda z, b: z[:, :1],
}


def exact_of(name, x, W, b):
    return EXACT[name](torch.bmm(x.view(len(x), H, D), W.expand(len(x), D, N)), b)


@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("name", EXACT)
def test_results_are_those_of_torch_in_float64(name, dtype):
    """By the reference, and by what runs on a GPU."""
    f, args = function_of(SAME[name][0], in_float32=True), given(dtype)
    right = exact_of(name, *(v.double() for v in args))
    for found in (f(*args), *run_steps(f, args)):
        assert found.dtype is torch.float32 and found.shape == right.shape
        assert (found.double() - right).abs().max() <= 1e-6 * right.abs().max()


@pytest.mark.parametrize("way", ["chunks", "stored"])
@pytest.mark.parametrize("name", EXACT)
def test_gradients_are_those_of_torch_in_float64(name, way, monkeypatch):
    """By both ways to gradients of products."""
    monkeypatch.setattr(product_chunks, "FLOPS_PER_BYTE", MANY if way == "chunks" else 0)
    monkeypatch.setattr(product_chunks, "STORED_SHARE", MANY)
    monkeypatch.setattr(product_chunks, "CHUNK_BYTES", 1)
    f, args = function_of(SAME[name][0]), given(rows=20)
    ours = [v.clone().requires_grad_() for v in args]
    wide = [v.double().requires_grad_() for v in args]
    result, right = f(*ours), exact_of(name, *wide)
    cotangent = torch.randn(result.shape, generator=torch.Generator().manual_seed(1))
    cotangent = cotangent.to(result.dtype)
    found = torch.autograd.grad(result, ours, cotangent, allow_unused=True)
    expected = torch.autograd.grad(right, wide, cotangent.double(), allow_unused=True)
    for own, a, b in zip(ours, found, expected, strict=True):
        if b is None:
            assert a is None or not a.any()
            continue
        assert a.dtype is own.dtype and (a.double() - b).norm() <= CLOSE * b.norm()


@every_spelling
def test_the_oracle_takes_each_spelling(name):
    f, args = function_of(SAME[name][0]), given()
    assert_close(f, f(*args), *args)


@htile.rowwise
def of_a_stack(x: htile.Inner[2], W: htile.Matrix):
    return (x @ W).softmax(-1)


@htile.rowwise
def of_a_table(at: htile.Inner[1], table: htile.Shared, W: htile.Matrix):
    return F.linear(table[at], W).amax(0)


def test_heads_that_are_rows_of_an_argument_or_of_a_table():
    x, W, _ = given()
    apart = x.view(M, H, D)
    assert_close(of_a_stack, of_a_stack(apart, W), apart, W)
    at = torch.arange(M * 3).view(M, 3) * 7 % M * H
    table, weight = apart.flatten(0, 1).contiguous(), W.T.contiguous()
    found = of_a_table(at, table, weight)
    right = (table.double()[at] @ W.double()).amax(1)
    assert found.dtype is BF16 and (found - right).abs().max() <= right.abs().max() / 256


def test_kernels_of_heads_compile():
    """One copies the heads, each head has one of its product, and one takes all products."""
    x, W, b = given()
    kernels = function_of(SAME["normalized"][0]).inspect(x, W, b, arch="sm_90a").kernels
    assert len(kernels) == H + 2
    assert all(kernel.resources.stack == 0 for kernel in kernels)


def test_a_compiled_call_has_the_bits_of_an_eager_one():
    f, args = function_of(SAME["normalized"][0]), given()
    compiled = torch.compile(lambda *args: f(*args), fullgraph=True, backend="aot_eager")
    assert compiled(*args).equal(f(*args))


def test_64_heads_and_no_more():
    @htile.rowwise
    def f(x, W: htile.Matrix):
        return x.view(-1, 8) @ W

    W = torch.randn(8, 24, generator=torch.Generator().manual_seed(5)).to(BF16)
    x = torch.randn(3, 65 * 8, generator=torch.Generator().manual_seed(6)).to(BF16)
    fits = x[:, : 64 * 8].contiguous()
    right = fits.view(3, 64, 8).double() @ W.double()
    found = f(fits, W)
    assert found.shape == right.shape
    assert (found.double() - right).abs().max() <= right.abs().max() / 256
    with pytest.raises(UnsupportedError) as caught:
        f(x, W)
    assert caught.value.message == (
        "matmul of (65, 8) and the matrix W (8, 24): 65 heads would be 65 products, at most 64 "
        "are written out; pass the heads as rows, in a tensor (..., 65, 8)"
    )


REFUSED = {
    "heads of another length": (
        lambda x, W, b: x.view(2, 2 * D) @ W, ShapeError,
        "a row of 32 elements and the matrix W, whose columns have 16"),
    "heads in float32": (
        lambda x, W, b: F.linear(x.view(H, D).softmax(-1), W.T), UnsupportedError,
        "round it, x.to(torch.bfloat16)"),
    "mm of three axes": (
        lambda x, W, b: torch.mm(x.view(2, 2, D), W), ShapeError,
        "expected a row (16,) or heads (..., 16) of a row"),
    "a number": (
        lambda x, W, b: x.sum() @ W, ShapeError, "expected a row (16,) or heads (..., 16)"),
    "a matrix on the left": (
        lambda x, W, b: W.T @ W, ShapeError, "of (24, 16) and the matrix W: expected a row (16,)"),
    "einsum, summed over heads": (
        lambda x, W, b: torch.einsum("hd,dn->n", x.view(H, D), W), UnsupportedError,
        "write F.linear(x, W) or x @ W"),
    "einsum of three": (
        lambda x, W, b: torch.einsum("d,h,dn->hn", x[:D], x[:H], W), UnsupportedError,
        "write F.linear(x, W) or x @ W"),
    "einsum of a matrix alone": (
        lambda x, W, b: torch.einsum("dn,dm->nm", W, W), UnsupportedError,
        "write F.linear(x, W) or x @ W"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name):
    body, kind, words = REFUSED[name]
    with pytest.raises(HTileError) as caught:
        function_of(body)(*given())
    assert type(caught.value) is kind and words in caught.value.message

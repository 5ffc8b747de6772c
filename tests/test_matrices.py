"""Functions with matrix products on the CPU: meaning, how they are cut, what is refused."""


import pytest
import torch
import torch.nn.functional as F

import htile
from htile.errors import ArgumentError, DtypeError, HTileError, ShapeError, UnsupportedError
from htile.frontend.roles import classify
from htile.run.products.calls import ProductStep, key_of, steps_of
from htile.run.products.operands import by_torch
from htile.testing import assert_close
from tests import products
from tests.on_cpu import results_of_groups
from tests.products import BF16, F16, FUNCTIONS, arguments

NAMES = [f._signature.name for f in FUNCTIONS]
SIZES = ((1, 8, 8), (5, 300, 40), (7, 258, 130), (3, 128, 64), (4, 1, 12))
every_function = pytest.mark.parametrize("f", FUNCTIONS, ids=NAMES)
pytestmark = pytest.mark.filterwarnings("ignore:var")  # of one element is NaN, which torch says


def request_of(f, args, kwargs=None):
    values = f._signature.bind(args, kwargs or {})
    return f._request(classify(f._signature, values), f._captures.fingerprint(), values)[0]


@every_function
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_the_reference_means_what_the_function_says(f, size):
    for dtype in (BF16, F16):
        args = arguments(f, *size, dtype)
        assert_close(f, f(*args), *args)


@every_function
def test_leading_dimensions_of_any_number(f):
    args = arguments(f, 6, 24, 16)
    whole = f(*args)
    of_rows = [i for i, v in enumerate(args) if isinstance(v, torch.Tensor) and len(v) == 6]
    apart = [v.unflatten(0, (2, 3)) if i in of_rows else v for i, v in enumerate(args)]
    found = f(*apart)
    pairs = zip(torch.utils._pytree.tree_leaves(whole), torch.utils._pytree.tree_leaves(found),
                strict=True)  # fmt: skip
    assert all(b.shape[:2] == (2, 3) and a.equal(b.flatten(0, 1)) for a, b in pairs)


# How a function is cut


def product_of(product, found):
    """A product in float32, of operands on the CPU."""
    matrix = found[product.matrix].double()
    return (found[product.left].double() @ (matrix.T if product.is_transposed else matrix)).float()


def test_a_result_of_no_row():
    """Its kernel takes its shape from a row that it does not read."""

    @htile.rowwise
    def f(x, W: htile.Matrix, t: htile.PerRow):
        z = x @ W
        return (torch.arange(z.shape[-1]) % 4).sum() * t, t * 2, z.sum()

    args = torch.randn(5, 16).to(BF16), torch.randn(16, 40).to(BF16), torch.randn(5)
    assert_close(f, tuple(run_steps(f, args)), *args)
    assert all(kernel.resources.stack == 0 for kernel in f.inspect(*args).kernels)


def run_steps(f, args, kwargs=None, computed=None):
    """The function's results by what runs on a GPU, each kernel evaluated by torch.

    computed: how the kernel of a product is evaluated; by default `of_groups`.
    Behind the end of rows the kernel of a product reads other numbers of the tensor, here 7.
    """
    request = request_of(f, args, kwargs)
    rows, found = args[0].shape[0], dict(request.given)
    names = tuple(o.name for o in request.specialization.traced.outputs)
    for step in steps_of(request):
        then = step
        if isinstance(step, ProductStep):
            given = found | {p.name: product_of(p, found) for p in step.products}
            if step.kernel is None:
                found, then = given, step.whole
            else:
                made = (computed or of_groups)(step.kernel, given, rows)
                found |= {key_of(name, names): value for name, value in made.items()}
                then = step.then
        if then is not None:
            values = tuple(found[name] for name in then.run.parameters.names)
            keys = [key_of(name, names) for name in then.results]
            found |= zip(keys, then.run(values, (rows,)), strict=True)
    return [found[key_of(name, names)] for name in names]


def of_groups(kernel, given, rows):
    """The results of the kernel of a product, by name."""
    values = {}
    for i in kernel.graph.inputs:
        value = given[i.name]
        if isinstance(value, torch.Tensor) and kernel.graph[i.id].value.spread:
            start = i.view.start[0] if i.view is not None else 0
            value = value[..., start : start + kernel.n]
        values[i.id] = value if i.formula is None else i.formula.number(value)
    return results_of_groups(kernel, values, rows)


@every_function
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_what_runs_on_a_gpu_computes_the_same(f, size):
    args = arguments(f, *size)
    result = torch.utils._pytree.tree_unflatten(
        run_steps(f, args), request_of(f, args).specialization.traced.structure
    )
    assert_close(f, result, *args)


PIECES = {
    "stacked": lambda z, s: torch.stack([z.amax(-1), s, torch.ones(()), z.sum(-1)]),
    "of a table": lambda z, s: z.view(2, 2, -1).logsumexp(-1) * s,
    "expanded": lambda z, s: (z.amax(-1).expand(3), z, z.mean(-1, keepdim=True)),
    "over all rows": lambda z, s: htile.sum_rows(torch.stack([z.amax(-1), z.amin(-1) * s])),
}


@pytest.mark.parametrize("n", [144, 256, 300])
@pytest.mark.parametrize("name", PIECES)
def test_a_result_of_several_numbers_is_whole(name, n):
    """The row kernel that combines groups of columns gives all numbers of it."""
    of = PIECES[name]

    @htile.rowwise
    def f(x, W: htile.Matrix, s: htile.PerRow):
        return of(F.linear(x, W), s)

    args = *arguments(products.linear, 5, n, 64)[:2], torch.randn(5)
    results, structure = run_steps(f, args), request_of(f, args).specialization.traced.structure
    assert_close(f, torch.utils._pytree.tree_unflatten(results, structure), *args)


def test_which_functions_are_one_kernel():
    """A row kernel combines what groups of columns give; a softmax has the tiles of a cluster."""
    fused = {}
    for f in FUNCTIONS:
        steps = steps_of(request_of(f, arguments(f, 4, 512, 64)))
        is_fused = all(s.kernel is not None for s in steps if isinstance(s, ProductStep))
        more = [s.then is not None for s in steps if isinstance(s, ProductStep) and is_fused]
        fused[f._signature.name] = len(steps) + sum(more) if is_fused else None
    assert fused == {
        "linear": 1, "matmul": 1, "gelu": 1, "swiglu": 1, "packed_swiglu": 1, "nll": 2,
        "statistics": 2, "project": 2, "norm_linear": 2, "mlp": 2, "softmax": 1, "three": None,
        "turned": 2, "variance": None, "bounded": 1, "masked": 1, "averaged": 2,
    }  # fmt: skip


@pytest.mark.parametrize("n", [100, 256, 300])
def test_edges_of_a_sum_that_is_cut(n):
    """Groups of -inf, +inf and NaN, and offsets: what torch.logsumexp gives."""
    k = 8
    rows = torch.randn(12, k).to(BF16)
    head = torch.randn(n, k).to(BF16)
    head[: n // 2, 0] = float("-inf")
    rows[:, 0] = torch.tensor([1.0, 0.5, -1, 0, 1, 1, 1, 1, 1, 1, 1, 1])
    rows[4:6] *= 1e4
    rows[6] = float("nan")
    rows[7] = float("inf")
    head[n - 1, 1] = float("inf")
    rows[8, 1], rows[9, 1] = 1.0, -1.0
    labels = torch.arange(12) * (n - 1) // 11
    (found,) = run_steps(products.nll, (rows, head, labels))
    z = rows.double() @ head.double().T
    expected = z.logsumexp(-1) - z.gather(-1, labels[:, None])[:, 0]
    assert torch.allclose(found.double(), expected, 1e-5, 1e-3, equal_nan=True)


ELEMENTS = {
    "of a product, in its row": lambda x, W, r: (x @ W) - (x @ W)[3],
    "of a product, beside a sum": lambda x, W, r: ((x @ W).sum(), (x @ W)[-1]),
    "of a product, alone": lambda x, W, r: (x @ W)[2],
    "of another row": lambda x, W, r: ((x @ W).sum() + r[2], x @ W + r[1]),
}


@pytest.mark.parametrize("name", ELEMENTS)
def test_single_elements(name):
    """A kernel of products reads whole rows, so an element is read by the row kernel behind it."""
    body = ELEMENTS[name]

    @htile.rowwise
    def f(x, W: htile.Matrix, r):
        return body(x, W, r)

    args = torch.randn(4, 16).to(BF16), torch.randn(16, 40).to(BF16), torch.randn(4, 40)
    result = torch.utils._pytree.tree_unflatten(
        run_steps(f, args), request_of(f, args).specialization.traced.structure
    )
    assert_close(f, result, *args)


@htile.rowwise
def queries_and_keys(x, q: htile.Matrix, k: htile.Matrix):
    return F.linear(x, q), F.linear(x, k).amax()


@htile.rowwise
def of_two_norms(x, W: htile.Matrix, r):
    return F.linear(F.normalize(x, dim=-1).to(BF16), W) + F.normalize(r, dim=-1)


@pytest.mark.parametrize("f", [queries_and_keys, of_two_norms], ids=lambda f: f._signature.name)
def test_rows_of_different_lengths(f):
    """Those of one level are kernels of their own."""
    x, matrix = torch.randn(4, 231).to(BF16), torch.randn(1016, 231).to(BF16)
    args = x, matrix, matrix[:200] if f is queries_and_keys else torch.randn(4, 1016)
    result = run_steps(f, args)
    assert_close(f, result if len(result) > 1 else result[0], *args)
    for own in args:
        own.requires_grad_()
    results = torch.utils._pytree.tree_leaves(f(*args))
    sum(r.float().sum() for r in results).backward()
    assert all(own.grad.isfinite().all() for own in args)


@htile.rowwise
def unguarded(x, W: htile.Matrix):
    z = F.linear(x, W)
    return (z - z.max()).exp().sum()


@pytest.mark.parametrize("low", [150, 300])
def test_a_sum_below_an_infinite_maximum_is_nan(low):
    """Where all of a row are -inf, or some are +inf: nothing makes the maximum finite here."""
    rows, head = torch.randn(2, 8).to(BF16), torch.randn(300, 8).to(BF16)
    rows[:, 0] = torch.tensor([1.0, -1.0])
    head[:low, 0] = float("-inf")
    (found,) = run_steps(unguarded, (rows, head))
    z = rows.double() @ head.double().T
    expected = (z - z.amax(-1, keepdim=True)).exp().sum(-1)
    assert expected.isnan().tolist() == [low == 300, True]
    assert torch.allclose(found.double(), expected, 1e-5, equal_nan=True)


def test_a_label_beyond_the_row_gives_nan():
    x, head, _ = arguments(products.nll, 4, 300, 16)
    labels = torch.tensor([300, -301, 299, -300])
    for found in (products.nll(x, head, labels), run_steps(products.nll, (x, head, labels))[0]):
        assert found.isnan().tolist() == [True, True, False, False]


# What is refused


def of(function, *args):
    return lambda: htile.rowwise(function)(*args)


def scaled(x, W: htile.Matrix):
    return x @ (W * 2)


def read(x, W: htile.Matrix):
    return F.linear(x, W) + W.sum()


def twice(x, W: htile.Matrix):
    return F.linear(x + x, W)


def unannotated(x, W):
    return F.linear(x, W)


def shared(x, W: htile.Shared):
    return F.linear(x, W)


def plain(x, W: htile.Matrix):
    return F.linear(x, W)


def other_way(x, W: htile.Matrix):
    return x @ W


X, W = torch.ones(4, 16, dtype=BF16), torch.ones(24, 16, dtype=BF16)
REFUSED = [
    (of(scaled, X, W.T), UnsupportedError, "mul of W, which is annotated htile.Matrix"),
    (of(read, X, W), UnsupportedError, "it is only multiplied by rows"),
    (of(twice, X, W), UnsupportedError, "round it, x.to(torch.bfloat16)"),
    (of(unannotated, X, X), UnsupportedError, "annotate the weight, `weight: htile.Matrix`"),
    (of(shared, torch.ones(4, 66, dtype=BF16), torch.ones(65, 66)), UnsupportedError,
     "no matrix argument of shape (65, 66): annotate the weight"),
    (of(plain, X.float(), W.float()), DtypeError, "convert it with .to(torch.bfloat16)"),
    (of(plain, X.half(), W), DtypeError, "x.to(torch.bfloat16), or pass W in torch.float16"),
    (of(other_way, X, W), ShapeError, "F.linear takes a matrix (N, K), and x @ W one of (K, N)"),
    (of(plain, X, W[0]), ShapeError, "expected two dimensions"),
    (of(plain, X, W[:0]), ShapeError, "of at least one element"),
    (lambda: htile.rowwise(plain, dynamic_n=True)(X, W), UnsupportedError, "dynamic_n"),
    (lambda: products.linear(X, W, out=torch.empty(4, 16)), ShapeError, "(4, 24)"),
    (lambda: products.linear.tune(X, W), ArgumentError, "CUDA tensors"),
    (lambda: products.linear.inspect(X, W).training, UnsupportedError, "at their first use"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED)
def test_what_is_refused(call, kind, words):
    with pytest.raises(HTileError) as caught:
        call()
    assert type(caught.value) is kind and words in str(caught.value)


@pytest.mark.parametrize("name", ["inner", "mv", "dot", "vdot", "bmm"])
def test_what_is_no_product_of_a_row_and_a_matrix_in_torch(name):
    """torch.inner of a square matrix means x @ W.T, and the others raise."""
    call = getattr(torch, name)

    @htile.rowwise
    def f(x, W: htile.Matrix):
        return call(x, W)

    with pytest.raises(UnsupportedError, match=r"of an htile.Matrix: write F.linear\(x, W\)"):
        f(X, torch.ones(16, 16, dtype=BF16))


def test_results_are_written_to_out():
    args = arguments(products.project, 4, 24, 16)
    expected = products.project(*args)
    out = torch.empty(4, 24, dtype=BF16), torch.empty(4)
    assert products.project(*args, out=out) is out
    assert all(a.equal(b) for a, b in zip(out, expected, strict=True))


def first_rows(args, count, of):
    return [v[:count] if isinstance(v, torch.Tensor) and len(v) == of else v for v in args]


def test_no_rows():
    for f in FUNCTIONS:
        none = first_rows(arguments(f, 3, 16, 8), 0, of=3)
        assert all(len(r) == 0 for r in torch.utils._pytree.tree_leaves(f(*none)))


def test_no_rows_have_the_kernels_of_one_row():
    for f in FUNCTIONS:
        args = arguments(f, 3, 16, 8)
        none, one = (f.inspect(*first_rows(args, count, of=3)).kernels for count in (0, 1))
        texts = [[k.source for k in kernels if hasattr(k, "text")] for kernels in (none, one)]
        assert len(none) == len(one) and texts[0] == texts[1] != []


# Which kernels run


@htile.rowwise
def named_as_arguments(x, up: htile.Matrix, down: htile.Matrix):
    h = F.relu(F.linear(x, up)).to(x.dtype)
    return {"x": h, "y": torch.softmax(F.linear(h, down) + x, -1)}


def test_a_result_with_the_name_of_an_argument():
    """What later kernels read is the argument, here with rows that must be copied."""
    for k in (16, 264):  # the second product is reduced in a tile, or stored
        x, up, down = arguments(products.mlp, 4, 24, k)
        x = x.t().contiguous().t()
        found = run_steps(named_as_arguments, (x, up, down))
        assert_close(named_as_arguments, dict(zip("xy", found, strict=True)), x, up, down)
    *_, last = named_as_arguments.inspect(x, up, down).kernels
    assert last.copied == {"x"}


def kernels_of(f, *args):
    """How many kernels have products, and the products that torch computes."""
    found = f.inspect(*args)
    return sum(hasattr(kernel, "text") for kernel in found.kernels), len(found.by_torch)


def meta(*shape):
    return torch.empty(shape, dtype=BF16, device="meta")


def test_operands_that_the_hardware_does_not_load():
    """Lines that overlap, or begin elsewhere than at multiples of 16 bytes: torch multiplies."""
    f, weight, x = products.linear, meta(24, 16), meta(4, 16)
    one, none = (1, 0), (0, 1)
    assert kernels_of(f, x, weight) == kernels_of(f, x[:, :8], weight[:, 8:]) == one
    assert kernels_of(f, x, meta(16, 24).t()) == one
    assert kernels_of(f, x.t().contiguous().t(), weight) == one
    assert kernels_of(f, meta(4, 24)[:, 4:20], weight) == none
    assert kernels_of(f, x, meta(24, 20)[:, :16]) == none
    assert kernels_of(f, x.as_strided((4, 16), (8, 1)), weight) == none
    assert kernels_of(f, x, weight.as_strided((24, 16), (8, 1))) == none
    assert kernels_of(f, x, weight[:1].expand(24, 16)) == none
    assert kernels_of(f, meta(1, 8).t(), meta(24, 8)[:, :1]) == none


def test_parts_of_a_matrix_begin_anywhere():
    """Here the second part begins at a multiple of 8 bytes, so that the product is stored."""
    f, x = products.packed_swiglu, meta(4, 16)
    for n, stored in ((96, False), (100, True)):
        kernels = f.inspect(x, meta(16, 2 * n).t()).kernels
        assert len(kernels) == 1 + stored
        assert len(f.inspect(x, meta(2 * n, 16)).kernels) == 1


@pytest.mark.parametrize("f", [products.linear, products.matmul], ids=lambda f: f._signature.name)
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_products_of_torch_are_float32_without_out_dtype(f, dtype):
    """As torch 2.7 computes them on a GPU, and every torch on a CPU."""
    args = arguments(f, 5, 300, 1000, dtype)
    (step,) = steps_of(request_of(f, args))
    (product,), found = step.products, dict(zip("xW", args, strict=True))
    exact = product_of(product, found)
    by_torch(product, found)
    assert found[product.name].dtype is torch.float32
    assert (found[product.name] - exact).abs().max() < 1e-4

"""Functions with matrix products in torch.compile, torch.export and torch.func, on the CPU.

Compiled calls have the bits of eager ones. Numbers are held against torch's own in float64.
"""

import io
import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import htile
from htile.errors import GradientError, UnsupportedError
from htile.run.products import chunks as product_chunks
from tests import products
from tests.products import BF16, FUNCTIONS, arguments
from tests.test_product_gradients import (
    CLOSE,
    MANY,
    K,
    M,
    N,
    cotangents_of,
    dims_of,
    everything,
    exact,
    leaves,
    of_everything,
    summed,
)

REPO = Path(__file__).parents[1]
BACKENDS = ("eager", "aot_eager")
TIMES, FACTORS = 2.0, (2.0,)
fullgraph = partial(torch.compile, fullgraph=True)
by_name = pytest.mark.parametrize("f", FUNCTIONS, ids=lambda f: f._signature.name)


@htile.rowwise
def captured(x, W: htile.Matrix):
    return F.linear(x, W) * FACTORS[0]


@htile.rowwise
def numbered(x, W: htile.Matrix):
    return torch.tanh(F.linear(x, W)) * TIMES


@htile.rowwise
def with_a_table(x, W: htile.Matrix, table: htile.Shared, at: htile.PerRow):
    return F.linear(x, W) * table[at]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


@pytest.fixture(params=["chunks", "stored"])
def way(request, monkeypatch):
    """Both ways to gradients of products, whatever the sizes are."""
    monkeypatch.setattr(product_chunks, "FLOPS_PER_BYTE", MANY if request.param == "chunks" else 0)
    monkeypatch.setattr(product_chunks, "STORED_SHARE", MANY)
    monkeypatch.setattr(product_chunks, "CHUNK_BYTES", 1)
    return request.param


def same(found, right) -> bool:
    """Whether two nests of tensors have the same structure, bits, dtypes and strides."""
    assert type(found) is type(right)
    pairs = list(zip(tree_leaves(found), tree_leaves(right), strict=True))
    return all(
        a.equal(b) and a.dtype is b.dtype and a.stride() == b.stride() for a, b in pairs
    )


def gradients(function, args):
    """The cotangents of the results, and the gradients of all floating arguments for them."""
    ours = leaves(args)
    results = tree_leaves(function(*ours))
    cotangents = cotangents_of(results)
    wanted = [v for v in ours if v.requires_grad]
    return cotangents, torch.autograd.grad(results, wanted, cotangents)


def is_close(found, right, close=CLOSE) -> bool:
    return all(
        a.shape == b.shape and (a.double() - b).norm() <= close * b.norm() + 1e-6
        for a, b in zip(tree_leaves(found), tree_leaves(right), strict=True)
    )


def operations(graph) -> list[str]:
    """What the operations of HTile in a graph of torch are, by the ends of their names."""
    nodes = [node for node in graph.nodes if "htile" in str(node.target)]
    return [node.args[0].partition("|")[2] for node in nodes]


def graphs_of(function, args) -> list:
    """The graphs of the forward and of the backward pass."""
    made = []

    def keep(graph, inputs):
        made.append(graph.graph)
        return graph

    gradients(fullgraph(function, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep)), args)
    return made


# torch.compile


@pytest.mark.parametrize("backend", BACKENDS)
@by_name
def test_a_compiled_call_has_the_bits_and_the_strides_of_an_eager_one(f, backend):
    args = arguments(f, M, N, K)
    assert same(fullgraph(lambda *args: f(*args), backend=backend)(*args), f(*args))


@by_name
def test_gradients_of_a_compiled_call(f, way):
    """They are those of an eager call, bit for bit, and near those in float64."""
    args = arguments(f, M, N, K)
    cotangents, found = gradients(fullgraph(lambda *args: f(*args), backend="aot_eager"), args)
    assert same(found, gradients(f, args)[1])
    right = exact(f, args, dims_of(f, args), cotangents)
    assert is_close(found, right, 0.02 if f is products.mlp else CLOSE)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradients_of_every_kind_of_argument_and_of_several_results(way, backend):
    args = of_everything()
    compiled = fullgraph(lambda *args: everything(*args), backend=backend)
    assert same(compiled(*args), everything(*args))
    cotangents, found = gradients(compiled, args)
    assert same(found, gradients(everything, args)[1])
    assert is_close(found, exact(everything, args, dims_of(everything, args), cotangents))


@pytest.mark.parametrize("asked", [("x",), ("W",), ("bias", "factor"), ("residual",)])
def test_gradients_of_some_arguments(asked, way):
    names = everything._signature.names

    def of_asked(function):
        args = [v.clone().requires_grad_(name in asked)
                for name, v in zip(names, of_everything(), strict=True)]  # fmt: skip
        results = function(*args)
        wanted = [v for v in args if v.requires_grad]
        return torch.autograd.grad(results[0], wanted, cotangents_of(results)[0])

    compiled = fullgraph(lambda *args: everything(*args), backend="aot_eager")
    assert same(of_asked(compiled), of_asked(everything))


def test_a_sum_over_rows(way):
    """Its gradient is no row, and that of what is summed is no row of the cotangents."""

    @htile.rowwise
    def of_residual(x, W: htile.Matrix, residual):
        return F.linear(x, W), htile.sum_rows(residual)

    x, W = arguments(products.linear, M, N, K)
    residual = torch.randn(M, N, generator=torch.Generator().manual_seed(4))
    for f, args in ((summed, (x, W)), (of_residual, (x, W, residual))):
        found = gradients(fullgraph(lambda *args, f=f: f(*args), backend="aot_eager"), args)
        assert same(found, gradients(f, args))
    cotangents, of_arguments = found
    right = cotangents[1].expand_as(residual)
    torch.testing.assert_close(of_arguments[2], right)


def test_leading_dimensions_rows_that_repeat_and_no_rows(way):
    x, W, bias, scale, factor, residual = of_everything()
    apart = x.unflatten(0, (4, 5)), W, bias, scale.unflatten(0, (4, 5)), factor, residual[0]
    none = x[:0], W, bias, scale[:0], factor, residual[:0]
    for args in (apart, none):
        compiled = fullgraph(lambda *args: everything(*args), backend="aot_eager")
        assert same(compiled(*args), everything(*args))
        assert same(gradients(compiled, args), gradients(everything, args))


def test_which_operations_there_are(monkeypatch):
    """A loss over a vocabulary has one for each direction, and keeps arguments only."""
    monkeypatch.setattr(product_chunks, "CHUNK_BYTES", 1)
    args = arguments(products.nll, 64, 1000, 16)
    forward, backward = graphs_of(lambda *args: products.nll(*args), args)
    assert operations(forward) == ["0 step"] and operations(backward) == ["0 step|h,head;;1"]
    kept = [node.meta["val"].numel() for node in forward.output_node().args[0]]
    assert max(kept) == 1000 * 16
    monkeypatch.setattr(product_chunks, "FLOPS_PER_BYTE", 0)
    monkeypatch.setattr(product_chunks, "STORED_SHARE", MANY)
    args = arguments(products.gelu, M, N, K)
    forward, backward = graphs_of(lambda *args: products.gelu(*args), args)
    assert operations(forward) == ["0 product 0", "0 rows"] and len(operations(backward)) == 1


@pytest.mark.parametrize("how", ["dynamic", "marked", "seen"])
def test_one_graph_serves_any_number_of_rows(how):
    f = products.gelu
    compiled = fullgraph(lambda *args: f(*args), backend="aot_eager",
                         dynamic=True if how == "dynamic" else None)  # fmt: skip
    x, W, bias = arguments(f, 4, N, K)
    if how == "marked":
        torch._dynamo.mark_dynamic(x, 0)
    for count in (4, 5, 6, 7, 9):
        x = x if count == 4 else arguments(f, count, N, K)[0]
        assert same(compiled(x, W, bias), f(x, W, bias))
    assert counters["stats"]["unique_graphs"] == (2 if how == "seen" else 1)
    with_more_columns = arguments(f, 5, 2 * N, K)
    assert same(compiled(*with_more_columns), f(*with_more_columns))
    assert counters["stats"]["unique_graphs"] == (3 if how == "seen" else 2)


def test_gradients_with_any_number_of_rows(monkeypatch):
    """torch traces anew once where so few rows come that their products are stored."""
    monkeypatch.setattr(product_chunks, "FLOPS_PER_BYTE", 0)
    monkeypatch.setattr(product_chunks, "STORED_SHARE", 0)
    monkeypatch.setattr(product_chunks, "CHUNK_BYTES", 4 * N * 10)
    compiled = fullgraph(lambda *args: products.nll(*args), backend="aot_eager", dynamic=True)
    for count, graphs in ((12, 1), (13, 1), (20, 1), (4, 2), (9, 2), (30, 2), (10, 2)):
        args = arguments(products.nll, count, N, K)
        assert same(gradients(compiled, args), gradients(products.nll, args))
        assert counters["stats"]["unique_graphs"] == graphs


class Model(torch.nn.Module):
    """A layer and a loss of HTile between modules of torch."""

    def __init__(self):
        super().__init__()
        made = torch.Generator().manual_seed(0)

        def weight(*shape):
            values = torch.randn(shape, generator=made) / shape[-1] ** 0.5
            return torch.nn.Parameter(values.to(BF16))

        self.norm = torch.nn.LayerNorm(K, dtype=BF16)
        self.gate, self.up, self.down = weight(N, K), weight(N, K), weight(K, N)
        self.head, self.bias = weight(3 * N, K), torch.nn.Parameter(torch.zeros(K, dtype=BF16))

    def forward(self, x, label):
        h = products.swiglu(self.norm(x), self.gate, self.up)
        h = torch.relu(products.gelu(h, self.down, self.bias)) + x
        return products.nll(h, self.head, label).mean()


def of_torch(model, x, label):
    """The same by torch alone."""
    h = model.norm(x)
    h = F.silu(F.linear(h, model.gate)) * F.linear(h, model.up)
    h = torch.relu(F.gelu(F.linear(h, model.down, model.bias))) + x
    return F.cross_entropy(F.linear(h, model.head), label)


@pytest.mark.parametrize("backend", [*BACKENDS, "inductor"])
def test_a_model_trains_compiled_as_it_does_in_eager_mode(backend):
    model, wide = Model(), Model().double()
    x, label = arguments(products.linear, M, N, K)[0], torch.arange(M) * 5

    def step(function, model, *args):
        model.zero_grad()
        loss = function(*args)
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters())]

    found = step(fullgraph(model, backend=backend), model, x, label)
    if backend != "inductor":  # which does not round between the layers
        assert same(found, step(model, model, x, label))
    right = step(partial(of_torch, wide), wide, x.double(), label)
    assert is_close(found, right, 0.03)
    assert counters["stats"]["unique_graphs"] == 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_captured_value_that_changes_is_traced_anew_or_refused(backend, monkeypatch):
    args = arguments(products.linear, M, N, K)
    compiled = fullgraph(lambda *args: numbered(*args), backend=backend)
    refused = fullgraph(lambda *args: captured(*args), backend=backend)
    gradients(compiled, args), gradients(refused, args), refused(*args)
    monkeypatch.setitem(globals(), "TIMES", 3.0)
    monkeypatch.setitem(globals(), "FACTORS", (3.0,))
    assert same(gradients(compiled, args), gradients(numbered, args))
    for run in (lambda: refused(*args), lambda: gradients(refused, args)):
        with pytest.raises(htile.TraceError, match="a value that it captures has changed"):
            run()


PROGRAM = """
import json
import torch, htile
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._functorch.aot_autograd import make_boxed_func
from htile.run.products import chunks as product_chunks

product_chunks.FLOPS_PER_BYTE = 0
product_chunks.STORED_SHARE = 0 if CHUNKS else 10**9
product_chunks.CHUNK_BYTES = 0

@htile.rowwise
def layer(x, W: htile.Matrix, bias):
    return torch.tanh(F.linear(x * torch.rsqrt((x * x).mean() + 1), W, bias))

torch.manual_seed(0)
args = [torch.randn(s).bfloat16().requires_grad_() for s in ((8, 16), (24, 16), (24,))]
compiled = torch.compile(lambda *args: layer(*args), fullgraph=True)
pairs = [torch.autograd.grad(y(*args).float().square().sum(), args) for y in (compiled, layer)]
print(json.dumps({
    "right": all((a - b).norm() <= 0.01 * b.norm() for a, b in zip(*pairs)),
    "hits": counters["aot_autograd"]["autograd_cache_hit"],
}))
"""


@pytest.mark.parametrize("chunks", [True, False])
def test_the_next_process_takes_what_torch_has_cached(tmp_path, chunks):
    """The names of the steps and of their gradients say there where they come from."""
    environ = os.environ | {
        "PYTHONPATH": str(REPO),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TORCHINDUCTOR_FX_GRAPH_CACHE": "1",
        "TORCHINDUCTOR_AUTOGRAD_CACHE": "1",
    }
    file, said = tmp_path / "program.py", []
    file.write_text(PROGRAM.replace("CHUNKS", str(chunks)), encoding="utf-8")
    for _ in range(2):
        run = subprocess.run(
            [sys.executable, str(file)], env=environ, capture_output=True, text=True
        )
        assert run.returncode == 0, run.stderr
        said.append(json.loads(run.stdout.splitlines()[-1]))
    assert said == [{"right": True, "hits": 0}, {"right": True, "hits": 1}]


def test_out_is_written_as_in_eager_mode():
    def function(x, W, bias, out):
        return products.gelu(x, W, bias, out=out) + 1

    args = arguments(products.gelu, M, N, K)
    outs = [torch.empty(M, N, dtype=BF16) for _ in range(2)]
    compiled = fullgraph(function, backend="aot_eager")
    assert same(compiled(*args, outs[0]), function(*args, outs[1])) and same(*outs)


@pytest.mark.parametrize("backend", BACKENDS)
def test_grad_modes_autocast_and_checkpoints_are_as_in_eager_mode(way, backend):
    args = arguments(products.gelu, M, N, K)

    def function(x, W, bias):
        with torch.no_grad():
            first = products.gelu(x, W, bias)
        return first * checkpoint(products.gelu, x, W, bias, use_reentrant=False)

    compiled = fullgraph(function, backend=backend)
    assert same(gradients(compiled, args), gradients(function, args))
    with torch.autocast("cpu", BF16):
        assert same(gradients(compiled, args), gradients(function, args))
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found = fullgraph(lambda *args: products.gelu(*args), backend=backend)(*args)
            assert same(found, products.gelu(*args)) and not found.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_has_a_gradient(backend):
    x, W = arguments(products.linear, M, N, K)
    args = leaves((x, W, torch.randn(9, N, dtype=torch.float32), torch.arange(M) % 9))
    compiled = fullgraph(lambda *args: with_a_table(*args), backend=backend)
    assert same(gradients(compiled, args), gradients(with_a_table, args))


def test_what_has_no_derivative_is_refused_where_the_call_is_traced():
    @htile.rowwise
    def multiplied(x, W: htile.Matrix):
        return htile.max_rows(F.linear(x, W))

    args = leaves(arguments(products.linear, M, N, K))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="has no derivative yet"):
        fullgraph(lambda *args: multiplied(*args), backend="eager")(*args)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_tangent_is_never_dropped(backend):
    """Where the graph runs as it was recorded, the operation has tangents; elsewhere none."""
    x, W = arguments(products.linear, M, N, K)
    compiled = fullgraph(lambda *args: products.linear(*args), backend=backend)
    for with_gradient in (False, True):
        compiled(x, W.clone().requires_grad_(with_gradient))
        with torch.autograd.forward_ad.dual_level():
            given = torch.autograd.forward_ad.make_dual(x, x)
            if backend == "eager":
                found = compiled(given, W.clone().requires_grad_(with_gradient))
                tangent = torch.autograd.forward_ad.unpack_dual(found).tangent
                assert is_close(tangent, x.double() @ W.double().t())
                continue
            kinds = GradientError, torch._dynamo.exc.Unsupported, NotImplementedError
            with pytest.raises(kinds, match=r"forward-mode|forward_ad|forward mode AD"):
                compiled(given, W.clone().requires_grad_(with_gradient))


# the operations


class Recorded(torch.fx.Interpreter):
    """Runs a graph, and notes what HTile's operations are called with."""

    called: list

    def run_node(self, node):
        if node.target is torch.ops.htile.run.default:
            name, tensors, *others = self.fetch_args_kwargs_from_env(node)[0]
            self.called.append((name, [t.detach() for t in tensors], *others))
        return super().run_node(node)


@pytest.mark.parametrize("f", [products.nll, products.bounded, products.mlp, everything],
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_the_operations_keep_torchs_rules(f, way):
    """Each is called with what a training step calls it with."""
    args = of_everything() if f is everything else arguments(f, M, N, K)
    called = []

    def recorded(graph, inputs):
        run = Recorded(graph)
        run.called = called
        return make_boxed_func(run.run)

    backend = aot_autograd(fw_compiler=recorded, bw_compiler=recorded)
    compiled = fullgraph(lambda *args: f(*args), backend=backend)
    compiled(*args)
    ((name, *given),) = called
    gradients(compiled, args)
    assert len(called) > 2
    for each in called:
        torch.library.opcheck(torch.ops.htile.run.default, each)
    for tensors in (given[0], leaves(given[0])):
        torch.library.opcheck(torch.ops.htile.call.default, (name, tensors, given[1]))


def test_fake_tensors_have_the_shapes_of_results():
    with FakeTensorMode() as mode:
        args = [mode.from_tensor(v) for v in of_everything()]
        args[0].requires_grad_()
        rows, means = everything(*args)
        rows.sum().backward()
    assert rows.shape == (M, N) and rows.dtype is BF16 and means.shape == (M,)
    assert args[0].grad.shape == (M, K) and args[0].grad.dtype is BF16


# torch.export


class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        _, W, bias = arguments(products.gelu, M, N, K)
        self.W, self.bias = torch.nn.Parameter(W), torch.nn.Parameter(bias)

    def forward(self, x):
        return products.gelu(torch.relu(x), self.W, self.bias)


@pytest.mark.parametrize("strict", [False, True])
def test_an_exported_program_runs(strict, way):
    model, x, y = Layer(), *(arguments(products.gelu, m, N, K, seed=m)[0] for m in (M, 7))
    dynamic = {"x": {0: torch.export.Dim("rows")}}
    program = torch.export.export(model, (x,), dynamic_shapes=dynamic, strict=strict)
    targets = [str(node.target) for node in program.graph.nodes]
    assert [each for each in targets if "htile" in each] == ["htile.call.default"]
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    for each in (program, torch.export.load(file)):
        assert same(each.module()(y), model(y))
        assert same(gradients(each.module(), (y,)), gradients(model, (y,)))
    infers = program.run_decompositions().module()
    with torch.no_grad():
        assert same(infers(y), model(y))
    with pytest.raises(GradientError, match="decomposed for inference"):
        infers(y)


# torch.func


def plain(f):
    """The function as it is written, for all rows."""

    def run(x, *others):
        one = f._fn if x.ndim == 1 else vmap(f._fn, (0, *(None,) * len(others)))
        return one(x, *others)

    return run


def total(function):
    """A number that depends on each result in another way."""

    def run(*given):
        found = 0.0
        for result in tree_leaves(function(*given)):
            wide = result if result.dtype is torch.float64 else result.float()
            weights = torch.linspace(-1, 1, result.shape[-1] if result.ndim else 1).to(wide)
            found = found + (wide * weights + wide.square() / 8).sum()
        return found

    return run


BATCH = 4
ROWS_ONLY = (0, None, None)
OF_BOTH = {
    "grad": (lambda f: grad(total(f), (0, 1, 2)), (M,)),
    "the gradient of the matrix alone": (lambda f: grad(total(f), 1), (M,)),
    "the gradient of the rows alone": (lambda f: grad(total(f)), (M,)),
    "vjp": (lambda f: lambda x, W, b: vjp(f, x, W, b)[1](x[:, :1].expand(-1, N) + 1), (M,)),
    "one for each sample": (
        lambda f: vmap(grad(total(f), (0, 1, 2)), ROWS_ONLY), (BATCH, M // BATCH)
    ),
    "samples of one row": (lambda f: vmap(grad(total(f), (0, 1, 2)), ROWS_ONLY), (M,)),
    "of a batch": (lambda f: grad(total(vmap(f, ROWS_ONLY)), (0, 1, 2)), (BATCH, M // BATCH)),
    "of batches": (
        lambda f: vmap(vmap(grad(total(f), (0, 1, 2)), ROWS_ONLY), ROWS_ONLY), (2, BATCH, 3)
    ),
    "of a batch of batches": (
        lambda f: vmap(grad(total(vmap(f, ROWS_ONLY)), (0, 1, 2)), ROWS_ONLY), (2, BATCH, 3)
    ),
    "jacrev": (lambda f: jacrev(f, (0, 2)), (3,)),
    "second order": (lambda f: grad(total(grad(total(f), (0, 1))), (0, 1, 2)), (M,)),
    "second order of samples": (
        lambda f: vmap(grad(total(grad(total(f), (0, 1))), (0, 1, 2)), ROWS_ONLY), (BATCH, 5)
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", OF_BOTH)
def test_transforms_of_torch_func(name):
    make, lead = OF_BOTH[name]
    _, W, bias = arguments(products.gelu, M, N, K)
    x = torch.randn(*lead, K, generator=torch.Generator().manual_seed(2)).to(BF16)
    found = make(products.gelu)(x, W, bias)
    right = make(plain(products.gelu))(x.double(), W.double(), bias.double())
    assert all(a.dtype is BF16 for a in tree_leaves(found))
    assert is_close(found, right, 0.03 if name.startswith("second") else 2 * CLOSE)


@pytest.mark.parametrize("f", [products.norm_linear, products.swiglu, products.mlp,
                               products.project, products.softmax, summed],
                         ids=lambda f: f._signature.name)  # fmt: skip
def test_gradients_of_functions_of_several_kinds(f):
    """For all samples at once, and for each of them."""
    x, *others = arguments(products.linear if f is summed else f, M, N, K)
    count = len(others) + 1
    dims = 0, *(0 if f is products.project and k == 0 else None for k in range(count - 1))

    def of_torch(*args):
        found = vmap(f._fn, dims)(*args)
        return (found[0], found[1].sum(0)) if f is summed else found

    wide = [v.double() for v in (x, *others)]
    every = tuple(range(count))
    found, right = grad(total(f), every)(x, *others), grad(total(of_torch), every)(*wide)
    assert is_close(found, right, 0.03)
    batch = [v.unflatten(0, (BATCH, -1)) if dim == 0 else v
             for v, dim in zip((x, *others), dims, strict=True)]  # fmt: skip
    found = vmap(grad(total(f), every), dims)(*batch)
    right = vmap(grad(total(of_torch), every), dims)(*(v.double() for v in batch))
    assert is_close(found, right, 0.03)


def test_losses_of_samples():
    h, head, label = arguments(products.nll, M, N, K)
    label = label % N

    def loss(h, head, label):
        return products.nll(h, head, label).mean()

    def of_torch(h, head, label):
        return F.cross_entropy(F.linear(h, head), label)

    dims, batch = (0, None, 0), (h.unflatten(0, (BATCH, -1)), label.unflatten(0, (BATCH, -1)))
    found = vmap(grad(loss, (0, 1)), dims)(batch[0], head, batch[1])
    right = vmap(grad(of_torch, (0, 1)), dims)(batch[0].double(), head.double(), batch[1])
    assert found[1].shape == (BATCH, N, K) and is_close(found, right)
    alone = [grad(loss, (0, 1))(batch[0][k], head, batch[1][k]) for k in range(BATCH)]
    assert is_close(found, [torch.stack([a[k].double() for a in alone]) for k in range(2)])


def test_a_module_as_a_function_and_autograd_outside_of_a_transform():
    model, (x, W, bias) = Layer(), arguments(products.gelu, M, N, K)
    given = dict(model.named_parameters())
    found = grad(lambda given: total(lambda x: functional_call(model, given, x))(x))(given)
    right = grad(total(plain(products.gelu)), (1, 2))(
        torch.relu(x).double(), W.double(), bias.double()
    )
    assert is_close([found["W"], found["bias"]], right)

    def of_penalty(f, x, W, bias):
        """A gradient by autograd of what has a gradient by torch.func inside."""
        W, bias = W.clone().requires_grad_(), bias.clone().requires_grad_()
        of_x = grad(lambda x: total(f)(x, W, bias))(x)
        return torch.autograd.grad(of_x.square().sum(), (W, bias))

    found = of_penalty(products.gelu, x, W, bias)
    right = of_penalty(plain(products.gelu), x.double(), W.double(), bias.double())
    assert is_close(found, right, 0.03)


def test_what_torch_func_is_refused():
    x, W, bias = arguments(products.gelu, M, N, K)
    several = torch.stack([W, W + 1])
    says = "vmap maps over W, which all rows of a call share; call gelu for each element"
    with pytest.raises(UnsupportedError, match=says):
        vmap(products.gelu, (None, 0, None))(x, several, bias)
    with pytest.raises(UnsupportedError, match=says):
        vmap(grad(total(products.gelu), 1), (None, 0, None))(x, several, bias)
    with pytest.raises(UnsupportedError, match=says):
        vmap(lambda t: jvp(lambda W: products.gelu(x, W, bias), (t,), (W,)))(several)
    with pytest.raises(UnsupportedError, match=r"gelu: out= inside torch\.func"):
        grad(lambda x: products.gelu(x, W, bias, out=torch.empty(M, N, dtype=BF16)).sum())(x)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"gelu: out= inside torch\.func"):
        fullgraph(lambda x, out: grad(lambda x: products.gelu(x, W, bias, out=out).sum())(x),
                  backend="eager")(x, torch.empty(M, N, dtype=BF16))  # fmt: skip


ALONE = {
    "vmap": (lambda f: vmap(f, ROWS_ONLY), (BATCH, 5)),
    "jvp": (lambda f: lambda x, W, b: jvp(f, (x, W, b), (x, W, b)), (M,)),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", (*OF_BOTH, *ALONE))
def test_transforms_in_a_compiled_graph(name, backend):
    make, lead = (OF_BOTH | ALONE)[name]
    _, W, bias = arguments(products.gelu, M, N, K)
    x = torch.randn(*lead, K, generator=torch.Generator().manual_seed(2)).to(BF16)
    torch.compiler.reset()
    found = fullgraph(make(products.gelu), backend=backend)(x, W, bias)
    right = make(plain(products.gelu))(x.double(), W.double(), bias.double())
    assert all(a.dtype is BF16 for a in tree_leaves(found))
    assert is_close(found, right, 0.03 if name.startswith("second") else 2 * CLOSE)
